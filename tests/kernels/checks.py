"""What the kernels are held to, on a GPU and in Triton's interpreter: the reference's bits, computed on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from lightning_fp4 import FP4Tensor, Quantizer, kernels, reference
from lightning_fp4.kernels import Form
from lightning_fp4.tensor import FP4Operand, Patch
from tests.helpers import same_bits
from tests.kernels.cases import PARTS, Case, hot_channels, wide

KEY, STEP = 0x7123456789ABCDEF, 2**32 - 3


def seed(device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.tensor([KEY, STEP], device=device)


def expected_form(
    x: torch.Tensor,
    quantizer: Quantizer,
    *,
    hadamard: int | None = None,
    transposed: bool = False,
    stream: int = 0,
    mean: torch.Tensor | None = None,
    patch: Patch | None = None,
) -> FP4Tensor:
    """The reference on the CPU."""
    x = x.cpu() if mean is None else reference.subtract_mean(x.cpu(), mean.cpu())
    matrix = x.T if transposed else x
    matrix = reference.rotate(matrix, hadamard) if hadamard else matrix
    bits = None
    if quantizer.rounding.value == "stochastic":
        padded = matrix.shape[1] + -matrix.shape[1] % quantizer.format.block[1]
        bits = reference.random_bytes(matrix.shape[0], padded, seed(), stream)
    quantized = reference.quantize(matrix, quantizer, random_bits=bits)
    if patch is None:
        return quantized
    gained = reference.patch_columns(matrix, quantized, quantizer, patch.channels.cpu(), patch.parts)
    return reference.concatenate([quantized, gained])


def moved(form: FP4Tensor | FP4Operand, device: torch.device) -> FP4Tensor | FP4Operand:
    """The same on another device."""
    tensors = {name: value.to(device) for name, value in vars(form).items() if isinstance(value, torch.Tensor)}
    return dataclasses.replace(form, **tensors)


def assert_same_form(actual: FP4Tensor | FP4Operand, expected: FP4Tensor) -> None:
    """Codes, scales and maxima equal to the bit; decoded operands too."""
    if isinstance(actual, FP4Operand):
        decoded = reference.operand(expected, actual.units)
        assert same_bits(actual.values.cpu().float(), decoded.values.float())
        assert (actual.factor is None) is (decoded.factor is None)
        assert actual.factor is None or same_bits(actual.factor.cpu(), decoded.factor)
        return
    assert actual.codes.shape == expected.codes.shape
    assert actual.scales.shape == expected.scales.shape
    assert actual.scales.dtype == expected.scales.dtype
    assert same_bits(actual.scales.cpu().float(), expected.scales.float())
    if expected.amax is not None:
        assert same_bits(actual.amax.cpu(), expected.amax)
    if expected.scales.float().isfinite().all():
        assert torch.equal(actual.codes.cpu(), expected.codes)
    else:  # the sign of NaN is nobody's
        assert torch.equal(actual.codes.cpu() & 0x77, expected.codes & 0x77)
    assert actual.encoded_max == expected.encoded_max
    assert actual.format == expected.format


def check_both(
    x: torch.Tensor,
    quantizer: Quantizer,
    hadamard: int | None = None,
    units: tuple[str | None, str | None] = (None, None),
    columns: Quantizer | None = None,
    mean: torch.Tensor | None = None,
    patch: Patch | None = None,
) -> None:
    """Both forms from one call are those of the reference."""
    columns = columns or quantizer
    by_rows, by_columns = kernels.quantize_both(
        x,
        Form(quantizer=quantizer, stream=3, units=units[0], patch=patch),
        Form(quantizer=columns, stream=2**32 - 1, units=units[1]),
        hadamard=hadamard,
        seed=seed(x.device),
        mean=mean,
    )
    expected = expected_form(x, quantizer, stream=3, mean=mean, patch=patch)
    assert by_rows.shape == expected.shape
    assert by_columns.shape == (x.shape[1], x.shape[0])
    assert_same_form(by_rows, expected)
    assert_same_form(
        by_columns, expected_form(x, columns, hadamard=hadamard, transposed=True, stream=2**32 - 1, mean=mean)
    )


def check_one(
    x: torch.Tensor,
    quantizer: Quantizer,
    *,
    hadamard: int | None = None,
    transposed: bool = False,
    units: str | None = None,
    mean: torch.Tensor | None = None,
    patch: Patch | None = None,
) -> None:
    """One form alone is that of the reference."""
    actual = kernels.quantize(
        x,
        quantizer,
        hadamard=hadamard,
        transposed=transposed,
        seed=seed(x.device),
        stream=3,
        units=units,
        mean=mean,
        patch=patch,
    )
    expected = expected_form(x, quantizer, hadamard=hadamard, transposed=transposed, stream=3, mean=mean, patch=patch)
    assert actual.shape == (expected.shape if patch else x.T.shape if transposed else x.shape)
    assert_same_form(actual, expected)


def check_patch(
    x: torch.Tensor,
    quantizer: Quantizer,
    channels: torch.Tensor,
    units: str = "bf16",
    mean: torch.Tensor | None = None,
    choices: Sequence[tuple[str, ...]] = PARTS[:1],
) -> None:
    """A decoded row form with each of these choices of parts is that of the reference."""
    for parts in choices:
        patch = Patch(channels=channels.to(x.device), parts=parts)
        check_one(x, quantizer, units=units, mean=mean, patch=patch)


def check_case(case: Case, x: torch.Tensor) -> None:
    """What the call makes of ``x`` is what the reference makes of it."""
    mean = reference.token_mean(x.cpu()).to(x.device) if case.centered else None
    if case.rows is not None and case.columns is not None:
        units, columns = (case.rows.units, case.columns.units), case.columns.quantizer
        check_both(x, case.rows.quantizer, case.hadamard or None, units, columns, mean)
    elif case.columns is not None:
        quantizer, units = case.columns.quantizer, case.columns.units
        check_one(x, quantizer, hadamard=case.hadamard or None, transposed=True, units=units, mean=mean)
    elif case.rows is not None:
        patch = Patch(channels=hot_channels(case, x.shape[1]).to(x.device), parts=case.parts) if case.parts else None
        check_one(x, case.rows.quantizer, units=case.rows.units, mean=mean, patch=patch)


def check_mean(x: torch.Tensor) -> torch.Tensor:
    """The mean is the reference's, to the bit."""
    mean = kernels.token_mean(x)
    assert same_bits(mean.cpu(), reference.token_mean(x.cpu()))
    return mean


