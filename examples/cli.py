"""Train a small byte-level GPT from a YAML file: python examples/cli.py fit --config examples/chon.yaml."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_fp4  # noqa: F401 - so that the command line knows its classes by their short names too


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, tokens, width]`` to the same."""
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., width]`` to the same."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.mlp = Attention(width, heads), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, tokens, width]`` to the same."""
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class ByteGPT(pl.LightningModule):
    """A GPT over bytes.

    Args:
        width: features of a token.
        blocks: number of transformer blocks.
        heads: attention heads of each.
        context: the most tokens it can read.
    """

    def __init__(self, width: int = 256, blocks: int = 4, heads: int = 4, context: int = 1024) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, 256, bias=False)

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of each next byte of ``[batch, tokens]``."""
        x = self.embed(tokens[:, :-1]) + self.position.weight[: tokens.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.norm(x)).float().flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """One step."""
        loss = self.loss(batch[0])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """One batch of validation."""
        self.log("val_loss", self.loss(batch[0]), prog_bar=True)


class Text(pl.LightningDataModule):
    """Windows of bytes from files; every tenth is for validation.

    Args:
        paths: text files.
        context: bytes that are predicted in a window.
        batch_size: windows in a batch.
    """

    def __init__(self, paths: list[str], context: int = 128, batch_size: int = 16) -> None:
        super().__init__()
        data = torch.frombuffer(bytearray(b"\n".join(Path(p).read_bytes() for p in paths)), dtype=torch.uint8)
        self.windows = data.unfold(0, context + 1, context).long()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        """Nine of ten windows, shuffled."""
        kept = torch.arange(len(self.windows)) % 10 != 9
        return DataLoader(TensorDataset(self.windows[kept]), self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        """Every tenth window."""
        return DataLoader(TensorDataset(self.windows[9::10]), self.batch_size)


if __name__ == "__main__":
    LightningCLI(ByteGPT, Text)
