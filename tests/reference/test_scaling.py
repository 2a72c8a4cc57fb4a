"""Global and block scales at their edges."""

import pytest
import torch

from lightning_fp4 import MXFP4, NVFP4, NVFP4_2D, NVFP4_ROW, ScaleRule
from lightning_fp4.reference import scaling

FLOAT32_MAX = torch.finfo(torch.float32).max


@pytest.mark.parametrize(
    ("amax", "expected"),
    [(0.0, 1.0), (2688.0, 1.0), (1.0, 2688.0), (1e-38, FLOAT32_MAX), (2.0**-149, FLOAT32_MAX), (float("inf"), 1.0)],
)
def test_encode_scale(amax, expected, device):
    assert scaling.encode_scale(torch.tensor([[amax]], device=device), 2688.0).item() == expected


def test_encode_scale_is_one_correctly_rounded_division(device):
    amax = torch.rand(1000, dtype=torch.float32) + 0.5
    expected = (2688.0 / amax.double()).float()  # a float64 quotient of float32 values rounds to float32 correctly
    assert torch.equal(scaling.encode_scale(amax.to(device), 2688.0).cpu(), expected)


def test_nan_stays_nan():
    assert scaling.encode_scale(torch.tensor([float("nan")]), 2688.0).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_global_amax(dtype, device):
    x = torch.tensor([[1.0, -3.0], [0.5, 0.0]], dtype=dtype, device=device)
    assert scaling.global_amax(x, NVFP4).tolist() == [[3.0]]
    assert scaling.global_amax(x, NVFP4_ROW).tolist() == [[3.0], [0.5]]
    assert scaling.global_amax(x, MXFP4) is None
    for bad in (float("nan"), -float("inf")):
        x[1, 0] = bad
        assert not scaling.global_amax(x, NVFP4).isfinite().any()
        assert scaling.global_amax(x, NVFP4_ROW).isfinite().flatten().tolist() == [True, False]


def test_block_amax():
    x = torch.arange(32 * 32, dtype=torch.float32).reshape(32, 32)
    assert scaling.block_amax(-x, NVFP4)[1].tolist() == [47.0, 63.0]
    assert scaling.block_amax(x, NVFP4_2D).tolist() == [[15 * 32 + 15.0, 15 * 32 + 31.0], [31 * 32 + 15.0, 1023.0]]


def test_subnormal_scales_are_kept():
    """A floor of 2^-6 would destroy them."""
    blocks = torch.tensor([[6.0 * 2**-9, 6.0 * 3 * 2**-9, 6.0 * 2**-11]])
    scales = scaling.block_scales(blocks, torch.ones(1, 1), ScaleRule.RNE, NVFP4)
    assert scales.float().tolist() == [[2**-9, 3 * 2**-9, 0.0]]


def test_zero_scale_has_a_finite_factor():
    factors = scaling.block_encode(torch.zeros(1, 1, dtype=torch.uint8).view(torch.float8_e4m3fn), torch.ones(1, 1))
    assert factors.item() == FLOAT32_MAX
