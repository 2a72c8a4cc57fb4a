"""What follows a GEMM whose sums are float32: global scales, bias and the output's dtype, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_fp4.kernels._launch import check_device, launcher, tiles_of


@triton.jit
def _finish_kernel(  # type: ignore[no-untyped-def]
    sums_ptr, lhs_ptr, rhs_ptr, bias_ptr, out_ptr, rows, columns, tiles_n,
    LHS: tl.constexpr, RHS: tl.constexpr, BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``out = sums * (lhs * rhs) + bias`` for one tile; LHS and RHS are "none", "tensor" or "row"."""
    pid = tl.program_id(0).to(tl.int64)
    offs_m = (pid // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = (pid % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (offs_m[:, None] < rows) & (offs_n[None, :] < columns)
    offs = offs_m[:, None] * columns + offs_n[None, :]
    value = tl.load(sums_ptr + offs, mask=mask, other=0.0)
    if LHS != "none":
        if LHS == "tensor":
            lhs = tl.load(lhs_ptr + tl.arange(0, 1))
        else:
            lhs = tl.load(lhs_ptr + offs_m, mask=offs_m < rows, other=0.0)
        if RHS == "tensor":
            rhs = tl.load(rhs_ptr + tl.arange(0, 1))
        else:
            rhs = tl.load(rhs_ptr + offs_n, mask=offs_n < columns, other=0.0)
        value = value * (lhs[:, None] * rhs[None, :])
    if BIAS:
        bias = tl.load(bias_ptr + offs_n, mask=offs_n < columns, other=0.0)
        value = value + bias.to(tl.float32)[None, :]
    tl.store(out_ptr + offs, value.to(out_ptr.dtype.element_ty), mask=mask)


def finish(sums: Tensor, lhs: Tensor | None, rhs: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``(sums * (lhs * rhs.T) + bias)`` rounded once to ``dtype``.

    Args:
        sums: float32 ``[M, N]``, contiguous.
        lhs: float32 ``[1, 1]`` or ``[M, 1]``, or ``None`` (then ``rhs`` is ``None`` too).
        rhs: float32 ``[1, 1]`` or ``[N, 1]``.
        bias: ``[N]``.
        dtype: of the result.

    Raises:
        ValueError: for sums of another dtype or layout, or only one global scale.
    """
    check_device(sums)
    if sums.dtype is not torch.float32 or not sums.is_contiguous():
        raise ValueError(f"`finish` needs contiguous float32 sums, got {sums.dtype} with strides {sums.stride()}.")
    if (lhs is None) != (rhs is None):
        raise ValueError("`finish` needs the global scales of both operands, or none.")
    out = torch.empty_like(sums, dtype=dtype)
    if not out.numel():
        return out
    block_m, block_n = 16, 256
    programs, tiles_n = tiles_of(sums, block_m, block_n)

    def kind(factor: Tensor | None) -> str:
        return "none" if factor is None else "tensor" if factor.numel() == 1 else "row"

    launch = launcher(
        _finish_kernel, LHS=kind(lhs), RHS=kind(rhs), BIAS=bias is not None, BLOCK_M=block_m, BLOCK_N=block_n
    )
    launch(
        programs,
        sums, sums if lhs is None else lhs, sums if rhs is None else rhs, sums if bias is None else bias.contiguous(),
        out, sums.shape[0], sums.shape[1], tiles_n,
    )  # fmt: skip
    return out
