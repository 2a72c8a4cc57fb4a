"""A recipe's three GEMMs with values rounded to the FP4 grid but multiplied as BF16: fast under ``torch.compile``.

It reads the same :class:`Recipe` as the package and rounds like its reference, with differences that are each far below
the error of FP4 itself: decoded values are rounded to the compute dtype (BF16: 2^-9) before they are multiplied and
before a patch takes their errors; the random bits come from a hash of each element's position and one number a tensor
from ``torch.randint``; and a compiler may reorder float32 operations (a tie between codes, or between the scales of
four over six, may go the other way) and leave out roundings to BF16 in between. ``tests/benchmarks`` holds it to the
package's own layers, and compiled layers to uncompiled ones.

Nothing here makes a quantiser or a recipe while it computes: torch 2.11 cannot trace that, leaves the graph, and then
runs the whole backward pass uncompiled.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fp4.formats import E2M1, E4M3
from lightning_fp4.quantizer import Quantizer, Rounding, ScaleRule
from lightning_fp4.recipes import Gemm, HotChannels, Recipe
from lightning_fp4.tensor import operand_shift

_FLOAT32_MAX = torch.finfo(torch.float32).max


def round_e4m3(x: Tensor, *, up: bool = False) -> Tensor:
    """Round non-negative float32 to E4M3 values (to nearest even, or ``up``), saturating at 448; stays float32."""
    # 2^floor(log2 x), at least 2^-6, and its reciprocal by their bits: a compiler's division may be approximate.
    bits = (x.view(torch.int32) & 0x7F800000).clamp(min=(127 - 6) << 23)
    power, reciprocal = bits.view(torch.float32), (0x7F000000 - bits).view(torch.float32)
    steps = x * (reciprocal * 8)
    return ((torch.ceil(steps) if up else torch.round(steps)) * (power * 0.125)).clamp(max=E4M3.max)


def round_closed(x: Tensor, *, up: bool) -> Tensor:
    """Round non-negative float32 to the closed scales (to nearest with ties up, or ``up``), saturating at 64."""
    bits = x.view(torch.int32) & 0x7F800000
    power = bits.view(torch.float32)  # 2^floor(log2 x)
    mantissa = x * (0x7F000000 - bits).view(torch.float32)
    borders = (1.0, 1.25, 1.5) if up else (1.125, 1.375, 1.75)
    small_borders = (0.0, 2.0**-8, 2.0**-7, 1.5 * 2.0**-7)
    if not up:
        values = (*small_borders, 2.0**-6)
        small_borders = tuple((a + b) / 2 for a, b in itertools.pairwise(values))  # type: ignore[assignment]

    def passed(value: Tensor, border: float) -> Tensor:
        return value > border if up else value >= border

    quarters = sum(passed(mantissa, border).float() * step for border, step in zip(borders, (1, 1, 2), strict=True))
    normal = power * (1 + 0.25 * quarters)
    steps = (2.0**-8, 2.0**-8, 2.0**-8, 2.0**-8)
    small = sum(passed(x, border).float() * step for border, step in zip(small_borders, steps, strict=True))
    return torch.where(x < 2.0**-6, small, normal).clamp(max=64.0)


def _scramble(bits: Tensor) -> Tensor:
    """A bijection of int32 under which every input bit flips every output bit with probability near 1/2.

    Source: ``lowbias32`` of C. Wellons' hash prospector, https://github.com/skeeto/hash-prospector.
    """
    bits = (bits ^ (bits >> 16 & 0xFFFF)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15 & 0x1FFFF)) * (0x846CA68B - 2**32)
    return bits ^ (bits >> 16 & 0xFFFF)


def random_bytes(like: Tensor) -> Tensor:
    """Integers from 0 to 255 as float32 in the shape of ``like``, anew at each call; follows ``torch.manual_seed``.

    ``torch.rand`` compiles to ten rounds of Philox for each element; four multiplications do here.
    """
    seed = torch.randint(-(2**31), 2**31 - 1, (), dtype=torch.int32, device=like.device)
    index = torch.arange(like.numel(), dtype=torch.int32, device=like.device).view(like.shape)
    return (_scramble(_scramble(index) ^ seed) & 0xFF).float()


def round_e2m1(x: Tensor, *, stochastic: bool = False) -> Tensor:
    """Round float32 to E2M1 values, to nearest even or stochastically with eight random bits; saturates at 6."""
    magnitude = x.abs().clamp(max=E2M1.max)
    spacing = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    steps = magnitude * torch.where(magnitude < 2, 2.0, torch.where(magnitude < 4, 1.0, 0.5))
    steps = torch.floor(steps + random_bytes(steps) * (1 / 256)) if stochastic else torch.round(steps)
    return torch.copysign((steps * spacing).clamp(max=E2M1.max), x)


def max_magnitude(x: Tensor) -> Tensor:
    """Largest magnitude, float32 of no dimension."""
    return x.abs().amax().float()


def quantize_dequantize(
    x: Tensor, quantizer: Quantizer, *, axis: int, amax: Tensor | None = None, fp8: bool = False, nearest: bool = False
) -> Tensor:
    """What a matrix becomes by quantising and decoding it.

    Args:
        x: ``[rows, columns]``; both a multiple of the block's sides.
        quantizer: how; NVFP4 formats with a scale per tensor.
        axis: the contraction axis, along which the blocks lie.
        amax: largest magnitude to take for the global scale, of ``x`` if not given.
        fp8: round code value times block scale to E4M3, as FP8 units multiply it.
        nearest: round to nearest even if the quantiser rounds stochastically.

    Returns:
        float32 ``[rows, columns]``.

    Raises:
        ValueError: for sizes that are no multiple of the block.
    """
    block_format = quantizer.format
    assert block_format.global_scale == "tensor"
    rows, columns = block_format.block if axis == 1 else block_format.block[::-1]
    if x.shape[0] % rows or x.shape[1] % columns:
        raise ValueError(f"The fake path needs multiples of {rows}x{columns}, got a matrix {tuple(x.shape)}.")
    values = x.float().reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
    amax = max_magnitude(x) if amax is None else amax
    encoded_max = quantizer.scale_rule.scale_max * E2M1.max
    encode = (encoded_max / amax).clamp(max=_FLOAT32_MAX)
    encode = torch.where((amax == 0) | (encode == 0), 1.0, encode)
    wanted = values.abs().amax(dim=(1, 3), keepdim=True) * (encode * (1.0 / E2M1.max))
    stochastic = quantizer.rounding is Rounding.STOCHASTIC and not nearest

    def codes(scale: Tensor) -> Tensor:
        factor = (1.0 / (scale * (1.0 / encode))).clamp(max=_FLOAT32_MAX)
        return round_e2m1(values * factor, stochastic=stochastic)

    def error(code: Tensor, scale: Tensor) -> Tensor:
        decoded = code * (scale * amax) * (1.0 / encoded_max)
        return (decoded - values).square().sum(dim=(1, 3), keepdim=True)

    scale, *others = _scales(wanted, quantizer.scale_rule)
    code = codes(scale)
    for other in others:
        other_code = codes(other)
        is_better = error(other_code, other) < error(code, scale)
        code, scale = torch.where(is_better, other_code, code), torch.where(is_better, other, scale)
    if fp8:
        shift = operand_shift("fp8", encoded_max)
        product = torch.copysign(round_e4m3((code * scale).abs() * shift), code)
        return (product * (amax * (1.0 / (encoded_max * shift)))).reshape(x.shape)
    return (code * (scale * amax * (1.0 / encoded_max))).reshape(x.shape)


def _scales(wanted: Tensor, rule: ScaleRule) -> list[Tensor]:
    """The scales that a rule tries for each block; the first wins if errors are equal."""
    if not rule.is_closed:
        first = round_e4m3(wanted, up=rule is ScaleRule.UNBIASED)
        return [first, round_e4m3(wanted * 1.5)] if rule is ScaleRule.FOUR_OVER_SIX else [first]
    scales = [round_closed(wanted, up=rule is not ScaleRule.CLOSED)]
    while rule is ScaleRule.CLOSED_BEST and len(scales) < 3:
        scales.append(round_closed(scales[-1] * 1.001, up=True))  # the closed scale after it
    return scales


def rotate_tokens(x: Tensor, matrix: Tensor | None) -> Tensor:
    """``x`` ``[tokens, features]`` with groups of tokens rotated by ``matrix``; the tokens fill whole groups."""
    if matrix is None:
        return x
    size = matrix.shape[0]
    groups = x.reshape(x.shape[0] // size, size, x.shape[1])
    return torch.matmul(matrix.T.to(x.dtype), groups).reshape(x.shape)


def center(x: Tensor, quantizer: Quantizer | None, *, axis: int) -> tuple[Tensor, Tensor | None]:
    """``(x - mean, mean)`` as the quantiser asks; the mean is float32 ``[1, features]`` over tokens, or ``None``."""
    if quantizer is None or quantizer.center is None:
        return x, None
    mean = x.float().mean(dim=0, keepdim=True)
    rest = (x.float() - mean).to(x.dtype)
    if quantizer.center.mean == "fp4":
        # One row: its blocks lie along the features whatever the axis of the rest.
        mean = quantize_dequantize(mean, quantizer, axis=1, nearest=True)
    return rest, mean


def _operand(x: Tensor, quantizer: Quantizer | None, dtype: torch.dtype, gemm: Gemm, *, axis: int) -> Tensor:
    return (x if quantizer is None else quantize_dequantize(x, quantizer, axis=axis, fp8=_fp8(gemm))).to(dtype)


def _fp8(gemm: Gemm) -> bool:
    return gemm.units == "fp8" and gemm.lhs is not None and gemm.rhs is not None


def _mean_term(mean: Tensor, gemm: Gemm, weight: Tensor, quantized: Tensor) -> Tensor:
    """``mean @ matrix.T`` as float32 ``[1, N]``, elementwise so that autocast leaves it alone."""
    assert gemm.lhs is not None
    assert gemm.lhs.center is not None
    matrix = weight if gemm.lhs.center.mean == "exact" else quantized
    return (matrix.float() * mean).sum(dim=1)[None]


def _patch(
    out: Tensor, x: Tensor, xq: Tensor, w: Tensor, wq: Tensor, gemm: Gemm, hot: HotChannels, channels: Tensor
) -> Tensor:
    """``out`` plus the Hot-Channel Patch."""
    assert gemm.lhs is not None
    assert gemm.rhs is not None
    sides: list[tuple[Tensor, Tensor]] = []
    for matrix, quantized, quantizer in ((x, xq, gemm.lhs), (w, wq, gemm.rhs)):
        value, decoded = matrix[:, channels].float(), quantized[:, channels].float()
        residual = value - decoded
        if hot.mode != "high_precision":
            amax = max_magnitude(matrix)
            residual = quantize_dequantize(residual, quantizer, axis=1, amax=amax, nearest=True)
            decoded = quantize_dequantize(value, quantizer, axis=1, amax=amax, nearest=True)
        sides.append((residual, decoded))
    (x_residual, x_value), (w_residual, w_value) = sides
    pairs = []
    if hot.operands in ("both", "activations"):
        pairs.append((x_residual, w_value))
    if hot.operands in ("both", "weights"):
        pairs.append((x_value, w_residual))
    left = torch.cat([a for a, _ in pairs], dim=1).to(out.dtype)
    right = torch.cat([b for _, b in pairs], dim=1).to(out.dtype)
    return torch.addmm(out, left, right.T)


class _FakeLinear(torch.autograd.Function):
    """The three GEMMs; ``x`` is ``[tokens, K]`` in the compute dtype, ``weight`` ``[N, K]`` in its own."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, channels: Tensor | None, hadamard: Tensor | None, recipe: Recipe
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.hadamard = hadamard
        ctx.recipe = recipe
        gemm = recipe.fprop or Gemm()
        rest, mean = center(x, gemm.lhs, axis=1)
        xq = _operand(rest, gemm.lhs, x.dtype, gemm, axis=1)
        wq = _operand(weight, gemm.rhs, x.dtype, gemm, axis=1)
        out = torch.mm(xq, wq.T)
        if gemm.hot_channels is not None and channels is not None and channels.shape[0] > 0:
            out = _patch(out, rest, xq, weight, wq, gemm, gemm.hot_channels, channels)
        if mean is not None:
            out = out + _mean_term(mean, gemm, weight, wq)
            # Only if it does something: PyTorch 2.11 compiles a `to` without effect, here, to zero gradients.
            out = out if out.dtype is x.dtype else out.to(x.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dtype = x.dtype
        gemm = ctx.recipe.dgrad or Gemm()
        rest, mean = center(grad_output, gemm.lhs, axis=1)
        wq = weight if gemm.rhs is None else quantize_dequantize(weight, gemm.rhs, axis=0, fp8=_fp8(gemm))
        grad_x = torch.mm(_operand(rest, gemm.lhs, dtype, gemm, axis=1), wq.to(dtype))
        if mean is not None:
            grad_x = (grad_x + _mean_term(mean, gemm, weight.T, wq.T)).to(dtype)
        gemm = ctx.recipe.wgrad or Gemm()
        hadamard = ctx.hadamard if gemm.hadamard else None
        d_rest, d_mean = center(grad_output, gemm.lhs, axis=0)
        x_rest, x_mean = center(x, gemm.rhs, axis=0)
        dq = _operand(rotate_tokens(d_rest, hadamard), gemm.lhs, dtype, gemm, axis=0)
        xq = _operand(rotate_tokens(x_rest, hadamard), gemm.rhs, dtype, gemm, axis=0)
        grad_weight = torch.mm(dq.T, xq).to(weight.dtype)
        if d_mean is not None and x_mean is not None:
            grad_weight = (grad_weight + d_mean.T * x.shape[0] * x_mean).to(weight.dtype)
        return grad_x, grad_weight, None, None, None


class FakeFP4Linear(nn.Linear):
    """An ``nn.Linear`` without bias whose class was swapped by :func:`fake_convert`."""

    recipe: Recipe
    hadamard: Tensor | None
    channels: Tensor | None
    scores: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """``x`` is ``[..., K]``; computes in the autocast dtype if autocast is on."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        flat = x.reshape(-1, x.shape[-1]).to(dtype)
        if self.scores is not None:
            self.scores += channel_scores(flat, self.weight, self.recipe)
        out = _FakeLinear.apply(flat, self.weight, self.channels, self.hadamard, self.recipe)
        return out.reshape(*x.shape[:-1], out.shape[-1])


@torch.no_grad()
def channel_scores(x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
    """The score of ``recipe.fprop.hot_channels`` for each of the ``K`` channels."""
    gemm = recipe.fprop
    assert gemm is not None
    assert gemm.lhs is not None
    assert gemm.rhs is not None
    assert gemm.hot_channels is not None
    rest, _ = center(x, gemm.lhs, axis=1)
    error_x = (rest.float() - quantize_dequantize(rest, gemm.lhs, axis=1, nearest=True)).abs().mean(0)
    error_w = (weight.float() - quantize_dequantize(weight, gemm.rhs, axis=1, nearest=True)).abs().mean(0)
    if gemm.hot_channels.score == "error":
        return error_x + error_w
    norm_x = rest.float().norm(dim=0) / rest.shape[0] ** 0.5
    return error_x * weight.float().norm(dim=0) + error_w * norm_x


def fake_convert(layer: nn.Linear, recipe: Recipe, hadamard: Tensor | None) -> None:
    """Make one bias-free linear layer compute through the fake path, in place.

    Args:
        layer: the layer.
        recipe: how.
        hadamard: the rotation of the weight gradient on the layer's device, used if the recipe rotates.
    """
    if layer.bias is not None:
        raise ValueError("The fake path has no bias. Use `nn.Linear(..., bias=False)`.")
    layer.__class__ = FakeFP4Linear
    assert isinstance(layer, FakeFP4Linear)
    layer.recipe, layer.hadamard, layer.channels, layer.scores = recipe, hadamard, None, None
