"""What four bits do to a model: measure its FP4 layers, rank them by sensitivity, show it as a table and a picture."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.imports import RequirementCache
from torch import Tensor, nn

from lightning_fp4 import metrics
from lightning_fp4.convert import fp4_layers, use_recipe
from lightning_fp4.naming import role_of
from lightning_fp4.operands import OPERANDS, OperandName, OperandReader, OperandStatistics

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

_RICH = RequirementCache("rich")
_MATPLOTLIB = RequirementCache("matplotlib")


@dataclass(frozen=True, kw_only=True)
class LayerRank:
    """One layer in the order of sensitivity.

    Args:
        name: clean name of the layer.
        component: what it does in its block, a value of ``naming.Role``.
        error: expected relative error of its product from the SQNR of input and weight; NaN if not measured.
        loss_increase: measured effect of quantising this layer alone on the loss; ``None`` if not measured.
    """

    name: str
    component: str
    error: float
    loss_increase: float | None

    @property
    def score(self) -> float:
        """What the ranking goes by: the loss increase if measured, else the error."""
        return self.error if self.loss_increase is None else self.loss_increase


@dataclass(kw_only=True)
class PrecisionReport:
    """What was measured on the FP4 layers of a model.

    Args:
        statistics: of each layer and operand.
        attention_maxima: largest score before the softmax, by attention module.
        loss_increases: effect of quantising one layer alone on the loss, by layer.
    """

    statistics: list[OperandStatistics] = field(default_factory=list)
    attention_maxima: dict[str, float] = field(default_factory=dict)
    loss_increases: dict[str, float] = field(default_factory=dict)

    def value(self, layer: str, operand: OperandName, statistic: str) -> float:
        """One value, NaN if it was not measured."""
        found = (s.values.get(statistic) for s in self.statistics if s.layer == layer and s.operand == operand)
        value = next(found, None)
        return math.nan if value is None else value

    def ranking(self) -> list[LayerRank]:
        """The layers, the most sensitive first; layers without a score come last."""
        by_layer: dict[str, dict[str, float]] = {name: {} for name in self.loss_increases}
        for s in self.statistics:
            by_layer.setdefault(s.layer, {})[s.operand] = s.values.get("sqnr", math.nan)
        ranks = [
            LayerRank(
                name=name,
                component=role_of(name).value,
                error=metrics.relative_error(sqnr.get("input", math.nan), sqnr.get("weight", math.nan)),
                loss_increase=self.loss_increases.get(name),
            )
            for name, sqnr in by_layer.items()
        ]
        return sorted(ranks, key=lambda rank: -math.inf if math.isnan(rank.score) else rank.score, reverse=True)

    def keep_in_high_precision(self, *, most: float = 0.15, num_deviations: float = 3.0) -> list[str]:
        """The layers that stand out, as ``FP4Precision(ignore_modules=...)`` takes them.

        A layer stands out if its score exceeds the median by ``num_deviations`` times the median absolute deviation
        (scaled to a normal distribution's standard deviation) and by a tenth of the median.

        Args:
            most: largest share of the layers to name.
            num_deviations: how far out a layer has to be.
        """
        ranks = [rank for rank in self.ranking() if not math.isnan(rank.score)]
        if len(ranks) < 3:
            return []
        scores = [rank.score for rank in ranks]
        median = statistics.median(scores)
        deviation = 1.4826 * statistics.median(abs(score - median) for score in scores)
        limit = median + max(num_deviations * deviation, 0.1 * abs(median))
        return [rank.name for rank in ranks[: math.ceil(most * len(ranks))] if rank.score > limit]

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """The table as text: headings, and one row for each component, the most sensitive first.

        Values are means over the component's layers; x, w and g stand for input, weight and output gradient, "loss" for
        the effect of quantising one of the layers alone, and "worst" is the most sensitive of them.
        """
        groups: dict[str, list[LayerRank]] = defaultdict(list)
        for rank in self.ranking():
            groups[rank.component].append(rank)
        headings = ["component", "n", "error", "loss", "SQNR dB x/w/g", "flushed % x/w/g", "kurt x", "mean x", "worst"]
        rows = []
        for component, ranks in groups.items():
            names = [rank.name for rank in ranks]
            mean = functools.partial(self._mean_over, names)
            increases = [rank.loss_increase for rank in ranks if rank.loss_increase is not None]
            rows.append(
                [
                    component,
                    str(len(ranks)),
                    _mean([rank.error for rank in ranks], "{:.3f}"),
                    _mean(increases, "{:+.4f}"),
                    " ".join(mean(operand, "sqnr", "{:.1f}") for operand in OPERANDS),
                    " ".join(mean(operand, "flush_to_zero", "{:.1%}").rstrip("%") for operand in OPERANDS),
                    mean("input", "kurtosis", "{:.1f}"),
                    mean("input", "mean_share", "{:.0%}"),
                    ranks[0].name,
                ]
            )
        return headings, rows

    def _mean_over(self, names: Collection[str], operand: str, statistic: str, form: str) -> str:
        chosen = [s.values for s in self.statistics if s.operand == operand and s.layer in names]
        return _mean([values.get(statistic, math.nan) for values in chosen], form)

    def table(self) -> Table:
        """The components as a ``rich`` table.

        Raises:
            ModuleNotFoundError: without ``rich``; ``str(report)`` shows the same as plain text.
        """
        if not _RICH:
            raise ModuleNotFoundError(f"`PrecisionReport.table()` needs `rich`; print the report for text. {_RICH}")
        from rich.table import Table

        headings, rows = self.rows()
        keep = self.keep_in_high_precision()
        table = Table(title="FP4 layers by component", caption=f"worth keeping in BF16: {', '.join(keep) or 'none'}")
        for i, heading in enumerate(headings):
            table.add_column(heading, justify="left" if i in (0, len(headings) - 1) else "right", overflow="fold")
        for row in rows:
            table.add_row(*row)
        return table

    def __str__(self) -> str:
        headings, rows = self.rows()
        widths = [max(len(row[i]) for row in [headings, *rows]) for i in range(len(headings))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [headings, *rows]
        ]
        return "\n".join([*lines, f"worth keeping in BF16: {', '.join(self.keep_in_high_precision()) or 'none'}"])


def _mean(values: Sequence[float], form: str) -> str:
    known = [value for value in values if not math.isnan(value)]
    return form.format(sum(known) / len(known)) if known else "-"  # `fmean` refuses infinities of both signs


def refuse_single_name(function: str, layers: Collection[str] | None) -> None:
    """Raise for a string, of which every part would be taken for a name.

    Raises:
        ValueError: for a string.
    """
    if isinstance(layers, str):
        raise ValueError(f"`{function}(layers={layers!r})` must be a collection of names, for example [{layers!r}].")


@contextlib.contextmanager
def monitor_precision(
    model: nn.Module,
    *,
    layers: Collection[str] | None = None,
    operands: Collection[OperandName] = OPERANDS,
    max_rows: int | None = None,
    top_k: int = 16,
) -> Iterator[PrecisionReport]:
    """Measure the FP4 layers of any model while the context is open; the report is filled when it closes.

    Args:
        model: a converted model.
        layers: clean names of the layers to measure, all if ``None``.
        operands: which of ``"input"``, ``"weight"`` and ``"grad_output"``.
        max_rows: rows of each operand to measure, all if ``None``.
        top_k: number of channels in the selection of top channels.

    Example::

        with monitor_precision(model) as report:
            loss_fn(model(inputs), targets).backward()
        print(report)
        FP4Precision("nvfp4", ignore_modules=report.keep_in_high_precision())
    """
    refuse_single_name("monitor_precision", layers)
    report = PrecisionReport()
    reader = OperandReader(model, names=layers, operands=operands, max_rows=max_rows, top_k=top_k, attention=True)
    with reader:
        yield report
    report.statistics = reader.collect()
    report.attention_maxima = reader.attention_maxima()


@torch.no_grad()
def layer_sensitivity(
    model: nn.Module, loss_fn: Callable[[], Tensor], *, layers: Collection[str] | None = None
) -> dict[str, float]:
    """How much the loss grows when one FP4 layer alone is quantised, for each layer.

    Args:
        model: a converted model; its recipes and its train or eval mode stay.
        loss_fn: computes the loss on the same data at each call, without randomness.
        layers: clean names of the layers to measure, all if ``None``.

    Returns:
        Loss with this layer in FP4 and all others in high precision, minus the loss all in high precision.

    Example::

        increases = layer_sensitivity(model, lambda: loss_of(model, batch))
    """
    refuse_single_name("layer_sensitivity", layers)
    recipes = {name: layer.fp4_recipe for name, layer in fp4_layers(model).items()}
    with use_recipe(model, "high_precision"):
        base = loss_fn().double()
        losses = {}
        for name, layer in fp4_layers(model).items():
            if layers is None or name in layers:
                high_precision, layer.fp4_recipe = layer.fp4_recipe, recipes[name]
                losses[name] = loss_fn().double()
                layer.fp4_recipe = high_precision
    if not losses:
        return {}
    increases = (torch.stack(list(losses.values())) - base).cpu().tolist()
    return dict(zip(losses, increases, strict=True))


def draw_heat_map(title: str, steps: Sequence[int], columns: Mapping[str, Sequence[Mapping[str, float]]]) -> Figure:
    """Layers by time, one panel for each operand.

    Args:
        title: name of the statistic.
        steps: one for each column.
        columns: for each operand, at each step the value by layer.

    Raises:
        ModuleNotFoundError: without ``matplotlib``.
    """
    if not _MATPLOTLIB:
        raise ModuleNotFoundError(f"`draw_heat_map` needs `matplotlib`. {_MATPLOTLIB}")
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for series in columns.values() for column in series for name in column))
    height = min(20.0, 1.4 + 0.16 * len(names))
    figure = Figure(figsize=(2.5 + 3.2 * len(columns), height), layout="constrained", dpi=100)
    for i, (operand, series) in enumerate(columns.items()):
        axes: Any = figure.add_subplot(1, len(columns), i + 1)
        grid = [[column.get(name, math.nan) for column in series] for name in names]
        image = axes.imshow(grid, aspect="auto", interpolation="nearest", cmap="viridis")
        figure.colorbar(image, ax=axes)
        axes.set_title(operand, fontsize=9)
        shown = range(0, len(steps), max(1, len(steps) // 5))
        axes.set_xticks(list(shown), [str(steps[j]) for j in shown], fontsize=7)
        axes.set_xlabel("step", fontsize=8)
        every = max(1, len(names) // 100)
        labels = list(range(0, len(names), every)) if i == 0 else []
        axes.set_yticks(labels, [names[j] for j in labels], fontsize=6)
    figure.suptitle(title, fontsize=10)
    return figure
