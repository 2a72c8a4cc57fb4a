"""The operators on FP4 tensors, registered: what they do, and what they give without data.

They take and give plain tensors, so what ``ops`` deals in is taken apart before them and put together after. All are
pure except for ``draw_seed``.
"""

import dataclasses
import functools
from typing import Any, Optional

import torch
from torch import Tensor

from lightning_fp4 import backends, blackwell, reference
from lightning_fp4.dispatch import operator
from lightning_fp4.formats import E4M3, FORMATS, BlockFormat
from lightning_fp4.quantizer import Quantizer, Rounding
from lightning_fp4.tensor import FP4Operand, FP4Tensor, Patch, Units

# ----------------------------------------------------------------------------------------------------------------------
# Quantisers, matrices and patches as the arguments and results of operators
# ----------------------------------------------------------------------------------------------------------------------


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


def storage_of(x: FP4Tensor) -> tuple[Tensor, Tensor, Tensor | None, str, float]:
    """A matrix but for its shape, as an operator's arguments."""
    return x.codes, x.scales, x.amax, x.format.name, x.encoded_max


def spec(quantizer: Quantizer) -> str:
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


def take_apart(patch: Patch | None) -> tuple[Tensor | None, str]:
    """A patch as an operator's arguments."""
    return (None, "") if patch is None else (patch.channels, "+".join(patch.parts))


def _patch(channels: Tensor | None, parts: str) -> Patch | None:
    """The patch that :func:`take_apart` took apart."""
    if channels is None:
        return None
    names: Any = tuple(parts.split("+"))
    return Patch(channels=channels, parts=names)


def assemble(parts: tuple[Tensor, ...], quantizer: Quantizer, units: Units | None, *shape: int) -> Any:
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


# ----------------------------------------------------------------------------------------------------------------------
# The work itself, by the kernels or the reference: for operators, and for eager calls without them
# ----------------------------------------------------------------------------------------------------------------------


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


