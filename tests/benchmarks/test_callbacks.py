"""benchmarks/callbacks.py at toy size: it times the steps that it means to, and its table says what it measured."""

import dataclasses
import logging
import re
import sys
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import Callback

from lightning_fp4 import backends
from lightning_fp4.callbacks import PrecisionMonitor, RecipeSchedule, hot_channel_refresh, rollback
from lightning_fp4.operands import OperandReader

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import _harness as harness
import _timing as timing
import callbacks as bench
from _models import Size

SETTING = bench.Setting(size=Size(width=32, depth=2, heads=2, hidden=64, vocabulary=64), batch=1, length=16)


@pytest.fixture(autouse=True)
def _kernels_as_they_are(monkeypatch):
    monkeypatch.setattr(timing, "quantiser_backend", lambda: backends.backend(harness.pick_device()))


EVENTS = {
    "FP4HealthCheck": (rollback.MemoryStore, "take"),
    "FP4HealthCheck max_saturation": (OperandReader, "__enter__"),
    "PrecisionMonitor": (PrecisionMonitor, "_log"),
    "HotChannelRefresh": (hot_channel_refresh, "choose_channels"),
    "RecipeSchedule": (RecipeSchedule, "_apply"),
    "AverisToggle": (RecipeSchedule, "_apply"),
}


def test_every_event_is_listed_here():
    assert set(EVENTS) == {name for name, variant in bench.VARIANTS.items() if variant.event is not None}


@pytest.mark.parametrize("name", EVENTS)
def test_events_happen_at_the_steps_that_are_timed_for_them(name, monkeypatch):
    """And at no other: so their neighbours are ordinary."""
    owner, attribute = EVENTS[name]
    original = getattr(owner, attribute)
    batch, seen = [-1], []

    def spy(*args, **kwargs):
        seen.append(batch[0])
        return original(*args, **kwargs)

    class Count(Callback):
        def on_train_batch_start(self, trainer, pl_module, _, batch_idx):
            batch[0] = batch_idx

    monkeypatch.setattr(owner, attribute, spy)
    variant = bench.VARIANTS[name]
    SETTING.fit(variant.recipe, [Count(), variant.event.make()], steps=8)
    # What happens at the very beginning (a first snapshot, a first recipe) is warm-up.
    assert [i for i in seen if i >= 1] == [i for i in range(1, 8) if i % 2 == variant.event.parity]


@pytest.mark.parametrize(("parity", "expected"), [(0, [(5, 1), (7, 1)]), (1, [(7, 2), (9, 2)])])
def test_special_steps_are_paired_with_the_next_one(parity, expected, monkeypatch):
    monkeypatch.setattr(bench, "WARMUP_PAIRS", 1)
    steps = [9, 9, 5, 1, 7, 1] if parity == 0 else [9, 9, 9, 7, 2, 9, 2]
    marks = [sum(steps[:i]) / 1e3 for i in range(len(steps) + 1)]
    assert bench.event_steps(marks, parity) == [pytest.approx(pair) for pair in expected]


def test_as_many_pairs_as_asked_for(monkeypatch):
    monkeypatch.setattr(bench, "WARMUP_PAIRS", 1)
    for name in ("PrecisionMonitor", "RecipeSchedule"):  # both parities
        assert len(bench.measure_event(SETTING, bench.VARIANTS[name], pairs=2)["pairs_ms"]) == 2


