"""FP4Precision and the loop around it: recipes in mid-run, optimizers, accumulation, clipping."""

import copy
import dataclasses
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import ManualOptimBoringModel
from torch import nn
from torch.utils.data import DataLoader

from lightning_fp4 import get_recipe, revert_from_fp4, set_recipe
from tests.helpers import RTN, relative_error
from tests.trainer_models import (
    Regressor,
    adamw,
    assert_same_weights,
    layers_of,
    plugin,
    sgd,
    trainer,
    weights,
)

SR = get_recipe("nvfp4")


# ----------------------------------------------------------------------------------------------------------------------
# Evaluation in the base precision, and other recipes in the middle of a run
# ----------------------------------------------------------------------------------------------------------------------


def test_eval_precision_base():
    """Evaluation computes what the plain model computes, training still what FP4 computes."""
    fp4, model = plugin(eval_precision="base"), Regressor()
    runner = trainer(fp4, max_epochs=2)
    runner.fit(model)
    in_fp4 = Regressor()
    trainer(plugin(), max_epochs=2).fit(in_fp4)
    assert model.losses == in_fp4.losses

    result = runner.validate(model, verbose=False)[0]["val_loss"]
    tested = runner.test(model, verbose=False)[0]["test_loss"]
    predicted = torch.cat(runner.predict(model))
    plain = revert_from_fp4(copy.deepcopy(model))
    assert trainer().validate(plain, verbose=False)[0]["val_loss"] == result == tested
    assert torch.equal(torch.cat(trainer().predict(plain)), predicted)
    assert not torch.equal(torch.cat(trainer(plugin()).predict(model)), predicted)


def test_report_tells_what_training_ran_though_evaluation_ran_in_base():
    fp4 = plugin(eval_precision="base")
    trainer(fp4).fit(Regressor())  # its last batch is one of validation
    for layer in fp4.report()["converted"]:
        assert layer["gemm_paths"] == {"fprop": "fp32", "dgrad": "fp32", "wgrad": "fp32"} or layer["name"] == "net.0"
        assert layer["gemm_paths"]["fprop"] == "fp32"


