"""The rotation: orthogonal, with the signs that Blackwell recipes use, in any size."""

import pytest
import torch

from lightning_fp4 import reference
from tests.helpers import same_bits

SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]


def sylvester(size: int) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    return matrix


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32])
def test_matrix(size):
    matrix = reference.hadamard_matrix(size).double()
    signs = matrix.sum(1).sign()  # of diag(signs) @ Sylvester / sqrt(n), the sum over columns is sign * [n or 0]
    assert signs[0] == 1
    # Float32 holds sqrt(1/2) to 2^-24.
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64), rtol=0, atol=2e-7)
    if size <= 16:
        expected = torch.diag(torch.tensor(SIGNS[:size], dtype=torch.float64)) @ sylvester(size) / size**0.5
        torch.testing.assert_close(matrix, expected, rtol=1e-7, atol=0)


def test_longer_signs_extend_the_shorter():
    assert torch.equal(reference.hadamard_matrix(32)[:16, 0].sign(), reference.hadamard_matrix(16)[:, 0].sign())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [4, 16, 32])
@pytest.mark.parametrize("columns", [0, 1, 16, 33, 64])
def test_rotation_is_the_matrix_product(columns, size, dtype, device):
    x = torch.randn(5, columns, device=device).to(dtype)
    rotated = reference.rotate(x, size)
    padded = torch.nn.functional.pad(x.double(), (0, -columns % size)).cpu()
    expected = (padded.reshape(5, -1, size) @ reference.hadamard_matrix(size).double()).reshape(padded.shape)
    assert rotated.dtype is dtype
    # Up to five float32 additions, then one rounding to the dtype.
    torch.testing.assert_close(rotated.double().cpu(), expected, rtol=torch.finfo(dtype).eps, atol=2e-6)


def test_rotation_cancels_in_the_product():
    a, b = torch.randn(3, 50), torch.randn(4, 50)
    product = reference.rotate(a, 16) @ reference.rotate(b, 16).T
    torch.testing.assert_close(product, a @ b.T, rtol=1e-4, atol=1e-4)  # float32 sums over 64 terms


def test_float16_does_not_overflow_inside():
    x = torch.full((1, 16), 16000.0, dtype=torch.float16)  # the sum over signs reaches 16 * 16000 before the scaling
    assert reference.rotate(x, 16).isfinite().all()


def test_strides_do_not_matter(device):
    x = torch.randn(16, 33, device=device, dtype=torch.bfloat16)
    assert same_bits(reference.rotate(x.T, 16), reference.rotate(x.T.contiguous(), 16))


def test_spreads_an_outlier():
    x = torch.zeros(1, 16)
    x[0, 3] = 16.0
    assert torch.equal(reference.rotate(x, 16).abs(), torch.full((1, 16), 4.0))
