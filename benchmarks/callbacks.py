"""What do the callbacks cost? Time that each adds to the steps of a small Llama in the Trainer, over that of a step.

    PYTHONPATH=. python benchmarks/callbacks.py                 # a GPU, two minutes; appends to results/callbacks.json
    PYTHONPATH=. python benchmarks/callbacks.py --tiny          # the same path at toy size, any machine
    # The same for a model that keeps a GPU busy, and for that model compiled:
    PYTHONPATH=. python benchmarks/callbacks.py --width 2048 --depth 8 --batch 4 --length 4096 --seconds 300
    PYTHONPATH=. python benchmarks/callbacks.py --width 2048 --depth 8 --batch 4 --length 4096 --seconds 400 --compile
    python benchmarks/callbacks.py --report --insert README.md  # a table for each of these from the results so far

Two measurements, since what happens at every step and what happens once in a while need different ones:

* What a callback does at **every step**: within one fit, short segments with it alternate with segments without any. A
  segment is timed as a whole, with one wait for the GPU at its ends, and compared with the mean of its two neighbours.
* What it does **once in a while** (a log, a snapshot, a refresh, a switch): in a fit where that happens at every second
  step, each such step is timed against the one after it, with waits at both ends. So copies that would overlap with the
  next step count in full. The difference is divided by the default interval times the time of the ordinary step.

By default the model is small and nothing is compiled, so the host's launches decide the time of a step and nothing that
a callback does on the host hides behind the GPU. Shares are shares of that step, which the table gives beside them.
Medians, and intervals of 95 % confidence for them.

A callback that fails is recorded as failed and costs no other its result; the command then ends with an error.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import logging
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader

from lightning_fp4 import FP4Precision
from lightning_fp4.callbacks import (
    AdaptiveGradientClipping,
    AverisToggle,
    FP4HealthCheck,
    HotChannelRefresh,
    PrecisionMonitor,
    RecipeSchedule,
)

sys.path.insert(0, str(Path(__file__).parent))
import _harness as harness
import _timing as timing
from _models import Batches, LanguageModel, Llama, Size

NEVER = 10**9
CONTROL = "none (control)"
WARMUP_PAIRS = 4

# ----------------------------------------------------------------------------------------------------------------------
# What is measured
# ----------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """What a callback does once in a while.

    Args:
        what: in a word.
        make: the callback, doing it at every second step.
        parity: whether at the even (0) or the odd (1) batches.
        interval: steps between two of them by default, ``None`` for what happens once or twice in a run.
    """

    what: str
    make: Callable[[], Callback]
    parity: int
    interval: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """Callbacks to measure.

    Args:
        steady: the callbacks with nothing happening but at every step, ``None`` not to measure that.
        event: what happens once in a while, if anything does.
        recipe: of ``FP4Precision``.
    """

    steady: Callable[[], list[Callback]] | None = None
    event: Event | None = None
    recipe: str = "nvfp4"


def _schedule(first: Any, second: Any) -> dict[int, Any]:
    """Two recipes that take turns, two steps each."""
    return {step: (first, second)[step // 2 % 2] for step in range(0, 1000, 2)}


VARIANTS: dict[str, Variant] = {
    CONTROL: Variant(steady=list),
    "AdaptiveGradientClipping": Variant(steady=lambda: [AdaptiveGradientClipping()]),
    "AdaptiveGradientClipping unitwise": Variant(steady=lambda: [AdaptiveGradientClipping("unitwise")]),
    "FP4HealthCheck": Variant(
        steady=lambda: [FP4HealthCheck(snapshot_every_n_steps=NEVER)],
        event=Event(
            what="snapshot in memory",
            make=lambda: FP4HealthCheck(snapshot_every_n_steps=2, healthy_after_n_steps=1),
            parity=1,
            interval=100,
        ),
    ),
    "FP4HealthCheck max_saturation": Variant(
        event=Event(
            what="look at the layers",
            make=lambda: FP4HealthCheck("warn", max_saturation=1.0, check_layers_every_n_steps=2),
            parity=1,
            interval=50,
        ),
    ),
    "PrecisionMonitor": Variant(
        steady=lambda: [PrecisionMonitor(every_n_steps=NEVER)],
        event=Event(what="log", make=lambda: PrecisionMonitor(every_n_steps=2), parity=1, interval=50),
    ),
    "HotChannelRefresh": Variant(
        steady=lambda: [HotChannelRefresh(every_n_steps=NEVER)],
        event=Event(what="refresh", make=lambda: HotChannelRefresh(every_n_steps=2), parity=0, interval=1000),
        recipe="chon",
    ),
    "RecipeSchedule": Variant(
        steady=lambda: [RecipeSchedule({NEVER: "high_precision"})],
        event=Event(
            what="switch",
            make=lambda: RecipeSchedule(_schedule({"high_precision": ["fprop"]}, "initial")),
            parity=0,
            interval=None,
        ),
    ),
    "AverisToggle": Variant(
        event=Event(what="switch", make=lambda: AverisToggle(_schedule(True, False)), parity=0, interval=None),
    ),
    "clipping, health check, monitor": Variant(
        steady=lambda: [
            AdaptiveGradientClipping(),
            FP4HealthCheck(snapshot_every_n_steps=NEVER),
            PrecisionMonitor(every_n_steps=NEVER),
        ],
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """The model and its data.

    Args:
        size: of the model.
        batch: sequences in a step.
        length: tokens in a sequence.
        compiled: the model within the LightningModule, by ``torch.compile``.
    """

    size: Size
    batch: int
    length: int
    compiled: bool = False

    def fit(self, recipe: str, callbacks: Sequence[Callback], steps: int) -> None:
        """Train for ``steps``, or until a callback stops it, logging to TensorBoard."""
        torch.manual_seed(0)
        with harness.pick_device():
            model: Any = Llama(self.size)
        if self.compiled:
            torch.compiler.reset()  # or code that was compiled for many models is at last not compiled for this one
            model = torch.compile(model)
        plugin = FP4Precision(recipe)
        data = Batches(vocabulary=self.size.vocabulary, batch=self.batch, length=self.length, steps=steps)
        with tempfile.TemporaryDirectory() as directory:
            trainer = pl.Trainer(
                max_epochs=1,
                accelerator="auto",
                devices=1,
                plugins=[plugin],
                callbacks=list(callbacks),
                logger=TensorBoardLogger(directory),
                default_root_dir=directory,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(LanguageModel(model), DataLoader(data, batch_size=None, pin_memory=torch.cuda.is_available()))


def failure(kind: str, error: Exception, what: str = "") -> dict[str, Any]:
    """The result of a measurement that failed; prints where."""
    traceback.print_exception(error)
    return {"kind": kind, **({"what": what} if what else {}), "failed": f"{type(error).__name__}: {error}"}


# ----------------------------------------------------------------------------------------------------------------------
# Once in a while
# ----------------------------------------------------------------------------------------------------------------------


class StepSeconds(Callback):
    """The moments when batches begin, the GPU having done all before; put it first."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Wait and mark."""
        self.marks.append(timing.synchronized_seconds())