def test_segments_take_turns_and_are_compared_with_their_neighbours():
    opened = []

    class Slow(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            opened.append(batch_idx)

    gates = [bench.Gate("empty", []), bench.Gate("slow", [Slow()])]
    segments = bench.Segments(gates, steps=2, seconds=0)
    SETTING.fit("high_precision", [segments, *gates], steps=1000)
    # Segments of a round: none, empty, none, slow; three rounds and one more segment.
    assert opened == [6, 7, 14, 15, 22, 23]
    assert len(segments.marks) - 1 == 13
    found = segments.overheads()
    assert list(found) == ["empty", "slow"]
    assert all(len(result["segments_ms"]) == 2 for result in found.values())  # without the first round
    ms = [1.0, 9, 1, 9, 1, 2, 1, 3, 2, 2, 1, 4, 1]
    segments.marks = [2 * sum(ms[:i]) / 1e3 for i in range(len(ms) + 1)]
    found = segments.overheads()
    assert found["empty"]["segments_ms"] == [2.0, 2.0]
    assert found["empty"]["neighbours_ms"] == [1.0, 1.5]
    assert found["slow"]["neighbours_ms"] == [1.5, 1.0]
    assert found["slow"]["overhead"] == pytest.approx([2.0, 1.0, 3.0])


TINY = ("--tiny", "--pairs", "2", "--segment", "1", "--seconds", "0")


@pytest.mark.slow
def test_the_command_measures_every_variant_and_reports(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "WARMUP_PAIRS", 1)
    level = logging.getLogger("lightning.pytorch").level
    results = tmp_path / "callbacks.json"
    bench.main([*TINY, "--results", str(results)])
    assert logging.getLogger("lightning.pytorch").level == level
    records = harness.load_results(results)
    variants = bench.VARIANTS.items()
    assert sorted((r["variant"], r["kind"]) for r in records) == sorted(
        [(name, "event") for name, variant in variants if variant.event is not None]
        + [(name, "every step") for name, variant in variants if variant.steady is not None]
    )
    for record in records:
        assert "failed" not in record
        assert len(record["pairs_ms" if record["kind"] == "event" else "segments_ms"]) == 2
    assert {r["recipe"] for r in records if r["variant"] == "HotChannelRefresh"} == {"chon"}
    assert all(r["quantiser"] == backends.backend(harness.pick_device()) for r in records)
    table = bench.write_report(results)
    assert table in capsys.readouterr().out
    readme = tmp_path / "README.md"
    readme.write_text("<!-- callbacks: how -->\nold\n<!-- /callbacks -->\n")
    bench.main(["--report", "--results", str(results), "--insert", str(readme)])
    assert table.strip() in readme.read_text()


class Broken(Callback):
    def __init__(self, hook):
        setattr(self, hook, self.fail)

    def fail(self, *_):
        raise ValueError("broken on purpose")


class Breaking(Callback):
    """What fails is the step after it."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pl_module.training_step = Broken("fail").fail


def test_what_fails_costs_no_other_its_result(tmp_path, capsys, monkeypatch):
    def event(make):
        return bench.Event(what="event", make=make, parity=0, interval=None)

    def troubled():
        health = bench.FP4HealthCheck("warn")
        health.events = 1
        return [health]

    fine = bench.Variant(steady=list, event=event(Callback), recipe="high_precision")
    variants = {
        "at start": dataclasses.replace(
            fine, steady=lambda: [Broken("on_train_start")], event=event(lambda: Broken("on_train_batch_end"))
        ),
        "fine": fine,
        "at a step": dataclasses.replace(fine, steady=lambda: [Broken("on_after_backward")], event=None),
        "the step": dataclasses.replace(fine, steady=lambda: [Breaking()], event=None),
        "troubled": dataclasses.replace(fine, steady=troubled, event=None),
    }
    monkeypatch.setattr(bench, "VARIANTS", variants)
    monkeypatch.setattr(bench, "WARMUP_PAIRS", 1)
    results = tmp_path / "callbacks.json"
    failed = "at start (event), at start (every step), at a step (every step), the step (every step), troubled"
    with pytest.raises(SystemExit, match=re.escape(f"failed: {failed} (every step)")):
        bench.main([*TINY, "--results", str(results)])
    records = {(r["variant"], r["kind"]): r for r in harness.load_results(results)}
    assert len(records) == 7
    for key, record in records.items():
        assert ("failed" in record) is (key[0] != "fine")
        assert key[0] in ("fine", "troubled") or record["failed"] == "ValueError: broken on purpose"
    out = capsys.readouterr()
    assert "at start, event: failed: ValueError: broken on purpose" in out.out
    assert "in fail" in out.err  # the traceback
    rows = {row["callback"]: row for row in bench.summarize(list(records.values()))}
    assert rows["at start"]["at every step"] == rows["at start"]["extra ms"] == "failed"
    assert rows["at start"]["in all"] is None
    assert "%" in rows["fine"]["at every step"]


def test_all_of_a_recipe_fail_where_no_variant_is_to_blame(monkeypatch):
    def fit(self, recipe, callbacks, steps):
        raise RuntimeError("no such model")

    monkeypatch.setattr(bench.Setting, "fit", fit)
    variants = {name: bench.Variant(steady=list) for name in "ab"}
    found = bench.measure_steady(SETTING, variants, segment=1, seconds=0)
    assert [(name, result["failed"]) for name, result in found.items()] == [
        (name, "RuntimeError: no such model") for name in "ab"
    ]


def test_the_report_keeps_settings_apart(tmp_path):
    steady = {"kind": "every step", "overhead": [0.01, 0.0, 0.02], "base_ms": 20.0, "quantiser": "triton"}
    steady["environment"] = {"device": "a GPU", "torch": "2", "lightning": "2"}
    large, small = {**steady, "setting": "large"}, {**steady, "setting": "small", "overhead": [0.05, 0.0, 0.1]}
    results = tmp_path / "callbacks.json"
    elsewhere = {**steady, "setting": "elsewhere", "environment": {**steady["environment"], "device": "another GPU"}}
    compiled = {**small, "compiled": True, "overhead": [0.07, 0.0, 0.1]}
    records = [elsewhere, {**large, "variant": bench.CONTROL}, {**small, "variant": "PrecisionMonitor"}, compiled]
    harness.write_results(results, [{"variant": "PrecisionMonitor", **record} for record in records])
    tables = bench.write_report(results).split("a GPU, torch 2, lightning 2; ")
    assert [table.partition(", triton")[0] for table in tables] == [
        *("", "large, nothing compiled", "small, nothing compiled", "small, compiled")
    ]
    assert [[share in table for share in ("+1.00 %", "+5.00 %", "+7.00 %")] for table in tables[1:]] == [
        [i == j for j in range(3)] for i in range(3)
    ]


def test_the_table_spreads_what_happens_once_in_a_while():
    event = {"variant": "PrecisionMonitor", "kind": "event", "what": "log", "interval": 50, "ordinary_ms": 20.0}
    steady = {"variant": "PrecisionMonitor", "kind": "every step", "overhead": [0.001, -0.002, 0.003], "base_ms": 19.0}
    switch = {"variant": "AverisToggle", "kind": "event", "what": "switch", "interval": None, "ordinary_ms": 20.0}
    rows = bench.summarize([{**event, "extra_ms": [10.0, 5.0, 20.0]}, steady, {**switch, "extra_ms": [1.0, 0.0, 2.0]}])
    assert rows[0]["at every step"] == "+0.10 % (-0.20 to +0.30)"
    assert rows[0]["ms a step"] == "20.0"
    assert rows[0]["that is"] == "+1.00 % (+0.50 to +2.00)"
    assert rows[0]["in all"] == "+1.10 %"
    assert rows[1]["extra ms"] == "1.00 (0.00 to 2.00)"
    assert rows[1]["in all"] is None


def test_the_readme_holds_the_table_of_the_committed_results():
    readme = (harness.RESULTS.parents[1] / "README.md").read_text()
    assert bench.write_report(harness.RESULTS / "callbacks.json").strip() in readme


def test_interval_of_a_median():
    assert timing.median_interval([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    # Ten values: from the second to the ninth holds the median with 1 - 2 * (1 + 10) / 2**10 = 97.9 %.
    assert timing.median_interval(list(range(10))) == (4.5, 1, 8)
    # A hundred values: the 41st to the 60th, 94.3 % by the binomial.
    assert timing.median_interval(list(range(100)))[1:] == (40, 59)
    with pytest.raises(ValueError, match="at least one"):
        timing.median_interval([])


def test_clock_measures_between_marks():
    clock = timing.Clock()
    for _ in range(3):
        clock.mark()
    assert len(clock.intervals_ms()) == 2
    assert all(0 <= ms < 1000 for ms in clock.intervals_ms())
