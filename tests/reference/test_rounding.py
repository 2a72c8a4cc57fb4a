"""Rounding to E2M1, E4M3 and E8M0, against oracles that search all values."""

import itertools
import math
from fractions import Fraction

import pytest
import torch

from lightning_fp4.formats import E2M1_VALUES
from lightning_fp4.reference import rounding

FLOAT32_MAX = torch.finfo(torch.float32).max
E4M3_BYTES = torch.arange(0x7F, dtype=torch.uint8)  # 0 .. 448
E4M3_VALUES = [
    (byte & 7) / 8 * 2.0**-6 if byte < 8 else (1 + (byte & 7) / 8) * 2.0 ** ((byte >> 3) - 7) for byte in range(0x7F)
]


def with_neighbours(values) -> torch.Tensor:
    x = torch.tensor(values, dtype=torch.float32)
    infinity = torch.tensor(float("inf"))
    return torch.cat((x, torch.nextafter(x, infinity), torch.nextafter(x, -infinity)))


def nearest_even(value: float, grid) -> int:
    """Index of the nearest grid value; of two as near, the even index."""
    value = Fraction(value)
    distances = [abs(value - Fraction(g)) for g in grid]
    least = min(distances)
    candidates = [i for i, d in enumerate(distances) if d == least]
    return candidates[0] if len(candidates) == 1 else next(i for i in candidates if i % 2 == 0)


def midpoints(grid) -> list[float]:
    return [(a + b) / 2 for a, b in itertools.pairwise(grid)]


def test_e2m1_nearest_on_every_value_tie_and_neighbour(device):
    x = with_neighbours([*E2M1_VALUES, *midpoints(E2M1_VALUES), 7.0, 100.0, FLOAT32_MAX, 2.0**-149])
    x = x[x.isfinite()]
    x = torch.cat((x, -x, torch.randn(500) * 3))
    expected = [nearest_even(abs(v), E2M1_VALUES) + 8 * (math.copysign(1, v) < 0) for v in x.tolist()]
    assert rounding.e2m1_nearest(x.to(device)).tolist() == expected


def test_e2m1_ties_of_the_notes():
    ties = {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5: 4}
    codes = rounding.e2m1_nearest(torch.tensor(list(ties), dtype=torch.float32))
    assert [E2M1_VALUES[c] for c in codes.tolist()] == list(ties.values())


def test_e2m1_decode_of_all_codes(device):
    decoded = rounding.e2m1_decode(torch.arange(16, dtype=torch.uint8, device=device))
    assert decoded.tolist() == [*E2M1_VALUES, *(-v for v in E2M1_VALUES)]
    assert torch.signbit(decoded).tolist() == [False] * 8 + [True] * 8
    codes = torch.arange(16, dtype=torch.uint8, device=device)
    assert torch.equal(rounding.e2m1_nearest(rounding.e2m1_decode(codes)), codes)


def test_e2m1_stochastic_probability_is_exact(device):
    """Over all 256 bytes, the share that rounds up is floor(256 * distance) / 256, and only neighbours occur."""
    sixteenths = [n / 64 for n in range(6 * 64 + 1)]
    x = with_neighbours(sixteenths).clamp(0, 6).to(device)
    x = torch.cat((x, -x))
    bits = torch.arange(256, dtype=torch.uint8, device=device)
    codes = rounding.e2m1_stochastic(x[:, None].expand(-1, 256), bits.expand(len(x), -1)).cpu()
    for value, drawn in zip(x.tolist(), codes, strict=True):
        below = max(i for i, v in enumerate(E2M1_VALUES) if v <= abs(value))
        step = E2M1_VALUES[min(below + 1, 7)] - E2M1_VALUES[below]
        distance = (Fraction(abs(value)) - Fraction(E2M1_VALUES[below])) / Fraction(step or 1)
        up = int((drawn & 7 == below + 1).sum())
        assert int((drawn & 7 == below).sum()) + up == 256
        assert up == math.floor(256 * distance)
        assert bool((drawn >> 3 == (1 if math.copysign(1, value) < 0 else 0)).all())


def test_e2m1_stochastic_saturates_and_bytes_order(device):
    x = torch.tensor([6.0, 7.0, 1e30, -6.5], device=device)
    for byte in (0, 255):
        bits = torch.full((4,), byte, dtype=torch.uint8, device=device)
        assert rounding.e2m1_stochastic(x, bits).tolist() == [7, 7, 7, 15]
    half = torch.full((256,), 0.25, device=device)
    up = rounding.e2m1_stochastic(half, torch.arange(256, dtype=torch.uint8, device=device))
    assert up.tolist() == [0] * 128 + [1] * 128


E4M3_INPUTS = with_neighbours([*E4M3_VALUES, *midpoints(E4M3_VALUES), 449.0, 464.0, 480.0, 1e10, 2.0**-149, 2.0**-11])


