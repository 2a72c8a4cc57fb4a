"""PrecisionMonitor inside fits: what it logs, when, and what TensorBoard's files hold."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fp4 import FP4Precision
from lightning_fp4.callbacks import FP4HealthCheck, PrecisionMonitor, precision_monitor
from lightning_fp4.callbacks.precision_monitor import STATISTICS, channel_overlaps
from lightning_fp4.operands import OperandStatistics
from tests.callbacks.models import TinyModule, loader, trainer


def plugins():
    return [FP4Precision("nvfp4", precision="32-true", last_blocks=0)]


class Hooks(Callback):
    """Counts the hooks on the FP4 layers while each batch runs."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_before_backward(self, trainer, pl_module, loss) -> None:
        self.counts.append(sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in pl_module.modules()))


def events(directory) -> EventAccumulator:
    (path,) = directory.rglob("events.out.*")
    accumulator = EventAccumulator(str(path), size_guidance={"images": 0, "histograms": 0, "scalars": 0})
    accumulator.Reload()
    return accumulator


def test_tensorboard_files_hold_what_is_promised(tmp_path):
    monitor, hooks = PrecisionMonitor(every_n_steps=2, heat_map_every_n_logs=2), Hooks()
    module = TinyModule(depth=2)
    fit = trainer(
        tmp_path, callbacks=[monitor, hooks], logger=TensorBoardLogger(tmp_path), plugins=plugins(), max_steps=6
    )
    fit.fit(module, loader(8))
    # No hook outside the steps that log.
    assert [count > 0 for count in hooks.counts] == [False, True] * 3
    seen = events(tmp_path)
    layers = [f"model.layers.{i}.{n}" for i in range(2) for n in ("self_attn.q_proj", "mlp.down_proj")]
    for name in STATISTICS:
        for operand in ("input", "weight", "grad_output"):
            steps = [1, 3, 5] if name != "channel_overlap" else [3, 5]
            for tag in (operand, *(f"{layer}.{operand}" for layer in layers)):
                scalars = seen.Scalars(f"PrecisionMonitor/{name}/{tag}")
                assert [s.step for s in scalars] == steps
                assert all(math.isfinite(s.value) for s in scalars)
            assert [h.step for h in seen.Histograms(f"PrecisionMonitor/layers/{name}/{operand}")] == steps
            histogram = seen.Histograms(f"PrecisionMonitor/layers/{name}/{operand}")[-1].histogram_value
            assert histogram.num == 14  # seven layers in each of two blocks
            assert sum(histogram.bucket) == 14
            values = [s.values[name] for s in monitor.report.statistics if s.operand == operand]
            assert histogram.sum == pytest.approx(sum(values))
            assert (histogram.min, histogram.max) == pytest.approx((min(values), max(values)))
            assert f"PrecisionMonitor/{name}/{operand}" in fit.callback_metrics
    for block in range(2):
        assert len(seen.Scalars(f"PrecisionMonitor/attention_max/model.layers.{block}.self_attn")) == 3
    for name in ("sqnr", "flush_to_zero"):
        images = seen.Images(f"PrecisionMonitor/heat_map/{name}")
        assert [image.step for image in images] == [3, 5]
        image = images[-1]
        assert image.encoded_image_string.startswith(b"\x89PNG")
        assert image.width > 300
        assert image.height > 200
    sqnr = seen.Scalars("PrecisionMonitor/sqnr/model.layers.0.mlp.up_proj.weight")[-1].value
    assert 15 < sqnr < 25


def test_tensorboard_tags_have_the_loggers_prefix(tmp_path):
    logger = TensorBoardLogger(tmp_path, prefix="run")
    monitor = PrecisionMonitor(every_n_steps=1, heat_maps=["sqnr"])
    trainer(tmp_path, callbacks=[monitor], logger=logger, plugins=plugins(), max_steps=1).fit(TinyModule(), loader(2))
    tags = events(tmp_path).Tags()
    found = [tag for kind in ("scalars", "histograms", "images") for tag in tags[kind] if "PrecisionMonitor" in tag]
    assert {"run-PrecisionMonitor/sqnr/input", "run-PrecisionMonitor/heat_map/sqnr"} < set(found)
    assert all(tag.startswith("run-PrecisionMonitor/") for tag in found)