def event_steps(marks: Sequence[float], parity: int) -> list[tuple[float, float]]:
    """Milliseconds of each special step and of the one after it, without the warm-up."""
    ms = [(after - before) * 1e3 for before, after in itertools.pairwise(marks)]
    return [(ms[i], ms[i + 1]) for i in range(2 * WARMUP_PAIRS + parity, len(ms) - 1, 2)]


def measure_event(setting: Setting, variant: Variant, pairs: int) -> dict[str, Any]:
    """What a special step takes beyond an ordinary one."""
    assert variant.event is not None
    clock = StepSeconds()
    steps = 2 * (WARMUP_PAIRS + pairs) + 2  # the last pair of an odd parity ends, and is marked, two steps later
    setting.fit(variant.recipe, [clock, variant.event.make()], steps)
    measured = event_steps(clock.marks, variant.event.parity)[:pairs]
    extra, low, high = timing.median_interval([special - ordinary for special, ordinary in measured])
    return {
        "kind": "event",
        "what": variant.event.what,
        "interval": variant.event.interval,
        "extra_ms": [round(extra, 3), round(low, 3), round(high, 3)],
        "ordinary_ms": round(statistics.median(ordinary for _, ordinary in measured), 3),
        "pairs_ms": [[round(special, 3), round(ordinary, 3)] for special, ordinary in measured],
    }


