"""Which four-bit formats exist: element types, block shapes and scale types, as data and nothing else.

An FP4 tensor is a grid of E2M1 values in which every block of neighbours shares one scale. "Scale" always means the
factor that *decodes*: value = code value x block scale (x global scale, where the format has one).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GlobalScale = Literal["tensor", "row"]


@dataclass(frozen=True, kw_only=True)
class ElementFormat:
    """A small floating-point type, described by its bits.

    Args:
        name: the usual name, for example ``"E2M1"``.
        exponent_bits: number of exponent bits.
        mantissa_bits: number of stored mantissa bits.
        signed: whether one bit holds the sign.
        max: the largest finite value.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    signed: bool
    max: float

    @property
    def bits(self) -> int:
        """Width of one value in bits."""
        return int(self.signed) + self.exponent_bits + self.mantissa_bits


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """A block-scaled four-bit tensor format.

    Args:
        name: unique name.
        element: type of the values.
        scale: type of the block scales.
        block: ``(rows, columns)`` that share one scale; columns run along the contraction axis.
        global_scale: ``"tensor"`` for one more FP32 scale per tensor, ``"row"`` for one per row, ``None`` for none.
    """

    name: str
    element: ElementFormat
    scale: ElementFormat
    block: tuple[int, int]
    global_scale: GlobalScale | None

    def __str__(self) -> str:
        return self.name

    @property
    def bits_per_value(self) -> float:
        """Storage per value in bits, block scales included (4.5 for NVFP4, 4.25 for MXFP4)."""
        rows, columns = self.block
        return self.element.bits + self.scale.bits / (rows * columns)


E2M1 = ElementFormat(name="E2M1", exponent_bits=2, mantissa_bits=1, signed=True, max=6.0)
E4M3 = ElementFormat(name="E4M3", exponent_bits=4, mantissa_bits=3, signed=True, max=448.0)
E8M0 = ElementFormat(name="E8M0", exponent_bits=8, mantissa_bits=0, signed=False, max=2.0**127)

#: The eight magnitudes of E2M1, by code. Bit 3 of a code is the sign.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

NVFP4 = BlockFormat(name="nvfp4", element=E2M1, scale=E4M3, block=(1, 16), global_scale="tensor")
NVFP4_ROW = BlockFormat(name="nvfp4_row", element=E2M1, scale=E4M3, block=(1, 16), global_scale="row")
NVFP4_2D = BlockFormat(name="nvfp4_2d", element=E2M1, scale=E4M3, block=(16, 16), global_scale="tensor")
MXFP4 = BlockFormat(name="mxfp4", element=E2M1, scale=E8M0, block=(1, 32), global_scale=None)

FORMATS = {f.name: f for f in (NVFP4, NVFP4_ROW, NVFP4_2D, MXFP4)}
