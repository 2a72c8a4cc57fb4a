"""Two E2M1 codes in one byte: the even column in the low nibble."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(codes: Tensor) -> Tensor:
    """Pack uint8 codes ``[..., 2n]`` into bytes ``[..., n]``."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Unpack bytes ``[..., n]`` into uint8 codes ``[..., 2n]``."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
