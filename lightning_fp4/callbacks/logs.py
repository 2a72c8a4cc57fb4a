"""Values for the loggers and for callbacks that monitor them, without ``log_dict``, which takes milliseconds."""

from __future__ import annotations

from collections.abc import Mapping

import lightning.pytorch as pl
import torch


def set_callback_metrics(trainer: pl.Trainer, values: Mapping[str, float]) -> None:
    """Show values to ``EarlyStopping``, ``ModelCheckpoint`` and schedulers, as float32 scalars by name."""
    metrics = torch.tensor(list(values.values()), dtype=torch.float32).unbind()
    trainer.callback_metrics.update(zip(values, metrics, strict=True))


def log_metrics(trainer: pl.Trainer, values: Mapping[str, float], step: int) -> None:
    """Give values to all loggers."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(values), step=step)
