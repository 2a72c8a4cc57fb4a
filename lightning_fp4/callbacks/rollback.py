"""Going back in the middle of a fit: snapshots in memory or on disk, which of them can be trusted, and the way back."""

from __future__ import annotations

import glob
import os
import shutil
from dataclasses import dataclass
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, Timer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_fp4._lightning_compat import dump_checkpoint, restore_mid_fit

_CANDIDATE, _HEALTHY = "candidate", "healthy"


# ----------------------------------------------------------------------------------------------------------------------
# Where snapshots are
# ----------------------------------------------------------------------------------------------------------------------


class SnapshotStore(Protocol):
    """A place for snapshots: what :meth:`take` returns can be promoted, restored and dropped."""

    def take(self, trainer: pl.Trainer, step: int) -> Any:
        """Save the present state; every rank calls it."""

    def promote(self, trainer: pl.Trainer, snapshot: Any) -> Any:
        """Mark a snapshot as proven healthy; returns what it is from now on."""

    def load(self, snapshot: Any) -> str | dict[str, Any]:
        """What ``restore_mid_fit`` takes."""

    def drop(self, trainer: pl.Trainer, snapshot: Any) -> None:
        """Let go of a snapshot."""


class MemoryStore:
    """Snapshots in the host's memory, on each rank.

    Copies from a GPU are queued behind the work that is running, so taking a snapshot does not wait for it. They go to
    page-locked memory, which PyTorch's allocator uses again once a snapshot is dropped.
    """

    def take(self, trainer: pl.Trainer, step: int) -> dict[str, Any]:
        """A copy of what a checkpoint would hold."""
        return _to_host(dump_checkpoint(trainer))

    def promote(self, trainer: pl.Trainer, snapshot: dict[str, Any]) -> dict[str, Any]:
        """Nothing to do."""
        return snapshot

    def load(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        """A copy: optimizers keep the tensors that they are given, and step them in place."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copy to the host may still be queued
        return _to_host(snapshot)

    def drop(self, trainer: pl.Trainer, snapshot: dict[str, Any]) -> None:
        """Nothing to do: the memory is free when nobody holds the snapshot."""


class DiskStore:
    """Snapshots as checkpoint files: ``candidate-STEP.ckpt``, renamed to ``healthy-STEP.ckpt`` once proven.

    A file has its name only when it is complete, so whatever kills the process, the names tell the truth.

    Args:
        directory: where; on several nodes it has to be shared.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def take(self, trainer: pl.Trainer, step: int) -> str:
        """Write ``candidate-STEP.ckpt``."""
        path = os.path.join(self.directory, f"{_CANDIDATE}-{step:08d}.ckpt")
        trainer.save_checkpoint(f"{path}.partial")
        self._on_one_rank(trainer, lambda: _replace(f"{path}.partial", path))
        return path

    def promote(self, trainer: pl.Trainer, snapshot: str) -> str:
        """Rename to ``healthy-STEP.ckpt``."""
        head, name = os.path.split(snapshot)
        path = os.path.join(head, name.replace(_CANDIDATE, _HEALTHY))
        self._on_one_rank(trainer, lambda: _replace(snapshot, path))
        return path

    def load(self, snapshot: str) -> str:
        """The path."""
        return snapshot

    def drop(self, trainer: pl.Trainer, snapshot: str) -> None:
        """Delete it."""
        self._on_one_rank(trainer, lambda: _delete(snapshot))

    @staticmethod
    def _on_one_rank(trainer: pl.Trainer, action: Any) -> None:
        if trainer.is_global_zero:
            action()
        trainer.strategy.barrier("lightning_fp4 snapshot")


def latest_healthy_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """The checkpoint in an ``FP4HealthCheck(snapshot="checkpoint", dirpath=...)`` directory to resume from.

    Works after any kind of crash: files that were being written have another name and are not considered.

    Returns:
        The one proven healthy that was written last, else the complete one written last, else ``None``.

    Example::

        trainer.fit(model, ckpt_path=latest_healthy_checkpoint("checkpoints"))
    """
    for kind in (_HEALTHY, _CANDIDATE):
        found = glob.glob(os.path.join(glob.escape(os.fspath(directory)), f"{kind}-*.ckpt"))
        if found:
            return max(found, key=lambda path: (os.path.getmtime(path), path))
    return None


def refuse_unsafe_stores(trainer: pl.Trainer, on_disk: bool) -> None:
    """Raise where a snapshot could not be taken or restored.

    Raises:
        MisconfigurationException: for DeepSpeed; for memory snapshots of sharded models; for asynchronous writing.
    """
    strategy = trainer.strategy
    if isinstance(strategy, DeepSpeedStrategy):
        raise MisconfigurationException(
            "`FP4HealthCheck(action='rollback')` does not support `DeepSpeedStrategy`. Use `ModelParallelStrategy` "
            "(FSDP2) or `DDPStrategy`."
        )
    if not on_disk and strategy.restore_checkpoint_after_setup:
        raise MisconfigurationException(
            f"`FP4HealthCheck(snapshot='memory')` cannot restore the shards of `{type(strategy).__name__}`. Use "
            "`snapshot='checkpoint'`."
        )
    if on_disk and isinstance(strategy.checkpoint_io, AsyncCheckpointIO):
        raise MisconfigurationException(
            "`FP4HealthCheck(snapshot='checkpoint')` has to know when a file is complete, which `AsyncCheckpointIO` "
            "does not tell. Use `snapshot='memory'` or another checkpoint IO."
        )


def _to_host(value: Any) -> Any:
    """A copy of nested data with all tensors on the host."""
    if isinstance(value, Tensor):
        if not value.is_cuda:
            return value.detach().clone()
        target = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        return target.copy_(value.detach(), non_blocking=True)
    if isinstance(value, dict):
        return {key: _to_host(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_to_host(item) for item in value)
    return value


def _replace(source: str, target: str) -> None:
    if os.path.isdir(target):
        shutil.rmtree(target)
    os.replace(source, target)


def _delete(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path)
    elif os.path.exists(path):
        os.remove(path)


# ----------------------------------------------------------------------------------------------------------------------
# Which snapshots can be trusted
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Snapshot:
    """One snapshot.

    Args:
        step: optimizer steps taken when it was made, counting those that were undone.
        global_step: of the Trainer when it was made.
        data: what the store returned.
        uses: how often the run went back to it.
    """

    step: int
    global_step: int
    data: Any
    uses: int = 0


class SnapshotRing:
    """Snapshots of which the newest few that are proven healthy are kept.

    A new snapshot is a candidate until ``prove_steps`` steps went by without trouble. Trouble drops the candidate;
    going back twice with no proof in between falls back on the snapshot before.

    Args:
        store: where snapshots are.
        keep: how many healthy ones to keep.
        prove_steps: steps that prove a snapshot.
    """

    def __init__(self, store: SnapshotStore, *, keep: int, prove_steps: int) -> None:
        self.store, self.keep, self.prove_steps = store, keep, prove_steps
        self.candidate: Snapshot | None = None
        self.healthy: list[Snapshot] = []
        self._went_back = False

    def take(self, trainer: pl.Trainer, step: int, *, trusted: bool = False) -> None:
        """Take a candidate, unless there is one; or a snapshot that needs no proof."""
        if self.candidate is None:
            data = self.store.take(trainer, step)
            self.candidate = Snapshot(step=step, global_step=trainer.global_step, data=data)
        if trusted:
            self._promote(trainer)

    def prove(self, trainer: pl.Trainer, step: int) -> None:
        """Promote the candidate if it is old enough."""
        if self.candidate is not None and step - self.candidate.step >= self.prove_steps:
            self._promote(trainer)
            self._went_back = False

    def go_back(self, trainer: pl.Trainer, owner: pl.Callback) -> Snapshot:
        """Restore the newest snapshot that can be trusted, on every rank."""
        self.drop_candidate(trainer)
        if self._went_back and len(self.healthy) > 1:
            self.store.drop(trainer, self.healthy.pop().data)
        self._went_back = True
        snapshot = self.healthy[-1]
        snapshot.uses += 1
        roll_back(trainer, self.store.load(snapshot.data), owner)
        return snapshot

    def drop_candidate(self, trainer: pl.Trainer) -> None:
        """Let go of what is not proven."""
        if self.candidate is not None:
            self.store.drop(trainer, self.candidate.data)
            self.candidate = None

    def _promote(self, trainer: pl.Trainer) -> None:
        assert self.candidate is not None
        snapshot, self.candidate = self.candidate, None
        snapshot.data = self.store.promote(trainer, snapshot.data)
        self.healthy.append(snapshot)
        while len(self.healthy) > self.keep:
            self.store.drop(trainer, self.healthy.pop(0).data)


# ----------------------------------------------------------------------------------------------------------------------
# The way back
# ----------------------------------------------------------------------------------------------------------------------


def roll_back(trainer: pl.Trainer, checkpoint: str | dict[str, Any], owner: pl.Callback) -> None:
    """Rewind weights, optimizers, schedules, precision plugin and averaged weights; leave data and counters.

    State of checkpoint, timer and early-stopping callbacks, of ``owner``, and of callbacks with a true attribute
    ``survives_rollback`` stays as it is. Gradients of a window that has begun are dropped.
    """
    if isinstance(checkpoint, str):
        checkpoint = trainer.strategy.broadcast(checkpoint)
    keep = [
        callback.state_key
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if callback is owner
        or isinstance(callback, (Checkpoint, EarlyStopping, Timer))
        or getattr(callback, "survives_rollback", False)
    ]
    restore_mid_fit(trainer, checkpoint, keep)
    for optimizer in trainer.optimizers:
        optimizer.zero_grad(set_to_none=True)


def scale_learning_rates(trainer: pl.Trainer, factor: float) -> None:
    """Multiply the learning rates of all optimizers, and what their schedulers compute the next ones from."""
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            group["lr"] *= factor
            if "initial_lr" in group:
                group["initial_lr"] *= factor
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    while schedulers:
        scheduler: Any = schedulers.pop()
        if hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs = [rate * factor for rate in scheduler.base_lrs]
        schedulers += getattr(scheduler, "_schedulers", [])  # of SequentialLR and ChainedScheduler
