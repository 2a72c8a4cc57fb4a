"""What the benchmarks of speed share: where they ran, how they time, and where their numbers go."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _harness import RESULTS, describe_device, pick_device, versions


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
