"""Values for the loggers and for callbacks that monitor them."""

from __future__ import annotations

import csv
from pathlib import Path

import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_fp4.callbacks.logs import log_metrics, set_callback_metrics
from tests.callbacks.models import trainer


def test_values_reach_callbacks_and_every_logger(tmp_path):
    loggers = [CSVLogger(tmp_path, name) for name in ("a", "b")]
    fit = trainer(tmp_path, callbacks=[], logger=loggers)
    torch.set_default_dtype(torch.bfloat16)  # has no 257
    try:
        set_callback_metrics(fit, {"steps": 257.0, "norm": 0.5})
        set_callback_metrics(fit, {"norm": float("inf")})
        set_callback_metrics(fit, {})
    finally:
        torch.set_default_dtype(torch.float32)
    assert {name: (value.item(), value.shape) for name, value in fit.callback_metrics.items()} == {
        "steps": (257.0, ()),
        "norm": (float("inf"), ()),
    }
    log_metrics(fit, {"norm": 0.5}, step=7)
    for logger in loggers:
        logger.save()
        with open(Path(logger.log_dir) / "metrics.csv") as file:
            assert list(csv.DictReader(file)) == [{"norm": "0.5", "step": "7"}]
