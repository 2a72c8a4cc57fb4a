"""What is in a stack of matrices, in numbers: two launches, since deviations need the mean.

A program takes a strip of columns of one matrix and goes down its rows. All sums are float64, in an order of their own.
Up to 2^29 equal values sum without error there, so constant matrices and blocks have no deviations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_fp4.kernels import _groups, _scales
from lightning_fp4.kernels._launch import ceil_div, check_device, launcher
from lightning_fp4.kernels._tiles import load_columns, total

_BLOCK_M, _BLOCK_N = 64, 32  # a thread reads a channel of a 16x16 block, a warp 128 bytes of a row
_SIDE = 16  # of a block
_SPAN = 128  # strips, or top channels, that a program adds at a time
_SUMS = 9  # of each matrix, in the order of `reference.TENSOR_SUMS`
_NOISE = torch.finfo(torch.float64).resolution * _SIDE  # of a constant block, as in `reference.squares_of_a_constant`


@triton.jit
def _place_of_program(columns, strips, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Matrix, strip and its first column, and the number of columns, in int64."""
    pid = tl.program_id(0).to(tl.int64)
    strip = pid % strips
    return pid // strips, strip, strip * BLOCK_N, tl.cast(columns, tl.int64)


@triton.jit
def _channels_kernel(  # type: ignore[no-untyped-def]
    x_ptr, rows, columns, strips, magnitudes_ptr, maxima_ptr, means_ptr, out_ptr,
    SIDE: tl.constexpr, SUMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One strip's sums of magnitudes by channel, its largest magnitude (as bits), and its sum of the channels' means.

    And, to the strip's row of the output, what channels add to the sums.
    """
    matrix, _, first_n, stride = _place_of_program(columns, strips, BLOCK_N)
    GROUPS: tl.constexpr = BLOCK_M // SIDE
    offs_g = tl.arange(0, GROUPS).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N).to(tl.int64)
    start = x_ptr + (matrix * rows * stride + first_n)
    bits = tl.zeros((GROUPS, BLOCK_N), tl.int32)
    magnitudes = tl.zeros((GROUPS, BLOCK_N), tl.float64)
    sums = tl.zeros((GROUPS, BLOCK_N), tl.float64)
    for first_m in range(0, rows, BLOCK_M):
        values = load_columns(
            start + first_m * stride, stride, 1, offs_g, offs_n, rows - first_m, stride - first_n, SIDE, False
        )
        bits = tl.maximum(bits, _scales.magnitude_bits(_groups.group_amax(values)))
        for i in tl.static_range(SIDE):
            exact = values[i].to(tl.float64)
            magnitudes += tl.abs(exact)
            sums += exact
    by_channel = tl.sum(magnitudes, axis=0).to(tl.float32)
    means = tl.sum(sums, axis=0) / rows
    pid = tl.program_id(0).to(tl.int64)
    tl.store(magnitudes_ptr + matrix * stride + first_n + offs_n, by_channel, mask=first_n + offs_n < columns)
    tl.store(maxima_ptr + pid, tl.max(tl.max(bits, axis=1), axis=0))
    tl.store(means_ptr + pid, tl.sum(means, axis=0))
    tl.store(out_ptr + pid * SUMS + 2, tl.sum(by_channel.to(tl.float64), axis=0))
    tl.store(out_ptr + pid * SUMS + 6, tl.sum(means * means, axis=0))


@triton.jit
def _sum_of(ptr, count, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum of ``count`` neighbours in memory, in float64."""
    offs = tl.arange(0, SPAN)
    sums = tl.zeros((SPAN,), tl.float64)
    for first in range(0, count, SPAN):
        sums += tl.load(ptr + first + offs, mask=first + offs < count, other=0.0).to(tl.float64)
    return tl.sum(sums, axis=0)


@triton.jit
def _largest_of(ptr, count, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]
    """The float32 whose bits are the largest of ``count`` neighbours in memory."""
    offs = tl.arange(0, SPAN)
    bits = tl.zeros((SPAN,), tl.int32)
    for first in range(0, count, SPAN):
        bits = tl.maximum(bits, tl.load(ptr + first + offs, mask=first + offs < count, other=0))
    return tl.max(bits, axis=0).to(tl.float32, bitcast=True)


@triton.jit
def _over_blocks(x, SIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums of ``SIDE`` neighbours along the last axis."""
    return tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // SIDE, SIDE)), axis=2)


@triton.jit
def _deviations_kernel(  # type: ignore[no-untyped-def]
    x_ptr, rows, columns, strips, maxima_ptr, means_ptr, top_ptr, top_k, out_ptr,
    SIDE: tl.constexpr, NOISE: tl.constexpr, SUMS: tl.constexpr, SPAN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """To the strip's row of the output, what its deviations add to the sums; to the first, what all strips have."""
    matrix, strip, first_n, stride = _place_of_program(columns, strips, BLOCK_N)
    out_ptr += tl.program_id(0).to(tl.int64) * SUMS
    mean = _sum_of(means_ptr + matrix * strips, strips, SPAN) / columns
    GROUPS: tl.constexpr = BLOCK_M // SIDE
    BLOCKS: tl.constexpr = BLOCK_N // SIDE
    offs_g = tl.arange(0, GROUPS).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N).to(tl.int64)
    is_whole = first_n + (tl.arange(0, BLOCKS)[None, :] + 1) * SIDE <= columns
    start = x_ptr + (matrix * rows * stride + first_n)
    squares = tl.zeros((GROUPS, BLOCK_N), tl.float64)
    fourths = tl.zeros((GROUPS, BLOCK_N), tl.float64)
    quotients = tl.zeros((GROUPS, BLOCKS), tl.float64)
    blocks = tl.zeros((GROUPS, BLOCKS), tl.int32)
    for first_m in range(0, rows, BLOCK_M):
        values = load_columns(
            start + first_m * stride, stride, 1, offs_g, offs_n, rows - first_m, stride - first_n, SIDE, False
        )
        sums = tl.zeros((GROUPS, BLOCK_N), tl.float64)
        for i in tl.static_range(SIDE):
            exact = values[i].to(tl.float64)
            sums += exact
            is_inside = (first_m + offs_g * SIDE + i < rows)[:, None] & (first_n + offs_n < columns)[None, :]
            deviation = tl.where(is_inside, exact - mean, 0.0)
            power = deviation * deviation
            squares += power
            fourths += power * power
        block_means = _over_blocks(sums, SIDE) * (1.0 / (SIDE * SIDE))
        own_mean = tl.reshape(tl.broadcast_to(block_means[:, :, None], (GROUPS, BLOCKS, SIDE)), (GROUPS, BLOCK_N))
        of_squares = tl.zeros((GROUPS, BLOCK_N), tl.float64)
        of_fourths = tl.zeros((GROUPS, BLOCK_N), tl.float64)
        for i in tl.static_range(SIDE):
            deviation = values[i].to(tl.float64) - own_mean
            power = deviation * deviation
            of_squares += power
            of_fourths += power * power
        block_squares = _over_blocks(of_squares, SIDE)
        noise = block_means * NOISE
        is_varied = (first_m + (offs_g + 1) * SIDE <= rows)[:, None] & is_whole & (block_squares > noise * noise)
        quotients += tl.where(is_varied, _over_blocks(of_fourths, SIDE) / (block_squares * block_squares), 0.0)
        blocks += is_varied.to(tl.int32)
    tl.store(out_ptr + 4, total(squares))
    tl.store(out_ptr + 5, total(fourths))
    tl.store(out_ptr + 7, total(quotients))
    tl.store(out_ptr + 8, total(blocks).to(tl.float64))
    if strip == 0:
        tl.store(out_ptr, _largest_of(maxima_ptr + matrix * strips, strips, SPAN).to(tl.float64))
        tl.store(out_ptr + 1, _sum_of(top_ptr + matrix * top_k, top_k, SPAN))
        tl.store(out_ptr + 3, mean)
    else:
        tl.store(out_ptr, 0.0)
        tl.store(out_ptr + 1, 0.0)
        tl.store(out_ptr + 3, 0.0)


def tensor_sums(x: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Sums of each matrix of ``x`` ``[n, rows, columns]``, float64 ``[n, 9]``, and its top channels, int64 ``[n, k]``.

    They are those of ``reference.tensor_sums`` but for the order of the sums. Sums of magnitudes by channel are float64
    ones that are rounded to float32 once, more exact than the reference's.

    Raises:
        ValueError: for an ``x`` that is not float32 or has no rows or columns.
    """
    check_device(x)
    if x.ndim != 3 or x.dtype is not torch.float32 or not x.shape[1] * x.shape[2]:
        raise ValueError(
            f"`tensor_sums` reads a float32 stack of matrices that are not empty, got {x.dtype} {tuple(x.shape)}."
        )
    x = x.contiguous()
    count, rows, columns = x.shape
    strips = ceil_div(columns, _BLOCK_N)
    magnitudes = x.new_empty((count, columns))
    maxima = x.new_empty((count, strips), dtype=torch.int32)
    means = x.new_empty((count, strips), dtype=torch.float64)
    sums = x.new_empty((count, strips, _SUMS), dtype=torch.float64)
    sizes = {"SIDE": _SIDE, "SUMS": _SUMS, "BLOCK_M": _BLOCK_M, "BLOCK_N": _BLOCK_N}
    if count:
        launch = launcher(_channels_kernel, **sizes)
        launch(count * strips, x, rows, columns, strips, magnitudes, maxima, means, sums)
    top, channels = magnitudes.topk(min(top_k, columns))
    if count:
        launch = launcher(_deviations_kernel, NOISE=_NOISE, SPAN=_SPAN, **sizes)
        launch(count * strips, x, rows, columns, strips, maxima, means, top, top.shape[1], sums)
    return sums.sum(1), channels
