"""AdaptiveGradientClipping: clip gradients by a threshold that follows their norm, or unit by unit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fp4._lightning_compat import logger_step, writes_logs
from lightning_fp4.callbacks import gradients
from lightning_fp4.callbacks.gradients import local
from lightning_fp4.callbacks.logs import log_metrics, set_callback_metrics
from lightning_fp4.naming import clean_name, matches

# ----------------------------------------------------------------------------------------------------------------------
# The algorithms
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ClippingState:
    """What an adaptive threshold remembers.

    Args:
        threshold: the present threshold.
        average: moving average of the gradient norm, 0 before the first step.
        in_a_row: how many steps in a row clipped.
        steps: finite steps seen.
        clipped: steps that clipped.
        skipped: steps that were skipped for a non-finite gradient.
    """

    threshold: float
    average: float = 0.0
    in_a_row: int = 0
    steps: int = 0
    clipped: int = 0
    skipped: int = 0


def next_state(
    state: ClippingState,
    norm: float,
    *,
    momentum: float = 0.98,
    raise_after: int = 100,
    raise_by: float = 0.05,
    target: float = 0.8,
    rate: float = 0.01,
    adjust: bool = True,
    bounds: tuple[float, float] = (0.0, math.inf),
) -> ClippingState:
    """The state after a step whose gradient norm, before clipping, was ``norm``.

    Two forces move the threshold: after ``raise_after`` clipped steps in a row it grows by ``raise_by``; and it is
    steered by ``rate`` of the way towards ``average / target``, so that the moving average of the norm comes to sit
    near ``target`` of the threshold. Norms enter the average capped at four thresholds: one spike does not move it far.

    Args:
        state: before the step.
        norm: finite norm of the gradient.
        momentum: of the moving average.
        raise_after: clipped steps in a row after which the threshold grows.
        raise_by: by which share it then grows.
        target: where the average should sit, as a share of the threshold.
        rate: share of the way that steering goes in one step.
        adjust: whether to steer in this step.
        bounds: smallest and largest threshold.
    """
    capped = min(norm, 4 * state.threshold)
    average = capped if state.steps == 0 else momentum * state.average + (1 - momentum) * capped
    clips = norm > state.threshold
    in_a_row = state.in_a_row + 1 if clips else 0
    threshold = state.threshold
    if in_a_row >= raise_after:
        threshold, in_a_row = threshold * (1 + raise_by), 0
    if adjust:
        threshold += rate * (average / target - threshold)
    return dataclasses.replace(
        state,
        threshold=min(max(threshold, bounds[0]), bounds[1]),
        average=average,
        in_a_row=in_a_row,
        steps=state.steps + 1,
        clipped=state.clipped + clips,
    )


STACKED = 2**22
"""How many elements :func:`clip_unitwise` copies at most, to handle small parameters together."""


def clip_unitwise(parameters: Sequence[Tensor], gradients: Sequence[Tensor], clip_factor: float, eps: float) -> Tensor:
    """Clip each unit's gradient to ``clip_factor`` of its weights' norm, in place (Brock et al. 2021, equation 3).

    A unit is a row of a matrix (all axes but the first), or a whole vector or scalar; norms are float32. Small
    parameters of one shape and dtype are stacked, so that more layers hardly mean more operators.

    ``DTensor`` shards are exact: norms of units that are cut are summed over the ranks, all of which have to call this.

    Args:
        parameters: the weights.
        gradients: of the same shapes.
        clip_factor: largest ratio of gradient norm to weight norm.
        eps: weight norms below it count as ``eps``.

    Returns:
        How many units were clipped, an integer scalar: over all ranks if sharded.

    Raises:
        ValueError: for a sparse gradient.
    """
    kinds: dict[tuple, dict[tuple, list[tuple[Tensor, Tensor]]]] = {}
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient.is_sparse:
            raise ValueError(
                f"`AdaptiveGradientClipping(mode='unitwise')` cannot clip a sparse gradient, here of shape "
                f"{tuple(gradient.shape)}. Leave the module that has it out with `ignore_modules`, make its gradient "
                "dense (`nn.Embedding(sparse=False)`), or use mode='norm'."
            )
        kind: tuple = (gradient.device,)
        if isinstance(gradient, DTensor):
            kind = (gradient.device_mesh, gradient.placements, gradient.dim() > 1)
        alike = (gradient.shape, gradient.dtype, parameter.dtype)  # the whole shape: all ranks go in one order
        kinds.setdefault(kind, {}).setdefault(alike, []).append((parameter, gradient))
    clipped = [_clip_kind(groups.values(), clip_factor, eps) for groups in kinds.values()]
    return torch.stack([count.to(clipped[0].device) for count in clipped]).sum() if clipped else torch.tensor(0)


@torch.no_grad()
def _clip_kind(groups: Iterable[list[tuple[Tensor, Tensor]]], clip_factor: float, eps: float) -> Tensor:
    """Clip groups of weights and gradients, each of one shape and dtype, all of one device or one way of sharding."""
    stacks = []
    for group in groups:
        size = max(1, STACKED // max(1, local(group[0][1]).numel()))
        stacks += [group[i : i + size] for i in range(0, len(group), size)]
    like = stacks[0][0][1]
    cut, apart = _sharding(like)
    of_weights = [_unit_norms([_shard(weight, gradient) for weight, gradient in stack]) for stack in stacks]
    of_gradients = [_unit_norms([_shard(gradient, gradient) for _, gradient in stack]) for stack in stacks]
    weights, gradients = torch.cat(of_weights), torch.cat(of_gradients)
    if any(cut):
        weights, gradients = _sum_over_ranks(torch.stack((weights, gradients)).square(), like, cut).sqrt()
    largest = weights.clamp(min=eps) * clip_factor
    clips = gradients > largest
    factors = torch.where(clips, largest / gradients.clamp(min=1e-6), 1.0)
    for stack, factor in zip(stacks, factors.split([len(norms) for norms in of_gradients]), strict=True):
        _multiply([local(gradient) for _, gradient in stack], factor)
    return _sum_over_ranks(clips.sum(), like, apart)


def _sharding(x: Tensor) -> tuple[list[bool], list[bool]]:
    """Along which dimensions of its device mesh ranks hold parts of the same units, and along which other units."""
    axes = [getattr(placement, "dim", None) for placement in x.placements] if isinstance(x, DTensor) else []
    cut = [axis is not None and (axis > 0 or x.dim() < 2) for axis in axes]
    return cut, [axis is not None and not c for axis, c in zip(axes, cut, strict=True)]


def _sum_over_ranks(x: Tensor, like: Tensor, dimensions: list[bool]) -> Tensor:
    """Sum over these dimensions of the device mesh of ``like``."""
    if not isinstance(like, DTensor) or not any(dimensions):
        return x
    placements = [Partial() if summed else Replicate() for summed in dimensions]
    return DTensor.from_local(x, like.device_mesh, placements).full_tensor()


def _shard(x: Tensor, like: Tensor) -> Tensor:
    """The part of ``x`` on this rank, sharded as ``like`` is, with partial sums summed up."""
    if not isinstance(x, DTensor) or not isinstance(like, DTensor):
        return x
    placements = tuple(Replicate() if p.is_partial() else p for p in like.placements)
    return local(x if x.placements == placements else x.redistribute(placements=placements))


def _stacked(tensors: list[Tensor]) -> Tensor:
    """Tensors of one shape as one of (tensors, units, ...): a view of one, a copy of several."""
    x = torch.stack(tensors) if len(tensors) > 1 else tensors[0].unsqueeze(0)
    return x if x.dim() > 2 else x.view(len(tensors), 1, -1)


def _unit_norms(tensors: list[Tensor]) -> Tensor:
    """The norms of all units of tensors of one shape, one after another."""
    x = _stacked(tensors)
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dim=tuple(range(2, x.dim())), dtype=dtype).float().flatten()


def _multiply(tensors: list[Tensor], factors: Tensor) -> None:
    """Multiply each unit of tensors of one shape by its factor, in place."""
    x = _stacked(tensors)
    x.mul_(factors.to(x.dtype).view(*x.shape[:2], *[1] * (x.dim() - 2)))
    if len(tensors) > 1:
        torch._foreach_copy_(tensors, [each.view_as(t) for each, t in zip(x, tensors, strict=True)])


# ----------------------------------------------------------------------------------------------------------------------
# The callback
# ----------------------------------------------------------------------------------------------------------------------


class AdaptiveGradientClipping(Callback):
    """Clip gradients before each optimizer step by a threshold that adapts, and skip steps that are not finite.

    With ``mode="norm"``, the practice of NVFP4 runs: the threshold of the total norm starts at a share of what a
    high-precision run would use, grows when it clips all the time, and is steered so that the average norm sits at a
    share of it. With ``mode="unitwise"``, each output unit's gradient is clipped to a share of that unit's weight norm
    (Brock et al. 2021, arXiv 2102.06171). Gradients are the accumulated ones, over all ranks (DDP, FSDP2); works with
    manual optimization and several optimizers. Logs ``grad_norm``, ``threshold``, ``clipped_fraction`` (of steps, or of
    units) and ``skipped_steps`` under ``AdaptiveGradientClipping/``.

    Args:
        mode: ``"norm"`` or ``"unitwise"``.
        threshold: norm at which a high-precision run would clip.
        start: share of ``threshold`` to start with.
        raise_after: clipped steps in a row after which the threshold grows.
        raise_by: by which share it then grows.
        target: where the average norm should sit, as a share of the threshold; ``None`` to never steer.
        adjust_every_n_steps: steer in every n-th optimizer step only.
        bounds: smallest and largest threshold as multiples of ``threshold``.
        clip_factor: of ``mode="unitwise"``: largest ratio of gradient norm to weight norm.
        eps: of ``mode="unitwise"``: weight norms below count as this, so that zero weights can learn.
        ignore_modules: of ``mode="unitwise"``: modules whose parameters are not clipped; the paper leaves out the
            output head.
        skip_nonfinite: skip steps with an infinite or NaN gradient; weights and optimizer state then stay.
        log: whether to log.

    Raises:
        ValueError: for an argument out of range.
        MisconfigurationException: at the start of fitting, with DeepSpeed or FSDP1.

    Example::

        trainer = Trainer(plugins=[FP4Precision("nvfp4")], callbacks=[AdaptiveGradientClipping(threshold=1.0)])
    """

    def __init__(
        self,
        mode: Literal["norm", "unitwise"] = "norm",
        *,
        threshold: float = 1.0,
        start: float = 0.65,
        raise_after: int = 100,
        raise_by: float = 0.05,
        target: float | None = 0.8,
        adjust_every_n_steps: int = 1,
        bounds: tuple[float, float] = (0.1, 10.0),
        clip_factor: float = 0.01,
        eps: float = 1e-3,
        ignore_modules: Collection[str] = (),
        skip_nonfinite: bool = True,
        log: bool = True,
    ) -> None:
        if mode not in ("norm", "unitwise"):
            raise ValueError(f"`AdaptiveGradientClipping(mode={mode!r})` must be 'norm' or 'unitwise'.")
        positive = {"threshold": threshold, "start": start, "raise_after": raise_after, "clip_factor": clip_factor}
        positive |= {
            "adjust_every_n_steps": adjust_every_n_steps,
            "eps": eps,
            "target": 1 if target is None else target,
        }
        for name, value in positive.items():
            if not value > 0:
                raise ValueError(f"`AdaptiveGradientClipping({name}={value})` must be above 0.")
        if not raise_by >= 0:
            raise ValueError(f"`AdaptiveGradientClipping(raise_by={raise_by})` must be 0 or more.")
        if not isinstance(bounds, Sequence) or len(bounds) != 2 or not 0 <= bounds[0] <= bounds[1] > 0:
            raise ValueError(
                f"`AdaptiveGradientClipping(bounds={bounds})` must be the smallest and the largest threshold, as "
                "multiples of `threshold`, for example (0.1, 10.0)."
            )
        if isinstance(ignore_modules, str):
            raise ValueError(
                f"`AdaptiveGradientClipping(ignore_modules={ignore_modules!r})` must be a collection of names, for "
                f"example [{ignore_modules!r}]."
            )
        self.mode = mode
        self.threshold = threshold
        self.start = start
        self.raise_after = raise_after
        self.raise_by = raise_by
        self.target = target
        self.adjust_every_n_steps = adjust_every_n_steps
        self.bounds = (bounds[0] * threshold, bounds[1] * threshold)
        self.clip_factor = clip_factor
        self.eps = eps
        self.ignore_modules = tuple(ignore_modules)
        self.skip_nonfinite = skip_nonfinite
        self.log_metrics = log
        #: State of each optimizer, by its position.
        self.states: dict[int, ClippingState] = {}
        self._ignored: set[int] = set()
        self._values: dict[str, float] = {}  # of this batch

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse strategies that hide gradients; warn if the Trainer clips too."""
        if stage != "fit":
            return
        gradients.refuse_hidden_gradients(trainer, "AdaptiveGradientClipping")
        if trainer.gradient_clip_val:
            rank_zero_warn(
                f"`Trainer(gradient_clip_val={trainer.gradient_clip_val})` clips what `AdaptiveGradientClipping` "
                "leaves. Leave it out to clip once."
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the parameters to leave alone."""
        self._values = {}  # an interrupted fit may have left some
        self._ignored = {
            id(p) for name, p in pl_module.named_parameters() if matches(clean_name(name), self.ignore_modules)
        }

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Clip the gradients of ``optimizer``, or drop them if they are not finite."""
        parameters = gradients.parameters_of(optimizer)
        if not parameters:  # another callback skips this step
            return
        index = gradients.index_of(trainer, optimizer)
        state = self.states.get(index, ClippingState(threshold=self.start * self.threshold))
        present = gradients.of(optimizer)
        norm = gradients.total_norm(present).item()
        units = clipped_units = 0
        if not math.isfinite(norm) and self.skip_nonfinite:
            gradients.drop(optimizer)
            state = dataclasses.replace(state, skipped=state.skipped + 1)
        elif self.mode == "norm":
            if norm > state.threshold:
                gradients.scale(present, state.threshold / (norm + 1e-6))
            if math.isfinite(norm):
                state = self._adapted(state, norm)
        else:
            units, clipped_units = self._clip_units(parameters)
            state = dataclasses.replace(state, steps=state.steps + 1, clipped=state.clipped + (clipped_units > 0))
        self.states[index] = state
        if self.log_metrics and not trainer.barebones:
            fraction = clipped_units / units if units else state.clipped / max(1, state.steps)
            self._show(trainer, index, state, norm, fraction)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log once, however many steps and optimizers the batch had."""
        if self._values and writes_logs(trainer):
            log_metrics(trainer, self._values, logger_step(trainer))
        self._values = {}

    def _adapted(self, state: ClippingState, norm: float) -> ClippingState:
        return next_state(
            state,
            norm,
            raise_after=self.raise_after,
            raise_by=self.raise_by,
            target=self.target or 1.0,
            adjust=self.target is not None and (state.steps + 1) % self.adjust_every_n_steps == 0,
            bounds=self.bounds,
        )

    def _clip_units(self, parameters: list[torch.nn.Parameter]) -> tuple[int, int]:
        """Clip unit by unit; number of units, and of those that were clipped."""
        chosen = [p for p in parameters if id(p) not in self._ignored]
        units = sum(p.shape[0] if p.dim() > 1 else 1 for p in chosen)
        found = [p.grad for p in chosen if p.grad is not None]
        return units, int(clip_unitwise(chosen, found, self.clip_factor, self.eps))

    def _show(self, trainer: pl.Trainer, index: int, state: ClippingState, norm: float, fraction: float) -> None:
        named = {"grad_norm": norm, "clipped_fraction": fraction, "skipped_steps": float(state.skipped)}
        if self.mode == "norm":
            named["threshold"] = state.threshold
        suffix = f"/optimizer{index}" if len(trainer.optimizers) > 1 else ""
        values = {f"AdaptiveGradientClipping/{name}{suffix}": value for name, value in named.items()}
        set_callback_metrics(trainer, values)
        self._values |= values

    @override
    def state_dict(self) -> dict[str, Any]:
        """The state of each optimizer's threshold, as plain data."""
        return {str(index): dataclasses.asdict(state) for index, state in self.states.items()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        self.states = {int(index): ClippingState(**state) for index, state in state_dict.items()}
