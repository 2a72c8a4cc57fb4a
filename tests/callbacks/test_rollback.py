"""Going back in the middle of a fit: what rewinds, what goes on, and which snapshots are trusted."""

from __future__ import annotations

import os

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_fp4.callbacks import latest_healthy_checkpoint
from lightning_fp4.callbacks.rollback import DiskStore, MemoryStore, SnapshotRing, roll_back, scale_learning_rates
from tests.callbacks.models import TinyModule, loader, trainer


class GoBack(Callback):
    """Takes a snapshot after batch ``take``, goes back to it after batch ``back``, and notes everything."""

    def __init__(self, store, take: int, back: int) -> None:
        self.store, self.at_take, self.at_back = store, take, back
        self.notes: list[dict] = []

    def note(self, trainer, pl_module, batch_idx: int) -> dict:
        optimizer = trainer.optimizers[0]
        averages = [c for c in trainer.callbacks if isinstance(c, EMAWeightAveraging)]
        return {
            "batch_idx": batch_idx,
            "weights": [p.detach().clone() for p in pl_module.parameters()],
            "moments": [s["exp_avg"].clone() for s in optimizer.state.values()],
            "adam_step": max((s["step"].item() for s in optimizer.state.values()), default=0),
            "lr": optimizer.param_groups[0]["lr"],
            "global_step": trainer.global_step,
            "schedule": trainer.lr_scheduler_configs[0].scheduler.last_epoch,
            "logger_step": trainer.fit_loop.epoch_loop._batches_that_stepped,
            "average": [p.detach().clone() for c in averages for p in c._average_model.module.parameters()],
        }

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        count = len(self.notes)
        if count == self.at_back:
            roll_back(trainer, self.store.load(self.snapshot), self)
            assert all(p.grad is None for p in pl_module.parameters())
        self.notes.append(self.note(trainer, pl_module, batch_idx))
        if count == self.at_take:
            self.snapshot = self.store.take(trainer, count)

    def state_dict(self):
        return {"must": "stay"}

    def load_state_dict(self, state_dict) -> None:
        raise AssertionError("the owner's state must not be rewound")


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("ema", [False, True])
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_training_rewinds_and_the_data_goes_on(tmp_path, where, ema, accumulate):
    store = MemoryStore() if where == "memory" else DiskStore(str(tmp_path))
    # Back in the second epoch, in the middle of an accumulation window, to a snapshot of the first.
    go_back = GoBack(store, take=11, back=22)
    callbacks = [go_back] + ([EMAWeightAveraging(decay=0.5)] if ema else [])
    module = TinyModule(depth=1, schedule=lambda step: 0.9**step)
    fit = trainer(tmp_path, callbacks=callbacks, max_epochs=2, accumulate_grad_batches=accumulate)
    fit.fit(module, loader(16))
    taken, before, after = (go_back.notes[i] for i in (11, 21, 22))
    for key in ("weights", "moments", "average"):
        assert all(map(torch.equal, taken[key], after[key])), key
        assert not taken[key] or not all(map(torch.equal, before[key], after[key])), key
    assert after["adam_step"] == taken["adam_step"]
    assert after["global_step"] == taken["global_step"] == 12 // accumulate
    # The schedule steps after this hook: the snapshot was taken before its twelfth step.
    assert after["schedule"] == taken["schedule"]
    assert after["lr"] == pytest.approx(taken["lr"])
    assert [n["batch_idx"] for n in go_back.notes] == [*range(16), *range(16)]
    assert [n["logger_step"] for n in go_back.notes] == [
        (i // 16) * (16 // accumulate) + i % 16 // accumulate for i in range(32)
    ]
    # From there on it trains: the snapshot must not have been stepped in place.
    assert not all(map(torch.equal, go_back.notes[-1]["weights"], after["weights"]))
    loaded = store.load(go_back.snapshot)
    content = torch.load(loaded, weights_only=True) if where == "disk" else loaded
    assert content["optimizer_states"][0]["state"][0]["step"] == taken["adam_step"]
    if not ema:
        for saved, weight in zip(content["state_dict"].values(), taken["weights"], strict=True):
            assert torch.equal(saved, weight)


def test_model_checkpoint_keeps_its_books(tmp_path):
    go_back = GoBack(MemoryStore(), take=3, back=9)
    checkpoint = ModelCheckpoint(tmp_path / "books", every_n_train_steps=3, save_top_k=-1)
    fit = trainer(tmp_path, callbacks=[go_back, checkpoint], enable_checkpointing=True)
    fit.fit(TinyModule(depth=1, schedule=lambda step: 1.0), loader(12))
    assert checkpoint.best_model_path
    assert fit.global_step == 12 - 6


def test_learning_rates_stay_scaled_through_their_schedulers():
    class FakeTrainer:
        pass

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    rest = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.25)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, rest], milestones=[2])
    fake = FakeTrainer()
    fake.optimizers = [optimizer]
    fake.lr_scheduler_configs = [type("Config", (), {"scheduler": scheduler})]
    scale_learning_rates(fake, 0.1)
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.05, 0.05, 0.025, 0.025])


