"""FP4Precision under a Trainer on one CPU process: what it converts, when, and what it computes."""

import copy
import logging
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from lightning_fp4 import FP4Linear, FP4Precision, convert_to_fp4, fabric, get_recipe, revert_from_fp4
from tests.helpers import RTN, relative_error
from tests.trainer_models import (
    WIDTH,
    LanguageModel,
    Regressor,
    adamw,
    assert_same_weights,
    layers_of,
    messages,
    plugin,
    sgd,
    trainer,
    weights,
)

SR = get_recipe("nvfp4")


# ----------------------------------------------------------------------------------------------------------------------
# FP4 is on, and only where it should be
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_training_runs_in_fp4(precision):
    """The loss falls, and differs from that of a run without FP4 as much as four bits make it differ, no more."""
    plain, fp4 = Regressor(samples=128), Regressor(samples=128)
    trainer(precision=precision).fit(plain)
    trainer(plugin(SR, precision=precision)).fit(fp4)
    assert fp4.losses[-1] < 0.95 * fp4.losses[0]
    assert 1e-4 < abs(fp4.losses[0] / plain.losses[0] - 1) < 0.1
    assert fp4.losses[-1] == pytest.approx(plain.losses[-1], rel=0.15)
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert {p.dtype for p in fp4.parameters()} == {dtype}


def test_high_precision_recipe_equals_plain_lightning_to_the_bit():
    class Recording(BoringModel):
        def training_step(self, batch, batch_idx):
            output = super().training_step(batch, batch_idx)
            self.losses.append(output["loss"].item())
            return output

    def run(**kwargs):
        torch.manual_seed(0)
        model = Recording()
        model.losses = []
        trainer(limit_train_batches=20, limit_val_batches=2, max_epochs=2, **kwargs).fit(model)
        return model

    plain, ours = run(precision="32-true"), run(plugins=[plugin("high_precision")])
    assert len(plain.losses) == 40
    assert ours.losses == plain.losses
    assert_same_weights(ours, plain)
    assert isinstance(ours.layer, FP4Linear)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_high_precision_recipe_equals_plain_lightning_in_bfloat16(precision):
    plain, ours = Regressor(), Regressor()
    trainer(precision=precision).fit(plain)
    trainer(plugin("high_precision", precision=precision)).fit(ours)
    assert ours.losses == pytest.approx(plain.losses, rel=2e-2)
    assert [p.dtype for p in ours.parameters()] == [p.dtype for p in plain.parameters()]


class Unfreezing(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)


@pytest.mark.parametrize(
    "callback",
    [
        partial(EMAWeightAveraging, decay=0.5),
        partial(WeightAveraging, use_buffers=False),
        partial(StochasticWeightAveraging, swa_lrs=1e-2, swa_epoch_start=1),
        partial(GradientAccumulationScheduler, {0: 2, 1: 1}),
        Unfreezing,
    ],
    ids=["ema", "averaging", "swa", "accumulation", "finetuning"],
)
def test_callbacks_find_what_they_expect(callback):
    """Callbacks that copy, pair or freeze parameters do the same to a converted model as to a plain one."""

    class Mixed(Regressor):
        def __init__(self):
            super().__init__(partial(_trainable, sgd))
            self.net = nn.Sequential(*self.net, nn.BatchNorm1d(WIDTH))

    plain, ours = Mixed(), Mixed()
    trainer(precision="32-true", max_epochs=3, callbacks=[callback()]).fit(plain)
    trainer(plugin("high_precision"), max_epochs=3, callbacks=[callback()]).fit(ours)
    assert ours.losses == plain.losses
    assert_same_weights(ours, plain)
    assert len(layers_of(ours)) == 2


def _trainable(optimizer, parameters):
    return optimizer([p for p in parameters if p.requires_grad])


class ForwardOracle(pl.Callback):
    """At each forward of each layer: the output is that of a new FP4 layer with the layer's present weight."""

    def __init__(self):
        self.checked = 0

    def on_train_start(self, trainer, pl_module):
        self.handles = [layer.register_forward_hook(self.compare) for layer in layers_of(pl_module).values()]

    def on_train_end(self, trainer, pl_module):
        for handle in self.handles:
            handle.remove()

    @torch.no_grad()
    def compare(self, layer, args, output):
        fresh = nn.Linear(layer.in_features, layer.out_features)
        fresh.load_state_dict({name: p.detach().clone() for name, p in layer.named_parameters()})
        fresh.to(layer.weight.dtype)
        convert_to_fp4(fresh, layer.fp4_recipe)
        assert torch.equal(fresh(args[0]), output)
        self.checked += 1


