"""Which channels are hot now: choose them from a real batch every so many steps, alike on all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

from lightning_fp4 import ops
from lightning_fp4.callbacks.gradients import local
from lightning_fp4.convert import fp4_layers
from lightning_fp4.linear import FP4Layer
from lightning_fp4.recipes import HotChannels, HotChannelUpdates


def hot_channels_of(layer: FP4Layer) -> HotChannels | None:
    """What the layer's recipe says about hot channels."""
    return layer.fp4_recipe.fprop.hot_channels if layer.fp4_recipe.fprop is not None else None


def start_scoring(layers: Mapping[str, FP4Layer]) -> None:
    """From now on, training forward passes of these layers add up scores, on the device of their weights."""
    for layer in layers.values():
        weight: Any = layer.weight
        layer.fp4_channel_scores = torch.zeros(_channels(layer), device=weight.device)


def stop_scoring(layers: Mapping[str, FP4Layer]) -> dict[str, Tensor]:
    """No more scores; those that were added up, by layer, float32 ``[in_features]``. A layer never called has zeros."""
    scores = {name: s for name, layer in layers.items() if (s := layer.fp4_channel_scores) is not None}
    for layer in layers.values():
        layer.fp4_channel_scores = None
    return scores


def choose_channels(
    layers: Mapping[str, FP4Layer],
    scores: Mapping[str, Tensor],
    *,
    ratio: float | None = None,
    reduce: Callable[[Tensor], Tensor] = lambda x: x,
) -> dict[str, float]:
    """Set the hot channels of ``layers`` to those with the highest scores.

    Args:
        layers: FP4 layers whose recipes have hot channels.
        scores: from :func:`stop_scoring`.
        ratio: share of the channels in place of the recipe's.
        reduce: averages a tensor over the ranks, so that all choose the same channels. Called once.

    Returns:
        For each layer that was called on any rank, the share of its channels that stayed, 0 if it had none before.
    """
    names = [name for name in layers if name in scores]
    if not names:
        return {}
    sizes = [scores[name].numel() for name in names]
    together = reduce(torch.cat([scores[name] for name in names])).split(sizes)
    called = torch.stack([part.any() for part in together]).tolist()
    kept = {}
    for name, part, was_called in zip(names, together, called, strict=True):
        hot = hot_channels_of(layers[name])
        if not was_called or hot is None:
            continue
        channels = ops.select_channels(part, hot.count(part.numel(), ratio))
        before = layers[name].fp4_hot_channels
        layers[name].fp4_hot_channels = channels
        kept[name] = 0.0 if before is None else overlap(before, channels)
    return kept


def overlap(before: Tensor, after: Tensor) -> float:
    """The share of the smaller set of channels that is in the other too, 1 if that is empty."""
    smaller = min(before.numel(), after.numel())
    return float(torch.isin(after, before.to(after.device)).sum()) / smaller if smaller else 1.0


def gradient_variance(layers: Mapping[str, FP4Layer]) -> Tensor | None:
    """Variance of the elements of each weight gradient, averaged over the layers; ``None`` without gradients."""
    weights: list[Any] = [layer.weight for layer in layers.values()]
    parts = [local(weight.grad) for weight in weights if weight.grad is not None]
    variances = [part.float().var(correction=0) for part in parts if part.numel() > 0]
    return torch.stack(variances).mean() if variances else None