# ----------------------------------------------------------------------------------------------------------------------
# Which snapshots are trusted
# ----------------------------------------------------------------------------------------------------------------------


class FakeStore:
    def __init__(self) -> None:
        self.dropped: list[int] = []

    def take(self, trainer, step):
        return step

    def promote(self, trainer, snapshot):
        return snapshot

    def load(self, snapshot):
        return {}

    def drop(self, trainer, snapshot) -> None:
        self.dropped.append(snapshot)


@pytest.fixture
def ring(monkeypatch):
    monkeypatch.setattr("lightning_fp4.callbacks.rollback.roll_back", lambda *args: None)
    return SnapshotRing(FakeStore(), keep=2, prove_steps=5)


class AnyTrainer:
    global_step = 0


def test_a_snapshot_is_trusted_only_when_proven(ring):
    ring.take(AnyTrainer, 0, trusted=True)
    ring.take(AnyTrainer, 10)
    ring.prove(AnyTrainer, 14)
    assert ring.go_back(AnyTrainer, None).step == 0  # 10 was not proven
    assert ring.store.dropped == [10]
    ring.take(AnyTrainer, 20)
    ring.prove(AnyTrainer, 25)
    assert [s.step for s in ring.healthy] == [0, 20]
    assert ring.go_back(AnyTrainer, None).step == 20
    # No proof since: the next trouble goes one further back.
    assert ring.go_back(AnyTrainer, None).step == 0
    assert ring.go_back(AnyTrainer, None).step == 0
    assert ring.healthy[-1].uses == 3


def test_only_the_newest_are_kept(ring):
    for step in range(0, 50, 10):
        ring.take(AnyTrainer, step)
        ring.take(AnyTrainer, step + 1)  # no second candidate beside the first
        ring.prove(AnyTrainer, step + 5)
    assert [s.step for s in ring.healthy] == [30, 40]
    assert ring.store.dropped == [0, 10, 20]


def test_the_checkpoint_to_resume_from(tmp_path):
    assert latest_healthy_checkpoint(tmp_path / "missing") is None
    times = {"candidate-00000001.ckpt": 1, "candidate-00000009.ckpt": 9, "candidate-00000012.ckpt.partial": 12}
    for name, when in times.items():
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (when, when))
    assert latest_healthy_checkpoint(tmp_path).endswith("candidate-00000009.ckpt")
    # Not the highest number, which may be an older run's, but the one written last.
    for name, when in {"healthy-00000050.ckpt": 2, "healthy-00000007.ckpt": 7}.items():
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (when, when))
    assert latest_healthy_checkpoint(tmp_path).endswith("healthy-00000007.ckpt")


def test_a_checkpoint_without_optimizer_states_is_refused(tmp_path):
    class Weights(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
            roll_back(trainer, str(tmp_path / "weights.ckpt"), self)

    with pytest.raises(MisconfigurationException, match="no optimizer states"):
        trainer(tmp_path, callbacks=[Weights()]).fit(TinyModule(depth=1), loader(1))
