"""Averis: quantise what is left of inputs and gradients after their mean over the tokens (arXiv 2603.10444)."""

from __future__ import annotations

import dataclasses
from typing import Literal

from lightning_fp4.quantizer import Centering
from lightning_fp4.recipes.base import GemmUnits, Recipe
from lightning_fp4.recipes.nvfp4 import nvfp4


def averis(
    *,
    mean: Literal["exact", "fp4"] = "exact",
    weight_2d: bool = True,
    stochastic_rounding: bool = True,
    hadamard: bool = True,
    gradient_scale: str = "unbiased",
    forward_scale: str = "rne",
    units: GemmUnits = "auto",
    first_blocks: int | float = 0,
    last_blocks: int | float = 0.15,
) -> Recipe:
    """NVFP4 on mean-centred inputs and gradients; the means take part exactly. Any recipe: ``.with_centering(...)``.

    Args:
        mean: ``"exact"`` means in float32 times the unquantised weight, or the paper's ``"fp4"`` means.
        weight_2d: quantise weights in 16x16 blocks.
        stochastic_rounding: round output gradients stochastically.
        hadamard: rotate both operands of the weight gradient.
        gradient_scale: scale rule of gradients, see ``nvfp4``.
        forward_scale: scale rule of inputs and weights, see ``nvfp4``.
        units: what multiplies, see ``Gemm``.
        first_blocks: blocks at the start to leave in high precision, a count or a fraction.
        last_blocks: blocks at the end to leave in high precision, a count or a fraction.
    """
    recipe = nvfp4(
        weight_2d=weight_2d,
        stochastic_rounding=stochastic_rounding,
        hadamard=hadamard,
        gradient_scale=gradient_scale,
        forward_scale=forward_scale,
        units=units,
        first_blocks=first_blocks,
        last_blocks=last_blocks,
    )
    return dataclasses.replace(recipe.with_centering(Centering(mean=mean)), name="averis")
