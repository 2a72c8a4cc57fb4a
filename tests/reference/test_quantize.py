"""The reference quantiser against expected bits, and its edges."""

import dataclasses

import pytest
import torch

from lightning_fp4 import MXFP4, NVFP4, NVFP4_2D, NVFP4_ROW, Quantizer, ScaleRule, reference
from lightning_fp4.formats import E2M1_VALUES
from tests.helpers import assert_same_codes, decode_codes, golden_cases, same_bits, scale_bytes, unpack

QUANTIZERS = {
    "1d": Quantizer(format=NVFP4),
    "2d": Quantizer(format=NVFP4_2D),
    "row_scaled": Quantizer(format=NVFP4_ROW),
    "1d_rht": Quantizer(format=NVFP4),
    "4o6_mse256": Quantizer(format=NVFP4, scale_rule="four_over_six"),
    "mxfp4": Quantizer(format=MXFP4, scale_rule="unbiased"),
}
NEAREST = [q for name, q in QUANTIZERS.items() if name != "1d_rht"]
STOCHASTIC = [
    Quantizer(format=f, rounding="stochastic", scale_rule="unbiased") for f in (NVFP4, NVFP4_ROW, NVFP4_2D, MXFP4)
]
CASES = [pytest.param(name, key, id=f"{name}-{key}") for name in QUANTIZERS for key in golden_cases(name)]


@pytest.mark.parametrize(("name", "key"), CASES)
def test_golden(name, key, device):
    case, quantizer = golden_cases(name)[key], QUANTIZERS[name]
    for form in ("row", "col"):
        if f"{form}_data" not in case:
            continue
        x = case["x"].to(device)
        x = x.T if form == "col" else x
        if name == "1d_rht" and form == "col":
            x = reference.rotate(x, 16)
            if "rht_exact" in case:
                assert same_bits(x.cpu(), case["rht_exact"])
        quantized = reference.quantize(x, quantizer)
        assert_same_codes(unpack(quantized.codes), unpack(case[f"{form}_data"]))
        scale = case[f"{form}_scale"]
        if name == "mxfp4":
            assert same_bits(quantized.scales.cpu().float(), scale)
            factors = scale.repeat_interleave(32, 1)
            expected = decode_codes(unpack(case[f"{form}_data"])) * factors
        else:
            rows = quantized.format.block[0]  # the expected scale rows of 16x16 blocks are repeated
            assert same_bits(scale_bytes(quantized).repeat_interleave(rows, 0), scale)
            amax = case[f"{form}_amax"]
            assert same_bits(quantized.amax.flatten().cpu(), amax)
            encode = reference.scaling.encode_scale(quantized.amax, quantized.encoded_max)
            assert same_bits(encode.flatten().cpu(), case[f"{form}_S_enc"])
            factors = scale.view(torch.float8_e4m3fn).float().repeat_interleave(16, 1) * amax[:, None]
            expected = decode_codes(unpack(case[f"{form}_data"])) * (factors * (1 / quantized.encoded_max))
        decoded = reference.dequantize(quantized).cpu()
        assert same_bits(decoded, expected)
        if f"{form}_dq" in case:
            assert same_bits(decoded, case[f"{form}_dq"])


def _random_bits(x, quantizer, seed=0):
    columns = x.shape[1] + -x.shape[1] % quantizer.format.block[1]
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (x.shape[0], columns), dtype=torch.uint8, generator=generator).to(x.device)


def _quantize(x, quantizer):
    bits = _random_bits(x, quantizer) if quantizer.rounding.value == "stochastic" else None
    return reference.quantize(x, quantizer, random_bits=bits)


