"""The columns that a patched operand gains: residuals and values of its hot channels, in blocks of their own."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_fp4.kernels import _groups, _random, _scales, _values
from lightning_fp4.kernels._launch import Launcher, ceil_div, check_input, constants_of, has_e4m3, is_interpreted
from lightning_fp4.kernels._tiles import load_globals, quantize_groups
from lightning_fp4.quantizer import Quantizer, Rounding
from lightning_fp4.tensor import Patch, operand_shift

_BLOCK_M, _GROUPS, _WARPS = 64, 2, 4


@triton.jit
def _pick(values, place):  # type: ignore[no-untyped-def]
    """Of a tuple of tensors the one at ``place``, for each element."""
    picked = values[0]
    for i in tl.static_range(1, len(values)):
        picked = tl.where(place == i, values[i], picked)
    return picked


@triton.jit
def _in_groups(x, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """``[groups * C, BLOCK_M]`` as a tuple of ``C`` tensors ``[groups, BLOCK_M]``."""
    GROUPS: tl.constexpr = x.shape[0] // C
    BLOCK_M: tl.constexpr = x.shape[1]
    parts = (tl.permute(tl.reshape(x, (GROUPS, C, BLOCK_M)), (0, 2, 1)),)
    for stage in tl.static_range(5):
        if (1 << stage) < C:
            evens = ()
            odds = ()
            for i in tl.static_range(1 << stage):
                even, odd = tl.split(tl.reshape(parts[i], (GROUPS, BLOCK_M, C >> (stage + 1), 2)))
                evens = evens + (even,)  # type: ignore[assignment]
                odds = odds + (odd,)  # type: ignore[assignment]
            parts = evens + odds  # type: ignore[assignment]
    groups = ()
    for i in tl.static_range(C):
        groups = groups + (tl.reshape(parts[i], (GROUPS, BLOCK_M)),)  # type: ignore[assignment]
    return groups


@triton.jit
def _encode_one(  # type: ignore[no-untyped-def]
    value, place, factors, call, seed_ptr, stream, STOCHASTIC: tl.constexpr
):  # fmt: skip
    """E2M1 value of the value at ``place`` in its block, with the random byte that it had there."""
    if STOCHASTIC:
        word = _pick(_random.random_words(call + place // 16, seed_ptr, stream), place // 4 % 4)
        byte = (word >> (8 * (place % 4)).to(tl.uint32)).to(tl.int32) & 0xFF
        return _values.e2m1_stochastic(value, factors, byte)
    else:
        below = tl.minimum(value * factors, 6.0, propagate_nan=tl.PropagateNan.ALL)
        return _values.e2m1_nearest(tl.maximum(below, -6.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _patch_kernel(  # type: ignore[no-untyped-def]
    x_ptr, stride_m, stride_n, rows, columns, mean_ptr, scale_ptr, channel_ptr, count, tiles_g, seed_ptr, stream,
    amax_ptr, out_ptr, out_stride,
    FIRST: tl.constexpr, SECOND: tl.constexpr, CENTER: tl.constexpr,
    UNITS: tl.constexpr, BY: tl.constexpr, MAX: tl.constexpr, SHIFT: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    E8M0: tl.constexpr, RULE: tl.constexpr, STOCHASTIC: tl.constexpr, CANDIDATES: tl.constexpr,
    NATIVE_E4M3: tl.constexpr, ASM: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """One tile of the columns: ``GROUPS`` blocks of hot channels of ``BLOCK_M`` rows, for one or two parts.

    The scale of its block gives each value the code that it was quantised to. Until they are blocks of the patch, the
    hot channels lie in tensors ``[GROUPS * C, BLOCK_M]``, and neighbouring threads hold neighbours of a row.
    """
    pid = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    index_type: tl.constexpr = tl.int64 if WIDE else tl.int32
    first_m = (pid // tiles_g) * BLOCK_M
    first_g = (pid % tiles_g) * GROUPS
    offs_m = tl.arange(0, BLOCK_M).to(index_type)
    offs_k = tl.arange(0, GROUPS * C)
    block_count = (columns + C - 1) // C
    channel = tl.load(channel_ptr + first_g * C + offs_k, mask=first_g * C + offs_k < count, other=columns)
    is_hot = channel < columns
    channel = channel.to(index_type)
    block = (channel // C)[:, None]
    is_row = first_m + offs_m < rows
    is_inside = is_hot[:, None] & is_row[None, :]
    place = x_ptr + first_m * stride_m + (channel[:, None] * stride_n + offs_m[None, :] * stride_m)
    value = tl.load(place, mask=is_inside, other=0.0).to(tl.float32)
    place = scale_ptr + (first_m // R) * block_count + ((offs_m // R)[None, :] * block_count + block)
    scale = tl.load(place, mask=is_inside, other=0).to(tl.int32)
    if CENTER:
        mean = tl.load(mean_ptr + channel, mask=is_hot, other=0.0)
        value = tl.where(is_inside, _groups.round_one(value - mean[:, None], dtype), 0.0)
    maximum, global_encode, global_decode = load_globals(amax_ptr, first_m + offs_m, is_row, MAX, BY, ASM)
    maximum, global_encode, global_decode = maximum[None, :], global_encode[None, :], global_decode[None, :]
    factors = _scales.block_encode(scale, global_decode, E8M0, ASM)
    call = ((first_m + offs_m)[None, :] * block_count + block) * (C // 16)
    code = _encode_one(value, (channel % C)[:, None], factors, call, seed_ptr, stream, STOCHASTIC)
    factors = _scales.scale_decode(scale, E8M0)
    if BY != "none":
        factors = factors * maximum * (1.0 / MAX)
    # Padding stays zero, also where an infinite maximum would make it NaN.
    residual = tl.where(is_inside, value - code * factors, 0.0)
    offs_g = tl.arange(0, GROUPS)[:, None]
    patch_count = (count + C - 1) // C
    first = _in_groups(residual if FIRST == "residual" else value, C)
    quantize_groups(
        first, _groups.group_amax(first), first_m, offs_m[None, :], first_g, offs_g, rows, patch_count, out_stride,
        maximum, global_encode, global_decode, out_ptr, out_ptr, seed_ptr, stream, MAX, UNITS, SHIFT, R, E8M0, RULE,
        False, CANDIDATES, NATIVE_E4M3, ASM, False, False,
    )  # fmt: skip
    if SECOND != "none":
        OUT_WORDS: tl.constexpr = C // 2 if UNITS == "bf16" else C // 4
        second = _in_groups(residual if SECOND == "residual" else value, C)
        quantize_groups(
            second, _groups.group_amax(second), first_m, offs_m[None, :], first_g, offs_g, rows, patch_count,
            out_stride, maximum, global_encode, global_decode, out_ptr + patch_count * OUT_WORDS, out_ptr,
            seed_ptr, stream, MAX, UNITS, SHIFT, R, E8M0, RULE, False, CANDIDATES, NATIVE_E4M3, ASM, False, False,
        )  # fmt: skip


@functools.cache
def _launcher(
    kernel: Any, quantizer: Quantizer, parts: tuple[str, ...], units: str, warps: int, **constants: Any
) -> Launcher:
    known = {
        **constants_of(quantizer),
        "FIRST": parts[0],
        "SECOND": parts[1] if len(parts) > 1 else "none",
        "UNITS": units,
        "SHIFT": operand_shift("bf16" if units == "bf16" else "fp8", quantizer.scale_rule.encoded_max),
        "ASM": not is_interpreted(),
    }
    return Launcher(kernel, {**known, **constants}, warps)


def append_patch(
    x: Tensor,
    values: Tensor,
    amax: Tensor | None,
    scales: Tensor,
    quantizer: Quantizer,
    patch: Patch,
    *,
    mean: Tensor | None = None,
    seed: Tensor | None = None,
    stream: int = 0,
) -> None:
    """Fill the last columns of a decoded operand with those of ``reference.patch_columns``, decoded.

    Args:
        x: ``[rows, columns]``, the matrix that the operand is.
        values: ``[rows, padded columns + patch.width(block)]`` in bfloat16 or float8_e4m3fn; all but the last columns
            are left as they are.
        amax: float32 ``[1, 1]`` or ``[rows, 1]``, what the operand was quantised with; ``None`` without a global scale.
        scales: uint8 ``[padded rows / block rows, padded columns / block columns]``, contiguous, the scale bytes of the
            operand's blocks.
        quantizer: how.
        patch: which columns.
        mean: float32 ``[1, columns]``, contiguous, what was taken out of ``x`` first.
        seed: what rounded the operand stochastically.
        stream: the random stream of that.

    Raises:
        ValueError: for what the kernels cannot read.
    """
    check_input(x, None)
    channels, block = patch.channels, quantizer.format.block[1]
    rows, columns = x.shape
    width = patch.width(block)
    if not rows * width:
        return
    assert seed is not None or quantizer.rounding is Rounding.NEAREST
    reach = max(_BLOCK_M * x.stride(0) + columns * x.stride(1), _BLOCK_M * values.shape[1])
    out = values[:, values.shape[1] - width :].view(torch.int32)
    tiles_g = ceil_div(ceil_div(channels.shape[0], block), _GROUPS)
    launch = _launcher(
        _patch_kernel, quantizer, patch.parts, "bf16" if values.dtype is torch.bfloat16 else "fp8", _WARPS,
        CENTER=mean is not None, NATIVE_E4M3=has_e4m3(x), WIDE=reach >= 2**31, BLOCK_M=_BLOCK_M, GROUPS=_GROUPS,
    )  # fmt: skip
    launch(
        ceil_div(rows, _BLOCK_M) * tiles_g,
        x, *x.stride(), rows, columns, x if mean is None else mean, scales, channels.contiguous(), channels.shape[0],
        tiles_g, x if seed is None else seed, stream, x if amax is None else amax, out, values.shape[1] // block,
    )  # fmt: skip
