"""What all launchers share: the checks of their assumptions, their grids, and launching without delay."""

from __future__ import annotations

import abc
import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor

from lightning_fp4.formats import E8M0
from lightning_fp4.quantizer import Quantizer, Rounding, ScaleRule

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


def has_early_launch(x: Tensor) -> bool:
    """Whether a kernel on the device of ``x`` can start before the one before it ends (from Hopper on)."""
    return x.is_cuda and not is_interpreted() and _capability(x.get_device()) >= (9, 0)


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


def constants_of(quantizer: Quantizer) -> dict[str, Any]:
    """What kernels have to know of a quantiser, by the names of their constants."""
    block_format, rule = quantizer.format, quantizer.scale_rule
    return {
        "BY": block_format.global_scale or "none",
        "MAX": rule.encoded_max,
        "R": block_format.block[0],
        "C": block_format.block[1],
        "E8M0": block_format.scale is E8M0,
        "RULE": rule.value,
        "STOCHASTIC": quantizer.rounding is Rounding.STOCHASTIC,
        "CANDIDATES": {ScaleRule.FOUR_OVER_SIX: 2, ScaleRule.CLOSED_BEST: 3}.get(rule, 1),  # scales to try
    }


class Launch:
    """A kernel with its constants on one grid, for arguments that are alike each time.

    Triton works out at each launch which compiled form of a kernel fits its arguments, which takes longer than the
    launch. It tells apart dtypes, pointers to multiples of 16 bytes, and integers that are 1, multiples of 16 or wide.
    Whoever keeps one of these sees to it that the arguments agree in all of that from call to call, and in their
    device, which has to be the current one; then the kernel that the first call compiled fits them all.

    Args:
        launcher: the kernel, its constants and options.
        grid: how many programs along each axis.
    """

    def __init__(self, launcher: Launcher, grid: tuple[int, int, int]) -> None:
        self._launcher, self._grid = launcher, grid
        self._compiled: Callable | None = None
        self._constants: tuple = ()

    def __call__(self, *arguments: Tensor | int) -> None:
        """Launch on the current stream."""
        if self._compiled is not None:
            self._compiled(*arguments, *self._constants)
            return
        launcher, grid = self._launcher, self._grid
        compiled = launcher.kernel[grid](*arguments, **launcher.constants, **launcher.options)
        if compiled is not None:  # the interpreter compiles nothing
            names = launcher.kernel.arg_names[len(arguments) :]
            self._constants = tuple(launcher.constants[name] for name in names)
            self._compiled = compiled[grid]


class Launcher:
    """A kernel with its constants, for any arguments: a :class:`Launch` for each kind of them.

    Kinds are told apart by device, grid, dtypes, pointers modulo 16 and exact integers, which is finer than Triton.

    Args:
        kernel: a ``@triton.jit`` function whose constants come last.
        constants: their values, by name.
        warps: of each program.
        registers: that a thread may use at most, ``None`` to leave it to the compiler.
        early: start while the kernel before it on the stream still runs, if that allows it; then it waits for its
            results by ``gdc_wait``. For kernels that nothing can come between.
    """

    def __init__(
        self,
        kernel: Any,
        constants: dict[str, Any],
        warps: int = 4,
        registers: int | None = None,
        early: bool = False,
    ) -> None:
        self.kernel, self.constants = kernel, constants
        self.options = {"num_warps": warps, "maxnreg": registers, "enable_fp_fusion": False, "launch_pdl": early}
        self._launches = Remembered[Launch]()

    def __call__(self, programs: int | tuple[int, int, int], *arguments: Tensor | int) -> None:
        """Launch ``programs`` of them, a count or a grid, on the current stream of the first argument's device."""
        device = arguments[0].get_device()  # type: ignore[union-attr]
        if is_elsewhere(device):
            with torch.cuda.device(device):
                self(programs, *arguments)
            return
        kinds = [x if type(x) is int else (x.dtype, x.data_ptr() % 16) for x in arguments]  # type: ignore[union-attr]
        key = (device, programs, *kinds)
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches.keep(key, self.on(programs))
        launch(*arguments)

    def on(self, programs: int | tuple[int, int, int]) -> Launch:
        """A launch of ``programs``, a count or a grid, for whoever knows that its arguments stay alike."""
        return Launch(self, (programs, 1, 1) if isinstance(programs, int) else programs)


@functools.cache
def launcher(kernel: Any, warps: int = 4, **constants: Any) -> Launcher:
    """The one launcher of a kernel with these constants."""
    return Launcher(kernel, constants, warps)


def is_elsewhere(device: int) -> bool:
    """Whether a GPU, by its number, is not the current one; no CPU (-1) is."""
    return device >= 0 and device != torch.cuda.current_device()


Made = TypeVar("Made")


class Remembered(dict[tuple, Made]):
    """What was made for a key, up to a number of keys: token counts may differ from step to step."""

    MOST = 1024

    def keep(self, key: tuple, made: Made) -> Made:
        """Remember ``made`` and return it."""
        if len(self) >= self.MOST:
            self.clear()
        self[key] = made
        return made


class Plan(abc.ABC):
    """What launches for tensors that are alike have in common, to be called with them.

    Args:
        device: of the tensors, a GPU's number or -1.
    """

    def __init__(self, device: int) -> None:
        self._device = device

    def on_its_device(self, *arguments: Any) -> Any:
        """Call it with its device as the current one."""
        if is_elsewhere(self._device):
            with torch.cuda.device(self._device):
                return self(*arguments)
        return self(*arguments)

    @abc.abstractmethod
    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Launch for these tensors, on the current device."""


def traits(x: Tensor) -> tuple:
    """What Triton, and the kernels' constants and grids, may depend on in a tensor."""
    return x.get_device(), x.dtype, x.shape, x.stride(), x.data_ptr() % 16


class _Zeros(threading.local):
    """The zeros that are left of a larger piece, by device and stream, for each thread."""

    PIECE = 512

    def __init__(self) -> None:
        self._left: dict[tuple[int, int], tuple[Tensor, int]] = {}

    def take(self, count: int, device: int) -> Tensor:
        place = (device, torch._C._cuda_getCurrentRawStream(device))
        piece, used = self._left.get(place, (None, self.PIECE))
        if piece is None or used + count > self.PIECE:
            with torch.inference_mode(False):
                piece, used = torch.zeros((self.PIECE, 1), dtype=torch.int32, device=f"cuda:{device}"), 0
        self._left[place] = (piece, used + ceil_div(count, 4) * 4)  # pointers to multiples of 16 bytes
        return piece[used : used + count]


_zeros = _Zeros()


def zeros(count: int, like: Tensor, pool: bool) -> Tensor:
    """Zeros, int32 ``[count, 1]``, for atomic operations, that nobody else has or had.

    With ``pool``, a few of them are taken from a larger piece, since clearing a piece takes as long as a kernel. Not
    for operators that someone watches: compilers account for all memory that is used while they record a CUDA graph.
    Nor while one is captured, whose replays need zeros again.
    """
    if not pool or count > _Zeros.PIECE // 16 or not like.is_cuda or torch.cuda.is_current_stream_capturing():
        return torch.zeros((count, 1), dtype=torch.int32, device=like.device)
    return _zeros.take(count, like.get_device())
