"""Many values as one event in TensorBoard's file, whose own functions take milliseconds for each value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def bucket_counts(values: Sequence[float], buckets: int) -> tuple[list[float], list[int]]:
    """A histogram of finite values between the smallest and the largest: ``buckets + 1`` edges, ``buckets`` counts.

    In plain Python, since a few values in each of many histograms are sooner counted than put into tensors.
    """
    low, high = min(values), max(values)
    if low == high:
        margin = max(1.0, abs(low) * 1e-6)
        low, high = low - margin, high + margin
    width = (high - low) / buckets
    counts = [0] * (buckets + 1)
    for value in values:
        counts[int((value - low) / width)] += 1
    largest = counts.pop()
    counts[-1] += largest
    return [*[low + width * i for i in range(buckets)], high], counts


def write_to_tensorboard(
    writer: Any, scalars: Mapping[str, float], histograms: Mapping[str, Sequence[float]], step: int, prefix: str = ""
) -> None:
    """Write many values as one event: ``add_scalar`` and ``add_histogram`` take milliseconds for each.

    Args:
        writer: ``torch.utils.tensorboard.SummaryWriter``.
        scalars: value by tag.
        histograms: values by tag; those that are not finite are left out.
        step: of all of them.
        prefix: put before every tag.
    """
    from tensorboard.compat.proto.event_pb2 import Event

    event = Event()
    add = event.summary.value.add
    for tag, value in scalars.items():
        add(tag=prefix + tag, simple_value=value)
    for tag, numbers in histograms.items():
        finite = [number for number in numbers if math.isfinite(number)]
        if finite:
            # As many as Rice's rule says: every byte costs time in the writer's checksum, which is written in Python.
            edges, counts = bucket_counts(finite, math.ceil(2 * len(finite) ** (1 / 3)))
            histogram = add(tag=prefix + tag).histo
            histogram.min, histogram.max = min(finite), max(finite)
            histogram.num, histogram.sum = len(finite), sum(finite)
            histogram.sum_squares = sum([number * number for number in finite])
            histogram.bucket_limit.extend(edges)
            histogram.bucket.extend([0, *counts])
    writer._get_file_writer().add_event(event, step)  # `file_writer` is `None` after `close`, as between two fits
