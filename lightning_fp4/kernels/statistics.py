"""What quantising does to a stack of matrices, in numbers: quantised and decoded in registers, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_fp4.kernels import _groups, _scales
from lightning_fp4.kernels._launch import (
    DTYPES,
    ceil_div,
    check_device,
    constants_of,
    has_e4m3,
    is_interpreted,
    launcher,
)
from lightning_fp4.kernels._tiles import draw_words, encode_blocks, load_globals, load_rows, over_block, total
from lightning_fp4.quantizer import Quantizer, Rounding

_BLOCK_M, _BLOCK_N = 64, 64
_SUMS = 6  # of each matrix, in the order of `reference.QUANTIZATION_SUMS`


@triton.jit
def _sums_kernel(  # type: ignore[no-untyped-def]
    x_ptr, rows, columns, tiles_m, tiles_n, amax_ptr, seed_ptr, out_ptr,
    BY: tl.constexpr, MAX: tl.constexpr, R: tl.constexpr, C: tl.constexpr, E8M0: tl.constexpr, RULE: tl.constexpr,
    STOCHASTIC: tl.constexpr, CANDIDATES: tl.constexpr, NATIVE_E4M3: tl.constexpr, ASM: tl.constexpr,
    SUMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The sums of one tile of one matrix of a contiguous ``x`` ``[n, rows, columns]``, to row ``pid`` of the output."""
    pid = tl.program_id(0).to(tl.int64)
    tile = pid % (tiles_m * tiles_n)
    matrix = pid // (tiles_m * tiles_n)
    first_m = tile // tiles_n * BLOCK_M
    first_n = tile % tiles_n * BLOCK_N
    first_g = tile % tiles_n * (BLOCK_N // C)
    offs_m = tl.arange(0, BLOCK_M).to(tl.int64)
    offs_g = tl.arange(0, BLOCK_N // C).to(tl.int64)
    in_rows = first_m + offs_m < rows
    start = x_ptr + ((matrix * rows + first_m) * columns + first_n)
    values = load_rows(start, columns, 1, offs_m, offs_g, rows - first_m, columns - first_n, C, False)
    amax_ptr += matrix * (rows if BY == "row" else 1)
    amax, encode, decode = load_globals(amax_ptr, first_m + offs_m, in_rows, MAX, BY, ASM)
    words = ()
    if STOCHASTIC:
        groups = (columns + C - 1) // C
        first = first_m * groups + first_g
        words = draw_words(values, first, offs_m[None, :] * groups + offs_g[:, None], seed_ptr, 0, ASM)
    group_amax = _groups.group_amax(values)
    encoded, scales = encode_blocks(
        values, group_amax, words, amax[None, :], encode[None, :], decode[None, :], MAX, R, E8M0, RULE, STOCHASTIC,
        CANDIDATES, NATIVE_E4M3, ASM,
    )  # fmt: skip
    scale = _scales.scale_decode(scales, E8M0)
    factors = scale
    if BY != "none":
        factors = factors * amax[None, :] * (1.0 / MAX)
    signal = tl.zeros(group_amax.shape, tl.float64)
    noise = tl.zeros(group_amax.shape, tl.float64)
    nonzero = tl.zeros(group_amax.shape, tl.int32)
    flushed = tl.zeros(group_amax.shape, tl.int32)
    beyond = tl.zeros(group_amax.shape, tl.int32)
    for i in tl.static_range(C):
        decoded = encoded[i] * factors
        exact = values[i].to(tl.float64)
        error = decoded.to(tl.float64) - exact
        signal += exact * exact
        noise += error * error
        is_nonzero = values[i] != 0
        nonzero += is_nonzero.to(tl.int32)
        flushed += (is_nonzero & (decoded == 0)).to(tl.int32)
        # A block's maximum that fits exactly may differ from what it decodes to by float32 rounding.
        beyond += ((tl.abs(encoded[i]) == 6) & (tl.abs(values[i]) > tl.abs(decoded) * (1 + 1e-6))).to(tl.int32)
    is_first = (offs_m % R == 0)[None, :] & (offs_g >= 0)[:, None]  # one of the groups of each block
    lost = is_first & (over_block(group_amax, R) != 0) & (scale == 0)
    out_ptr += pid * SUMS
    tl.store(out_ptr, total(signal))
    tl.store(out_ptr + 1, total(noise))
    tl.store(out_ptr + 2, total(nonzero).to(tl.float64))
    tl.store(out_ptr + 3, total(flushed).to(tl.float64))
    tl.store(out_ptr + 4, total(beyond).to(tl.float64))
    tl.store(out_ptr + 5, total(lost.to(tl.int32)).to(tl.float64))


def quantization_sums(x: Tensor, quantizer: Quantizer, *, seed: Tensor | None = None) -> Tensor:
    """Energies and counts of each matrix of ``x`` ``[n, rows, columns]``, quantised by itself: float64 ``[n, 6]``.

    They are those of ``reference.quantization_sums``, energies but for the order of their float64 sums; ``seed`` is
    that of ``reference.random_bytes`` (stream 0).

    Raises:
        ValueError: for an ``x`` that the kernel cannot read, or stochastic rounding without a seed.
    """
    check_device(x)
    if x.ndim != 3 or x.dtype not in DTYPES:
        raise ValueError(
            f"`quantization_sums` reads a float32, bfloat16 or float16 stack of matrices, got {x.dtype} "
            f"{tuple(x.shape)}."
        )
    stochastic = quantizer.rounding is Rounding.STOCHASTIC
    if stochastic and seed is None:
        raise ValueError("Stochastic rounding needs a `seed`, an int64 tensor [key, step].")
    x = x.contiguous()
    block_format = quantizer.format
    count, rows, columns = x.shape
    tiles_m, tiles_n = ceil_div(rows, _BLOCK_M), ceil_div(columns, _BLOCK_N)
    sums = torch.empty((count, tiles_m * tiles_n, _SUMS), dtype=torch.float64, device=x.device)
    if sums.numel():
        amax = None
        if block_format.global_scale is not None:
            axes = (1, 2) if block_format.global_scale == "tensor" else 2
            amax = torch.linalg.vector_norm(x, torch.inf, axes, dtype=torch.float32)
        launch = launcher(
            _sums_kernel, NATIVE_E4M3=has_e4m3(x), ASM=not is_interpreted(), SUMS=_SUMS, BLOCK_M=_BLOCK_M,
            BLOCK_N=_BLOCK_N, **constants_of(quantizer),
        )  # fmt: skip
        launch(
            count * tiles_m * tiles_n,
            x, rows, columns, tiles_m, tiles_n, x if amax is None else amax, x if seed is None else seed, sums,
        )  # fmt: skip
    return sums.sum(1)
