"""The model that the benchmarks of training time share: a Llama-like decoder, its LightningModule and its data."""

from __future__ import annotations

import dataclasses

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The shape of a :class:`Llama`.

    Args:
        width: of the residual stream.
        depth: number of blocks.
        heads: of attention, each ``width / heads`` wide.
        hidden: width within the feed-forward layers.
        vocabulary: number of tokens.
    """

    width: int
    depth: int
    heads: int
    hidden: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        """Number of weights, norms left out."""
        return self.depth * self.width * (4 * self.width + 3 * self.hidden) + 2 * self.vocabulary * self.width


class RMSNorm(nn.RMSNorm):
    """RMSNorm in the dtype of its input (autocast would return float32, which every linear layer then casts back)."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., width]`` to the same."""
        with torch.autocast(x.device.type, enabled=False):
            return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def rotary_table(length: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding of heads of this width, float32 ``[length, width]`` each."""
    frequency = 10000 ** (-torch.arange(0, width, 2, device=device) / width)
    angle = torch.arange(length, device=device)[:, None] * frequency
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding of ``[batch, heads, length, width]``."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = table
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(size.width, size.width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """``[batch, length, width]`` to the same."""
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(rotate(q, table), rotate(k, table), v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(size.width, size.hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., width]`` to the same."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A pre-norm block."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.input_norm, self.mlp_norm = RMSNorm(size.width), RMSNorm(size.width)
        self.self_attn, self.mlp = Attention(size), MLP(size)

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """``[batch, length, width]`` to the same."""
        x = x + self.self_attn(self.input_norm(x), table)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Embedding, blocks, head. Under autocast the residual stream has autocast's dtype too."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.depth))
        self.norm = RMSNorm(size.width)
        self.lm_head = nn.Linear(size.width, size.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of predicting each token from those before it; ``tokens`` is int64 ``[batch, length]``."""
        x = self.embed(tokens)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        cos, sin = rotary_table(tokens.shape[1], self.size.width // self.size.heads, x.device)
        table = cos.to(x.dtype), sin.to(x.dtype)
        for layer in self.layers:
            x = layer(x, table)
        # The last position predicts nothing; the target -100 leaves it out, so that shapes stay round.
        targets = F.pad(tokens[:, 1:], (0, 1), value=-100)
        return F.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1), targets.flatten())


class LanguageModel(pl.LightningModule):
    """Trains a model whose forward is its loss."""

    def __init__(self, model: nn.Module, learning_rate: float = 3e-4) -> None:
        super().__init__()
        self.model, self.learning_rate = model, learning_rate

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        """``tokens`` is int64 ``[batch, length]``."""
        return self.model(tokens)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, fused on a GPU."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate, fused=self.device.type == "cuda")


class Batches(Dataset):
    """Batches of random tokens, of which small ones are more frequent: a model learns that within a few steps.

    Args:
        vocabulary: number of tokens.
        batch: sequences in a batch.
        length: of a sequence.
        distinct: number of distinct batches, which then come again.
        steps: number of batches.
    """

    def __init__(self, *, vocabulary: int, batch: int, length: int, steps: int, distinct: int = 16) -> None:
        uniform = torch.rand(min(distinct, steps), batch, length, generator=torch.Generator().manual_seed(0))
        self.tokens = (vocabulary * uniform**3).long().clamp(max=vocabulary - 1)
        self.steps = steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> Tensor:
        if index >= self.steps:
            raise IndexError(index)
        return self.tokens[index % len(self.tokens)]
