"""NVFP4 pre-training as NVIDIA describes it (arXiv 2509.25149), each technique with its own switch."""

from __future__ import annotations

from lightning_fp4.formats import NVFP4, NVFP4_2D
from lightning_fp4.quantizer import Quantizer, Rounding, ScaleRule
from lightning_fp4.recipes.base import Gemm, GemmUnits, Recipe


def nvfp4(
    *,
    weight_2d: bool = True,
    stochastic_rounding: bool = True,
    hadamard: bool = True,
    gradient_scale: str = "unbiased",
    forward_scale: str = "rne",
    units: GemmUnits = "auto",
    first_blocks: int | float = 0,
    last_blocks: int | float = 0.15,
) -> Recipe:
    """NVIDIA's NVFP4: 1x16 blocks, 16x16 weights, Hadamard transform and stochastic rounding in the backward pass.

    Args:
        weight_2d: quantise weights in 16x16 blocks, so forward and backward see the same weight.
        stochastic_rounding: round output gradients stochastically.
        hadamard: rotate both operands of the weight gradient by the 16-point random Hadamard transform.
        gradient_scale: scale rule of gradients: ``"unbiased"`` (ours) or ``"rne"`` (the paper's, bit parity with
            Blackwell software; biased under stochastic rounding), or ``"closed_up"`` (unbiased, exact on FP8 units).
        forward_scale: scale rule of inputs and weights: ``"rne"`` or ``"four_over_six"``; exact on FP8 units:
            ``"closed"``, ``"closed_up"`` or ``"closed_best"``.
        units: what multiplies, see ``Gemm``. ``"auto"`` is fast on Ada and Hopper, whose FP8 units round each operand
            once more unless the scale rules are closed; ``"exact"`` does without that.
        first_blocks: blocks at the start to leave in high precision, a count or a fraction.
        last_blocks: blocks at the end to leave in high precision, a count or a fraction.
    """
    inputs = Quantizer(format=NVFP4, scale_rule=ScaleRule(forward_scale))
    weights = Quantizer(format=NVFP4_2D if weight_2d else NVFP4, scale_rule=ScaleRule(forward_scale))
    rounding = Rounding.STOCHASTIC if stochastic_rounding else Rounding.NEAREST
    gradients = Quantizer(format=NVFP4, rounding=rounding, scale_rule=ScaleRule(gradient_scale))
    return Recipe(
        name="nvfp4",
        fprop=Gemm(lhs=inputs, rhs=weights, units=units),
        dgrad=Gemm(lhs=gradients, rhs=weights, units=units),
        wgrad=Gemm(lhs=gradients, rhs=inputs, hadamard=16 if hadamard else None, units=units),
        first_blocks=first_blocks,
        last_blocks=last_blocks,
    )
