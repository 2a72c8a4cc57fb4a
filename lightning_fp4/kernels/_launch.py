"""What all launchers share: the checks of their assumptions and their grids."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from lightning_fp4.quantizer import ScaleRule

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HADAMARD_SIZES = (2, 4, 8, 16, 32)


def is_interpreted() -> bool:
    """Whether Triton runs its kernels in its interpreter (``TRITON_INTERPRET=1``), which takes CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


def check_device(x: Tensor) -> None:
    """The kernels' first assumption.

    Raises:
        ValueError: for a tensor that the kernels cannot read.
    """
    if not x.is_cuda and not is_interpreted():
        raise ValueError(f"The Triton kernels need CUDA tensors, got one on {x.device}. Use `lightning_fp4.ops`.")


def check_input(x: Tensor, hadamard: int | None) -> None:
    """What every kernel that reads a matrix assumes.

    Raises:
        ValueError: for another shape, dtype, device or rotation.
    """
    check_device(x)
    if x.ndim != 2 or x.dtype not in DTYPES:
        raise ValueError(f"The kernels read float32, bfloat16 or float16 matrices, got {x.dtype} {tuple(x.shape)}.")
    if hadamard is not None and hadamard not in HADAMARD_SIZES:
        raise ValueError(f"`hadamard={hadamard!r}` must be one of {HADAMARD_SIZES} or None.")


def has_e4m3(x: Tensor) -> bool:
    """Whether the device of ``x`` converts to E4M3 itself (Ada, Hopper, Blackwell)."""
    return x.is_cuda and not is_interpreted() and torch.cuda.get_device_capability(x.device) >= (8, 9)


def grid_of(x: Tensor, block_m: int, block_n: int) -> tuple[tuple[int], int]:
    """A one-dimensional grid of tiles that covers ``x``, and the number of tiles in a row of them."""
    tiles_n = triton.cdiv(x.shape[1], block_n)
    return (triton.cdiv(x.shape[0], block_m) * tiles_n,), tiles_n


def is_wide(x: Tensor, block_m: int, block_n: int) -> bool:
    """Whether offsets within a tile of ``x``, or of its row form or column form, may exceed 32 bits."""
    steps = (block_m * x.stride(0) + block_n * x.stride(1), block_m * x.shape[1], block_n * x.shape[0])
    return max(steps) >= 2**31


def candidate_count(rule: ScaleRule) -> int:
    """How many scales ``rule`` tries for each block."""
    return {ScaleRule.FOUR_OVER_SIX: 2, ScaleRule.CLOSED_BEST: 3}.get(rule, 1)
