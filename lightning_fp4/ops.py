"""The operations on FP4 tensors, as PyTorch operators: the only place that chooses which implementation runs.

Each is registered with ``torch.library``, opaque to ``torch.compile`` (a compiler that fused these lines could change
their rounding), pure except for :func:`draw_seed`, and unaffected by autocast.
"""

import functools
from collections.abc import Callable
from typing import Literal, Optional

import torch
from torch import Tensor
from torch.library import CustomOpDef

from lightning_fp4 import reference
from lightning_fp4.formats import E2M1, E4M3, FORMATS, BlockFormat
from lightning_fp4.quantizer import Quantizer, Rounding
from lightning_fp4.tensor import FP4Tensor

GemmPath = Literal["fp32", "bf16"]


def gemm_path(device: torch.device) -> GemmPath:
    """Which units multiply decoded FP4 operands here: ``"bf16"`` on a GPU, ``"fp32"`` on a CPU, both exact."""
    return "bf16" if device.type == "cuda" else "fp32"


def backend(device: torch.device) -> Literal["reference"]:
    """Which implementation quantises on this device."""
    return "reference"


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
) -> FP4Tensor:
    """Quantise a matrix, or its transpose, along the last axis.

    Args:
        x: ``[rows, columns]``, float32, bfloat16 or float16.
        quantizer: how.
        hadamard: rotate groups of this length along the quantised axis first.
        transposed: quantise ``x.T`` in place of ``x``.
        seed: int64 ``[2]`` from :func:`draw_seed`; needed by stochastic rounding only.
        stream: which of the independent random streams of this seed to use.

    Raises:
        ValueError: if stochastic rounding is asked for without a seed.
    """
    if quantizer.rounding is Rounding.STOCHASTIC and seed is None:
        raise ValueError("`quantize` with stochastic rounding needs a `seed`, an int64 tensor [key, step].")
    rows, columns = (x.shape[1], x.shape[0]) if transposed else (x.shape[0], x.shape[1])
    codes, scales, amax = _quantize(
        x,
        quantizer.format.name,
        quantizer.rounding.value,
        quantizer.scale_rule.value,
        hadamard or 0,
        transposed,
        seed if quantizer.rounding is Rounding.STOCHASTIC else None,
        stream,
    )
    return FP4Tensor(
        codes=codes,
        scales=scales,
        amax=amax if quantizer.format.global_scale else None,
        encoded_max=quantizer.scale_rule.scale_max * E2M1.max,
        format=quantizer.format,
        shape=(rows, columns),
    )


def transpose(x: FP4Tensor) -> FP4Tensor:
    """The transpose of a tensor with square blocks, from its codes."""
    codes, scales = _transpose(x.codes, x.scales, x.format.name, *x.shape)
    return FP4Tensor(
        codes=codes,
        scales=scales,
        amax=x.amax,
        encoded_max=x.encoded_max,
        format=x.format,
        shape=(x.shape[1], x.shape[0]),
    )


