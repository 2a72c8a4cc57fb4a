"""What goes through the FP4 layers: read their operands in one forward and backward pass and measure them."""

from __future__ import annotations

import itertools
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_fp4 import metrics, ops
from lightning_fp4.convert import fp4_layers
from lightning_fp4.formats import BlockFormat
from lightning_fp4.linear import FP4Layer
from lightning_fp4.naming import clean_name, role_of
from lightning_fp4.quantizer import Quantizer

OperandName = Literal["input", "weight", "grad_output"]
Key = tuple[str, OperandName]
"""A layer and one of its operands."""

OPERANDS: tuple[OperandName, ...] = ("input", "weight", "grad_output")

#: Statistics of every operand.
TENSOR_STATISTICS = ("amax", "kurtosis", "block_kurtosis", "top_channel_ratio", "mean_share")
#: Statistics of operands that the layer's recipe quantises.
QUANTIZATION_STATISTICS = ("sqnr", "flush_to_zero", "saturation", "zero_scale_blocks")

_BLOCK_ROWS = 16  # sampled rows come in whole 16x16 blocks
_MOST_PENDING = 2**24  # elements of one shape that wait to be measured together
_SEED_KEY = 0x0F4  # a fixed key: statistics draw from no layer's random state


@dataclass(frozen=True, kw_only=True)
class OperandStatistics:
    """What was measured on one operand of one layer.

    Args:
        layer: clean name of the layer.
        operand: ``"input"``, ``"weight"`` or ``"grad_output"``.
        values: statistic by name; see :data:`TENSOR_STATISTICS` and :data:`QUANTIZATION_STATISTICS`.
        top_channels: indices of the channels with the largest mean magnitude, largest first; empty if none of
            :data:`TENSOR_STATISTICS` was wanted.
    """

    layer: str
    operand: OperandName
    values: dict[str, float]
    top_channels: tuple[int, ...]


