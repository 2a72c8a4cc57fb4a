"""What goes through the FP4 layers: read their operands in one forward and backward pass and measure them."""

from __future__ import annotations

import itertools
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
from torch.utils.hooks import RemovableHandle

from lightning_fp4 import dispatch, metrics, ops
from lightning_fp4.convert import fp4_layers
from lightning_fp4.formats import BlockFormat
from lightning_fp4.linear import FP4Layer
from lightning_fp4.naming import clean_name, role_of
from lightning_fp4.quantizer import Quantizer, Rounding

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
    """At most ``max_rows`` rows of ``x``, and 16 at least, in evenly spaced groups of 16 so that blocks stay whole.

    Args:
        x: ``[..., columns]``, not empty.
        max_rows: of the rows of the matrix ``[rows, columns]`` that it is; ``None`` for all.

    Returns:
        A copy ``[rows, columns]``, since the optimizer or an in-place operation may change what a view shows. In
        float32, which holds the other dtypes exactly, so that all operands of one shape can be measured together.
    """
    columns = x.shape[-1]
    count = x.numel() // columns
    if max_rows is None or count <= max(max_rows, _BLOCK_ROWS):
        copied = x.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        return copied if x.dim() == 2 else copied.view(count, columns)
    if x.dim() != 2 and not x.is_contiguous():
        x = x.reshape(count, columns)
    wanted = max(1, max_rows // _BLOCK_ROWS)
    every = count // _BLOCK_ROWS // wanted * _BLOCK_ROWS
    row, column = x.stride() if x.dim() == 2 else (columns, 1)
    rows = x.as_strided((wanted, _BLOCK_ROWS, columns), (every * row, row, column))
    return rows.to(torch.float32, memory_format=torch.contiguous_format, copy=True).view(-1, columns)


def tensor_statistics(sums: Tensor, shapes: Sequence[tuple[int, int]], top_k: int) -> Tensor:
    """:data:`TENSOR_STATISTICS` of matrices: float64 ``[n, 5]``.

    Args:
        sums: of ``ops.tensor_sums``, ``[n, 9]``, on the CPU.
        shapes: of the matrices.
        top_k: number of channels that were to be selected.
    """
    amax, top, total, mean, squares, fourths, squared_means, quotients, blocks = sums.unbind(-1)
    rows, columns = torch.tensor(shapes, dtype=torch.float64).unbind(-1)
    count = rows * columns
    energy = squares + count * mean.square()
    statistics = [
        amax,
        metrics.excess_kurtosis(torch.stack([count, mean, squares, torch.zeros_like(mean), fourths], dim=-1)),
        _BLOCK_ROWS**2 * quotients / blocks - 3,
        top / columns.clamp(max=top_k) / torch.where(total == 0, 1.0, total / columns),
        rows * squared_means / torch.where(energy == 0, 1.0, energy),
    ]
    return torch.stack(statistics, dim=-1)


def quantization_statistics(sums: Tensor, shapes: Sequence[tuple[int, int]], formats: Sequence[BlockFormat]) -> Tensor:
    """:data:`QUANTIZATION_STATISTICS` of matrices: float64 ``[n, 4]``.

    Args:
        sums: of ``ops.quantization_sums``, ``[n, 6]``, on the CPU.
        shapes: of the matrices.
        formats: of each of them.
    """
    signal, noise, nonzero, flushed, saturated, lost = sums.unbind(-1)
    counts = [
        (rows * columns, -(-rows // f.block[0]) * -(-columns // f.block[1]))
        for (rows, columns), f in zip(shapes, formats, strict=True)
    ]
    values, blocks = torch.tensor(counts).unbind(-1)
    shares = [flushed / nonzero.clamp(min=1), saturated / values, lost / blocks]
    return torch.stack([metrics.decibels(signal, noise), *shares], dim=-1)


def read_back(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same in float64 on the CPU, in one transfer from each device."""
    found: dict[int, Tensor] = {}
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        chosen = {i: tensor for i, tensor in enumerate(tensors) if tensor.device == device}
        together = torch.cat([tensor.flatten().double() for tensor in chosen.values()]).cpu()
        parts = together.split([tensor.numel() for tensor in chosen.values()])
        found |= {i: part.view(tensor.shape) for (i, tensor), part in zip(chosen.items(), parts, strict=True)}
    return [found[i] for i in range(len(tensors))]


@dataclass(frozen=True, kw_only=True)
class _Matrix:
    """One matrix that was measured.

    Args:
        keys: what it is; layers may share one.
        shape: of it.
        format: that it was quantised to, ``None`` if it was not.
    """

    keys: list[Key]
    shape: tuple[int, int]
    format: BlockFormat | None


class _Measured:
    """What was measured, in the order of ``matrices``; the results are still on their devices."""

    def __init__(self) -> None:
        self.matrices: list[_Matrix] = []
        self.sums: list[Tensor] = []
        self.channels: list[Tensor] = []
        self.quantization: list[Tensor] = []

    def collect(self, top_k: int) -> dict[Key, tuple[dict[str, float], tuple[int, ...]]]:
        """Values by name and top channels of each operand."""
        values: list[dict[str, float]] = [{} for _ in self.matrices]
        channels: list[tuple[int, ...]] = [() for _ in self.matrices]
        read = read_back([*self.sums, *self.channels, *self.quantization])
        stacks = len(self.sums)
        if stacks:
            shapes = [matrix.shape for matrix in self.matrices]
            table = tensor_statistics(torch.cat(read[:stacks]), shapes, top_k).float().tolist()
            values = [dict(zip(TENSOR_STATISTICS, row, strict=True)) for row in table]
            selected = [part.long().tolist() for part in read[stacks : 2 * stacks]]
            channels = [tuple(row) for part in selected for row in part]
        if self.quantization:
            chosen = [(i, m.shape, m.format) for i, m in enumerate(self.matrices) if m.format is not None]
            indices, shapes, formats = map(list, zip(*chosen, strict=True))
            sums = torch.cat(read[2 * stacks :])
            table = quantization_statistics(sums, shapes, formats).float().tolist()
            for i, row in zip(indices, table, strict=True):
                values[i].update(zip(QUANTIZATION_STATISTICS, row, strict=True))
        rows = zip(self.matrices, values, channels, strict=True)
        return {key: (mine, selected) for matrix, mine, selected in rows for key in matrix.keys}


class _Eager(AbstractContextManager):
    """Compiled code runs eagerly while this is open once or more: it may close in any order, PyTorch's own may not."""

    def __init__(self) -> None:
        self._count = 0
        self._stance: Any = None

    def __enter__(self) -> None:
        if not self._count:
            self._stance = torch.compiler.set_stance("force_eager")  # from here on
        self._count += 1

    def __exit__(self, *error: object) -> None:
        self._count -= 1
        if not self._count:
            self._stance.__exit__(None, None, None)


_EAGER = _Eager()  # one for all readers, as PyTorch has one stance


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
            ``scaled_dot_product_attention`` or ``softmax`` is called below a module that holds query or key layers, but
            not of nested tensors.
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
        self._measured = _Measured()
        self._seeds: dict[torch.device, Tensor] = {}
        self._last_input: tuple[weakref.ref[Tensor], tuple, Tensor] | None = None
        self._handles: list[RemovableHandle] = []
        self._stack = ExitStack()

    def __enter__(self) -> OperandReader:
        self._pending.clear()
        self._measured = _Measured()
        if self._scores is not None:  # first, so that its mode is off where layers are read
            self._stack.enter_context(self._scores)
        for name, layer in self.layers.items():
            self._handles.append(layer.register_forward_pre_hook(self._pre_hook(name), with_kwargs=True))
            if "grad_output" in self.operands:
                self._handles.append(layer.register_forward_hook(self._hook(name)))
        self._stack.enter_context(_EAGER)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._last_input = None
        self._stack.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

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
                output.register_hook(lambda gradient: self._add(name, "grad_output", self._copy(gradient), quantizer))

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
        source_of = x.detach()
        copied = self._copy(source_of if dtype is x.dtype else source_of.to(dtype))
        self._last_input = (weakref.ref(x), state, copied)
        return copied

    def _copy(self, x: Tensor) -> Tensor:
        x = x.to_local() if isinstance(x, DTensor) else x
        return sample_rows(x, self.max_rows) if x.numel() else x.new_empty(0, 0)

    def _add(self, name: str, operand: OperandName, matrix: Tensor, quantizer: Quantizer | None) -> None:
        if matrix.numel() == 0:
            return
        for waiting in self._pending.values():
            waiting.pop((name, operand), None)  # an earlier pass, maybe of another shape
        group = self._pending[matrix.shape, matrix.device]
        group[name, operand] = (matrix, quantizer)
        if len(group) * matrix.numel() > _MOST_PENDING:
            self._measure_pending()

    @torch.no_grad()
    def _measure_pending(self) -> None:
        for group in filter(None, self._pending.values()):
            rows: dict[tuple[bool, int, int], list[Key]] = defaultdict(list)
            order: dict[Quantizer | None, int] = {}  # equal ones get one place
            for key, (matrix, quantizer) in group.items():
                rows[quantizer is None, order.setdefault(quantizer, len(order)), id(matrix)].append(key)
            keys = [rows[row] for row in sorted(rows)]  # by quantiser, those without one last
            members = [group[same[0]] for same in keys]
            x = torch.stack([matrix for matrix, _ in members])
            self._measure(x, [q for _, q in members if q is not None])
            for same, (_, quantizer) in zip(keys, members, strict=True):
                block_format = None if quantizer is None else quantizer.format
                self._measured.matrices.append(_Matrix(keys=same, shape=(x.shape[1], x.shape[2]), format=block_format))
        self._pending.clear()

    def _measure(self, x: Tensor, quantizers: list[Quantizer]) -> None:
        """Measure a stack of matrices; ``quantizers`` are those of the first ones, the rest have none."""
        if not self.statistics.isdisjoint(TENSOR_STATISTICS):
            sums, channels = ops.tensor_sums(x, self.top_k)
            self._measured.sums.append(sums)
            self._measured.channels.append(channels)
        if quantizers and not self.statistics.isdisjoint(QUANTIZATION_STATISTICS):
            runs = [(quantizer, len(list(run))) for quantizer, run in itertools.groupby(quantizers)]
            parts = x.split([*(length for _, length in runs), len(x) - len(quantizers)])
            for part, (quantizer, _) in zip(parts, runs, strict=False):
                seed = self._seed(x.device) if quantizer.rounding is Rounding.STOCHASTIC else None
                self._measured.quantization.append(ops.quantization_sums(part, quantizer, seed=seed))

    def _seed(self, device: torch.device) -> Tensor:
        if device not in self._seeds:
            self._seeds[device] = torch.tensor([_SEED_KEY, 0], device=device)
        return self._seeds[device]

    def collect(self) -> list[OperandStatistics]:
        """What was measured since the context was entered, in the order of the layers."""
        self._measure_pending()
        found = self._measured.collect(self.top_k)
        self._measured = _Measured()
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
        self._layers = {layer for module in self.modules.values() for layer in fp4_layers(module).values()}
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> AttentionScores:
        self._maxima.clear()
        for name, module in self.modules.items():
            enter = module.register_forward_pre_hook(lambda _m, _a, name=name: self._enter(name))
            self._handles += [enter, module.register_forward_hook(lambda *_: self._leave(), always_call=True)]
        for layer in self._layers:
            before = layer.register_forward_pre_hook(lambda *_: self._pause())
            self._handles += [before, layer.register_forward_hook(lambda *_: self._resume(), always_call=True)]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
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


def _has_values(*tensors: Tensor) -> bool:
    """Whether these have a maximum that may be kept: none is empty or nested, and no function transform runs."""
    return not any(x.is_nested or x.numel() == 0 for x in tensors) and dispatch.is_lasting(*tensors)


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
            if _has_values(query, key):
                scale = kwargs.get("scale")
                self.scores.note(lambda: ops.pre_softmax_max(query, key, scale=scale, is_causal=is_causal))
        elif func in self._SOFTMAX:
            scores = args[0] if args else kwargs["input"]
            if scores.dim() >= 3 and _has_values(scores):
                self.scores.note(scores.amax)
        return func(*args, **kwargs)
