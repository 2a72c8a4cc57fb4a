"""A linear layer whose three GEMMs run in four bits: the autograd function and the module around it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from lightning_fp4 import dispatch, matmul, ops, sharing
from lightning_fp4.matmul import Operand, Side
from lightning_fp4.recipes.base import Gemm, HotChannels, Recipe
from lightning_fp4.sharing import SharedForms, WeightForms
from lightning_fp4.tensor import FP4Operand, FP4Tensor, Patch, Units

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_PLANS = 1024  # remembered at once; a run needs a handful

# The random streams of a layer, one for each operand of each GEMM.
_FPROP_INPUT, _FPROP_WEIGHT, _DGRAD_OUTPUT, _DGRAD_WEIGHT, _WGRAD_OUTPUT, _WGRAD_INPUT = range(6)


def new_rng_state(seed: int, rank: int, name: str) -> Tensor:
    """The random state of one layer: int64 ``[key, step]``, distinct for every seed, rank and layer name."""
    digest = hashlib.blake2b(f"{seed}/{rank}/{name}".encode(), digest_size=8).digest()
    with torch.inference_mode(False):
        return torch.tensor([int.from_bytes(digest, "little") >> 1, 0], device="cpu")


def fp4_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    rng_state: Tensor,
    hot_channels: Tensor | None = None,
    weight_forms: SharedForms | None = None,
) -> Tensor:
    """``input @ weight.T + bias`` with the GEMMs of forward and backward as ``recipe`` says.

    Dtypes follow ``torch.nn.functional.linear``, autocast included; the weight is quantised from its own dtype.

    Args:
        input: ``[..., in_features]``, float32, bfloat16 or float16.
        weight: ``[out_features, in_features]``.
        bias: ``[out_features]`` or ``None``.
        recipe: how.
        rng_state: int64 ``[2]`` on the input's device, from :func:`new_rng_state`; advances once per backward, so a
            forward recomputed by activation checkpointing leads to the same bits.
        hot_channels: int64 ``[k]`` on the input's device, the channels that ``recipe.fprop.hot_channels`` patches.
        weight_forms: where to take the quantised weight from, and to keep it; see ``WeightForms``.

    Returns:
        ``[..., out_features]``.

    Raises:
        TypeError: for dtypes that ``torch.nn.functional.linear`` refuses too, and for float64.
        ValueError: if the last axis of ``input`` is not ``in_features`` long.
        NotImplementedError: for a weight that is sharded within its GEMMs (tensor parallelism).
    """
    flat = _rows_of(input, weight)
    arguments = (flat, weight, bias, recipe, rng_state, hot_channels, sharing.forms_of(input, rng_state), weight_forms)
    # Forward-mode differentiation takes no heed of `no_grad`; the function refuses it.
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        out = _FP4Linear.apply(*arguments)
    else:
        out, _ = _forward(*arguments, grad_input=False, grad_weight=False)
    # Not a view, as the output of nn.Linear is none: in-place operations on views lose FSDP2's backward hooks.
    return torch.ops.aten._unsafe_view.default(out, (*input.shape[:-1], weight.shape[0]))


def _rows_of(input: Tensor, weight: Tensor) -> Tensor:
    """The input as a matrix ``[tokens, in_features]`` in the dtype that ``torch.nn.functional.linear`` computes in."""
    device_type = input.device.type
    dtype = input.dtype
    # The meta device has no autocast to ask for (and `is_autocast_available` cannot be traced by torch 2.11).
    autocast = device_type != "meta" and torch.is_autocast_enabled(device_type)
    if autocast and dtype in _DTYPES:
        dtype = torch.get_autocast_dtype(device_type)
    elif dtype != weight.dtype:
        raise TypeError(
            f"FP4Linear got a {dtype} input for a {weight.dtype} weight. Give both the same dtype or use autocast "
            "(precision='bf16-mixed')."
        )
    if dtype not in _DTYPES:
        raise TypeError(
            f"FP4Linear computes from float32, bfloat16 or float16, got {dtype}. Cast the input and the model."
        )
    if isinstance(weight, DTensor):  # FSDP2's are whole tensors by now
        raise NotImplementedError(
            "FP4Linear got a weight that is sharded within its GEMMs (tensor parallelism), which is not supported. "
            "Keep such layers in high precision with `ignore_modules`, or shard with FSDP2."
        )
    if input.shape[-1:] != weight.shape[1:]:
        raise ValueError(f"FP4Linear has in_features={weight.shape[1]}, got an input of shape {tuple(input.shape)}.")
    return input.reshape(math.prod(input.shape[:-1]), input.shape[-1]).to(dtype)


Plan = TypeVar("Plan")


def _for_each_recipe(make: Callable[..., Plan]) -> Callable[..., Plan]:
    """Remember what ``make`` returns for a recipe and a few more arguments.

    The recipe is told by identity: hashing all of its fields takes longer than launching a kernel.
    """
    known: dict[tuple, tuple[Recipe, Plan]] = {}

    @functools.wraps(make)
    def remembered(recipe: Recipe, *rest: Any) -> Plan:
        if torch.compiler.is_compiling():
            return make(recipe, *rest)
        key = (id(recipe), *rest)
        found = known.get(key)
        if found is None:
            if len(known) >= _MOST_PLANS:
                known.clear()
            found = known[key] = (recipe, make(recipe, *rest))  # which holds the recipe, so no other gets its id
        return found[1]

    return remembered


@dataclass(frozen=True, kw_only=True)
class _ForwardPlan:
    """What a recipe makes of the forward pass on a device."""

    units: Units | None
    input: Operand
    weight: Operand
    wgrad_input: Operand
    dgrad_weight: Operand


@_for_each_recipe
def _plan_forward(recipe: Recipe, device: torch.device, packed: bool) -> _ForwardPlan:
    units = matmul.units_of(recipe.fprop, device)
    at_once = None if packed else matmul.decoded_for(units)
    return _ForwardPlan(
        units=units,
        input=Operand.lhs(recipe.fprop, _FPROP_INPUT, at_once),
        weight=Operand.rhs(recipe.fprop, _FPROP_WEIGHT, at_once),
        wgrad_input=Operand.rhs(recipe.wgrad, _WGRAD_INPUT),
        dgrad_weight=Operand.rhs(recipe.dgrad, _DGRAD_WEIGHT),
    )


@dataclass(frozen=True, kw_only=True)
class _BackwardPlan:
    """What a recipe makes of the backward pass on a device."""

    dgrad_units: Units | None
    wgrad_units: Units | None
    dgrad_output: Operand
    wgrad_output: Operand


@_for_each_recipe
def _plan_backward(recipe: Recipe, device: torch.device) -> _BackwardPlan:
    dgrad_units, wgrad_units = matmul.units_of(recipe.dgrad, device), matmul.units_of(recipe.wgrad, device)
    return _BackwardPlan(
        dgrad_units=dgrad_units,
        wgrad_units=wgrad_units,
        dgrad_output=Operand.lhs(recipe.dgrad, _DGRAD_OUTPUT, matmul.decoded_for(dgrad_units)),
        wgrad_output=Operand.lhs(recipe.wgrad, _WGRAD_OUTPUT, matmul.decoded_for(wgrad_units)),
    )


@_for_each_recipe
def _path(recipe: Recipe, gemm: str, device: torch.device) -> str:
    return matmul.describe(getattr(recipe, gemm), device)


def _forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    rng_state: Tensor,
    hot_channels: Tensor | None,
    shared_input: SharedForms | None,
    shared_weight: SharedForms | None,
    *,
    grad_input: bool,
    grad_weight: bool,
) -> tuple[Tensor, tuple[Side | None, Side | None]]:
    """The output, and what backward needs: the column forms of input and weight."""
    packed = matmul.needs_packed(recipe.fprop, hot_channels)
    plan = _plan_forward(recipe, input.device, packed)
    patches = (None, None) if plan.input.units is None else matmul.patches_of(recipe.fprop, hot_channels)
    input_rows, input_columns = _forms(
        input, plan.input, plan.wgrad_input if grad_weight else None, rng_state, shared_input, patches[0]
    )
    weight_rows, weight_columns = _forms(
        weight, plan.weight, plan.dgrad_weight if grad_input else None, rng_state, shared_weight, patches[1]
    )
    mean = matmul.mean_product(input_rows, weight_rows, weight, plan.input.quantizer)
    if mean is not None:
        bias = mean if bias is None else mean + bias
    if bias is not None:
        bias = bias.to(input.dtype)  # as `torch.nn.functional.linear` rounds it; units can add it before they round
    out = matmul.patched_multiply(input_rows, weight_rows, recipe.fprop, hot_channels, bias, input.dtype, plan.units)
    return out, (input_columns, weight_columns)


def _forms(
    x: Tensor,
    rows: Operand,
    columns: Operand | None,
    rng_state: Tensor,
    shared: SharedForms | None,
    patch: Patch | None,
) -> tuple[Side, Side | None]:
    """The row form of ``x``, and its column form unless that is ``None``; from ``shared`` where they are the same."""
    if shared is None or rows.quantizer is None or rows.stochastic or (columns is not None and columns.stochastic):
        return _quantize(x, rows, columns, rng_state, patch)
    key = (x.dtype, rows, columns)
    forms = shared.get(key)
    if forms is None:
        row_form, column_form = _quantize(x, rows, columns, rng_state, patch)
        # Without the tensor itself, which must not stay alive for this.
        shared.keep(key, (dataclasses.replace(row_form, source=None), column_form, patch, _version(patch)))
        return row_form, column_form
    row_form, column_form, kept_patch, version = forms
    if not _is_same(patch, kept_patch) or _version(patch) != version:  # hot channels of another layer
        return matmul.quantize_rows(x, rows, rng_state, patch), column_form
    return dataclasses.replace(row_form, source=x), column_form


def _is_same(patch: Patch | None, other: Patch | None) -> bool:
    if patch is None or other is None:
        return patch is other
    return patch.channels is other.channels and patch.parts == other.parts


def _version(patch: Patch | None) -> int | None:
    """Changes when the channels are written to, as far as PyTorch knows."""
    return None if patch is None or patch.channels.is_inference() else patch.channels._version


def _quantize(
    x: Tensor, rows: Operand, columns: Operand | None, rng_state: Tensor, patch: Patch | None
) -> tuple[Side, Side | None]:
    if columns is None:
        return matmul.quantize_rows(x, rows, rng_state, patch), None
    return matmul.quantize_both(x, rows, columns, rng_state, patch)


class _FP4Linear(torch.autograd.Function):
    """The three GEMMs of a linear layer. ``input`` is ``[tokens, in_features]``."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        recipe: Recipe,
        rng_state: Tensor,
        hot_channels: Tensor | None,
        shared_input: SharedForms | None,
        shared_weight: SharedForms | None,
    ) -> Tensor:
        grad_input, grad_weight, grad_bias = ctx.needs_input_grad[:3]
        arguments = (input, weight, bias, recipe, rng_state, hot_channels, shared_input, shared_weight)
        out, columns = _forward(*arguments, grad_input=grad_input, grad_weight=grad_weight)
        # The exact mean of the output gradient meets the weight itself, which is alive anyway.
        center = recipe.dgrad.lhs.center if recipe.dgrad and recipe.dgrad.lhs else None
        _save(ctx, columns, weight if grad_input and center is not None and center.mean == "exact" else None)
        ctx.recipe = recipe
        ctx.rng_state = rng_state
        ctx.weight_dtype = weight.dtype
        ctx.bias_dtype = bias.dtype if bias is not None and grad_bias else None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (input_columns, weight_columns), weight = _load(ctx)
        grad_output = grad_output.contiguous()  # so that strides do not decide the order of any sum
        plan = _plan_backward(ctx.recipe, grad_output.device)
        dgrad_output, wgrad_output = plan.dgrad_output, plan.wgrad_output
        seed = ops.draw_seed(ctx.rng_state) if dgrad_output.stochastic or wgrad_output.stochastic else None
        rows: Side | None = None
        columns: Side | None = None
        if weight_columns is not None and input_columns is not None:
            rows, columns = matmul.quantize_both(grad_output, dgrad_output, wgrad_output, seed)
        elif weight_columns is not None:
            rows = matmul.quantize_rows(grad_output, dgrad_output, seed)
        elif input_columns is not None:
            columns = matmul.quantize_columns(grad_output, wgrad_output, seed)
        grad_input = grad_weight = grad_bias = None
        if rows is not None and weight_columns is not None:
            transposed = None if weight is None else weight.T
            mean = matmul.mean_product(rows, weight_columns, transposed, dgrad_output.quantizer)
            mean = None if mean is None else mean.to(grad_output.dtype)
            grad_input = matmul.multiply(rows, weight_columns, mean, grad_output.dtype, units=plan.dgrad_units)
        if columns is not None and input_columns is not None:
            dtype = ctx.weight_dtype if columns.mean is None else torch.float32
            product = matmul.multiply(columns, input_columns, None, grad_output.dtype, dtype, plan.wgrad_units)
            tokens = grad_output.shape[0]
            grad_weight = matmul.add_mean_outer(product, columns, input_columns, tokens, ctx.weight_dtype)
        if ctx.bias_dtype is not None:
            grad_bias = grad_output.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return grad_input, grad_weight, grad_bias, None, None, None, None, None


