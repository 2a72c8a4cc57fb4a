"""FP4HealthCheck: what counts as trouble, and what each action does. test_survival.py has the end-to-end runs."""

from __future__ import annotations

import json
import math
import statistics

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_fp4 import FP4Precision, fp4_layers
from lightning_fp4.callbacks import (
    AdaptiveGradientClipping,
    FP4HealthCheck,
    FP4TrainingDivergedError,
    PrecisionMonitor,
    latest_healthy_checkpoint,
)
from lightning_fp4.callbacks.fp4_health_check import find_bad_layers, find_trouble, loss_limit, norm_limit
from lightning_fp4.operands import OperandStatistics
from tests.callbacks.models import TinyModule, ddp, loader, run_ranks, trainer

# ----------------------------------------------------------------------------------------------------------------------
# The algorithms
# ----------------------------------------------------------------------------------------------------------------------


def test_limits_equal_numpy():
    window = list(np.random.default_rng(0).normal(3, 0.2, 100))
    assert loss_limit(window, num_std=3) == pytest.approx(np.mean(window) + 3 * np.std(window, ddof=1))
    assert loss_limit([2.0] * 50, min_increase=0.1) == pytest.approx(2.2)
    assert loss_limit([-2.0] * 50, min_increase=0.1) == pytest.approx(-1.8)
    assert norm_limit(window, factor=10) == pytest.approx(10 * np.median(window))
    assert loss_limit(window[:19]) == norm_limit(window[:19]) == math.inf


@pytest.mark.parametrize(
    ("loss", "norm", "expected"),
    [
        (1.0, 1.0, None),
        (math.nan, 1.0, "nonfinite_loss"),
        (-math.inf, 1.0, "nonfinite_loss"),
        (1.0, math.inf, "nonfinite_gradient"),
        (2.1, 1.0, "loss_spike"),
        (1.0, 11.0, "gradient_spike"),
        (None, 1.0, None),
        (None, math.nan, "nonfinite_gradient"),
    ],
)
def test_trouble_by_hand(loss, norm, expected):
    assert find_trouble(loss, norm, 2.0, 10.0) == expected
    relaxed = find_trouble(loss, norm, math.inf, math.inf, check_finite=False)
    assert relaxed is None


def test_bad_layers_come_worst_first():
    def one(layer, flushed, saturated):
        values = {"flush_to_zero": flushed, "saturation": saturated, "sqnr": 20.0}
        return OperandStatistics(layer=layer, operand="input", values=values, top_channels=())

    measured = [one("a", 0.3, 0.0), one("b", 0.8, 0.02), one("c", 0.1, 0.0)]
    bad = find_bad_layers(measured, {"flush_to_zero": 0.2, "saturation": 0.01})
    assert [(layer, name) for _, layer, _, name, _ in bad] == [
        ("b", "flush_to_zero"),
        ("b", "saturation"),
        ("a", "flush_to_zero"),
    ]
    assert find_bad_layers(measured, {"flush_to_zero": None, "saturation": None}) == []


def test_false_alarms_are_rare_on_a_noisy_healthy_run():
    rng = np.random.default_rng(0)
    window, spikes, alarms = [], 0, 0
    for step in range(5000):
        loss = 3 + 2 * math.exp(-step / 300) + 0.1 * rng.standard_normal()
        if find_trouble(loss, 1.0, loss_limit(window), math.inf):
            spikes += 1
            if spikes == 3:
                spikes, alarms = 0, alarms + 1
        else:
            spikes = 0
            window = [*window, loss][-100:]
    assert alarms == 0


# ----------------------------------------------------------------------------------------------------------------------
# Actions
# ----------------------------------------------------------------------------------------------------------------------


