"""What the benchmarks of speed share: where they ran, how they time, and where their numbers go."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from _harness import RESULTS, describe_device, pick_device, versions

from lightning_fp4 import backends


def environment() -> dict[str, Any]:
    """Device and versions."""
    device = pick_device()
    found: dict[str, Any] = {**versions(), "device": describe_device(device)}
    if device.type == "cuda":
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
        found["cuda"] = torch.version.cuda
    return found


def write_results(name: str, results: dict[str, Any]) -> Path:
    """Write ``results`` with the environment to ``benchmarks/results/NAME.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"environment": environment(), **results}, indent=1) + "\n")
    return path


def median_ms(call: Callable[[], Any], *, repeats: int = 20, warmup: int = 5) -> float:
    """Median time of one call on the GPU in milliseconds, by events around each call."""
    return medians_ms([call], repeats=repeats, warmup=warmup)[0]


def medians_ms(calls: list[Callable[[], Any]], *, repeats: int = 20, warmup: int = 5) -> list[float]:
    """Medians of several calls, measured in turns so that clocks and heat are the same for all."""
    for call in calls:
        for _ in range(warmup):
            call()
    torch.cuda.synchronize()
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, mine in zip(calls, times, strict=True):
            # Idle for some milliseconds, so that all launches of the call are queued when its time starts.
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(10_000_000)
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            mine.append(start.elapsed_time(end))
    return [statistics.median(mine) for mine in times]


def quantiser_backend() -> str:
    """What quantises on this device, ``"triton"`` or ``"reference"``."""
    return backends.backend(pick_device())


class Clock:
    """Marks in time on the GPU's own clock, taken without waiting for it; the host's clock where there is no GPU."""

    def __init__(self) -> None:
        self._marks: list[Any] = []

    def mark(self) -> None:
        """The moment when all that was launched so far is done."""
        if torch.cuda.is_available():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def intervals_ms(self) -> list[float]:
        """Milliseconds from each mark to the next; waits for the last."""
        pairs = list(itertools.pairwise(self._marks))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            return [first.elapsed_time(second) for first, second in pairs]
        return [(second - first) * 1e3 for first, second in pairs]


def synchronized_seconds() -> float:
    """The host's clock once the GPU has done all that was launched."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and an interval that holds the true median with about 95 % confidence, whatever the distribution.

    The interval's ends are the order statistics half a normal approximation to the binomial away from the middle; below
    six values, the smallest and the largest.

    Raises:
        ValueError: without values.
    """
    if not values:
        raise ValueError("`median_interval` needs at least one value.")
    ordered = sorted(values)
    count = len(ordered)
    reach = 0.98 * math.sqrt(count)
    low = max(0, math.floor(count / 2 - reach))
    high = min(count - 1, math.ceil(count / 2 + reach) - 1)
    return statistics.median(ordered), ordered[low], ordered[high]