class Switch(pl.Callback):
    """Sets recipes before the steps that it is told."""

    def __init__(self, recipes):
        self.recipes = recipes

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx in self.recipes:
            set_recipe(pl_module, self.recipes[batch_idx])


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_recipe_switched_mid_run(precision):
    """T25: to high precision for two steps and back; from the switch on, losses are those of such a run from there."""
    high = get_recipe("high_precision")
    forward_only = dataclasses.replace(RTN, name="forward_only", dgrad=None, wgrad=None)
    model = Regressor(samples=64)  # eight steps

    captured = {}

    class Capture(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            captured[batch_idx] = (weights(pl_module), copy.deepcopy(trainer.optimizers[0].state_dict()))

    schedule = {2: high, 4: RTN, 6: forward_only}
    trainer(plugin(precision=precision), callbacks=[Switch(schedule), Capture()]).fit(model)
    batches = list(model.loader())
    for start, recipe in {0: RTN, **schedule}.items():
        branch = Regressor(samples=64)
        state, optimizer_state = captured[start]
        branch.load_state_dict(state)

        class Continue(pl.Callback):
            def __init__(self, state):
                self.state = state

            def on_train_start(self, trainer, pl_module):
                trainer.optimizers[0].load_state_dict(self.state)

        trainer(plugin(recipe, precision=precision), callbacks=[Continue(optimizer_state)]).fit(
            branch, DataLoader(torch.cat(batches[start : start + 2]), batch_size=8)
        )
        assert model.losses[start : start + 2] == branch.losses


# ----------------------------------------------------------------------------------------------------------------------
# Optimizers, accumulation and clipping
# ----------------------------------------------------------------------------------------------------------------------


class Gradients(pl.Callback):
    """Keeps the gradients before and after clipping, of every optimizer step."""

    def __init__(self):
        self.raw, self.clipped = [], []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.raw.append([p.grad.clone() for p in pl_module.parameters()])

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        if pl_module.net[0].weight.grad is not None:
            self.clipped.append([p.grad.clone() for p in pl_module.parameters()])


@pytest.mark.parametrize("optimizer", [adamw, partial(adamw, fused=True)], ids=["adamw", "fused"])
@pytest.mark.parametrize(("algorithm", "limit"), [("norm", 0.05), ("value", 0.003)])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_gradient_clipping(optimizer, algorithm, limit, precision):
    """T29: what PyTorch makes of the same gradients; with fused optimizers too, which Lightning's AMP refuses."""
    seen = Gradients()
    trainer(
        plugin(precision=precision),
        gradient_clip_val=limit,
        gradient_clip_algorithm=algorithm,
        callbacks=[seen],
    ).fit(Regressor(optimizer))
    assert len(seen.raw) == 4
    assert len(seen.clipped) == 3
    for raw, clipped in zip(seen.raw, seen.clipped, strict=False):
        parameters = [nn.Parameter(torch.zeros_like(g)) for g in raw]
        for parameter, gradient in zip(parameters, raw, strict=True):
            parameter.grad = gradient.clone()
        if algorithm == "norm":
            assert nn.utils.clip_grad_norm_(parameters, limit) > limit
        else:
            nn.utils.clip_grad_value_(parameters, limit)
        for parameter, gradient in zip(parameters, clipped, strict=True):
            assert torch.equal(parameter.grad, gradient)


class Manual(Regressor):
    """Manual optimisation with clipping."""

    def __init__(self, clip=None):
        super().__init__()
        self.automatic_optimization = False
        self.clip = clip

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.step(batch)
        self.manual_backward(loss)
        if self.clip:
            self.clip_gradients(optimizer, gradient_clip_val=self.clip[1], gradient_clip_algorithm=self.clip[0])
        optimizer.step()
        self.losses.append(loss.item())


@pytest.mark.parametrize("clip", [None, ("norm", 0.05), ("value", 0.003)])
def test_manual_optimization_equals_automatic(clip):
    automatic, manual = Regressor(), Manual(clip)
    options = {} if clip is None else {"gradient_clip_algorithm": clip[0], "gradient_clip_val": clip[1]}
    trainer(plugin(), **options).fit(automatic)
    trainer(plugin()).fit(manual)
    assert manual.losses == automatic.losses
    assert_same_weights(manual, automatic)


def test_manual_optimization_of_lightnings_own_model():
    model = ManualOptimBoringModel()
    before = weights(model)
    trainer(plugin(), limit_train_batches=3, limit_val_batches=1).fit(model)
    assert not torch.equal(before["layer.weight"], model.layer.weight)


def test_accumulation_equals_one_large_batch():
    """T22: four batches of two are one of eight, but for the blocks over tokens; the last window is short."""
    large, small = Regressor(sgd, samples=24, batch_size=8), Regressor(sgd, samples=22, batch_size=2)
    seen_large, seen_small = Gradients(), Gradients()
    trainer(plugin(), callbacks=[seen_large]).fit(large)
    trainer(plugin(), accumulate_grad_batches=4, callbacks=[seen_small]).fit(small)
    assert len(seen_large.raw) == len(seen_small.raw) == 3  # windows of 4, 4 and 3 batches
    for a, b in zip(seen_small.raw[0], seen_large.raw[0], strict=True):
        assert relative_error(a, b) < 0.25
    plain = Regressor(sgd, samples=22, batch_size=2)
    seen_plain = Gradients()
    trainer(accumulate_grad_batches=4, callbacks=[seen_plain]).fit(plain)
    for a, b in zip(seen_small.raw[2], seen_plain.raw[2], strict=True):
        assert relative_error(a, b) < 0.25


class Skipping(Regressor):
    """Skips the second batch, and the step after the third."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer):
        if self.trainer.global_step == 2:
            for parameter in self.parameters():
                parameter.grad = None


def test_skipped_batches_and_steps():
    plain, ours, fp4 = Skipping(), Skipping(), Skipping()
    trainer(precision="32-true", gradient_clip_val=0.1).fit(plain)
    trainer(plugin("high_precision"), gradient_clip_val=0.1).fit(ours)
    trainer(plugin(SR), gradient_clip_val=0.1).fit(fp4)
    assert ours.losses == plain.losses
    assert_same_weights(ours, plain)
    assert [int(layer.fp4_rng_state[1]) for layer in layers_of(fp4).values()] == [3, 3]


def test_stochastic_rounding_advances_once_per_backward():
    """With accumulation too, so no two micro-batches share random bits."""
    model = Regressor()
    trainer(plugin(SR), accumulate_grad_batches=2).fit(model)
    assert [int(layer.fp4_rng_state[1]) for layer in layers_of(model).values()] == [4, 4]


def test_global_random_state_is_untouched():
    def after(*plugins):
        model = Regressor()
        torch.manual_seed(3)
        trainer(*plugins).fit(model)
        return torch.get_rng_state()

    assert torch.equal(after(plugin(SR)), after())


@pytest.mark.parametrize("recipe", [RTN, SR], ids=["rtn", "sr"])
def test_runs_repeat_to_the_bit(recipe):
    first, second, other = Regressor(), Regressor(), Regressor()
    trainer(plugin(recipe, seed=1)).fit(first)
    trainer(plugin(recipe, seed=1)).fit(second)
    trainer(plugin(recipe, seed=2)).fit(other)
    assert first.losses == second.losses
    assert (first.losses == other.losses) is (recipe is RTN)
