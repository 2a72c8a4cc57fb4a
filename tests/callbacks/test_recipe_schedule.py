"""RecipeSchedule and AverisToggle: what holds when."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_fp4 import AverisToggle, Centering, RecipeSchedule, get_recipe
from lightning_fp4.callbacks.recipe_schedule import change_recipe, current_entry
from tests.helpers import RTN, without_blocks
from tests.trainer_models import Regressor, assert_same_weights, layers_of, messages, plugin, trainer

FORWARD = {"high_precision": ["fprop"]}


class Watch(Callback):
    """What recipe the first layer has in each batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        recipe = next(iter(layers_of(pl_module).values())).fp4_recipe
        self.seen.append(recipe)


def kinds(watch):
    def kind(recipe):
        if not recipe.quantizes:
            return "-"
        center = recipe.dgrad is not None and recipe.dgrad.lhs.center is not None
        return ("c" if center else "") + ("f" if recipe.fprop is None else "q")

    return " ".join(kind(recipe) for recipe in watch.seen)


def fit(schedule, *, model=None, ckpt_path=None, callbacks=(), **options):
    watch = Watch()
    model = model or Regressor()
    t = trainer(plugin(), callbacks=[schedule, watch, *callbacks], **options)
    t.fit(model, ckpt_path=ckpt_path)
    return watch, model, t


def test_forward_in_bf16_for_the_last_18_per_cent():
    watch, _, _ = fit(RecipeSchedule({0.82: FORWARD}), max_epochs=5)  # 20 steps
    assert kinds(watch) == " ".join(["q"] * 17 + ["f"] * 3)  # ceil(16.4)


def test_warm_up_in_bf16_then_fp4():
    watch, _, _ = fit(RecipeSchedule({0: "high_precision", 2: "initial"}))
    assert kinds(watch) == "- - q q"


def test_by_epoch_and_by_fraction_of_the_epochs():
    watch, _, _ = fit(RecipeSchedule({1: "high_precision"}, by="epoch"), max_epochs=2)
    assert kinds(watch) == "q q q q - - - -"
    watch, _, _ = fit(RecipeSchedule({0.5: "high_precision"}, by="epoch"), max_epochs=4)
    assert kinds(watch) == " ".join(["q"] * 8 + ["-"] * 8)


def test_accumulation_counts_optimizer_steps():
    watch, _, _ = fit(RecipeSchedule({1: "high_precision"}), accumulate_grad_batches=2)
    assert kinds(watch) == "q q - -"


def test_a_metric_latches():
    class Falling(Regressor):
        def training_step(self, batch, batch_idx):
            self.log("quality", torch.tensor([1.0, 0.4, 0.9, 0.1][batch_idx]))
            return super().training_step(batch, batch_idx)

    schedule = RecipeSchedule({0.5: FORWARD, 0.2: "high_precision"}, monitor="quality")
    watch, _, _ = fit(schedule, model=Falling(samples=32))
    assert kinds(watch) == "q q f f"
    watch, _, _ = fit(schedule, model=Falling(), max_epochs=2)
    assert kinds(watch).endswith("- - - -")
    again = RecipeSchedule({0.5: FORWARD, 0.2: "high_precision"}, monitor="quality")
    again.load_state_dict(schedule.state_dict())
    assert again._reached == 0.2


def test_whole_recipes_apply_their_rules_and_initial_ones_come_back():
    chon = without_blocks(get_recipe("chon"))
    watch, model, _ = fit(RecipeSchedule({0: chon, 1: {"name": "mxfp4"}, 2: "initial"}))
    assert watch.seen == [chon, get_recipe("mxfp4"), RTN, RTN]
    assert {layer.fp4_recipe for layer in layers_of(model).values()} == {RTN}


def test_a_second_fit_begins_where_the_first_did():
    schedule = RecipeSchedule({2: "high_precision"})
    _, model, _ = fit(schedule)
    watch, _, _ = fit(schedule, model=model)
    assert kinds(watch) == "q q - -"


def test_resume_is_exact(tmp_path):
    def schedule():
        return RecipeSchedule({3: FORWARD})

    _, straight, _ = fit(schedule(), max_epochs=2)
    save = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=4, save_top_k=-1)
    fit(schedule(), callbacks=[save], enable_checkpointing=True)
    watch, resumed, _ = fit(schedule(), max_epochs=2, ckpt_path=str(tmp_path / "epoch=0-step=4.ckpt"))
    assert kinds(watch) == "f f f f"
    assert_same_weights(resumed, straight)


def test_the_switch_equals_a_run_with_the_other_recipe_from_there(tmp_path):
    _, model, _ = fit(RecipeSchedule({4: "high_precision"}), max_epochs=2)
    _, _, t = fit(RecipeSchedule({99: "high_precision"}))
    t.save_checkpoint(tmp_path / "four.ckpt")
    _, plain, _ = fit(RecipeSchedule({0: "high_precision"}), max_epochs=2, ckpt_path=str(tmp_path / "four.ckpt"))
    assert_same_weights(plain, model)