# ----------------------------------------------------------------------------------------------------------------------
# At every step
# ----------------------------------------------------------------------------------------------------------------------


class Gate(Callback):
    """Callbacks that act while the gate is open; they are set up and torn down in any case.

    ``raised`` is the first error that came out of one of them.
    """

    def __init__(self, name: str, callbacks: Sequence[Callback]) -> None:
        self.name, self.callbacks = name, callbacks
        self.open = False
        self.raised: Exception | None = None

    @property
    def state_key(self) -> str:
        """Distinct for every gate."""
        return f"Gate({self.name})"


def _forward(hook: str, always: bool) -> Callable[..., None]:
    def call(self: Gate, *args: Any, **kwargs: Any) -> None:
        if always or self.open:
            for callback in self.callbacks:
                try:
                    getattr(callback, hook)(*args, **kwargs)
                except Exception as error:
                    self.raised = self.raised or error
                    raise

    return call


for _hook in ("setup", "teardown", "on_train_start", "on_train_end", "on_exception"):
    setattr(Gate, _hook, _forward(_hook, always=True))
for _hook in (
    *("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_train_batch_end"),
):
    setattr(Gate, _hook, _forward(_hook, always=False))


class Segments(Callback):
    """Opens one gate at a time, for a segment each, with a segment without any before and after; put it first.

    Args:
        gates: what to measure.
        steps: in a segment.
        seconds: to go on for, whole rounds over all gates and three at least, of which the first is not counted.
    """

    def __init__(self, gates: Sequence[Gate], *, steps: int, seconds: float) -> None:
        self.gates, self.steps, self.seconds = gates, steps, seconds
        self.marks: list[float] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """At the end of a segment, time it, close its gate and open the next one."""
        if batch_idx % self.steps:
            return
        self.marks.append(timing.synchronized_seconds())
        segment = len(self.marks) - 1
        per_round = 2 * len(self.gates)
        for index, gate in enumerate(self.gates):
            gate.open = segment % per_round == 2 * index + 1
        rounds, rest = divmod(segment, per_round)
        used = self.marks[-1] - self.marks[0]
        # One segment into the next round: the last gate has a neighbour on either side.
        if rest == 1 and rounds >= 3 and used * (rounds + 1) / rounds > self.seconds:
            trainer.should_stop = True

    def overheads(self) -> dict[str, dict[str, Any]]:
        """For each gate, what its segments took over the mean of their neighbours; and those in milliseconds a step."""
        per_round = 2 * len(self.gates)
        ms = [(b - a) * 1e3 / self.steps for a, b in itertools.pairwise(self.marks)]
        found = {}
        for index, gate in enumerate(self.gates):
            chosen = range(per_round + 2 * index + 1, len(ms) - 1, per_round)
            base = [(ms[i - 1] + ms[i + 1]) / 2 for i in chosen]
            overhead, low, high = timing.median_interval([ms[i] / b - 1 for i, b in zip(chosen, base, strict=True)])
            found[gate.name] = {
                "kind": "every step",
                "overhead": [round(overhead, 5), round(low, 5), round(high, 5)],
                "base_ms": round(statistics.median(base), 3),
                "segments_ms": [round(ms[i], 3) for i in chosen],
                "neighbours_ms": [round(b, 3) for b in base],
            }
        return found