def test_e4m3_nearest_everywhere(device):
    x = E4M3_INPUTS[E4M3_INPUTS >= 0]
    expected = [nearest_even(v, E4M3_VALUES) for v in x.tolist()]
    actual = rounding.e4m3_nearest(x.to(device))
    assert actual.dtype is torch.float8_e4m3fn
    assert actual.view(torch.uint8).tolist() == expected


def test_e4m3_up_everywhere(device):
    x = E4M3_INPUTS[E4M3_INPUTS >= 0]
    expected = [next((i for i, g in enumerate(E4M3_VALUES) if g >= v), 0x7E) for v in x.tolist()]
    assert rounding.e4m3_up(x.to(device)).view(torch.uint8).tolist() == expected


@pytest.mark.parametrize("rule", [rounding.e4m3_nearest, rounding.e4m3_up])
def test_e4m3_saturates_and_keeps_nan(rule, device):
    x = torch.tensor([float("inf"), FLOAT32_MAX, 448.0, float("nan")], device=device)
    assert rule(x).view(torch.uint8).tolist()[:3] == [0x7E] * 3
    assert bool(rule(x).float()[3].isnan())


def test_e8m0_up_over_all_exponents(device):
    powers = [2.0**e for e in range(-149, 128)]
    x = with_neighbours([*powers, *(1.5 * p for p in powers if p < 1e38), 0.0])
    x = x[(x >= 0) & x.isfinite()]
    expected = [0 if v == 0 else min(max(math.ceil(_log2(v)), -127), 127) + 127 for v in x.tolist()]
    actual = rounding.e8m0_up(x.to(device))
    assert actual.dtype is torch.float8_e8m0fnu
    assert actual.view(torch.uint8).tolist() == expected
    # Every E8M0 value is a fixed point.
    every = torch.arange(255, dtype=torch.uint8, device=device).view(torch.float8_e8m0fnu)
    assert rounding.e8m0_up(every.float()).view(torch.uint8).tolist() == list(range(255))


def _log2(value: float) -> float:
    """Exact for powers of two; on the right side of an integer for everything else."""
    mantissa, exponent = math.frexp(value)
    return exponent - 1 if mantissa == 0.5 else exponent - 0.5


def test_e8m0_non_finite_becomes_nan(device):
    x = torch.tensor([float("inf"), float("nan")], device=device)
    assert rounding.e8m0_up(x).view(torch.uint8).tolist() == [255, 255]
    assert bool(rounding.e8m0_up(x).float().isnan().all())


# ---- closed scales ---------------------------------------------------------------------------------------------------


def test_closed_scales_are_those_whose_products_are_e4m3_values():
    """All 127 x 8 products: a scale up to 64 is on the list if and only if its products are E4M3 values."""
    values = set(E4M3_VALUES)
    closed = [s for s in E4M3_VALUES if s <= 64 and all(v * s in values for v in E2M1_VALUES)]
    assert list(rounding.CLOSED_SCALES) == closed
    assert len(closed) == 41
    beyond = [s for s in E4M3_VALUES if s > 64 and all(v * s in values for v in E2M1_VALUES)]
    assert not beyond  # 64 is as large as they come


def test_closed_products_pass_through_e4m3(device):
    """What PyTorch's cast makes of the products, signs included."""
    codes = rounding.e2m1_decode(torch.arange(16, dtype=torch.uint8, device=device))
    products = codes[:, None] * torch.tensor(rounding.CLOSED_SCALES, device=device)
    assert torch.equal(products.to(torch.float8_e4m3fn).float(), products)


CLOSED_INPUTS = with_neighbours([*rounding.CLOSED_SCALES, *midpoints(rounding.CLOSED_SCALES), 65.0, 448.0, 1e10])


def test_closed_nearest_everywhere(device):
    x = CLOSED_INPUTS[CLOSED_INPUTS >= 0]
    grid = rounding.CLOSED_SCALES
    # Of two as near the larger one; differences of neighbouring float32 values are exact here.
    expected = [max(grid, key=lambda s: (-abs(Fraction(v) - Fraction(s)), s)) for v in x.tolist()]
    actual = rounding.closed_nearest(x.to(device))
    assert actual.dtype is torch.float8_e4m3fn
    assert actual.float().tolist() == expected


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_closed_up_everywhere(offset, device):
    x = CLOSED_INPUTS[CLOSED_INPUTS >= 0]
    grid = rounding.CLOSED_SCALES
    first = [next((i for i, s in enumerate(grid) if s >= v), 40) for v in x.tolist()]
    expected = [grid[min(i + offset, 40)] for i in first]
    assert rounding.closed_up(x.to(device), offset).float().tolist() == expected


@pytest.mark.parametrize("rule", [rounding.closed_nearest, rounding.closed_up])
def test_closed_scales_saturate_and_keep_nan(rule, device):
    x = torch.tensor([float("inf"), FLOAT32_MAX, 64.0, float("nan")], device=device)
    assert rule(x).float().tolist()[:3] == [64.0] * 3
    assert bool(rule(x).float()[3].isnan())
