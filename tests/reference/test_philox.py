"""Philox 4x32-7 against the published vectors, and the bytes drawn from it."""

import pytest
import torch

from lightning_fp4.reference.philox import philox_4x32, random_bytes

# Random123's kat_vectors, "philox4x32 7".
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
]


def _words(text: str, device) -> tuple:
    return tuple(torch.tensor(int(word, 16), device=device) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter, key, expected, device):
    words = philox_4x32(_words(counter, device), _words(key, device))
    assert " ".join(f"{int(word):08x}" for word in words) == expected


def test_bytes_are_philox_words_lowest_byte_first(device):
    key, step, stream = (0x0123456789ABCDEF, 0x1_0000_0007, 5)
    drawn = random_bytes(2, 48, torch.tensor([key, step], device=device), stream).cpu()
    for group in range(6):
        counter = tuple(torch.tensor(v) for v in (group, 0, step & 0xFFFFFFFF, stream))
        words = philox_4x32(counter, (torch.tensor(key & 0xFFFFFFFF), torch.tensor(key >> 32)))
        expected = b"".join(int(word).to_bytes(4, "little") for word in words)
        assert bytes(drawn.reshape(-1, 16)[group].tolist()) == expected


def test_draws_differ_by_key_step_and_stream_and_repeat_otherwise(device):
    def draw(key, step, stream):
        return bytes(random_bytes(4, 32, torch.tensor([key, step], device=device), stream).flatten().tolist())

    draws = [draw(*args) for args in ((1, 0, 0), (2, 0, 0), (1 << 40, 0, 0), (1, 1, 0), (1, 0, 1))]
    assert len(set(draws)) == len(draws)
    assert draw(1, 0, 0) == draws[0]


def test_bytes_are_uniform():
    counts = torch.bincount(random_bytes(256, 1024, torch.tensor([3, 0]), 0).flatten().int(), minlength=256).double()
    expected = 256 * 1024 / 256
    # Chi-squared with 255 degrees of freedom: mean 255, deviation 22.6; five deviations.
    assert abs(float(((counts - expected) ** 2 / expected).sum()) - 255) < 5 * 22.6


def test_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    random_bytes(4, 16, torch.tensor([1, 0]), 0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (0, 0)])
def test_no_elements(shape):
    assert random_bytes(*shape, torch.tensor([1, 0]), 0).shape == shape
