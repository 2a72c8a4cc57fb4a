"""Block scales: from magnitudes to stored scales, and from stored scales to the factors that encode and decode.

Every line is one rounded float32 operation; the order decides bits (ties are common on BF16 data).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fp4.formats import E2M1, E8M0, BlockFormat
from lightning_fp4.quantizer import ScaleRule
from lightning_fp4.reference import rounding

FLOAT32_MAX = torch.finfo(torch.float32).max


def global_amax(x: Tensor, block_format: BlockFormat) -> Tensor | None:
    """Largest magnitude of ``x`` ``[rows, columns]`` as ``[1, 1]``, or of each row as ``[rows, 1]``; float32.

    NaN and Inf propagate. ``None`` for a format without a global scale.
    """
    if block_format.global_scale is None:
        return None
    per_row = block_format.global_scale == "row"
    if x.numel() == 0:
        return torch.zeros(x.shape[0] if per_row else 1, 1, dtype=torch.float32, device=x.device)
    amax = x.abs().amax(dim=1 if per_row else (0, 1), keepdim=True)
    return amax.float()


def encode_scale(amax: Tensor, encoded_max: float) -> Tensor:
    """The factor that maps ``amax`` to ``encoded_max``; 1 where ``amax`` is zero or infinite."""
    # A Python number over a tensor would be a reciprocal and a product, two roundings instead of one.
    scale = torch.full_like(amax, encoded_max).div(amax).clamp(max=FLOAT32_MAX)
    return torch.where((amax == 0) | (scale == 0), 1.0, scale)


def block_amax(x: Tensor, block_format: BlockFormat) -> Tensor:
    """Largest magnitude of each block: float32 ``[block rows, block columns]`` of a whole-block ``x``."""
    rows, columns = block_format.block
    blocks = x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
    return blocks.abs().amax(dim=3).amax(dim=1)


def block_scales(amax: Tensor, global_encode: Tensor | None, rule: ScaleRule, block_format: BlockFormat) -> Tensor:
    """Stored scales of blocks with maximum ``amax``.

    Args:
        amax: float32 ``[block rows, block columns]``.
        global_encode: from :func:`encode_scale`, broadcastable to ``amax``; ``None`` without a global scale.
        rule: how to round. A rule that compares errors gives its first candidate here, see :func:`other_scales`.
        block_format: the format.

    Returns:
        float8_e4m3fn or float8_e8m0fnu, shaped like ``amax``.
    """
    if block_format.scale is E8M0 or global_encode is None:
        # A tensor over a Python number would be a product with its reciprocal on a GPU.
        return rounding.e8m0_up(amax.div(torch.full_like(amax, E2M1.max)))
    round_scale = {
        ScaleRule.RNE: rounding.e4m3_nearest,
        ScaleRule.UNBIASED: rounding.e4m3_up,
        ScaleRule.FOUR_OVER_SIX: rounding.e4m3_nearest,
        ScaleRule.CLOSED: rounding.closed_nearest,
        ScaleRule.CLOSED_UP: rounding.closed_up,
        ScaleRule.CLOSED_BEST: rounding.closed_up,
    }[rule]
    return round_scale(amax * (global_encode * (1.0 / E2M1.max)))


def other_scales(amax: Tensor, global_encode: Tensor | None, rule: ScaleRule) -> list[Tensor]:
    """What a rule that compares errors tries after :func:`block_scales`, in this order; nothing for other rules."""
    if global_encode is None or not rule.searches:
        return []
    wanted = amax * (global_encode * (1.0 / E2M1.max))
    if rule is ScaleRule.FOUR_OVER_SIX:
        return [rounding.e4m3_nearest(wanted * 1.5)]  # maps the block maximum to 4
    return [rounding.closed_up(wanted, offset) for offset in (1, 2)]


def block_encode(scales: Tensor, global_encode: Tensor | None) -> Tensor:
    """Float32 factors that map each block to the E2M1 range, the reciprocal of what decodes it."""
    decode = scales.float()
    if global_encode is not None:
        decode = decode * (1.0 / global_encode)
    return (1.0 / decode).clamp(max=FLOAT32_MAX)


def expand(per_block: Tensor, block_format: BlockFormat, rows: int) -> Tensor:
    """Repeat one value per block over its elements: ``[rows, padded columns]``."""
    block_rows, block_columns = block_format.block
    wide = per_block.repeat_interleave(block_columns, dim=1)
    return wide if block_rows == 1 else wide.repeat_interleave(block_rows, dim=0)[:rows]
