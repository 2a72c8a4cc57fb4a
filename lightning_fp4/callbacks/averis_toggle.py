"""Centring on and off while training."""

from __future__ import annotations

from typing import Any, Literal

from lightning_fp4.callbacks.recipe_schedule import RecipeSchedule


class AverisToggle(RecipeSchedule):
    """Switch mean centring (Averis, with exact means) on and off, and leave the rest of each layer's recipe alone.

    Args:
        schedule: when (key: optimizer steps, epochs, or a fraction below 1 of the run; with ``monitor``, a value of the
            metric) to centre (``True``) or not (``False``).
        by: whether whole numbers count optimizer ``"step"`` or ``"epoch"``.
        monitor: a logged metric that decides in place of the steps.
        mode: ``"min"`` if the metric reaches an entry from above, ``"max"`` from below.
        verbose: whether to log each switch.

    Raises:
        ValueError: for a schedule whose values are not ``True`` or ``False``.

    Example::

        AverisToggle({0: False, 2000: True})  # the mean grows while training, so centre later
    """

    def __init__(
        self,
        schedule: dict[Any, bool],
        *,
        by: Literal["step", "epoch"] = "step",
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        verbose: bool = True,
    ) -> None:
        for key, value in dict(schedule).items():
            if not isinstance(value, bool):
                raise ValueError(f"`AverisToggle(schedule={{{key!r}: {value!r}}})`: the values must be True or False.")
        changes = {key: {"averis": value} for key, value in schedule.items()}
        super().__init__(changes, by=by, monitor=monitor, mode=mode, verbose=verbose)
