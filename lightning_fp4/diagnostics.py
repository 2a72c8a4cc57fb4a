"""What makes a tensor hard to quantise: a common mean, and a few outliers. Measured on activations and gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fp4.recipes import HotChannels


def mean_share(x: Tensor) -> Tensor:
    """The share ``R`` of a tensor's energy that its mean over tokens holds: ``tokens * |mean|^2 / |x|^2``.

    0 for a centred tensor, 1 if all tokens are equal (arXiv 2603.10444). It is what centring takes out before
    quantisation. 0 for a tensor of zeros and for no tokens.

    Args:
        x: ``[..., features]``; leading axes are tokens.

    Returns:
        float32 scalar in ``[0, 1]``.
    """
    x = _tokens(x)
    total = x.square().sum()
    return torch.where(total > 0, x.shape[0] * _mean(x).square().sum() / total, 0.0)


def mean_alignment(x: Tensor) -> Tensor:
    """Cosine between the mean token and the first right singular vector, without its sign: 0 to 1.

    Near 1, the direction that holds most of the tensor's energy is its mean, so centring removes it.

    Args:
        x: ``[..., features]``; leading axes are tokens.

    Returns:
        float32 scalar; 0 if the mean is zero.
    """
    x = _tokens(x)
    mean = _mean(x)
    if x.numel() == 0:
        return mean.new_zeros(())
    # The first right singular vector of x is the first eigenvector of its Gram matrix; take the smaller of the two.
    if x.shape[0] >= x.shape[1]:
        direction = torch.linalg.eigh((x.T @ x).double()).eigenvectors[:, -1].float()
    else:
        direction = x.T @ torch.linalg.eigh((x @ x.T).double()).eigenvectors[:, -1].float()
    cosine = (mean @ direction).abs() / (mean.norm() * direction.norm())
    return torch.nan_to_num(cosine, nan=0.0).clamp(max=1.0)


@dataclass(frozen=True, kw_only=True)
class OutlierAttribution:
    """Where the largest values of a tensor come from.

    Args:
        mean: share of the outliers' magnitude that the mean over tokens explains, 0 to 1; 0 where the mean points the
            other way.
        channels: share of the outliers that lie in the hottest ``count`` channels.
        count: how many channels that are: the smallest multiple of 16 that holds 9 % of them.
        threshold: the magnitude from which a value counts as an outlier.
    """

    mean: float
    channels: float
    count: int
    threshold: float


def attribute_outliers(x: Tensor, *, fraction: float = 0.001, ratio: float = 0.09) -> OutlierAttribution:
    """Whether a tensor's outliers come from its mean (then centre it) or from a few channels (then patch those).

    Args:
        x: ``[..., features]``; leading axes are tokens.
        fraction: share of the values, by magnitude, to count as outliers; at least one value.
        ratio: share of the channels to test as hot channels.

    Raises:
        ValueError: for a tensor without values, or a fraction outside of ``(0, 1]``.
    """
    x = _tokens(x)
    if x.numel() == 0:
        raise ValueError("`attribute_outliers` got a tensor without values. Give it activations of at least one token.")
    if not 0 < fraction <= 1:
        raise ValueError(f"`attribute_outliers(fraction={fraction!r})` must lie between 0 (excluded) and 1.")
    amount = max(1, int(fraction * x.numel()))
    threshold = x.abs().flatten().topk(amount).values[-1]
    outliers = x.abs() >= threshold
    mean = _mean(x)[None].expand_as(x)
    explained = (mean * x.sign())[outliers].clamp(min=0).minimum(x.abs()[outliers]).sum()
    magnitude = x.abs()[outliers].sum()
    count = HotChannels(ratio=ratio).count(x.shape[1])
    per_channel = outliers.sum(0)
    return OutlierAttribution(
        mean=float(torch.where(magnitude > 0, explained / magnitude, 0.0)),
        channels=float(per_channel.topk(count).values.sum() / per_channel.sum()),
        count=count,
        threshold=float(threshold),
    )


def _tokens(x: Tensor) -> Tensor:
    return x.detach().float().reshape(-1, x.shape[-1])


def _mean(x: Tensor) -> Tensor:
    return x.sum(0) / max(1, x.shape[0])
