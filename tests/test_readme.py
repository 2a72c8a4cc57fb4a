"""The README's Python runs as it is written."""

import re
from pathlib import Path

import lightning.pytorch as pl
import torch

import lightning_fp4
from tests.trainer_models import VOCABULARY, LanguageModel

README = (Path(__file__).parents[1] / "README.md").read_text()


class Model(LanguageModel):
    """With the loss that the README takes for granted."""

    def loss(self, batch):
        return self.training_step(batch, 0)


class ShortTrainer(pl.Trainer):
    """What ``Trainer`` is here: two steps on a CPU."""

    def __init__(self, **kwargs):
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
        super().__init__(accelerator="cpu", devices=1, max_steps=2, **quiet, **kwargs)


def test_python_blocks(tmp_path, monkeypatch):
    """From top to bottom, as a reader goes; the first block imports ``Trainer``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pl, "Trainer", ShortTrainer)
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5
    seen = {name: getattr(lightning_fp4, name) for name in lightning_fp4.__all__}
    for number, block in enumerate(blocks, start=1):
        seen |= {"model": Model(), "batch": torch.randint(VOCABULARY, (4, 9))}
        exec(compile(block, f"README.md, Python block {number}", "exec"), seen)
