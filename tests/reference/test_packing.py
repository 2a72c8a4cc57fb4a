"""Two codes a byte, the even column low."""

import pytest
import torch

from lightning_fp4.reference import packing


def test_even_column_lies_in_the_low_nibble():
    assert packing.pack(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)).tolist() == [[0x21, 0x0F]]


@pytest.mark.parametrize("shape", [(3, 16), (0, 16), (3, 0)])
def test_round_trip(shape):
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    assert torch.equal(packing.unpack(packing.pack(codes)), codes)


def test_every_byte():
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(packing.pack(packing.unpack(every)), every)
