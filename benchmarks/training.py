"""Is training in four bits faster than in BF16? Llama-like models in the Trainer, with and without FP4Precision.

    PYTHONPATH=. python benchmarks/training.py                 # a GPU; appends row by row to results/training.json
    PYTHONPATH=. python benchmarks/training.py --tiny          # the same path at toy size, any machine
    python benchmarks/training.py --report --insert README.md  # the table from the results so far

Float32 weights, bf16-mixed, sequences of 4096, fused AdamW; each row is a process of its own. A row's ratio is the time
of the BF16 row of the same run, size and mode over its own. `eager` compiles nothing, `compile` is ``torch.compile`` of
the model within the LightningModule, `compile-blocks` of each of its blocks. If torchao is installed, its row-wise FP8
training of the layers that `nvfp4` would convert is a row too.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import logging
import math
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader

from lightning_fp4 import FP4Precision, plan_conversion

sys.path.insert(0, str(Path(__file__).parent))
import _harness as harness
import _timing as timing
from _models import Batches, LanguageModel, Llama, Size

SIZES = {
    "1.3B": Size(width=2048, depth=24, heads=16, hidden=5504, vocabulary=32000),
    "4096x8": Size(width=4096, depth=8, heads=32, hidden=14336, vocabulary=32000),
}
TINY = Size(width=64, depth=2, heads=2, hidden=192, vocabulary=256)
RECIPES: dict[str, dict[str, Any]] = {
    "nvfp4 units=fp8": {"name": "nvfp4", "units": "fp8"},
    "nvfp4 closed": {"name": "nvfp4", "forward_scale": "closed", "gradient_scale": "closed_up"},
    "chon": {"name": "chon"},
    "nvfp4": {"name": "nvfp4"},
    "chon units=fp8": {"name": "chon", "units": "fp8"},
    "averis units=fp8": {"name": "averis", "units": "fp8"},
}
"""Recipes by the name that the table shows; more with ``--recipe LABEL=JSON``."""

MODES = ("eager", "compile", "compile-blocks")
BF16, PEER = "bf16", "torchao float8 rowwise"


# ----------------------------------------------------------------------------------------------------------------------
# One row, in a process of its own
# ----------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What a process measures.

    Args:
        variant: the name that the table shows.
        recipe: of ``FP4Precision``, ``None`` for BF16 and for the peer.
        mode: one of :data:`MODES`.
        size: of the model.
        batch: sequences in a step.
        length: tokens in a sequence.
        warmup: steps before the timed ones, at least one.
        steps: timed steps.
        backend: of ``torch.compile``.
        profile: whether to profile three more steps.
    """

    variant: str
    recipe: dict[str, Any] | None
    mode: str
    size: Size
    batch: int
    length: int
    warmup: int
    steps: int
    backend: str
    profile: bool

    @classmethod
    def from_json(cls, text: str) -> Row:
        """What ``json.dumps(dataclasses.asdict(row))`` wrote."""
        values = json.loads(text)
        return cls(**{**values, "size": Size(**values["size"])})


class StepTimes(Callback):
    """Times the steps after the warm-up, without a wait between them, and keeps every loss."""

    def __init__(self, warmup: int, steps: int) -> None:
        self.warmup, self.last = warmup, warmup + steps - 1
        self.clock = timing.Clock()
        self.losses: list[torch.Tensor] = []
        self.began = time.perf_counter()
        self.first_step_seconds = math.nan
        self.peak_bytes: int | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Mark; the peak of memory counts from the first timed step on."""
        if batch_idx == self.warmup and torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        if self.warmup <= batch_idx <= self.last:
            self.clock.mark()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Mark the end of the last timed step."""
        self.losses.append(outputs["loss"].detach())
        if batch_idx == 0:
            self.first_step_seconds = timing.synchronized_seconds() - self.began
        if batch_idx == self.last:
            self.clock.mark()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                self.peak_bytes = torch.cuda.max_memory_allocated()


