"""The operations on FP4 tensors, as PyTorch operators: the only place that chooses which implementation runs.

Each is registered with ``torch.library``, opaque to ``torch.compile`` (a compiler that fused these lines could change
their rounding), pure except for :func:`draw_seed`, and unaffected by autocast. In eager mode, where nobody watches the
operators go by, their bodies are called without PyTorch's dispatcher, which takes longer than most of them.
"""

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, Optional

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.nn import Parameter

from lightning_fp4 import blackwell, reference
from lightning_fp4.formats import E4M3, FORMATS, BlockFormat
from lightning_fp4.quantizer import Quantizer, Rounding
from lightning_fp4.recipes.base import GemmUnits
from lightning_fp4.tensor import FP4Operand, FP4Tensor, Patch, Units

_kernels_enabled = True


def enable_kernels(enabled: bool = True) -> None:
    """Quantise with the Triton kernels where they run, as by default, or with the reference everywhere; process-wide.

    Both give the same bits; the reference is there to compare with.
    """
    global _kernels_enabled
    _kernels_enabled = enabled


@functools.cache
def _triton_kernels() -> Optional[ModuleType]:
    """The kernels, if Triton is installed."""
    try:
        import triton  # noqa: F401
    except ModuleNotFoundError:
        return None
    from lightning_fp4 import kernels

    return kernels


def backend(device: torch.device) -> Literal["triton", "reference"]:
    """Which implementation quantises on this device: Triton's on NVIDIA GPUs from Ampere on, else the reference."""
    return "triton" if _kernels_enabled and _runs_triton(device) else "reference"


