"""One product as a recipe says."""

import pytest
import torch

from lightning_fp4 import MXFP4, NVFP4, NVFP4_2D, FP4Tensor, Gemm, Quantizer, matmul, ops, reference
from lightning_fp4.matmul import Operand, Side
from tests.helpers import relative_error, same_bits

RNE, SQUARE = Quantizer(format=NVFP4), Quantizer(format=NVFP4_2D)


def _operand(quantizer, hadamard=None, stream=0):
    return Operand(quantizer=quantizer, hadamard=hadamard, stream=stream)


def test_operands_of_a_gemm():
    gemm = Gemm(lhs=RNE, rhs=SQUARE, hadamard=16)
    assert Operand.lhs(gemm, 3) == _operand(RNE, 16, 3)
    assert Operand.rhs(gemm, 4) == _operand(SQUARE, 16, 4)
    assert Operand.lhs(None, 1) == _operand(None, None, 1)
    assert not Operand.lhs(gemm, 3).stochastic
    assert _operand(Quantizer(rounding="stochastic", scale_rule="unbiased")).stochastic


def test_high_precision_operands_pass_through(device):
    x = torch.randn(5, 8, device=device)
    assert matmul.quantize_rows(x, _operand(None)).matrix is x
    rows, columns = matmul.quantize_both(x, _operand(None), _operand(None))
    assert rows.matrix is x
    assert torch.equal(columns.matrix, x.T)


@pytest.mark.parametrize("hadamard", [None, 16])
@pytest.mark.parametrize("quantizers", [(RNE, RNE), (SQUARE, SQUARE), (RNE, SQUARE)], ids=str)
def test_both_forms_are_those_of_the_reference(quantizers, hadamard, device):
    """Square blocks come from one quantisation, and it gives the same as two."""
    x = torch.randn(33, 48, device=device)
    rows, columns = matmul.quantize_both(x, _operand(quantizers[0]), _operand(quantizers[1], hadamard))
    assert same_bits(ops.dequantize(rows.matrix), reference.dequantize(reference.quantize(x, quantizers[0])))
    turned = reference.rotate(x.T, hadamard) if hadamard else x.T
    expected = reference.dequantize(reference.quantize(turned, quantizers[1]))
    assert same_bits(ops.dequantize(columns.matrix), expected[:, :33])


def test_square_blocks_are_quantised_once(monkeypatch):
    calls = []
    original = reference.quantize
    monkeypatch.setattr(reference, "quantize", lambda *a, **k: calls.append(1) or original(*a, **k))
    matmul.quantize_both(torch.randn(16, 16), _operand(SQUARE), _operand(SQUARE))
    assert len(calls) == 1
    matmul.quantize_both(torch.randn(16, 16), _operand(RNE), _operand(RNE))
    assert len(calls) == 3


def test_stochastic_square_blocks_draw_for_each_form():
    """A transposed copy would share random bits between two operands."""
    quantizer = Quantizer(format=NVFP4_2D, rounding="stochastic", scale_rule="unbiased")
    seed = torch.tensor([5, 0])
    rows, columns = matmul.quantize_both(torch.randn(32, 32), _operand(quantizer), _operand(quantizer, stream=1), seed)
    assert not torch.equal(ops.dequantize(rows.matrix).T, ops.dequantize(columns.matrix))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_multiply_quantised(dtype, device):
    a, b, bias = (torch.randn(s, device=device).to(dtype) for s in ((17, 40), (8, 40), (8,)))
    for quantizer in (RNE, Quantizer(format=MXFP4, scale_rule="unbiased")):
        lhs, rhs = matmul.quantize_rows(a, _operand(quantizer)), matmul.quantize_rows(b, _operand(quantizer))
        out = matmul.multiply(lhs, rhs, bias, dtype)
        assert out.dtype is dtype
        expected = ops.dequantize(lhs.matrix).double() @ ops.dequantize(rhs.matrix).double().T + bias.double()
        # One rounding to dtype, and 40 float32 additions.
        torch.testing.assert_close(out.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)
        assert matmul.multiply(lhs, rhs, bias, dtype, torch.float32).dtype is torch.float32


def test_multiply_with_one_plain_operand(device):
    a, b = torch.randn(17, 40, device=device), torch.randn(8, 40, device=device)
    quantized, plain = matmul.quantize_rows(a, _operand(RNE)), Side(matrix=b)
    assert isinstance(quantized.matrix, FP4Tensor)
    expected = ops.dequantize(quantized.matrix) @ b.T
    # Order of float32 sums of 40 terms.
    torch.testing.assert_close(matmul.multiply(quantized, plain, None, torch.float32), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(matmul.multiply(plain, quantized, None, torch.float32), expected.T, rtol=1e-5, atol=1e-5)
    assert relative_error(expected, a @ b.T) > 0.03  # the quantised side did lose precision


def test_describe():
    cpu = torch.device("cpu")
    assert matmul.describe(None, cpu) == "high_precision"
    assert matmul.describe(Gemm(lhs=RNE), cpu) == "high_precision"
    assert matmul.describe(Gemm(lhs=RNE, rhs=SQUARE), cpu) == "fp32"
    assert matmul.describe(Gemm(lhs=RNE, rhs=SQUARE, units="bf16"), torch.device("cuda")) == "bf16"
