"""Tensors without their mean over the tokens, in plain PyTorch (Averis, arXiv 2603.10444)."""

from __future__ import annotations

from torch import Tensor


def center(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split ``x`` into its mean over the rows and the rest.

    Args:
        x: ``[tokens, features]``, any float dtype, any size including zero tokens (whose mean is taken as zero).

    Returns:
        ``(rest, mean)``: ``x - mean`` like ``x``, computed in float32 and rounded once; the mean as float32
        ``[1, features]``.
    """
    mean = x.float().sum(dim=0, keepdim=True) / max(x.shape[0], 1)
    return (x.float() - mean).to(x.dtype), mean


def times_matrix(mean: Tensor, matrix: Tensor) -> Tensor:
    """``mean @ matrix.T`` in float32: ``[1, K]`` times ``[N, K]`` is ``[N]``."""
    return (matrix.float() @ mean[0].float()).contiguous()
