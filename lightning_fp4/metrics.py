"""How well a tensor fits into four bits: one function per statistic, and ``torchmetrics`` metrics that accumulate them.

Everywhere ``x`` is a matrix ``[rows, columns]`` of which every column is a channel (the contraction axis of a GEMM);
the functions also take leading axes and return one value for each matrix. Metrics accumulate over batches and, when
``torchmetrics`` synchronises them, over ranks::

    sqnr = SQNR()
    for x in batches:
        sqnr.update(x, quantize(x, Quantizer()))
    print(sqnr.compute())
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_fp4.reference import dequantize
from lightning_fp4.reference import pre_softmax_max as pre_softmax_max
from lightning_fp4.reference.moments import squares_of_a_constant, whole_blocks
from lightning_fp4.reference.statistics import flushed_to_zero, saturated, signal_and_noise, zero_scale_blocks
from lightning_fp4.tensor import FP4Tensor

# ----------------------------------------------------------------------------------------------------------------------
# Statistics of a tensor
# ----------------------------------------------------------------------------------------------------------------------


def central_moments(x: Tensor) -> Tensor:
    """``[..., 5]``: number of values, mean, and the sums of squared, cubed and fourth powers of their deviations.

    Args:
        x: ``[..., n]``, any float dtype; computed in float64.
    """
    x = x.double()
    mean = x.mean(-1, keepdim=True)
    squares = (centred := x - mean).square()
    sums = [squares.sum(-1), (squares * centred).sum(-1), squares.square().sum(-1)]
    return torch.stack([torch.full_like(sums[0], x.shape[-1]), mean.squeeze(-1), *sums], dim=-1)


def merge_moments(a: Tensor, b: Tensor) -> Tensor:
    """:func:`central_moments` of the union of two samples (Pébay 2008, SAND2008-6212, section 3.1)."""
    count_a, mean_a, m2_a, m3_a, m4_a = a.unbind(-1)
    count_b, mean_b, m2_b, m3_b, m4_b = b.unbind(-1)
    count = count_a + count_b
    n = count.clamp(min=1)
    delta = mean_b - mean_a
    m2 = m2_a + m2_b + delta**2 * count_a * count_b / n
    m3 = (
        m3_a
        + m3_b
        + delta**3 * count_a * count_b * (count_a - count_b) / n**2
        + 3 * delta * (count_a * m2_b - count_b * m2_a) / n
    )
    m4 = (
        m4_a
        + m4_b
        + delta**4 * count_a * count_b * (count_a**2 - count_a * count_b + count_b**2) / n**3
        + 6 * delta**2 * (count_a**2 * m2_b + count_b**2 * m2_a) / n**2
        + 4 * delta * (count_a * m3_b - count_b * m3_a) / n
    )
    return torch.stack([count, mean_a + delta * count_b / n, m2, m3, m4], dim=-1)


def excess_kurtosis(moments: Tensor) -> Tensor:
    """Excess kurtosis (0 for a normal distribution) from ``[..., 5]`` :func:`central_moments`; NaN for a constant."""
    count, mean, m2, _, m4 = moments.unbind(-1)
    return _excess(mean, m2 / count, m4 / count)


def _excess(mean: Tensor, variance: Tensor, fourth: Tensor) -> Tensor:
    """Excess kurtosis from the mean, and the means of the squares and fourth powers of the deviations."""
    return torch.where(variance <= squares_of_a_constant(mean, 1), torch.nan, fourth / variance**2 - 3)


def kurtosis(x: Tensor, dim: int | tuple[int, ...] = -1) -> Tensor:
    """Excess kurtosis along one axis or several, computed in float64; NaN where ``x`` is constant along them.

    The same as :func:`excess_kurtosis` of :func:`central_moments`, in fewer passes.
    """
    x = x.double()
    mean = x.mean(dim, keepdim=True)
    squares = (x - mean).square_()
    variance = squares.mean(dim, keepdim=True)
    return _excess(mean, variance, squares.square_().mean(dim, keepdim=True)).squeeze(dim)


def block_kurtosis(x: Tensor, size: int = 16) -> Tensor:
    """Excess kurtosis of every whole ``size`` x ``size`` block: ``[..., blocks]``, NaN where a block is constant.

    Rows and columns beyond the last whole block are left out.
    """
    return kurtosis(whole_blocks(x, size), (-3, -1)).flatten(-2)


def channel_magnitudes(x: Tensor) -> Tensor:
    """Mean magnitude of each channel, ``[..., columns]``."""
    return x.abs().mean(-2, dtype=torch.float32)


def mean_share(x: Tensor) -> Tensor:
    """Share of the energy that the channels' means carry, 0 to 1: ``rows * |mean|^2 / |x|^2`` (arXiv 2603.10444).

    1 says that all rows are equal; 0 that every channel averages to zero. An all-zero tensor gives 0.
    """
    x = x.float()
    energy = x.square().sum((-2, -1))
    return x.shape[-2] * x.mean(-2).square().sum(-1) / torch.where(energy == 0, 1.0, energy)


def decibels(signal: Tensor, noise: Tensor) -> Tensor:
    """``10 log10(signal / noise)``: infinite without noise, NaN without both."""
    return 10 * torch.log10(signal / noise)


# ----------------------------------------------------------------------------------------------------------------------
# Metrics
# ----------------------------------------------------------------------------------------------------------------------


class _Ratio(Metric):
    """A metric that is one sum over another."""

    full_state_update = False
    numerator: Tensor
    denominator: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in ("numerator", "denominator"):
            self.add_state(name, default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def _add(self, sums: tuple[Tensor, Tensor]) -> None:
        self.numerator = self.numerator + sums[0]
        self.denominator = self.denominator + sums[1]

    def compute(self) -> Tensor:
        """The share, 0 to 1; 0 if nothing was counted."""
        return (self.numerator / self.denominator.clamp(min=1)).float()


class SQNR(_Ratio):
    """Signal to quantisation noise ratio in decibels; higher is better, +inf without any error.

    Example::

        sqnr = SQNR()
        sqnr.update(x, quantize(x, Quantizer()))
        sqnr.compute()  # about 20 for a normal distribution in NVFP4
    """

    higher_is_better = True

    def update(self, x: Tensor, quantized: FP4Tensor) -> None:
        """Add a matrix and its quantised form."""
        self._add(signal_and_noise(x, dequantize(quantized)))

    def compute(self) -> Tensor:
        """Decibels."""
        return decibels(self.numerator, self.denominator).float()


class FlushToZero(_Ratio):
    """Share of the non-zero values that quantisation turns into zero, 0 to 1."""

    higher_is_better = False

    def update(self, x: Tensor, quantized: FP4Tensor) -> None:
        """Add a matrix and its quantised form."""
        self._add(flushed_to_zero(x, dequantize(quantized)))


class Saturation(_Ratio):
    """Share of the values beyond the largest magnitude (6 x scale) that their block can hold, 0 to 1."""

    higher_is_better = False

    def update(self, x: Tensor, quantized: FP4Tensor) -> None:
        """Add a matrix and its quantised form."""
        self._add(saturated(x, dequantize(quantized), quantized.codes))


class ZeroScaleBlocks(_Ratio):
    """Share of the blocks that hold something but whose stored scale underflowed to zero, 0 to 1."""

    higher_is_better = False

    def update(self, x: Tensor, quantized: FP4Tensor) -> None:
        """Add a matrix and its quantised form."""
        self._add(zero_scale_blocks(x, quantized.scales, quantized.format))


class Amax(Metric):
    """Largest magnitude seen; NaN if a NaN was seen, as it is for the pre-softmax scores of attention too."""

    full_state_update = False
    value: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("value", default=torch.zeros(()), dist_reduce_fx="max")

    def update(self, x: Tensor) -> None:
        """Add a tensor of any shape."""
        if x.numel():
            self.value = torch.maximum(self.value, x.abs().amax().float())

    def compute(self) -> Tensor:
        """The largest magnitude."""
        return self.value


def _merge_all(stacked: Tensor) -> Tensor:
    merged = stacked[0]
    for moments in stacked[1:]:
        merged = merge_moments(merged, moments)
    return merged


class ExcessKurtosis(Metric):
    """Excess kurtosis of all values: 0 for a normal distribution, large with outliers, NaN for a constant.

    Computed from merged central moments in float64, so it does not lose digits on a large mean.
    """

    full_state_update = False
    moments: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("moments", default=torch.zeros(5, dtype=torch.float64), dist_reduce_fx=_merge_all)

    def update(self, x: Tensor) -> None:
        """Add a tensor of any shape."""
        if x.numel():
            self.moments = merge_moments(self.moments, central_moments(x.flatten()))

    def compute(self) -> Tensor:
        """The excess kurtosis, biased estimator."""
        return excess_kurtosis(self.moments).float()


class BlockKurtosis(_Ratio):
    """Mean excess kurtosis of the whole ``size`` x ``size`` blocks; constant blocks are left out.

    Args:
        size: side of a block.
        **kwargs: of ``torchmetrics.Metric``.
    """

    def __init__(self, size: int = 16, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if size < 2:
            raise ValueError(f"`BlockKurtosis(size={size})` must be 2 or more.")
        self.size = size

    def update(self, x: Tensor) -> None:
        """Add a matrix."""
        kurtosis = block_kurtosis(x, self.size)
        varied = ~kurtosis.isnan()
        self._add((kurtosis.nan_to_num(nan=0.0).sum(), varied.sum()))

    def compute(self) -> Tensor:
        """The mean; NaN if every block is constant."""
        return torch.where(self.denominator > 0, self.numerator / self.denominator, torch.nan).float()


class _ChannelMetric(Metric):
    """A metric with one sum for every channel."""

    full_state_update = False
    sums: Tensor
    rows: Tensor

    def __init__(self, num_channels: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if num_channels < 1:
            raise ValueError(f"`{type(self).__name__}(num_channels={num_channels})` must be 1 or more.")
        self.num_channels = num_channels
        self.add_state("sums", default=torch.zeros(num_channels, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("rows", default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def _check(self, x: Tensor) -> None:
        if x.dim() != 2 or x.shape[1] != self.num_channels:
            raise ValueError(
                f"`{type(self).__name__}(num_channels={self.num_channels})` got a tensor of shape {tuple(x.shape)}. "
                f"Pass a matrix [rows, {self.num_channels}]."
            )


class TopChannels(_ChannelMetric):
    """The ``k`` channels with the largest mean magnitude.

    Args:
        num_channels: number of columns of every ``x``.
        k: how many channels.
        **kwargs: of ``torchmetrics.Metric``.
    """

    def __init__(self, num_channels: int, k: int = 16, **kwargs: Any) -> None:
        super().__init__(num_channels, **kwargs)
        if not 1 <= k <= num_channels:
            raise ValueError(f"`TopChannels(k={k})` must be between 1 and num_channels={num_channels}.")
        self.k = k

    def update(self, x: Tensor) -> None:
        """Add a matrix."""
        self._check(x)
        self.sums = self.sums + x.abs().sum(0, dtype=torch.float64)
        self.rows = self.rows + x.shape[0]

    def compute(self) -> tuple[Tensor, Tensor]:
        """Mean magnitudes, largest first, and the channels' indices."""
        values, indices = (self.sums / self.rows.clamp(min=1)).topk(self.k)
        return values.float(), indices


