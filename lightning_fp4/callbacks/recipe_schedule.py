"""Which recipe when: switch the recipe of a running training by step, epoch, share of the run, or metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_fp4.convert import fp4_layers, set_recipe
from lightning_fp4.quantizer import Centering
from lightning_fp4.recipes import Recipe, get_recipe

_CHANGES = {"high_precision", "averis"}


def change_recipe(recipe: Recipe, change: Mapping[str, Any]) -> Recipe:
    """A recipe with some things changed.

    Args:
        recipe: the recipe.
        change: ``{"high_precision": ["fprop"]}`` computes these GEMMs in high precision; ``{"averis": True}`` or
            ``{"averis": False}`` centres inputs and gradients or not. Both may be given.

    Raises:
        ValueError: for other keys or unknown GEMMs.
    """
    unknown = sorted(set(change) - _CHANGES)
    if unknown or not change:
        raise ValueError(
            f"{dict(change)!r} changes a recipe by the keys 'high_precision' (a list of GEMMs) and 'averis' (true or "
            f"false){f', not {unknown[0]!r}' if unknown else ''}. A whole recipe as a dict has its 'name'."
        )
    if "averis" in change:
        recipe = recipe.with_centering(Centering() if change["averis"] else None)
    if "high_precision" in change:
        gemms = change["high_precision"]
        if isinstance(gemms, str) or not gemms:
            raise ValueError(f"`high_precision={gemms!r}` must be a list of GEMMs, for example ['fprop'].")
        recipe = recipe.in_high_precision(*gemms)
    return recipe


def current_entry(starts: list[float], position: float) -> float | None:
    """The last of ``starts`` that ``position`` has reached, ``None`` before the first."""
    reached = [start for start in starts if position >= start]
    return max(reached) if reached else None


class RecipeSchedule(Callback):
    """Replace the recipe of all FP4 layers while training; weights and optimizer states stay as they are.

    Before the first entry, the layers keep the recipe that they were converted with.

    Several schedules compose: each changes what the ones before it in ``Trainer(callbacks=...)`` say, which is what it
    calls ``"initial"``. So a warm-up in high precision goes with an ``AverisToggle``, in either order. One that only
    another callback calls (a wrapper that forwards its hooks) is on its own.

    Args:
        schedule: when (key) which recipe (value) begins. A key is a whole number of optimizer steps or epochs, or a
            fraction below 1 of the run; with ``monitor``, the value that the metric has to reach. A value is a recipe
            (name, dict with a ``name``, or ``Recipe``), ``"initial"`` for what the layers were converted with, or a
            change of that: ``{"high_precision": ["fprop"]}``, ``{"averis": True}``.
        by: whether whole numbers count optimizer ``"step"`` or ``"epoch"``.
        monitor: a logged metric that decides in place of the steps. An entry that was reached stays reached.
        mode: ``"min"`` if the metric reaches an entry from above (a loss), ``"max"`` from below.
        verbose: whether to log each switch.

    Raises:
        ValueError: for an empty schedule, or keys or recipes that have no meaning.

    Example::

        RecipeSchedule({0.82: {"high_precision": ["fprop"]}})  # forward in BF16 for the last 18 % of the steps
        RecipeSchedule({0: "high_precision", 500: "initial"})  # warm up in BF16, then FP4
    """

    def __init__(
        self,
        schedule: dict[Any, Any],
        *,
        by: Literal["step", "epoch"] = "step",
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        verbose: bool = True,
    ) -> None:
        name = type(self).__name__
        if not isinstance(schedule, Mapping) or not schedule:
            raise ValueError(
                f"`{name}(schedule={schedule!r})` must map when to which recipe, for example {{500: 'nvfp4'}}."
            )
        if by not in ("step", "epoch"):
            raise ValueError(f"`{name}(by={by!r})` must be 'step' or 'epoch'.")
        if mode not in ("min", "max"):
            raise ValueError(f"`{name}(mode={mode!r})` must be 'min' or 'max'.")
        self.schedule = {_number(key, name): value for key, value in schedule.items()}
        for value in self.schedule.values():
            _resolve(value, Recipe(name="initial"))
        if monitor is None:
            bad = [key for key in self.schedule if key < 0 or (isinstance(key, float) and key >= 1 and key % 1)]
            if bad:
                raise ValueError(
                    f"`{name}(schedule={{{bad[0]!r}: ...}})`: a key is a whole number of {by}s, or a fraction of the "
                    "run between 0 and 1."
                )
        self.by, self.monitor, self.mode, self.verbose = by, monitor, mode, verbose
        self._initial: dict[str, Recipe] = {}
        self._applied: dict[str, Recipe] = {}
        self._current: float | None = None
        self._reached: float | None = None

    @property
    @override
    def state_key(self) -> str:
        """Distinct for every schedule, so that several can run."""
        return self._generate_state_key(schedule=str(self.schedule), by=self.by, monitor=self.monitor)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remember the layers' recipes and switch to what is due, after a resume too."""
        layers = fp4_layers(pl_module)
        if not layers:
            rank_zero_warn(
                f"{type(self).__name__} found no FP4 layers, so it does nothing. Add the `FP4Precision` plugin."
            )
        listed = _listed(trainer)
        if listed and self not in listed:
            rank_zero_warn(
                f"This {type(self).__name__} is not among `Trainer(callbacks=...)` itself, so it does not compose with "
                "the schedules there: each takes back what the other sets. Give the Trainer all of them."
            )
        first, *_ = schedules = self._schedules(trainer)
        if self is first:
            # A second fit of the same model begins where the first one did; recipes that others set count as initial.
            self._initial = {
                name: self._initial[name] if layer.fp4_recipe == self._applied.get(name) else layer.fp4_recipe
                for name, layer in layers.items()
            }
            for schedule in schedules:
                schedule._current = None
            self._apply(trainer, pl_module)
        self._initial = first._initial
        self._update(trainer, pl_module)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Switch by epoch."""
        self._update(trainer, pl_module)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Switch by step or metric; steps change between accumulation windows only."""
        self._update(trainer, pl_module)

    def _update(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        entry = self._due(trainer)
        if entry is None or entry == self._current or not self._initial:
            return
        self._current = entry
        value = self.schedule[entry]
        self._apply(trainer, pl_module)
        if self.verbose:
            rank_zero_info(
                f"{type(self).__name__}: from optimizer step {trainer.global_step} on, {len(self._initial)} FP4 layers "
                f"use {value if isinstance(value, (str, Mapping)) else value.name!r}."
            )

    def _due(self, trainer: pl.Trainer) -> float | None:
        """The key of the entry that holds now."""
        if self.monitor is not None:
            metric = trainer.callback_metrics.get(self.monitor)
            if metric is not None:
                sign = -1 if self.mode == "min" else 1
                reached = [key for key in self.schedule if sign * float(metric) >= sign * key]
                known = [] if self._reached is None else [self._reached]
                if reached or known:
                    self._reached = max([*reached, *known], key=lambda key: sign * key)
            return self._reached
        starts = {self._start(key, trainer): key for key in self.schedule}
        start = current_entry(list(starts), trainer.global_step if self.by == "step" else trainer.current_epoch)
        return None if start is None else starts[start]

    def _start(self, key: float, trainer: pl.Trainer) -> float:
        """The step or epoch at which an entry begins."""
        if not isinstance(key, float) or key >= 1:
            return key
        total: float = trainer.estimated_stepping_batches if self.by == "step" else trainer.max_epochs or math.inf
        if key > 0 and (total == math.inf or total < 0):
            raise MisconfigurationException(
                f"`{type(self).__name__}(schedule={{{key!r}: ...}})` is a fraction of a run that has no end. Give "
                f"`Trainer(max_{'steps' if self.by == 'step' else 'epochs'}=...)`, or a whole number of {self.by}s."
            )
        return math.ceil(key * total - 1e-9) if key > 0 else 0

    def _apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What all schedules of the run say now: each changes what the ones before it make of the initial recipes."""
        first, *_ = schedules = self._schedules(trainer)
        layers = fp4_layers(pl_module)
        for name, initial in self._initial.items():
            layers[name].fp4_recipe = initial
        for schedule in schedules:
            if schedule._current is None:
                continue
            value = schedule.schedule[schedule._current]
            if isinstance(value, Recipe) or _is_recipe(value):
                set_recipe(pl_module, value)
            else:
                for name in self._initial:
                    layers[name].fp4_recipe = _resolve(value, layers[name].fp4_recipe)
        first._applied = {name: layer.fp4_recipe for name, layer in layers.items()}

    def _schedules(self, trainer: pl.Trainer) -> list[RecipeSchedule]:
        """The schedules that this one composes with, itself included, in the order in which their hooks are called."""
        listed = _listed(trainer)
        return listed if self in listed else [self]

    @override
    def state_dict(self) -> dict[str, Any]:
        """What a metric has reached; steps and epochs need no memory."""
        return {} if self._reached is None else {"reached": self._reached}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with what a metric had reached."""
        self._reached = state_dict.get("reached")


def _listed(trainer: pl.Trainer) -> list[RecipeSchedule]:
    """The schedules that the Trainer was given, in the order in which their hooks are called."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, RecipeSchedule)]


def _number(key: Any, name: str) -> int | float:
    """A key of a schedule; files and command lines may give it as a string."""
    try:
        number = float(key) if not isinstance(key, (bool, type(None))) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number):
        raise ValueError(f"`{name}(schedule={{{key!r}: ...}})`: a key must be a number.")
    whole = isinstance(key, int) or (isinstance(key, str) and key.strip().lstrip("+-").isdigit())
    return int(number) if whole else number


def _is_recipe(value: Any) -> bool:
    return (isinstance(value, str) and value != "initial") or (isinstance(value, Mapping) and "name" in value)


def _resolve(value: Any, initial: Recipe) -> Recipe:
    """The recipe that a value of a schedule stands for."""
    if isinstance(value, Recipe) or _is_recipe(value):
        return get_recipe(value)
    if value == "initial":
        return initial
    if isinstance(value, Mapping):
        return change_recipe(initial, value)
    raise ValueError(
        f"{value!r} is no recipe of a schedule. Give a recipe's name, a dict, a `Recipe`, 'initial', or a change such "
        "as {'high_precision': ['fprop']}."
    )
