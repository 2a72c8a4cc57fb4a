"""What centring adds to a layer: means over the tokens, their products with a matrix, and their outer product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_fp4.kernels import _groups
from lightning_fp4.kernels._launch import ceil_div, check_device, check_input, is_even, is_wide, launcher, tiles_of
from lightning_fp4.kernels._tiles import corner, load_columns

_NEIGHBOURS = 16  # rows that one thread adds
_BLOCK_M, _BLOCK_N, _WARPS = 256, 128, 8


@triton.jit
def _sum_kernel(  # type: ignore[no-untyped-def]
    x_ptr, stride_m, stride_n, rows, columns, tiles_n, out_ptr, tokens,
    MEAN: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sums of ``BLOCK_M`` rows of ``x`` each, over ``tokens`` if ``MEAN``: the branches of the reference's tree."""
    pid = tl.program_id(0).to(tl.int64)
    pid_m = pid // tiles_n
    pid_n = pid % tiles_n
    index_type: tl.constexpr = tl.int64 if WIDE else tl.int32
    GROUPS: tl.constexpr = BLOCK_M // C
    offs_g = tl.arange(0, GROUPS).to(index_type)
    offs_n = tl.arange(0, BLOCK_N).to(index_type)
    columns_left = columns - pid_n * BLOCK_N
    start = x_ptr + corner(stride_m, stride_n, pid_m, pid_n, BLOCK_M, BLOCK_N)
    values = load_columns(start, stride_m, stride_n, offs_g, offs_n, rows - pid_m * BLOCK_M, columns_left, C, EVEN)
    sums = tl.permute(_groups.sum_of_neighbours(values), (1, 0))
    for stage in tl.static_range(8):
        if (1 << stage) < GROUPS:
            first, second = tl.split(tl.reshape(sums, (BLOCK_N, GROUPS >> (stage + 1), 2)))
            sums = first + second
    total = tl.reshape(sums, (BLOCK_N,))
    if MEAN:
        total = tl.div_rn(total, tl.zeros_like(total) + tokens) + 0.0  # which makes -0.0 the zero of the reference
    tl.store(out_ptr + pid_m * columns + pid_n * BLOCK_N + offs_n, total, mask=offs_n < columns_left)


def token_mean(x: Tensor) -> Tensor:
    """The mean over the rows of ``x`` ``[tokens, features]``: float32 ``[1, features]``, the reference's bits.

    Args:
        x: float32, bfloat16 or float16, any strides.

    Raises:
        ValueError: for what the kernels cannot read.
    """
    check_input(x, None)
    tokens = x.shape[0]
    if not x.numel():
        return x.new_zeros((1, x.shape[1]), dtype=torch.float32)
    is_last = False
    while not is_last:
        is_last = x.shape[0] <= _BLOCK_M
        programs, tiles_n = tiles_of(x, _BLOCK_M, _BLOCK_N)
        sums = x.new_empty((ceil_div(x.shape[0], _BLOCK_M), x.shape[1]), dtype=torch.float32)
        launch = launcher(
            _sum_kernel, _WARPS, MEAN=is_last, C=_NEIGHBOURS, EVEN=is_even(x, _BLOCK_M, _BLOCK_N),
            WIDE=is_wide(x, _BLOCK_M, _BLOCK_N), BLOCK_M=_BLOCK_M, BLOCK_N=_BLOCK_N,
        )  # fmt: skip
        launch(programs, x, *x.stride(), *x.shape, tiles_n, sums, tokens)
        x = sums
    return x


