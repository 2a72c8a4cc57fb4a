"""Rounding to E2M1 codes, E4M3 and E8M0 scales, one function per rule."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_fp4.formats import E2M1_VALUES, E4M3

SIGN_BIT = 8


def e2m1_nearest(x: Tensor) -> Tensor:
    """Round to the nearest E2M1 value, ties to even.

    Args:
        x: float32, any shape. Magnitudes above 6 saturate.

    Returns:
        uint8 codes of the same shape.
    """
    return _e2m1_codes(x, torch.round)


def e2m1_stochastic(x: Tensor, random_bits: Tensor) -> Tensor:
    """Round to one of the two neighbouring E2M1 values, up with probability ``floor(256 * distance) / 256``.

    Args:
        x: float32, any shape. Magnitudes above 6 saturate.
        random_bits: uint8, same shape, uniform over all 256 values.

    Returns:
        uint8 codes of the same shape.
    """
    return _e2m1_codes(x, lambda steps: torch.floor((torch.floor(steps * 256) + random_bits) / 256))


def _e2m1_codes(x: Tensor, to_integer: Callable[[Tensor], Tensor]) -> Tensor:
    """Codes of ``x``; ``to_integer`` rounds its magnitude in units of the local spacing of E2M1 values."""
    magnitude = x.abs().clamp_(max=6.0)
    # The spacing is .5 below 2, 1 below 4 and 2 up to 6. Codes count the values from zero up, which is 2 more than
    # magnitude / spacing from 2 on and 4 more from 4 on.
    from_2, from_4 = magnitude.clone().ge_(2), magnitude.clone().ge_(4)  # 0. or 1.
    steps = to_integer(magnitude / ((1 + from_2) * (1 + from_4) * 0.5))
    codes = steps.add_(from_2, alpha=2).add_(from_4, alpha=2).nan_to_num_(nan=0.0).clamp_(max=7).to(torch.uint8)
    is_negative = torch.signbit(x) & (x == x)  # the sign of NaN differs between devices
    return codes + SIGN_BIT * is_negative.to(torch.uint8)


def e2m1_decode(codes: Tensor) -> Tensor:
    """Float32 values of uint8 codes 0..15."""
    values = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), dtype=torch.float32, device=codes.device)
    return values[codes.int()]


def e4m3_nearest(x: Tensor) -> Tensor:
    """Round non-negative float32 to E4M3, ties to even, saturating at 448; NaN stays NaN."""
    return x.clamp(max=E4M3.max).to(torch.float8_e4m3fn)


def e4m3_up(x: Tensor) -> Tensor:
    """Round non-negative float32 to the next E4M3 value at or above it, saturating at 448; NaN stays NaN."""
    clamped = x.clamp(max=E4M3.max)
    nearest = clamped.to(torch.float8_e4m3fn)
    # Non-negative E4M3 values are ordered like their bytes, so the next value is the next byte.
    too_small = nearest.float() < clamped
    return (nearest.view(torch.uint8) + too_small.to(torch.uint8)).view(torch.float8_e4m3fn)


def _closed_scales() -> tuple[float, ...]:
    """E4M3 values, from 0 to 64, whose products with every E2M1 value are E4M3 values again, ascending."""
    octaves = [2.0**k for k in range(-6, 6)]
    normal = [mantissa * octave for octave in octaves for mantissa in (1.0, 1.25, 1.5)]
    return (0.0, 2.0**-8, 2.0**-7, 1.5 * 2.0**-7, *normal, 64.0)


CLOSED_SCALES = _closed_scales()


def _closed(x: Tensor, offset: int, *, nearest: bool) -> Tensor:
    scales = torch.tensor(CLOSED_SCALES, dtype=torch.float32, device=x.device)
    index = torch.searchsorted(scales, x.contiguous()).clamp(max=len(CLOSED_SCALES) - 1)  # the first at or above x
    if nearest:
        below = (index - 1).clamp(min=0)
        index = torch.where(x - scales[below] < scales[index] - x, below, index)
    rounded = scales[(index + offset).clamp(max=len(CLOSED_SCALES) - 1)]
    return torch.where(x.isnan(), x, rounded).to(torch.float8_e4m3fn)


def closed_nearest(x: Tensor) -> Tensor:
    """Round non-negative float32 to the nearest closed scale, ties up, saturating at 64; NaN stays NaN."""
    return _closed(x, 0, nearest=True)


def closed_up(x: Tensor, offset: int = 0) -> Tensor:
    """Round non-negative float32 to the next closed scale at or above it, or the one ``offset`` places after that.

    Saturates at 64; NaN stays NaN.
    """
    return _closed(x, offset, nearest=False)


def e8m0_up(x: Tensor) -> Tensor:
    """Round non-negative float32 to the next power of two at or above it, within 2^-127 .. 2^127.

    Zero becomes 2^-127; Inf and NaN become E8M0's NaN, so they stay visible.
    """
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2^exponent with mantissa in [.5, 1)
    exponent = exponent - (mantissa == 0.5).int()
    biased = torch.where(x == 0, 0, (exponent + 127).clamp(0, 254))
    return torch.where(x.isfinite(), biased, 255).to(torch.uint8).view(torch.float8_e8m0fnu)