def sample_rows(x: Tensor, max_rows: int | None) -> Tensor:
    """At most ``max_rows`` rows of a matrix, and 16 at least, in evenly spaced groups of 16 so that blocks stay whole.

    Returns:
        A copy, since the optimizer or an in-place operation may change what a view shows. In float32, which holds the
        other dtypes exactly, so that all operands of one shape can be measured together.
    """
    rows = x
    if max_rows is not None and x.shape[0] > max(max_rows, _BLOCK_ROWS):
        wanted = max(1, max_rows // _BLOCK_ROWS)
        every = x.shape[0] // _BLOCK_ROWS // wanted * _BLOCK_ROWS
        row, column = x.stride()
        rows = x.as_strided((wanted, _BLOCK_ROWS, x.shape[1]), (every * row, row, column))
    copied = rows.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    return copied.view(-1, x.shape[1])


def tensor_statistics(x: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Statistics of a stack of matrices as they are.

    Args:
        x: float32 ``[n, rows, columns]``.
        top_k: number of channels to select.

    Returns:
        :data:`TENSOR_STATISTICS`, float64 ``[n, 5]``; and the top channels, int64 ``[n, k]``.
    """
    magnitudes = x.abs()
    by_channel = magnitudes.mean(-2)
    top = by_channel.topk(min(top_k, x.shape[-1]), dim=-1)
    average = by_channel.mean(-1)
    exact = x.double()
    statistics = [
        magnitudes.amax((-2, -1)),
        metrics.kurtosis(exact, (-2, -1)),
        metrics.block_kurtosis(exact).nanmean(-1),
        top.values.mean(-1) / torch.where(average == 0, 1.0, average),
        metrics.mean_share(x),
    ]
    return torch.stack(statistics, dim=-1), top.indices


def quantization_statistics(sums: Tensor, shape: tuple[int, int], formats: Sequence[BlockFormat]) -> Tensor:
    """:data:`QUANTIZATION_STATISTICS` of matrices of one shape: float64 ``[n, 4]``.

    Args:
        sums: of ``ops.quantization_sums``, ``[n, 6]``.
        shape: of the matrices.
        formats: of each of them.
    """
    signal, noise, nonzero, flushed, saturated, lost = sums.unbind(-1)
    blocks = torch.tensor([math.prod(-(-a // b) for a, b in zip(shape, f.block, strict=True)) for f in formats])
    shares = [flushed / nonzero.clamp(min=1), saturated / math.prod(shape), lost / blocks]
    return torch.stack([metrics.decibels(signal, noise), *shares], dim=-1)


@dataclass(frozen=True, kw_only=True)
class _Stack:
    """Matrices of one shape that were measured together; the results are still on their device.

    Args:
        keys: what they are; layers may share one.
        shape: of each.
        statistics: of :func:`tensor_statistics`, ``None`` if not wanted.
        channels: of :func:`tensor_statistics`, ``None`` if not wanted.
        formats: of the first matrices, those that are quantised.
        sums: of ``ops.quantization_sums`` for the same ones, ``None`` if there are none or they are not wanted.
    """

    keys: list[list[Key]]
    shape: tuple[int, int]
    statistics: Tensor | None
    channels: Tensor | None
    formats: list[BlockFormat]
    sums: Tensor | None

    def collect(self) -> dict[Key, tuple[dict[str, float], tuple[int, ...]]]:
        """Values by name and top channels of each of the matrices."""
        values: list[dict[str, float]] = [{} for _ in self.keys]
        channels: list[tuple[int, ...]] = [() for _ in self.keys]
        if self.statistics is not None and self.channels is not None:
            table = self.statistics.cpu().float().tolist()
            values = [dict(zip(TENSOR_STATISTICS, row, strict=True)) for row in table]
            channels = [tuple(selected) for selected in self.channels.tolist()]
        if self.sums is not None:
            table = quantization_statistics(self.sums.cpu(), self.shape, self.formats).float().tolist()
            for mine, row in zip(values, table, strict=False):
                mine.update(zip(QUANTIZATION_STATISTICS, row, strict=True))
        rows = zip(values, channels, strict=True)
        return {key: row for same, row in zip(self.keys, rows, strict=True) for key in same}


class OperandReader(AbstractContextManager):
    """While the context is open, every forward and backward pass through the FP4 layers is measured.

    Of several passes (accumulated batches, recomputed forwards) the last one counts. Nothing is read back from the
    device before :meth:`collect`. Compiled code runs eagerly within the context, since hooks do not reach into it.

    Args:
        model: any module with FP4 layers.
        names: layers to read, all if ``None``.
        operands: which of ``"input"``, ``"weight"`` and ``"grad_output"``.
        max_rows: rows of each operand to read, in evenly spaced groups of 16; ``None`` for all. The statistics are then
            those of the sample, its tensor scale included.
        top_k: number of top channels to select.
        statistics: which of :data:`TENSOR_STATISTICS` and :data:`QUANTIZATION_STATISTICS`, all if ``None``. Where none
            of the former is wanted, there are no top channels either.
        attention: also read the largest score before the softmax of attention, where
            ``scaled_dot_product_attention`` or ``softmax`` is called below a module that holds query or key layers.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        names: Collection[str] | None = None,
        operands: Collection[OperandName] = OPERANDS,
        max_rows: int | None = 512,
        top_k: int = 16,
        statistics: Collection[str] | None = None,
        attention: bool = False,
    ) -> None:
        self.layers = {name: layer for name, layer in fp4_layers(model).items() if names is None or name in names}
        self.operands = frozenset(operands)
        self.max_rows = max_rows
        self.top_k = top_k
        self.statistics = frozenset(
            (*TENSOR_STATISTICS, *QUANTIZATION_STATISTICS) if statistics is None else statistics
        )
        self._scores = AttentionScores(model) if attention else None
        self._pending: dict[tuple, dict[Key, tuple[Tensor, Quantizer | None]]] = defaultdict(dict)
        self._measured: list[_Stack] = []
        self._last_input: tuple[weakref.ref[Tensor], tuple, Tensor] | None = None
        self._stack = ExitStack()

    def __enter__(self) -> OperandReader:
        if self._scores is not None:  # first, so that its mode is off where layers are read
            self._stack.enter_context(self._scores)
        for name, layer in self.layers.items():
            before = layer.register_forward_pre_hook(self._pre_hook(name), with_kwargs=True)
            self._stack.callback(before.remove)
            if "grad_output" in self.operands:
                self._stack.callback(layer.register_forward_hook(self._hook(name)).remove)
        self._stack.enter_context(torch.compiler.set_stance("force_eager"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._last_input = None
        self._stack.close()

    def _pre_hook(self, name: str) -> Callable[..., None]:
        def read(layer: FP4Layer, args: tuple, kwargs: dict[str, Any]) -> None:
            fprop = layer.fp4_recipe.fprop
            if "input" in self.operands:
                self._add(
                    name,
                    "input",
                    self._copy_of_input(args[0] if args else kwargs["input"]),
                    fprop.lhs if fprop else None,
                )
            if "weight" in self.operands:
                weight: Any = layer.weight
                matrix = weight.detach() if isinstance(layer, nn.Linear) else weight.detach().T
                self._add(name, "weight", self._copy(matrix), fprop.rhs if fprop else None)

        return read

    def _hook(self, name: str) -> Callable[..., None]:
        def watch(layer: FP4Layer, args: tuple, output: Tensor) -> None:
            if output.requires_grad:
                dgrad = layer.fp4_recipe.dgrad
                quantizer = dgrad.lhs if dgrad else None
                output.register_hook(
                    lambda gradient: self._add(name, "grad_output", self._copy(gradient.detach()), quantizer)
                )

        return watch

    def _copy_of_input(self, x: Tensor) -> Tensor:
        """The same one for layers that are given the same tensor one after the other, as q/k/v and gate/up are."""
        device_type = x.device.type
        dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype
        state = (dtype, None if x.is_inference() else x._version)
        if self._last_input is not None and None not in state:
            source, known_state, copied = self._last_input
            if source() is x and known_state == state:
                return copied
        copied = self._copy(x.detach().to(dtype))
        self._last_input = (weakref.ref(x), state, copied)
        return copied

    def _copy(self, x: Tensor) -> Tensor:
        x = x.to_local() if isinstance(x, DTensor) else x
        return sample_rows(x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, 0), self.max_rows)

    def _add(self, name: str, operand: OperandName, matrix: Tensor, quantizer: Quantizer | None) -> None:
        if matrix.numel() == 0:
            return
        group = self._pending[matrix.shape, matrix.device]
        group[name, operand] = (matrix, quantizer)
        if len(group) * matrix.numel() > _MOST_PENDING:
            self._measure_pending()

    @torch.no_grad()
    def _measure_pending(self) -> None:
        for group in self._pending.values():
            rows: dict[tuple[bool, int, int], list[Key]] = defaultdict(list)
            for key, (matrix, quantizer) in group.items():
                rows[quantizer is None, id(quantizer), id(matrix)].append(key)
            keys = [rows[row] for row in sorted(rows)]  # by quantiser, those without one last
            members = [group[same[0]] for same in keys]
            x = torch.stack([matrix for matrix, _ in members])
            self._measured.append(self._measure(x, keys, [q for _, q in members if q is not None]))
        self._pending.clear()

    def _measure(self, x: Tensor, keys: list[list[Key]], quantizers: list[Quantizer]) -> _Stack:
        """Measure a stack of matrices; ``quantizers`` are those of the first ones, the rest have none."""
        statistics = channels = sums = None
        if not self.statistics.isdisjoint(TENSOR_STATISTICS):
            statistics, channels = tensor_statistics(x, self.top_k)
        if quantizers and not self.statistics.isdisjoint(QUANTIZATION_STATISTICS):
            seed = torch.tensor([_SEED_KEY, 0], device=x.device)
            runs = [(quantizer, len(list(run))) for quantizer, run in itertools.groupby(quantizers)]
            parts = x[: len(quantizers)].split([length for _, length in runs])
            found = [ops.quantization_sums(part, q, seed=seed) for part, (q, _) in zip(parts, runs, strict=True)]
            sums = torch.cat(found)
        return _Stack(
            keys=keys,
            shape=(x.shape[1], x.shape[2]),
            statistics=statistics,
            channels=channels,
            formats=[quantizer.format for quantizer in quantizers],
            sums=sums,
        )

    def collect(self) -> list[OperandStatistics]:
        """What was measured since the context was entered, in the order of the layers."""
        self._measure_pending()
        found: dict[Key, tuple[dict[str, float], tuple[int, ...]]] = {}
        for stack in self._measured:
            found.update(stack.collect())
        self._measured.clear()
        return [
            OperandStatistics(
                layer=name,
                operand=operand,
                values={key: value for key, value in found[name, operand][0].items() if key in self.statistics},
                top_channels=found[name, operand][1],
            )
            for name in self.layers
            for operand in OPERANDS
            if (name, operand) in found
        ]

    def attention_maxima(self) -> dict[str, float]:
        """The largest score before the softmax by attention module; empty where none could be read."""
        return {} if self._scores is None else self._scores.collect()


class AttentionScores(AbstractContextManager):
    """While the context is open, the largest score before each attention module's softmax is kept.

    Args:
        model: any module; those with a child that computes queries, keys or both count as attention.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules: dict[str, nn.Module] = {}
        by_name = {clean_name(name): module for name, module in model.named_modules()}
        for name, module in by_name.items():
            if role_of(name).is_attention and hasattr(module, "weight"):
                parent = name.rpartition(".")[0]
                self.modules[parent] = by_name.get(parent, model)
        self._current: list[str] = []
        self._mode = _SoftmaxMode(self)
        self._is_on = False
        self._maxima: dict[str, Tensor] = {}
        self._stack = ExitStack()

    def __enter__(self) -> AttentionScores:
        for name, module in self.modules.items():
            enter = module.register_forward_pre_hook(lambda _m, _a, name=name: self._enter(name))
            leave = module.register_forward_hook(lambda _m, _a, _o: self._leave(), always_call=True)
            self._stack.callback(enter.remove)
            self._stack.callback(leave.remove)
        for layer in {layer for module in self.modules.values() for layer in fp4_layers(module).values()}:
            before = layer.register_forward_pre_hook(lambda _m, _a: self._pause())
            after = layer.register_forward_hook(lambda _m, _a, _o: self._resume(), always_call=True)
            self._stack.callback(before.remove)
            self._stack.callback(after.remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()
        self._current.clear()
        self._switch(False)  # if interrupted where hooks are not called

    # A mode slows down all that it sees, and operators take a detour while there is one. So it is on within attention
    # only, and not within FP4 layers.

    def _switch(self, on: bool) -> None:
        if on and not self._is_on:
            self._mode.__enter__()
        elif self._is_on and not on:
            self._mode.__exit__(None, None, None)
        self._is_on = on

    def _enter(self, name: str) -> None:
        self._current.append(name)
        self._switch(True)

    def _leave(self) -> None:
        self._current.pop()
        self._switch(bool(self._current))

    def _pause(self) -> None:
        if torch.overrides._get_current_function_mode() is self._mode:  # else the model has a mode of its own on top
            self._switch(False)

    def _resume(self) -> None:
        self._switch(bool(self._current))

    def note(self, maximum: Callable[[], Tensor]) -> None:
        """Keep a maximum of the attention module that is running."""
        with torch.no_grad():
            self._maxima[self._current[-1]] = maximum().detach().float()

    def collect(self) -> dict[str, float]:
        """Maxima by attention module, in one transfer; forgets them."""
        values = torch.stack(list(self._maxima.values())).cpu().tolist() if self._maxima else []
        collected = dict(zip(self._maxima, values, strict=True))
        self._maxima.clear()
        return collected


class _SoftmaxMode(TorchFunctionMode):
    """Sees the calls of ``scaled_dot_product_attention`` and of ``softmax``."""

    _SOFTMAX = (torch.softmax, torch.nn.functional.softmax, torch.Tensor.softmax)

    def __init__(self, scores: AttentionScores) -> None:
        super().__init__()
        self.scores = scores

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            query, key = (args[i] if len(args) > i else kwargs[name] for i, name in enumerate(("query", "key")))
            is_causal = args[5] if len(args) > 5 else kwargs.get("is_causal", False)
            self.scores.note(
                lambda: metrics.pre_softmax_max(query, key, scale=kwargs.get("scale"), is_causal=is_causal)
            )
        elif func in self._SOFTMAX:
            scores = args[0] if args else kwargs["input"]
            if scores.dim() >= 3:
                self.scores.note(scores.amax)
        return func(*args, **kwargs)
