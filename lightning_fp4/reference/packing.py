"""Two E2M1 codes in one byte: the even column in the low nibble."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fp4.reference.rounding import e2m1_decode


def pack(codes: Tensor) -> Tensor:
    """Pack uint8 codes ``[..., 2n]`` into bytes ``[..., n]``."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Unpack bytes ``[..., n]`` into uint8 codes ``[..., 2n]``."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def decode(packed: Tensor) -> Tensor:
    """Float32 values ``[..., 2n]`` of packed codes ``[..., n]``, by a table of the 256 bytes."""
    table = e2m1_decode(unpack(torch.arange(256, device=packed.device).to(torch.uint8)[:, None]))
    return torch.nn.functional.embedding(packed.int(), table).flatten(-2)
