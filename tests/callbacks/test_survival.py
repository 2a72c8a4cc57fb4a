"""A run that something goes wrong in ends where an undisturbed run does: with FP4HealthCheck, and only with it."""

from __future__ import annotations

import math
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lightning_fp4.callbacks import latest_healthy_checkpoint
from tests.callbacks import survival
from tests.callbacks.models import ddp, run_ranks

pytestmark = pytest.mark.slow

FAULTS = ("batch", "weight", "lr")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[float]:
    """Final losses of runs without a fault; they differ in initial weights and data."""
    directory = tmp_path_factory.mktemp("undisturbed")
    return [survival.run(directory / str(s), "none", healthy=False, seed=s)["loss"] for s in survival.SEEDS]


def noise_limit(losses: list[float]) -> float:
    return statistics.fmean(losses) + 3 * statistics.stdev(losses)


def test_the_health_check_does_not_change_a_healthy_run(tmp_path, undisturbed):
    result = survival.run(tmp_path, "none", healthy=True)
    assert result["events"] == []
    assert result["loss"] == undisturbed[0]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_leaves_no_trace_with_the_health_check(tmp_path, undisturbed, fault):
    result = survival.run(tmp_path, fault, healthy=True)
    assert result["loss"] < noise_limit(undisturbed)
    assert result["finite"]
    assert result["steps"] == survival.STEPS
    (event,) = result["events"]
    assert event["reason"] == {"batch": "nonfinite_loss"}.get(fault, "loss_spike")
    assert survival.FAULT_AT <= event["step"] <= survival.FAULT_AT + 4
    # Snapshots come every ten steps and are proven after ten: the one of step 50 at 60.
    assert event["back_to_global_step"] == 50
    assert event["done"] == "rolled back"


@pytest.mark.parametrize("fault", FAULTS)
def test_without_the_health_check_it_ruins_the_run(tmp_path, undisturbed, fault):
    result = survival.run(tmp_path, fault, healthy=False)
    assert not result["loss"] < 3 * noise_limit(undisturbed)  # NaN counts
    assert math.isnan(result["loss"]) == (fault == "batch")


# ----------------------------------------------------------------------------------------------------------------------
# Two processes, the fault on one of them
# ----------------------------------------------------------------------------------------------------------------------


def _ranks(rank: int, directory: Path) -> None:
    results = {"none": survival.run(directory / "none", "none", healthy=False, **ddp())}
    for fault in FAULTS:
        for healthy in (True, False):
            where = directory / f"{fault}-{healthy}"
            results[fault, healthy] = survival.run(where, fault, healthy=healthy, rank=1, **ddp())
    torch.save(results, directory / f"{rank}.pt")


@pytest.mark.timeout(600)
def test_a_fault_on_one_rank_is_undone_on_all(tmp_path, undisturbed):
    run_ranks(_ranks, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2))
    limit = first["none"]["loss"] + 3 * statistics.stdev(undisturbed)
    for fault in FAULTS:
        for result in (first[fault, True], second[fault, True]):
            assert result["finite"], fault
            assert result["loss"] < limit, fault
            assert result["steps"] == survival.STEPS
        assert torch.equal(first[fault, True]["weights"], second[fault, True]["weights"])
        (event,) = first[fault, True]["events"]  # one line, though two ranks wrote it together
        assert event["done"] == "rolled back"
        assert event["ranks"] == ([1] if fault == "batch" else [])

        # Without the check the run is ruined: the NaN is on both ranks, the others make their weights differ for good.
        without = [first[fault, False], second[fault, False]]
        bad = [not result["loss"] < 3 * limit for result in without]
        assert any(bad), fault
        assert all(bad) or not torch.equal(without[0]["weights"], without[1]["weights"])


# ----------------------------------------------------------------------------------------------------------------------
# A process that is killed while it writes a checkpoint
# ----------------------------------------------------------------------------------------------------------------------

KILLED = """
import sys, time, torch, lightning.pytorch as pl
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from tests.callbacks.models import TinyModule, loader, trainer
from lightning_fp4 import FP4Precision
from lightning_fp4.callbacks import FP4HealthCheck, latest_healthy_checkpoint

class SlowIO(TorchCheckpointIO):
    "Writes the fourth checkpoint's first half, and waits."
    count = 0
    def save_checkpoint(self, checkpoint, path, storage_options=None):
        super().save_checkpoint(checkpoint, path, storage_options)
        SlowIO.count += 1
        if SlowIO.count == 4 and sys.argv[2] == "slow":
            content = open(path, "rb").read()
            open(path, "wb").write(content[: len(content) // 2])
            print("half written", path, flush=True)
            time.sleep(600)

directory, mode = sys.argv[1:]
path = latest_healthy_checkpoint(directory + "/snapshots")
check = FP4HealthCheck(snapshot="checkpoint", dirpath=directory + "/snapshots", snapshot_every_n_steps=4,
                       healthy_after_n_steps=2)
fit = trainer(directory, callbacks=[check], plugins=[SlowIO(), FP4Precision("nvfp4", precision="32-true")],
              max_steps=20, max_epochs=9)
module = TinyModule(depth=1)
start = []
module.on_train_start = lambda: start.append(fit.global_step)
fit.fit(module, loader(30), ckpt_path=path)
print("from", path, "start", start[0], "end", fit.global_step, "seen", check.steps,
      "finite", all(p.isfinite().all().item() for p in module.parameters()), flush=True)
"""


def test_a_killed_process_resumes_from_the_last_good_checkpoint(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(KILLED)
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": path}
    first = subprocess.Popen([*command, "slow"], env=environment, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    partial = next(line for line in first.stdout if line.startswith("half written")).split()[-1]
    first.send_signal(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    time.sleep(0.1)
    # The torn file is there, broken, and under a name that nothing resumes from.
    assert Path(partial).exists()
    with pytest.raises(RuntimeError, match="zip archive"):
        torch.load(partial, weights_only=True)
    # What has the name of a checkpoint is whole.
    names = sorted(path.name for path in (tmp_path / "snapshots").glob("*.ckpt"))
    assert names == ["healthy-00000004.ckpt", "healthy-00000008.ckpt"]
    for name in names:
        assert torch.load(tmp_path / "snapshots" / name, weights_only=True)["global_step"] == int(name[8:16])
    # Snapshots at 0, 4, 8; at 12 it was killed. That of 8 was proven at 10.
    good = latest_healthy_checkpoint(tmp_path / "snapshots")
    assert good is not None
    assert good.endswith("healthy-00000008.ckpt")
    second = subprocess.run([*command, "fast"], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in second.stdout.splitlines() if line.startswith("from"))
    assert line.split()[1] == good
    assert "start 8 end 20 seen 20 finite True" in line