def check_times_matrix(mean: torch.Tensor, matrix: torch.Tensor) -> None:
    """A product of float32 sums in another order."""
    expected = mean.cpu().double() @ matrix.cpu().double().T
    bound = (matrix.shape[1] + 1) * 2**-24 * (mean.cpu().double().abs() @ matrix.cpu().double().abs().T)
    assert ((kernels.times_matrix(mean, matrix).cpu().double() - expected[0]).abs() <= bound[0]).all()


def check_sums(x: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
    """Counts of a stack of matrices equal the reference's; energies do but for the order of their float64 sums."""
    bits = None
    if quantizer.rounding.value == "stochastic":
        padded = x.shape[2] + -x.shape[2] % quantizer.format.block[1]
        bits = reference.random_bytes(x.shape[1], padded, seed(), 0)
    expected = reference.quantization_sums(x.cpu(), quantizer, random_bits=bits)
    actual = kernels.quantization_sums(x, quantizer, seed=seed(x.device)).cpu()
    assert actual.dtype == torch.float64
    assert torch.equal(actual[:, 2:], expected[:, 2:])
    torch.testing.assert_close(actual[:, :2], expected[:, :2], rtol=1e-12, atol=0, equal_nan=True)
    return expected


def check_tensor_sums(shape: tuple[int, int], device: torch.device | str, *, count: int | None = None) -> None:
    """Sums of matrices of all kinds (the first ``count`` of them), and their top channels, are the reference's."""
    x = wide(shape, torch.float32)
    kinds = [x, x + 1e4, torch.full_like(x, 0.1), torch.zeros_like(x), x * 1e-38, x * 1e30, x.clone()]
    kinds[-1][:16, :16] = 0.1
    for bad in (float("nan"), float("inf"), -float("inf")):
        kinds.append(x.clone())
        kinds[-1][-1, -1] = bad
    kinds.append(kinds[-1].clone())  # infinities of both signs
    kinds[-1][0, 0] = float("inf")
    x = torch.stack(kinds[:count])
    expected, top = reference.tensor_sums(x, 5)
    actual, channels = (found.cpu() for found in kernels.tensor_sums(x.to(device), 5))
    assert actual.dtype == torch.float64
    assert actual.shape == expected.shape
    # The reference adds the magnitudes of a channel in float32. Everything else is float64, in another order.
    rough, exact = shape[0] * 2**-24, 1e-12
    tolerance = torch.tensor([0.0, rough, rough, *6 * [exact]]) * expected.abs()
    tolerance[:, 3] = exact * expected[:, 2] / (shape[0] * shape[1])  # positive and negative values cancel in a mean
    is_near = ((actual - expected).abs() <= tolerance) & expected.isfinite()
    is_equal = (actual == expected) | (actual.isnan() & expected.isnan())
    assert (is_near | is_equal).all(), (actual, expected)
    assert channels.shape == top.shape
    assert all(len(set(chosen)) == len(chosen) for chosen in channels.tolist())
    by_channel = x.abs().sum(-2)  # of which some may be equal
    chosen, best = (by_channel.gather(-1, indices) for indices in (channels, top))
    torch.testing.assert_close(chosen, best, rtol=rough, atol=0, equal_nan=True)


def check_scores(
    query: torch.Tensor, key: torch.Tensor, *, scale: float | None = None, is_causal: bool = False
) -> torch.Tensor:
    """The largest score is that of a float64 computation, but for the rounding of a float32 sum; infinite or NaN with
    it.

    Tensor cores truncate their sums, hence 2**-23 for each term.
    """
    q, k = query.cpu().double(), key.cpu().double()
    expected = reference.pre_softmax_max(q, k, scale=scale, is_causal=is_causal)
    actual = kernels.pre_softmax_max(query, key, scale=scale, is_causal=is_causal)
    assert actual.shape == ()
    assert actual.dtype == torch.float32
    length = q.shape[-1]
    factor = length**-0.5 if scale is None else abs(scale)
    magnitudes = reference.pre_softmax_max(q.abs().nan_to_num(posinf=0), k.abs().nan_to_num(posinf=0), scale=factor)
    bound = (length + 4) * 2**-23 * float(magnitudes)
    torch.testing.assert_close(actual.cpu().double(), expected.double(), rtol=0, atol=bound, equal_nan=True)
    return actual


def check_decode(x: torch.Tensor, quantizer: Quantizer) -> None:
    """Decoding what the reference quantised: values in three dtypes, and the operands of a GEMM."""
    host = expected_form(x, quantizer)
    card = moved(host, x.device)
    for dtype in (torch.float32, torch.float16):
        assert same_bits(kernels.dequantize(card, dtype).cpu(), reference.dequantize(host).to(dtype))
    for units in ("bf16", "fp8"):
        assert_same_form(kernels.operand(card, units), host)