def measure_steady(
    setting: Setting, variants: dict[str, Variant], *, segment: int, seconds: float
) -> dict[str, dict[str, Any]]:
    """What each of the variants, of one recipe, takes at every step.

    If one of them fails, the others are measured anew without it.
    """
    (recipe,) = {variant.recipe for variant in variants.values()}
    deadline = time.perf_counter() + seconds
    left, found = [name for name, variant in variants.items() if variant.steady is not None], {}
    while left:
        gates = [Gate(name, variants[name].steady()) for name in left]  # type: ignore[misc]
        segments = Segments(gates, steps=segment, seconds=deadline - time.perf_counter())
        try:
            setting.fit(recipe, [segments, *gates], steps=NEVER)
        except Exception as error:
            guilty = [gate.name for gate in gates if gate.raised is error] or [gate.name for gate in gates if gate.open]
            failed = {name: failure("every step", error) for name in guilty or left}
        else:
            found |= segments.overheads()
            trouble = RuntimeError("FP4HealthCheck found trouble while it was timed, so the times include going back.")
            troubled = [g for g in gates if any(isinstance(c, FP4HealthCheck) and c.events for c in g.callbacks)]
            failed = {gate.name: failure("every step", trouble) for gate in troubled}
        found |= failed
        left = [name for name in left if name not in found]
    return {name: found[name] for name in variants if name in found}


# ----------------------------------------------------------------------------------------------------------------------
# The command
# ----------------------------------------------------------------------------------------------------------------------


