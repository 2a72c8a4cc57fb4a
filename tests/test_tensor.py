"""The plain container."""

import dataclasses

import pytest
import torch

from lightning_fp4 import FP4Tensor, Quantizer, ops


def test_is_plain_data():
    quantized = ops.quantize(torch.randn(17, 40), Quantizer())
    assert not isinstance(quantized, torch.Tensor)
    assert quantized.shape == (17, 40)
    assert (quantized.codes.shape, quantized.codes.dtype) == ((17, 24), torch.uint8)
    assert (quantized.scales.shape, quantized.scales.dtype) == ((17, 3), torch.float8_e4m3fn)
    assert quantized.nbytes == 17 * 24 + 17 * 3
    assert quantized.encoded_max == 6 * 448
    with pytest.raises(dataclasses.FrozenInstanceError):
        quantized.shape = (1, 1)
    with pytest.raises(TypeError):
        FP4Tensor(quantized.codes)