@pytest.mark.parametrize("shape", [(0, 0), (0, 16), (16, 0), (1, 1), (1, 33), (17, 16), (33, 40), (3, 100)])
@pytest.mark.parametrize("quantizer", NEAREST + STOCHASTIC, ids=str)
def test_tails_are_zero_padding(shape, quantizer, device):
    """Any size gives what the same matrix gives with zeros appended by hand."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)
    rows, columns = (-size % block for size, block in zip(shape, (1, quantizer.format.block[1]), strict=True))
    padded = torch.nn.functional.pad(x, (0, columns, 0, rows))
    actual, expected = _quantize(x, quantizer), _quantize(padded, quantizer)
    assert actual.shape == shape
    assert torch.equal(actual.codes, expected.codes)
    assert torch.equal(scale_bytes(actual), scale_bytes(expected))
    assert torch.equal(reference.dequantize(actual), reference.dequantize(expected)[:, : shape[1]])


@pytest.mark.parametrize("quantizer", NEAREST + STOCHASTIC, ids=str)
def test_error_is_that_of_four_bits(quantizer, device):
    """Within half (nearest) or one (stochastic) E2M1 spacing of the value, and never exact."""
    x = torch.randn(64, 64, device=device)
    decoded = reference.dequantize(_quantize(x, quantizer))
    error = float((decoded - x).norm() / x.norm())
    assert 0.05 < error < 0.25


@pytest.mark.parametrize("quantizer", NEAREST + STOCHASTIC, ids=str)
def test_at_most_sixteen_values_in_a_block(quantizer):
    decoded = reference.dequantize(_quantize(torch.randn(32, 64), quantizer))
    block = quantizer.format.block[1]
    counts = [len(b.unique()) for b in decoded.reshape(-1, block)]
    assert 2 < max(counts) <= 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("quantizer", NEAREST + STOCHASTIC, ids=str)
def test_non_finite_stays_visible(quantizer, bad, dtype, device):
    x = torch.randn(32, 64, device=device, dtype=dtype)
    x[3, 5] = bad
    decoded = reference.dequantize(_quantize(x, quantizer)).cpu()
    finite = decoded.isfinite()
    if quantizer.format.global_scale == "tensor":
        assert not finite.any()
    elif quantizer.format.global_scale == "row":
        assert not finite[3].any()
        assert finite[torch.arange(32) != 3].all()
    else:
        assert not finite[3, :32].any()
        assert finite.sum() == finite.numel() - 32


@pytest.mark.parametrize("quantizer", NEAREST + STOCHASTIC, ids=str)
def test_zeros(quantizer, device):
    """An all-zero tensor decodes to zeros; a zero block leaves the others as they are."""
    zeros = _quantize(torch.zeros(32, 64, device=device), quantizer)
    assert not (unpack(zeros.codes) & 7).any()
    assert not reference.dequantize(zeros).any()
    x = torch.randn(32, 64, device=device)
    holed = x.clone()
    holed[:16, :32] = 0
    holed[:, 40] = x[:, 40] = 9.0  # the same tensor and row maxima, in no zeroed block
    assert same_bits(
        reference.dequantize(_quantize(x, quantizer))[:, 32:], reference.dequantize(_quantize(holed, quantizer))[:, 32:]
    )
    assert not reference.dequantize(_quantize(holed, quantizer))[:16, :32].any()


@pytest.mark.parametrize("quantizer", NEAREST + STOCHASTIC, ids=str)
@pytest.mark.parametrize("exponent", [-100, -40, 40, 100])
def test_power_of_two_scaling_commutes(quantizer, exponent, device):
    """Nothing under- or overflows in between: a tensor times 2^n quantises to the same codes."""
    if quantizer.scale_rule is ScaleRule.FOUR_OVER_SIX and abs(exponent) == 100:
        pytest.skip("the squared errors that choose between the candidates leave the float32 range, as on Blackwell")
    x = torch.randn(32, 64, device=device)
    base, scaled = _quantize(x, quantizer), _quantize(x * 2.0**exponent, quantizer)
    assert_same_codes(unpack(scaled.codes), unpack(base.codes))
    expected = reference.dequantize(base) * 2.0**exponent
    torch.testing.assert_close(reference.dequantize(scaled), expected, rtol=0, atol=0)


@pytest.mark.parametrize("quantizer", NEAREST + STOCHASTIC, ids=str)
@pytest.mark.parametrize("value", [2.0**-149, 1e-40, 1.2e-38])
def test_subnormal_input_is_never_non_finite(quantizer, value, device):
    decoded = reference.dequantize(_quantize(torch.full((16, 32), value, device=device), quantizer))
    assert decoded.isfinite().all()
    # Stochastic rounding may go up to MXFP4's smallest value.
    assert (decoded <= max(2 * value, 2.0**-128)).all()


def test_small_blocks_beside_a_large_value_flush_to_zero(device):
    """A block scale that underflows E4M3 gives zeros, not NaN (and only where it must: below 2^-10 of 448 / 2^16)."""
    x = torch.full((16, 64), 1e-4, device=device)
    x[0, 0] = 1e4
    quantized = reference.quantize(x, Quantizer())
    decoded = reference.dequantize(quantized)
    assert decoded.isfinite().all()
    assert float(decoded[0, 0]) == pytest.approx(1e4)
    assert not decoded[1:].any()
    assert int((scale_bytes(quantized) == 0).sum()) == 16 * 4 - 1


@pytest.mark.parametrize("name", ["rne", "unbiased", "four_over_six"])
def test_unbiased_scale_never_saturates(name):
    """Rounding the scale up keeps every block maximum at or below 6; rounding to nearest does not."""
    x = torch.randn(64, 256)
    quantizer = Quantizer(scale_rule=name)
    quantized = reference.quantize(x, quantizer)
    encode = reference.scaling.encode_scale(quantized.amax, quantized.encoded_max)
    factors = reference.scaling.block_encode(quantized.scales, encode)
    largest = reference.scaling.block_amax(x, NVFP4) * factors
    # 1 ulp: the encode factor is a rounded reciprocal.
    saturates = bool((largest > 6 * (1 + 2**-22)).any())
    assert saturates is (quantizer.scale_rule is not ScaleRule.UNBIASED)


def test_four_over_six_is_the_better_of_its_two_candidates():
    x = torch.randn(64, 128)
    error = {}
    for rule in ("rne", "four_over_six"):
        decoded = reference.dequantize(reference.quantize(x, Quantizer(scale_rule=rule)))
        error[rule] = float((decoded - x).square().mean() / x.square().mean())
    # Gaussian: 9.1e-3 and 7.6e-3 (numerics.md); 10 % covers the sample of 8192 values.
    assert error["rne"] == pytest.approx(9.1e-3, rel=0.1)
    assert error["four_over_six"] == pytest.approx(7.6e-3, rel=0.1)


def test_stochastic_with_the_unbiased_scale_has_no_slope():
    """<E[q], x> / <x, x> is 1.0000 for scales rounded up and 0.9966 for nearest scales (numerics.md)."""
    x = torch.randn(32, 256)
    slopes = {}
    for rule in ("unbiased", "rne"):
        quantizer = Quantizer(rounding="stochastic", scale_rule=rule)
        mean = torch.zeros_like(x)
        for byte in range(256):  # all draws: the exact expectation
            bits = torch.full(x.shape, byte, dtype=torch.uint8)
            mean += reference.dequantize(reference.quantize(x, quantizer, random_bits=bits)) / 256
        slopes[rule] = float((mean * x).sum() / (x * x).sum())
    # Eight bits round the probability down, on average by 1/512 of a step; a step is at most half of |x| on average.
    assert slopes["unbiased"] == pytest.approx(1.0, abs=1.5e-3)
    assert slopes["rne"] < slopes["unbiased"] - 1.5e-3


def test_transpose_is_the_quantised_transpose(device):
    for shape in ((32, 64), (17, 40), (1, 1), (16, 0), (0, 16), (0, 0)):
        x = torch.randn(shape, device=device)
        actual = reference.transpose(reference.quantize(x, Quantizer(format=NVFP4_2D)))
        expected = reference.quantize(x.T, Quantizer(format=NVFP4_2D))
        assert actual.shape == expected.shape
        assert_same_codes(unpack(actual.codes), unpack(expected.codes))
        assert torch.equal(scale_bytes(actual), scale_bytes(expected))
        assert torch.equal(reference.dequantize(actual), reference.dequantize(expected))


def test_transpose_needs_square_blocks():
    quantized = reference.quantize(torch.randn(16, 16), Quantizer())
    with pytest.raises(ValueError, match="1x16, not square"):
        reference.transpose(quantized)


def test_four_over_six_in_square_blocks_with_a_row_tail():
    quantizer = Quantizer(format=NVFP4_2D, scale_rule="four_over_six")
    x = torch.randn(17, 40)
    padded = torch.nn.functional.pad(x, (0, 8, 0, 15))
    actual = reference.dequantize(reference.quantize(x, quantizer))
    assert torch.equal(actual, reference.dequantize(reference.quantize(padded, quantizer))[:17, :40])


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("quantizer", NEAREST + STOCHASTIC, ids=str)
def test_default_dtype_changes_nothing(quantizer, default):
    x = torch.randn(32, 64)
    expected = _quantize(x, quantizer)
    expected_decoded = reference.dequantize(expected)
    rotated = reference.rotate(x, 16)
    empty_amax = _quantize(x[:0], quantizer).amax
    torch.set_default_dtype(default)
    try:
        actual = _quantize(x, quantizer)
        assert same_bits(actual.codes, expected.codes)
        assert same_bits(scale_bytes(actual), scale_bytes(expected))
        assert same_bits(reference.dequantize(actual), expected_decoded)
        assert same_bits(reference.rotate(x, 16), rotated)
        assert reference.hadamard_matrix(16).dtype is torch.float32
        if empty_amax is not None:
            assert same_bits(_quantize(x[:0], quantizer).amax, empty_amax)
    finally:
        torch.set_default_dtype(torch.float32)


def test_strides_do_not_matter(device):
    x = torch.randn(64, 48, device=device)
    expected = reference.quantize(x, Quantizer())
    for view in (x.T.contiguous().T, torch.stack((x, x), -1)[..., 0]):
        assert not view.is_contiguous()
        assert torch.equal(reference.quantize(view, Quantizer()).codes, expected.codes)


def test_products_of_codes_and_scales_are_exact_in_bfloat16():
    """What the BF16 GEMM on a GPU rests on: six significant bits."""
    scales = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    products = scales[:, None] * torch.tensor(E2M1_VALUES)
    assert torch.equal(products.bfloat16().float(), products)


def test_nbytes_is_what_is_stored():
    quantized = reference.quantize(torch.randn(32, 64), Quantizer())
    assert quantized.nbytes == 32 * 64 * NVFP4.bits_per_value / 8
    assert dataclasses.replace(quantized, shape=(1, 1)).nbytes == quantized.nbytes
