"""Checkpoints of FP4 runs: resume to the bit, exchange with plain models both ways, hold plain data only."""

import copy
import pickle

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from torch import nn

from lightning_fp4 import FP4Precision, HotChannelRefresh, convert_to_fp4, get_recipe
from tests.helpers import RTN
from tests.trainer_models import (
    WIDTH,
    LanguageModel,
    Regressor,
    assert_same_weights,
    layers_of,
    plugin,
    trainer,
    weights,
)

SR = get_recipe("nvfp4")
DEFAULT = FP4Precision().recipe
RECIPES = pytest.mark.parametrize("recipe", [RTN, SR, DEFAULT], ids=["rtn", "sr", "default"])


class RenamedPrecision(FP4Precision):
    """A user's subclass; Lightning's own key for plugin state would change with the name."""


def keep(folder, epochs=2):
    """Trainer options: epochs of four steps, and a checkpoint after each (Lightning rewinds data to the epoch)."""
    checkpoints = ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    return {"callbacks": [checkpoints], "enable_checkpointing": True, "max_epochs": epochs}


def steps(model):
    return {name: int(layer.fp4_rng_state[1]) for name, layer in layers_of(model).items()}


@RECIPES
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("resumed_by", [FP4Precision, RenamedPrecision])
def test_resumed_run_equals_straight_run(recipe, precision, resumed_by, tmp_path):
    """T05, with eval loops in between; the plugin's class may have another name by then."""
    straight = Regressor()
    torch.manual_seed(5)
    trainer(plugin(recipe, precision=precision), **keep(tmp_path)).fit(straight)
    assert len(straight.losses) == 8

    resumed = Regressor(seed=1)
    torch.manual_seed(5)
    runner = trainer(resumed_by(recipe, precision=precision), **keep(tmp_path / "resumed"))
    runner.fit(resumed, ckpt_path=tmp_path / "step=4.ckpt")
    assert resumed.losses == straight.losses[4:]
    assert_same_weights(resumed, straight)
    draws = 0 if recipe is RTN else 8
    assert steps(resumed) == steps(straight) == {"net.0": draws, "net.2": draws}
    for name, layer in layers_of(straight).items():
        again = layers_of(resumed)[name].fp4_hot_channels
        assert torch.equal(again, layer.fp4_hot_channels) if recipe is DEFAULT else again is None


def test_resume_after_the_compiled_run_without_compile(tmp_path):
    """State keys are clean names, so the random state finds its layers again (the weights' keys are the user's)."""
    compiled = Regressor()
    compiled.net = torch.compile(compiled.net, backend="eager")
    trainer(plugin(SR), **keep(tmp_path)).fit(compiled)
    checkpoint = torch.load(tmp_path / "step=4.ckpt", weights_only=True)
    checkpoint["state_dict"] = {name.replace("_orig_mod.", ""): v for name, v in checkpoint["state_dict"].items()}
    torch.save(checkpoint, tmp_path / "clean.ckpt")
    eager = Regressor()
    trainer(plugin(SR), max_epochs=2).fit(eager, ckpt_path=tmp_path / "clean.ckpt")
    assert eager.losses == compiled.losses[4:]


def test_checkpoint_is_plain_and_loads_without_the_plugin(tmp_path):
    model = Regressor()
    trainer(plugin(SR), **keep(tmp_path, epochs=1)).fit(model)
    path = tmp_path / "step=4.ckpt"
    checkpoint = torch.load(path, weights_only=True)  # as fit(ckpt_path=...) loads: tensors and builtins only
    assert set(checkpoint["state_dict"]) == set(Regressor().state_dict())
    assert checkpoint["lightning_fp4"] == {"version": 1, "recipe": "nvfp4", "steps": {"net.0": 4, "net.2": 4}}

    loaded = Regressor.load_from_checkpoint(path, weights_only=True)
    assert type(loaded.net[0]) is nn.Linear
    assert_same_weights(loaded, model)
    plain = Regressor()
    trainer(precision="32-true", max_epochs=2).fit(plain, ckpt_path=path)
    assert len(plain.losses) == 4
    assert not layers_of(plain)


