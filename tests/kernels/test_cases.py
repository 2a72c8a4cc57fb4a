"""The cases of the GPU tests: all that is promised meets, and a case's matrices need one compiled kernel each."""

from types import SimpleNamespace
from unittest.mock import ANY

import pytest
import torch

from tests.kernels import cases
from tests.kernels.cases import DTYPES, LAYOUTS, PARTS, QUANTIZERS, TOGETHER, UNITS, Case, matrices, unmet

LISTS = {name: getattr(cases, name) for name in TOGETHER}


@pytest.mark.parametrize("name", LISTS)
def test_what_is_promised_meets(name):
    assert not unmet(LISTS[name], TOGETHER[name])


def test_every_choice_is_taken():
    for found in LISTS.values():
        assert {case.dtype for case in found} == set(DTYPES)
        assert {case.centered for case in found} == {False, True}
        assert {case.layout for case in found} == set(LAYOUTS)
    for name, side in (("BOTH", "rows"), ("BOTH", "columns"), ("ROWS", "rows"), ("COLUMNS", "columns")):
        forms = [getattr(case, side) for case in LISTS[name]]
        assert {form.units for form in forms} == set(UNITS)
        assert {form.rule for form in forms} == {(q.rounding.value, q.scale_rule.value) for q in QUANTIZERS}
        assert {form.format for form in forms} == {q.format.name for q in QUANTIZERS}
    for name, side in (("BOTH", "rows"), ("BOTH", "columns"), ("PATCHED", "rows")):
        assert {getattr(case, side).quantizer for case in LISTS[name]} == set(QUANTIZERS)
    assert {case.parts for case in LISTS["PATCHED"]} == set(PARTS)
    for name in ("BOTH", "COLUMNS"):
        assert {case.hadamard for case in LISTS[name]} == {0, 2, 4, 8, 16}
    assert {case.hadamard for case in LISTS["LONGEST"]} == {32}


def test_what_is_unmet_is_found():
    found = [
        Case(dtype=torch.float32, centered=False, layout="ragged"),
        Case(dtype=torch.float16, centered=True, layout="ragged"),
    ]
    missing = {("dtype centered", torch.float32, True), ("dtype centered", torch.float16, False)}
    assert unmet(found, ["dtype centered", "dtype layout"]) == missing


def _kind(argument):
    """What Triton compiles anew for."""
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, argument >= 2**31
    return argument.dtype, argument.data_ptr() % 16 == 0


@pytest.mark.parametrize("name", LISTS)
def test_a_case_is_compiled_once(name, monkeypatch):
    pytest.importorskip("triton")
    from lightning_fp4.kernels import _launch
    from tests.kernels import checks

    def launch(self, *arguments):
        launcher = self._launcher
        compiled.setdefault(launcher.kernel.__name__, set()).add((launcher, *map(_kind, arguments)))

    monkeypatch.setattr(_launch.Launch, "__call__", launch)
    monkeypatch.setattr(_launch, "check_device", lambda _: None)
    monkeypatch.setattr(checks, "expected_form", lambda *_, **__: SimpleNamespace(shape=ANY))
    monkeypatch.setattr(checks, "assert_same_form", lambda *_: None)
    for case in LISTS[name]:
        compiled = {}
        for x in matrices(case.layout, case.dtype).values():
            checks.check_case(case, x)
        assert "_quantize_kernel" in compiled
        assert ("_patch_kernel" in compiled) is (name == "PATCHED")
        assert all(len(kinds) == 1 for kinds in compiled.values()), case
