"""PrecisionMonitor: log what four bits do to each FP4 layer while a Trainer fits."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning_utilities.core.imports import RequirementCache
from torch import Tensor
from typing_extensions import override

from lightning_fp4._lightning_compat import accumulates, logger_prefix, logger_step
from lightning_fp4.callbacks.event_file import write_to_tensorboard
from lightning_fp4.callbacks.logs import set_callback_metrics
from lightning_fp4.monitoring import PrecisionReport, draw_heat_map, layer_sensitivity, refuse_single_name
from lightning_fp4.operands import (
    OPERANDS,
    QUANTIZATION_STATISTICS,
    TENSOR_STATISTICS,
    OperandName,
    OperandReader,
    OperandStatistics,
)

#: How much of two selections of top channels is the same; low means that the hot channels drift.
OVERLAP = "channel_overlap"
STATISTICS = (*TENSOR_STATISTICS, *QUANTIZATION_STATISTICS, OVERLAP)

_MATPLOTLIB = RequirementCache("matplotlib")
_TENSORBOARD = RequirementCache("tensorboard")  # without it, `TensorBoardLogger` writes with `tensorboardX`
_MOST_COLUMNS = 64  # of a heat map; beyond, every second one is dropped

Key = tuple[str, OperandName]
Table = dict[str, dict[str, dict[str, float]]]
"""Values by statistic, operand and layer."""


def channel_overlaps(measured: list[OperandStatistics], before: dict[Key, tuple[int, ...]]) -> dict[Key, float]:
    """For each operand that was measured before, the share of its top channels that were top channels then."""
    return {
        (s.layer, s.operand): len(set(s.top_channels) & set(before[s.layer, s.operand])) / len(s.top_channels)
        for s in measured
        if before.get((s.layer, s.operand)) and s.top_channels
    }


class PrecisionMonitor(Callback):
    """Log, for every FP4 layer and operand, how well it fits into four bits.

    ``amax``, ``kurtosis`` and ``block_kurtosis`` (excess, of the tensor and of its 16x16 blocks), ``top_channel_ratio``
    (mean magnitude of the top channels over that of all), ``mean_share`` (energy in the channels' means),
    ``channel_overlap`` (with the top channels of the log before), and of what the recipe quantises ``sqnr`` in
    decibels, ``flush_to_zero``, ``saturation`` and ``zero_scale_blocks`` as shares. For attention, ``attention_max``:
    the largest score before the softmax. ``lightning_fp4.metrics`` defines each.

    Keys are ``PrecisionMonitor/STATISTIC/LAYER.OPERAND``; the mean over all layers,
    ``PrecisionMonitor/STATISTIC/OPERAND``, is a callback metric too, for ``EarlyStopping`` and ``ModelCheckpoint``.
    TensorBoard (not ``tensorboardX``) also gets histograms over the layers and, with ``matplotlib``, heat maps of
    layers by time. Steps that do not log cost nothing.

    Each rank measures its own share of the data; rank 0's is logged, and all ranks have its callback metrics.

    Args:
        every_n_steps: batches with an optimizer step between logs, the Trainer's ``log_every_n_steps`` if ``None``.
        statistics: which to log, all if ``None``.
        operands: which of ``"input"``, ``"weight"`` and ``"grad_output"`` to read.
        layers: clean names of the layers to read, all FP4 layers if ``None``.
        per_layer: log each layer's values; if false only the means, for models with thousands of layers.
        max_rows: rows to read of each operand, ``None`` for all.
        top_k: number of top channels.
        attention: whether to look for ``attention_max``.
        heat_maps: statistics to draw, on TensorBoard.
        heat_map_every_n_logs: logs between drawings, each of which takes seconds; ``None`` to draw only when fitting
            ends.
        log_key_prefix: put before every key.

    Raises:
        ValueError: for an unknown statistic or operand, or a number below 1.
        MisconfigurationException: if the Trainer has no logger.

    Example::

        monitor = PrecisionMonitor(every_n_steps=50)
        trainer = Trainer(plugins=[FP4Precision("nvfp4")], callbacks=[monitor])
        trainer.fit(model)
        print(monitor.summary())
    """

    #: A rollback leaves the history of what was seen as it is.
    survives_rollback = True

    def __init__(
        self,
        every_n_steps: int | None = None,
        *,
        statistics: Collection[str] | None = None,
        operands: Collection[OperandName] = OPERANDS,
        layers: Collection[str] | None = None,
        per_layer: bool = True,
        max_rows: int | None = 512,
        top_k: int = 16,
        attention: bool = True,
        heat_maps: Collection[str] = ("sqnr", "flush_to_zero"),
        heat_map_every_n_logs: int | None = None,
        log_key_prefix: str = "",
    ) -> None:
        for given, known, argument in (
            (statistics or (), STATISTICS, "statistics"),
            (heat_maps, STATISTICS, "heat_maps"),
            (operands, OPERANDS, "operands"),
        ):
            unknown = [given] if isinstance(given, str) else [name for name in given if name not in known]
            if unknown:
                raise ValueError(
                    f"`PrecisionMonitor({argument}={given!r})`: {unknown[0]!r} is unknown. Give a collection of: "
                    f"{', '.join(map(repr, known))}."
                )
        counts = {"every_n_steps": every_n_steps, "heat_map_every_n_logs": heat_map_every_n_logs, "max_rows": max_rows}
        for name, count in counts.items():
            if count is not None and count < 1:
                raise ValueError(f"`PrecisionMonitor({name}={count})` must be 1 or more, or None.")
        if top_k < 1:
            raise ValueError(f"`PrecisionMonitor(top_k={top_k})` must be 1 or more.")
        refuse_single_name("PrecisionMonitor", layers)
        self.every_n_steps = every_n_steps
        self.statistics = tuple(STATISTICS if statistics is None else statistics)
        self.operands = tuple(operands)
        self.layers = None if layers is None else tuple(layers)
        self.per_layer = per_layer
        self.max_rows = max_rows
        self.top_k = top_k
        self.attention = attention
        self.heat_maps = tuple(heat_maps)
        self.heat_map_every_n_logs = heat_map_every_n_logs
        self.log_key_prefix = log_key_prefix
        #: What the last log measured.
        self.report = PrecisionReport()
        #: Steps of the logs, and for each the values that heat maps show, by statistic, operand and layer.
        self.steps: list[int] = []
        self.history: list[dict[str, dict[str, dict[str, float]]]] = []
        self._top_channels: dict[Key, tuple[int, ...]] = {}
        self._logs = 0
        self._prepared: OperandReader | None = None
        self._reader: OperandReader | None = None  # the same while it reads

    # ------------------------------------------------------------------------------------------------------------------
    # Set-up
    # ------------------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Ask for a logger, as Lightning's own monitors do."""
        silent = trainer.fast_dev_run or trainer.barebones  # type: ignore[attr-defined]
        if stage == "fit" and not trainer.loggers and not silent:
            raise MisconfigurationException(
                "Cannot use `PrecisionMonitor` callback with `Trainer(logger=False)`. Give the Trainer a logger, or "
                "use `lightning_fp4.monitor_precision(model)`."
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look for layers to read."""
        reader = OperandReader(
            pl_module,
            names=self.layers,
            operands=self.operands,
            max_rows=self.max_rows,
            top_k=self.top_k,
            attention=self.attention,
        )
        self._prepared = reader if reader.layers else None
        if self._prepared is None:
            rank_zero_warn(
                "`PrecisionMonitor` found no FP4 layers to read and logs nothing. Use it with `FP4Precision` or "
                "`convert_to_fp4`" + ("." if self.layers is None else f", and check `layers={list(self.layers)}`.")
            )

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw the whole history once more."""
        self._close()
        self._prepared = None
        if self._logs:
            self._draw(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Take the hooks off."""
        self._close()
        self._prepared = None

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.__exit__(None, None, None)
            self._reader = None

    # ------------------------------------------------------------------------------------------------------------------
    # Reading and logging
    # ------------------------------------------------------------------------------------------------------------------

    def should_log(self, trainer: pl.Trainer) -> bool:
        """Whether the batch that begins is one to read; override it to choose others, the same on all ranks."""
        if accumulates(trainer):
            return False
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return True
        every = trainer.log_every_n_steps if self.every_n_steps is None else self.every_n_steps  # type: ignore[attr-defined]
        return bool(every) and (logger_step(trainer) + 1) % every == 0

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Put hooks on the layers, on a batch that logs."""
        self._close()  # of a batch that the module chose to skip
        if self._prepared is not None and self.should_log(trainer):
            self._reader = self._prepared.__enter__()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take them off, and log what they saw."""
        if self._reader is None:
            return
        reader = self._reader
        self._close()
        measured = reader.collect()
        self.report = PrecisionReport(statistics=measured, attention_maxima=reader.attention_maxima())
        overlaps = channel_overlaps(measured, self._top_channels)
        self._top_channels = {(s.layer, s.operand): s.top_channels for s in measured}
        for s in measured:
            if (s.layer, s.operand) in overlaps:
                s.values[OVERLAP] = overlaps[s.layer, s.operand]
        self._log(trainer, logger_step(trainer))

    def _log(self, trainer: pl.Trainer, step: int) -> None:
        table: Table = defaultdict(lambda: defaultdict(dict))
        for s in self.report.statistics:
            for name, value in s.values.items():
                # The kurtosis of a constant tensor, and the like, is no number to plot.
                if name in self.statistics and not math.isnan(value):
                    table[name][s.operand][s.layer] = value
        means = {
            (name, operand): sum(layers.values()) / len(layers)  # `fmean` refuses infinities of both signs
            for name, by_operand in table.items()
            for operand, layers in by_operand.items()
        }
        start = self._start("/")
        # Those of rank 0, or schedulers and early stopping would go apart.
        shown = trainer.strategy.broadcast(means)
        # Before TensorBoard gets its values: from then on, operators wait for its thread to let go of the interpreter.
        set_callback_metrics(trainer, {start(name) + operand: mean for (name, operand), mean in shown.items()})
        for logger in trainer.loggers:
            start = self._start(logger.group_separator)
            values = {start(name) + operand: mean for (name, operand), mean in means.items()}
            values |= {start("attention_max") + name: value for name, value in self.report.attention_maxima.items()}
            if self.per_layer:
                for name, by_operand in table.items():
                    head = start(name)
                    for operand, layers in by_operand.items():
                        values |= {f"{head}{layer}.{operand}": value for layer, value in layers.items()}
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero and _TENSORBOARD:
                histograms = {
                    start("layers", name) + operand: list(layers.values())
                    for name, by_operand in table.items()
                    for operand, layers in by_operand.items()
                }
                write_to_tensorboard(logger.experiment, values, histograms, step, prefix=logger_prefix(logger))
            else:
                logger.log_metrics(values, step=step)
        self._remember(step, table)
        self._logs += 1
        if self.heat_map_every_n_logs is not None and self._logs % self.heat_map_every_n_logs == 0:
            self._draw(trainer)

    def _start(self, separator: str) -> Callable[..., str]:
        """A function from the first parts of a key to how the key begins."""
        return lambda *parts: (
            self.log_key_prefix + "".join(f"{part}{separator}" for part in ("PrecisionMonitor", *parts))
        )

    def _remember(self, step: int, table: Table) -> None:
        self.steps.append(step)
        self.history.append({name: {k: dict(v) for k, v in table[name].items()} for name in self.heat_maps})
        if len(self.steps) > _MOST_COLUMNS:
            self.steps, self.history = self.steps[::2], self.history[::2]

    def _draw(self, trainer: pl.Trainer) -> None:
        loggers = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        if not loggers or not trainer.is_global_zero or not _MATPLOTLIB:
            return
        for name in self.heat_maps:
            columns: dict[str, list[dict[str, float]]] = {
                operand: [values[name].get(operand, {}) for values in self.history]
                for operand in self.operands
                if any(values[name].get(operand) for values in self.history)
            }
            if columns:
                for logger in loggers:
                    figure = draw_heat_map(name, self.steps, columns)
                    tag = logger_prefix(logger) + self._start("/")("heat_map") + name
                    logger.experiment.add_figure(tag, figure, self.steps[-1])

    # ------------------------------------------------------------------------------------------------------------------
    # Summary and state
    # ------------------------------------------------------------------------------------------------------------------

    def summary(
        self, model: torch.nn.Module | None = None, loss_fn: Callable[[], Tensor] | None = None
    ) -> PrecisionReport:
        """The last log as a report: ``print`` it, ``rich.print(report.table())``, or ask it which layers to keep.

        Args:
            model: with ``loss_fn``, measure the effect of quantising each layer alone on the loss.
            loss_fn: computes the loss on the same data at each call.

        Example::

            keep = monitor.summary(model, lambda: model.loss(batch)).keep_in_high_precision()
            FP4Precision("nvfp4", ignore_modules=keep)
        """
        if (model is None) != (loss_fn is None):
            raise ValueError("`PrecisionMonitor.summary(model, loss_fn)` needs both or neither.")
        if model is not None and loss_fn is not None:
            self.report.loss_increases = layer_sensitivity(model, loss_fn, layers=self.layers)
        return self.report

    @override
    def state_dict(self) -> dict[str, Any]:
        """The history that heat maps show and the last top channels, as plain data."""
        channels = [[*key, list(selected)] for key, selected in self._top_channels.items()]
        return {"logs": self._logs, "steps": self.steps, "history": self.history, "top_channels": channels}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        self._logs, self.steps, self.history = state_dict["logs"], state_dict["steps"], state_dict["history"]
        self._top_channels = {
            (layer, operand): tuple(channels) for layer, operand, channels in state_dict["top_channels"]
        }
