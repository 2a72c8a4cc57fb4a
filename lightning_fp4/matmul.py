"""One matrix product as a recipe says: rotate, quantise, multiply. Every product here is ``lhs @ rhs.T``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fp4 import ops
from lightning_fp4.quantizer import Quantizer, Rounding
from lightning_fp4.recipes.base import Gemm
from lightning_fp4.tensor import FP4Operand, FP4Tensor, Units

Matrix = FP4Tensor | FP4Operand | Tensor
"""A GEMM operand: quantised, quantised and decoded for the GEMM's units, or a plain tensor in high precision."""


@dataclass(frozen=True, kw_only=True)
class Operand:
    """What happens to one side of a GEMM before it is multiplied.

    Args:
        quantizer: how it is quantised, ``None`` to leave it as it is.
        hadamard: group length of the rotation along the contraction axis.
        stream: the random stream that stochastic rounding draws from; each operand of a layer has its own.
        units: what will multiply it at once, so that it is decoded on the spot; ``None`` to keep it packed.
    """

    quantizer: Quantizer | None
    hadamard: int | None
    stream: int
    units: Units | None = None

    @staticmethod
    def lhs(gemm: Gemm | None, stream: int, units: Units | None = None) -> Operand:
        """The left side of a GEMM."""
        return Operand(
            quantizer=gemm.lhs if gemm else None, hadamard=gemm.hadamard if gemm else None, stream=stream, units=units
        )

    @staticmethod
    def rhs(gemm: Gemm | None, stream: int, units: Units | None = None) -> Operand:
        """The right side of a GEMM."""
        return Operand(
            quantizer=gemm.rhs if gemm else None, hadamard=gemm.hadamard if gemm else None, stream=stream, units=units
        )

    @property
    def stochastic(self) -> bool:
        """Whether it needs random bits."""
        return self.quantizer is not None and self.quantizer.rounding is Rounding.STOCHASTIC


def quantize_rows(x: Tensor, operand: Operand, seed: Tensor | None = None) -> Matrix:
    """The operand whose rows are the rows of ``x`` ``[rows, columns]``; the product will contract over columns."""
    if operand.quantizer is None:
        return x
    return ops.quantize(
        x, operand.quantizer, hadamard=operand.hadamard, seed=seed, stream=operand.stream, units=operand.units
    )


def quantize_columns(x: Tensor, operand: Operand, seed: Tensor | None = None) -> Matrix:
    """The operand whose rows are the columns of ``x`` ``[rows, columns]``; the product will contract over rows."""
    if operand.quantizer is None:
        return x.T
    return ops.quantize(
        x,
        operand.quantizer,
        hadamard=operand.hadamard,
        transposed=True,
        seed=seed,
        stream=operand.stream,
        units=operand.units,
    )


def quantize_both(x: Tensor, rows: Operand, columns: Operand, seed: Tensor | None = None) -> tuple[Matrix, Matrix]:
    """Both operands that one tensor feeds: :func:`quantize_rows` and :func:`quantize_columns` of it."""
    if rows.quantizer is None or columns.quantizer is None or rows.hadamard is not None:
        return quantize_rows(x, rows, seed), quantize_columns(x, columns, seed)
    return ops.quantize_both(
        x,
        rows.quantizer,
        columns.quantizer,
        hadamard=columns.hadamard,
        seed=seed,
        streams=(rows.stream, columns.stream),
        units=(rows.units, columns.units),
    )


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
    if not isinstance(lhs, Tensor) and not isinstance(rhs, Tensor):
        return ops.gemm(lhs, rhs, bias, dtype)
    a, b = (_in_high_precision(m, compute_dtype) for m in (lhs, rhs))
    return torch.nn.functional.linear(a, b, None if bias is None else bias.to(compute_dtype)).to(dtype)


def _in_high_precision(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    assert not isinstance(matrix, FP4Operand), "decoded for units that do not multiply it"
    return ops.dequantize(matrix, dtype) if isinstance(matrix, FP4Tensor) else matrix.to(dtype)


def units_of(gemm: Gemm | None, device: torch.device) -> Units | None:
    """The units that multiply the operands of this GEMM; ``None`` if they are not both quantised."""
    if gemm is None or gemm.lhs is None or gemm.rhs is None:
        return None
    return ops.gemm_path(device, gemm.lhs, gemm.rhs, gemm.units)


def describe(gemm: Gemm | None, device: torch.device) -> str:
    """The units that :func:`multiply` uses for this GEMM, as reports name them."""
    units = units_of(gemm, device)
    if units is None:
        return "high_precision"
    assert gemm is not None
    exact = ops.is_exact(units, gemm.lhs, gemm.rhs)
    emulated = " emulated" if units == "fp8" and device.type != "cuda" else ""
    return f"{units}{emulated}{'' if exact else ' (one extra rounding)'}"