class KernelProfile(Callback):
    """Which kernels take the time of the steps from ``first`` on."""

    STEPS = 3

    def __init__(self, first: int) -> None:
        self.first = first
        self.profiler = torch.profiler.profile()
        self.result: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin."""
        if batch_idx == self.first:
            timing.synchronized_seconds()
            self.profiler.start()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Finish, and sum up by kernel."""
        if batch_idx != self.first + self.STEPS - 1:
            return
        timing.synchronized_seconds()
        self.profiler.stop()
        kernels = [
            event
            for event in self.profiler.key_averages()
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
        ]
        kernels.sort(key=lambda event: -event.self_device_time_total)
        scale = 1e-3 / self.STEPS
        self.result = {
            "busy_ms": round(sum(event.self_device_time_total for event in kernels) * scale, 2),
            "kernels": [
                {
                    "name": event.key[:120],
                    "calls": round(event.count / self.STEPS, 1),
                    "ms": round(event.self_device_time_total * scale, 3),
                }
                for event in kernels[:40]
            ],
        }


def convert_to_float8(model: nn.Module) -> float:
    """Put the layers that ``nvfp4`` would convert into torchao's row-wise FP8; returns their share of the FLOPs."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    plan = plan_conversion(model, "nvfp4")
    names = {choice.name for choice in plan.converted}
    config = Float8LinearConfig.from_recipe_name("rowwise")
    config = dataclasses.replace(config, emulate=not torch.cuda.is_available())
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name in names)
    return plan.flops_share


def measure(row: Row) -> dict[str, Any]:
    """Train for the row's steps; what it took."""
    backend = timing.quantiser_backend()
    torch.manual_seed(0)
    with harness.pick_device():
        model = Llama(row.size)
    share = convert_to_float8(model) if row.variant == PEER else 0.0
    inner: Any = model
    if row.mode == "compile":
        inner = torch.compile(model, backend=row.backend)
    elif row.mode == "compile-blocks":
        for block in model.layers:
            block.compile(backend=row.backend)
    times = StepTimes(row.warmup, row.steps)
    profile = KernelProfile(row.warmup + row.steps)
    steps = row.warmup + row.steps + (KernelProfile.STEPS if row.profile else 0)
    data = Batches(vocabulary=row.size.vocabulary, batch=row.batch, length=row.length, steps=steps)
    precision: dict[str, Any] = {"precision": "bf16-mixed"}
    if row.recipe is not None:
        precision = {"plugins": [FP4Precision(row.recipe)]}
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="auto",
        devices=1,
        callbacks=[times, *([profile] if row.profile else [])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **precision,
    )
    # There is no warm-up, so the rate is small for wide models.
    module = LanguageModel(inner, learning_rate=min(3e-4, 0.3 / row.size.width))
    trainer.fit(module, DataLoader(data, batch_size=None, pin_memory=torch.cuda.is_available()))
    plugin = trainer.precision_plugin
    report = plugin.report() if isinstance(plugin, FP4Precision) else None
    step_ms = times.clock.intervals_ms()
    median = statistics.median(step_ms)
    losses = [round(loss.item(), 4) for loss in times.losses]
    return {
        "ms": round(median, 3),
        "step_ms": [round(ms, 3) for ms in step_ms],
        "tokens_per_second": round(row.batch * row.length / median * 1e3),
        "peak_memory_gib": None if times.peak_bytes is None else round(times.peak_bytes / 2**30, 3),
        "losses": losses,
        "loss_is_sane": all(map(math.isfinite, losses)) and losses[-1] < losses[0],
        "quantised_share": round(report["flops_share"] if report else share, 4),
        "gemm_paths": report["gemm_paths"] if report else {},
        "quantiser": backend if report else None,
        "first_step_seconds": round(times.first_step_seconds, 1),
        "parameters": sum(p.numel() for p in model.parameters()),
        "environment": timing.environment()
        | ({"torchao": importlib.metadata.version("torchao")} if row.variant == PEER else {}),
        **({"profile": profile.result} if row.profile else {}),
    }


# ----------------------------------------------------------------------------------------------------------------------
# All rows
# ----------------------------------------------------------------------------------------------------------------------