def measure_all(options: argparse.Namespace) -> list[str]:
    """Every variant, each written as soon as it is known; what failed, in words."""
    began = time.perf_counter()
    width, depth, vocabulary = (64, 2, 256) if options.tiny else (options.width, options.depth, 8192)
    size = Size(width=width, depth=depth, heads=width // 64 or 1, hidden=width * 3, vocabulary=vocabulary)
    batch, length = (2, 32) if options.tiny else (options.batch, options.length)
    setting = Setting(size=size, batch=batch, length=length, compiled=options.compile)
    common = {
        "run": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "setting": f"{depth} blocks, width {width}, batches of {batch} x {length} tokens",
        "compiled": setting.compiled,
        "quantiser": timing.quantiser_backend(),
        "environment": timing.environment(),
    }
    chosen = {name: variant for name, variant in VARIANTS.items() if not options.variants or name in options.variants}
    for recipe in dict.fromkeys(variant.recipe for variant in chosen.values()):
        try:
            setting.fit(recipe, [], steps=4)  # compile kernels, fill caches
        except Exception:  # its variants will say so
            traceback.print_exc()
    print(f"{common['setting']}, {common['quantiser']} quantiser, {common['environment']}", flush=True)
    failed = []

    def keep(name: str, result: dict[str, Any]) -> None:
        harness.append_result(options.results, {"variant": name, "recipe": chosen[name].recipe, **common, **result})
        if "failed" in result:
            failed.append(f"{name} ({result.get('what', result['kind'])})")
            said = f"failed: {result['failed']}"
        elif result["kind"] == "event":
            said = f"{result['extra_ms']} ms, step {result['ordinary_ms']} ms"
        else:
            said = f"{result['overhead']} of {result['base_ms']} ms"
        what = f", {result['what']}" if "what" in result else ""
        print(f"{name}{what}: {said} ({time.perf_counter() - began:.0f} s)", flush=True)

    for name, variant in chosen.items():
        if variant.event is not None:
            try:
                result = measure_event(setting, variant, options.pairs)
            except Exception as error:
                result = failure("event", error, variant.event.what)
            keep(name, result)
    groups: dict[str, dict[str, Variant]] = {}
    for name, variant in chosen.items():
        if variant.steady is not None:
            groups.setdefault(variant.recipe, {})[name] = variant
    left = options.seconds - (time.perf_counter() - began)
    for group in groups.values():
        seconds = left * len(group) / sum(map(len, groups.values()))
        for name, result in measure_steady(setting, group, segment=options.segment, seconds=seconds).items():
            keep(name, result)
    print(f"{time.perf_counter() - began:.0f} s in all")
    return failed


_COLUMNS = (
    *("callback", "ms a step", "at every step", "once in a while", "extra ms", "every ... steps", "that is", "in all"),
)


def _percent(values: Sequence[float]) -> str:
    middle, low, high = (f"{100 * value:+.2f}" for value in values)
    return f"{middle} % ({low} to {high})"


def summarize(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row of the table for each variant, from its newest records."""
    newest: dict[str, dict[str, dict[str, Any]]] = {}
    for record in records:
        newest.setdefault(record["variant"], {})[record["kind"]] = record
    rows = []
    for name in (*VARIANTS, *(name for name in newest if name not in VARIANTS)):
        if name not in newest:
            continue
        steady, event = newest[name].get("every step"), newest[name].get("event")
        row: dict[str, Any] = {"callback": name}
        shares: list[float] = []
        if steady is not None and "failed" not in steady:
            row |= {"ms a step": f"{steady['base_ms']:.1f}", "at every step": _percent(steady["overhead"])}
            shares.append(steady["overhead"][0])
        elif steady is not None:
            row["at every step"] = "failed"
        if event is not None and "failed" not in event:
            extra, low, high = event["extra_ms"]
            row |= {"once in a while": event["what"], "extra ms": f"{extra:.2f} ({low:.2f} to {high:.2f})"}
            row["ms a step"] = f"{event['ordinary_ms']:.1f}"
            if event["interval"] is not None:
                spread = [value / (event["interval"] * event["ordinary_ms"]) for value in event["extra_ms"]]
                row |= {"every ... steps": event["interval"], "that is": _percent(spread)}
                shares.append(spread[0])
        elif event is not None:
            row |= {"once in a while": event["what"], "extra ms": "failed"}
        row["in all"] = f"{100 * sum(shares):+.2f} %" if shares and "failed" not in row.values() else None
        rows.append(row)
    return rows


def write_report(results: Path) -> str:
    """For each setting on the device of the last run, what it is and the Markdown table of its newest results."""
    records = harness.load_results(results)
    if not records:
        return "Not measured yet.\n"
    settings: dict[tuple, list[dict[str, Any]]] = {}
    for record in records:
        if record["environment"]["device"] == records[-1]["environment"]["device"]:
            key = record["setting"], record.get("compiled", False), record["quantiser"]
            settings.setdefault(key, []).append(record)
    tables = []
    for (setting, compiled, quantiser), chosen in settings.items():
        where = chosen[-1]["environment"]
        tables.append(
            f"{where['device']}, torch {where['torch']}, lightning {where.get('lightning')}; {setting}, "
            f"{'compiled' if compiled else 'nothing compiled'}, {quantiser} quantiser\n\n"
            + harness.markdown_table(summarize(chosen), _COLUMNS)
        )
    return "\n".join(tables)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--variants", nargs="+", choices=list(VARIANTS), help="all if not given")
    add("--width", type=int, default=512)
    add("--depth", type=int, default=4, help="blocks, the last of which stays in high precision")
    add("--batch", type=int, default=8, help="sequences a step")
    add("--length", type=int, default=512, help="tokens a sequence")
    add("--compile", action="store_true", help="the model, by torch.compile")
    add("--pairs", type=int, default=15, help="special steps to time")
    add("--segment", type=int, default=8, help="steps of a segment")
    add("--seconds", type=float, default=120, help="of the whole command, about")
    add("--tiny", action="store_true", help="toy size, to try the path; the results go to the temporary directory")
    add("--results", type=Path, default=None, help="results/callbacks.json if not given")
    add("--report", action="store_true", help="only print the tables of the results")
    add("--insert", type=Path, default=None, help="with --report: put the tables between this file's callbacks marks")
    options = parser.parse_args(arguments)
    if options.results is None:
        name = "lightning_fp4_tiny_callbacks.json" if options.tiny else "callbacks.json"
        options.results = (Path(tempfile.gettempdir()) if options.tiny else harness.RESULTS) / name
    return options


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without Lightning's messages and anybody's warnings."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, then report.

    Raises:
        SystemExit: if anything failed.
    """
    options = parse(arguments)
    failed = []
    if not options.report:
        with quiet():
            failed = measure_all(options)
    table = write_report(options.results)
    if options.report and options.insert is not None:
        harness.insert_between_marks(options.insert, "callbacks", table)
    print(table)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
