"""The operations on FP4 tensors that the package calls.

Each is an operator of ``torch.library``, or in eager mode, where nobody watches the operators go by, what it does.
"""

import torch
from torch import Tensor

from lightning_fp4 import _operators, backends, reference
from lightning_fp4._operators import assemble, both_forms, decoded_form, one_form, product, spec, storage_of, take_apart
from lightning_fp4.dispatch import PLAIN, is_unobserved, outside_autocast
from lightning_fp4.quantizer import Quantizer, Rounding
from lightning_fp4.tensor import FP4Operand, FP4Tensor, Patch, Units


def draw_seed(rng_state: Tensor) -> Tensor:
    """Take the next seed and advance the state.

    Args:
        rng_state: int64 ``[2]``, key and step; the step grows by one.

    Returns:
        int64 ``[2]``, key and the step before.
    """
    return _operators.draw_seed(rng_state)


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
    channels, names_of_parts = take_apart(patch)
    if is_unobserved((x, seed, mean, channels)):
        return outside_autocast(x, one_form, x, quantizer, hadamard, transposed, seed, stream, units, mean, patch)
    rows, columns = (x.shape[1], x.shape[0]) if transposed else (x.shape[0], x.shape[1])
    names = (quantizer.format.name, quantizer.rounding.value, quantizer.scale_rule.value)
    parts = _operators.quantize(
        x, *names, hadamard or 0, transposed, seed, stream, units or "", mean, channels, names_of_parts
    )  # fmt: skip
    return assemble(parts, quantizer, units, rows, columns if patch is None else parts[0].shape[1])


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
    channels, names_of_parts = take_apart(patch)
    if is_unobserved((x, seed, mean, channels)):
        return outside_autocast(x, both_forms, x, rows, columns, hadamard, seed, streams, units, mean, patch)
    parts = _operators.quantize_both(
        x,
        spec(rows),
        spec(columns),
        hadamard or 0,
        seed,
        *streams,
        *(choice or "" for choice in units),
        mean,
        channels,
        names_of_parts,
    )
    by_rows = assemble(parts[:3], rows, units[0], x.shape[0], x.shape[1] if patch is None else parts[0].shape[1])
    return by_rows, assemble(parts[3:], columns, units[1], x.shape[1], x.shape[0])


def dequantize(x: FP4Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode to ``[rows, columns]`` in ``dtype``."""
    return _operators.dequantize(x.codes, x.scales, x.amax, x.format.name, x.encoded_max, *x.shape, dtype)


def operand(x: FP4Tensor, units: Units) -> FP4Operand:
    """Decode for the units of a GEMM."""
    if is_unobserved((x.codes, x.scales, x.amax)):
        return outside_autocast(x.codes, decoded_form, x, units)
    values, factor = _operators.operand(x.codes, x.scales, x.amax, x.format.name, x.encoded_max, *x.shape, units)
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
    units = units or (decoded[0] if decoded else backends.gemm_path(lhs.codes.device))  # type: ignore[union-attr]
    if units == "fp4":
        assert isinstance(lhs, FP4Tensor)
        assert isinstance(rhs, FP4Tensor)
        return _operators.multiply_packed(*storage_of(lhs), *storage_of(rhs), lhs.shape[1], bias, dtype)
    first, second = (m.values if isinstance(m, FP4Operand) else m.codes for m in (lhs, rhs))
    if is_unobserved((first, second, bias)):
        return outside_autocast(first, product, lhs, rhs, bias, dtype, units)
    a, b = (m if isinstance(m, FP4Operand) else operand(m, units) for m in (lhs, rhs))
    assert a.units == b.units == units
    return _operators.multiply(a.values, a.factor, b.values, b.factor, bias, dtype)


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
    return _operators.quantization_sums(x, spec(quantizer), seed)


def tensor_sums(x: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """What is in each matrix of a stack, in numbers: float64 ``[n, 9]``, and its top channels, int64 ``[n, k]``.

    Args:
        x: float32 ``[n, rows, columns]``, rows and columns 1 or more.
        top_k: number of channels to select, at most.

    Returns:
        Sums, see ``reference.TENSOR_SUMS``, and the channels with the largest sums of magnitudes, largest first.
    """
    return _operators.tensor_sums(x, top_k)


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
    if type(query) in PLAIN and type(key) in PLAIN:
        return _operators.pre_softmax_max(query, key, scale, is_causal)
    return reference.pre_softmax_max(query, key, scale=scale, is_causal=is_causal)  # what a DTensor understands


def token_mean(x: Tensor) -> Tensor:
    """The mean over the rows of ``x`` ``[tokens, features]``: float32 ``[1, features]``; zero without tokens."""
    return _operators.token_mean(x)


def subtract_mean(x: Tensor, mean: Tensor) -> Tensor:
    """``x - mean`` in the dtype of ``x``: what :func:`quantize` with this ``mean`` quantises."""
    return _operators.subtract_mean(x, mean)


def times_matrix(mean: Tensor, matrix: Tensor) -> Tensor:
    """``mean @ matrix.T`` in float32: ``[1, K]`` times ``[N, K]`` is ``[N]``."""
    return _operators.times_matrix(mean, matrix)


def add_outer(product: Tensor, left: Tensor, right: Tensor, factor: int, dtype: torch.dtype) -> Tensor:
    """``product + (factor * left.T) @ right`` rounded once to ``dtype``.

    Args:
        product: float32 ``[M, N]``.
        left: float32 ``[1, M]``.
        right: float32 ``[1, N]``.
        factor: a count.
        dtype: of the result.
    """
    return _operators.add_outer(product, left, right, factor, dtype)


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
    codes, scales = _operators.patch_columns(
        x,
        quantized.codes,
        quantized.scales,
        quantized.amax,
        quantized.format.name,
        quantizer.scale_rule.value,
        *quantized.shape,
        *take_apart(patch),
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
    return _operators.patch_values(
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
    codes, scales = _operators.concatenate(left.codes, left.scales, right.codes, right.scales)
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
    return _operators.channel_scores(x, decoded[0], w, decoded[1], score)


def select_channels(scores: Tensor, count: int) -> Tensor:
    """The ``count`` channels with the highest scores, ascending: int64 ``[count]``."""
    return _operators.select_channels(scores, count)
