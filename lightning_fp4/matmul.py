"""One matrix product as a recipe says: rotate, quantise, multiply. Every product here is ``lhs @ rhs.T``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fp4 import ops
from lightning_fp4.quantizer import Quantizer, Rounding
from lightning_fp4.recipes.base import Gemm
from lightning_fp4.tensor import FP4Tensor

Matrix = FP4Tensor | Tensor
"""A GEMM operand: quantised, or a plain tensor that stays in high precision."""


@dataclass(frozen=True, kw_only=True)
class Operand:
    """What happens to one side of a GEMM before it is multiplied.

    Args:
        quantizer: how it is quantised, ``None`` to leave it as it is.
        hadamard: group length of the rotation along the contraction axis.
        stream: the random stream that stochastic rounding draws from; each operand of a layer has its own.
    """

    quantizer: Quantizer | None
    hadamard: int | None
    stream: int

    @staticmethod
    def lhs(gemm: Gemm | None, stream: int) -> Operand:
        """The left side of a GEMM."""
        return Operand(quantizer=gemm.lhs if gemm else None, hadamard=gemm.hadamard if gemm else None, stream=stream)

    @staticmethod
    def rhs(gemm: Gemm | None, stream: int) -> Operand:
        """The right side of a GEMM."""
        return Operand(quantizer=gemm.rhs if gemm else None, hadamard=gemm.hadamard if gemm else None, stream=stream)

    @property
    def stochastic(self) -> bool:
        """Whether it needs random bits."""
        return self.quantizer is not None and self.quantizer.rounding is Rounding.STOCHASTIC


def quantize_rows(x: Tensor, operand: Operand, seed: Tensor | None = None) -> Matrix:
    """The operand whose rows are the rows of ``x`` ``[rows, columns]``; the product will contract over columns."""
    if operand.quantizer is None:
        return x
    return ops.quantize(x, operand.quantizer, hadamard=operand.hadamard, seed=seed, stream=operand.stream)


def quantize_columns(x: Tensor, operand: Operand, seed: Tensor | None = None) -> Matrix:
    """The operand whose rows are the columns of ``x`` ``[rows, columns]``; the product will contract over rows."""
    if operand.quantizer is None:
        return x.T
    return ops.quantize(
        x, operand.quantizer, hadamard=operand.hadamard, transposed=True, seed=seed, stream=operand.stream
    )


def quantize_both(x: Tensor, rows: Operand, columns: Operand, seed: Tensor | None = None) -> tuple[Matrix, Matrix]:
    """Both operands that one tensor feeds: :func:`quantize_rows` and :func:`quantize_columns` of it."""
    by_rows = quantize_rows(x, rows, seed)
    quantizer = rows.quantizer
    same = quantizer == columns.quantizer and rows.hadamard is None and columns.hadamard is None and not rows.stochastic
    if same and isinstance(by_rows, FP4Tensor) and by_rows.format.block[0] == by_rows.format.block[1]:
        return by_rows, ops.transpose(by_rows)
    return by_rows, quantize_columns(x, columns, seed)


def multiply(
    lhs: Matrix, rhs: Matrix, bias: Tensor | None, compute_dtype: torch.dtype, dtype: torch.dtype | None = None
) -> Tensor:
    """``lhs @ rhs.T + bias``.

    Two quantised operands go through the FP4 GEMM. If one is a plain tensor, the other is decoded and the product is
    an ordinary one in ``compute_dtype``.

    Args:
        lhs: ``[M, K]``.
        rhs: ``[N, K]``.
        bias: ``[N]`` or ``None``.
        compute_dtype: operand dtype of an ordinary product.
        dtype: of the result, ``compute_dtype`` if not given.
    """
    dtype = dtype or compute_dtype
    if isinstance(lhs, FP4Tensor) and isinstance(rhs, FP4Tensor):
        return ops.gemm(lhs, rhs, bias, dtype)
    a, b = (ops.dequantize(m, compute_dtype) if isinstance(m, FP4Tensor) else m.to(compute_dtype) for m in (lhs, rhs))
    return torch.nn.functional.linear(a, b, None if bias is None else bias.to(compute_dtype)).to(dtype)


def describe(gemm: Gemm | None, device: torch.device) -> str:
    """The units that :func:`multiply` uses for this GEMM, as reports name them."""
    quantized = gemm is not None and gemm.lhs is not None and gemm.rhs is not None
    return ops.gemm_path(device) if quantized else "high_precision"
