"""FP4HealthCheck: notice when a run goes wrong, on all ranks together, and do something about it."""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fp4._lightning_compat import accumulates, logger_step
from lightning_fp4.callbacks import gradients
from lightning_fp4.callbacks.logs import log_metrics, set_callback_metrics
from lightning_fp4.callbacks.rollback import (
    DiskStore,
    MemoryStore,
    SnapshotRing,
    refuse_unsafe_stores,
    scale_learning_rates,
)
from lightning_fp4.convert import fp4_layers, set_recipe
from lightning_fp4.operands import OperandReader, OperandStatistics
from lightning_fp4.recipes import Recipe, get_recipe

Action = Literal["warn", "skip", "rollback", "raise"]


class FP4TrainingDivergedError(RuntimeError):
    """A run went wrong and going back does not save it; the model holds the last healthy weights if there were any."""


# ----------------------------------------------------------------------------------------------------------------------
# The algorithms
# ----------------------------------------------------------------------------------------------------------------------


def loss_limit(
    window: Sequence[float], *, num_std: float = 3.0, min_increase: float = 0.02, min_values: int = 20
) -> float:
    """The largest loss that is not a spike: mean of the window plus ``num_std`` standard deviations.

    Args:
        window: recent healthy losses.
        num_std: how many standard deviations are normal.
        min_increase: share of the mean that is normal however small the deviation.
        min_values: with fewer values in the window everything finite is normal.
    """
    if len(window) < max(2, min_values):
        return math.inf
    mean = statistics.fmean(window)
    # `statistics.stdev` computes in fractions, which takes ten times as long, at every step.
    deviation = math.sqrt(math.fsum([(loss - mean) ** 2 for loss in window]) / (len(window) - 1))
    return mean + max(num_std * deviation, min_increase * abs(mean))


def norm_limit(window: Sequence[float], *, factor: float = 10.0, min_values: int = 20) -> float:
    """The largest gradient norm that is not a spike: ``factor`` times the window's median."""
    return factor * statistics.median(window) if len(window) >= max(1, min_values) else math.inf


def find_trouble(
    loss: float | None, grad_norm: float, loss_max: float, norm_max: float, *, check_finite: bool = True
) -> str | None:
    """What is wrong with a step, in one word, or ``None``.

    Returns:
        ``"nonfinite_loss"``, ``"nonfinite_gradient"``, ``"loss_spike"``, ``"gradient_spike"`` or ``None``.
    """
    if check_finite and loss is not None and not math.isfinite(loss):
        return "nonfinite_loss"
    if check_finite and not math.isfinite(grad_norm):
        return "nonfinite_gradient"
    if loss is not None and loss > loss_max:
        return "loss_spike"
    return "gradient_spike" if grad_norm > norm_max else None


def find_bad_layers(
    measured: Sequence[OperandStatistics], bounds: Mapping[str, float | None]
) -> list[tuple[float, str, str, str, float]]:
    """Operands with a statistic beyond its bound, the worst excess first.

    Returns:
        Excess (value over bound), layer, operand, statistic and value of each.
    """
    found = [
        (values.values[name] / bound if bound else math.inf, values.layer, values.operand, name, values.values[name])
        for values in measured
        for name, bound in bounds.items()
        if bound is not None and values.values.get(name, 0.0) > bound
    ]
    return sorted(found, reverse=True)


# ----------------------------------------------------------------------------------------------------------------------
# The callback
# ----------------------------------------------------------------------------------------------------------------------


