"""What all launchers share: the checks of their assumptions, their grids, and launching without delay."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from lightning_fp4.quantizer import ScaleRule

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HADAMARD_SIZES = (2, 4, 8, 16, 32)


@functools.cache
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
    return x.is_cuda and not is_interpreted() and _capability(x.get_device()) >= (8, 9)


@functools.cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up. ``triton.cdiv`` is for kernels too, and slow on the host."""
    return -(-a // b)


def tiles_of(x: Tensor, block_m: int, block_n: int) -> tuple[int, int]:
    """How many tiles cover ``x``, and how many lie in a row of them."""
    tiles_n = ceil_div(x.shape[1], block_n)
    return ceil_div(x.shape[0], block_m) * tiles_n, tiles_n


_MOST_Y = 32768  # a grid has 65535 programs at most along y and z


def grid_of(x: Tensor, block_m: int, block_n: int) -> tuple[int, int, int]:
    """A grid whose first axis are the tiles along the columns of ``x``; the others are those along its rows."""
    tiles_m = ceil_div(x.shape[0], block_m)
    return ceil_div(x.shape[1], block_n), min(tiles_m, _MOST_Y), ceil_div(tiles_m, _MOST_Y)


def is_word_aligned(x: Tensor, group: int) -> bool:
    """Whether the rows of ``x`` are contiguous, hold whole groups, and start at multiples of 16 bytes."""
    bytes_aligned = x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0
    return x.stride(1) == 1 and x.shape[1] % group == 0 and bytes_aligned


def is_even(x: Tensor, block_m: int, block_n: int) -> bool:
    """Whether whole tiles cover ``x``, in a grid without programs to spare."""
    tiles_m = x.shape[0] // block_m
    return x.shape[0] % block_m == 0 and x.shape[1] % block_n == 0 and (tiles_m <= _MOST_Y or tiles_m % _MOST_Y == 0)


def is_wide(x: Tensor, block_m: int, block_n: int) -> bool:
    """Whether offsets within a tile of ``x``, or of its row form or column form, may exceed 32 bits."""
    steps = (block_m * x.stride(0) + block_n * x.stride(1), block_m * x.shape[1], block_n * x.shape[0])
    return max(steps) >= 2**31


def candidate_count(rule: ScaleRule) -> int:
    """How many scales ``rule`` tries for each block."""
    return {ScaleRule.FOUR_OVER_SIX: 2, ScaleRule.CLOSED_BEST: 3}.get(rule, 1)


class Launcher:
    """A kernel with its constants, launched with little more on the host than the launch itself.

    Triton works out at each launch which compiled form of a kernel fits its arguments, which takes longer than the
    launch. It tells apart dtypes, pointers to multiples of 16 bytes, and integers that are 1, multiples of 16 or wide.
    Here the compiled kernel is remembered by device, grid, dtypes, pointers modulo 16 and exact integers: finer.

    Args:
        kernel: a ``@triton.jit`` function whose constants come last.
        constants: their values, by name.
        warps: of each program.
        registers: that a thread may use at most, ``None`` to leave it to the compiler.
    """

    _MOST = 1024  # remembered at once; token counts may differ from step to step

    def __init__(self, kernel: Any, constants: dict[str, Any], warps: int = 4, registers: int | None = None) -> None:
        self.kernel, self.constants = kernel, constants
        self.options = {"num_warps": warps, "maxnreg": registers, "enable_fp_fusion": False}
        self._ready: dict[tuple, tuple[Callable, tuple]] = {}

    def __call__(self, programs: int | tuple[int, int, int], *arguments: Tensor | int) -> None:
        """Launch ``programs`` of them, a count or a grid, on the current stream of the first argument's device."""
        device = arguments[0].get_device()  # type: ignore[union-attr]
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(programs, *arguments)
            return
        kinds = [x if type(x) is int else (x.dtype, x.data_ptr() % 16) for x in arguments]  # type: ignore[union-attr]
        key = (device, programs, *kinds)
        ready = self._ready.get(key)
        if ready is not None:
            launch, constants = ready
            launch(*arguments, *constants)
            return
        grid = (programs, 1, 1) if isinstance(programs, int) else programs
        compiled = self.kernel[grid](*arguments, **self.constants, **self.options)
        if compiled is not None:  # the interpreter compiles nothing
            if len(self._ready) >= self._MOST:
                self._ready.clear()
            names = self.kernel.arg_names[len(arguments) :]
            self._ready[key] = (compiled[grid], tuple(self.constants[name] for name in names))


@functools.cache
def launcher(kernel: Any, warps: int = 4, **constants: Any) -> Launcher:
    """The one launcher of a kernel with these constants."""
    return Launcher(kernel, constants, warps)