class HotChannelRefresh(Callback):
    """Choose the hot channels of the recipe (``chon``) anew while training.

    At a refresh, the forward passes of one optimizer step score the channels of every layer; scores are averaged over
    the ranks, and the new choice holds from the next step on. The steps between cost nothing.

    Args:
        every_n_steps: optimizer steps between refreshes, in place of ``updates.interval``.
        updates: when to refresh and freeze, and how the ratio adapts; the recipe's own if not given.
        verbose: whether to log each refresh.

    Raises:
        ValueError: if ``every_n_steps`` is below 1.

    Example::

        Trainer(plugins=[FP4Precision("chon")], callbacks=[HotChannelRefresh(every_n_steps=200)])
    """

    refreshes_hot_channels = True
    """What ``FP4Precision`` looks for before it warns that hot channels will not follow the run."""

    def __init__(
        self,
        every_n_steps: int | None = None,
        *,
        updates: HotChannelUpdates | None = None,
        verbose: bool = True,
    ) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"`HotChannelRefresh(every_n_steps={every_n_steps!r})` must be at least 1.")
        self.every_n_steps, self.updates, self.verbose = every_n_steps, updates, verbose
        self._layers: dict[str, FP4Layer] = {}
        self._started: int | None = None
        self._variance: Tensor | None = None
        self._next_step = 0
        self._interval: float | None = None
        self._ratio: float | None = None
        self._refreshed: set[str] = set()
        self._frozen: set[str] = set()
        self._loaded: dict[str, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_layers": {}, "_variance": None}

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the layers, and give them the channels of the checkpoint."""
        self._layers = fp4_layers(pl_module)
        self._started = None
        for name, channels in self._loaded.items():
            if name in self._layers:
                weight: Any = self._layers[name].weight
                self._layers[name].fp4_hot_channels = channels.to(weight.device)
        self._loaded = {}
        if not any(hot_channels_of(layer) for layer in self._layers.values()):
            rank_zero_warn(
                "HotChannelRefresh found no FP4 layers whose recipe has hot channels, so it does nothing until a "
                "schedule switches to one. Use `FP4Precision('chon')`."
            )

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin to score if a refresh is due; it goes on over the whole accumulation window."""
        if self._started is not None:
            return
        due = self._due_layers(trainer.global_step)
        if due:
            self._started = trainer.global_step
            start_scoring(due)

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """Measure the gradients where the ratio adapts to them."""
        if self._started is not None and self._policy().variance_threshold is not None:
            self._variance = gradient_variance(self._layers)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Choose after the optimizer step that the scores belong to."""
        if self._started is None or trainer.global_step == self._started:
            return
        layers = {name: layer for name, layer in self._layers.items() if layer.fp4_channel_scores is not None}
        scores = stop_scoring(layers)
        policy = self._policy()

        def reduce(tensor: Tensor) -> Tensor:
            return trainer.strategy.reduce(tensor, reduce_op="mean")

        raised = self._adapt_ratio(layers, policy, reduce)
        kept = choose_channels(layers, scores, ratio=self._ratio, reduce=reduce)
        again = self._refreshed & set(kept)  # the first refresh sees the batch that the layers themselves chose from
        if policy.freeze_overlap is not None:
            self._frozen |= {name for name in again if kept[name] >= policy.freeze_overlap}
        self._refreshed |= set(kept)
        interval = policy.interval if self._interval is None else self._interval
        self._next_step = self._started + max(1, round(interval))
        self._interval = min(interval * policy.growth, float(policy.max_interval or float("inf")))
        if self.verbose:
            share = f", {sum(kept[name] for name in again) / len(again):.0%} as before" if again else ""
            channels = sum(c.numel() for name in kept if (c := self._layers[name].fp4_hot_channels) is not None)
            frozen = f", {len(self._frozen)} layers frozen" if self._frozen else ""
            ratio = f", ratio raised to {self._ratio:.3f}" if raised else ""
            rank_zero_info(
                f"HotChannelRefresh: optimizer step {self._started}: {channels} hot channels in {len(kept)} layers"
                f"{share}{frozen}{ratio}; next at step {self._next_step}."
            )
        self._started = None

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave no layer scoring."""
        self._abort()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave no layer scoring."""
        self._abort()

    def _abort(self) -> None:
        stop_scoring(self._layers)
        self._started = None

    def should_refresh(self, step: int) -> bool:
        """Whether a refresh is due at this optimizer step; override it for another rhythm."""
        freeze_step = self._policy().freeze_step
        return step >= self._next_step and (freeze_step is None or step < freeze_step)

    def _due_layers(self, step: int) -> dict[str, FP4Layer]:
        if not self.should_refresh(step):
            return {}
        return {
            name: layer
            for name, layer in self._layers.items()
            if name not in self._frozen and hot_channels_of(layer) is not None
        }

    def _policy(self) -> HotChannelUpdates:
        """What was given, else what the recipe of the first layer with hot channels says."""
        found = self.updates
        if found is None:
            hot = next((hot for layer in self._layers.values() if (hot := hot_channels_of(layer))), None)
            found = hot.updates if hot is not None else HotChannelUpdates()
        return found if self.every_n_steps is None else dataclasses.replace(found, interval=self.every_n_steps)

    def _adapt_ratio(
        self, layers: Mapping[str, FP4Layer], policy: HotChannelUpdates, reduce: Callable[[Tensor], Tensor]
    ) -> bool:
        """Raise the ratio while the gradients vary more than the threshold; whether it was raised."""
        variance, self._variance = self._variance, None
        if policy.variance_threshold is None or not layers:
            return False
        device = next(iter(layers.values())).weight.device
        measured = torch.zeros((), device=device) if variance is None else variance  # type: ignore[arg-type]
        hot = next(hot for layer in layers.values() if (hot := hot_channels_of(layer)))
        ratio = hot.ratio if self._ratio is None else self._ratio
        if float(reduce(measured)) <= policy.variance_threshold or ratio >= policy.ratio_max:
            return False
        self._ratio = min(ratio * policy.ratio_growth, policy.ratio_max)
        return True

    @override
    def state_dict(self) -> dict[str, Any]:
        """The rhythm and the channels, as plain data."""
        channels = {
            name: layer.fp4_hot_channels.cpu()
            for name, layer in self._layers.items()
            if layer.fp4_hot_channels is not None
        }
        return {
            "next_step": self._next_step,
            "interval": self._interval,
            "ratio": self._ratio,
            "refreshed": sorted(self._refreshed),
            "frozen": sorted(self._frozen),
            "channels": channels or self._loaded,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken; the layers get their channels when training starts."""
        self._next_step = state_dict["next_step"]
        self._interval, self._ratio = state_dict["interval"], state_dict["ratio"]
        self._refreshed, self._frozen = set(state_dict["refreshed"]), set(state_dict["frozen"])
        self._loaded = dict(state_dict["channels"])


def _channels(layer: nn.Module) -> int:
    """Length of the contraction axis; the ``Conv1D`` of ``transformers`` stores its weight as ``[in, out]``."""
    weight: Any = layer.weight
    return layer.in_features if isinstance(layer, nn.Linear) else weight.shape[0]