def _save(ctx: Any, sides: tuple[Side | None, ...], weight: Tensor | None) -> None:
    """Put the tensors of ``sides`` and ``weight`` where autograd's saved-tensor hooks see them, and the rest beside."""
    tensors: list[Tensor | None] = []
    layout: list[tuple | None] = []
    for side in sides:
        matrix = None if side is None else side.matrix
        if isinstance(matrix, FP4Tensor):
            tensors += [matrix.codes, matrix.scales, matrix.amax]
            layout.append((matrix.encoded_max, matrix.format, matrix.shape))
        else:
            assert not isinstance(matrix, FP4Operand)  # what is kept stays packed
            tensors += [matrix, None, None]
            layout.append(None)
        tensors.append(None if side is None else side.mean)
    ctx.save_for_backward(*tensors, weight)
    ctx.layout = tuple(layout)


def _load(ctx: Any) -> tuple[list[Side | None], Tensor | None]:
    """What :func:`_save` put away."""
    saved = ctx.saved_tensors
    sides: list[Side | None] = []
    for i, layout in enumerate(ctx.layout):
        first, scales, amax, mean = saved[4 * i : 4 * i + 4]
        if layout is not None:
            encoded_max, block_format, shape = layout
            first = FP4Tensor(
                codes=first, scales=scales, amax=amax, encoded_max=encoded_max, format=block_format, shape=shape
            )
        sides.append(None if first is None else Side(matrix=first, mean=mean))
    return sides, saved[-1]