class Weights(Callback):
    """The weights after each batch."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.seen.append(torch.cat([p.detach().flatten().clone() for p in pl_module.parameters()]))


def read(directory) -> list[dict]:
    return [json.loads(line) for line in (directory / "fp4_health.jsonl").read_text().splitlines()]


def test_warn_lets_the_step_through(tmp_path):
    weights = Weights()
    fit = trainer(tmp_path, callbacks=[FP4HealthCheck("warn"), weights])
    with pytest.warns(UserWarning, match="nonfinite loss"):
        fit.fit(TinyModule(depth=1), loader(4, poisoned=(8,)))
    assert not weights.seen[-1].isfinite().all()
    assert read(tmp_path)[0]["done"] == "warned"
    assert read(tmp_path)[0]["loss"] == "nan"


@pytest.mark.parametrize("manual", [False, True])
def test_skip_drops_the_step(tmp_path, manual):
    weights, check = Weights(), FP4HealthCheck("skip")
    fit = trainer(tmp_path, callbacks=[check, weights], logger=CSVLogger(tmp_path))
    fit.fit(TinyModule(depth=1, manual=manual), loader(5, poisoned=(8,)))
    assert [torch.equal(a, b) for a, b in zip(weights.seen, weights.seen[1:], strict=False)] == [
        False,
        True,
        False,
        False,
    ]
    assert fit.callback_metrics["FP4HealthCheck/events"] == 1
    (event,) = read(tmp_path)
    assert (event["step"], event["reason"], event["done"]) == (2, "nonfinite_loss", "skipped the optimizer step")
    (path,) = tmp_path.rglob("metrics.csv")
    assert "FP4HealthCheck/events" in path.read_text()


@pytest.mark.parametrize("clips_first", [True, False])
def test_gradients_that_clipping_dropped_are_not_called_zero(tmp_path, clips_first):
    callbacks = [AdaptiveGradientClipping(), FP4HealthCheck("warn")]
    fit = trainer(tmp_path, callbacks=callbacks if clips_first else callbacks[::-1])
    what = "gradients dropped already" if clips_first else r"gradient norm nan \(limit inf\)"
    with pytest.warns(UserWarning, match=rf"nonfinite loss, loss nan \(limit inf\), {what}\."):
        fit.fit(TinyModule(depth=1), loader(4, poisoned=(8,)))
    (event,) = read(tmp_path)
    assert event["grad_norm"] == (None if clips_first else "nan")


def test_raise_stops_before_the_weights_are_hit(tmp_path):
    module = TinyModule(depth=1)
    with pytest.raises(FP4TrainingDivergedError, match=r"action='raise'.*nonfinite loss"):
        trainer(tmp_path, callbacks=[FP4HealthCheck("raise")]).fit(module, loader(5, poisoned=(8,)))
    assert all(p.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("snapshot", ["memory", "checkpoint"])
def test_the_limit_ends_in_an_error_with_healthy_weights(tmp_path, snapshot):
    module, weights = TinyModule(depth=1, schedule=lambda step: 1.0), Weights()
    check = FP4HealthCheck(
        max_rollbacks=2, snapshot=snapshot, snapshot_every_n_steps=3, healthy_after_n_steps=2, keep_snapshots=1
    )
    saver = ModelCheckpoint(tmp_path, filename="exception", save_on_exception=True)
    fit = trainer(tmp_path, callbacks=[check, weights, saver], enable_checkpointing=True)
    with pytest.raises(FP4TrainingDivergedError, match=r"after 2 rollbacks.*Lower the learning rate"):
        fit.fit(module, loader(20, poisoned=tuple(range(28, 80))))
    now = torch.cat([p.detach().flatten() for p in module.parameters()])
    assert torch.equal(now, weights.seen[2])  # the snapshot after three steps; that after six is not proven at seven
    assert fit.global_step == 3
    assert [event["done"] for event in read(tmp_path)] == ["rolled back"] * 2 + ["restored healthy weights and raised"]
    # What is saved because of the exception is healthy.
    for path in tmp_path.glob("*.ckpt"):
        assert all(v.isfinite().all() for v in torch.load(path, weights_only=True)["state_dict"].values())


def test_learning_rate_and_recipe_change_after_a_rollback(tmp_path):
    class Note(Callback):
        def __init__(self) -> None:
            self.rates, self.recipes = [], []

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
            self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
            self.recipes.append({layer.fp4_recipe.name for layer in fp4_layers(pl_module).values()}.pop())

    note = Note()
    check = FP4HealthCheck(lr_factor=0.5, fallback_recipe="high_precision", fallback_steps=3)
    fit = trainer(
        tmp_path, callbacks=[check, note], plugins=[FP4Precision("nvfp4", precision="32-true", last_blocks=0)]
    )
    module = TinyModule(lr=1e-3, schedule=lambda step: 1.0)
    fit.fit(module, loader(10, poisoned=(8, 20)))  # batches 2 and 5
    assert note.rates == pytest.approx([1e-3] * 3 + [5e-4] * 3 + [2.5e-4] * 4)
    high, low = ["high_precision"], ["nvfp4"]
    assert note.recipes == low * 3 + high * 3 + high * 3 + low
    assert all(layer.fp4_recipe.name == "nvfp4" for layer in fp4_layers(module).values())
    first, second = read(tmp_path)
    assert (first["lr_factor"], second["lr_factor"]) == (0.5, 0.25)
    assert first["fallback_recipe"] == "high_precision"


def test_layers_beyond_a_bound(tmp_path):
    class Spoil(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
            if batch_idx == 5:
                with torch.no_grad():  # one huge weight flushes all others to zero
                    pl_module.model.layers[1].mlp.up_proj.weight[0, 0] = 1e6

    check = FP4HealthCheck(max_flush_to_zero=0.6, check_layers_every_n_steps=2, patience=9)
    fit = trainer(
        tmp_path, callbacks=[Spoil(), check], plugins=[FP4Precision("nvfp4", precision="32-true", last_blocks=0)]
    )
    module = TinyModule()
    fit.fit(module, loader(8))
    (event,) = read(tmp_path)
    assert event["reason"] == "layers"
    assert event["step"] == 5
    found = [layer for layer in event["layers"] if layer["layer"] == "model.layers.1.mlp.up_proj"]
    assert {layer["operand"] for layer in found} >= {"weight"}
    assert module.model.layers[1].mlp.up_proj.weight.abs().max() < 10
    assert not any(m._forward_pre_hooks for m in module.modules())


def test_batches_without_a_step_leave_no_hooks_behind(tmp_path):
    class Accumulates(TinyModule):
        def training_step(self, batch, batch_idx):
            self.manual_backward(self.loss(batch))
            self.hooks = [*getattr(self, "hooks", []), len(self.model.layers[0].mlp.up_proj._forward_pre_hooks)]
            if batch_idx % 3 == 2:
                self.optimizers().step()
                self.optimizers().zero_grad()

        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 7 else None  # skips the rest of the epoch

    check = FP4HealthCheck("warn", max_saturation=0.9, check_layers_every_n_steps=1)
    module = Accumulates(recipe="nvfp4", manual=True)
    trainer(tmp_path, callbacks=[check], max_epochs=2).fit(module, loader(9))
    assert set(module.hooks) == {1}
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in module.modules())


def test_averaged_weights_rewind_with_the_weights(tmp_path):
    average = EMAWeightAveraging(decay=0.5)
    fit = trainer(tmp_path, callbacks=[FP4HealthCheck(), average])
    module = TinyModule(depth=1)
    fit.fit(module, loader(8, poisoned=(16,)))
    assert all(p.isfinite().all() for p in module.parameters())


def test_the_check_runs_over_accumulated_batches(tmp_path):
    check = FP4HealthCheck("skip")
    fit = trainer(tmp_path, callbacks=[check], accumulate_grad_batches=4)
    module = TinyModule(depth=1)
    fit.fit(module, loader(16, poisoned=(24,)))
    assert check.steps == 4
    assert len(check._losses[0]) == 3
    assert check._losses[0][0] == pytest.approx(statistics.fmean(module.losses[:4]), rel=1e-5)


def test_state_goes_through_a_checkpoint(tmp_path):
    check = FP4HealthCheck("skip")
    fit = trainer(tmp_path, callbacks=[check], max_steps=4, max_epochs=9)
    fit.fit(TinyModule(depth=1), loader(8, poisoned=(4,)))
    fit.save_checkpoint(tmp_path / "a.ckpt")
    torch.load(tmp_path / "a.ckpt", weights_only=True)
    again = FP4HealthCheck("skip")
    fit = trainer(tmp_path, callbacks=[again], max_steps=6, max_epochs=9)
    fit.fit(TinyModule(depth=1), loader(8), ckpt_path=tmp_path / "a.ckpt")
    assert (again.steps, again.events, len(again._losses[0])) == (6, 1, 5)
    assert list(again._losses[0])[:3] == list(check._losses[0])


@pytest.mark.parametrize("snapshot", ["memory", "checkpoint"])
@pytest.mark.parametrize("options", [{"fast_dev_run": True}, {"barebones": True}])
def test_special_runs(tmp_path, options, snapshot):
    check = FP4HealthCheck(snapshot=snapshot, max_saturation=0.9)
    fit = trainer(tmp_path, callbacks=[check], **options)
    with pytest.warns(UserWarning, match="found no FP4 layers"):
        fit.fit(TinyModule(depth=1), loader(2), loader(1))
    assert check.steps > 0


def test_all_callbacks_together(tmp_path):
    callbacks = [
        AdaptiveGradientClipping(),
        FP4HealthCheck(snapshot_every_n_steps=2, healthy_after_n_steps=1),
        PrecisionMonitor(every_n_steps=2),
        EarlyStopping("PrecisionMonitor/sqnr/input", mode="max"),
        ModelCheckpoint(tmp_path / "saved", every_n_train_steps=2, save_top_k=-1),
    ]
    fit = trainer(
        tmp_path,
        callbacks=callbacks,
        logger=CSVLogger(tmp_path),
        enable_checkpointing=True,
        max_epochs=2,
        plugins=[FP4Precision("nvfp4", precision="32-true", last_blocks=0)],
    )
    module = TinyModule()
    fit.fit(module, loader(6, poisoned=(12,)), loader(1))
    assert callbacks[1].rollbacks == 2  # once in each epoch
    assert all(p.isfinite().all() for p in module.parameters())
    assert callbacks[2].steps == [1, 3, 5, 7, 9, 11]
    path = next((tmp_path / "saved").glob("*.ckpt"))
    assert {"AdaptiveGradientClipping", "FP4HealthCheck"} < set(torch.load(path, weights_only=True)["callbacks"])
    fit.validate(module, loader(1), verbose=False)


def test_disk_snapshots_are_cleaned_up(tmp_path):
    check = FP4HealthCheck(
        snapshot="checkpoint", dirpath=tmp_path / "s", snapshot_every_n_steps=2, healthy_after_n_steps=1
    )
    trainer(tmp_path, callbacks=[check]).fit(TinyModule(depth=1), loader(9))
    names = sorted(path.name for path in (tmp_path / "s").iterdir())
    assert names == ["healthy-00000006.ckpt", "healthy-00000008.ckpt"]
    assert latest_healthy_checkpoint(tmp_path / "s") == str(tmp_path / "s" / names[-1])


# ----------------------------------------------------------------------------------------------------------------------
# Misuse
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"action": "stop"}, "'warn', 'skip', 'rollback' or 'raise'"),
        ({"snapshot": "disk"}, "'memory' or 'checkpoint'"),
        ({"patience": 0}, r"patience=0\)` must be 1 or more"),
        ({"num_std": -1.0}, r"num_std=-1.0\)` must be 0 or more"),
        ({"grad_norm_factor": 0}, r"grad_norm_factor=0\)` must be 1 or more, or None"),
        ({"max_saturation": float("nan")}, r"max_saturation=nan\)` must be 0 or more"),
        ({"lr_factor": 2.0}, "at most 1"),
        ({"warmup_steps": 200}, "Make `warmup_steps` at most"),
        ({"fallback_recipe": "nvpf4"}, "Did you mean 'nvfp4'"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        FP4HealthCheck(**options)


def test_strategies_that_cannot_roll_back(tmp_path):
    fit = trainer(tmp_path, callbacks=[FP4HealthCheck()], strategy=ModelParallelStrategy())
    with pytest.raises(MisconfigurationException, match="snapshot='checkpoint'"):
        fit.callbacks[0].setup(fit, None, "fit")
    fit = trainer(tmp_path, callbacks=[check := FP4HealthCheck(snapshot="checkpoint")], plugins=[AsyncCheckpointIO()])
    with pytest.raises(MisconfigurationException, match="AsyncCheckpointIO"):
        check.setup(fit, None, "fit")


# ----------------------------------------------------------------------------------------------------------------------
# Over ranks
# ----------------------------------------------------------------------------------------------------------------------


def _disk_rank(rank, directory):
    check = FP4HealthCheck(snapshot="checkpoint", snapshot_every_n_steps=2, healthy_after_n_steps=1)
    fit = trainer(directory, callbacks=[check], **ddp())
    fit.fit(TinyModule(depth=1), loader(16, batch_size=1, poisoned=(9,)))
    weights = torch.cat([p.detach().flatten() for p in fit.lightning_module.parameters()])
    torch.save((weights, check.rollbacks, fit.global_step), directory / f"{rank}.pt")


def test_ranks_go_back_to_the_same_file(tmp_path):
    run_ranks(_disk_rank, tmp_path)
    (first, rollbacks, step), (second, *rest) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert torch.equal(first, second)
    assert first.isfinite().all()
    assert [rollbacks, step] == rest
    assert rollbacks == 1
