"""What the quantising kernels are tested with on a GPU: few calls, in which choices meet in pairs, and data for each.

Kernels are compiled anew for each call, which takes seconds. Then many matrices are as cheap as one, if their sizes are
alike: Triton also compiles anew for sizes and strides that are 1 or multiples of 16, which ``test_gpu`` has tests of
its own for. So every call is checked with all the data, but not all choices with all others:

- Both forms at once: every quantiser in each form, every format and every rule (with its rounding) for every units.
  Format, rule and units of each form with every dtype, every layout, centred and not, those of the column form with
  every rotation; and dtype x centring x layout, dtype x centring x rotation, layout x rotation, units x units.
- Patched rows: every quantiser. Every format, rule and units with every choice of parts, dtype and layout, centred and
  not; every format and rule for every units; dtype x centring x layout and x parts.
- One form alone: every format and units together, and with every dtype, layout, rotation, centred and not.

``TOGETHER`` says the same in names, and ``test_cases`` holds the lists to it.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_fp4 import MXFP4, NVFP4, NVFP4_2D, NVFP4_ROW, Quantizer
from lightning_fp4.tensor import Patch

RULES = [
    ("nearest", "rne"),
    ("nearest", "unbiased"),
    ("nearest", "four_over_six"),
    ("nearest", "closed"),
    ("nearest", "closed_up"),
    ("nearest", "closed_best"),
    ("stochastic", "rne"),
    ("stochastic", "unbiased"),
    ("stochastic", "closed_up"),
]
QUANTIZERS = [
    *(Quantizer(format=f, rounding=r, scale_rule=s) for f in (NVFP4, NVFP4_2D, NVFP4_ROW) for r, s in RULES),
    Quantizer(format=MXFP4, scale_rule="unbiased"),
    Quantizer(format=MXFP4, scale_rule="unbiased", rounding="stochastic"),
]
DTYPES = [torch.bfloat16, torch.float32, torch.float16]
UNITS = [None, "bf16", "fp8"]
PARTS = [("residual", "value"), ("value", "residual"), ("residual",), ("value",)]
LAYOUTS = {
    "whole tiles": [(256, 384), (128, 128)],
    "whole tiles, transposed": [(256, 384), (128, 128)],
    "whole groups": [(309, 352), (33, 96), (5, 160)],
    "ragged": [(309, 331), (33, 70), (5, 75)],
}
"""Shapes for which a kernel is compiled once, by how the matrix lies in memory and in tiles."""
FACTORS = [0.0, 2.0**-149, 1e-40, 1e-30, 1e-12, 1e4, 1e30, 3e38]


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a form is quantised, and for which units it is decoded at once."""

    quantizer: Quantizer
    units: str | None

    def __str__(self) -> str:
        return f"{self.quantizer} {self.units or 'packed'}"

    @property
    def format(self) -> str:
        return self.quantizer.format.name

    @property
    def rule(self) -> tuple[str, str]:
        return self.quantizer.rounding.value, self.quantizer.scale_rule.value


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a call computes of what; a form that is ``None`` is left out."""

    rows: Form | None = None
    columns: Form | None = None
    parts: tuple[str, ...] = ()
    hadamard: int = 0
    dtype: torch.dtype
    centered: bool
    layout: str

    def __str__(self) -> str:
        columns = f"columns {self.columns} H{self.hadamard}" if self.columns else ""
        words = (f"rows {self.rows}" if self.rows else "", "+".join(self.parts), columns)
        dtype = str(self.dtype).removeprefix("torch.")
        return ", ".join(filter(None, (*words, dtype, "centered" * self.centered, self.layout)))


def unmet(cases: Sequence[Case], together: Sequence[str]) -> set[tuple]:
    """The combinations of choices of these names that no case has, of those choices that some case has."""
    missing = set()
    for names in together:
        met = {operator.attrgetter(*names.split())(case) for case in cases}
        possible = itertools.product(*map(set, zip(*met, strict=True)))
        missing |= {(names, *chosen) for chosen in possible if chosen not in met}
    return missing


def spread(fixed: Sequence[dict[str, Any]], free: dict[str, Sequence], together: Sequence[str]) -> list[Case]:
    """A case for each of ``fixed``, with those of the ``free`` choices that meet most of what has not met yet.

    ``together`` has names of choices of a case, for example ``"rows.rule dtype"``. Where several are as good, the
    rarest layout is taken, and the first of the other choices.
    """
    cases: list[Case] = []
    chosen = [operator.attrgetter(*names.split()) for names in together]
    met: list[set] = [set() for _ in together]

    def worth(case: Case) -> tuple[int, int]:
        news = sum(of(case) not in before for of, before in zip(chosen, met, strict=True))
        return news, -sum(case.layout == other.layout for other in cases)

    for known in fixed:
        options = (
            Case(**known, **dict(zip(free, values, strict=True))) for values in itertools.product(*free.values())
        )
        cases.append(max(options, key=worth))
        for of, before in zip(chosen, met, strict=True):
            before.add(of(cases[-1]))
    return cases


FORMS = [
    Form(quantizer=quantizer, units=units)
    for i, quantizer in enumerate(QUANTIZERS)
    for k, units in enumerate(UNITS)
    if quantizer.format is MXFP4 or (i + i // len(RULES)) % 3 != k
]
"""Every quantiser, for two of the three units, or all where the format has but two quantisers."""
_LONG = FORMS[-6:]
_FREE = {"dtype": DTYPES, "centered": [False, True], "layout": list(LAYOUTS)}
_ROTATED = {**_FREE, "hadamard": [0, 16, 2, 4, 8]}


def _with(side: str, *others: str) -> list[str]:
    return [f"{side}.{name} {other}" for name in ("format", "rule", "units") for other in others]


TOGETHER = {
    "BOTH": [
        *(
            "rows.format rows.units",
            "rows.rule rows.units",
            "columns.format columns.units",
            "columns.rule columns.units",
        ),
        "rows.units columns.units",
        *("dtype centered layout", "dtype centered hadamard", "layout hadamard"),
        *_with("rows", *_FREE),
        *_with("columns", *_ROTATED),
    ],
    "PATCHED": [
        *("rows.format rows.units", "rows.rule rows.units", "dtype centered layout", "parts dtype centered"),
        *_with("rows", *_FREE, "parts"),
    ],
    "ROWS": ["rows.format rows.units", *(f"rows.{name} {other}" for name in ("format", "units") for other in _FREE)],
    "COLUMNS": [
        "columns.format columns.units",
        *(f"columns.{name} {other}" for name in ("format", "units") for other in _ROTATED),
    ],
    "LONGEST": ["columns.rule columns.units", *(f"hadamard {other}" for other in _FREE)],
}
"""What meets in the cases of each list: all combinations of the choices of these names."""

BOTH = spread(
    [dict(rows=rows, columns=columns) for rows, columns in zip(FORMS, FORMS[32:] + FORMS[:32], strict=True)],
    _ROTATED,
    TOGETHER["BOTH"],
)
ROWS = spread([dict(rows=form) for form in (*FORMS[:-6:5], *FORMS[1:-6:5], *_LONG)], _FREE, TOGETHER["ROWS"])
COLUMNS = spread(
    [dict(columns=form) for form in (*FORMS[2:-6:5], *FORMS[3:-6:5], *_LONG)], _ROTATED, TOGETHER["COLUMNS"]
)
LONGEST = spread([dict(columns=form, hadamard=32) for form in _LONG], _FREE, TOGETHER["LONGEST"])
PATCHED = spread(
    [dict(rows=Form(quantizer=q, units=UNITS[1 + i % 2])) for i, q in enumerate(QUANTIZERS + QUANTIZERS[-11:])],
    {**_FREE, "parts": PARTS},
    TOGETHER["PATCHED"],
)


def wide(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Values over many octaves, with exact ties, a zero block, and a row of tiny values."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()
    x[:, ::7] = (x[:, ::7] * 4).round() / 4
    x[: min(16, shape[0] // 2), : min(32, shape[1] // 2)] = 0
    if shape[0] > 2:
        x[2] *= 1e-6
    return x.to(dtype)


@functools.cache
def matrices(layout: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What a call is checked with, by name: ordinary values, values at the ends of the range, NaN and infinities."""
    shapes = LAYOUTS[layout]
    found = {f"wide {shape}": wide(shape, dtype, seed) for seed, shape in enumerate(shapes)}
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = found[f"one {bad}"] = wide(shapes[1], dtype)
        x[20, 5] = bad
    rows, columns = shapes[-1]
    for factor in FACTORS:
        x = torch.linspace(-1, 1, rows * columns).reshape(rows, columns) * factor
        found[f"up to {factor}"] = x.to(dtype)
    if layout.endswith("transposed"):
        return {name: x.T.contiguous().T for name, x in found.items()}
    return found


def hot_channels(case: Case, columns: int) -> torch.Tensor:
    """Most of the channels, in any order; how many, so that the width of what they are appended to is no multiple of 16
    blocks, for which Triton would compile anew.
    """
    assert case.rows is not None
    block = case.rows.quantizer.format.block[1]
    count = columns - 1
    while (-(-columns // block) + Patch(channels=torch.empty(count), parts=case.parts).width(block) // block) % 16 == 0:
        count -= block
    return torch.randperm(columns, generator=torch.Generator().manual_seed(columns))[:count]
