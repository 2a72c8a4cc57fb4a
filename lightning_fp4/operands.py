"""What goes through the FP4 layers: read their operands in one forward and backward pass and measure them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_fp4 import metrics, ops
from lightning_fp4.convert import fp4_layers
from lightning_fp4.linear import FP4Layer
from lightning_fp4.naming import clean_name, role_of
from lightning_fp4.quantizer import Quantizer
from lightning_fp4.tensor import FP4Tensor

OperandName = Literal["input", "weight", "grad_output"]
OPERANDS: tuple[OperandName, ...] = ("input", "weight", "grad_output")

#: Statistics of every operand.
TENSOR_STATISTICS = ("amax", "kurtosis", "block_kurtosis", "top_channel_ratio", "mean_share")
#: Statistics of operands that the layer's recipe quantises.
QUANTIZATION_STATISTICS = ("sqnr", "flush_to_zero", "saturation", "zero_scale_blocks")

_BLOCK_ROWS = 16  # sampled rows come in whole 16x16 blocks
_MOST_PENDING = 2**24  # elements that wait to be measured together
_SEED_KEY = 0x0F4  # a fixed key: statistics draw from no layer's random state


@dataclass(frozen=True, kw_only=True)
class OperandStatistics:
    """What was measured on one operand of one layer.

    Args:
        layer: clean name of the layer.
        operand: ``"input"``, ``"weight"`` or ``"grad_output"``.
        values: statistic by name; see :data:`TENSOR_STATISTICS` and :data:`QUANTIZATION_STATISTICS`.
        top_channels: indices of the channels with the largest mean magnitude, largest first.
    """

    layer: str
    operand: OperandName
    values: dict[str, float]
    top_channels: tuple[int, ...]


def sample_rows(x: Tensor, max_rows: int | None) -> Tensor:
    """At most ``max_rows`` rows of a matrix, in evenly spaced groups of 16 so that blocks stay whole."""
    if max_rows is None or x.shape[0] <= max_rows:
        return x
    groups = x[: x.shape[0] // _BLOCK_ROWS * _BLOCK_ROWS].reshape(-1, _BLOCK_ROWS, x.shape[1])
    wanted = max(1, max_rows // _BLOCK_ROWS)
    return groups[:: groups.shape[0] // wanted][:wanted].reshape(-1, x.shape[1])


def measure(x: Tensor, quantizer: Quantizer | None, top_k: int) -> tuple[dict[str, Tensor], Tensor]:
    """Statistics of a stack of matrices.

    Args:
        x: ``[n, rows, columns]``.
        quantizer: how the layer quantises them, ``None`` if it does not.
        top_k: number of channels to select.

    Returns:
        Statistics by name, each float32 ``[n]``; and the top channels, int64 ``[n, k]``.
    """
    magnitudes = metrics.channel_magnitudes(x)
    top = magnitudes.topk(min(top_k, x.shape[-1]), dim=-1)
    average = magnitudes.mean(-1)
    statistics = {
        "amax": x.abs().amax((-2, -1)),
        "kurtosis": metrics.excess_kurtosis(metrics.central_moments(x.flatten(1))),
        "block_kurtosis": metrics.block_kurtosis(x).nanmean(-1),
        "top_channel_ratio": top.values.mean(-1) / torch.where(average == 0, 1.0, average),
        "mean_share": metrics.mean_share(x),
    }
    if quantizer is not None:
        seed = torch.tensor([_SEED_KEY, 0], device=x.device)
        quantized = cast(list[FP4Tensor], [ops.quantize(matrix, quantizer, seed=seed) for matrix in x])
        decoded = torch.stack([ops.dequantize(q) for q in quantized])
        codes = torch.stack([q.codes for q in quantized])
        scales = torch.stack([q.scales.float() for q in quantized])
        statistics["sqnr"] = metrics.decibels(*metrics.signal_and_noise(x, decoded))
        for name, (count, total) in {
            "flush_to_zero": metrics.flushed_to_zero(x, decoded),
            "saturation": metrics.saturated(x, decoded, codes),
            "zero_scale_blocks": metrics.zero_scale_blocks(x, scales, quantizer.format),
        }.items():
            statistics[name] = count / total.clamp(min=1)
    return {name: value.float() for name, value in statistics.items()}, top.indices


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
        attention: bool = False,
    ) -> None:
        self.layers = {name: layer for name, layer in fp4_layers(model).items() if names is None or name in names}
        self.operands = frozenset(operands)
        self.max_rows = max_rows
        self.top_k = top_k
        self._scores = AttentionScores(model) if attention else None
        self._pending: dict[tuple, dict[str, Tensor]] = defaultdict(dict)
        self._measured: dict[tuple[str, OperandName], tuple[dict[str, Tensor], Tensor]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> OperandReader:
        for name, layer in self.layers.items():
            before = layer.register_forward_pre_hook(self._pre_hook(name), with_kwargs=True)
            self._stack.callback(before.remove)
            if "grad_output" in self.operands:
                self._stack.callback(layer.register_forward_hook(self._hook(name)).remove)
        if self._scores is not None:
            self._stack.enter_context(self._scores)
        self._stack.enter_context(torch.compiler.set_stance("force_eager"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def _pre_hook(self, name: str) -> Callable[..., None]:
        def read(layer: FP4Layer, args: tuple, kwargs: dict[str, Any]) -> None:
            fprop = layer.fp4_recipe.fprop
            if "input" in self.operands:
                x = args[0] if args else kwargs["input"]
                if torch.is_autocast_enabled(x.device.type):
                    x = x.to(torch.get_autocast_dtype(x.device.type))
                self._add(name, "input", x, fprop.lhs if fprop else None)
            if "weight" in self.operands:
                weight: Any = layer.weight
                matrix = weight if isinstance(layer, nn.Linear) else weight.T
                self._add(name, "weight", matrix, fprop.rhs if fprop else None)

        return read

    def _hook(self, name: str) -> Callable[..., None]:
        def watch(layer: FP4Layer, args: tuple, output: Tensor) -> None:
            if output.requires_grad:
                dgrad = layer.fp4_recipe.dgrad
                quantizer = dgrad.lhs if dgrad else None
                output.register_hook(lambda gradient: self._add(name, "grad_output", gradient, quantizer))

        return watch

    @torch.no_grad()
    def _add(self, name: str, operand: OperandName, x: Tensor, quantizer: Quantizer | None) -> None:
        x = x.to_local() if isinstance(x, DTensor) else x
        matrix = sample_rows(x.detach().reshape(-1, x.shape[-1]), self.max_rows)
        if matrix.numel() == 0:
            return
        # A copy: the optimizer, or an in-place operation, may change what a view shows before it is measured.
        matrix = matrix.clone() if matrix.data_ptr() == x.data_ptr() else matrix
        group = self._pending[operand, quantizer, matrix.shape, matrix.dtype, matrix.device]
        group[name] = matrix
        if len(group) * matrix.numel() > _MOST_PENDING:
            self._measure_pending()

    @torch.no_grad()
    def _measure_pending(self) -> None:
        for (operand, quantizer, *_), group in self._pending.items():
            statistics, channels = measure(torch.stack(list(group.values())), quantizer, self.top_k)
            for i, name in enumerate(group):
                self._measured[name, operand] = ({key: value[i] for key, value in statistics.items()}, channels[i])
        self._pending.clear()

    def collect(self) -> list[OperandStatistics]:
        """What was measured since the context was entered, in the order of the layers; one transfer to the host."""
        self._measure_pending()
        keys = [(name, operand) for name in self.layers for operand in OPERANDS if (name, operand) in self._measured]
        if not keys:
            return []
        values, channels = zip(*(self._measured.pop(key) for key in keys), strict=True)
        flat = torch.stack([value for statistics in values for value in statistics.values()]).cpu().tolist()
        indices = torch.cat(channels).cpu().tolist()
        result = []
        for (name, operand), statistics, selected in zip(keys, values, channels, strict=True):
            count, chosen = len(statistics), len(selected)
            result.append(
                OperandStatistics(
                    layer=name,
                    operand=operand,
                    values=dict(zip(statistics, flat[:count], strict=True)),
                    top_channels=tuple(indices[:chosen]),
                )
            )
            flat, indices = flat[count:], indices[chosen:]
        return result

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
        self._maxima: dict[str, Tensor] = {}
        self._stack = ExitStack()

    def __enter__(self) -> AttentionScores:
        for name, module in self.modules.items():
            enter = module.register_forward_pre_hook(lambda _m, _a, name=name: self._current.append(name))
            leave = module.register_forward_hook(lambda _m, _a, _o: self._leave(), always_call=True)
            self._stack.callback(enter.remove)
            self._stack.callback(leave.remove)
        self._stack.enter_context(_SoftmaxMode(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def _leave(self) -> None:
        self._current.pop()

    def note(self, maximum: Callable[[], Tensor]) -> None:
        """Keep a maximum if an attention module is running."""
        if self._current:
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
