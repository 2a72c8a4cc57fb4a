"""All callbacks over FSDP2 shards: two processes, on the CPU or on two GPUs, a bad batch on one of them."""

from __future__ import annotations

import json

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from lightning_fp4 import FP4Precision
from lightning_fp4.callbacks import AdaptiveGradientClipping, FP4HealthCheck, PrecisionMonitor
from tests.callbacks.models import Elastic, TinyModule, loader, run_ranks, trainer
from tests.helpers import needs_two_gpus

pytestmark = pytest.mark.slow


class Sharded(TinyModule):
    def configure_model(self) -> None:
        for layer in self.model.layers:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


def _rank(rank, directory, accelerator, backend):
    strategy = ModelParallelStrategy(process_group_backend=backend, data_parallel_size=2, tensor_parallel_size=1)
    clip, monitor = AdaptiveGradientClipping(), PrecisionMonitor(every_n_steps=2)
    check = FP4HealthCheck(snapshot="checkpoint", snapshot_every_n_steps=2, healthy_after_n_steps=1)
    fit = trainer(
        directory,
        callbacks=[check, clip, monitor],
        strategy=strategy,
        accelerator=accelerator,
        devices=2,
        logger=CSVLogger(directory),
        plugins=[Elastic(), FP4Precision("nvfp4", precision="32-true", last_blocks=0)],
    )
    module = Sharded()
    fit.fit(module, loader(16, batch_size=1, poisoned=(9,)))
    weights = torch.cat([p.full_tensor().detach().flatten() for p in module.parameters()]).cpu()
    layers = [s.layer for s in monitor.report.statistics if s.operand == "weight"]
    norm = clip.states[0].average
    shown = {name: repr(value.item()) for name, value in fit.callback_metrics.items()}
    torch.save((weights, shown, norm, check.rollbacks, fit.global_step, len(layers)), directory / f"{rank}.pt")


@pytest.mark.parametrize(
    ("accelerator", "backend"), [("cpu", "gloo"), pytest.param("gpu", "nccl", marks=[pytest.mark.gpu, needs_two_gpus])]
)
def test_all_callbacks_over_shards(accelerator, backend, tmp_path):
    run_ranks(_rank, tmp_path, accelerator, backend)
    (first, *seen), (second, *others) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert torch.equal(first, second)
    assert first.isfinite().all()
    assert seen == others
    shown, norm, rollbacks, steps, layers = seen
    assert "PrecisionMonitor/sqnr/grad_output" in shown
    assert norm > 0
    assert rollbacks == 1
    assert steps < 8
    assert layers == 14
    (event,) = map(json.loads, (tmp_path / "fp4_health.jsonl").read_text().splitlines())
    assert event["done"] == "rolled back"