def rows_of(options: argparse.Namespace) -> Iterator[tuple[str, Row]]:
    """Name of the size and row, each group of one size and mode with its BF16 row first."""
    extra = dict(options.recipe)
    known = RECIPES | extra
    unknown = [name for name in options.recipes if name not in known]
    if unknown:
        raise SystemExit(f"{unknown[0]!r} is no known recipe. Known: {', '.join(known)}; or use --recipe LABEL=JSON.")
    variants: dict[str, dict[str, Any] | None] = {BF16: None}
    variants |= {name: known[name] for name in (*options.recipes, *extra)}
    if options.peer and importlib.util.find_spec("torchao") is None:
        print(f"No row for {PEER}: torchao is not installed.", flush=True)
    elif options.peer:
        variants[PEER] = None
    for name, size in ({"tiny": TINY} if options.tiny else {name: SIZES[name] for name in options.sizes}).items():
        for mode in options.modes:
            for variant, recipe in variants.items():
                yield (
                    name,
                    Row(
                        variant=variant,
                        recipe=recipe,
                        mode=mode,
                        size=size,
                        batch=2 if options.tiny else options.batch,
                        length=32 if options.tiny else options.length,
                        warmup=options.warmup,
                        steps=options.steps,
                        backend="aot_eager" if options.tiny else "inductor",
                        profile=options.profile,
                    ),
                )


def run(row: Row, timeout: float | None) -> dict[str, Any]:
    """Measure a row in a new process; its result, or under ``"error"`` why there is none."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "row.json"
        command = [sys.executable, __file__, "--row", json.dumps(dataclasses.asdict(row)), "--results", str(out)]
        try:
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            return {"error": f"stopped after {timeout:.0f} s"}
        if done.returncode != 0 or not out.exists():
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            print("\n".join(lines[-15:]), file=sys.stderr, flush=True)
            return {"error": lines[-1][:300]}
        return json.loads(out.read_text())


def measure_all(options: argparse.Namespace) -> None:
    """Every row that there is time for, each written as soon as it is known."""
    began = time.perf_counter()
    start = datetime.now(timezone.utc).isoformat(timespec="seconds")
    longest: dict[str, float] = {}
    base: dict[tuple[str, str], float] = {}
    for size, row in rows_of(options):
        left = options.budget_seconds - (time.perf_counter() - began)
        if left < longest.get(row.mode, 10.0):
            print(f"{left:.0f} s left: stopping before {size}, {row.mode}, {row.variant}.", flush=True)
            return
        row_began = time.perf_counter()
        result = run(row, None if math.isinf(left) else left)
        seconds = time.perf_counter() - row_began
        longest[row.mode] = max(seconds, longest.get(row.mode, 0.0))
        record = {"run": start, **dataclasses.asdict(row), "size": size, "shape": dataclasses.asdict(row.size)}
        harness.append_result(options.results, {**record, "seconds": round(seconds, 1), **result})
        if "error" in result:
            print(f"{size}, {row.mode}, {row.variant}: FAILED after {seconds:.0f} s: {result['error']}", flush=True)
            continue
        if row.variant == BF16:
            base[size, row.mode] = result["ms"]
        ratio = f", {base[size, row.mode] / result['ms']:.3f}x BF16" if (size, row.mode) in base else ""
        print(
            f"{size}, {row.mode}, {row.variant}: {result['ms']:.1f} ms a step{ratio}, peak "
            f"{result['peak_memory_gib']} GiB, loss {result['losses'][0]:.3f} -> {result['losses'][-1]:.3f}"
            f"{'' if result['loss_is_sane'] else ' (NOT SANE)'}, {result['gemm_paths']}, quantiser "
            f"{result['quantiser']}, first step {result['first_step_seconds']} s, {seconds:.0f} s in all",
            flush=True,
        )


# ----------------------------------------------------------------------------------------------------------------------
# The table
# ----------------------------------------------------------------------------------------------------------------------

_COLUMNS = (
    *("model", "mode", "variant", "ms a step", "BF16's in that run", "over BF16", "ktokens/s", "peak GiB", "of BF16's"),
    *("quantised %", "quantiser", "GEMMs", "loss"),
)


def _group(record: dict[str, Any]) -> tuple:
    """Rows that differ in the variant only."""
    return (record["size"], record["mode"], record["batch"], record["length"], json.dumps(record["shape"]))


def summarize(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row of the table for the newest record of each size, mode and variant; ratios are within one run."""
    finished = [record for record in records if "error" not in record]
    base = {(record["run"], *_group(record)): record for record in finished if record["variant"] == BF16}
    newest = {(*_group(record), record["variant"]): record for record in finished}
    order = list(dict.fromkeys(_group(record) for record in finished))
    rows = []
    for record in sorted(newest.values(), key=lambda record: order.index(_group(record))):
        bf16 = base.get((record["run"], *_group(record)))
        other = None if record["variant"] == BF16 else bf16
        memory = record["peak_memory_gib"]
        units = sorted({path.partition(":")[2] for path in record["gemm_paths"]})
        rows.append(
            {
                "model": record["size"],
                "mode": record["mode"],
                "variant": record["variant"],
                "ms a step": f"{record['ms']:.1f}",
                "ktokens/s": f"{record['tokens_per_second'] / 1e3:.1f}",
                "BF16's in that run": f"{other['ms']:.1f}" if other else None,
                "over BF16": f"{other['ms'] / record['ms']:.2f}" if other else None,
                "peak GiB": None if memory is None else f"{memory:.1f}",
                "of BF16's": f"{memory / other['peak_memory_gib']:.2f}" if other and memory else None,
                "quantised %": f"{100 * record['quantised_share']:.0f}",
                "quantiser": record["quantiser"],
                "GEMMs": ", ".join(units),
                "loss": f"{record['losses'][0]:.2f} to {record['losses'][-1]:.2f}"
                + ("" if record["loss_is_sane"] else ", not sane"),
            }
        )
    return rows


