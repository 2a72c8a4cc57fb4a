"""What is in matrices, in numbers: sums over all values, over their 16x16 blocks and over their channels."""

from __future__ import annotations

import torch
from torch import Tensor

_SIDE = 16  # of a block

TENSOR_SUMS = (
    *("amax", "top_magnitudes", "magnitudes", "mean", "squares", "fourths"),
    *("squared_channel_means", "block_quotients", "blocks"),
)
"""What :func:`tensor_sums` returns, in this order."""


def tensor_sums(x: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Sums of each matrix of a stack, in float64 but for the magnitudes, whose sums by channel are float32.

    Args:
        x: float32 ``[n, rows, columns]``, rows and columns 1 or more.
        top_k: number of channels to select, at most.

    Returns:
        float64 ``[n, 9]``, see :data:`TENSOR_SUMS`: the largest magnitude; the sums of the magnitudes of the top
        channels and of all; the mean; the sums of the squares and fourth powers of the deviations from it; the sum of
        the squares of the channels' means; over the whole 16x16 blocks that are not constant, the sum of the quotients
        of their fourth powers' sum and their squares' sum squared; and the number of these blocks. Also the channels
        with the largest sums of magnitudes, largest first, int64 ``[n, k]``.
    """
    magnitudes = x.abs()
    amax, by_channel = magnitudes.amax((-2, -1)).double(), magnitudes.sum(-2)
    del magnitudes
    top, channels = by_channel.topk(min(top_k, x.shape[-1]), dim=-1)
    exact = x.double()
    means = exact.mean(-2)
    mean = means.mean(-1)
    powers = (exact - mean[:, None, None]).square_()
    squares = powers.sum((-2, -1))
    fourths = powers.square_().sum((-2, -1))
    del powers
    blocks = whole_blocks(exact)
    block_means = blocks.mean((-3, -1), keepdim=True)
    block_powers = blocks.sub_(block_means).square_()
    block_squares = block_powers.sum((-3, -1), keepdim=True)
    varied = block_squares > squares_of_a_constant(block_means, _SIDE**2)
    quotients = block_powers.square_().sum((-3, -1), keepdim=True).div_(block_squares.square_()).where(varied, 0.0)
    sums = [
        amax,
        top.sum(-1, dtype=torch.float64),
        by_channel.sum(-1, dtype=torch.float64),
        mean,
        squares,
        fourths,
        means.square_().sum(-1),
        quotients.sum((-4, -3, -2, -1)),
        varied.sum((-4, -3, -2, -1), dtype=torch.float64),
    ]
    return torch.stack(sums, dim=-1), channels


def whole_blocks(x: Tensor, size: int = _SIDE) -> Tensor:
    """A view ``[..., block rows, size, block columns, size]`` of the whole blocks of ``x`` ``[..., rows, columns]``."""
    rows, columns = x.shape[-2] // size, x.shape[-1] // size
    if x.shape[-2:] != (rows * size, columns * size):
        x = x[..., : rows * size, : columns * size]
    return x.unflatten(-1, (columns, size)).unflatten(-3, (rows, size))


def squares_of_a_constant(mean: Tensor, count: int) -> Tensor:
    """How large the sum of the squared deviations of ``count`` equal values may be in float64.

    It is rounding noise of their mean, not exactly zero.
    """
    return (mean * (torch.finfo(torch.float64).resolution * count**0.5)).square_()
