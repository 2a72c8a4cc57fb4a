"""Packed four-bit matrices back to values: decoded tensors, and operands for a GEMM."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_fp4.formats import E8M0
from lightning_fp4.kernels import _groups, _scales, _values
from lightning_fp4.kernels._launch import check_device, has_e4m3, launcher, tiles_of
from lightning_fp4.tensor import FP4Operand, FP4Tensor, Units, operand_shift


@triton.jit
def _decode_kernel(  # type: ignore[no-untyped-def]
    codes_ptr, scale_ptr, amax_ptr, out_ptr, factor_ptr, rows, width, block_count, tiles_n,
    UNITS: tl.constexpr, BY: tl.constexpr, MAX: tl.constexpr, SHIFT: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    IS_E8M0: tl.constexpr, NATIVE_E4M3: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Decode one tile of the first ``width`` columns; with the global scale if ``UNITS`` is ``"values"``."""
    pid = tl.program_id(0).to(tl.int64)
    pid_m = pid // tiles_n
    pid_n = pid % tiles_n
    BLOCKS: tl.constexpr = BLOCK_N // C
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_b = pid_n * BLOCKS + tl.arange(0, BLOCKS)
    offs_c = pid_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    bytes_in_row = block_count * (C // 2)
    mask = (offs_m[:, None] < rows) & (offs_c[None, :] < bytes_in_row)
    packed = tl.load(codes_ptr + offs_m[:, None] * bytes_in_row + offs_c[None, :], mask=mask, other=0).to(tl.int32)
    codes = tl.reshape(tl.join(packed & 0xF, packed >> 4), (BLOCK_M, BLOCKS, C))
    mask = (offs_m[:, None] < rows) & (offs_b[None, :] < block_count)
    scales = tl.load(scale_ptr + (offs_m[:, None] // R) * block_count + offs_b[None, :], mask=mask, other=0)
    factors = _scales.scale_decode(scales.to(tl.int32), IS_E8M0)
    mask = (offs_m[:, None] < rows) & (offs_n[None, :] < width)
    place = out_ptr + offs_m[:, None] * width + offs_n[None, :]
    if BY == "tensor":
        amax = tl.load(amax_ptr + tl.arange(0, 1))
    elif BY == "row":
        amax = tl.load(amax_ptr + offs_m, mask=offs_m < rows, other=0.0)
    if UNITS == "values":
        if BY != "none":
            factors = factors * amax[:, None] * (1.0 / MAX)
        values = _values.e2m1_decode(codes) * factors[:, :, None]
        tl.store(place, tl.reshape(values, (BLOCK_M, BLOCK_N)).to(out_ptr.dtype.element_ty), mask=mask)
    else:
        values = _values.e2m1_decode(codes) * (factors * SHIFT)[:, :, None]
        bits = tl.reshape(_groups.operand_bits(values, UNITS, NATIVE_E4M3), (BLOCK_M, BLOCK_N))
        bits = bits.to(tl.uint8) if UNITS == "fp8" else bits.to(tl.uint16)
        tl.store(place, bits, mask=mask)
        if BY != "none":
            factor = tl.div_rn(amax, tl.zeros_like(amax) + MAX) * (1.0 / SHIFT)
            if BY == "tensor":
                if pid == 0:
                    tl.store(factor_ptr + tl.arange(0, 1), factor)
            elif pid_n == 0:
                tl.store(factor_ptr + offs_m, factor, mask=offs_m < rows)


def _launch(quantized: FP4Tensor, out: Tensor, factor: Tensor | None, units: str, shift: float) -> None:
    check_device(quantized.codes)
    if not out.numel():
        return
    block_format, amax = quantized.format, quantized.amax
    block_m, block_n = 32, 256
    programs, tiles_n = tiles_of(out, block_m, block_n)
    codes, scales = quantized.codes.contiguous(), quantized.scales.view(torch.uint8).contiguous()
    launch = launcher(
        _decode_kernel, UNITS=units, BY="none" if amax is None else block_format.global_scale,
        MAX=quantized.encoded_max, SHIFT=shift, R=block_format.block[0], C=block_format.block[1],
        IS_E8M0=block_format.scale is E8M0, NATIVE_E4M3=has_e4m3(out), BLOCK_M=block_m, BLOCK_N=block_n,
    )  # fmt: skip
    launch(
        programs,
        codes, scales, codes if amax is None else amax.contiguous(), out, codes if factor is None else factor,
        out.shape[0], out.shape[1], scales.shape[1], tiles_n,
    )  # fmt: skip


def dequantize(quantized: FP4Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode to ``[rows, columns]``, computed in float32 and rounded once to ``dtype``."""
    out = quantized.codes.new_empty(quantized.shape, dtype=dtype)
    _launch(quantized, out, None, "values", 1.0)
    return out


def operand(quantized: FP4Tensor, units: Units) -> FP4Operand:
    """The values that ``units`` (``"bf16"`` or ``"fp8"``) multiply, columns padded to whole blocks.

    Raises:
        ValueError: for other units.
    """
    if units not in ("bf16", "fp8"):
        raise ValueError(f"The kernels decode for 'bf16' or 'fp8' units, got {units!r}.")
    dtype = torch.bfloat16 if units == "bf16" else torch.float8_e4m3fn
    out = quantized.codes.new_empty(quantized.shape[0], quantized.codes.shape[1] * 2, dtype=dtype)
    factor = None if quantized.amax is None else torch.empty_like(quantized.amax)
    if factor is not None and not out.numel():
        factor.zero_()
    bits = out.view(torch.uint8 if units == "fp8" else torch.uint16)
    _launch(quantized, bits, factor, units, operand_shift(units, quantized.encoded_max))
    return FP4Operand(values=out, factor=factor, shape=quantized.shape)