def dequantize(x: FP4Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode to ``[rows, columns]`` in ``dtype``."""
    return _dequantize(x.codes, x.scales, x.amax, x.format.name, x.encoded_max, *x.shape, dtype)


def gemm(lhs: FP4Tensor, rhs: FP4Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``lhs @ rhs.T + bias``, summed in float32 and rounded once to ``dtype``: ``[lhs rows, rhs rows]``."""
    assert lhs.shape[1] == rhs.shape[1]
    return _gemm(
        lhs.codes,
        lhs.scales,
        lhs.amax,
        lhs.format.name,
        lhs.encoded_max,
        rhs.codes,
        rhs.scales,
        rhs.amax,
        rhs.format.name,
        rhs.encoded_max,
        bias,
        lhs.shape[0],
        rhs.shape[0],
        lhs.shape[1],
        dtype,
    )


def center(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split ``x`` ``[tokens, features]`` into the rest, in its dtype, and the mean, float32 ``[1, features]``."""
    return _center(x)


def times_matrix(mean: Tensor, matrix: Tensor) -> Tensor:
    """``mean @ matrix.T`` in float32: ``[1, K]`` times ``[N, K]`` is ``[N]``."""
    return _times_matrix(mean, matrix)


PatchParts = tuple[Literal["residual", "value"], ...]


def patch_columns(
    x: Tensor, quantized: FP4Tensor, quantizer: Quantizer, channels: Tensor, parts: PatchParts
) -> FP4Tensor:
    """The columns that take back the errors of ``channels``, with the global scale of ``quantized``.

    Args:
        x: ``[rows, columns]``, what was quantised.
        quantized: the result.
        quantizer: how.
        channels: int64 ``[k]``.
        parts: which columns, in which order: the ``"residual"`` that quantising left, the ``"value"`` itself.

    Returns:
        ``[rows, len(parts) * k]``, each part padded to whole blocks.
    """
    codes, scales = _patch_columns(
        x,
        quantized.codes,
        quantized.scales,
        quantized.amax,
        quantized.format.name,
        quantizer.scale_rule.value,
        *quantized.shape,
        channels,
        "+".join(parts),
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


# ----------------------------------------------------------------------------------------------------------------------
# Registration
# ----------------------------------------------------------------------------------------------------------------------


def _operator(name: str, mutates: tuple[str, ...] = ()) -> Callable[[Callable], CustomOpDef]:
    """Register a function whose first argument is a tensor as ``lightning_fp4::name``, run outside autocast."""

    def register(body: Callable) -> CustomOpDef:
        @functools.wraps(body)
        def outside_autocast(first: Tensor, *args, **kwargs):  # type: ignore[no-untyped-def]
            with torch.autocast(first.device.type, enabled=False):
                return body(first, *args, **kwargs)

        return torch.library.custom_op(f"lightning_fp4::{name}", outside_autocast, mutates_args=mutates)

    return register


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


@_operator("draw_seed", mutates=("rng_state",))
def _draw_seed(rng_state: Tensor) -> Tensor:
    seed = rng_state.clone()
    rng_state[1] += 1
    return seed


@_draw_seed.register_fake
def _(rng_state: Tensor) -> Tensor:
    return torch.empty_like(rng_state)


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
) -> tuple[Tensor, Tensor, Tensor]:
    quantizer = Quantizer(format=FORMATS[format], rounding=Rounding(rounding), scale_rule=scale_rule)  # type: ignore[arg-type]
    matrix = x.T if transposed else x
    columns = matrix.shape[1]
    if hadamard:
        matrix = reference.rotate(matrix, hadamard)
    bits = None
    if seed is not None:
        padded = matrix.shape[1] + -matrix.shape[1] % quantizer.format.block[1]
        bits = reference.random_bytes(matrix.shape[0], padded, seed, stream)
    quantized = reference.quantize(matrix, quantizer, random_bits=bits)
    assert quantized.codes.shape[1] * 2 >= columns
    amax = quantized.amax if quantized.amax is not None else x.new_empty(0, 0, dtype=torch.float32)
    return quantized.codes, quantized.scales, amax


@_quantize.register_fake
def _(x, format, rounding, scale_rule, hadamard, transposed, seed, stream):  # type: ignore[no-untyped-def]
    block_format = FORMATS[format]
    rows, columns = (x.shape[1], x.shape[0]) if transposed else (x.shape[0], x.shape[1])
    if hadamard:
        columns = (columns + hadamard - 1) // hadamard * hadamard
    codes, scales, scale_dtype = _storage(block_format, rows, columns)
    amax = {"tensor": (1, 1), "row": (rows, 1), None: (0, 0)}[block_format.global_scale]
    return (
        x.new_empty(codes, dtype=torch.uint8),
        x.new_empty(scales, dtype=scale_dtype),
        x.new_empty(amax, dtype=torch.float32),
    )


@_operator("transpose")
def _transpose(codes: Tensor, scales: Tensor, format: str, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    quantized = reference.transpose(_rebuild(codes, scales, None, format, 1.0, rows, columns))
    return quantized.codes, quantized.scales


@_transpose.register_fake
def _(codes, scales, format, rows, columns):  # type: ignore[no-untyped-def]
    codes_shape, scales_shape, _ = _storage(FORMATS[format], columns, rows)
    return codes.new_empty(codes_shape), scales.new_empty(scales_shape)


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
    return reference.dequantize(_rebuild(codes, scales, amax, format, encoded_max, rows, columns)).to(dtype, copy=True)


@_dequantize.register_fake
def _(codes, scales, amax, format, encoded_max, rows, columns, dtype):  # type: ignore[no-untyped-def]
    return codes.new_empty((rows, columns), dtype=dtype)


@_operator("gemm")
def _gemm(
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
    bias: Optional[Tensor],
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
) -> Tensor:
    lhs = _rebuild(lhs_codes, lhs_scales, lhs_amax, lhs_format, lhs_encoded_max, m, k)
    rhs = _rebuild(rhs_codes, rhs_scales, rhs_amax, rhs_format, rhs_encoded_max, n, k)
    return reference.gemm(lhs, rhs, bias).to(dtype)


@_gemm.register_fake
def _(lhs_codes, *args):  # type: ignore[no-untyped-def]
    m, n, _, dtype = args[-4:]
    return lhs_codes.new_empty((m, n), dtype=dtype)


@_operator("center")
def _center(x: Tensor) -> tuple[Tensor, Tensor]:
    return reference.center(x)


@_center.register_fake
def _(x):  # type: ignore[no-untyped-def]
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty((1, x.shape[1]), dtype=torch.float32)


@_operator("times_matrix")
def _times_matrix(mean: Tensor, matrix: Tensor) -> Tensor:
    return reference.times_matrix(mean, matrix)


@_times_matrix.register_fake
def _(mean, matrix):  # type: ignore[no-untyped-def]
    return matrix.new_empty((matrix.shape[0],), dtype=torch.float32)


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
    encoded_max = quantizer.scale_rule.scale_max * E2M1.max
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
