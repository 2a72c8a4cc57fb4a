"""The largest score before attention's softmax: queries times keys, of which nothing but a maximum is written."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_fp4.kernels._launch import ceil_div, check_device, launcher

_SMALLEST_DOT, _LONGEST_DOT = 16, 256  # terms of a score, padded to a power of two, that one `tl.dot` sums


def _tile(block_d: int) -> tuple[int, int, int]:
    """Queries, and keys, of a tile; stages of keys, which fit in 99 KB of shared memory beside the queries; warps."""
    return {128: (128, 2, 8), 256: (64, 2, 4)}.get(block_d, (128, 3, 8))


@triton.jit
def _larger(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)  # `tl.max` would drop NaN


@triton.jit
def _load(ptr, stride, stride_d, rows, offs_d, length, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """These rows of a head, followed by zeros unless ``EVEN``."""
    place = ptr + rows.to(tl.int64)[:, None] * stride + offs_d.to(tl.int64)[None, :] * stride_d
    if EVEN:
        return tl.load(place)
    else:
        return tl.load(place, mask=offs_d[None, :] < length, other=0.0)


@triton.jit
def _score_kernel(  # type: ignore[no-untyped-def]
    q_ptr, q_stride_b, q_stride_h, q_stride_t, q_stride_d, k_ptr, k_stride_b, k_stride_h, k_stride_s, k_stride_d,
    heads, groups, queries, keys, length, tiles, out_ptr,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The largest score of ``BLOCK`` queries of one head, to element ``pid`` of the output.

    Where a tile has more rows than there are, it has the last one several times, which changes no maximum.
    """
    pid = tl.program_id(0).to(tl.int64)
    head = pid // tiles % heads
    batch = pid // tiles // heads
    first = (tiles - 1 - pid % tiles).to(tl.int32) * BLOCK  # of a head, those with the most keys to see start first
    offs = tl.arange(0, BLOCK)
    offs_d = tl.arange(0, BLOCK_D)
    q_ptr += batch * q_stride_b + head * q_stride_h
    k_ptr += batch * k_stride_b + head // groups * k_stride_h
    offs_m = tl.minimum(first + offs, queries - 1)
    q = _load(q_ptr, q_stride_t, q_stride_d, offs_m, offs_d, length, EVEN)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    if CAUSAL:  # the tile on the diagonal, then those that all of these queries see
        offs_n = tl.minimum(first + offs, keys - 1)
        k = _load(k_ptr, k_stride_s, k_stride_d, offs_n, offs_d, length, EVEN)
        scores = tl.where(offs_n[None, :] <= offs_m[:, None], tl.dot(q, tl.trans(k)), float("-inf"))
        largest = tl.reduce(scores, 1, _larger)
        keys = tl.minimum(first, keys)
    for start in tl.range(0, keys, BLOCK, num_stages=STAGES):
        offs_n = tl.minimum(start + offs, keys - 1)
        k = _load(k_ptr, k_stride_s, k_stride_d, offs_n, offs_d, length, EVEN)
        largest = _larger(largest, tl.reduce(tl.dot(q, tl.trans(k)), 1, _larger))
    tl.store(out_ptr + pid, tl.reduce(largest, 0, _larger))


def reads_heads(query: Tensor, key: Tensor) -> bool:
    """Whether :func:`pre_softmax_max` reads these: bfloat16 or float16, no axis empty, heads of 256 or fewer values."""
    is_half = query.dtype in (torch.bfloat16, torch.float16) and key.dtype is query.dtype
    fits = query.shape[-1] == key.shape[-1] <= _LONGEST_DOT and query.numel() > 0 and key.numel() > 0
    return is_half and fits and query.device == key.device


def pre_softmax_max(query: Tensor, key: Tensor, *, scale: float | None = None, is_causal: bool = False) -> Tensor:
    """``scale`` times the largest of ``query @ key.T`` as a float32 scalar; scores are float32 sums, not rounded.

    Args:
        query: ``[batch..., heads, T, D]`` or ``[T, D]``, bfloat16 or float16, any strides; see :func:`reads_heads`.
        key: ``[batch..., kv_heads, S, D]`` or ``[S, D]`` likewise; each of its heads serves as many neighbouring heads
            of ``query``. Axes before the heads are broadcast.
        scale: ``D ** -0.5`` if not given.
        is_causal: leave out keys after the query, both counted from the first.

    Raises:
        ValueError: for what the kernel cannot read, or heads that do not fit.
    """
    check_device(query)
    check_device(key)
    if not reads_heads(query, key):
        raise ValueError(
            f"`pre_softmax_max` reads bfloat16 or float16 heads of 1 to {_LONGEST_DOT} values, queries and keys alike, "
            f"got {query.dtype} {tuple(query.shape)} on {query.device} and {key.dtype} {tuple(key.shape)} on "
            f"{key.device}."
        )
    query, key = (x[None] if x.dim() == 2 else x for x in (query, key))
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if heads == 1:
        query, heads = query.expand(*query.shape[:-3], kv_heads, -1, -1), kv_heads
    if heads % kv_heads:
        raise ValueError(f"`pre_softmax_max`: {kv_heads} heads of keys cannot serve {heads} heads of queries alike.")
    batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3])
    query, key = (x.expand(*batch, -1, -1, -1).reshape(-1, *x.shape[-3:]) for x in (query, key))
    (queries, length), keys = query.shape[-2:], key.shape[-2]
    block_d = max(_SMALLEST_DOT, triton.next_power_of_2(length))
    block, stages, warps = _tile(block_d)
    tiles = ceil_div(queries, block)
    largest = query.new_empty(len(query) * heads * tiles, dtype=torch.float32)
    launch = launcher(
        _score_kernel, warps, CAUSAL=is_causal, EVEN=length == block_d, BLOCK=block, BLOCK_D=block_d, STAGES=stages
    )
    launch(
        largest.numel(),
        query, *query.stride(), key, *key.stride(), heads, heads // kv_heads, queries, keys, length, tiles, largest,
    )  # fmt: skip
    return largest.amax() * (length**-0.5 if scale is None else scale)
