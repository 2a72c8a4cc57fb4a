"""The product of quantised matrices against float64."""

import pytest
import torch

from lightning_fp4 import MXFP4, NVFP4, NVFP4_2D, NVFP4_ROW, Quantizer, reference
from tests.helpers import same_bits

FORMATS = [(NVFP4, NVFP4), (NVFP4, NVFP4_2D), (NVFP4_ROW, NVFP4_ROW), (NVFP4_ROW, NVFP4_2D), (MXFP4, MXFP4)]


def _quantize(x, block_format):
    rule = "unbiased" if block_format is MXFP4 else "rne"
    return reference.quantize(x, Quantizer(format=block_format, scale_rule=rule))


@pytest.mark.parametrize("formats", FORMATS, ids=lambda f: f"{f[0]}x{f[1]}")
@pytest.mark.parametrize("sizes", [(32, 48, 64), (1, 7, 40), (33, 1, 1), (0, 5, 16), (5, 0, 16), (5, 3, 0)], ids=str)
def test_is_the_product_of_decoded_matrices(sizes, formats, device):
    m, n, k = sizes
    lhs = _quantize(torch.randn(m, k, device=device), formats[0])
    rhs = _quantize(torch.randn(n, k, device=device), formats[1])
    bias = torch.randn(n, device=device)
    a, b = reference.dequantize(lhs).double(), reference.dequantize(rhs).double()
    actual = reference.gemm(lhs, rhs)
    assert actual.dtype is torch.float32
    # K float32 additions and three roundings of the scales, each 2^-24 of the sum of magnitudes.
    bound = (k + 4) * 2**-24 * (a.abs() @ b.abs().T)
    assert bool(((actual.double() - a @ b.T).abs() <= bound).all())
    assert same_bits(reference.gemm(lhs, rhs, bias), actual + bias)


def test_row_scales_multiply_rows_and_columns():
    a, b = torch.randn(16, 32), torch.randn(8, 32)
    scale_a, scale_b = 2.0 ** torch.arange(16), 2.0 ** torch.arange(8)
    plain = reference.gemm(_quantize(a, NVFP4_ROW), _quantize(b, NVFP4_ROW))
    scaled = reference.gemm(_quantize(a * scale_a[:, None], NVFP4_ROW), _quantize(b * scale_b[:, None], NVFP4_ROW))
    assert same_bits(scaled, plain * scale_a[:, None] * scale_b)


@pytest.mark.parametrize("precision", ["medium", "high", "highest"])
def test_matmul_precision_changes_nothing(precision, device):
    lhs, rhs = (
        _quantize(torch.randn(64, 256, device=device), NVFP4),
        _quantize(torch.randn(32, 256, device=device), NVFP4),
    )
    expected = reference.gemm(lhs, rhs)
    x = torch.randn(64, 256, device=device)
    rotated = reference.rotate(x, 16)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        assert same_bits(reference.gemm(lhs, rhs), expected)
        assert same_bits(reference.rotate(x, 16), rotated)
    finally:
        torch.set_float32_matmul_precision(before)


def test_deterministic_algorithms_are_fine(device):
    torch.use_deterministic_algorithms(True)
    try:
        x = torch.randn(32, 64, device=device)
        assert reference.gemm(_quantize(x, NVFP4), _quantize(x, NVFP4_2D)).isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)
