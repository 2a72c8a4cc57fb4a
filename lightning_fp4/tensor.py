"""What a quantised tensor is: packed codes, block scales, global scale. Plain data, not a ``torch.Tensor`` subclass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_fp4.formats import E4M3, BlockFormat

Units = Literal["fp32", "bf16", "fp8", "fp4"]
"""The units that multiply: those of a CPU, those of any GPU, those of Ada and Hopper, those of Blackwell."""


@dataclass(frozen=True, kw_only=True)
class FP4Tensor:
    """A matrix ``[rows, columns]`` in a four-bit block format, quantised along its last axis.

    Columns are padded with zeros to whole blocks in ``codes`` and ``scales``, rows in ``scales`` only; ``shape`` is the
    true size. A value decodes as ``E2M1 value * (block scale * amax) / encoded_max``; formats without a global scale
    drop the last two factors.

    Args:
        codes: uint8 ``[rows, padded columns / 2]``, two codes a byte, the even column in the low nibble.
        scales: float8_e4m3fn or float8_e8m0fnu, ``[padded rows / block rows, padded columns / block columns]``.
        amax: float32 ``[1, 1]`` or ``[rows, 1]``, the largest magnitude of the tensor or row; ``None`` if the format
            has no global scale.
        encoded_max: what ``amax`` becomes in units of code value times block scale, for example 6 x 448 = 2688.
        format: the block format.
        shape: true ``(rows, columns)``.
    """

    codes: Tensor
    scales: Tensor
    amax: Tensor | None
    encoded_max: float
    format: BlockFormat
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes held by codes and scales."""
        return self.codes.nbytes + self.scales.nbytes


@dataclass(frozen=True, kw_only=True)
class FP4Operand:
    """A quantised matrix decoded to what the units of a GEMM multiply: ``E2M1 value * block scale``.

    In float32 and bfloat16 these products are exact. In float8_e4m3fn they are divided by a power of two (see
    :func:`operand_shift`) and exact for closed scales only; other scales cost one rounding to nearest.

    Args:
        values: ``[rows, padded columns]`` in float32, bfloat16 or float8_e4m3fn.
        factor: float32 ``[1, 1]`` or ``[rows, 1]`` that multiplies ``values``; ``None`` without a global scale.
        shape: true ``(rows, columns)``.
    """

    values: Tensor
    factor: Tensor | None
    shape: tuple[int, int]

    @property
    def units(self) -> Units:
        """The units that it is made for."""
        by_dtype: dict[torch.dtype, Units] = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8"}
        return by_dtype.get(self.values.dtype, "fp32")


PatchPart = Literal["residual", "value"]


@dataclass(frozen=True, kw_only=True)
class Patch:
    """Columns that an operand gains for its hot channels (see ``HotChannels``).

    Args:
        channels: int64 ``[k]``.
        parts: which columns, in which order: the ``"residual"`` that quantising left, the ``"value"`` itself.
    """

    channels: Tensor
    parts: tuple[PatchPart, ...]

    def width(self, block_columns: int) -> int:
        """How many columns they are, each part padded to whole blocks."""
        return len(self.parts) * -(-self.channels.shape[0] // block_columns) * block_columns


def operand_shift(units: Units | None, encoded_max: float) -> float:
    """The power of two, at most 1, that brings the largest ``value * block scale`` into the range of ``units``."""
    shift = 1.0
    while units == "fp8" and encoded_max * shift > E4M3.max:
        shift /= 2
    return shift
