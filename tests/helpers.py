"""What several tests share: expected bits, small models, error measures."""

from __future__ import annotations

import dataclasses
import functools
import io
import lzma
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import nn

from lightning_fp4 import FP4Linear, FP4Tensor, Recipe, convert_to_fp4, get_recipe
from lightning_fp4.formats import E2M1_VALUES

GOLDENS = Path(__file__).parent / "goldens"
FULL_GOLDENS = Path(__file__).resolve().parents[2] / "shared" / "goldens"

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")

#: The recipe without randomness, for comparisons to the bit.
RTN = get_recipe("nvfp4", stochastic_rounding=False, units="exact")


@functools.cache
def _small() -> dict:
    return torch.load(io.BytesIO(lzma.decompress((GOLDENS / "small.pt.xz").read_bytes())))


@functools.cache
def golden_cases(name: str) -> dict[str, dict]:
    """The cases of one file of expected bits by id: from the copy in this folder, and the full set if it is there."""
    sources = {"small": _small()[name]}
    if (FULL_GOLDENS / f"{name}.pt").exists():
        sources["full"] = torch.load(FULL_GOLDENS / f"{name}.pt")
    return {
        "-".join([source, *([case["case"], case["dtype"]] if "case" in case else [])]): case
        for source, cases in sources.items()
        for case in (cases if isinstance(cases, list) else [cases])
    }


def unpack(data: torch.Tensor) -> torch.Tensor:
    """Packed bytes to codes, written independently of the package."""
    return torch.stack((data % 16, data // 16), -1).flatten(-2)


def decode_codes(codes: torch.Tensor) -> torch.Tensor:
    values = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], dtype=torch.float32)
    return values[codes.cpu().long()]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit, NaN equal to NaN, +0 equal to -0."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def assert_same_codes(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Magnitudes equal; signs equal where the magnitude is not zero."""
    actual, expected = actual.cpu(), expected.cpu()
    torch.testing.assert_close(actual & 7, expected & 7, rtol=0, atol=0)
    nonzero = (expected & 7) != 0
    torch.testing.assert_close((actual & 8)[nonzero], (expected & 8)[nonzero], rtol=0, atol=0)


def scale_bytes(quantized: FP4Tensor) -> torch.Tensor:
    return quantized.scales.view(torch.uint8).cpu()


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    return float((actual - expected).norm() / expected.norm())


def fp4_linear_layer(
    in_features: int,
    out_features: int,
    recipe: str | Recipe = RTN,
    *,
    bias: bool = True,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> FP4Linear:
    """One FP4 layer with weights that depend on nothing but its sizes."""
    generator = torch.Generator().manual_seed(in_features * 1000 + out_features)
    layer = nn.Linear(in_features, out_features, bias=bias)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(out_features, in_features, generator=generator))
        if bias:
            layer.bias.copy_(torch.randn(out_features, generator=generator))
    convert_to_fp4(layer.to(device=device, dtype=dtype), recipe, seed=seed)
    assert isinstance(layer, FP4Linear)
    return layer


def run(layer: nn.Module, x: torch.Tensor, grad: torch.Tensor | None = None) -> dict[str, torch.Tensor | None]:
    """Forward and backward of a linear layer: its output and its gradients, all detached."""
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(torch.ones_like(y) if grad is None else grad)
    found = {"y": y, "dx": x.grad, "dw": layer.weight.grad}
    if layer.bias is not None:
        found["db"] = layer.bias.grad
    return {name: None if value is None else value.detach().clone() for name, value in found.items()}


def exact_units(device: torch.device) -> str:
    """The units that multiply NVFP4 operands on this device unless a recipe asks for others."""
    if device.type != "cuda":
        return "fp32"
    return "fp4" if torch.cuda.get_device_capability(device) >= (10, 0) else "bf16"


def assert_same_run(actual: dict, expected: dict) -> None:
    for name, value in expected.items():
        assert same_bits(actual[name], value), f"{name} differs"


def stochastic(recipe: Recipe) -> bool:
    gemms = [g for g in (recipe.fprop, recipe.dgrad, recipe.wgrad) if g]
    return any(q is not None and q.rounding.value == "stochastic" for g in gemms for q in (g.lhs, g.rhs))


def without_blocks(recipe: Recipe) -> Recipe:
    """The recipe for every block, so that a model of two blocks has FP4 layers."""
    return dataclasses.replace(recipe, first_blocks=0, last_blocks=0)


def run_processes(function: Callable[..., None], *args: Any, count: int = 2) -> None:
    """Run ``function(rank, *args)`` in processes that have imported what takes long: they are forks of one that has."""
    multiprocessing.set_forkserver_preload(["lightning.pytorch", "lightning_fp4"])
    torch.multiprocessing.start_processes(function, args, nprocs=count, start_method="forkserver")


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(width, 2 * width)
        self.down_proj = nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down_proj(torch.nn.functional.silu(self.up_proj(x)))


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(width, width, bias=False))

    def forward(self, x):
        attended = torch.nn.functional.scaled_dot_product_attention(self.q_proj(x), self.k_proj(x), self.v_proj(x))
        return self.o_proj(attended)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.self_attn = Attention(width)
        self.mlp = MLP(width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return x + self.mlp(self.norm(x + self.self_attn(x)))


class TinyModel(nn.Module):
    """Like a Llama: embedding, blocks, a head that may be tied."""

    def __init__(self, blocks: int = 2, width: int = 32, vocabulary: int = 48, tied: bool = True) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)
