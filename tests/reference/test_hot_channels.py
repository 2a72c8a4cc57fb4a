"""The Hot-Channel Patch: its columns, its scores, its choice."""

import dataclasses

import pytest
import torch

from lightning_fp4 import MXFP4, NVFP4, NVFP4_2D, NVFP4_ROW, Quantizer, reference

QUANTIZERS = [
    Quantizer(format=NVFP4),
    Quantizer(format=NVFP4_ROW),
    Quantizer(format=NVFP4_2D),
    Quantizer(format=NVFP4, scale_rule="four_over_six"),
    Quantizer(format=MXFP4, scale_rule="unbiased"),
]


def _matrix(rows=21, columns=70):
    torch.manual_seed(rows)
    return torch.randn(rows, columns) * (1 + 4 * (torch.rand(columns) < 0.1))


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
@pytest.mark.parametrize("channels", [[], [0], [69], [3, 4, 31, 64], list(range(70))], ids=len)
def test_gather_decodes_single_columns(quantizer, channels):
    quantized = reference.quantize(_matrix(), quantizer)
    channels = torch.tensor(channels, dtype=torch.int64)
    assert torch.equal(reference.gather(quantized, channels), reference.dequantize(quantized)[:, channels])


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_patch_columns_hold_residual_and_value_on_one_global_scale(quantizer):
    x, channels = _matrix(), torch.tensor([1, 5, 6, 40])
    quantized = reference.quantize(x, quantizer)
    patch = reference.patch_columns(x, quantized, quantizer, channels, ("residual", "value"))
    width = quantizer.format.block[1]
    assert patch.shape == (21, 2 * width)
    assert patch.amax is quantized.amax
    decoded = reference.dequantize(patch)
    residual, value = decoded[:, :4], decoded[:, width : width + 4]
    assert torch.equal(decoded[:, 4:width], torch.zeros(21, width - 4))
    expected = x[:, channels] - reference.dequantize(quantized)[:, channels]
    # An E2M1 step is at most a third of the block's maximum, half of it is the error; an E4M3 scale rounds by at most
    # 1/16 more (a power of two by up to 2).
    for found, wanted in ((residual, expected), (value, x[:, channels])):
        rows = 16 if quantizer.format.block[0] == 16 else 1
        peak = max(wanted.abs().max(), 1e-9) if rows == 16 else wanted.abs().amax(1, keepdim=True)
        assert ((found - wanted).abs() <= peak * (0.36 if quantizer.format is MXFP4 else 0.24) + 1e-6).all()


def test_concatenate_keeps_padded_columns():
    quantizer = Quantizer()
    left, right = _matrix(5, 20), _matrix(5, 16)
    amax = torch.full((1, 1), 9.0)
    parts = [reference.quantize(m, quantizer, amax=amax) for m in (left, right)]
    joined = reference.concatenate(parts)
    assert joined.shape == (5, 48)
    decoded = reference.dequantize(joined)
    assert torch.equal(decoded[:, :20], reference.dequantize(parts[0]))
    assert torch.equal(decoded[:, 20:32], torch.zeros(5, 12))
    assert torch.equal(decoded[:, 32:], reference.dequantize(parts[1]))


def test_a_given_amax_is_the_global_scale():
    x = _matrix()
    amax = x.abs().max()[None, None]
    alone, given = reference.quantize(x, Quantizer()), reference.quantize(x, Quantizer(), amax=amax)
    assert torch.equal(alone.codes, given.codes)
    doubled = reference.quantize(x, Quantizer(), amax=2 * amax)
    assert torch.equal(doubled.amax, 2 * amax)
    # One binary octave of the block scales: the same values again, as no scale is subnormal.
    assert torch.equal(reference.dequantize(doubled), reference.dequantize(alone))


def test_scores():
    x, w = _matrix(30, 6), _matrix(11, 6)
    xq, wq = x.clone(), w.clone()
    xq[:, 2] += 0.5
    wq[:, 4] -= 0.25
    error = reference.channel_scores(x, xq, w, wq, "error")
    torch.testing.assert_close(error, torch.tensor([0, 0, 0.5, 0, 0.25, 0]))
    product = reference.channel_scores(x, xq, w, wq, "product")
    expected = torch.zeros(6)
    expected[2] = 0.5 * w[:, 2].norm()
    expected[4] = 0.25 * x[:, 4].norm() / 30**0.5
    torch.testing.assert_close(product, expected)


def test_scores_of_no_tokens_are_those_of_the_weight():
    w = _matrix(11, 6)
    for score in ("error", "product"):
        scores = reference.channel_scores(torch.zeros(0, 6), torch.zeros(0, 6), w, w + 1, score)
        assert scores.isfinite().all()


def test_select_takes_the_highest_in_ascending_order_and_the_first_of_equals():
    scores = torch.tensor([1.0, 5, 3, 5, 0, 3])
    assert reference.select_channels(scores, 0).tolist() == []
    assert reference.select_channels(scores, 1).tolist() == [1]
    assert reference.select_channels(scores, 3).tolist() == [1, 2, 3]
    assert reference.select_channels(scores, 6).tolist() == list(range(6))


def test_the_rounding_of_the_columns_is_to_nearest():
    """Also for an operand that rounds stochastically: the patch needs no random bits."""
    quantizer = Quantizer(rounding="stochastic", scale_rule="unbiased")
    x = _matrix()
    quantized = reference.quantize(x, quantizer, random_bits=torch.zeros(21, 80, dtype=torch.uint8))
    channels = torch.arange(16)
    patch = reference.patch_columns(x, quantized, quantizer, channels, ("value",))
    nearest = dataclasses.replace(quantizer, rounding="nearest")
    expected = reference.quantize(x[:, :16], nearest, amax=quantized.amax)
    assert torch.equal(patch.codes, expected.codes)