@triton.jit
def _times_kernel(  # type: ignore[no-untyped-def]
    mean_ptr, matrix_ptr, stride_n, stride_k, outs, length, span, tiles_n, out_ptr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``BLOCK_N`` of the sums over ``span`` columns of ``matrix`` times ``mean``."""
    pid = tl.program_id(0).to(tl.int64)
    pid_k = pid // tiles_n
    offs_n = (pid % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in range(0, span, BLOCK_K):
        offs_k = pid_k * span + start + tl.arange(0, BLOCK_K)
        mask = (offs_n[:, None] < outs) & (offs_k[None, :] < length)
        place = matrix_ptr + offs_n[:, None] * stride_n + offs_k[None, :] * stride_k
        values = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        sums += values * tl.load(mean_ptr + offs_k, mask=offs_k < length, other=0.0)[None, :]
    tl.store(out_ptr + pid_k * outs + offs_n, tl.sum(sums, axis=1), mask=offs_n < outs)


def times_matrix(mean: Tensor, matrix: Tensor) -> Tensor:
    """``mean @ matrix.T`` in float32, without a float32 copy of the matrix; float32 sums in an order of its own.

    Args:
        mean: float32 ``[1, K]``.
        matrix: ``[N, K]``, float32, bfloat16 or float16, any strides.

    Returns:
        float32 ``[N]``.

    Raises:
        ValueError: for what the kernels cannot read, or sizes that do not fit.
    """
    check_input(matrix, None)
    outs, length = matrix.shape
    if mean.shape != (1, length) or mean.dtype is not torch.float32:
        raise ValueError(f"`times_matrix` needs a float32 mean [1, {length}], got {mean.dtype} {tuple(mean.shape)}.")
    if not matrix.numel():
        return mean.new_zeros(outs)
    # Neighbours in memory belong to one warp; where these are outputs, spans of the sum run side by side.
    block_n, block_k, span = (8, 512, length) if matrix.stride(1) == 1 else (128, 64, 256)
    spans = ceil_div(length, span)
    sums = mean.new_empty((spans, outs))
    tiles_n = ceil_div(outs, block_n)
    launch = launcher(_times_kernel, BLOCK_N=block_n, BLOCK_K=block_k)
    launch(tiles_n * spans, mean.contiguous(), matrix, *matrix.stride(), outs, length, span, tiles_n, sums)
    return sums[0] if spans == 1 else sums.sum(0)


@triton.jit
def _outer_kernel(  # type: ignore[no-untyped-def]
    product_ptr, left_ptr, right_ptr, factor, out_ptr, rows, columns, tiles_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One tile of ``product + (factor * left.T) @ right``."""
    pid = tl.program_id(0).to(tl.int64)
    offs_m = (pid // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = (pid % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (offs_m[:, None] < rows) & (offs_n[None, :] < columns)
    offs = offs_m[:, None] * columns + offs_n[None, :]
    left = tl.load(left_ptr + offs_m, mask=offs_m < rows, other=0.0) * factor
    right = tl.load(right_ptr + offs_n, mask=offs_n < columns, other=0.0)
    value = tl.load(product_ptr + offs, mask=mask, other=0.0) + left[:, None] * right[None, :]
    tl.store(out_ptr + offs, value.to(out_ptr.dtype.element_ty), mask=mask)


def add_outer(product: Tensor, left: Tensor, right: Tensor, factor: int, dtype: torch.dtype) -> Tensor:
    """``product + (factor * left.T) @ right`` rounded once to ``dtype``.

    Args:
        product: float32 ``[M, N]``, contiguous.
        left: float32 ``[1, M]``.
        right: float32 ``[1, N]``.
        factor: a count.
        dtype: of the result.

    Raises:
        ValueError: for a product of another dtype or layout.
    """
    check_device(product)
    if product.dtype is not torch.float32 or not product.is_contiguous():
        raise ValueError(f"`add_outer` needs contiguous float32, got {product.dtype} with strides {product.stride()}.")
    out = torch.empty_like(product, dtype=dtype)
    if not out.numel():
        return out
    block_m, block_n = 16, 256
    programs, tiles_n = tiles_of(product, block_m, block_n)
    launch = launcher(_outer_kernel, BLOCK_M=block_m, BLOCK_N=block_n)
    launch(programs, product, left.contiguous(), right.contiguous(), factor, out, *product.shape, tiles_n)
    return out
