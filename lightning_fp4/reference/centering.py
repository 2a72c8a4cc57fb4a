"""Tensors without their mean over the tokens, in plain PyTorch (Averis, arXiv 2603.10444)."""

from __future__ import annotations

import torch
from torch import Tensor


def token_mean(x: Tensor) -> Tensor:
    """The mean over the rows.

    The float32 sum takes neighbouring rows first, then neighbouring sums, an order that depends on nothing but the
    number of rows: that of ``Tensor.sum`` differs by device, and the mean's last bit can move a code.

    Args:
        x: ``[tokens, features]``, any float dtype, any size including zero tokens (whose mean is taken as zero).

    Returns:
        float32 ``[1, features]``.
    """
    sums = x.float()
    while sums.shape[0] > 1:
        sums = torch.nn.functional.pad(sums, (0, 0, 0, sums.shape[0] % 2))
        sums = sums[0::2] + sums[1::2]
    if x.shape[0] == 0:
        return x.new_zeros(1, x.shape[1], dtype=torch.float32)
    # A tensor over a Python number would be a product with its reciprocal on a GPU. Adding zero leaves one zero, 0.0:
    # the other's sign would depend on whether the sum met padding, and would show in the codes.
    return sums.div(torch.full_like(sums, x.shape[0])) + 0.0


def subtract_mean(x: Tensor, mean: Tensor) -> Tensor:
    """``x - mean`` like ``x``, computed in float32 and rounded once."""
    return (x.float() - mean).to(x.dtype)


def times_matrix(mean: Tensor, matrix: Tensor) -> Tensor:
    """``mean @ matrix.T`` in float32: ``[1, K]`` times ``[N, K]`` is ``[N]``."""
    return (matrix.float() @ mean[0].float()).contiguous()


def add_outer(product: Tensor, left: Tensor, right: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """``product + (factor * left.T) @ right`` rounded once to ``dtype``: ``[M, N]`` of ``[1, M]`` and ``[1, N]``."""
    return (product + (left.T * factor) * right).to(dtype)
