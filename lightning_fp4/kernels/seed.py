"""The seeds of stochastic rounding, drawn on the GPU so that a CUDA graph draws a new one each time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_fp4.kernels._launch import check_device, launcher


@triton.jit
def _draw_kernel(state_ptr, seed_ptr):  # type: ignore[no-untyped-def]
    step = tl.load(state_ptr + 1)
    tl.store(seed_ptr, tl.load(state_ptr))
    tl.store(seed_ptr + 1, step)
    tl.store(state_ptr + 1, step + 1)


def draw_seed(rng_state: Tensor) -> Tensor:
    """The next seed of a state, int64 ``[key, step]`` both; the state's step grows by one."""
    check_device(rng_state)
    seed = torch.empty_like(rng_state)
    launcher(_draw_kernel, 1)(1, rng_state, seed)
    return seed