@pytest.mark.parametrize(
    "optimizer",
    [
        adamw,
        partial(adamw, foreach=True),
        partial(adamw, fused=True),
        partial(sgd, fused=True),
    ],
    ids=["adamw", "adamw-foreach", "adamw-fused", "sgd-fused"],
)
@pytest.mark.parametrize("averaging", [False, True], ids=["", "ema"])
def test_forward_uses_the_current_weight(optimizer, averaging):
    """T01: fused optimizers and weight averaging change weights without a trace that a cache could watch."""
    oracle = ForwardOracle()
    callbacks = [oracle, *([EMAWeightAveraging(decay=0.5)] if averaging else [])]
    model = Regressor(optimizer)
    before = weights(model)
    trainer(plugin(precision="bf16-mixed"), max_epochs=2, callbacks=callbacks).fit(model)
    assert oracle.checked == 2 * (2 * 4 + 2 * 4)  # layers, epochs, batches of training and validation
    assert all(not torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_gradients_flow_after_a_pass_without_grad():
    """Autocast must not keep the weights' bfloat16 copies of a pass under no_grad: kept layers would not learn."""

    class TwoPasses(Regressor):
        def training_step(self, batch, batch_idx):
            with torch.no_grad():
                self.net(batch)
            return super().training_step(batch, batch_idx)

    once, twice = Regressor(), TwoPasses()
    for model in (once, twice):
        trainer(plugin(precision="bf16-mixed", ignore_modules=["net.2"])).fit(model)
    assert not isinstance(twice.net[2], FP4Linear)
    assert twice.losses == once.losses
    assert_same_weights(twice, once)


# ----------------------------------------------------------------------------------------------------------------------
# Conversion within the Trainer's life
# ----------------------------------------------------------------------------------------------------------------------


def test_conversion_keeps_parameters_ties_hooks_flags_and_mode():
    model = Regressor()
    first, last = model.net[0], model.net[2]
    last.weight = first.weight  # tied to each other
    first.bias.requires_grad_(False)
    calls = []
    last.register_forward_hook(lambda *_: calls.append(1))
    parameters, keys = list(model.parameters()), list(model.state_dict())
    trainer(plugin()).fit(model)
    assert model.net[0] is first
    assert isinstance(first, FP4Linear)
    assert isinstance(last, nn.Linear)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert first.weight is last.weight
    assert not first.bias.requires_grad
    assert first.bias.grad is None
    assert len(calls) == 8  # four training, four validation batches
    assert list(model.state_dict()) == keys
    assert not list(model.buffers())


def test_tied_language_model():
    """T06: the head stays tied to the embedding, is kept by default, and still is after training."""
    model = LanguageModel()
    count = len(list(model.parameters()))
    fp4 = plugin()
    trainer(fp4, max_epochs=2).fit(model)
    assert model.model.lm_head.weight is model.model.embed_tokens.weight
    assert len(list(model.parameters())) == count
    kept = {layer["name"]: layer["reason"] for layer in fp4.report()["kept"]}
    assert kept == {"model.lm_head": "weight tied to model.embed_tokens"}
    assert model.losses[-1] < model.losses[0]


def test_tied_head_in_fp4_gets_the_gradient_of_both_uses():
    """T06: if the user insists on a four-bit head, the embedding's gradient is the sum over both paths."""
    tied = LanguageModel()
    fp4 = plugin(filter_fn=lambda module, name: name == "model.lm_head")
    trainer(fp4, max_steps=1, limit_train_batches=1).fit(tied)
    assert isinstance(tied.model.lm_head, FP4Linear)
    assert tied.model.lm_head.weight is tied.model.embed_tokens.weight

    separate, again = LanguageModel(tied=False), LanguageModel()
    separate.load_state_dict({**again.state_dict()})
    for model in (separate, again):
        convert_to_fp4(model, RTN, filter_fn=lambda module, name: name == "model.lm_head")
        model.training_step(next(iter(model.train_dataloader())), 0).backward()
    expected = separate.model.lm_head.weight.grad + separate.model.embed_tokens.weight.grad
    torch.testing.assert_close(again.model.embed_tokens.weight.grad, expected)


def test_validate_fit_test_predict_with_one_plugin():
    """Conversion happens at each entry, once; inference_mode leaves nothing behind that a later fit trips over."""
    fp4, model = plugin(SR), Regressor()
    runner = trainer(fp4, max_epochs=2)
    before = runner.validate(model, verbose=False)
    assert len(layers_of(model)) == 2
    runner.fit(model)
    after = runner.validate(model, verbose=False)
    assert after[0]["val_loss"] < before[0]["val_loss"]
    assert runner.test(model, verbose=False)[0]["test_loss"] == pytest.approx(after[0]["val_loss"])
    predicted = torch.cat(runner.predict(model))
    data = torch.cat(list(model.loader()))
    plain = revert_from_fp4(copy.deepcopy(model)).net(data)
    assert 0.02 < relative_error(predicted, plain) < 0.3


@pytest.mark.parametrize("recipe", [RTN, SR, "chon"], ids=["rtn", "sr", "chon"])
@pytest.mark.parametrize("first", ["nothing", "sanity", "validate", "predict"])
def test_evaluation_before_training_changes_nothing(recipe, first):
    """T10: the gradients after a sanity check or a validate() are those without."""
    expected = Regressor()
    trainer(plugin(recipe)).fit(expected)
    model = Regressor()
    runner = trainer(plugin(recipe), num_sanity_val_steps=2 if first == "sanity" else 0)
    if first in ("validate", "predict"):
        getattr(runner, first)(model, **({"verbose": False} if first == "validate" else {}))
    runner.fit(model)
    assert model.losses == expected.losses
    assert_same_weights(model, expected)


@pytest.mark.parametrize("entry", ["validate", "predict"])
def test_default_recipe_without_training_is_four_over_six_with_1x16_weights(entry, recwarn):
    """No batch has said which channels are hot, and nothing is picked or warned of."""
    options = {"verbose": False} if entry == "validate" else {}
    plain, model = get_recipe("four_over_six", weight_2d=False), Regressor()
    actual = getattr(trainer(FP4Precision(precision="32-true")), entry)(model, **options)
    expected = getattr(trainer(plugin(plain)), entry)(Regressor(), **options)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert all(layer.fp4_hot_channels is None for layer in layers_of(model).values())
    assert not [w for w in recwarn if "hot channels" in str(w.message)]


def test_second_fit_goes_on():
    """The same Trainer twice, then another Trainer with its own plugin: still converted once, still training."""
    model = Regressor()
    runner = trainer(plugin())
    runner.fit(model)
    layer = model.net[0]
    state = layer.fp4_rng_state
    runner.fit_loop.max_epochs = 2
    runner.fit(model)
    trainer(plugin()).fit(model)
    assert model.net[0] is layer
    assert type(layer) is FP4Linear
    assert layer.fp4_rng_state is state
    assert model.losses[8] < model.losses[4] < model.losses[0]  # the same batch each time


def test_fit_then_a_trainer_without_fp4():
    """The layers stay FP4, as with Lightning's other converting plugins; `revert_from_fp4` takes it back."""
    model = Regressor()
    trainer(plugin()).fit(model)
    trainer(precision="32-true").fit(model)
    assert len(layers_of(model)) == 2
    plain = Regressor()
    plain.load_state_dict(revert_from_fp4(model).state_dict())
    model.losses.clear()
    for each in (model, plain):
        trainer(precision="32-true").fit(each)
    assert type(model.net[0]) is nn.Linear
    assert model.losses == plain.losses


def test_already_converted_model_keeps_its_recipe(caplog):
    """Conversion in `__init__` or `configure_model`, before FSDP2 shards, is a supported way."""
    model = Regressor()
    convert_to_fp4(model.net[0], "mxfp4")
    caplog.set_level(logging.INFO)
    fp4 = plugin("nvfp4")
    trainer(fp4).fit(model)
    recipes = {layer["name"]: layer["recipe"] for layer in fp4.report()["converted"]}
    assert recipes == {"net.0": "mxfp4", "net.2": "nvfp4"}
    assert any("1 layers were FP4 already and keep their recipe" in message for message in messages(caplog))


def test_layers_made_in_configure_model_are_converted():
    class Late(Regressor):
        def __init__(self):
            super().__init__()
            self.net = None

        def configure_model(self):
            if self.net is None:
                torch.manual_seed(0)
                self.dtype_inside = torch.get_default_dtype()
                self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    model = Late()
    trainer(plugin(precision="bf16-true")).fit(model)
    assert len(layers_of(model)) == 2
    assert model.dtype_inside is torch.bfloat16
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize("way", ["wrapped", "wrapped and run", "in place", "whole"])
def test_compiled_model(way):
    """Names are clean: `_orig_mod.` is in the way of neither `ignore_modules` nor the state's keys."""
    torch._dynamo.reset()
    compiled = model = Regressor()
    if way == "in place":
        model.net.compile(backend="eager")
    elif way == "whole":
        # Lightning 2.6.6 cannot trace `self.log` in a compiled LightningModule; without logging it can.
        compiled = torch.compile(model, backend="eager")
    else:
        model.net = torch.compile(model.net, backend="eager")
    if way == "wrapped and run":
        model.net(torch.ones(8, WIDTH))
    fp4 = plugin(SR, ignore_modules=["net.2"])
    runner = trainer(fp4, limit_val_batches=0)
    runner.fit(compiled)
    assert [layer["name"] for layer in fp4.report()["converted"]] == ["net.0"]
    assert fp4.report()["converted"][0]["ran"]
    checkpoint = runner._checkpoint_connector.dump_checkpoint()
    assert checkpoint["lightning_fp4"]["steps"] == {"net.0": 4}
    eager = Regressor()
    trainer(plugin(SR, ignore_modules=["net.2"]), limit_val_batches=0).fit(eager)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), eager.parameters(), strict=True))
    assert model.losses == eager.losses


