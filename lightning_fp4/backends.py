"""Which implementation quantises and which units multiply on a device: the only place that chooses."""

import functools
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fp4 import blackwell
from lightning_fp4.quantizer import Quantizer
from lightning_fp4.recipes.base import GemmUnits
from lightning_fp4.tensor import Units

_kernels_enabled = True


def enable_kernels(enabled: bool = True) -> None:
    """Quantise with the Triton kernels where they run, as by default, or with the reference everywhere; process-wide.

    Both give the same bits; the reference is there to compare with.
    """
    global _kernels_enabled
    _kernels_enabled = enabled


@functools.cache
def _triton_kernels() -> ModuleType | None:
    """The kernels, if Triton is installed."""
    try:
        import triton  # noqa: F401
    except ModuleNotFoundError:
        return None
    from lightning_fp4 import kernels

    return kernels


def backend(device: torch.device) -> Literal["triton", "reference"]:
    """Which implementation quantises on this device: Triton's on NVIDIA GPUs from Ampere on, else the reference."""
    return "triton" if _kernels_enabled and _runs_triton(device) else "reference"


@functools.cache
def _runs_triton(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and _triton_kernels() is not None


def kernels_for(x: Tensor) -> Any:
    """The kernels for ``x``, ``None`` if it is the reference's turn."""
    return _triton_kernels() if x.is_cuda and backend(x.device) == "triton" else None


def gemm_path(
    device: torch.device, lhs: Quantizer | None = None, rhs: Quantizer | None = None, wanted: GemmUnits = "exact"
) -> Units:
    """Which units multiply two quantised operands on this device; without quantisers, those that suit all formats.

    ``"auto"`` takes FP8 units where the device has them and they take the formats, ``"exact"`` only where they are
    exact too; BF16 units, which are exact for every format, multiply the rest. FP4 units have to be asked for: that
    path has not run on hardware yet. A CPU computes in float32; it can show what FP8 units would give, from the same
    E4M3 operands.

    Raises:
        ValueError: if FP4 or FP8 units are asked for and the device has none, or they do not take the formats.
    """
    suits = all(q is not None and q.format.global_scale == "tensor" for q in (lhs, rhs))
    if wanted == "fp4":
        obstacle = blackwell.obstacle(device, *(None if q is None else q.format for q in (lhs, rhs)))
        if obstacle is not None:
            raise ValueError(f"`units='fp4'`: {obstacle}. Use units='auto'.")
        return "fp4"
    if wanted == "fp8":
        if not suits:
            raise ValueError(f"`units='fp8'` needs formats with one scale per tensor, got {lhs} and {rhs}.")
        if not _has_fp8(device):
            raise ValueError(f"`units='fp8'`: {device} has no FP8 units (Ada and Hopper do). Use units='auto'.")
        return "fp8"
    if device.type != "cuda":
        return "fp32"
    takes_fp8 = suits and wanted != "bf16" and (wanted == "auto" or is_exact("fp8", lhs, rhs))
    return "fp8" if takes_fp8 and _has_fp8(device) else "bf16"


def _has_fp8(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def is_exact(units: Units, lhs: Quantizer | None, rhs: Quantizer | None) -> bool:
    """Whether these units multiply these operands without rounding them, or the sums, once more."""
    if units == "fp4":
        return not any(q is not None and blackwell.rounds_sums(q.format) for q in (lhs, rhs))
    return units != "fp8" or all(q is not None and q.scale_rule.is_closed for q in (lhs, rhs))