def one_form(
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
    """What :func:`ops.quantize` returns; ``pool`` is for the kernels."""
    kernels = backends.kernels_for(x)
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


def both_forms(
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
    """What :func:`ops.quantize_both` returns; ``pool`` is for the kernels."""
    kernels = backends.kernels_for(x)
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
    if spec(rows) == spec(columns) and block_rows == block_columns and not hadamard and seed is None:
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


def decoded_form(quantized: FP4Tensor, units: Units) -> FP4Operand:
    """What :func:`ops.operand` returns."""
    kernels = backends.kernels_for(quantized.codes)
    return (reference if kernels is None or units == "fp32" else kernels).operand(quantized, units)


def _multiplied(
    lhs: Tensor,
    lhs_factor: Tensor | None,
    rhs: Tensor,
    rhs_factor: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """What :func:`ops.gemm` does with decoded operands."""
    m, k, n = *lhs.shape, rhs.shape[0]
    if lhs.is_cuda and lhs.dtype is torch.float8_e4m3fn and m * k * n:
        return _fp8_gemm(lhs, lhs_factor, rhs, rhs_factor, bias, dtype)
    a = FP4Operand(values=lhs, factor=lhs_factor, shape=(m, k))
    b = FP4Operand(values=rhs, factor=rhs_factor, shape=(n, k))
    kernels = backends.kernels_for(lhs)
    if kernels is not None and m * k * n and (lhs_factor is None) == (rhs_factor is None):
        return kernels.finish(reference.sums(a, b), lhs_factor, rhs_factor, bias, dtype)
    return reference.multiply(a, b, bias).to(dtype)


def product(
    lhs: FP4Tensor | FP4Operand, rhs: FP4Tensor | FP4Operand, bias: Tensor | None, dtype: torch.dtype, units: Units
) -> Tensor:
    """What :func:`ops.gemm` does, decoding included."""
    a, b = (m if isinstance(m, FP4Operand) else decoded_form(m, units) for m in (lhs, rhs))
    assert a.units == b.units == units
    return _multiplied(a.values, a.factor, b.values, b.factor, bias, dtype)


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
    kernels = backends.kernels_for(out)
    return (out + bias.float()).to(dtype) if kernels is None else kernels.finish(out, None, None, bias, dtype)


# ----------------------------------------------------------------------------------------------------------------------
# The operators
# ----------------------------------------------------------------------------------------------------------------------


@operator("draw_seed", mutates=("rng_state",))
def draw_seed(rng_state: Tensor) -> Tensor:
    kernels = backends.kernels_for(rng_state)
    if kernels is not None:
        return kernels.draw_seed(rng_state)
    seed = rng_state.clone()
    rng_state[1:].add_(1)
    return seed


@draw_seed.register_fake
def _(rng_state: Tensor) -> Tensor:
    return torch.empty_like(rng_state)


@operator("quantize")
def quantize(
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
    form = one_form(x, *arguments)
    return _parts(x, form)


@quantize.register_fake
def _(  # type: ignore[no-untyped-def]
    x, format, rounding, scale_rule, hadamard, transposed, seed, stream, units="", mean=None, channels=None, parts=""
):  # fmt: skip
    rows, columns = (x.shape[1], x.shape[0]) if transposed else (x.shape[0], x.shape[1])
    if hadamard:
        columns = (columns + hadamard - 1) // hadamard * hadamard
    quantizer = _parse(f"{format}/{rounding}/{scale_rule}")
    return _fake_parts(x, quantizer, units, rows, columns, _patch(channels, parts))


@operator("quantize_both")
def quantize_both(
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
    forms = both_forms(
        x, _parse(rows), _parse(columns), hadamard or None, seed, streams, units, mean, patch, pool=False
    )  # fmt: skip
    row_parts, column_parts = (_parts(x, form) for form in forms)
    if column_parts[2].untyped_storage().data_ptr() == row_parts[2].untyped_storage().data_ptr():
        column_parts = (*column_parts[:2], column_parts[2].clone())  # an operator's results may not share memory
    return (*row_parts, *column_parts)


@quantize_both.register_fake
def _(  # type: ignore[no-untyped-def]
    x, rows, columns, hadamard, seed, row_stream, column_stream, row_units, column_units, mean=None, channels=None,
    parts="",
):  # fmt: skip
    tokens, features = x.shape
    length = (tokens + hadamard - 1) // hadamard * hadamard if hadamard else tokens
    by_rows = _fake_parts(x, _parse(rows), row_units, tokens, features, _patch(channels, parts))
    return (*by_rows, *_fake_parts(x, _parse(columns), column_units, features, length))


@operator("dequantize")
def dequantize(
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
    kernels = backends.kernels_for(codes)
    if kernels is not None and dtype in (torch.float32, torch.bfloat16, torch.float16):
        return kernels.dequantize(quantized, dtype)
    return reference.dequantize(quantized).to(dtype, copy=True)


@dequantize.register_fake
def _(codes, scales, amax, format, encoded_max, rows, columns, dtype):  # type: ignore[no-untyped-def]
    return codes.new_empty((rows, columns), dtype=dtype)


@operator("quantization_sums")
def quantization_sums(x: Tensor, spec: str, seed: Optional[Tensor]) -> Tensor:
    quantizer, kernels = _parse(spec), backends.kernels_for(x)
    if kernels is not None:
        return kernels.quantization_sums(x, quantizer, seed=seed)
    bits = None
    if seed is not None:
        padded = x.shape[2] + -x.shape[2] % quantizer.format.block[1]
        bits = reference.random_bytes(x.shape[1], padded, seed, 0)
    return reference.quantization_sums(x, quantizer, random_bits=bits)


@quantization_sums.register_fake
def _(x, spec, seed):  # type: ignore[no-untyped-def]
    return x.new_empty((x.shape[0], len(reference.QUANTIZATION_SUMS)), dtype=torch.float64)


@operator("tensor_sums")
def tensor_sums(x: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    return (backends.kernels_for(x) or reference).tensor_sums(x, top_k)


@tensor_sums.register_fake
def _(x, top_k):  # type: ignore[no-untyped-def]
    sums = x.new_empty((x.shape[0], len(reference.TENSOR_SUMS)), dtype=torch.float64)
    return sums, x.new_empty((x.shape[0], min(top_k, x.shape[2])), dtype=torch.int64)


@operator("pre_softmax_max")
def pre_softmax_max(query: Tensor, key: Tensor, scale: Optional[float], is_causal: bool) -> Tensor:
    kernels = backends.kernels_for(query)
    chosen = reference if kernels is None or not kernels.reads_heads(query, key) else kernels
    return chosen.pre_softmax_max(query, key, scale=scale, is_causal=is_causal)


@pre_softmax_max.register_fake
def _(query, key, scale, is_causal):  # type: ignore[no-untyped-def]
    return query.new_empty((), dtype=torch.float32)


@operator("operand")
def operand(
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
    decoded = decoded_form(quantized, units)  # type: ignore[arg-type]
    return decoded.values, codes.new_empty(0, 0, dtype=torch.float32) if decoded.factor is None else decoded.factor


@operand.register_fake
def _(codes, scales, amax, format, encoded_max, rows, columns, units):  # type: ignore[no-untyped-def]
    values = codes.new_empty((codes.shape[0], codes.shape[1] * 2), dtype=_OPERAND_DTYPES[units])
    return values, codes.new_empty((0, 0) if amax is None else amax.shape, dtype=torch.float32)


@operator("multiply")
def multiply(
    lhs: Tensor,
    lhs_factor: Optional[Tensor],
    rhs: Tensor,
    rhs_factor: Optional[Tensor],
    bias: Optional[Tensor],
    dtype: torch.dtype,
) -> Tensor:
    return _multiplied(lhs, lhs_factor, rhs, rhs_factor, bias, dtype)


@multiply.register_fake
def _(lhs, lhs_factor, rhs, rhs_factor, bias, dtype):  # type: ignore[no-untyped-def]
    return lhs.new_empty((lhs.shape[0], rhs.shape[0]), dtype=dtype)


@operator("multiply_packed")
def multiply_packed(
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


@multiply_packed.register_fake
def _(  # type: ignore[no-untyped-def]
    lhs_codes, lhs_scales, lhs_amax, lhs_format, lhs_encoded_max, rhs_codes, rhs_scales, rhs_amax, rhs_format,
    rhs_encoded_max, columns, bias, dtype,
):  # fmt: skip
    return lhs_codes.new_empty((lhs_codes.shape[0], rhs_codes.shape[0]), dtype=dtype)


@operator("token_mean")
def token_mean(x: Tensor) -> Tensor:
    return (backends.kernels_for(x) or reference).token_mean(x)


@token_mean.register_fake
def _(x):  # type: ignore[no-untyped-def]
    return x.new_empty((1, x.shape[1]), dtype=torch.float32)


@operator("subtract_mean")
def subtract_mean(x: Tensor, mean: Tensor) -> Tensor:
    return reference.subtract_mean(x, mean).contiguous()


@subtract_mean.register_fake
def _(x, mean):  # type: ignore[no-untyped-def]
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@operator("times_matrix")
def times_matrix(mean: Tensor, matrix: Tensor) -> Tensor:
    return (backends.kernels_for(matrix) or reference).times_matrix(mean, matrix)


@times_matrix.register_fake
def _(mean, matrix):  # type: ignore[no-untyped-def]
    return matrix.new_empty((matrix.shape[0],), dtype=torch.float32)


@operator("add_outer")
def add_outer(product: Tensor, left: Tensor, right: Tensor, factor: int, dtype: torch.dtype) -> Tensor:
    return (backends.kernels_for(product) or reference).add_outer(product, left, right, factor, dtype)


@add_outer.register_fake
def _(product, left, right, factor, dtype):  # type: ignore[no-untyped-def]
    return product.new_empty(product.shape, dtype=dtype)


@operator("patch_columns")
def patch_columns(
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


@patch_columns.register_fake
def _(x, codes, scales, amax, format, scale_rule, rows, columns, channels, parts):  # type: ignore[no-untyped-def]
    code_shape, scale_shape, scale_dtype = _storage(FORMATS[format], rows, channels.shape[0])
    count = parts.count("+") + 1
    return (
        codes.new_empty((code_shape[0], code_shape[1] * count)),
        codes.new_empty((scale_shape[0], scale_shape[1] * count), dtype=scale_dtype),
    )


@operator("patch_values")
def patch_values(
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


@patch_values.register_fake
def _(x, codes, scales, amax, format, encoded_max, rows, columns, channels):  # type: ignore[no-untyped-def]
    shape = (rows, channels.shape[0])
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.float32)


@operator("concatenate")
def concatenate(
    left_codes: Tensor, left_scales: Tensor, right_codes: Tensor, right_scales: Tensor
) -> tuple[Tensor, Tensor]:
    scales = torch.cat([left_scales.view(torch.uint8), right_scales.view(torch.uint8)], dim=1)
    return torch.cat([left_codes, right_codes], dim=1), scales.view(left_scales.dtype)


@concatenate.register_fake
def _(left_codes, left_scales, right_codes, right_scales):  # type: ignore[no-untyped-def]
    return (
        left_codes.new_empty((left_codes.shape[0], left_codes.shape[1] + right_codes.shape[1])),
        left_scales.new_empty((left_scales.shape[0], left_scales.shape[1] + right_scales.shape[1])),
    )


@operator("channel_scores")
def channel_scores(x: Tensor, x_decoded: Tensor, w: Tensor, w_decoded: Tensor, score: str) -> Tensor:
    return reference.channel_scores(x, x_decoded, w, w_decoded, score)


@channel_scores.register_fake
def _(x, x_decoded, w, w_decoded, score):  # type: ignore[no-untyped-def]
    return x.new_empty((x.shape[1],), dtype=torch.float32)


@operator("select_channels")
def select_channels(scores: Tensor, count: int) -> Tensor:
    return reference.select_channels(scores, count)


@select_channels.register_fake
def _(scores, count):  # type: ignore[no-untyped-def]
    return scores.new_empty((count,), dtype=torch.int64)