class MeanShare(_ChannelMetric):
    """Share of the energy that the channels' means over all rows carry, 0 to 1; see :func:`mean_share`.

    Args:
        num_channels: number of columns of every ``x``.
        **kwargs: of ``torchmetrics.Metric``.
    """

    energy: Tensor

    def __init__(self, num_channels: int, **kwargs: Any) -> None:
        super().__init__(num_channels, **kwargs)
        self.add_state("energy", default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, x: Tensor) -> None:
        """Add a matrix."""
        self._check(x)
        self.sums = self.sums + x.sum(0, dtype=torch.float64)
        self.rows = self.rows + x.shape[0]
        self.energy = self.energy + x.double().square().sum()

    def compute(self) -> Tensor:
        """The share; 0 for an all-zero tensor."""
        energy = torch.where(self.energy == 0, 1.0, self.energy)
        return (self.sums.square().sum() / self.rows.clamp(min=1) / energy).float()


class ChannelOverlap(_Ratio):
    """How many of the channels in one selection were in the selection before, 0 to 1: low overlap is drift.

    The first selection has nothing before it and counts for nothing.

    Example::

        overlap = ChannelOverlap()
        overlap.update(torch.tensor([3, 7]))
        overlap.update(torch.tensor([7, 9]))
        overlap.compute()  # 0.5
    """

    higher_is_better = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._previous: Tensor | None = None

    def update(self, channels: Tensor) -> None:
        """Add a selection, a vector of distinct indices."""
        if self._previous is not None:
            self._add((torch.isin(channels, self._previous).sum(), torch.tensor(channels.numel())))
        self._previous = channels.clone()

    def compute(self) -> Tensor:
        """The mean share of channels that stayed; NaN before the second selection."""
        return torch.where(self.denominator > 0, self.numerator / self.denominator, torch.nan).float()

    def reset(self) -> None:
        """Forget everything, the last selection too."""
        super().reset()
        self._previous = None


def relative_error(sqnr_input: float, sqnr_weight: float) -> float:
    """Expected relative error of a product from its operands' SQNR in decibels: their noise shares add."""
    return (10 ** (-sqnr_input / 10) + 10 ** (-sqnr_weight / 10)) ** 0.5
