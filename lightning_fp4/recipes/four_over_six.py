"""Four over six: choose for each block whether its maximum becomes 6 or 4 (arXiv 2512.02010)."""

from __future__ import annotations

import dataclasses

from lightning_fp4.quantizer import ScaleRule
from lightning_fp4.recipes.base import GemmUnits, Recipe
from lightning_fp4.recipes.nvfp4 import nvfp4


def four_over_six(
    *,
    weight_2d: bool = True,
    stochastic_rounding: bool = True,
    hadamard: bool = True,
    gradient_scale: str = "unbiased",
    units: GemmUnits = "auto",
    first_blocks: int | float = 0,
    last_blocks: int | float = 0.15,
) -> Recipe:
    """NVFP4 whose forward blocks are scaled to 6 or to 4, whichever errs less; gradients stay unbiased.

    Args:
        weight_2d: quantise weights in 16x16 blocks.
        stochastic_rounding: round output gradients stochastically.
        hadamard: rotate both operands of the weight gradient.
        gradient_scale: scale rule of gradients, ``"unbiased"`` or ``"rne"``; four over six would bias them.
        units: what multiplies, see ``Gemm``.
        first_blocks: blocks at the start to leave in high precision, a count or a fraction.
        last_blocks: blocks at the end to leave in high precision, a count or a fraction.
    """
    recipe = nvfp4(
        weight_2d=weight_2d,
        stochastic_rounding=stochastic_rounding,
        hadamard=hadamard,
        gradient_scale=gradient_scale,
        forward_scale=ScaleRule.FOUR_OVER_SIX.value,
        units=units,
        first_blocks=first_blocks,
        last_blocks=last_blocks,
    )
    return dataclasses.replace(recipe, name="four_over_six")
