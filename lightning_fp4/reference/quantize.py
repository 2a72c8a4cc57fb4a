"""A matrix to four bits and back, in plain PyTorch: the meaning that every faster version has to match."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from lightning_fp4.formats import E4M3
from lightning_fp4.quantizer import Quantizer, Rounding
from lightning_fp4.reference import packing, rounding, scaling
from lightning_fp4.tensor import FP4Operand, FP4Tensor, Units, operand_shift


def quantize(
    x: Tensor, quantizer: Quantizer, *, random_bits: Tensor | None = None, amax: Tensor | None = None
) -> FP4Tensor:
    """Quantise a matrix along its last axis.

    Args:
        x: ``[rows, columns]``, float32, bfloat16 or float16, any strides, any size including zero.
        quantizer: how.
        random_bits: uint8 ``[rows, columns padded to blocks]``; needed by stochastic rounding only.
        amax: what to take for the largest magnitude of the tensor or row, so that it shares another tensor's global
            scale; measured from ``x`` if not given.

    Returns:
        The quantised tensor. NaN and Inf anywhere make what they touch decode to non-finite values, never to plausible
        numbers: the whole tensor where there is a global scale, else the block.
    """
    block_format = quantizer.format
    encoded_max = quantizer.scale_rule.encoded_max
    if amax is None:
        amax = scaling.global_amax(x, block_format)
    global_encode = None if amax is None else scaling.encode_scale(amax, encoded_max)
    block_rows, block_columns = block_format.block
    padded = torch.nn.functional.pad(
        x.float().contiguous(), (0, -x.shape[1] % block_columns, 0, -x.shape[0] % block_rows)
    )
    blocks = scaling.block_amax(padded, block_format)
    values = padded[: x.shape[0]]

    def encode(scales: Tensor) -> Tensor:
        factors = scaling.expand(scaling.block_encode(scales, global_encode), block_format, values.shape[0])
        if quantizer.rounding is Rounding.STOCHASTIC:
            assert random_bits is not None, "stochastic rounding needs random bits"
            # By way of 2^-14, where float16 has E2M1's spacing at each magnitude: it differs for values from 2^114 on.
            scaled = factors.mul_(2.0**-14).mul_(values).mul_(2.0**14)
            return rounding.e2m1_stochastic(scaled, random_bits)
        return rounding.e2m1_nearest(factors.mul_(values))  # beyond 6 it saturates

    def wrap(scales: Tensor, codes: Tensor) -> FP4Tensor:
        return FP4Tensor(
            codes=packing.pack(codes),
            scales=scales,
            amax=amax,
            encoded_max=encoded_max,
            format=block_format,
            shape=(x.shape[0], x.shape[1]),
        )

    scales = scaling.block_scales(blocks, global_encode, quantizer.scale_rule, block_format)
    codes = encode(scales)
    others = scaling.other_scales(blocks, global_encode, quantizer.scale_rule)
    if not others:
        return wrap(scales, codes)
    error = _block_squared_error(wrap(scales, codes), values)
    for other_scales in others:  # the smallest squared error wins, of equals the first
        other_codes = encode(other_scales)
        other_error = _block_squared_error(wrap(other_scales, other_codes), values)
        is_better = other_error < error
        scale_bytes = torch.where(is_better, other_scales.view(torch.uint8), scales.view(torch.uint8))
        scales = scale_bytes.view(scales.dtype)
        codes = torch.where(scaling.expand(is_better, block_format, values.shape[0]), other_codes, codes)
        error = torch.where(is_better, other_error, error)
    return wrap(scales, codes)


def _block_squared_error(quantized: FP4Tensor, values: Tensor) -> Tensor:
    """Sum over each block of the squared error, ``[block rows, block columns]``."""
    assert quantized.amax is not None
    # Ties between the candidates are common, and this order of the products (not the decoder's) decides them as
    # Blackwell software does.
    factors = scaling.expand(quantized.scales.float() * quantized.amax, quantized.format, values.shape[0])
    decoded = packing.decode(quantized.codes) * factors * (1.0 / quantized.encoded_max)
    error = (decoded - values).square()
    rows, columns = quantized.format.block
    error = torch.nn.functional.pad(error, (0, 0, 0, -error.shape[0] % rows))
    # Sums of neighbours, then of neighbouring sums: an order of our own, since that of `Tensor.sum` differs by device.
    while columns > 1:
        error, columns = error[:, 0::2] + error[:, 1::2], columns // 2
    while rows > 1:
        error, rows = error[0::2] + error[1::2], rows // 2
    return error


def _decode_padded(quantized: FP4Tensor) -> Tensor:
    factors = quantized.scales.float()
    if quantized.amax is not None:
        factors = factors * quantized.amax * (1.0 / quantized.encoded_max)
    return packing.decode(quantized.codes).mul_(scaling.expand(factors, quantized.format, quantized.codes.shape[0]))


def dequantize(quantized: FP4Tensor) -> Tensor:
    """Decode to float32 ``[rows, columns]``."""
    return _decode_padded(quantized)[:, : quantized.shape[1]]


def decode_blocks(quantized: FP4Tensor) -> Tensor:
    """Decode without the global scale: ``E2M1 value * block scale`` in float32, ``[rows, padded columns]``.

    These products need at most six significant bits, so BF16 holds them exactly.
    """
    factors = scaling.expand(quantized.scales.float(), quantized.format, quantized.codes.shape[0])
    return packing.decode(quantized.codes).mul_(factors)


def global_decode(quantized: FP4Tensor) -> Tensor | None:
    """What multiplies :func:`decode_blocks` to give the value: float32 ``[1, 1]`` or ``[rows, 1]``, or ``None``."""
    if quantized.amax is None:
        return None
    return quantized.amax.div(torch.full_like(quantized.amax, quantized.encoded_max))


def operand(quantized: FP4Tensor, units: Units) -> FP4Operand:
    """The values that the units of a GEMM multiply, see :class:`FP4Operand`."""
    shift = operand_shift(units, quantized.encoded_max)
    factor = global_decode(quantized)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[units]
    values = decode_blocks(quantized) * shift
    if dtype is torch.float8_e4m3fn:
        values = values.clamp(-E4M3.max, E4M3.max)  # PyTorch 2.11 makes NaN of what is beyond, later ones do not
    values = values.to(dtype)
    return FP4Operand(values=values, factor=None if factor is None else factor / shift, shape=quantized.shape)


def transpose(quantized: FP4Tensor) -> FP4Tensor:
    """The quantised transpose of a tensor with square blocks, from its codes: no value changes.

    Raises:
        ValueError: if the format's blocks are not square.
    """
    block_rows, block_columns = quantized.format.block
    if block_rows != block_columns:
        raise ValueError(f"`transpose`: the blocks of {quantized.format} are {block_rows}x{block_columns}, not square.")
    rows, columns = quantized.shape
    codes = packing.unpack(quantized.codes)[:, :columns].T.contiguous()
    codes = torch.nn.functional.pad(codes, (0, -rows % block_columns))
    return dataclasses.replace(
        quantized,
        codes=packing.pack(codes),
        scales=quantized.scales.view(torch.uint8)
        .T.clone(memory_format=torch.contiguous_format)
        .view(quantized.scales.dtype),
        shape=(columns, rows),
    )