def test_plain_checkpoint_into_fp4(tmp_path):
    """There is no state to restore: a fresh start of the random bits, silently; weights and optimizer go on."""
    plain = Regressor()
    trainer(precision="32-true", **keep(tmp_path)).fit(plain)
    path = tmp_path / "step=4.ckpt"
    model = Regressor(seed=1)
    trainer(plugin(SR), max_epochs=2).fit(model, ckpt_path=path)
    assert steps(model) == {"net.0": 4, "net.2": 4}
    assert model.losses[0] == pytest.approx(plain.losses[4], rel=0.1)
    assert model.losses[0] != plain.losses[4]
    assert model.losses[-1] < plain.losses[0]
    # Loading into a model that is FP4 already works too, as nothing but weights is in its state dict.
    convert_to_fp4(model, RTN)
    model.load_state_dict(torch.load(path, weights_only=True)["state_dict"], strict=True)


def test_resume_needs_the_hot_channels(tmp_path):
    """Chosen anew from the first batch after the checkpoint, they would be others."""
    straight = Regressor()
    trainer(plugin(DEFAULT, seed=3), **keep(tmp_path)).fit(straight)
    path = tmp_path / "step=4.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    assert {name: channels.shape for name, channels in checkpoint["lightning_fp4"]["hot_channels"].items()} == {
        "net.0": (16,),
        "net.2": (16,),
    }
    del checkpoint["lightning_fp4"]["hot_channels"]
    torch.save(checkpoint, tmp_path / "without.ckpt")
    losses = []
    for name in ("step=4", "without"):
        model = Regressor(seed=1)
        trainer(plugin(DEFAULT, seed=3), max_epochs=2).fit(model, ckpt_path=tmp_path / f"{name}.ckpt")
        losses.append(model.losses)
    assert losses[0] == straight.losses[4:] != losses[1]


@pytest.mark.parametrize("recipe", [SR, DEFAULT], ids=["sr", "default"])
@pytest.mark.parametrize("entry", ["validate", "test", "predict"])
def test_evaluation_from_a_checkpoint(entry, recipe, tmp_path):
    model = Regressor()
    runner = trainer(plugin(recipe), **keep(tmp_path, epochs=1))
    runner.fit(model)
    path = tmp_path / "step=4.ckpt"
    options = {} if entry == "predict" else {"verbose": False}
    expected = getattr(runner, entry)(model, **options)
    other = Regressor(seed=1)
    actual = getattr(trainer(plugin(recipe)), entry)(other, ckpt_path=path, **options)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    trainer(plugin(recipe)).fit(other)  # nothing that inference_mode made is left behind


def test_save_checkpoint_after_fit_holds_the_state(tmp_path):
    """Teardown comes first, and must leave state and report."""
    fp4, model = plugin(SR), Regressor()
    runner = trainer(fp4)
    runner.fit(model)
    runner.save_checkpoint(tmp_path / "late.ckpt")
    assert torch.load(tmp_path / "late.ckpt")["lightning_fp4"]["steps"] == {"net.0": 4, "net.2": 4}
    assert all(layer["ran"] for layer in fp4.report()["converted"])
    runner.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert "lightning_fp4" not in torch.load(tmp_path / "weights.ckpt")


@pytest.mark.parametrize(
    ("state", "warning"),
    [
        ({"version": 99}, "version 99, this is version 1"),
        ({"version": 1, "recipe": "mxfp4", "steps": {}}, None),
        ({"version": 1, "recipe": "nvfp4", "steps": {"gone": 3, "net.0": 7}}, None),
    ],
)
def test_foreign_state_does_not_stop_a_run(state, warning, tmp_path):
    model = Regressor()
    trainer(plugin(SR), **keep(tmp_path)).fit(model)
    checkpoint = torch.load(tmp_path / "step=4.ckpt")
    checkpoint["lightning_fp4"] = state
    torch.save(checkpoint, tmp_path / "foreign.ckpt")
    again = Regressor()
    with pytest.warns(UserWarning, match=warning or ".*"):
        trainer(plugin(SR), max_epochs=2).fit(again, ckpt_path=tmp_path / "foreign.ckpt")
    first = state.get("steps", {}).get("net.0", 0)
    assert steps(again) == {"net.0": first + 4, "net.2": 4}


