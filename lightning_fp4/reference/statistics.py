"""What quantising does to matrices, in numbers: energies and counts, each with what it is a share of."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fp4.formats import BlockFormat
from lightning_fp4.quantizer import Quantizer
from lightning_fp4.reference.packing import unpack
from lightning_fp4.reference.quantize import dequantize, quantize

_LARGEST_CODE = 7  # the code of the magnitude 6

QUANTIZATION_SUMS = ("signal", "noise", "nonzero", "flushed", "saturated", "zero_scale_blocks")
"""What :func:`quantization_sums` returns, in this order."""


def quantization_sums(x: Tensor, quantizer: Quantizer, *, random_bits: Tensor | None = None) -> Tensor:
    """Energies and counts of each matrix of a stack, quantised by itself.

    Args:
        x: ``[n, rows, columns]``, float32, bfloat16 or float16; ``n`` is 1 or more.
        quantizer: how. A mean is not taken out.
        random_bits: uint8 ``[rows, columns padded to blocks]``, the same for every matrix; needed by stochastic
            rounding only.

    Returns:
        float64 ``[n, 6]``, see :data:`QUANTIZATION_SUMS`: energy of the matrix and of its quantisation error, numbers
        of values that are not zero, that of those decode to zero, and that lie beyond the largest that their block can
        hold, and number of blocks that hold something but whose stored scale is zero.
    """
    quantized = [quantize(matrix, quantizer, random_bits=random_bits) for matrix in x]
    decoded = torch.stack([dequantize(q) for q in quantized])
    codes = torch.stack([q.codes for q in quantized])
    scales = torch.stack([q.scales.float() for q in quantized])
    signal, noise = signal_and_noise(x, decoded)
    flushed, nonzero = flushed_to_zero(x, decoded)
    beyond, _ = saturated(x, decoded, codes)
    lost, _ = zero_scale_blocks(x, scales, quantizer.format)
    return torch.stack([signal, noise, nonzero, flushed, beyond, lost], dim=-1)


def signal_and_noise(x: Tensor, decoded: Tensor) -> tuple[Tensor, Tensor]:
    """Energy of ``x`` and of its quantisation error ``decoded - x``, in float64."""
    x = x.double()
    return x.square().sum((-2, -1)), (decoded.double() - x).square().sum((-2, -1))


def flushed_to_zero(x: Tensor, decoded: Tensor) -> tuple[Tensor, Tensor]:
    """Number of non-zero values that decode to zero, and number of non-zero values."""
    nonzero = x != 0
    return (nonzero & (decoded == 0)).sum((-2, -1)), nonzero.sum((-2, -1))


def saturated(x: Tensor, decoded: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Number of values beyond the largest that their block can hold, and number of values.

    Args:
        x: ``[..., rows, columns]``.
        decoded: of the same shape.
        codes: packed codes ``[..., rows, padded columns / 2]``.
    """
    largest = (unpack(codes)[..., : x.shape[-1]] & _LARGEST_CODE) == _LARGEST_CODE
    # A block's maximum that fits exactly may differ from what it decodes to by float32 rounding.
    beyond = largest & (x.abs().float() > decoded.abs() * (1 + 1e-6))
    return beyond.sum((-2, -1)), torch.full_like(largest.sum((-2, -1)), x.shape[-2] * x.shape[-1])


def zero_scale_blocks(x: Tensor, scales: Tensor, block_format: BlockFormat) -> tuple[Tensor, Tensor]:
    """Number of blocks that hold something but whose stored scale is zero, and number of blocks.

    Args:
        x: ``[..., rows, columns]``.
        scales: stored scales ``[..., block rows, block columns]``.
        block_format: the format.
    """
    rows, columns = block_format.block
    padded = torch.nn.functional.pad((x != 0).to(torch.uint8), (0, -x.shape[-1] % columns, 0, -x.shape[-2] % rows))
    grid = (padded.shape[-2] // rows, rows, padded.shape[-1] // columns, columns)
    holds = padded.reshape(*x.shape[:-2], *grid).amax((-3, -1)) != 0
    lost = holds & (scales.float() == 0)
    return lost.sum((-2, -1)), torch.full_like(lost.sum((-2, -1)), lost.shape[-2] * lost.shape[-1])