class FP4Layer(nn.Module):
    """What a layer needs to compute in four bits; mixed into the class of a linear layer in place.

    It adds no parameters, no buffers and no state-dict keys. Its state is plain attributes, the first three set by
    ``convert_to_fp4``:

    Attributes:
        fp4_recipe: the recipe; replace it with ``set_recipe``.
        fp4_rng_state: int64 ``[key, step]`` for stochastic rounding.
        fp4_gemm_paths: which units each GEMM uses, filled in when the layer runs.
        fp4_hot_channels: int64 ``[k]``, the channels that ``recipe.fprop.hot_channels`` patches; picked from the first
            training batch unless ``HotChannelRefresh`` or you set it.
        fp4_channel_scores: float32 ``[in_features]``; while it is set, each training forward adds its scores.
        fp4_weight_forms: keeps the quantised weight for the next forward; taken away before the weight changes.
    """

    fp4_recipe: Recipe
    fp4_rng_state: Tensor
    fp4_gemm_paths: dict[str, str]
    fp4_hot_channels: Tensor | None = None
    fp4_channel_scores: Tensor | None = None
    fp4_weight_forms: WeightForms | None = None

    def _apply(self, fn: Callable, recurse: bool = True) -> Any:
        """Take the state along when the layer moves: moved in its first call, it would be compiled twice."""
        super()._apply(fn, recurse)
        parameter = next(self.parameters(), None)
        if parameter is not None and not parameter.is_meta:
            with torch.inference_mode(False):
                self.fp4_rng_state = self.fp4_rng_state.to(parameter.device)
                if self.fp4_hot_channels is not None:
                    self.fp4_hot_channels = self.fp4_hot_channels.to(parameter.device)
        return self

    def _fp4_forward(self, input: Tensor, stored: Tensor, bias: Tensor | None, *, transposed: bool = False) -> Tensor:
        # Read once by the caller: a parametrization computes the weight each time that it is read.
        weight = stored.T if transposed else stored
        recipe, device = self.fp4_recipe, input.device
        rng_state = self.fp4_rng_state
        if rng_state.device != device:
            with torch.inference_mode(False):
                rng_state = rng_state.to(device)
            if dispatch.is_lasting(input):
                self.fp4_rng_state = rng_state
        if torch.is_grad_enabled():
            # A new dict: a compiler that saw the old one read or grow would compile all again once it is filled.
            needed = {"fprop": True, "dgrad": input.requires_grad, "wgrad": weight.requires_grad}
            self.fp4_gemm_paths = {gemm: _path(recipe, gemm, device) for gemm, runs in needed.items() if runs}
        else:
            self.fp4_gemm_paths["fprop"] = _path(recipe, "fprop", device)
        channels = None
        if recipe.fprop is not None and recipe.fprop.hot_channels is not None:
            channels = self._fp4_channels(input, weight, recipe.fprop, recipe.fprop.hot_channels)
        forms = None
        # A compiler would share nothing, but compile all again when the attribute comes and goes.
        if not torch.compiler.is_compiling() and self.fp4_weight_forms is not None:
            forms = self.fp4_weight_forms.of(stored)
        return fp4_linear(input, weight, bias, recipe, rng_state, channels, forms)

    def _fp4_channels(self, input: Tensor, weight: Tensor, gemm: Gemm, hot: HotChannels) -> Tensor | None:
        """The hot channels on the input's device; picked and scored on the way where that is due."""
        # Also without gradients: a checkpointed forward and its recomputation have to agree.
        wanted = self.fp4_hot_channels is None or self.fp4_channel_scores is not None
        if self.training and wanted and input.numel() > 0 and dispatch.is_lasting(input, weight):
            with torch.no_grad():
                scores = matmul.channel_scores(_rows_of(input, weight), weight, gemm)
                if self.fp4_channel_scores is not None:
                    self.fp4_channel_scores.add_(scores)
                if self.fp4_hot_channels is None:
                    self.fp4_hot_channels = ops.select_channels(scores, hot.count(weight.shape[1]))
        channels = self.fp4_hot_channels
        if channels is not None and channels.device != input.device:
            channels = channels.to(input.device)
            if dispatch.is_lasting(input):
                self.fp4_hot_channels = channels
        return channels

    def extra_repr(self) -> str:
        """What ``print(model)`` shows in brackets."""
        return ", ".join(filter(None, (super().extra_repr(), f"recipe={self.fp4_recipe.name!r}")))

    def __reduce_ex__(self, protocol: Any) -> Any:
        if type(self) is FP4Linear:
            return super().__reduce_ex__(protocol)
        # Classes made by `fp4_class` cannot be found by name: make them again. The rest is as the original class wants.
        return _new_instance, (original_class(type(self)),), *super().__reduce_ex__(protocol)[2:]


