"""The product of two quantised matrices, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fp4.reference.quantize import operand
from lightning_fp4.tensor import FP4Operand, FP4Tensor


def gemm(lhs: FP4Tensor, rhs: FP4Tensor, bias: Tensor | None = None) -> Tensor:
    """``lhs @ rhs.T + bias`` in float32.

    Decoded values (without global scales) are exact in BF16, so on a GPU they are multiplied as BF16 with float32
    sums, on a CPU as float32. The global scales multiply the result.

    Args:
        lhs: ``[M, K]``.
        rhs: ``[N, K]``, padded to the same number of columns as ``lhs``.
        bias: ``[N]`` or ``None``.

    Returns:
        float32 ``[M, N]``.
    """
    a, b = (operand(m, "bf16" if m.codes.is_cuda else "fp32") for m in (lhs, rhs))
    return multiply(a, b, bias)


def multiply(lhs: FP4Operand, rhs: FP4Operand, bias: Tensor | None = None) -> Tensor:
    """:func:`gemm` of decoded operands, both for the same units."""
    out = sums(lhs, rhs)
    if lhs.factor is not None and rhs.factor is not None:
        out *= lhs.factor * rhs.factor.T
    return out if bias is None else out.add_(bias.float())


def sums(lhs: FP4Operand, rhs: FP4Operand) -> Tensor:
    """``lhs @ rhs.T`` of the values without their factors in float32: by BF16 units on a GPU, else as float32."""
    a, b = lhs.values, rhs.values
    if a.is_cuda and a.dtype is torch.bfloat16:
        return torch.mm(a, b.T, out_dtype=torch.float32)
    return a.float() @ b.float().T