def test_validation_uses_what_training_does_and_validate_alone_changes_nothing():
    schedule = RecipeSchedule({0: "high_precision"})
    model = Regressor()
    t = trainer(plugin(), callbacks=[schedule])
    t.validate(model, verbose=False)
    assert {layer.fp4_recipe for layer in layers_of(model).values()} == {RTN}
    t.fit(model)
    assert all(not layer.fp4_recipe.quantizes for layer in layers_of(model).values())


def test_it_says_so(caplog):
    with caplog.at_level("INFO"):
        fit(RecipeSchedule({2: "high_precision"}))
        fit(AverisToggle({1: True}, verbose=False))
    said = [m for m in messages(caplog) if "RecipeSchedule" in m or "AverisToggle" in m]
    assert said == ["RecipeSchedule: from optimizer step 2 on, 2 FP4 layers use 'high_precision'."] or len(said) == 1


def test_without_fp4_layers_it_warns():
    with pytest.warns(UserWarning, match="found no FP4 layers"):
        trainer(callbacks=[RecipeSchedule({0: "nvfp4"})]).fit(Regressor())


def test_averis_toggle():
    watch, _, _ = fit(AverisToggle({1: True, 3: False}))
    assert kinds(watch) == "q cq cq q"
    assert watch.seen[1] == RTN.with_centering(Centering())


@pytest.mark.slow
def test_compiled_inner_module_follows():
    class Compiled(Regressor):
        def __init__(self):
            super().__init__()
            self.net = torch.compile(self.net, backend="aot_eager")

    _, compiled, _ = fit(AverisToggle({2: True}), model=Compiled())
    _, eager, _ = fit(AverisToggle({2: True}))
    assert compiled.losses == eager.losses


def test_several_schedules_in_one_run():
    watch, _, _ = fit(AverisToggle({0: True}), callbacks=[RecipeSchedule({2: FORWARD})])
    assert kinds(watch)[:5] == "cq cq"


class Forwarding(Callback):
    """Calls another callback, which the Trainer does not know of."""

    def __init__(self, callback):
        for hook in ("on_train_start", "on_train_epoch_start", "on_train_batch_start"):
            setattr(self, hook, getattr(callback, hook))


def test_a_wrapped_schedule_counts_itself():
    schedule = RecipeSchedule({0: "high_precision", 1: "initial", 3: FORWARD})
    watch, model, _ = fit(Forwarding(schedule))
    assert kinds(watch) == "- q q f"
    watch, _, _ = fit(Forwarding(schedule), model=model)
    assert kinds(watch) == "- q q f"


def test_a_wrapped_schedule_beside_a_listed_one_warns():
    with pytest.warns(UserWarning, match="not among `Trainer\\(callbacks=...\\)`"):
        fit(Forwarding(RecipeSchedule({3: FORWARD})), callbacks=[AverisToggle({0: True})])


def test_a_fraction_of_a_run_without_end_is_refused():
    with pytest.raises(MisconfigurationException, match="no end"):
        fit(RecipeSchedule({0.5: "high_precision"}), max_epochs=-1)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ({}, {}, "must map when"),
        ({"soon": "nvfp4"}, {}, "must be a number"),
        ({-1: "nvfp4"}, {}, "whole number"),
        ({1.5: "nvfp4"}, {}, "whole number"),
        ({0: "nvfp5"}, {}, "not a known recipe"),
        ({0: {"high_precision": "fprop"}}, {}, "list of GEMMs"),
        ({0: {"high_precision": ["forward"]}}, {}, "no GEMM"),
        ({0: {"hp": []}}, {}, "not 'hp'"),
        ({0: None}, {}, "no recipe of a schedule"),
        ({0: "nvfp4"}, {"by": "day"}, "by='day'"),
        ({0: "nvfp4"}, {"mode": "up"}, "mode='up'"),
    ],
)
def test_wrong_arguments(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        RecipeSchedule(arguments, **options)


def test_averis_toggle_takes_true_and_false_only():
    with pytest.raises(ValueError, match="True or False"):
        AverisToggle({0: "on"})


def test_keys_from_files_may_be_strings():
    assert RecipeSchedule({"500": "nvfp4", "0.82": FORWARD}).schedule == {500: "nvfp4", 0.82: FORWARD}


def test_entries():
    assert current_entry([5, 0, 2], 4) == 2
    assert current_entry([5, 2], 1) is None
    both = change_recipe(get_recipe("nvfp4"), {"averis": True, "high_precision": ["wgrad"]})
    assert both.wgrad is None
    assert both.fprop.lhs.center == Centering()


@pytest.mark.parametrize("toggle_first", [False, True])
def test_schedules_compose_in_either_order(toggle_first):
    """The toggle must not bring back the warm-up in high precision, nor the finish take back the toggle."""
    schedule, toggle = (
        RecipeSchedule({0: "high_precision", 2: "initial", 6: FORWARD}),
        AverisToggle({0: False, 4: True}),
    )
    first, second = (toggle, schedule) if toggle_first else (schedule, toggle)
    watch, model, _ = fit(first, callbacks=[second], max_epochs=2)
    assert kinds(watch) == "- - q q cq cq cf cf"
    again, _, _ = fit(first, model=model, callbacks=[second], max_epochs=2)
    assert kinds(again) == "- - q q cq cq cf cf"
