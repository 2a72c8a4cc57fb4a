"""Many values as one event in TensorBoard's file, whose own functions take milliseconds for each value."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

_BLOCK = 256  # bytes whose checksums are computed side by side
_POLYNOMIAL = 0x82F63B78  # of CRC-32C, its bits in reverse


def bucket_counts(values: Sequence[float], buckets: int = 30) -> tuple[list[float], list[int]]:
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
        writer: ``torch.utils.tensorboard.SummaryWriter``; from now on it writes its checksums faster.
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
            edges, counts = bucket_counts(finite)
            histogram = add(tag=prefix + tag).histo
            histogram.min, histogram.max = min(finite), max(finite)
            histogram.num, histogram.sum = len(finite), sum(finite)
            histogram.sum_squares = sum([number * number for number in finite])
            histogram.bucket_limit.extend(edges)
            histogram.bucket.extend([0, *counts])
    speed_up(writer.file_writer)
    writer.file_writer.add_event(event, step)


def speed_up(file_writer: Any) -> None:
    """Let a ``torch.utils.tensorboard.FileWriter`` write the same bytes with checksums from :func:`crc32c`.

    TensorBoard computes them in a loop over the bytes, in a thread that holds up all others: 10 to 20 milliseconds for
    a log of twenty layers. A writer that is built in another way stays as it is.
    """
    from tensorboard.summary.writer.record_writer import RecordWriter

    thread: Any = getattr(getattr(file_writer.event_writer, "_async_writer", None), "_worker", None)
    record_writer = getattr(thread, "_record_writer", None)
    if type(record_writer) is RecordWriter and hasattr(record_writer, "_writer"):
        thread._record_writer = _Records(record_writer)


class _Records:
    """What ``RecordWriter`` writes, with faster checksums.

    Args:
        original: a ``RecordWriter`` of TensorBoard.
    """

    def __init__(self, original: Any) -> None:
        self._file = original._writer
        self.flush = original.flush

    def write(self, data: bytes) -> None:
        """Write one record: length, its checksum, data, their checksum."""
        length = struct.pack("<Q", len(data))
        self._file.write(b"".join([length, _masked(crc32c(length)), data, _masked(crc32c(data))]))


def _masked(crc: int) -> bytes:
    """A checksum as records hold it (TensorFlow's ``lib/hash/crc32c.h``)."""
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


@functools.cache
def _tables() -> Any:
    """uint32 ``[_BLOCK, 256]``: what each byte at each place of a block contributes to the register after the block."""
    import numpy as np

    rows = [np.arange(256, dtype=np.uint32)]
    for _ in range(8):
        rows[0] = np.where(rows[0] & 1, rows[0] >> 1 ^ np.uint32(_POLYNOMIAL), rows[0] >> 1)
    while len(rows) < _BLOCK:
        rows.append(rows[0][rows[-1] & 255] ^ rows[-1] >> 8)
    return np.stack(rows[::-1])


def crc32c(data: bytes) -> int:
    """The checksum CRC-32C (RFC 3720, appendix B.4) of four bytes or more.

    It is linear: the register after a block is the exclusive or of what each byte contributes, which a table tells; so
    all blocks are computed at once, and put together in the end.
    """
    import numpy as np

    tables = _tables()
    padding = -len(data) % _BLOCK  # zeros in front change nothing
    # The register starts with all bits set, which is as good as inverting the first four bytes.
    padded = bytes(padding) + bytes(byte ^ 255 for byte in data[:4]) + data[4:]
    blocks = np.frombuffer(padded, dtype=np.uint8).reshape(-1, _BLOCK)
    registers = np.bitwise_xor.reduce(tables[np.arange(_BLOCK), blocks], axis=1).tolist()
    first, second, third, fourth = tables[:4].tolist()
    crc = 0
    for register in registers:  # the register before a block counts like its first four bytes
        crc = first[crc & 255] ^ second[crc >> 8 & 255] ^ third[crc >> 16 & 255] ^ fourth[crc >> 24] ^ register
    return crc ^ 0xFFFFFFFF
