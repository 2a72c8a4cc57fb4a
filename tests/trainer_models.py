"""Small LightningModules, and a Trainer that is quiet and quick, for the tests of the plugins."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_fp4 import FP4Linear, FP4Precision, Recipe
from tests.helpers import RTN, TinyModel

WIDTH = 32
VOCABULARY = 48

adamw = partial(torch.optim.AdamW, lr=1e-2)
sgd = partial(torch.optim.SGD, lr=0.1)


def plugin(recipe: str | dict | Recipe = RTN, *, precision: str = "32-true", **kwargs: Any) -> FP4Precision:
    """The plugin with a recipe without randomness and without autocast, so that results compare to the bit."""
    return FP4Precision(recipe, precision=precision, **kwargs)


def trainer(*plugins: Any, **kwargs: Any) -> pl.Trainer:
    """A Trainer on one CPU process that writes nothing unless told."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    if plugins:
        defaults["plugins"] = list(plugins)
    return pl.Trainer(**{**defaults, **kwargs})


class Regressor(pl.LightningModule):
    """Two linear layers on fixed data; it remembers its losses.

    Args:
        optimizer: takes parameters.
        samples: training samples, in batches of ``batch_size``.
    """

    def __init__(
        self,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw,
        samples: int = 32,
        batch_size: int = 8,
        seed: int = 0,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.optimizer, self.samples, self.batch_size = optimizer, samples, batch_size
        self.losses: list[float] = []

    def step(self, batch: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.net(batch), batch.flip(-1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.step(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.step(batch))

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.step(batch))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())

    def loader(self) -> DataLoader:
        data = torch.randn(self.samples, WIDTH, generator=torch.Generator().manual_seed(1))
        return DataLoader(data, batch_size=self.batch_size)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader


class LanguageModel(pl.LightningModule):
    """A tiny Llama with a tied head on fixed tokens."""

    def __init__(self, blocks: int = 2, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = TinyModel(blocks=blocks, width=WIDTH, vocabulary=VOCABULARY, tied=tied)
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.parameters())

    def train_dataloader(self) -> DataLoader:
        tokens = torch.randint(VOCABULARY, (16, 9), generator=torch.Generator().manual_seed(1))
        return DataLoader(tokens, batch_size=4)


def layers_of(model: nn.Module) -> dict[str, FP4Linear]:
    """The FP4 layers of a model, without asking the package."""
    return {name: module for name, module in model.named_modules() if isinstance(module, FP4Linear)}


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the state dict."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same_weights(actual: nn.Module | dict, expected: nn.Module | dict) -> None:
    actual, expected = (m.state_dict() if isinstance(m, nn.Module) else m for m in (actual, expected))
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert torch.equal(actual[name], value), f"{name} differs"


def messages(caplog: Any) -> list[str]:
    """What the package said through Lightning's rank-zero logger."""
    return [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
