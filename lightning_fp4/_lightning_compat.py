"""Every private attribute of Lightning that the package uses, each with a contract test in test_lightning_compat.py."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

# ----------------------------------------------------------------------------------------------------------------------
# Callbacks: logging
# ----------------------------------------------------------------------------------------------------------------------


def logger_step(trainer: pl.Trainer) -> int:
    """The step that Lightning's own callbacks log at; unlike ``global_step`` it never goes back."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def writes_logs(trainer: pl.Trainer) -> bool:
    """Whether the values logged in the present step go to the loggers."""
    return trainer._logger_connector.should_update_logs


def accumulates(trainer: pl.Trainer) -> bool:
    """Whether the present batch only adds to the gradients, with no optimizer step after it."""
    return trainer.fit_loop._should_accumulate()


def logger_prefix(logger: TensorBoardLogger) -> str:
    """What the logger puts before every key, for values that are written around it."""
    return f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}" if logger._prefix else ""


# ----------------------------------------------------------------------------------------------------------------------
# Callbacks: rolling back
# ----------------------------------------------------------------------------------------------------------------------


def dump_checkpoint(trainer: pl.Trainer) -> dict[str, Any]:
    """What ``trainer.save_checkpoint`` would write; its tensors are the live ones."""
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)


def restore_mid_fit(trainer: pl.Trainer, checkpoint: str | dict[str, Any], keep: Collection[str]) -> None:
    """Put back weights, optimizers, schedulers, precision plugin, callbacks and ``global_step`` in the middle of a fit.

    The position in the data, the counters of epochs and batches and the loggers' step go on.

    Args:
        trainer: the one that fits.
        checkpoint: path of a checkpoint that this run wrote, or its content (which is left alone).
        keep: ``state_key`` of the callbacks whose state stays.

    Raises:
        MisconfigurationException: if the checkpoint holds no optimizer states.
    """
    connector = trainer._checkpoint_connector
    resumed_from = connector._ckpt_path
    if isinstance(checkpoint, str):
        # Not `weights_only`: the file is this run's own, and hyperparameters may be any object.
        connector.resume_start(checkpoint, weights_only=False)
    else:
        connector._ckpt_path = None
        connector._loaded_checkpoint = checkpoint
    try:
        loaded = connector._loaded_checkpoint
        if "optimizer_states" not in loaded and trainer.strategy.lightning_restore_optimizer:
            raise MisconfigurationException(
                f"The checkpoint {checkpoint if isinstance(checkpoint, str) else ''} has no optimizer states, so the "
                "run cannot go back to it. Save with `save_weights_only=False`."
            )
        for key in keep:
            loaded.get("callbacks", {}).pop(key, None)
        connector.restore_model()
        connector.restore_callbacks()  # `WeightAveraging` keeps the live weights there
        connector.restore_precision_plugin_state()
        connector.restore_optimizers_and_schedulers()
        _restore_step_counters(trainer, loaded["loops"]["fit_loop"])
    finally:
        connector.resume_end()
        connector._ckpt_path = resumed_from


def _restore_step_counters(trainer: pl.Trainer, saved: dict[str, Any]) -> None:
    """Restore what ``trainer.global_step`` counts, and only that."""
    loop = trainer.fit_loop.epoch_loop
    progress = {
        "epoch_loop.automatic_optimization.optim_progress": loop.automatic_optimization.optim_progress,
        "epoch_loop.manual_optimization.optim_step_progress": loop.manual_optimization.optim_step_progress,
        "epoch_loop.scheduler_progress": loop.scheduler_progress,
    }
    for key, counter in progress.items():
        counter.load_state_dict(saved[key])
