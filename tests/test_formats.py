"""Formats are data: check the numbers."""

import dataclasses

import pytest

from lightning_fp4.formats import E2M1, E2M1_VALUES, E4M3, E8M0, FORMATS, MXFP4, NVFP4, NVFP4_2D


def test_element_formats_have_the_bits_of_their_names():
    assert [f.bits for f in (E2M1, E4M3, E8M0)] == [4, 8, 8]
    assert E2M1.max == E2M1_VALUES[-1] == 6


def test_values_follow_from_the_bits():
    """Exponent bias 1: code 1 is subnormal, the others (1 + m/2) * 2^(e-1)."""
    expected = [m / 2 if e == 0 else (1 + m / 2) * 2 ** (e - 1) for e in range(4) for m in range(2)]
    assert list(E2M1_VALUES) == expected


def test_storage():
    assert NVFP4.bits_per_value == 4.5
    assert MXFP4.bits_per_value == 4.25
    assert NVFP4_2D.bits_per_value == 4 + 8 / 256


def test_names_are_unique_and_printed():
    assert all(name == fmt.name == str(fmt) for name, fmt in FORMATS.items())
    assert len(FORMATS) == len(set(FORMATS.values())) == 4


def test_formats_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        NVFP4.block = (1, 32)