def write_report(results: Path) -> str:
    """The Markdown table of what was measured as the last row was, which the line above it says; below, what failed."""
    records = harness.load_results(results)
    finished = [record for record in records if "error" not in record]
    if not finished:
        return "Not measured yet.\n"
    last = finished[-1]
    where = last["environment"]
    head = (
        f"{where['device']}, torch {where['torch']}, lightning {where.get('lightning')}; batches of {last['batch']} x "
        f"{last['length']} tokens, median of {last['steps']} steps after {last['warmup']}\n\n"
    )
    chosen = [
        record
        for record in finished
        if record["environment"]["device"] == where["device"]
        and all(record[name] == last[name] for name in ("batch", "length", "steps", "warmup"))
    ]
    done = {(*_group(record), record["variant"]) for record in chosen}
    failed = {
        (*_group(record), record["variant"]): f"{record['size']}, {record['mode']}, {record['variant']}"
        for record in records
        if "error" in record and (*_group(record), record["variant"]) not in done
    }
    tail = f"\nNo result yet: {'; '.join(failed.values())}.\n" if failed else ""
    return head + harness.markdown_table(summarize(chosen), _COLUMNS) + tail


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    add("--modes", nargs="+", default=["eager", "compile"], choices=MODES)
    add("--recipes", nargs="*", default=list(RECIPES)[:3], help=f"besides BF16; known: {', '.join(RECIPES)}")
    add("--recipe", **harness.LABELLED_RECIPES, help="one more, a recipe as a dict")
    add("--peer", action=argparse.BooleanOptionalAction, default=True, help="torchao's FP8, if installed")
    add("--batch", type=int, default=4, help="sequences a step")
    add("--length", type=int, default=4096, help="tokens a sequence")
    add("--warmup", type=int, default=8, help="steps before the timed ones")
    add("--steps", type=int, default=10, help="timed steps")
    add("--profile", action="store_true", help="add the kernels of three more steps to each record")
    add("--budget-seconds", type=float, default=math.inf, help="start no row that would not end within this")
    add("--tiny", action="store_true", help="toy size, to try the path; the results go to the temporary directory")
    add("--results", type=Path, default=None, help="results/training.json if not given")
    add("--report", action="store_true", help="only print the table of the results")
    add("--insert", type=Path, default=None, help="with --report: put the table between this file's training marks")
    add("--row", default=None, help=argparse.SUPPRESS)  # what a process of its own is asked to measure
    options = parser.parse_args(arguments)
    if options.warmup < 1 or options.steps < 1:
        parser.error("--warmup and --steps must be at least 1")
    if options.results is None:
        name = "lightning_fp4_tiny_training.json" if options.tiny else "training.json"
        options.results = (Path(tempfile.gettempdir()) if options.tiny else harness.RESULTS) / name
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the rows, then report."""
    options = parse(arguments)
    if options.row is not None:
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        options.results.write_text(json.dumps(measure(Row.from_json(options.row))))
        return
    if not options.report:
        measure_all(options)
    table = write_report(options.results)
    if options.report and options.insert is not None:
        harness.insert_between_marks(options.insert, "training", table)
    print(table)


if __name__ == "__main__":
    main()
