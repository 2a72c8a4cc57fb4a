"""What a quantised tensor is: packed codes, block scales, global scale. Plain data, not a ``torch.Tensor`` subclass."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_fp4.formats import BlockFormat


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
