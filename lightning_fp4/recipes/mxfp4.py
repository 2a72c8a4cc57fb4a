"""MXFP4 training: the OCP format with power-of-two scales (OCP Microscaling v1.0; training as in arXiv 2502.20586)."""

from __future__ import annotations

from lightning_fp4.formats import MXFP4
from lightning_fp4.quantizer import Quantizer, Rounding, ScaleRule
from lightning_fp4.recipes.base import Gemm, GemmUnits, Recipe


def mxfp4(
    *,
    stochastic_rounding: bool = True,
    hadamard: bool = True,
    units: GemmUnits = "auto",
    first_blocks: int | float = 0,
    last_blocks: int | float = 0.15,
) -> Recipe:
    """MXFP4: 1x32 blocks with power-of-two scales that never saturate, Hadamard transform and stochastic rounding.

    Args:
        stochastic_rounding: round output gradients stochastically.
        hadamard: rotate both operands of the weight gradient by the 32-point random Hadamard transform.
        units: what multiplies, see ``Gemm``; FP8 units do not take MXFP4.
        first_blocks: blocks at the start to leave in high precision, a count or a fraction.
        last_blocks: blocks at the end to leave in high precision, a count or a fraction.
    """
    forward = Quantizer(format=MXFP4, scale_rule=ScaleRule.UNBIASED)
    rounding = Rounding.STOCHASTIC if stochastic_rounding else Rounding.NEAREST
    gradients = Quantizer(format=MXFP4, rounding=rounding, scale_rule=ScaleRule.UNBIASED)
    return Recipe(
        name="mxfp4",
        fprop=Gemm(lhs=forward, rhs=forward, units=units),
        dgrad=Gemm(lhs=gradients, rhs=forward, units=units),
        wgrad=Gemm(lhs=gradients, rhs=forward, hadamard=32 if hadamard else None, units=units),
        first_blocks=first_blocks,
        last_blocks=last_blocks,
    )
