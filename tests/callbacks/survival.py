"""Runs that something goes wrong in: the faults, and one training run with or without FP4HealthCheck."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lightning_fp4 import FP4Precision
from lightning_fp4.callbacks import FP4HealthCheck
from lightning_fp4.schedules import warmup_cosine
from tests.callbacks.models import Sequences, TinyModule, trainer

STEPS, FAULT_AT, BATCH = 120, 60, 8
RECIPE = {"name": "nvfp4", "hadamard": False, "stochastic_rounding": False, "last_blocks": 0}
#: What differs between undisturbed runs: initial weights and the order of the data.
SEEDS = (0, 1, 2, 3)


class Fault(Callback):
    """Does ``fault`` at batch ``FAULT_AT``, on the rank ``rank`` only; the NaN of ``"batch"`` is in the data."""

    def __init__(self, fault: str, rank: int = 0) -> None:
        self.fault, self.rank = fault, rank

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_rank != self.rank:
            return
        if self.fault == "batch" and batch_idx == FAULT_AT:
            batch[1][0] = torch.nan
        if self.fault == "weight" and batch_idx == FAULT_AT:
            with torch.no_grad():  # what a flipped exponent bit looks like
                pl_module.model.layers[0].mlp.down_proj.weight[3, 5] = 1e8
        if self.fault == "lr" and FAULT_AT <= batch_idx < FAULT_AT + 3:
            for group in trainer.optimizers[0].param_groups:
                group["lr"] = 1.0  # until the schedule sets the next step's


def run(directory: Path, fault: str, *, healthy: bool, seed: int = 0, rank: int = 0, **options: Any) -> dict[str, Any]:
    """Train; returns the loss on held-out data, the events, and whether the weights are finite."""
    directory.mkdir(parents=True, exist_ok=True)
    schedule = functools.partial(warmup_cosine, warmup_steps=5, total_steps=STEPS, final=0.05)
    module = TinyModule(depth=1, lr=1e-2, seed=seed, schedule=schedule)
    check = FP4HealthCheck(
        window=30, warmup_steps=15, patience=2, snapshot_every_n_steps=10, healthy_after_n_steps=10, num_std=4.0
    )
    fit = trainer(
        directory,
        callbacks=[Fault(fault, rank), *([check] if healthy else [])],
        max_steps=STEPS,
        plugins=[FP4Precision(RECIPE, precision="32-true", ignore_modules=["self_attn"], seed=seed)],
        **options,
    )
    fit.fit(module, DataLoader(Sequences(2 * (STEPS + 60) * BATCH, seed=seed), batch_size=BATCH))
    module.eval()
    with torch.no_grad():
        held_out = next(iter(DataLoader(Sequences(512, seed=77), batch_size=512)))
        loss = module.loss(held_out).item()
    events = directory / "fp4_health.jsonl"
    return {
        "loss": loss,
        "events": [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else [],
        "finite": all(bool(p.isfinite().all()) for p in module.parameters()),
        "steps": fit.global_step,
        "weights": torch.cat([p.detach().flatten() for p in module.parameters()]),
    }
