"""A small GPT as a LightningModule, and what the tests of callbacks share."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_fp4 import convert_to_fp4
from tests.helpers import run_processes

VOCABULARY = 60


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.self_attn, self.mlp = Attention(width, heads), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width: int = 32, depth: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class Sequences(Dataset):
    """Sequences of a fixed order-1 Markov chain, so that there is something to learn; ``index`` is the batch's poison.

    Items are ``(tokens, weight)``: the weight multiplies the loss and is NaN for poisoned items.
    """

    def __init__(self, size: int, length: int = 17, poisoned: tuple[int, ...] = (), seed: int = 0) -> None:
        self.size, self.length, self.poisoned, self.seed = size, length, poisoned, seed
        generator = torch.Generator().manual_seed(1)
        self.next = torch.stack([torch.randperm(VOCABULARY, generator=generator) for _ in range(2)])

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        tokens = [int(torch.randint(VOCABULARY, (), generator=generator))]
        choices = torch.rand(self.length, generator=generator) < 0.2
        for choice in choices[1:]:
            tokens.append(int(self.next[int(choice), tokens[-1]]))
        weight = float("nan") if index in self.poisoned else 1.0
        return torch.tensor(tokens), torch.tensor(weight)


class TinyModule(pl.LightningModule):
    def __init__(
        self,
        *,
        width: int = 32,
        depth: int = 2,
        lr: float = 3e-3,
        recipe: Any = None,
        manual: bool = False,
        seed: int = 0,
        schedule: Callable[[int], float] | None = None,
    ) -> None:
        super().__init__()
        self.lr, self.recipe, self.schedule = lr, recipe, schedule
        self.automatic_optimization = not manual
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model = GPT(width, depth)
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.recipe is not None:
            convert_to_fp4(self.model, self.recipe, last_blocks=0, seed=0)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, weight = batch
        logits = self.model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return (loss.view(tokens.shape[0], -1) * weight[:, None]).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        if self.schedule is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.schedule)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader(batches: int, batch_size: int = 4, **options: Any) -> DataLoader:
    return DataLoader(Sequences(batches * batch_size, **options), batch_size=batch_size)


def trainer(directory: Path | str, *, callbacks: list[pl.Callback], **options: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": directory,
    }
    if options.get("barebones"):
        for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"):
            del defaults[name]
    return pl.Trainer(callbacks=callbacks, **(defaults | options))


def _entry(rank: int, function: Callable[..., None], directory: str, world_size: int, args: tuple) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", RANK=str(rank), LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(world_size)
    )
    os.environ["MASTER_PORT"] = (Path(directory) / "port").read_text()
    function(rank, Path(directory), *args)


def run_ranks(function: Callable[..., None], directory: Path, *args: Any, world_size: int = 2) -> None:
    """Run ``function(rank, directory, *args)`` in processes that find each other as torchrun's would."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (directory / "port").write_text(str(free.getsockname()[1]))
    run_processes(_entry, function, str(directory), world_size, args, count=world_size)


class Elastic(TorchElasticEnvironment):
    """The environment that :func:`run_ranks` sets up."""

    @staticmethod
    def detect() -> bool:
        return True


def ddp(**options: Any) -> dict[str, Any]:
    """Trainer arguments for two processes started by :func:`run_ranks`."""
    strategy = DDPStrategy(process_group_backend="gloo", cluster_environment=Elastic())
    return {"strategy": strategy, "devices": 2, **options}
