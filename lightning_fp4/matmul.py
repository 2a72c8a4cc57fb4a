"""One matrix product as a recipe says: centre, rotate, quantise, multiply, patch. Each product is ``lhs @ rhs.T``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fp4 import backends, ops
from lightning_fp4.quantizer import Quantizer, Rounding
from lightning_fp4.recipes.base import Gemm, HotChannels
from lightning_fp4.tensor import FP4Operand, FP4Tensor, Patch, PatchPart, Units

Matrix = FP4Tensor | FP4Operand | Tensor
"""A GEMM operand: quantised, quantised and decoded for the GEMM's units, or a plain tensor in high precision."""


@dataclass(frozen=True, kw_only=True)
class Operand:
    """What happens to one side of a GEMM before it is multiplied.

    Args:
        quantizer: how it is quantised, ``None`` to leave it as it is.
        hadamard: group length of the rotation along the contraction axis.
        stream: the random stream that stochastic rounding draws from; each operand of a layer has its own.
        units: what it is decoded for on the spot; ``None`` to keep it packed.
    """

    quantizer: Quantizer | None
    hadamard: int | None
    stream: int
    units: Units | None = None

    @staticmethod
    def lhs(gemm: Gemm | None, stream: int, units: Units | None = None) -> Operand:
        """The left side of a GEMM."""
        return Operand(
            quantizer=gemm.lhs if gemm else None, hadamard=gemm.hadamard if gemm else None, stream=stream, units=units
        )

    @staticmethod
    def rhs(gemm: Gemm | None, stream: int, units: Units | None = None) -> Operand:
        """The right side of a GEMM."""
        return Operand(
            quantizer=gemm.rhs if gemm else None, hadamard=gemm.hadamard if gemm else None, stream=stream, units=units
        )

    @property
    def stochastic(self) -> bool:
        """Whether it needs random bits."""
        return self.quantizer is not None and self.quantizer.rounding is Rounding.STOCHASTIC


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of a GEMM, ready to be multiplied.

    Args:
        matrix: quantised, or plain.
        mean: what centring took out of each token as the product uses it, float32 ``[1, features]``; ``None`` if not
            centred.
        center: the mean that was taken out of each token before it was quantised; ``None`` if not centred.
        source: the tensor that was quantised, with its mean; ``None`` where nobody will ask for it.
    """

    matrix: Matrix
    mean: Tensor | None = None
    center: Tensor | None = None
    source: Tensor | None = None

    @property
    def rest(self) -> Tensor:
        """What was quantised, without its mean."""
        assert self.source is not None
        return self.source if self.center is None else ops.subtract_mean(self.source, self.center)


def quantize_rows(x: Tensor, operand: Operand, seed: Tensor | None = None, patch: Patch | None = None) -> Side:
    """The operand whose rows are the rows of ``x`` ``[rows, columns]``; the product will contract over columns.

    ``patch`` is appended to an operand that is decoded at once.
    """
    if operand.quantizer is None:
        return Side(matrix=x)
    return _rows(x, _mean(x, operand.quantizer), operand, seed, patch)


def quantize_columns(x: Tensor, operand: Operand, seed: Tensor | None = None) -> Side:
    """The operand whose rows are the columns of ``x`` ``[rows, columns]``; the product will contract over rows."""
    if operand.quantizer is None:
        return Side(matrix=x.T)
    return _columns(x, _mean(x, operand.quantizer), operand, seed)


def quantize_both(
    x: Tensor, rows: Operand, columns: Operand, seed: Tensor | None = None, patch: Patch | None = None
) -> tuple[Side, Side]:
    """Both operands that one tensor feeds: :func:`quantize_rows` and :func:`quantize_columns` of it."""
    if rows.quantizer is None or columns.quantizer is None or rows.hadamard is not None:
        return quantize_rows(x, rows, seed, patch), quantize_columns(x, columns, seed)
    if rows.quantizer.center != columns.quantizer.center:
        return quantize_rows(x, rows, seed, patch), quantize_columns(x, columns, seed)
    mean = _mean(x, rows.quantizer)
    by_rows, by_columns = ops.quantize_both(
        x,
        rows.quantizer,
        columns.quantizer,
        hadamard=columns.hadamard,
        seed=seed,
        streams=(rows.stream, columns.stream),
        units=(rows.units, columns.units),
        mean=mean,
        patch=patch,
    )
    return (
        Side(matrix=by_rows, mean=_round_mean(mean, rows.quantizer), center=mean, source=x),
        Side(matrix=by_columns, mean=_round_mean(mean, columns.quantizer)),
    )


def _mean(x: Tensor, quantizer: Quantizer) -> Tensor | None:
    return None if quantizer.center is None else ops.token_mean(x)


def _rows(x: Tensor, mean: Tensor | None, operand: Operand, seed: Tensor | None, patch: Patch | None) -> Side:
    assert operand.quantizer is not None
    matrix = ops.quantize(
        x,
        operand.quantizer,
        hadamard=operand.hadamard,
        seed=seed,
        stream=operand.stream,
        units=operand.units,
        mean=mean,
        patch=patch,
    )
    return Side(matrix=matrix, mean=_round_mean(mean, operand.quantizer), center=mean, source=x)


def _columns(x: Tensor, mean: Tensor | None, operand: Operand, seed: Tensor | None) -> Side:
    assert operand.quantizer is not None
    matrix = ops.quantize(
        x,
        operand.quantizer,
        hadamard=operand.hadamard,
        transposed=True,
        seed=seed,
        stream=operand.stream,
        units=operand.units,
        mean=mean,
    )
    return Side(matrix=matrix, mean=_round_mean(mean, operand.quantizer))


def _round_mean(mean: Tensor | None, quantizer: Quantizer) -> Tensor | None:
    """The mean as the product will use it: exact, or (Averis' own form) in four bits, rounded to nearest."""
    if mean is None or quantizer.center is None or quantizer.center.mean == "exact":
        return mean
    rounded = ops.quantize(mean, quantizer.plain)
    assert isinstance(rounded, FP4Tensor)
    return ops.dequantize(rounded)


def multiply(
    lhs: Side,
    rhs: Side,
    bias: Tensor | None,
    compute_dtype: torch.dtype,
    dtype: torch.dtype | None = None,
    units: Units | None = None,
) -> Tensor:
    """``lhs @ rhs.T + bias`` without what centring took out.

    Two quantised operands go through the FP4 GEMM. If one is a plain tensor, the other is decoded and the product is
    an ordinary one in ``compute_dtype``.

    Args:
        lhs: ``[M, K]``.
        rhs: ``[N, K]``.
        bias: ``[N]`` or ``None``.
        compute_dtype: operand dtype of an ordinary product.
        dtype: of the result, ``compute_dtype`` if not given.
        units: of the FP4 GEMM, see :func:`ops.gemm`.
    """
    dtype = dtype or compute_dtype
    if not isinstance(lhs.matrix, Tensor) and not isinstance(rhs.matrix, Tensor):
        return ops.gemm(lhs.matrix, rhs.matrix, bias, dtype, units)
    a, b = (_in_high_precision(side.matrix, compute_dtype) for side in (lhs, rhs))
    product = torch.nn.functional.linear(a, b, None if bias is None else bias.to(compute_dtype))
    return _in_dtype(product, dtype)


def _in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)`` where that does something.

    PyTorch 2.11 compiles an autograd function whose output is a ``to`` without effect to one without gradients.
    """
    return x if x.dtype is dtype else x.to(dtype)


def _in_high_precision(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    assert not isinstance(matrix, FP4Operand), "decoded for units that do not multiply it"
    return ops.dequantize(matrix, dtype) if isinstance(matrix, FP4Tensor) else matrix.to(dtype)


def mean_product(lhs: Side, rhs: Side, weight: Tensor | None, quantizer: Quantizer | None) -> Tensor | None:
    """What the mean of ``lhs`` adds to every row of ``lhs @ rhs.T``: float32 ``[N]``, ``None`` if it is not centred.

    Args:
        lhs: ``[M, K]``.
        rhs: ``[N, K]``.
        weight: ``rhs`` before it was quantised, for exact means.
        quantizer: of ``lhs``.
    """
    if lhs.mean is None:
        return None
    assert quantizer is not None
    assert quantizer.center is not None
    if quantizer.center.mean == "exact":
        assert weight is not None
        return ops.times_matrix(lhs.mean, weight)
    return ops.times_matrix(lhs.mean, _in_high_precision(rhs.matrix, torch.float32))


def add_mean_outer(product: Tensor, lhs: Side, rhs: Side, tokens: int, dtype: torch.dtype) -> Tensor:
    """``product + tokens * lhs.mean.T @ rhs.mean`` in ``dtype``: what the means add to a product over ``tokens``.

    The cross terms, a mean times the rest, vanish because the rest sums to zero over the tokens.
    """
    if lhs.mean is None or rhs.mean is None:
        return _in_dtype(product, dtype)
    return ops.add_outer(product, lhs.mean, rhs.mean, tokens, dtype)


def decoded_for(units: Units | None) -> Units | None:
    """What operands that ``units`` multiply at once are decoded for; ``None`` if they stay packed."""
    return None if units == "fp4" else units


def needs_packed(gemm: Gemm | None, channels: Tensor | None) -> bool:
    """Whether the operands of ``gemm`` have to stay packed until it runs, whatever units, with these hot channels.

    A patch with a product of its own is made from both operands' codes, and a mean in four bits meets the right operand
    as it decodes exactly, which units that round once more would not show.
    """
    if gemm is None or gemm.lhs is None:
        return False
    left, _ = patches_of(gemm, channels)
    is_apart = left is not None and gemm.hot_channels is not None and gemm.hot_channels.mode != "single"
    return is_apart or (gemm.lhs.center is not None and gemm.lhs.center.mean == "fp4")


_PATCH_PARTS: dict[str, tuple[tuple[PatchPart, ...], tuple[PatchPart, ...]]] = {
    "both": (("residual", "value"), ("value", "residual")),
    "activations": (("residual",), ("value",)),
    "weights": (("value",), ("residual",)),
}
"""Columns that the left and right operands gain, by ``HotChannels.operands``."""


def patches_of(gemm: Gemm | None, channels: Tensor | None) -> tuple[Patch | None, Patch | None]:
    """The patches of both operands, ``None`` without hot channels."""
    if gemm is None or gemm.hot_channels is None or channels is None or channels.shape[0] == 0:
        return None, None
    left, right = (Patch(channels=channels, parts=parts) for parts in _PATCH_PARTS[gemm.hot_channels.operands])
    return left, right


def patched_multiply(
    lhs: Side,
    rhs: Side,
    gemm: Gemm | None,
    channels: Tensor | None,
    bias: Tensor | None,
    compute_dtype: torch.dtype,
    units: Units | None = None,
) -> Tensor:
    """:func:`multiply` with the errors of the hot ``channels`` (int64 ``[k]`` or ``None``) patched as ``gemm`` says."""
    left, right = patches_of(gemm, channels)
    if left is None or right is None or isinstance(lhs.matrix, FP4Operand):  # decoded operands hold their patches
        return multiply(lhs, rhs, bias, compute_dtype, units=units)
    assert gemm is not None
    assert gemm.lhs is not None
    assert gemm.rhs is not None
    assert gemm.hot_channels is not None
    a, b, hot = lhs.matrix, rhs.matrix, gemm.hot_channels
    assert isinstance(a, FP4Tensor)
    assert isinstance(b, FP4Tensor)
    if hot.mode == "high_precision":
        product = ops.gemm(a, b, bias, torch.float32, units)
        plain = _plain_patch(lhs.rest, a, rhs.rest, b, hot, left.channels)
        patch = torch.nn.functional.linear(*(side.to(compute_dtype) for side in plain))
        return _in_dtype(product + patch, compute_dtype)
    left_patch = ops.patch_columns(lhs.rest, a, gemm.lhs, left)
    right_patch = ops.patch_columns(rhs.rest, b, gemm.rhs, right)
    if hot.mode == "single":
        left_columns, right_columns = ops.concatenate(a, left_patch), ops.concatenate(b, right_patch)
        return ops.gemm(left_columns, right_columns, bias, compute_dtype, units)
    product = ops.gemm(a, b, bias, torch.float32, units)
    return _in_dtype(product + ops.gemm(left_patch, right_patch, None, torch.float32, units), compute_dtype)


def _plain_patch(
    x: Tensor, x_quantized: FP4Tensor, w: Tensor, w_quantized: FP4Tensor, hot: HotChannels, channels: Tensor
) -> tuple[Tensor, Tensor]:
    """The factors of the patch in float32: residuals times decoded values, as wide as ``hot.operands`` asks."""
    x_residual, x_value = ops.patch_values(x, x_quantized, channels)
    w_residual, w_value = ops.patch_values(w, w_quantized, channels)
    if hot.operands == "activations":
        return x_residual, w_value
    if hot.operands == "weights":
        return x_value, w_residual
    return torch.cat([x_residual, x_value], dim=1), torch.cat([w_value, w_residual], dim=1)


def channel_scores(x: Tensor, w: Tensor, gemm: Gemm) -> Tensor:
    """How much the quantisation errors of each channel matter in ``x @ w.T``, by the score of ``gemm.hot_channels``.

    Args:
        x: ``[tokens, K]``.
        w: ``[N, K]``.
        gemm: what quantises them to nearest; it has hot channels.

    Returns:
        float32 ``[K]``, larger is hotter.
    """
    assert gemm.hot_channels is not None
    sides = []
    for matrix, quantizer in ((x, gemm.lhs), (w, gemm.rhs)):
        assert quantizer is not None
        sides.append(quantize_rows(matrix, Operand(quantizer=quantizer.nearest, hadamard=None, stream=0)))
    lhs, rhs = sides
    assert isinstance(lhs.matrix, FP4Tensor)
    assert isinstance(rhs.matrix, FP4Tensor)
    return ops.channel_scores(lhs.rest, lhs.matrix, w, rhs.matrix, gemm.hot_channels.score)


def units_of(gemm: Gemm | None, device: torch.device) -> Units | None:
    """The units that multiply the operands of this GEMM; ``None`` if they are not both quantised."""
    if gemm is None or gemm.lhs is None or gemm.rhs is None:
        return None
    return backends.gemm_path(device, gemm.lhs, gemm.rhs, gemm.units)


def describe(gemm: Gemm | None, device: torch.device) -> str:
    """The units that :func:`multiply` uses for this GEMM, as reports name them."""
    units = units_of(gemm, device)
    if units is None:
        return "high_precision"
    assert gemm is not None
    exact = backends.is_exact(units, gemm.lhs, gemm.rhs)
    emulated = " emulated" if units == "fp8" and device.type != "cuda" else ""
    return f"{units}{emulated}{'' if exact else ' (one extra rounding)'}"