def test_a_logger_serves_several_fits(tmp_path):
    """Lightning closes TensorBoard's writer after each."""
    logger, monitor = TensorBoardLogger(tmp_path), PrecisionMonitor(every_n_steps=1, heat_maps=())
    fit = trainer(tmp_path, callbacks=[monitor], logger=logger, plugins=plugins())
    fit.fit(module := TinyModule(), loader(1))
    fit.fit_loop.max_epochs = 2
    fit.fit(module, loader(1))
    assert monitor.steps == [0, 1]
    assert len([path for path in tmp_path.rglob("events.out.*") if b"PrecisionMonitor" in path.read_bytes()]) == 2


def test_without_tensorboard_the_logger_writes_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(precision_monitor, "_TENSORBOARD", False)
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    monitor = PrecisionMonitor(every_n_steps=1, heat_maps=())
    fit = trainer(tmp_path, callbacks=[monitor], logger=TensorBoardLogger(tmp_path), plugins=plugins(), max_steps=1)
    fit.fit(TinyModule(), loader(1))
    assert "PrecisionMonitor/sqnr/input" in events(tmp_path).Tags()["scalars"]


def test_infinities_of_both_signs_are_logged(tmp_path):
    monitor = PrecisionMonitor(every_n_steps=1)
    fit = trainer(tmp_path, callbacks=[monitor], logger=CSVLogger(tmp_path), plugins=plugins(), max_steps=1)
    fit.fit(TinyModule(), loader(2))
    for i, s in enumerate(monitor.report.statistics):
        s.values["sqnr"] = (math.inf, -math.inf)[i // 3 % 2]
    monitor._log(fit, 1)
    assert fit.callback_metrics["PrecisionMonitor/sqnr/input"].isnan()


def test_no_operator_runs_beside_tensorboards_thread(tmp_path, monkeypatch):
    """Each would wait milliseconds for a thread that computes checksums in Python."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    monitor = PrecisionMonitor(every_n_steps=1)
    logger = TensorBoardLogger(tmp_path)
    fit = trainer(tmp_path, callbacks=[monitor], logger=logger, plugins=plugins(), max_steps=1)
    fit.fit(TinyModule(), loader(2))
    monkeypatch.setattr(precision_monitor, "write_to_tensorboard", lambda *_, **__: seen.append("event"))
    with Watch():
        monitor._log(fit, 1)
    assert len(seen) > 1
    assert seen[-1] == "event"


def test_other_loggers_get_the_same_values(tmp_path):
    monitor = PrecisionMonitor(every_n_steps=1, statistics=["amax"], per_layer=False, log_key_prefix="a-")
    fit = trainer(tmp_path, callbacks=[monitor], logger=CSVLogger(tmp_path), plugins=plugins(), max_steps=2)
    fit.fit(TinyModule(depth=2), loader(4))
    (path,) = tmp_path.rglob("metrics.csv")
    heading = path.read_text().splitlines()[0].split(",")
    assert {"a-PrecisionMonitor/amax/input", "a-PrecisionMonitor/attention_max/model.layers.1.self_attn"} < set(heading)
    assert not any("q_proj" in key or "sqnr" in key for key in heading)


def test_the_trainers_interval_is_the_default_and_accumulation_reads_once(tmp_path):
    monitor, hooks = PrecisionMonitor(), Hooks()
    fit = trainer(
        tmp_path,
        callbacks=[monitor, hooks],
        logger=CSVLogger(tmp_path),
        plugins=plugins(),
        log_every_n_steps=2,
        accumulate_grad_batches=3,
    )
    fit.fit(TinyModule(depth=2), loader(12))
    assert [i for i, count in enumerate(hooks.counts) if count] == [5, 11]
    assert monitor.steps == [1, 3]


def test_training_is_the_same_with_and_without_it(tmp_path):
    weights = []
    for callbacks in ([], [PrecisionMonitor(every_n_steps=1)]):
        module = TinyModule(depth=2)
        torch.manual_seed(0)
        fit = trainer(tmp_path, callbacks=callbacks, logger=CSVLogger(tmp_path), plugins=plugins(), max_steps=3)
        fit.fit(module, loader(4))
        weights.append([p.detach().clone() for p in module.parameters()])
    assert all(map(torch.equal, *weights))


def test_state_goes_through_a_checkpoint(tmp_path):
    monitor = PrecisionMonitor(every_n_steps=2)
    options = {"logger": CSVLogger(tmp_path), "max_epochs": 9}
    fit = trainer(tmp_path, callbacks=[monitor], plugins=plugins(), max_steps=4, **options)
    fit.fit(TinyModule(depth=2), loader(8))
    fit.save_checkpoint(tmp_path / "a.ckpt")
    torch.load(tmp_path / "a.ckpt", weights_only=True)
    again = PrecisionMonitor(every_n_steps=2)
    fit = trainer(tmp_path, callbacks=[again], plugins=plugins(), max_steps=6, **options)
    fit.fit(TinyModule(depth=2), loader(8), ckpt_path=tmp_path / "a.ckpt")
    assert again.steps == [1, 3, 5]
    assert again.history[:2] == monitor.history
    assert "channel_overlap" in again.report.statistics[0].values


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("options", [{"fast_dev_run": True}, {"barebones": True}])
def test_special_runs(tmp_path, options, manual):
    monitor = PrecisionMonitor(every_n_steps=1)
    fit = trainer(tmp_path, callbacks=[monitor], plugins=plugins(), max_steps=1, **options)
    fit.fit(TinyModule(depth=2, manual=manual), loader(2), loader(1))
    assert monitor.report.statistics
    if not options.get("barebones"):
        fit.validate(TinyModule(depth=2), loader(1), verbose=False)


def test_batches_that_the_module_skips_leave_no_hooks_behind(tmp_path):
    class Skips(TinyModule):
        hooks: list[int]

        def on_train_batch_start(self, batch, batch_idx):
            self.hooks = [*getattr(self, "hooks", []), len(self.model.layers[0].mlp.up_proj._forward_pre_hooks)]
            return -1 if self.current_epoch < 3 else None  # skips the whole epoch

    monitor, module = PrecisionMonitor(every_n_steps=1), Skips(recipe="nvfp4")
    trainer(tmp_path, callbacks=[monitor], logger=CSVLogger(tmp_path), max_epochs=4).fit(module, loader(2))
    assert module.hooks == [1] * 5
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in module.modules())


@pytest.mark.parametrize("callback", [PrecisionMonitor(every_n_steps=1), FP4HealthCheck("warn", max_saturation=0.5)])
def test_an_exception_leaves_no_hooks_behind(tmp_path, callback):
    class Fails(TinyModule):
        def loss(self, batch):
            super().loss(batch)
            raise RuntimeError("on purpose")

    module = Fails(depth=2)
    if isinstance(callback, FP4HealthCheck):
        callback.check_layers_every_n_steps = 1
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer(tmp_path, callbacks=[callback], logger=CSVLogger(tmp_path), plugins=plugins()).fit(module, loader(1))
    assert callback._reader is None
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in module.modules())


def test_without_fp4_layers_it_warns_once_and_does_nothing(tmp_path):
    monitor, hooks = PrecisionMonitor(every_n_steps=1), Hooks()
    fit = trainer(tmp_path, callbacks=[monitor, hooks], logger=CSVLogger(tmp_path))
    with pytest.warns(UserWarning, match="found no FP4 layers") as warned:
        fit.fit(TinyModule(depth=2), loader(3))
    assert sum("found no FP4 layers" in str(w.message) for w in warned) == 1
    assert set(hooks.counts) == {0}


def test_without_a_logger_it_says_so(tmp_path):
    with pytest.raises(MisconfigurationException, match="Cannot use `PrecisionMonitor` callback with"):
        trainer(tmp_path, callbacks=[PrecisionMonitor()]).fit(TinyModule(depth=1), loader(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"statistics": ["sqrn"]}, r"'sqrn' is unknown. Give a collection of: 'amax'"),
        ({"statistics": "sqnr"}, "Give a collection"),
        ({"operands": ["output"]}, "'output' is unknown"),
        ({"every_n_steps": 0}, "must be 1 or more"),
        ({"max_rows": 0}, r"max_rows=0\)` must be 1 or more, or None"),
        ({"top_k": 0}, r"top_k=0\)` must be 1 or more"),
        ({"layers": "mlp.up_proj"}, r"for example \['mlp.up_proj'\]"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        PrecisionMonitor(**options)


def test_channel_overlaps_by_hand():
    def one(layer: str, channels: tuple[int, ...]) -> OperandStatistics:
        return OperandStatistics(layer=layer, operand="input", values={}, top_channels=channels)

    before = {("a", "input"): (1, 2, 3, 4)}
    assert channel_overlaps([one("a", (9, 4, 3, 8)), one("b", (1,))], before) == {("a", "input"): 0.5}


def test_long_histories_are_thinned(tmp_path):
    monitor = PrecisionMonitor(every_n_steps=1, heat_maps=["sqnr"])
    for step in range(200):
        monitor._remember(step, {"sqnr": {"input": {"layer": float(step)}}})
    assert len(monitor.steps) == len(monitor.history) <= 64
    assert monitor.steps == sorted(monitor.steps)
    assert [h["sqnr"]["input"]["layer"] for h in monitor.history] == monitor.steps
