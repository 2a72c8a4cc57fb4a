"""Packed four-bit matrices back to values: decoded tensors, and operands for a GEMM."""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_fp4.formats import E8M0
from lightning_fp4.kernels import _groups, _scales, _values
from lightning_fp4.kernels._launch import (
    Plan,
    Remembered,
    check_device,
    has_e4m3,
    launcher,
    tiles_of,
    traits,
)
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


class _Plan(Plan):
    """What decoding matrices that are alike, whose parts are contiguous, has in common."""

    def __init__(self, quantized: FP4Tensor, out: Tensor, units: str) -> None:
        check_device(out)
        super().__init__(out.get_device())
        block_format, encoded_max = quantized.format, quantized.encoded_max
        block_m, block_n = 32, 256
        programs, tiles_n = tiles_of(out, block_m, block_n)
        self._sizes = (*out.shape, quantized.scales.shape[1], tiles_n)
        self._launch = launcher(
            _decode_kernel, UNITS=units, BY="none" if quantized.amax is None else block_format.global_scale,
            MAX=encoded_max, SHIFT=1.0 if units == "values" else operand_shift(units, encoded_max),  # type: ignore[arg-type]
            R=block_format.block[0], C=block_format.block[1], IS_E8M0=block_format.scale is E8M0,
            NATIVE_E4M3=has_e4m3(out), BLOCK_M=block_m, BLOCK_N=block_n,
        ).on(programs)  # fmt: skip

    def __call__(self, quantized: FP4Tensor, out: Tensor, factor: Tensor | None) -> None:
        codes, amax = quantized.codes, quantized.amax
        scales = quantized.scales.view(torch.uint8)
        self._launch(
            codes, scales, codes if amax is None else amax, out, codes if factor is None else factor, *self._sizes
        )  # fmt: skip


_plans = Remembered[_Plan]()


def _decode(quantized: FP4Tensor, out: Tensor, factor: Tensor | None, units: str) -> None:
    if not out.numel():
        return
    codes, scales, amax = quantized.codes, quantized.scales, quantized.amax
    key = (
        units, quantized.format.name, quantized.encoded_max, traits(codes), scales.data_ptr() % 16, scales.shape,
        None if amax is None else amax.data_ptr() % 16, out.shape, out.dtype,
    )  # fmt: skip
    plan = _plans.get(key) or _plans.keep(key, _Plan(quantized, out, units))
    plan.on_its_device(quantized, out, factor)


def _contiguous(quantized: FP4Tensor) -> FP4Tensor:
    codes, scales, amax = quantized.codes, quantized.scales, quantized.amax
    if codes.is_contiguous() and scales.is_contiguous() and (amax is None or amax.is_contiguous()):
        return quantized
    amax = None if amax is None else amax.contiguous()
    return dataclasses.replace(quantized, codes=codes.contiguous(), scales=scales.contiguous(), amax=amax)


def dequantize(quantized: FP4Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode to ``[rows, columns]``, computed in float32 and rounded once to ``dtype``."""
    out = quantized.codes.new_empty(quantized.shape, dtype=dtype)
    _decode(_contiguous(quantized), out, None, "values")
    return out


def operand(quantized: FP4Tensor, units: Units) -> FP4Operand:
    """The values that ``units`` (``"bf16"`` or ``"fp8"``) multiply, columns padded to whole blocks.

    Raises:
        ValueError: for other units.
    """
    if units not in ("bf16", "fp8"):
        raise ValueError(f"The kernels decode for 'bf16' or 'fp8' units, got {units!r}.")
    codes, amax = quantized.codes, quantized.amax
    dtype = torch.bfloat16 if units == "bf16" else torch.float8_e4m3fn
    out = codes.new_empty((quantized.shape[0], codes.shape[1] * 2), dtype=dtype)
    factor = None if amax is None else torch.empty_like(amax, memory_format=torch.contiguous_format)
    if factor is not None and not out.numel():
        factor.zero_()
    _decode(_contiguous(quantized), out.view(torch.uint8 if units == "fp8" else torch.uint16), factor, units)
    return FP4Operand(values=out, factor=factor, shape=quantized.shape)