def test_resume_with_other_layers_in_fp4(tmp_path):
    """A run that goes on with more layers in FP4 restores those that it knows."""
    model = Regressor()
    trainer(plugin(SR, ignore_modules=["net.2"]), **keep(tmp_path)).fit(model)
    more = Regressor()
    trainer(plugin(SR), max_epochs=2).fit(more, ckpt_path=tmp_path / "step=4.ckpt")
    assert steps(more) == {"net.0": 8, "net.2": 4}


class Widening(Regressor):
    """Layers with smaller sides of 32, 48 and 32."""

    def __init__(self, seed=0):
        super().__init__(seed=seed)
        layers = (nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, WIDTH))
        self.net = nn.Sequential(*layers)

    def on_train_start(self):
        self.restored, self.restored_steps = weights(self), steps(self)


@pytest.mark.parametrize(("before", "after"), [(None, 33), (33, None), (33, 33), (0, None)])
@pytest.mark.parametrize("recipe", [SR, DEFAULT], ids=["sr", "default"])
def test_resume_with_another_min_features(recipe, before, after, tmp_path):
    """Checkpoints are plain, so one made with it loads without it and the other way round; callbacks' states too."""
    every, wide = {"net.0", "net.2", "net.4"}, {"net.2"}
    options = keep(tmp_path)
    options["callbacks"].append(HotChannelRefresh())
    straight, resumed = Widening(), Widening(seed=1)
    trainer(plugin(recipe, seed=3, min_features=before), **options).fit(straight)
    assert set(steps(straight)) == (wide if before else every)
    path = tmp_path / "step=4.ckpt"
    runner = trainer(plugin(recipe, seed=3, min_features=after), max_epochs=2, callbacks=[HotChannelRefresh()])
    runner.fit(resumed, ckpt_path=path)
    saved = torch.load(path, weights_only=True)
    known = saved["lightning_fp4"]["steps"]
    assert set(known) == (wide if before else every)
    assert resumed.restored_steps == {name: known.get(name, 0) for name in (wide if after else every)}
    assert_same_weights(resumed.restored, saved["state_dict"])
    assert len(resumed.losses) == 4
    if (before or 0) == (after or 0):
        assert resumed.losses == straight.losses[4:]
        assert_same_weights(resumed, straight)
    else:
        assert resumed.losses[0] == pytest.approx(straight.losses[4], rel=0.1)
        assert resumed.losses != straight.losses[4:]


@RECIPES
def test_averaging_resumes_with_the_current_weights(recipe, tmp_path):
    """EMA puts the average into the state dict and the current weights beside it; conversion disturbs neither."""

    def run(ckpt_path=None, folder=tmp_path):
        model = Regressor()
        options = keep(folder)
        options["callbacks"].insert(0, EMAWeightAveraging(decay=0.5))
        torch.manual_seed(5)
        trainer(plugin(recipe), **options).fit(model, ckpt_path=ckpt_path)
        return model

    straight = run()
    resumed = run(tmp_path / "step=4.ckpt", tmp_path / "resumed")
    assert resumed.losses == straight.losses[4:]
    assert_same_weights(resumed, straight)
    # The oracle for the average itself: the same callback over a model that was never converted during the run.
    checkpoint = torch.load(tmp_path / "step=4.ckpt")
    assert set(checkpoint["current_model_state"]) == set(checkpoint["state_dict"]) == set(straight.state_dict())
    assert not torch.equal(checkpoint["current_model_state"]["net.0.weight"], checkpoint["state_dict"]["net.0.weight"])


def test_callbacks_see_restored_state_from_train_start_on(tmp_path):
    """Lightning's order: weights, conversion, then the plugin's state, which is there at `on_train_start`."""

    class Observer(pl.Callback):
        def __init__(self):
            self.seen = {}

        def setup(self, trainer, pl_module, stage):
            self.seen["setup"] = len(layers_of(pl_module))

        def on_fit_start(self, trainer, pl_module):
            self.seen["fit_start"] = steps(pl_module)

        def on_train_start(self, trainer, pl_module):
            self.seen["train_start"] = steps(pl_module)

    trainer(plugin(SR), **keep(tmp_path)).fit(Regressor())
    observer = Observer()
    trainer(plugin(SR), max_epochs=2, callbacks=[observer]).fit(Regressor(), ckpt_path=tmp_path / "step=4.ckpt")
    assert observer.seen == {
        "setup": 0,
        "fit_start": {"net.0": 0, "net.2": 0},
        "train_start": {"net.0": 4, "net.2": 4},
    }


