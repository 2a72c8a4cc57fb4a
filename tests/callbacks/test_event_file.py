"""Many values as one event in TensorBoard's file."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tensorboard.compat.proto.event_pb2 import Event
from torch.utils.tensorboard import SummaryWriter

from lightning_fp4.callbacks.event_file import bucket_counts, write_to_tensorboard


def test_one_event_holds_all_values(tmp_path):
    writer = SummaryWriter(str(tmp_path))
    writer.add_scalar("before", 1.0, 1)
    for step in (2, 3):
        write_to_tensorboard(writer, {"a": 0.5, "b": math.inf}, {"h": [1.0, 2.0, math.nan], "none": [math.nan]}, step)
    writer.add_scalar("after", 2.0, 4)
    writer.close()
    (path,) = tmp_path.iterdir()
    write_to_tensorboard(writer, {"a": 0.5}, {}, 5)  # opens another file
    writer.close()
    assert len(list(tmp_path.iterdir())) == 2
    raw, events = path.read_bytes(), []
    while raw:
        size = int.from_bytes(raw[:8], "little")
        events.append(Event.FromString(raw[12 : 12 + size]))
        raw = raw[16 + size :]
    assert [(e.step, [v.tag for v in e.summary.value]) for e in events[1:]] == [
        (1, ["before"]),
        (2, ["a", "b", "h"]),
        (3, ["a", "b", "h"]),
        (4, ["after"]),
    ]
    assert events[2].wall_time > 0
    assert events[2].summary.value[1].simple_value == math.inf
    histogram = events[2].summary.value[2].histo
    assert (histogram.min, histogram.max, histogram.num, histogram.sum, histogram.sum_squares) == (1, 2, 2, 3, 5)
    assert sum(histogram.bucket) == 2
    assert len(histogram.bucket) == len(histogram.bucket_limit) == 4


@pytest.mark.parametrize("values", [[1.0, 1.5, 4.0, 4.0, 2.25], [3.0], [0.1] * 3, [-2.0, 7.0], [1e30, -1e-30]])
def test_buckets_are_those_of_numpy(values):
    edges, counts = bucket_counts(values, 7)
    bounds = (values[0] - 1, values[0] + 1) if len(set(values)) == 1 else None
    expected_counts, expected_edges = np.histogram(values, 7, range=bounds)
    assert counts == expected_counts.tolist()
    np.testing.assert_allclose(edges, expected_edges, rtol=1e-12)


@pytest.mark.parametrize("value", [0.0, 1e30, -1e300])
def test_a_single_value_of_any_size_has_buckets(value):
    edges, counts = bucket_counts([value], 5)
    assert sum(counts) == 1
    assert edges[0] < value < edges[-1]
    assert len(edges) == len(counts) + 1 == 6