@functools.cache
def _runs_triton(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and _triton_kernels() is not None


def _kernels(x: Tensor) -> Any:
    """The kernels for ``x``, ``None`` if it is the reference's turn."""
    return _triton_kernels() if x.is_cuda and backend(x.device) == "triton" else None


def gemm_path(
    device: torch.device, lhs: Quantizer | None = None, rhs: Quantizer | None = None, wanted: GemmUnits = "exact"
) -> Units:
    """Which units multiply two quantised operands on this device; without quantisers, those that suit all formats.

    ``"auto"`` takes FP8 units where the device has them and they take the formats, ``"exact"`` only where they are
    exact too; BF16 units, which are exact for every format, multiply the rest. FP4 units have to be asked for: that
    path has not run on hardware yet. A CPU computes in float32; it can show what FP8 units would give, from the same
    E4M3 operands.

    Raises:
        ValueError: if FP4 or FP8 units are asked for and the device has none, or they do not take the formats.
    """
    suits = all(q is not None and q.format.global_scale == "tensor" for q in (lhs, rhs))
    if wanted == "fp4":
        obstacle = blackwell.obstacle(device, *(None if q is None else q.format for q in (lhs, rhs)))
        if obstacle is not None:
            raise ValueError(f"`units='fp4'`: {obstacle}. Use units='auto'.")
        return "fp4"
    if wanted == "fp8":
        if not suits:
            raise ValueError(f"`units='fp8'` needs formats with one scale per tensor, got {lhs} and {rhs}.")
        if not _has_fp8(device):
            raise ValueError(f"`units='fp8'`: {device} has no FP8 units (Ada and Hopper do). Use units='auto'.")
        return "fp8"
    if device.type != "cuda":
        return "fp32"
    takes_fp8 = suits and wanted != "bf16" and (wanted == "auto" or is_exact("fp8", lhs, rhs))
    return "fp8" if takes_fp8 and _has_fp8(device) else "bf16"


def _has_fp8(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def is_exact(units: Units, lhs: Quantizer | None, rhs: Quantizer | None) -> bool:
    """Whether these units multiply these operands without rounding them, or the sums, once more."""
    if units == "fp4":
        return not any(q is not None and blackwell.rounds_sums(q.format) for q in (lhs, rhs))
    return units != "fp8" or all(q is not None and q.scale_rule.is_closed for q in (lhs, rhs))


# ----------------------------------------------------------------------------------------------------------------------
# The functions that the package calls
# ----------------------------------------------------------------------------------------------------------------------


def draw_seed(rng_state: Tensor) -> Tensor:
    """Take the next seed and advance the state.

    Args:
        rng_state: int64 ``[2]``, key and step; the step grows by one.

    Returns:
        int64 ``[2]``, key and the step before.
    """
    return _draw_seed(rng_state)


def quantize(
    x: Tensor,
    quantizer: Quantizer,
    *,
    hadamard: int | None = None,
    transposed: bool = False,
    seed: Tensor | None = None,
    stream: int = 0,
    units: Units | None = None,
    mean: Tensor | None = None,
    patch: Patch | None = None,
) -> FP4Tensor | FP4Operand:
    """Quantise a matrix, or its transpose, along the last axis.

    Args:
        x: ``[rows, columns]``, float32, bfloat16 or float16.
        quantizer: how.
        hadamard: rotate groups of this length along the quantised axis first.
        transposed: quantise ``x.T`` in place of ``x``.
        seed: int64 ``[2]`` from :func:`draw_seed`; needed by stochastic rounding only.
        stream: which of the independent random streams of this seed to use.
        units: decode the result at once for these units of a GEMM; ``None`` for packed codes and scales.
        mean: float32 ``[1, columns]``, taken out of each row of ``x`` first, as :func:`subtract_mean` does.
        patch: columns to append, those of :func:`patch_columns`; only if it is decoded at once and not transposed.

    Raises:
        ValueError: if stochastic rounding is asked for without a seed.
    """
    assert patch is None or (units is not None and not transposed)
    stochastic = quantizer.rounding is Rounding.STOCHASTIC
    if stochastic and seed is None:
        raise ValueError("`quantize` with stochastic rounding needs a `seed`, an int64 tensor [key, step].")
    seed = seed if stochastic else None
    channels, names_of_parts = _take_apart(patch)
    if _is_unobserved((x, seed, mean, channels)):
        return _outside_autocast(x, _one_form, x, quantizer, hadamard, transposed, seed, stream, units, mean, patch)
    rows, columns = (x.shape[1], x.shape[0]) if transposed else (x.shape[0], x.shape[1])
    names = (quantizer.format.name, quantizer.rounding.value, quantizer.scale_rule.value)
    parts = _quantize(
        x, *names, hadamard or 0, transposed, seed, stream, units or "", mean, channels, names_of_parts
    )  # fmt: skip
    return _assemble(parts, quantizer, units, rows, columns if patch is None else parts[0].shape[1])


def quantize_both(
    x: Tensor,
    rows: Quantizer,
    columns: Quantizer,
    *,
    hadamard: int | None = None,
    seed: Tensor | None = None,
    streams: tuple[int, int] = (0, 0),
    units: tuple[Units | None, Units | None] = (None, None),
    mean: Tensor | None = None,
    patch: Patch | None = None,
) -> tuple[FP4Tensor | FP4Operand, FP4Tensor | FP4Operand]:
    """:func:`quantize` of ``x`` and of ``x.T``, reading ``x`` once.

    ``hadamard`` rotates the latter only, ``patch`` is appended to the former only.

    Raises:
        ValueError: if stochastic rounding is asked for without a seed.
    """
    assert patch is None or units[0] is not None
    stochastic = Rounding.STOCHASTIC in (rows.rounding, columns.rounding)
    if stochastic and seed is None:
        raise ValueError("`quantize_both` with stochastic rounding needs a `seed`, an int64 tensor [key, step].")
    seed = seed if stochastic else None
    channels, names_of_parts = _take_apart(patch)
    if _is_unobserved((x, seed, mean, channels)):
        return _outside_autocast(x, _both_forms, x, rows, columns, hadamard, seed, streams, units, mean, patch)
    parts = _quantize_both(
        x,
        _spec(rows),
        _spec(columns),
        hadamard or 0,
        seed,
        *streams,
        *(choice or "" for choice in units),
        mean,
        channels,
        names_of_parts,
    )
    by_rows = _assemble(parts[:3], rows, units[0], x.shape[0], x.shape[1] if patch is None else parts[0].shape[1])
    return by_rows, _assemble(parts[3:], columns, units[1], x.shape[1], x.shape[0])


def dequantize(x: FP4Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode to ``[rows, columns]`` in ``dtype``."""
    return _dequantize(x.codes, x.scales, x.amax, x.format.name, x.encoded_max, *x.shape, dtype)


def operand(x: FP4Tensor, units: Units) -> FP4Operand:
    """Decode for the units of a GEMM."""
    if _is_unobserved((x.codes, x.scales, x.amax)):
        return _outside_autocast(x.codes, _decoded, x, units)
    values, factor = _operand(x.codes, x.scales, x.amax, x.format.name, x.encoded_max, *x.shape, units)
    return FP4Operand(values=values, factor=factor if x.amax is not None else None, shape=x.shape)


def gemm(
    lhs: FP4Tensor | FP4Operand,
    rhs: FP4Tensor | FP4Operand,
    bias: Tensor | None,
    dtype: torch.dtype,
    units: Units | None = None,
) -> Tensor:
    """``lhs @ rhs.T + bias``, summed in float32 and rounded once to ``dtype``: ``[lhs rows, rhs rows]``.

    Args:
        lhs: ``[M, K]``.
        rhs: ``[N, K]``.
        bias: ``[N]`` or ``None``. FP8 units add one of ``dtype`` (not float32) themselves, others take one more pass.
        dtype: of the result.
        units: what multiplies; those that a decoded operand is made for, else exact ones, if not given. FP4 units
            multiply packed operands, the others decoded ones.
    """
    assert lhs.shape[1] == rhs.shape[1]
    decoded = [m.units for m in (lhs, rhs) if isinstance(m, FP4Operand)]
    units = units or (decoded[0] if decoded else gemm_path(lhs.codes.device))  # type: ignore[union-attr]
    if units == "fp4":
        assert isinstance(lhs, FP4Tensor)
        assert isinstance(rhs, FP4Tensor)
        return _multiply_packed(*_storage_of(lhs), *_storage_of(rhs), lhs.shape[1], bias, dtype)
    first, second = (m.values if isinstance(m, FP4Operand) else m.codes for m in (lhs, rhs))
    if _is_unobserved((first, second, bias)):
        return _outside_autocast(first, _product, lhs, rhs, bias, dtype, units)
    a, b = (m if isinstance(m, FP4Operand) else operand(m, units) for m in (lhs, rhs))
    assert a.units == b.units == units
    return _multiply(a.values, a.factor, b.values, b.factor, bias, dtype)


def quantization_sums(x: Tensor, quantizer: Quantizer, *, seed: Tensor | None = None) -> Tensor:
    """What quantising does to each matrix of a stack by itself: float64 ``[n, 6]``.

    Args:
        x: ``[n, rows, columns]``, float32, bfloat16 or float16.
        quantizer: how.
        seed: int64 ``[2]``, the same for every matrix; needed by stochastic rounding only.

    Returns:
        Energies and counts, see ``reference.QUANTIZATION_SUMS``.

    Raises:
        ValueError: if stochastic rounding is asked for without a seed.
    """
    if quantizer.rounding is not Rounding.STOCHASTIC:
        seed = None
    elif seed is None:
        raise ValueError("`quantization_sums` with stochastic rounding needs a `seed`, an int64 tensor [key, step].")
    return _quantization_sums(x, _spec(quantizer), seed)


def tensor_sums(x: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """What is in each matrix of a stack, in numbers: float64 ``[n, 9]``, and its top channels, int64 ``[n, k]``.

    Args:
        x: float32 ``[n, rows, columns]``, rows and columns 1 or more.
        top_k: number of channels to select, at most.

    Returns:
        Sums, see ``reference.TENSOR_SUMS``, and the channels with the largest sums of magnitudes, largest first.
    """
    return _tensor_sums(x, top_k)


def pre_softmax_max(query: Tensor, key: Tensor, *, scale: float | None = None, is_causal: bool = False) -> Tensor:
    """The largest score ``scale * query @ key.T`` that attention's softmax sees, as a float32 scalar.

    On a GPU, scores of bfloat16 and float16 heads of up to 256 values are float32 sums that nobody writes; others are
    products in the dtype of their operands, which is that of autocast, if on.

    Args:
        query: ``[batch..., heads, T, D]``, or one head ``[T, D]``.
        key: ``[batch..., kv_heads, S, D]``; fewer heads than ``query`` are repeated, as grouped-query attention does.
        scale: ``D ** -0.5`` if not given.
        is_causal: leave out keys after the query, both counted from the first.
    """
    device_type = query.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        query, key = (x if x.dtype is torch.float64 else x.to(dtype) for x in (query, key))
    if type(query) in _PLAIN and type(key) in _PLAIN:
        return _pre_softmax_max(query, key, scale, is_causal)
    return reference.pre_softmax_max(query, key, scale=scale, is_causal=is_causal)  # what a DTensor understands


def token_mean(x: Tensor) -> Tensor:
    """The mean over the rows of ``x`` ``[tokens, features]``: float32 ``[1, features]``; zero without tokens."""
    return _token_mean(x)


def subtract_mean(x: Tensor, mean: Tensor) -> Tensor:
    """``x - mean`` in the dtype of ``x``: what :func:`quantize` with this ``mean`` quantises."""
    return _subtract_mean(x, mean)


def times_matrix(mean: Tensor, matrix: Tensor) -> Tensor:
    """``mean @ matrix.T`` in float32: ``[1, K]`` times ``[N, K]`` is ``[N]``."""
    return _times_matrix(mean, matrix)


def add_outer(product: Tensor, left: Tensor, right: Tensor, factor: int, dtype: torch.dtype) -> Tensor:
    """``product + (factor * left.T) @ right`` rounded once to ``dtype``.

    Args:
        product: float32 ``[M, N]``.
        left: float32 ``[1, M]``.
        right: float32 ``[1, N]``.
        factor: a count.
        dtype: of the result.
    """
    return _add_outer(product, left, right, factor, dtype)


def patch_columns(x: Tensor, quantized: FP4Tensor, quantizer: Quantizer, patch: Patch) -> FP4Tensor:
    """The columns that take back the errors of some channels, with the global scale of ``quantized``.

    Args:
        x: ``[rows, columns]``, what was quantised.
        quantized: the result.
        quantizer: how.
        patch: which columns.

    Returns:
        ``[rows, patch.width(...)]``.
    """
    codes, scales = _patch_columns(
        x,
        quantized.codes,
        quantized.scales,
        quantized.amax,
        quantized.format.name,
        quantizer.scale_rule.value,
        *quantized.shape,
        *_take_apart(patch),
    )
    return FP4Tensor(
        codes=codes,
        scales=scales,
        amax=quantized.amax,
        encoded_max=quantized.encoded_max,
        format=quantized.format,
        shape=(quantized.shape[0], codes.shape[1] * 2),
    )


def patch_values(x: Tensor, quantized: FP4Tensor, channels: Tensor) -> tuple[Tensor, Tensor]:
    """Residuals and decoded values of ``channels``, both float32 ``[rows, k]``."""
    return _patch_values(
        x,
        quantized.codes,
        quantized.scales,
        quantized.amax,
        quantized.format.name,
        quantized.encoded_max,
        *quantized.shape,
        channels,
    )


def concatenate(left: FP4Tensor, right: FP4Tensor) -> FP4Tensor:
    """Two matrices of one format and one global scale side by side, each with the columns it was padded to."""
    codes, scales = _concatenate(left.codes, left.scales, right.codes, right.scales)
    return FP4Tensor(
        codes=codes,
        scales=scales,
        amax=left.amax,
        encoded_max=left.encoded_max,
        format=left.format,
        shape=(left.shape[0], codes.shape[1] * 2),
    )


def channel_scores(x: Tensor, x_quantized: FP4Tensor, w: Tensor, w_quantized: FP4Tensor, score: str) -> Tensor:
    """How much the quantisation errors of each channel matter, by the ``HotChannels`` score: float32 ``[K]``."""
    decoded = (dequantize(x_quantized), dequantize(w_quantized))
    return _channel_scores(x, decoded[0], w, decoded[1], score)


def select_channels(scores: Tensor, count: int) -> Tensor:
    """The ``count`` channels with the highest scores, ascending: int64 ``[count]``."""
    return _select_channels(scores, count)


_PLAIN = (Tensor, Parameter)


def is_eager(args: tuple) -> bool:
    """Whether operators on these arguments run at once and nobody watches them go by.

    Compilers, tracers, modes (of tools that count operations, of selective checkpointing), function transforms, tensor
    subclasses and meta tensors act on operators.
    """
    if torch.compiler.is_compiling():
        return False
    # There are no public ways to ask for three of these, and a slow one for tracing.
    if torch._C._get_tracing_state() is not None or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return False
    for x in args:
        if type(x) in _PLAIN:
            if x.is_meta:
                return False
        elif isinstance(x, Tensor):
            return False
    return True


def is_lasting(*tensors: Tensor) -> bool:
    """Whether what is computed from these may outlive the call: not if they belong to a function transform or are
    fake or meta tensors, which have no values. Compiled code that Dynamo made computes from others than it saw.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    if torch._C._functorch.peek_interpreter_stack() is not None or detect_fake_mode(tensors) is not None:
        return False
    return not any(x.is_meta for x in tensors)


def _is_unobserved(args: tuple) -> bool:
    """Whether an operator's body does what the operator does on these arguments: they are eager, and no autograd."""
    return not _wants_gradients(args) and is_eager(args)


def _wants_gradients(args: tuple) -> bool:
    if torch.is_grad_enabled():
        for x in args:
            if isinstance(x, Tensor) and x.requires_grad:
                return True
    return False


# ----------------------------------------------------------------------------------------------------------------------
# Registration
# ----------------------------------------------------------------------------------------------------------------------


_LIBRARY = torch.library.Library("lightning_fp4", "DEF")


class _Operator:
    """A function whose first argument is a tensor, registered as ``lightning_fp4::name`` and run outside autocast.

    Called, it takes its registered form wherever someone would see the difference.
    """

    def __init__(self, name: str, body: Callable, mutates: tuple[str, ...]) -> None:
        @functools.wraps(body)
        def outside_autocast(first: Tensor, *args, **kwargs):  # type: ignore[no-untyped-def]
            return _outside_autocast(first, body, first, *args, **kwargs)

        self.body = outside_autocast
        # Not `torch.library.custom_op`, whose wrappers in Python take three times as long as the dispatcher.
        schema = torch.library.infer_schema(body, mutates_args=mutates)
        _LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, outside_autocast, "CompositeExplicitAutograd")
        self.registered = getattr(torch.ops.lightning_fp4, name).default
        self.register_fake = torch.library.register_fake(f"lightning_fp4::{name}", lib=_LIBRARY)

    def __call__(self, *args: Any) -> Any:
        if _is_unobserved(args):
            return self.body(*args)
        if _wants_gradients(args) and not torch.compiler.is_compiling():
            return _WithoutDerivative.apply(self.registered, *args)
        return self.registered(*args)


class _WithoutDerivative(torch.autograd.Function):
    """An operator on tensors that require gradients, which it cannot give."""

    @staticmethod
    def forward(ctx: Any, operator: Any, *args: Any) -> Any:
        ctx.name = operator.name()
        return operator(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"`{ctx.name}` has no derivative: rounding has none, and `lightning_fp4.linear.fp4_linear` gives the "
            "gradients of a whole linear layer. Use that, or detach what the operator is given."
        )


def _operator(name: str, mutates: tuple[str, ...] = ()) -> Callable[[Callable], _Operator]:
    return lambda body: _Operator(name, body, mutates)


def _outside_autocast(x: Tensor, body: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call ``body`` with autocast off for the device of ``x``."""
    device_type = x.device.type
    if not torch.is_autocast_enabled(device_type):
        return body(*args, **kwargs)
    # What `torch.autocast(device_type, enabled=False)` does, without its checks of every setting.
    torch.set_autocast_enabled(device_type, False)
    try:
        return body(*args, **kwargs)
    finally:
        torch.set_autocast_enabled(device_type, True)


def _storage(
    block_format: BlockFormat, rows: int, columns: int
) -> tuple[tuple[int, int], tuple[int, int], torch.dtype]:
    """Shapes of codes and scales, and the dtype of scales, of a quantised ``[rows, columns]``."""
    block_rows, block_columns = block_format.block
    block_count = (columns + block_columns - 1) // block_columns
    scale_dtype = torch.float8_e4m3fn if block_format.scale is E4M3 else torch.float8_e8m0fnu
    scale_shape = ((rows + block_rows - 1) // block_rows, block_count)
    return (rows, block_count * block_columns // 2), scale_shape, scale_dtype


def _rebuild(
    codes: Tensor, scales: Tensor, amax: Tensor | None, name: str, encoded_max: float, *shape: int
) -> FP4Tensor:
    rows, columns = shape
    return FP4Tensor(
        codes=codes, scales=scales, amax=amax, encoded_max=encoded_max, format=FORMATS[name], shape=(rows, columns)
    )


def _storage_of(x: FP4Tensor) -> tuple[Tensor, Tensor, Tensor | None, str, float]:
    """A matrix but for its shape, as an operator's arguments."""
    return x.codes, x.scales, x.amax, x.format.name, x.encoded_max


@_operator("draw_seed", mutates=("rng_state",))
def _draw_seed(rng_state: Tensor) -> Tensor:
    kernels = _kernels(rng_state)
    if kernels is not None:
        return kernels.draw_seed(rng_state)
    seed = rng_state.clone()
    rng_state[1:].add_(1)
    return seed


@_draw_seed.register_fake
def _(rng_state: Tensor) -> Tensor:
    return torch.empty_like(rng_state)


def _spec(quantizer: Quantizer) -> str:
    """A quantiser as an operator's argument."""
    return f"{quantizer.format.name}/{quantizer.rounding.value}/{quantizer.scale_rule.value}"


@functools.cache
def _parse(spec: str) -> Quantizer:
    name, rounding, rule = spec.split("/")
    return Quantizer(format=FORMATS[name], rounding=rounding, scale_rule=rule)  # type: ignore[arg-type]


_OPERAND_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}

_Parts = tuple[Tensor, Tensor, Tensor]
"""Codes, scales and maximum of a packed form; values, nothing and factor of a decoded one."""


def _parts(x: Tensor, form: FP4Tensor | FP4Operand) -> _Parts:
    """A form as an operator's results; what it lacks becomes an empty tensor."""
    if isinstance(form, FP4Operand):
        none = x.new_empty(0, dtype=torch.uint8)
        return form.values, none, x.new_empty(0, 0, dtype=torch.float32) if form.factor is None else form.factor
    return form.codes, form.scales, x.new_empty(0, 0, dtype=torch.float32) if form.amax is None else form.amax


def _take_apart(patch: Patch | None) -> tuple[Tensor | None, str]:
    """A patch as an operator's arguments."""
    return (None, "") if patch is None else (patch.channels, "+".join(patch.parts))


def _patch(channels: Tensor | None, parts: str) -> Patch | None:
    """The patch that :func:`_take_apart` took apart."""
    if channels is None:
        return None
    names: Any = tuple(parts.split("+"))
    return Patch(channels=channels, parts=names)


def _assemble(parts: tuple[Tensor, ...], quantizer: Quantizer, units: Units | None, *shape: int) -> Any:
    """The form that :func:`_parts` took apart."""
    rows, columns = shape
    first, scales, last = parts
    global_part = last if quantizer.format.global_scale else None
    if units is not None:
        return FP4Operand(values=first, factor=global_part, shape=(rows, columns))
    return FP4Tensor(
        codes=first,
        scales=scales,
        amax=global_part,
        encoded_max=quantizer.scale_rule.encoded_max,
        format=quantizer.format,
        shape=(rows, columns),
    )


def _fake_parts(
    x: Tensor, quantizer: Quantizer, units: str, rows: int, columns: int, patch: Patch | None = None
) -> _Parts:
    """What :func:`_parts` gives, without data."""
    codes, scales, scale_dtype = _storage(quantizer.format, rows, columns)
    last = {"tensor": (1, 1), "row": (rows, 1), None: (0, 0)}[quantizer.format.global_scale]
    if units:
        width = codes[1] * 2 + (0 if patch is None else patch.width(quantizer.format.block[1]))
        values = x.new_empty((codes[0], width), dtype=_OPERAND_DTYPES[units])
        return values, x.new_empty(0, dtype=torch.uint8), x.new_empty(last, dtype=torch.float32)
    return (
        x.new_empty(codes, dtype=torch.uint8),
        x.new_empty(scales, dtype=scale_dtype),
        x.new_empty(last, dtype=torch.float32),
    )


def _reference_form(
    x: Tensor,
    quantizer: Quantizer,
    hadamard: Optional[int],
    seed: Optional[Tensor],
    stream: int,
    units: Optional[Units],
    patch: Patch | None = None,
) -> FP4Tensor | FP4Operand:
    """One form of ``x`` by the reference."""
    shape = (x.shape[0], x.shape[1])
    if hadamard:
        x = reference.rotate(x, hadamard)
    bits = None
    if quantizer.rounding is Rounding.STOCHASTIC:
        assert seed is not None
        padded = x.shape[1] + -x.shape[1] % quantizer.format.block[1]
        bits = reference.random_bytes(x.shape[0], padded, seed, stream)
    quantized = reference.quantize(x, quantizer, random_bits=bits)
    if quantized.shape != shape:  # a rotation padded it
        quantized = dataclasses.replace(quantized, shape=shape)
    if patch is not None:
        gained = reference.patch_columns(x, quantized, quantizer, patch.channels, patch.parts)
        quantized = reference.concatenate([quantized, gained])
    return reference.operand(quantized, units) if units else quantized


def _one_form(
    x: Tensor,
    quantizer: Quantizer,
    hadamard: Optional[int],
    transposed: bool,
    seed: Optional[Tensor],
    stream: int,
    units: Optional[Units],
    mean: Tensor | None,
    patch: Patch | None,
    pool: bool = True,
) -> FP4Tensor | FP4Operand:
    """What :func:`quantize` returns; ``pool`` is for the kernels."""
    kernels = _kernels(x)
    if mean is not None and (hadamard and not transposed):  # which the kernels do on the transpose
        x, mean = reference.subtract_mean(x, mean), None
    if kernels is not None and kernels.supports(quantizer, hadamard, units):
        return kernels.quantize(
            x,
            quantizer,
            hadamard=hadamard,
            transposed=transposed,
            seed=seed,
            stream=stream,
            units=units,
            mean=mean,
            patch=patch,
            pool=pool,
        )
    x = x if mean is None else reference.subtract_mean(x, mean)
    return _reference_form(x.T if transposed else x, quantizer, hadamard, seed, stream, units, patch)


@_operator("quantize")
def _quantize(
    x: Tensor,
    format: str,
    rounding: str,
    scale_rule: str,
    hadamard: int,
    transposed: bool,
    seed: Optional[Tensor],
    stream: int,
    units: str = "",
    mean: Optional[Tensor] = None,
    channels: Optional[Tensor] = None,
    parts: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    quantizer, patch, wanted = _parse(f"{format}/{rounding}/{scale_rule}"), _patch(channels, parts), units or None
    arguments: Any = (quantizer, hadamard or None, transposed, seed, stream, wanted, mean, patch, False)
    form = _one_form(x, *arguments)
    return _parts(x, form)


@_quantize.register_fake
def _(  # type: ignore[no-untyped-def]
    x, format, rounding, scale_rule, hadamard, transposed, seed, stream, units="", mean=None, channels=None, parts=""
):  # fmt: skip
    rows, columns = (x.shape[1], x.shape[0]) if transposed else (x.shape[0], x.shape[1])
    if hadamard:
        columns = (columns + hadamard - 1) // hadamard * hadamard
    quantizer = _parse(f"{format}/{rounding}/{scale_rule}")
    return _fake_parts(x, quantizer, units, rows, columns, _patch(channels, parts))


def _both_forms(
    x: Tensor,
    rows: Quantizer,
    columns: Quantizer,
    hadamard: Optional[int],
    seed: Optional[Tensor],
    streams: tuple[int, int],
    units: tuple[Optional[Units], Optional[Units]],
    mean: Tensor | None,
    patch: Patch | None,
    pool: bool = True,
) -> tuple[FP4Tensor | FP4Operand, FP4Tensor | FP4Operand]:
    """What :func:`quantize_both` returns; ``pool`` is for the kernels."""
    kernels = _kernels(x)
    if kernels is not None and kernels.supports(rows, None, units[0]) and kernels.supports(columns, hadamard, units[1]):
        return kernels.quantize_both(
            x,
            kernels.Form(quantizer=rows, stream=streams[0], units=units[0], patch=patch),
            kernels.Form(quantizer=columns, stream=streams[1], units=units[1]),
            hadamard=hadamard,
            seed=seed,
            mean=mean,
            pool=pool,
        )
    x = x if mean is None else reference.subtract_mean(x, mean)
    first: Any = _reference_form(x, rows, None, seed, streams[0], None)
    block_rows, block_columns = rows.format.block
    second: Any
    if _spec(rows) == _spec(columns) and block_rows == block_columns and not hadamard and seed is None:
        second = reference.transpose(first)  # one quantisation serves both
    else:
        second = _reference_form(x.T, columns, hadamard, seed, streams[1], None)
    if patch is not None:
        gained = reference.patch_columns(x, first, rows, patch.channels, patch.parts)
        first = reference.concatenate([first, gained])
    return (
        first if units[0] is None else reference.operand(first, units[0]),
        second if units[1] is None else reference.operand(second, units[1]),
    )


@_operator("quantize_both")
def _quantize_both(
    x: Tensor,
    rows: str,
    columns: str,
    hadamard: int,
    seed: Optional[Tensor],
    row_stream: int,
    column_stream: int,
    row_units: str,
    column_units: str,
    mean: Optional[Tensor] = None,
    channels: Optional[Tensor] = None,
    parts: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    units: Any = (row_units or None, column_units or None)
    streams, patch = (row_stream, column_stream), _patch(channels, parts)
    forms = _both_forms(
        x, _parse(rows), _parse(columns), hadamard or None, seed, streams, units, mean, patch, pool=False
    )  # fmt: skip
    row_parts, column_parts = (_parts(x, form) for form in forms)
    if column_parts[2].untyped_storage().data_ptr() == row_parts[2].untyped_storage().data_ptr():
        column_parts = (*column_parts[:2], column_parts[2].clone())  # an operator's results may not share memory
    return (*row_parts, *column_parts)


@_quantize_both.register_fake
def _(  # type: ignore[no-untyped-def]
    x, rows, columns, hadamard, seed, row_stream, column_stream, row_units, column_units, mean=None, channels=None,
    parts="",
):  # fmt: skip
    tokens, features = x.shape
    length = (tokens + hadamard - 1) // hadamard * hadamard if hadamard else tokens
    by_rows = _fake_parts(x, _parse(rows), row_units, tokens, features, _patch(channels, parts))
    return (*by_rows, *_fake_parts(x, _parse(columns), column_units, features, length))


@_operator("dequantize")
def _dequantize(
    codes: Tensor,
    scales: Tensor,
    amax: Optional[Tensor],
    format: str,
    encoded_max: float,
    rows: int,
    columns: int,
    dtype: torch.dtype,
) -> Tensor:
    quantized = _rebuild(codes, scales, amax, format, encoded_max, rows, columns)
    kernels = _kernels(codes)
    if kernels is not None and dtype in (torch.float32, torch.bfloat16, torch.float16):
        return kernels.dequantize(quantized, dtype)
    return reference.dequantize(quantized).to(dtype, copy=True)


@_dequantize.register_fake
def _(codes, scales, amax, format, encoded_max, rows, columns, dtype):  # type: ignore[no-untyped-def]
    return codes.new_empty((rows, columns), dtype=dtype)


@_operator("quantization_sums")
def _quantization_sums(x: Tensor, spec: str, seed: Optional[Tensor]) -> Tensor:
    quantizer, kernels = _parse(spec), _kernels(x)
    if kernels is not None:
        return kernels.quantization_sums(x, quantizer, seed=seed)
    bits = None
    if seed is not None:
        padded = x.shape[2] + -x.shape[2] % quantizer.format.block[1]
        bits = reference.random_bytes(x.shape[1], padded, seed, 0)
    return reference.quantization_sums(x, quantizer, random_bits=bits)


@_quantization_sums.register_fake
def _(x, spec, seed):  # type: ignore[no-untyped-def]
    return x.new_empty((x.shape[0], len(reference.QUANTIZATION_SUMS)), dtype=torch.float64)


@_operator("tensor_sums")
def _tensor_sums(x: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    return (_kernels(x) or reference).tensor_sums(x, top_k)


@_tensor_sums.register_fake
def _(x, top_k):  # type: ignore[no-untyped-def]
    sums = x.new_empty((x.shape[0], len(reference.TENSOR_SUMS)), dtype=torch.float64)
    return sums, x.new_empty((x.shape[0], min(top_k, x.shape[2])), dtype=torch.int64)


@_operator("pre_softmax_max")
def _pre_softmax_max(query: Tensor, key: Tensor, scale: Optional[float], is_causal: bool) -> Tensor:
    kernels = _kernels(query)
    chosen = reference if kernels is None or not kernels.reads_heads(query, key) else kernels
    return chosen.pre_softmax_max(query, key, scale=scale, is_causal=is_causal)


@_pre_softmax_max.register_fake
def _(query, key, scale, is_causal):  # type: ignore[no-untyped-def]
    return query.new_empty((), dtype=torch.float32)


def _decoded(quantized: FP4Tensor, units: Units) -> FP4Operand:
    """What :func:`operand` returns."""
    kernels = _kernels(quantized.codes)
    return (reference if kernels is None or units == "fp32" else kernels).operand(quantized, units)


@_operator("operand")
def _operand(
    codes: Tensor,
    scales: Tensor,
    amax: Optional[Tensor],
    format: str,
    encoded_max: float,
    rows: int,
    columns: int,
    units: str,
) -> tuple[Tensor, Tensor]:
    quantized = _rebuild(codes, scales, amax, format, encoded_max, rows, columns)
    decoded = _decoded(quantized, units)  # type: ignore[arg-type]
    return decoded.values, codes.new_empty(0, 0, dtype=torch.float32) if decoded.factor is None else decoded.factor


@_operand.register_fake
def _(codes, scales, amax, format, encoded_max, rows, columns, units):  # type: ignore[no-untyped-def]
    values = codes.new_empty((codes.shape[0], codes.shape[1] * 2), dtype=_OPERAND_DTYPES[units])
    return values, codes.new_empty((0, 0) if amax is None else amax.shape, dtype=torch.float32)


@_operator("multiply")
def _multiply(
    lhs: Tensor,
    lhs_factor: Optional[Tensor],
    rhs: Tensor,
    rhs_factor: Optional[Tensor],
    bias: Optional[Tensor],
    dtype: torch.dtype,
) -> Tensor:
    return _multiplied(lhs, lhs_factor, rhs, rhs_factor, bias, dtype)


def _multiplied(
    lhs: Tensor,
    lhs_factor: Tensor | None,
    rhs: Tensor,
    rhs_factor: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """What :func:`gemm` does with decoded operands."""
    m, k, n = *lhs.shape, rhs.shape[0]
    if lhs.is_cuda and lhs.dtype is torch.float8_e4m3fn and m * k * n:
        return _fp8_gemm(lhs, lhs_factor, rhs, rhs_factor, bias, dtype)
    a = FP4Operand(values=lhs, factor=lhs_factor, shape=(m, k))
    b = FP4Operand(values=rhs, factor=rhs_factor, shape=(n, k))
    kernels = _kernels(lhs)
    if kernels is not None and m * k * n and (lhs_factor is None) == (rhs_factor is None):
        return kernels.finish(reference.sums(a, b), lhs_factor, rhs_factor, bias, dtype)
    return reference.multiply(a, b, bias).to(dtype)


def _product(
    lhs: FP4Tensor | FP4Operand, rhs: FP4Tensor | FP4Operand, bias: Tensor | None, dtype: torch.dtype, units: Units
) -> Tensor:
    """What :func:`gemm` does, decoding included."""
    a, b = (m if isinstance(m, FP4Operand) else _decoded(m, units) for m in (lhs, rhs))
    assert a.units == b.units == units
    return _multiplied(a.values, a.factor, b.values, b.factor, bias, dtype)


@_multiply.register_fake
def _(lhs, lhs_factor, rhs, rhs_factor, bias, dtype):  # type: ignore[no-untyped-def]
    return lhs.new_empty((lhs.shape[0], rhs.shape[0]), dtype=dtype)


@_operator("multiply_packed")
def _multiply_packed(
    lhs_codes: Tensor,
    lhs_scales: Tensor,
    lhs_amax: Optional[Tensor],
    lhs_format: str,
    lhs_encoded_max: float,
    rhs_codes: Tensor,
    rhs_scales: Tensor,
    rhs_amax: Optional[Tensor],
    rhs_format: str,
    rhs_encoded_max: float,
    columns: int,
    bias: Optional[Tensor],
    dtype: torch.dtype,
) -> Tensor:
    m, n = lhs_codes.shape[0], rhs_codes.shape[0]
    lhs = _rebuild(lhs_codes, lhs_scales, lhs_amax, lhs_format, lhs_encoded_max, m, columns)
    rhs = _rebuild(rhs_codes, rhs_scales, rhs_amax, rhs_format, rhs_encoded_max, n, columns)
    return blackwell.multiply(lhs, rhs, bias, dtype)


@_multiply_packed.register_fake
def _(  # type: ignore[no-untyped-def]
    lhs_codes, lhs_scales, lhs_amax, lhs_format, lhs_encoded_max, rhs_codes, rhs_scales, rhs_amax, rhs_format,
    rhs_encoded_max, columns, bias, dtype,
):  # fmt: skip
    return lhs_codes.new_empty((lhs_codes.shape[0], rhs_codes.shape[0]), dtype=dtype)


def _fp8_gemm(
    lhs: Tensor,
    lhs_factor: Optional[Tensor],
    rhs: Tensor,
    rhs_factor: Optional[Tensor],
    bias: Optional[Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """The product of E4M3 operands on FP8 units; full float32 accumulation, since the fast one loses digits."""
    assert lhs_factor is not None
    assert rhs_factor is not None
    n = rhs.shape[0]
    if n % 16:  # what cuBLAS asks of the output's width
        padded = rhs.new_zeros(n + -n % 16, rhs.shape[1])
        padded[:n] = rhs
        rhs = padded
    # The epilogue adds a bias of the output's dtype before it rounds; others are added after a float32 product.
    fused = bias is None or (bias.dtype is dtype and dtype is not torch.float32 and n % 16 == 0)
    out = torch._scaled_mm(
        lhs,
        rhs.T,
        scale_a=lhs_factor,
        scale_b=rhs_factor,
        bias=bias if fused else None,
        out_dtype=dtype if fused else torch.float32,
        use_fast_accum=False,
    )
    if n % 16:
        out = out[:, :n].contiguous()
    if fused:
        return out
    assert bias is not None
    kernels = _kernels(out)
    return (out + bias.float()).to(dtype) if kernels is None else kernels.finish(out, None, None, bias, dtype)


@_operator("token_mean")
def _token_mean(x: Tensor) -> Tensor:
    return (_kernels(x) or reference).token_mean(x)


@_token_mean.register_fake
def _(x):  # type: ignore[no-untyped-def]
    return x.new_empty((1, x.shape[1]), dtype=torch.float32)


@_operator("subtract_mean")
def _subtract_mean(x: Tensor, mean: Tensor) -> Tensor:
    return reference.subtract_mean(x, mean).contiguous()


@_subtract_mean.register_fake
def _(x, mean):  # type: ignore[no-untyped-def]
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_operator("times_matrix")
def _times_matrix(mean: Tensor, matrix: Tensor) -> Tensor:
    return (_kernels(matrix) or reference).times_matrix(mean, matrix)


@_times_matrix.register_fake
def _(mean, matrix):  # type: ignore[no-untyped-def]
    return matrix.new_empty((matrix.shape[0],), dtype=torch.float32)


@_operator("add_outer")
def _add_outer(product: Tensor, left: Tensor, right: Tensor, factor: int, dtype: torch.dtype) -> Tensor:
    return (_kernels(product) or reference).add_outer(product, left, right, factor, dtype)


@_add_outer.register_fake
def _(product, left, right, factor, dtype):  # type: ignore[no-untyped-def]
    return product.new_empty(product.shape, dtype=dtype)


@_operator("patch_columns")
def _patch_columns(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    amax: Optional[Tensor],
    format: str,
    scale_rule: str,
    rows: int,
    columns: int,
    channels: Tensor,
    parts: str,
) -> tuple[Tensor, Tensor]:
    quantizer = Quantizer(format=FORMATS[format], scale_rule=scale_rule)  # type: ignore[arg-type]
    encoded_max = quantizer.scale_rule.encoded_max
    quantized = _rebuild(codes, scales, amax, format, encoded_max, rows, columns)
    patch = reference.patch_columns(x, quantized, quantizer, channels, tuple(parts.split("+")))
    return patch.codes, patch.scales


@_patch_columns.register_fake
def _(x, codes, scales, amax, format, scale_rule, rows, columns, channels, parts):  # type: ignore[no-untyped-def]
    code_shape, scale_shape, scale_dtype = _storage(FORMATS[format], rows, channels.shape[0])
    count = parts.count("+") + 1
    return (
        codes.new_empty((code_shape[0], code_shape[1] * count)),
        codes.new_empty((scale_shape[0], scale_shape[1] * count), dtype=scale_dtype),
    )


@_operator("patch_values")
def _patch_values(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    amax: Optional[Tensor],
    format: str,
    encoded_max: float,
    rows: int,
    columns: int,
    channels: Tensor,
) -> tuple[Tensor, Tensor]:
    return reference.patch_values(x, _rebuild(codes, scales, amax, format, encoded_max, rows, columns), channels)


@_patch_values.register_fake
def _(x, codes, scales, amax, format, encoded_max, rows, columns, channels):  # type: ignore[no-untyped-def]
    shape = (rows, channels.shape[0])
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.float32)


@_operator("concatenate")
def _concatenate(
    left_codes: Tensor, left_scales: Tensor, right_codes: Tensor, right_scales: Tensor
) -> tuple[Tensor, Tensor]:
    scales = torch.cat([left_scales.view(torch.uint8), right_scales.view(torch.uint8)], dim=1)
    return torch.cat([left_codes, right_codes], dim=1), scales.view(left_scales.dtype)


@_concatenate.register_fake
def _(left_codes, left_scales, right_codes, right_scales):  # type: ignore[no-untyped-def]
    return (
        left_codes.new_empty((left_codes.shape[0], left_codes.shape[1] + right_codes.shape[1])),
        left_scales.new_empty((left_scales.shape[0], left_scales.shape[1] + right_scales.shape[1])),
    )


@_operator("channel_scores")
def _channel_scores(x: Tensor, x_decoded: Tensor, w: Tensor, w_decoded: Tensor, score: str) -> Tensor:
    return reference.channel_scores(x, x_decoded, w, w_decoded, score)


@_channel_scores.register_fake
def _(x, x_decoded, w, w_decoded, score):  # type: ignore[no-untyped-def]
    return x.new_empty((x.shape[1],), dtype=torch.float32)


@_operator("select_channels")
def _select_channels(scores: Tensor, count: int) -> Tensor:
    return reference.select_channels(scores, count)


@_select_channels.register_fake
def _(scores, count):  # type: ignore[no-untyped-def]
    return scores.new_empty((count,), dtype=torch.int64)
