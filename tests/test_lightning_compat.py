"""Contract tests: what the package takes from Lightning's private parts is there and means what it should."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_fp4 import _lightning_compat as compat


class Probe(Callback):
    def __init__(self, look) -> None:
        self.look = look
        self.seen: list = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.seen.append(self.look(trainer))


def fit(tmp_path, callback: Callback, **options) -> Trainer:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        limit_train_batches=8,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[callback],
        **options,
    )
    trainer.fit(BoringModel())
    return trainer


def test_logger_step_counts_batches_that_stepped(tmp_path):
    probe = Probe(compat.logger_step)
    fit(tmp_path, probe, accumulate_grad_batches=2)
    assert probe.seen == [0, 0, 1, 1, 2, 2, 3, 3]


def test_accumulates_tells_batches_without_a_step(tmp_path):
    probe = Probe(compat.accumulates)
    fit(tmp_path, probe, accumulate_grad_batches=3)
    assert probe.seen == [True, True, False, True, True, False, True, False]


def test_writes_logs_tells_the_steps_whose_values_reach_the_loggers(tmp_path):
    probe = Probe(compat.writes_logs)
    fit(tmp_path, probe, log_every_n_steps=3)
    assert probe.seen == [False, False, True] * 2 + [False, False]


def test_logger_prefix_is_what_the_logger_puts_before_keys(tmp_path):
    for prefix in ("", "run"):
        logger = TensorBoardLogger(tmp_path, version=prefix or "none", prefix=prefix)
        logger.log_metrics({"key": 1.0}, step=0)
        logger.finalize("success")
        accumulator = EventAccumulator(logger.log_dir)
        accumulator.Reload()
        assert accumulator.Tags()["scalars"] == [f"{compat.logger_prefix(logger)}key"]
    assert compat.logger_prefix(logger) == "run-"


def test_dump_checkpoint_is_what_save_checkpoint_writes(tmp_path):
    def look(trainer):
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        return compat.dump_checkpoint(trainer), torch.load(tmp_path / "a.ckpt", weights_only=True)

    probe = Probe(look)
    fit(tmp_path, probe)
    dumped, saved = probe.seen[0]
    assert dumped.keys() == saved.keys()
    assert {"state_dict", "optimizer_states", "lr_schedulers", "loops", "callbacks"} <= dumped.keys()


@pytest.mark.parametrize("where", ["file", "dict"])
def test_restore_mid_fit_rewinds_global_step_only(tmp_path, where):
    class Restore(Probe):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            if batch_idx == 2:
                trainer.save_checkpoint(tmp_path / "a.ckpt")
                self.weight = pl_module.layer.weight.detach().clone()
            if batch_idx == 5:
                path = str(tmp_path / "a.ckpt")
                content = path if where == "file" else torch.load(path, weights_only=True)
                compat.restore_mid_fit(trainer, content, keep=[])
                assert torch.equal(pl_module.layer.weight, self.weight)
                assert trainer._checkpoint_connector._loaded_checkpoint == {}
                assert trainer._checkpoint_connector._ckpt_path is None
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    probe = Restore(lambda trainer: (trainer.global_step, compat.logger_step(trainer)))
    trainer = fit(tmp_path, probe)
    assert [step for step, _ in probe.seen] == [1, 2, 3, 4, 5, 3, 4, 5]
    assert [step for _, step in probe.seen] == list(range(8))
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch >= 0