class FP4HealthCheck(Callback):
    """Watch loss, gradients and FP4 layers; warn, skip, go back to healthy weights, or raise, on all ranks together.

    A step is in trouble if its loss or gradients are not finite; if the loss exceeds the moving window's mean by
    ``num_std`` standard deviations, or the gradient norm its median by ``grad_norm_factor``, ``patience`` steps in a
    row; or if operands of FP4 layers saturate or flush to zero beyond a bound. Gradients that are not finite never
    reach the weights, except with ``action="warn"``.

    Going back rewinds weights, optimizers, learning-rate schedules, the precision plugin, averaged weights and
    ``global_step`` to a snapshot that proved healthy for ``healthy_after_n_steps`` steps. The data goes on where it
    was, as do the loggers' steps and the counters of epochs and batches, so a bad batch is not met again.

    Every event is logged (``FP4HealthCheck/events`` and ``/rollbacks``), printed, and appended to a JSONL file with
    step, reason, values and what was done.

    Args:
        action: ``"warn"``, ``"skip"`` the optimizer step, ``"rollback"`` or ``"raise"``.
        window: healthy steps that the loss and the gradient norm are compared with.
        num_std: standard deviations above the window's mean that are normal for a loss.
        min_increase: share of the mean loss that is normal however small the deviation is.
        grad_norm_factor: multiple of the window's median that is normal for a gradient norm, ``None`` not to look.
        patience: spikes in a row that make an event; values that are not finite always do.
        warmup_steps: healthy steps before spikes are looked for.
        check_finite: look for values that are not finite.
        max_saturation: largest share of saturated values in an operand of an FP4 layer, ``None`` not to look.
        max_flush_to_zero: largest share of non-zero values flushed to zero in an operand, ``None`` not to look.
        check_layers_every_n_steps: optimizer steps between looks at the layers.
        snapshot: keep snapshots in ``"memory"`` (single device, DDP) or as a ``"checkpoint"`` (all strategies).
        snapshot_every_n_steps: optimizer steps between snapshots. The first is taken when fitting starts.
        healthy_after_n_steps: steps without trouble that prove a snapshot.
        keep_snapshots: proven snapshots to keep; going back twice in a row falls back on the one before.
        max_rollbacks: after so many the next event raises, with healthy weights in place.
        lr_factor: multiplies the learning rate at each return to a snapshot.
        fallback_recipe: recipe of all FP4 layers for ``fallback_steps`` after going back, for example
            ``"high_precision"``.
        fallback_steps: how long, in optimizer steps.
        dirpath: directory of checkpoints, ``health_check`` in the Trainer's ``default_root_dir`` if not given.
        log_path: JSONL file, ``fp4_health.jsonl`` in the Trainer's ``default_root_dir`` if not given.

    Raises:
        ValueError: for an argument out of range.
        MisconfigurationException: at the start of fitting, for a strategy that cannot be watched or rolled back.
        FP4TrainingDivergedError: while fitting, for ``action="raise"`` or after ``max_rollbacks``.

    Example::

        health = FP4HealthCheck(lr_factor=0.7, fallback_recipe="high_precision", fallback_steps=200)
        trainer = Trainer(plugins=[FP4Precision("nvfp4")], callbacks=[health])
    """

    def __init__(
        self,
        action: Action = "rollback",
        *,
        window: int = 100,
        num_std: float = 3.0,
        min_increase: float = 0.02,
        grad_norm_factor: float | None = 10.0,
        patience: int = 3,
        warmup_steps: int = 20,
        check_finite: bool = True,
        max_saturation: float | None = None,
        max_flush_to_zero: float | None = None,
        check_layers_every_n_steps: int = 50,
        snapshot: Literal["memory", "checkpoint"] = "memory",
        snapshot_every_n_steps: int = 100,
        healthy_after_n_steps: int = 50,
        keep_snapshots: int = 2,
        max_rollbacks: int = 3,
        lr_factor: float = 1.0,
        fallback_recipe: str | Recipe | dict[str, Any] | None = None,
        fallback_steps: int = 100,
        dirpath: str | os.PathLike[str] | None = None,
        log_path: str | os.PathLike[str] | None = None,
    ) -> None:
        if action not in ("warn", "skip", "rollback", "raise"):
            raise ValueError(f"`FP4HealthCheck(action={action!r})` must be 'warn', 'skip', 'rollback' or 'raise'.")
        if snapshot not in ("memory", "checkpoint"):
            raise ValueError(f"`FP4HealthCheck(snapshot={snapshot!r})` must be 'memory' or 'checkpoint'.")
        counts = {"window": window, "patience": patience, "check_layers_every_n_steps": check_layers_every_n_steps}
        counts |= {"snapshot_every_n_steps": snapshot_every_n_steps, "keep_snapshots": keep_snapshots}
        counts |= {"fallback_steps": fallback_steps}
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"`FP4HealthCheck({name}={count})` must be 1 or more.")
        amounts: dict[str, float | None] = {"num_std": num_std, "min_increase": min_increase}
        amounts |= {"warmup_steps": warmup_steps, "healthy_after_n_steps": healthy_after_n_steps}
        amounts |= {"max_rollbacks": max_rollbacks, "max_saturation": max_saturation}
        amounts |= {"max_flush_to_zero": max_flush_to_zero}
        for name, amount in amounts.items():
            if amount is not None and not amount >= 0:
                raise ValueError(f"`FP4HealthCheck({name}={amount})` must be 0 or more.")
        if grad_norm_factor is not None and not grad_norm_factor >= 1:  # else the median itself would be a spike
            raise ValueError(
                f"`FP4HealthCheck(grad_norm_factor={grad_norm_factor})` must be 1 or more, or None not to look."
            )
        if not 0 < lr_factor <= 1:
            raise ValueError(f"`FP4HealthCheck(lr_factor={lr_factor})` must be above 0 and at most 1.")
        if warmup_steps > window:
            raise ValueError(
                f"`FP4HealthCheck(warmup_steps={warmup_steps}, window={window})`: the window never holds that many "
                "values. Make `warmup_steps` at most `window`."
            )
        self.action = action
        self.window = window
        self.num_std = num_std
        self.min_increase = min_increase
        self.grad_norm_factor = grad_norm_factor
        self.patience = patience
        self.warmup_steps = warmup_steps
        self.check_finite = check_finite
        self.layer_bounds = {"saturation": max_saturation, "flush_to_zero": max_flush_to_zero}
        self.check_layers_every_n_steps = check_layers_every_n_steps
        self.snapshot = snapshot
        self.snapshot_every_n_steps = snapshot_every_n_steps
        self.healthy_after_n_steps = healthy_after_n_steps
        self.keep_snapshots = keep_snapshots
        self.max_rollbacks = max_rollbacks
        self.lr_factor = lr_factor
        self.fallback_recipe = None if fallback_recipe is None else get_recipe(fallback_recipe)
        self.fallback_steps = fallback_steps
        self.dirpath = dirpath
        self.log_path = log_path
        #: Optimizer steps seen, those that were undone included.
        self.steps = 0
        #: Events so far, and how many of them went back.
        self.events, self.rollbacks = 0, 0
        self._losses: dict[int, deque[float]] = {}
        self._norms: dict[int, deque[float]] = {}
        self._spikes: dict[int, int] = {}
        self._fallback_left = 0
        self._before_fallback: dict[str, Recipe] = {}
        self._ring: SnapshotRing | None = None
        self._reader: OperandReader | None = None
        self._begin_batch()

    def _begin_batch(self) -> None:
        self._loss: Tensor | None = None
        self._stepped = False
        self._trouble: tuple[str, dict[str, Any]] | None = None

    # ------------------------------------------------------------------------------------------------------------------
    # Set-up
    # ------------------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what cannot work."""
        if stage != "fit":
            return
        gradients.refuse_hidden_gradients(trainer, "FP4HealthCheck")
        if self.action == "rollback":
            refuse_unsafe_stores(trainer, on_disk=self.snapshot == "checkpoint")

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the first snapshot: there is always something to go back to."""
        looks_at_layers = any(bound is not None for bound in self.layer_bounds.values())
        if (looks_at_layers or self.fallback_recipe is not None) and not fp4_layers(pl_module):
            rank_zero_warn(
                "`FP4HealthCheck` found no FP4 layers: `max_saturation`, `max_flush_to_zero` and `fallback_recipe` do "
                "nothing. Use it with `FP4Precision` or `convert_to_fp4`."
            )
        self._begin_batch()
        if self._fallback_left:
            self._begin_fallback(pl_module, self._fallback_left)
        if self.action == "rollback":
            directory = self.dirpath or os.path.join(trainer.default_root_dir, "health_check")
            store = DiskStore(os.fspath(directory)) if self.snapshot == "checkpoint" else MemoryStore()
            self._ring = SnapshotRing(store, keep=self.keep_snapshots, prove_steps=self.healthy_after_n_steps)
            self._ring.take(trainer, self.steps, trusted=True)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put back what is borrowed."""
        self._close_reader()
        self._ring = None

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Put back what is borrowed."""
        self.on_train_end(trainer, pl_module)

    # ------------------------------------------------------------------------------------------------------------------
    # Looking
    # ------------------------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin to read the layers, when it is time."""
        self._close_reader()  # of a batch that the module chose to skip
        bounded = [name for name, bound in self.layer_bounds.items() if bound is not None]
        if bounded and (self.steps + 1) % self.check_layers_every_n_steps == 0 and not accumulates(trainer):
            self._reader = OperandReader(pl_module, statistics=bounded).__enter__()

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Keep the loss, on its device; accumulated batches add up."""
        loss = loss.detach().float()
        self._loss = loss if self._loss is None else self._loss + loss

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Judge the step that is about to be taken, the same way on every rank."""
        index = gradients.index_of(trainer, optimizer)
        loss, grad_norm = self._observe(trainer, optimizer)
        losses = self._losses.setdefault(index, deque(maxlen=self.window))
        norms = self._norms.setdefault(index, deque(maxlen=self.window))
        loss_max = loss_limit(
            losses, num_std=self.num_std, min_increase=self.min_increase, min_values=self.warmup_steps
        )
        factor = math.inf if self.grad_norm_factor is None else self.grad_norm_factor
        norm_max = norm_limit(norms, factor=factor, min_values=self.warmup_steps)
        reason = find_trouble(loss, grad_norm, loss_max, norm_max, check_finite=self.check_finite)
        if reason is None:
            self._spikes[index] = 0
            if grad_norm > 0:  # 0 without gradients
                norms.append(grad_norm)
            if loss is not None:
                losses.append(loss)
        elif reason.startswith("nonfinite") or self._spikes.get(index, 0) + 1 >= self.patience:
            self._spikes[index] = 0
            shown_norm = grad_norm if gradients.of(optimizer) else None  # another callback has dropped the gradients
            values = {"loss": loss, "grad_norm": shown_norm, "loss_limit": loss_max, "grad_norm_limit": norm_max}
            self._trouble = (reason, {**values, "ranks": self._ranks_in_trouble(trainer)})
            if self.action != "warn":
                gradients.drop(optimizer)
        else:
            self._spikes[index] = self._spikes.get(index, 0) + 1
        self._stepped = True

    def _observe(self, trainer: pl.Trainer, optimizer: Optimizer) -> tuple[float | None, float]:
        """Loss and gradient norm, averaged over the ranks: one exchange, one transfer to the host."""
        norm = gradients.total_norm(gradients.of(optimizer))
        device = trainer.strategy.root_device
        loss = torch.zeros((), device=device) if self._loss is None else self._loss.to(device)
        # A NaN on one rank makes the mean NaN on all, so that all decide alike.
        both = trainer.strategy.reduce(torch.stack([loss, norm.to(device)]), reduce_op="mean").tolist()
        return (None if self._loss is None else both[0]), both[1]

    def _ranks_in_trouble(self, trainer: pl.Trainer) -> list[int]:
        """The ranks whose own loss is not finite."""
        own = torch.zeros((), device=trainer.strategy.root_device) if self._loss is None else self._loss
        everyone = trainer.strategy.all_gather(own.to(trainer.strategy.root_device)).reshape(-1)
        return [rank for rank, value in enumerate(everyone.tolist()) if not math.isfinite(value)]

    def _look_at_layers(self, trainer: pl.Trainer) -> None:
        if self._reader is None:
            return
        measured = self._reader.collect()
        self._close_reader()
        bad = find_bad_layers(measured, self.layer_bounds)
        if trainer.strategy.reduce_boolean_decision(bool(bad), all=False) and self._trouble is None:
            worst = [
                {"layer": layer, "operand": operand, "statistic": name, "value": value}
                for _, layer, operand, name, value in bad[:5]
            ]
            self._trouble = ("layers", {"layers": worst, "bounds": self.layer_bounds})

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.__exit__(None, None, None)
            self._reader = None

    # ------------------------------------------------------------------------------------------------------------------
    # Acting
    # ------------------------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a step: act on trouble, else take and prove snapshots."""
        if not self._stepped:
            self._close_reader()
            return
        self.steps += 1
        self._look_at_layers(trainer)
        trouble = self._trouble
        self._begin_batch()
        if trouble is not None:
            self._act(trainer, pl_module, *trouble)
            return
        self._count_down_fallback(pl_module)
        if self._ring is not None and not any(self._spikes.values()):
            self._ring.prove(trainer, self.steps)
            if self.steps % self.snapshot_every_n_steps == 0:
                self._ring.take(trainer, self.steps)

    def _act(self, trainer: pl.Trainer, pl_module: pl.LightningModule, reason: str, values: dict[str, Any]) -> None:
        self.events += 1
        event: dict[str, Any] = {
            "time": time.time(),
            "step": logger_step(trainer),
            "global_step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "reason": reason,
            **values,
        }
        if self.action in ("warn", "skip"):
            # What is called trouble today may be normal from now on.
            for window in (*self._losses.values(), *self._norms.values()) if "spike" in reason else ():
                window.clear()
            done = "warned" if self.action == "warn" else "skipped the optimizer step"
            done = "warned" if reason == "layers" else done  # the layers are measured after the step
            self._report(trainer, event | {"done": done})
            return
        if self.action == "raise":
            self._report(trainer, event | {"done": "raised"})
            raise FP4TrainingDivergedError(
                f"`FP4HealthCheck(action='raise')` stopped the run: {_describe(event)}. Its optimizer step was not "
                "taken. Use action='rollback' to go on from a healthy snapshot."
            )
        assert self._ring is not None
        snapshot = self._ring.go_back(trainer, self)
        exhausted = self.rollbacks >= self.max_rollbacks
        done = "restored healthy weights and raised" if exhausted else "rolled back"
        event |= {"done": done, "back_to_global_step": snapshot.global_step}
        if exhausted:
            self._report(trainer, event)
            raise FP4TrainingDivergedError(
                f"The run went wrong again after {self.rollbacks} rollbacks: {_describe(event)}. The model holds the "
                f"weights of step {snapshot.global_step}, the last that proved healthy. Lower the learning rate, set "
                "`lr_factor` or `fallback_recipe`, or raise `max_rollbacks` if the faults are unrelated."
            )
        self.rollbacks += 1
        if self.lr_factor != 1.0:
            event["lr_factor"] = self.lr_factor**snapshot.uses
            scale_learning_rates(trainer, event["lr_factor"])
        if self.fallback_recipe is not None:
            self._begin_fallback(pl_module, self.fallback_steps)
            event |= {"fallback_recipe": self.fallback_recipe.name, "fallback_steps": self.fallback_steps}
        self._report(trainer, event)

    def _begin_fallback(self, pl_module: pl.LightningModule, steps: int) -> None:
        assert self.fallback_recipe is not None
        before = set_recipe(pl_module, self.fallback_recipe)
        self._before_fallback = {**before, **self._before_fallback}
        self._fallback_left = steps

    def _count_down_fallback(self, pl_module: pl.LightningModule) -> None:
        if not self._fallback_left:
            return
        self._fallback_left -= 1
        if self._fallback_left == 0:
            for name, layer in fp4_layers(pl_module).items():
                # A recipe that somebody else has set meanwhile stays.
                if name in self._before_fallback and layer.fp4_recipe == self.fallback_recipe:
                    layer.fp4_recipe = self._before_fallback[name]
            self._before_fallback = {}
            rank_zero_info("FP4HealthCheck: FP4 layers have their own recipes again.")

    def _report(self, trainer: pl.Trainer, event: dict[str, Any]) -> None:
        rank_zero_info(f"FP4HealthCheck: {_describe(event)}; {event['done']}.")
        if self.action == "warn":
            rank_zero_warn(f"FP4HealthCheck: {_describe(event)}.")
        counts = {"FP4HealthCheck/events": float(self.events), "FP4HealthCheck/rollbacks": float(self.rollbacks)}
        set_callback_metrics(trainer, counts)
        log_metrics(trainer, counts, event["step"])
        if trainer.is_global_zero:
            path = os.fspath(self.log_path or os.path.join(trainer.default_root_dir, "fp4_health.jsonl"))
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            with open(path, "a") as file:
                file.write(json.dumps(_plain(event)) + "\n")

    # ------------------------------------------------------------------------------------------------------------------
    # State
    # ------------------------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        """Counters and windows, as plain data; snapshots are not part of it."""
        return {
            "steps": self.steps,
            "events": self.events,
            "rollbacks": self.rollbacks,
            "losses": {index: list(window) for index, window in self._losses.items()},
            "norms": {index: list(window) for index, window in self._norms.items()},
            "fallback_left": self._fallback_left,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        self.steps, self.events = state_dict["steps"], state_dict["events"]
        self.rollbacks = state_dict["rollbacks"]
        self._losses = {index: deque(values, self.window) for index, values in state_dict["losses"].items()}
        self._norms = {index: deque(values, self.window) for index, values in state_dict["norms"].items()}
        self._fallback_left = state_dict["fallback_left"] if self.fallback_recipe is not None else 0


def _describe(event: dict[str, Any]) -> str:
    """An event in words."""
    where = f"step {event['step']} (global step {event['global_step']}, epoch {event['epoch']})"
    if event["reason"] == "layers":
        bad = ", ".join(f"{x['layer']} {x['operand']} {x['statistic']} {x['value']:.3g}" for x in event["layers"])
        return f"{where}: FP4 layers beyond their bounds: {bad or 'on another rank'}"
    loss = "unknown" if event["loss"] is None else f"{event['loss']:.4g}"
    norm = "gradients dropped already"
    if event["grad_norm"] is not None:
        norm = f"gradient norm {event['grad_norm']:.4g} (limit {event['grad_norm_limit']:.4g})"
    return f"{where}: {event['reason'].replace('_', ' ')}, loss {loss} (limit {event['loss_limit']:.4g}), {norm}"


def _plain(value: Any) -> Any:
    """Nested data with NaN and infinity as strings, which JSON has no numbers for."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
