"""The product of two quantised matrices, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fp4.reference.quantize import decode_blocks, global_decode
from lightning_fp4.tensor import FP4Tensor


def gemm(lhs: FP4Tensor, rhs: FP4Tensor, bias: Tensor | None = None) -> Tensor:
    """``lhs @ rhs.T + bias`` in float32.

    Decoded values (without global scales) are exact in BF16, so on a GPU they are multiplied as BF16 with float32
    sums, on a CPU as float32. The global scales multiply the result.

    Args:
        lhs: ``[M, K]``.
        rhs: ``[N, K]``, padded to the same number of columns as ``lhs``.
        bias: ``[N]`` or ``None``.

    Returns:
        float32 ``[M, N]``.
    """
    a, b = decode_blocks(lhs), decode_blocks(rhs)
    out = torch.mm(a.bfloat16(), b.bfloat16().T, out_dtype=torch.float32) if a.is_cuda else a @ b.T
    scale_lhs, scale_rhs = global_decode(lhs), global_decode(rhs)
    if scale_lhs is not None and scale_rhs is not None:
        out *= scale_lhs * scale_rhs.T
    return out if bias is None else out.add_(bias.float())