def test_trainer_init_module_and_integer_input():
    """`Trainer.init_module` gives parameters in the plugin's dtype; tokens stay integers."""
    runner = trainer(plugin(SR, precision="bf16-true"), max_epochs=2)
    with runner.init_module():
        model = LanguageModel()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    runner.fit(model)
    assert model.losses[-1] < model.losses[0]


def test_complex_buffers_survive_true_precisions():
    """`module.to(dtype)` would drop the imaginary part of rotary frequencies."""
    model = Regressor()
    frequencies = torch.polar(torch.ones(4), torch.arange(4.0))
    model.register_buffer("frequencies", frequencies.clone())
    for precision in ("32-true", "bf16-true"):
        trainer(plugin(precision=precision), max_steps=1).fit(model)
        assert torch.equal(model.frequencies, frequencies)


# ----------------------------------------------------------------------------------------------------------------------
# Contexts and input
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "32-true"])
@pytest.mark.parametrize("stage", ["training", "validation", "test", "predict"])
def test_default_dtype_and_recipes_are_restored_after_an_exception(precision, stage):
    class Failing(Regressor):
        def fail(self, *_):
            assert torch.get_default_dtype() is (torch.bfloat16 if precision == "bf16-true" else torch.float32)
            assert torch.is_autocast_enabled("cpu") is (precision == "bf16-mixed")
            raise ZeroDivisionError

    model = Failing()
    setattr(model, f"{stage}_step", model.fail)
    run = {"training": "fit", "validation": "validate"}.get(stage, stage)
    with pytest.raises(ZeroDivisionError):
        getattr(trainer(plugin(precision=precision, eval_precision="base")), run)(model)
    assert torch.get_default_dtype() is torch.float32
    assert not torch.is_autocast_enabled("cpu")
    assert {layer.fp4_recipe for layer in layers_of(model).values()} == {RTN}


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "32-true"])
def test_convert_input(precision):
    batch = {
        "tokens": torch.arange(3),
        "mask": torch.tensor([True]),
        "x": torch.ones(2, dtype=torch.float32),
        "y": torch.ones(2, dtype=torch.float64),
        "text": "a",
        "nothing": None,
    }
    converted = plugin(precision=precision).convert_input(batch)
    for name in ("tokens", "mask", "text", "nothing"):
        assert converted[name] is batch[name]
    cast = precision == "bf16-true"
    assert converted["x"].dtype is (torch.bfloat16 if cast else torch.float32)
    assert converted["y"].dtype is (torch.bfloat16 if cast else torch.float64)


@pytest.mark.parametrize("cls", [FP4Precision, fabric.FP4Precision])
def test_autocast_is_where_the_model_computes(cls, monkeypatch):
    """Weights offloaded to the CPU compute on the GPU, and a CPU run on a machine with a GPU computes on the CPU."""
    fp4, model = cls(), Regressor()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    for device in map(torch.device, ("cuda", "cpu")):
        if cls is FP4Precision:
            fp4._convert(model, device)
            assert fp4._device_types() == {device.type}
        else:  # Fabric does not tell
            fp4._convert(model)
            assert fp4._device_types() == {"cpu", "cuda"}
    assert cls(precision="bf16-mixed")._device_types() == {"cuda"}


def test_contexts_can_be_entered_again():
    fp4 = plugin(precision="bf16-true")
    for _ in range(2):
        with fp4.forward_context(), fp4.train_step_context(), fp4.val_step_context(), fp4.module_init_context():
            assert torch.get_default_dtype() is torch.bfloat16
    assert torch.get_default_dtype() is torch.float32
