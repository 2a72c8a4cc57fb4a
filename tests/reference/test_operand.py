"""Operands decoded for the units of a GEMM: exact where they claim to be, one rounding where they do not."""

import pytest
import torch

from lightning_fp4 import MXFP4, NVFP4, NVFP4_2D, NVFP4_ROW, Quantizer, reference
from lightning_fp4.reference import packing
from lightning_fp4.reference.quantize import _block_squared_error
from lightning_fp4.tensor import operand_shift
from tests.helpers import same_bits

CLOSED = ["closed", "closed_up", "closed_best"]


def _wide(rows, columns):
    """Values over many octaves, so that block scales are too."""
    return torch.randn(rows, columns) * torch.randn(rows, columns).exp() * 2.0 ** torch.randint(-12, 1, (rows, 1))


@pytest.mark.parametrize("rule", ["rne", "unbiased", "four_over_six", *CLOSED])
@pytest.mark.parametrize("block_format", [NVFP4, NVFP4_2D, NVFP4_ROW], ids=str)
@pytest.mark.parametrize("shape", [(33, 70), (0, 16), (5, 0)])
def test_wide_units_hold_every_product(shape, block_format, rule):
    quantized = reference.quantize(_wide(*shape), Quantizer(format=block_format, scale_rule=rule))
    exact = reference.decode_blocks(quantized)
    for units in ("fp32", "bf16"):
        operand = reference.operand(quantized, units)
        assert operand.units == units
        assert same_bits(operand.values.float(), exact)
        assert same_bits(operand.factor, reference.global_decode(quantized))


@pytest.mark.parametrize("rule", CLOSED)
@pytest.mark.parametrize("block_format", [NVFP4, NVFP4_2D], ids=str)
def test_closed_rules_are_exact_in_e4m3(block_format, rule):
    quantized = reference.quantize(_wide(64, 96), Quantizer(format=block_format, scale_rule=rule))
    operand = reference.operand(quantized, "fp8")
    assert operand_shift("fp8", quantized.encoded_max) == 1
    assert same_bits(operand.values.float(), reference.decode_blocks(quantized))


@pytest.mark.parametrize(("rule", "shift"), [("rne", 1 / 8), ("unbiased", 1 / 8), ("four_over_six", 1 / 4)])
def test_other_rules_round_once_in_e4m3(rule, shift):
    quantized = reference.quantize(_wide(64, 96), Quantizer(scale_rule=rule))
    assert operand_shift("fp8", quantized.encoded_max) == shift
    operand = reference.operand(quantized, "fp8")
    exact = reference.decode_blocks(quantized) * shift
    error = (operand.values.float() - exact).abs()
    assert bool((error <= exact.abs() * 2.0**-4 + 2.0**-10).all())  # half a step of three bits, or of subnormals
    assert bool(error.any())
    assert same_bits(operand.factor * shift, reference.global_decode(quantized))


def test_no_global_scale_no_factor():
    quantized = reference.quantize(torch.randn(4, 64), Quantizer(format=MXFP4, scale_rule="unbiased"))
    assert reference.operand(quantized, "bf16").factor is None


@pytest.mark.parametrize("block_format", [NVFP4, NVFP4_2D], ids=str)
def test_closed_best_is_never_worse_than_its_first_candidate(block_format):
    x = _wide(64, 96)
    best, first = (
        (reference.dequantize(reference.quantize(x, Quantizer(format=block_format, scale_rule=rule))) - x).square()
        for rule in ("closed_best", "closed_up")
    )
    rows, columns = block_format.block
    sums = [e.reshape(64 // rows, rows, 96 // columns, columns).sum((1, 3)) for e in (best, first)]
    assert bool((sums[0] <= sums[1] * (1 + 1e-5)).all())
    assert bool((sums[0] < sums[1]).any())


def _pairwise(values):
    if len(values) == 1:
        return values[0]
    return _pairwise([a + b for a, b in zip(values[::2], values[1::2], strict=True)])


def test_the_error_of_a_block_is_summed_pairwise():
    """The order is part of the meaning: neighbouring columns, then neighbouring sums, rows last."""
    x = _wide(16, 16)
    quantized = reference.quantize(x, Quantizer(format=NVFP4_2D, scale_rule="four_over_six"))
    codes = packing.decode(quantized.codes)
    error = (codes * (quantized.scales.float() * quantized.amax) * (1.0 / quantized.encoded_max) - x).square()
    by_row = _pairwise(list(error.T))
    assert _block_squared_error(quantized, x).item() == _pairwise(list(by_row)).item()