class FP4Linear(FP4Layer, nn.Linear):
    """An ``nn.Linear`` that computes in four bits. ``convert_to_fp4`` makes it from an ``nn.Linear``, in place."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("FP4Linear is not constructed: use `convert_to_fp4(nn.Linear(...), recipe)`.")

    def forward(self, input: Tensor) -> Tensor:
        """``input`` is ``[..., in_features]``; see :func:`fp4_linear`."""
        return self._fp4_forward(input, self.weight, self.bias)


class _FP4Conv1D(FP4Layer):
    """The same for the ``Conv1D`` of ``transformers`` (GPT-2), a linear layer that stores ``[in, out]``."""

    weight: Tensor
    bias: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """``input`` is ``[..., in_features]``."""
        return self._fp4_forward(input, self.weight, self.bias, transposed=True)


def is_conv1d(module_class: type) -> bool:
    """Whether this is ``transformers``' ``Conv1D``, told by name so that ``transformers`` need not be installed."""
    return module_class.__name__ == "Conv1D" and module_class.__module__.startswith("transformers.")


@functools.cache
def _mix(mixin: Any, original: Any) -> Any:
    return type(f"FP4{original.__name__}", (mixin, original), {})


def fp4_class(original: Any) -> type[FP4Layer]:
    """The class that ``original`` becomes: ``FP4Linear`` for ``nn.Linear``, a mixture of both for its subclasses."""
    if original is nn.Linear:
        return FP4Linear
    return _mix(_FP4Conv1D if is_conv1d(original) else FP4Linear, original)


def original_class(converted: type[nn.Module]) -> type[nn.Module]:
    """What ``converted`` would be had :func:`fp4_class` not been there."""
    if converted is FP4Linear:
        return nn.Linear
    bases = converted.__bases__
    if len(bases) == 2 and bases[0] in (FP4Linear, _FP4Conv1D):
        return bases[1]
    # Another swap came after ours (`fully_shard`, a parametrization): the same class on top of the original one.
    bases = tuple(original_class(base) if issubclass(base, FP4Layer) else base for base in bases)
    members = {name: value for name, value in vars(converted).items() if name not in ("__dict__", "__weakref__")}
    return type(converted.__name__.replace("FP4", "", 1), bases, members)


def _new_instance(original: type[nn.Module]) -> FP4Layer:
    module_class = fp4_class(original)
    return module_class.__new__(module_class)
