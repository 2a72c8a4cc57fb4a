"""The Hot-Channel Patch in plain PyTorch: which channels err most, and the columns that take their errors back.

Source: arXiv 2602.02047. With ``X = Xq + R``, ``W = Wq + S`` and the hot channels ``I``, the product of the patched
operands is ``Xq @ Wq.T + R_I @ W_I.T + X_I @ S_I.T``, where each added factor is itself in four bits. The paper
multiplies the residuals by gathered columns of ``Xq`` and ``Wq``; gathered columns come from blocks with different
scales, which no block format can hold, so here the original values ``X_I``, ``W_I`` are quantised in their new blocks.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from lightning_fp4.quantizer import Quantizer
from lightning_fp4.reference import rounding
from lightning_fp4.reference.quantize import quantize
from lightning_fp4.tensor import FP4Tensor


def gather(quantized: FP4Tensor, channels: Tensor) -> Tensor:
    """The decoded columns ``channels`` of a quantised matrix: float32 ``[rows, k]``."""
    packed = quantized.codes[:, channels // 2]
    codes = torch.where(channels % 2 == 0, packed & 0xF, packed >> 4)
    block_rows, block_columns = quantized.format.block
    factors = quantized.scales.view(torch.uint8)[:, channels // block_columns].view(quantized.scales.dtype).float()
    if block_rows > 1:
        factors = factors.repeat_interleave(block_rows, dim=0)[: codes.shape[0]]
    if quantized.amax is not None:
        factors = factors * quantized.amax * (1.0 / quantized.encoded_max)
    return rounding.e2m1_decode(codes) * factors


def patch_values(x: Tensor, quantized: FP4Tensor, channels: Tensor) -> tuple[Tensor, Tensor]:
    """Residuals and decoded values of the channels: ``(x - decoded, decoded)``, both float32 ``[rows, k]``."""
    decoded = gather(quantized, channels)
    return x[:, channels].float() - decoded, decoded


def patch_columns(
    x: Tensor, quantized: FP4Tensor, quantizer: Quantizer, channels: Tensor, parts: tuple[str, ...]
) -> FP4Tensor:
    """The columns that a patched operand gains, quantised with the operand's global scale.

    Args:
        x: ``[rows, columns]``, the operand before it was quantised.
        quantized: the operand, quantised.
        quantizer: how it was quantised; the new columns always round to nearest.
        channels: int64 ``[k]``.
        parts: ``"residual"`` and ``"value"`` in the order in which their columns follow each other.

    Returns:
        ``[rows, len(parts) * k]``, each part padded with zero columns to whole blocks.
    """
    residual, _ = patch_values(x, quantized, channels)
    nearest = quantizer.plain
    values = {"residual": residual, "value": x[:, channels].float()}
    columns = [quantize(values[part], nearest, amax=quantized.amax) for part in parts]
    return concatenate(columns)


def concatenate(matrices: list[FP4Tensor]) -> FP4Tensor:
    """Matrices of one format and one global scale side by side; each keeps the columns it was padded to."""
    first = matrices[0]
    codes = torch.cat([m.codes for m in matrices], dim=1)
    scales = torch.cat([m.scales.view(torch.uint8) for m in matrices], dim=1).view(first.scales.dtype)
    return dataclasses.replace(first, codes=codes, scales=scales, shape=(first.shape[0], codes.shape[1] * 2))


def channel_scores(x: Tensor, x_decoded: Tensor, w: Tensor, w_decoded: Tensor, score: str) -> Tensor:
    """How much the errors of each channel matter; larger is hotter.

    Args:
        x: ``[tokens, K]``, the left operand before it was quantised.
        x_decoded: the same after quantising, float32.
        w: ``[N, K]``, the right operand.
        w_decoded: the same after quantising, float32.
        score: ``"error"`` or ``"product"``, see ``HotChannels``.

    Returns:
        float32 ``[K]``.
    """

    def mean_error(matrix: Tensor, decoded: Tensor) -> Tensor:
        return (matrix.float() - decoded).abs().sum(0) / max(matrix.shape[0], 1)

    error_x, error_w = mean_error(x, x_decoded), mean_error(w, w_decoded)
    if score == "error":
        return error_x + error_w
    norm_x = x.float().norm(dim=0) / max(x.shape[0], 1) ** 0.5
    return error_x * w.float().norm(dim=0) + error_w * norm_x


def select_channels(scores: Tensor, count: int) -> Tensor:
    """The ``count`` channels with the highest scores, in ascending order: int64 ``[count]``; of equals the first."""
    order = torch.sort(scores, descending=True, stable=True).indices
    return order[:count].sort().values
