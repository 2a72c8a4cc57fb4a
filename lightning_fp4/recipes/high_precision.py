"""No quantisation at all: what a schedule switches to, and what a comparison is against."""

from __future__ import annotations

from lightning_fp4.recipes.base import Recipe


def high_precision() -> Recipe:
    """Every GEMM in the base precision; the layer computes what ``nn.Linear`` does."""
    return Recipe(name="high_precision")