def test_learning_rate_finder_restores_weights_and_random_state():
    """Lightning saves and restores a checkpoint around it."""

    class Tunable(Regressor):
        def __init__(self):
            super().__init__()
            self.lr = 1e-3

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=self.lr)

    model = Tunable()
    before = weights(model)
    runner = trainer(plugin(SR), max_epochs=1)
    Tuner(runner).lr_find(model, num_training=5, update_attr=False)
    assert_same_weights(model, before)
    assert steps(model) == {"net.0": 0, "net.2": 0}


def test_going_back_to_before_the_first_step_forgets_the_hot_channels():
    """The learning rate finder ends there. The run that follows chooses its own, and rank 0's go to all ranks again."""
    fp4, model = plugin("chon"), Regressor()
    runner = trainer(fp4)
    Tuner(runner).lr_find(model, num_training=5, update_attr=False)
    assert all(layer.fp4_hot_channels is None for layer in layers_of(model).values())
    assert not fp4._shared_hot_channels
    trainer(fp4, max_steps=1).fit(model)
    assert all(layer.fp4_hot_channels is not None for layer in layers_of(model).values())
    assert fp4._shared_hot_channels


def test_tied_weights_resume(tmp_path):
    straight, resumed = LanguageModel(), LanguageModel()
    trainer(plugin(), **keep(tmp_path)).fit(straight)
    trainer(plugin(), max_epochs=2).fit(resumed, ckpt_path=tmp_path / "step=4.ckpt")
    assert resumed.losses == straight.losses[4:]
    assert resumed.model.lm_head.weight is resumed.model.embed_tokens.weight


# ----------------------------------------------------------------------------------------------------------------------
# Copies and pickles
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_plugin_copies(copied):
    """T24: a copy has the settings and none of the model; before and after a run."""
    fp4 = plugin(SR, ignore_modules=["head"], seed=3, eval_precision="base", precision="bf16-mixed")
    for _ in range(2):
        twin = copied(fp4)
        assert (twin.recipe, twin.precision, twin.seed) == (SR, "bf16-mixed", 3)
        assert (twin.eval_precision, twin.choice) == (fp4.eval_precision, fp4.choice)
        with pytest.raises(RuntimeError, match="has not converted a model yet"):
            twin.report()
        model, expected = Regressor(), Regressor()
        trainer(twin).fit(model)
        trainer(fp4).fit(expected)
        assert model.losses == expected.losses


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_trained_model_copies(copied):
    """T24: a copy of an FP4 model computes the same, shares nothing, and trains on its own."""
    model = Regressor()
    trainer(plugin(SR)).fit(model)
    model.trainer = None
    twin = copied(model)
    data = next(iter(model.loader()))
    assert torch.equal(twin.net(data), model.net(data))
    before = weights(model)
    states = steps(model)
    trainer(plugin(SR)).fit(twin)
    assert_same_weights(model, before)
    assert steps(model) == states
    assert steps(twin) == {"net.0": 8, "net.2": 8}


def test_filter_function_and_pickling():
    """ddp_spawn pickles the plugin: a module-level function works, and Python names the lambda that does not."""
    twin = pickle.loads(pickle.dumps(plugin(filter_fn=_first_only)))
    assert twin.choice["filter_fn"] is _first_only
    fp4 = plugin(filter_fn=lambda module, name: True)
    assert copy.deepcopy(fp4).choice["filter_fn"] is fp4.choice["filter_fn"]
    with pytest.raises((AttributeError, pickle.PicklingError), match=r"lambda"):
        pickle.dumps(fp4)


def _first_only(module: nn.Module, name: str) -> bool:
    return name.endswith("0")
