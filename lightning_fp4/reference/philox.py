"""Counter-based random bits: Philox 4x32-7 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

Seven rounds are the fewest that pass BigCrush there (table 2), which rounding does not ask half of.

The bits of a value depend on nothing but ``(key, step, stream, block index)``, so they can be drawn again anywhere, in
any order, and never touch PyTorch's generators.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 7
_MASK = 0xFFFFFFFF


def _multiply(a: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of ``a * multiplier``, both of 32 bits, in int64: the product wraps but loses no bit."""
    product = a * multiplier
    return (product >> 32) & _MASK, product & _MASK


def philox_4x32(counters: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Seven rounds of Philox.

    Args:
        counters: four 32-bit words in int64 tensors that broadcast together.
        key: two 32-bit words in int64 tensors.

    Returns:
        Four random 32-bit words in int64 tensors.
    """
    c0, c1, c2, c3 = counters
    k0, k1 = key
    for _ in range(_ROUNDS):
        high_0, low_0 = _multiply(c0, _MULTIPLIER_0)
        high_1, low_1 = _multiply(c2, _MULTIPLIER_1)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def random_bytes(rows: int, columns: int, rng_state: Tensor, stream: int) -> Tensor:
    """Eight random bits for each element of a ``[rows, columns]`` matrix.

    Sixteen neighbours along a row share one Philox call: its counter is ``(group index low, group index high, step,
    stream)`` and byte ``i`` of the 16, lowest byte of the first word first, belongs to neighbour ``i``.

    Args:
        rows: number of rows.
        columns: number of columns, a multiple of 16.
        rng_state: int64 ``[2]``: key (63 bits) and step.
        stream: which of several independent draws of this step, 0 to 2^32 - 1.

    Returns:
        uint8 ``[rows, columns]``.
    """
    groups = torch.arange(rows * columns // 16, device=rng_state.device)
    key, step = rng_state[0], rng_state[1]
    counters = (groups & _MASK, groups >> 32, step & _MASK, torch.full_like(step, stream))
    words = torch.stack(philox_4x32(counters, (key & _MASK, key >> 32)), dim=-1)
    shifts = torch.tensor([0, 8, 16, 24], device=words.device)
    return ((words[..., None] >> shifts) & 0xFF).to(torch.uint8).reshape(rows, columns)
