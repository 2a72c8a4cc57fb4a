"""The product of two packed FP4 matrices on Blackwell's FP4 units, through ``torch.nn.functional.scaled_mm``.

The units multiply codes and block scales as they are: ``(lhs codes * lhs scales) @ (rhs codes * rhs scales).T``, with
one scale for each block along the contraction axis (PTX ISA: ``tcgen05.mma``, on compute capability 12.x ``mma``, of
``.kind::mxf4nvf4`` with ``.block_scale``). No operand is rounded, and a product of two E2M1 values and two E4M3 scales
needs 12 significant bits, so FP32 holds it exactly. cuBLAS accumulates in FP32 (``CUBLAS_COMPUTE_32F``), multiplies by
the global scales, adds the bias and rounds once, to the output's dtype. NVIDIA documents neither the order of the sums
nor that no bit is lost within one instruction.

**It has not run on such a GPU yet.** The tests compare the layout of the scales with its definition, check the call
with PyTorch's own shape function, and put a float32 product of what it is given in the place of ``scaled_mm``.

MXFP4 is a poorer fit: PyTorch has a kernel for compute capability 10.x only, which writes BF16 and leaves out the bias
(``aten/src/ATen/native/cuda/ScaledBlas.cpp``). So the bias is added here, after one more rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lightning_fp4 import reference
from lightning_fp4.formats import E8M0, BlockFormat
from lightning_fp4.tensor import FP4Tensor

_TILE_ROWS, _TILE_COLUMNS = 128, 4  # scales that lie together
_WIDTH = 16  # what PyTorch asks of a row of codes, in bytes, and of the output's width, in columns


def obstacle(device: torch.device, lhs: BlockFormat | None, rhs: BlockFormat | None) -> str | None:
    """Why FP4 units cannot multiply operands of these formats on this device, half a sentence; ``None`` if they can."""
    if not hasattr(functional, "scaled_mm") or not hasattr(torch, "float4_e2m1fn_x2"):
        return f"torch {torch.__version__} has no `torch.nn.functional.scaled_mm` for FP4"
    if lhs is None or rhs is None or lhs.scale is not rhs.scale:
        return f"FP4 units multiply two operands whose block scales have one type, got {lhs} and {rhs}"
    is_nvidia = device.type == "cuda" and torch.version.hip is None and torch.cuda.is_available()
    capability = torch.cuda.get_device_capability(device) if is_nvidia else (0, 0)
    if capability < (10, 0):
        return f"{device} has no FP4 units, which NVIDIA GPUs have from Blackwell (compute capability 10.0) on"
    if lhs.scale is E8M0 and capability[0] != 10:
        return f"PyTorch multiplies {lhs} on compute capability 10.x only, and {device} has {capability[0]}.x"
    return None


def rounds_sums(block_format: BlockFormat) -> bool:
    """Whether the sums are rounded to BF16 before anything is added to them or they become float32."""
    return block_format.scale is E8M0


def swizzle(scales: Tensor) -> Tensor:
    """Block scales in the order in which the units read them (``SWIZZLE_32_4_4``).

    The scales are padded with zero bytes to tiles of 128 rows and 4 columns, which follow each other row by row. Within
    a tile the scale of row ``r`` and column ``c`` is number ``(r % 32) * 16 + (r // 32) * 4 + c``. Source: cuBLAS, "1D
    Block Scaling Factors Layout" (https://docs.nvidia.com/cuda/cublas/#d-block-scaling-factors-layout).

    Args:
        scales: ``[rows, columns]``, one byte each; a column for each block along the contraction axis.

    Returns:
        ``[tiles * 512]`` of the same dtype, contiguous.
    """
    rows, columns = scales.shape
    tiles_m, tiles_k = -(-rows // _TILE_ROWS), -(-columns // _TILE_COLUMNS)
    padding = (0, tiles_k * _TILE_COLUMNS - columns, 0, tiles_m * _TILE_ROWS - rows)
    tiles = _pad(scales.view(torch.uint8), padding).reshape(tiles_m, 4, 32, tiles_k, _TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)


def multiply(lhs: FP4Tensor, rhs: FP4Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``lhs @ rhs.T + bias``, summed in float32.

    Args:
        lhs: ``[M, K]``; any size, also 0.
        rhs: ``[N, K]``, padded to the same number of columns as ``lhs``, with block scales of the same type.
        bias: ``[N]`` or ``None``.
        dtype: of the result: float32, bfloat16 or float16.

    Returns:
        ``[M, N]``.
    """
    factors = [factor for factor in map(reference.global_decode, (lhs, rhs)) if factor is not None]
    is_empty = lhs.codes.numel() * rhs.codes.numel() == 0
    # The call takes one factor for each operand as a second level of scales; any others multiply its result. It adds a
    # bias of the output's dtype before it rounds, unless that is float32.
    inside = factors if len(factors) == 2 and all(factor.numel() == 1 for factor in factors) else []
    fits = bias is None or (bias.dtype is dtype and dtype is not torch.float32)
    if inside and fits and not is_empty:
        return _scaled_mm(lhs, rhs, inside, bias, dtype)
    if is_empty:
        out = lhs.codes.new_zeros(lhs.shape[0], rhs.shape[0], dtype=torch.float32)
    else:
        sum_dtype = torch.bfloat16 if rounds_sums(lhs.format) else torch.float32
        out = _scaled_mm(lhs, rhs, inside, None, sum_dtype).float()
        if factors and not inside:
            out *= factors[0] * factors[1].T
    return (out if bias is None else out.add_(bias.float())).to(dtype)


def _scaled_mm(
    lhs: FP4Tensor, rhs: FP4Tensor, factors: list[Tensor], bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The call, with codes and scales padded as it wants them and ``factors`` as a second level of scales."""
    n = rhs.shape[0]
    extra = -n % _WIDTH
    kinds, orders = functional.ScalingType, functional.SwizzleType
    kind = [kinds.BlockWise1x32 if lhs.format.scale is E8M0 else kinds.BlockWise1x16]
    order = [orders.SWIZZLE_32_4_4]
    if factors:
        kind.append(kinds.TensorWise)
        order.append(orders.NO_SWIZZLE)
    out = functional.scaled_mm(
        _codes(lhs, 0),
        _codes(rhs, extra).T,
        [swizzle(_scales_of_rows(lhs)), *factors[:1]],
        kind,
        [swizzle(_scales_of_rows(rhs)), *factors[1:]],
        kind,
        order,
        order,
        bias=None if bias is None else _pad(bias, (0, extra)).contiguous(),
        output_dtype=dtype,
    )
    return out[:, :n].contiguous() if extra else out


def _codes(x: FP4Tensor, extra_rows: int) -> Tensor:
    """The codes as ``float4_e2m1fn_x2``, columns padded with zeros to what a row needs."""
    padded = _pad(x.codes, (0, -x.codes.shape[1] % _WIDTH, 0, extra_rows))
    return padded.contiguous().view(torch.float4_e2m1fn_x2)


def _scales_of_rows(x: FP4Tensor) -> Tensor:
    """A scale for each row and block of columns: those of square blocks are repeated."""
    block_rows = x.format.block[0]
    if block_rows == 1:
        return x.scales
    repeated = x.scales.view(torch.uint8).repeat_interleave(block_rows, dim=0)[: x.shape[0]]
    return repeated.view(x.scales.dtype)


def _pad(x: Tensor, padding: tuple[int, ...]) -> Tensor:
    """``torch.nn.functional.pad``, which would copy for nothing too."""
    return functional.pad(x, padding) if any(padding) else x
