"""Is a linear layer in four bits faster than in BF16? Forward and backward, bias off; correctness first.

Run: ``python benchmarks/linear.py`` on a GPU; writes ``benchmarks/results/linear.json``. ``--report --insert
README.md`` puts its table there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from _harness import RESULTS, insert_between_marks, markdown_table
from _timing import environment, medians_ms, write_results

from lightning_fp4 import HotChannels, Recipe, convert_to_fp4, get_recipe, ops
from lightning_fp4.linear import FP4Linear
from lightning_fp4.matmul import units_of
from lightning_fp4.tensor import Patch

SIZES = [(2048, 2048), (4096, 4096), (4096, 14336), (14336, 4096)]
RECIPES = {
    "nvfp4 units=fp8": get_recipe("nvfp4", units="fp8"),
    "nvfp4 closed (exact on fp8)": get_recipe("nvfp4", forward_scale="closed", gradient_scale="closed_up", units="fp8"),
    "nvfp4 four_over_six units=fp8": get_recipe("nvfp4", forward_scale="four_over_six", units="fp8"),
    "nvfp4 units=bf16": get_recipe("nvfp4", units="bf16"),
    "averis units=fp8": get_recipe("averis", units="fp8"),
    "chon rne units=fp8": get_recipe("chon", units="fp8", forward_scale="rne"),
    "chon units=fp8": get_recipe("chon", units="fp8"),
    "chon rne averis units=fp8": get_recipe("chon", units="fp8", forward_scale="rne", averis=True),
}
#: What these may take, in units of the time of "nvfp4 units=fp8", to which they add.
TARGETS = {"averis units=fp8": 1.06, "chon rne units=fp8": 1.25, "chon units=fp8": 1.25}


def layer(in_features: int, out_features: int, recipe: Recipe | None) -> torch.nn.Module:
    """A bias-free layer with BF16 weights."""
    torch.manual_seed(0)
    made = torch.nn.Linear(in_features, out_features, bias=False, device="cuda", dtype=torch.bfloat16)
    return made if recipe is None else convert_to_fp4(made, recipe, filter_fn=lambda module, name: True)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, by norms."""
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def step(module: torch.nn.Module, x: torch.Tensor, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    """Forward and backward."""
    x.grad = module.weight.grad = None
    y = module(x)
    y.backward(grad)
    return {"y": y.detach(), "dx": x.grad, "dw": module.weight.grad}


def host_ms(call: Any, repeats: int = 10) -> float:
    """Time the host needs to launch one call; above the call's GPU time, launches decide in eager mode."""
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        torch.cuda._sleep(20_000_000)
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
        torch.cuda.synchronize()
    return round(statistics.median(times) * 1e3, 3)


def stages(tokens: int, k: int, n: int, recipe: Recipe) -> dict[str, float]:
    """Median microseconds of the parts of a step."""
    device = torch.device("cuda")
    x = torch.randn(tokens, k, device=device).bfloat16()
    d = torch.randn(tokens, n, device=device).bfloat16()
    w = torch.randn(n, k, device=device).bfloat16()
    seed = torch.tensor([1, 2], device=device)
    fprop, wgrad = recipe.fprop, recipe.wgrad
    units = units_of(fprop, device)
    x_rows, x_columns = ops.quantize_both(x, fprop.lhs, wgrad.rhs, hadamard=wgrad.hadamard, units=(units, None))
    w_rows, w_columns = ops.quantize_both(w, fprop.rhs, recipe.dgrad.rhs, units=(units, None))
    d_rows, d_columns = ops.quantize_both(
        d, recipe.dgrad.lhs, wgrad.lhs, hadamard=wgrad.hadamard, seed=seed, units=(units, units)
    )
    x_operand, w_operand = ops.operand(x_columns, units), ops.operand(w_columns, units)
    mean, d_mean, sums = ops.token_mean(x), ops.token_mean(d), torch.randn(n, k, device=device)
    channels = torch.randperm(k, device=device)[: HotChannels().count(k)].sort().values
    patch = Patch(channels=channels, parts=("residual", "value"))
    from lightning_fp4.kernels import amax

    calls = {
        "amax X both": lambda: amax(x, "tensor", "tensor", wgrad.hadamard),
        "quantise X both (with amax)": lambda: ops.quantize_both(
            x, fprop.lhs, wgrad.rhs, hadamard=wgrad.hadamard, units=(units, None)
        ),
        "quantise W both (with amax)": lambda: ops.quantize_both(w, fprop.rhs, recipe.dgrad.rhs, units=(units, None)),
        "quantise D both (with amax)": lambda: ops.quantize_both(
            d, recipe.dgrad.lhs, wgrad.lhs, hadamard=wgrad.hadamard, seed=seed, units=(units, units)
        ),
        "mean of X": lambda: ops.token_mean(x),
        "quantise X both, centred (with amax)": lambda: ops.quantize_both(
            x, fprop.lhs, wgrad.rhs, hadamard=wgrad.hadamard, units=(units, None), mean=mean
        ),
        "quantise X both, patched (with amax)": lambda: ops.quantize_both(
            x, fprop.lhs, wgrad.rhs, hadamard=wgrad.hadamard, units=(units, None), patch=patch
        ),
        "quantise W both, patched (with amax)": lambda: ops.quantize_both(
            w, fprop.rhs, recipe.dgrad.rhs, units=(units, None), patch=patch
        ),
        "mean times W": lambda: ops.times_matrix(mean, w),
        "mean times W.T": lambda: ops.times_matrix(d_mean, w.T),
        "outer product of means": lambda: ops.add_outer(sums, d_mean, mean, tokens, torch.bfloat16),
        "decode X columns": lambda: ops.operand(x_columns, units),
        "decode W columns": lambda: ops.operand(w_columns, units),
        "fprop GEMM": lambda: ops.gemm(x_rows, w_rows, None, torch.bfloat16),
        "dgrad GEMM": lambda: ops.gemm(d_rows, w_operand, None, torch.bfloat16),
        "wgrad GEMM": lambda: ops.gemm(d_columns, x_operand, None, torch.bfloat16),
        "bf16 fprop": lambda: x @ w.T,
        "bf16 dgrad": lambda: d @ w,
        "bf16 wgrad": lambda: d.T @ x,
    }
    return {
        name: round(ms * 1e3, 1) for name, ms in zip(calls, medians_ms(list(calls.values()), repeats=10), strict=True)
    }


def measure(tokens: int, k: int, n: int) -> dict[str, Any]:
    """One size: every recipe against BF16."""
    x = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(tokens, n, device="cuda", dtype=torch.bfloat16)
    plain = layer(k, n, None)
    expected = step(plain, x, grad)
    modules = {name: layer(k, n, recipe) for name, recipe in RECIPES.items()}
    result: dict[str, Any] = {"tokens": tokens, "in": k, "out": n, "recipes": {}}
    for name, module in modules.items():
        found = step(module, x, grad)
        errors = {key: round(error(found[key], expected[key]), 4) for key in expected}
        assert isinstance(module, FP4Linear)
        is_right = all(0.02 < e < 0.3 for e in errors.values())
        result["recipes"][name] = {"errors": errors, "right": is_right, "paths": dict(module.fp4_gemm_paths)}
    calls = [lambda m=m: step(m, x, grad) for m in (plain, *modules.values())]
    baseline, *others = medians_ms(calls)
    result["bf16_ms"] = round(baseline, 3)
    result["bf16_host_ms"] = host_ms(calls[0])
    for name, ms in zip(modules, others, strict=True):
        result["recipes"][name].update(
            ms=round(ms, 3), ratio=round(baseline / ms, 3), host_ms=host_ms(lambda m=modules[name]: step(m, x, grad))
        )
        host = result["recipes"][name]["host_ms"]
        print(
            f"{k:>5} -> {n:<5} {name:<30} {ms:7.3f} ms, BF16 {baseline:7.3f}: {baseline / ms:.2f}x (host {host} ms)",
            flush=True,
        )
    base = result["recipes"]["nvfp4 units=fp8"]["ms"]
    for name, target in TARGETS.items():
        cost = result["recipes"][name]["over_nvfp4"] = round(result["recipes"][name]["ms"] / base, 3)
        print(f"{k:>5} -> {n:<5} {name:<30} {cost:.3f} of nvfp4's time, target {target}", flush=True)
    return result


def table(results: dict[str, Any]) -> str:
    """The ratios as Markdown."""
    environment, sizes = results["environment"], results["sizes"]
    names = list(sizes[0]["recipes"])
    rows = [
        {
            "in x out": f"{size['in']} x {size['out']}",
            "BF16, ms": size["bf16_ms"],
            **{name: size["recipes"][name]["ratio"] for name in names},
        }
        for size in sizes
    ]
    host = [size["recipes"][name]["host_ms"] for size in sizes for name in names]
    head = (
        f"{environment['device']}, torch {environment['torch']}, Triton {environment['triton']}, {sizes[0]['tokens']} "
        f"tokens: time of BF16 over time of FP4. To launch a step takes the host {min(host)} to {max(host)} ms.\n\n"
    )
    return head + markdown_table(rows, ["in x out", "BF16, ms", *names])


def main() -> None:
    """Measure, print and write; or only report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--stages", action="store_true", help="also time the parts of a step at 4096 x 4096")
    parser.add_argument("--report", action="store_true", help="only print the table of the results")
    parser.add_argument("--insert", type=Path, help="with --report: put the table between this file's linear marks")
    arguments = parser.parse_args()
    if arguments.report:
        report = table(json.loads((RESULTS / "linear.json").read_text()))
        if arguments.insert is not None:
            insert_between_marks(arguments.insert, "linear", report)
        print(report)
        return
    print(environment())
    results: dict[str, Any] = {"sizes": []}
    for k, n in SIZES:
        results["sizes"].append(measure(arguments.tokens, k, n))
        write_results("linear", results)
    if arguments.stages:
        results["stages_us"] = {
            name: stages(arguments.tokens, 4096, 4096, RECIPES[name])
            for name in ("nvfp4 units=fp8", "nvfp4 closed (exact on fp8)")
        }
        for name, parts in results["stages_us"].items():
            print(name, *(f"\n  {part:<38}{us:9.1f} us" for part, us in parts.items()), sep="")
    print(write_results("linear", results))
    wrong = [name for size in results["sizes"] for name, found in size["recipes"].items() if not found["right"]]
    if wrong:
        raise SystemExit(f"Wrong results, whose times mean nothing: {sorted(set(wrong))}; see the errors in the file.")


if __name__ == "__main__":
    main()
