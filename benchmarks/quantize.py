"""At what bandwidth do the quantisers run? Bytes they must move over time, beside a plain copy; correctness first.

Run: ``python benchmarks/quantize.py [--sweep]`` on a GPU; writes ``benchmarks/results/quantize.json``.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any

import torch
from _timing import environment, median_ms, medians_ms, write_results

from lightning_fp4 import NVFP4_2D, Quantizer, kernels, reference
from lightning_fp4.kernels import Form

ROWS, COLUMNS = 16384, 4096
PACKED, FP8 = 0.5625, 1.0
RTN, SR = Quantizer(), Quantizer(rounding="stochastic", scale_rule="unbiased")
CLOSED_SR = Quantizer(rounding="stochastic", scale_rule="closed_up")


def cases(x: torch.Tensor, seed: torch.Tensor) -> dict[str, tuple[Any, float]]:
    """Calls without their amax pass, and the bytes an element that each must move."""
    module = importlib.import_module("lightning_fp4.kernels.quantize")
    maxima = kernels.amax(x, "tensor", "tensor", 16)
    module.amax = lambda *_: maxima  # time the quantiser alone

    def both(rows: Form | None, columns: Form | None, hadamard: int | None = 16) -> Any:
        return lambda: kernels.quantize_both(x, rows, columns, hadamard=hadamard if columns else None, seed=seed)

    def form(quantizer: Quantizer, units: Any = None) -> Form:
        return Form(quantizer=quantizer, units=units)

    square = Quantizer(format=NVFP4_2D)
    return {
        "X: rows fp8 + columns packed, RTN": (both(form(RTN, "fp8"), form(RTN)), 2 + FP8 + PACKED),
        "D: rows fp8 + columns fp8, SR": (both(form(SR, "fp8"), form(SR, "fp8")), 2 + 2 * FP8),
        "D: the same, closed_up": (both(form(CLOSED_SR, "fp8"), form(CLOSED_SR, "fp8")), 2 + 2 * FP8),
        "W: 16x16 rows fp8 + columns packed": (both(form(square, "fp8"), form(square), None), 2 + FP8 + PACKED),
        "rows fp8, RTN": (both(form(RTN, "fp8"), None), 2 + FP8),
        "rows packed, RTN": (both(form(RTN), None), 2 + PACKED),
        "columns packed, RTN, rotated": (both(None, form(RTN)), 2 + PACKED),
        "columns fp8, SR, rotated": (both(None, form(SR, "fp8")), 2 + FP8),
        "rows fp8, SR": (both(form(SR, "fp8"), None), 2 + FP8),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="try other tiles for the two-way quantiser")
    arguments = parser.parse_args()
    print(environment())
    x = torch.randn(ROWS, COLUMNS, device="cuda").bfloat16()
    seed = torch.tensor([1, 2], device="cuda")
    head = x[:64].clone()
    quantized = kernels.quantize(head, RTN)
    assert torch.equal(quantized.codes.cpu(), reference.quantize(head.cpu(), RTN).codes), "wrong bits"
    copy = torch.empty_like(x)
    size = x.numel()
    results: dict[str, Any] = {"shape": [ROWS, COLUMNS], "dtype": "bfloat16", "tb_per_s": {}}

    def report(name: str, ms: float, bytes_per_element: float) -> None:
        results["tb_per_s"][name] = {
            "us": round(ms * 1e3, 1),
            "tb_per_s": round(size * bytes_per_element / ms / 1e9, 2),
        }
        print(f"{name:<44}{ms * 1e3:8.1f} us {size * bytes_per_element / ms / 1e9:6.2f} TB/s", flush=True)

    report("copy", median_ms(lambda: copy.copy_(x)), 4)
    report("torch abs().amax()", median_ms(lambda: x.abs().amax()), 2)
    report("amax", median_ms(lambda: kernels.amax(x, "tensor", None)), 2)
    report("amax and rotated amax", median_ms(lambda: kernels.amax(x, "tensor", "tensor", 16)), 2)
    codes = kernels.quantize(x, RTN)
    report("decode to fp8", median_ms(lambda: kernels.operand(codes, "fp8")), PACKED + FP8)
    report("decode to bf16", median_ms(lambda: kernels.operand(codes, "bf16")), PACKED + 2)
    made = cases(x, seed)
    for (name, (_, count)), ms in zip(made.items(), medians_ms([call for call, _ in made.values()]), strict=True):
        report(name, ms, count)
    if arguments.sweep:
        module = importlib.import_module("lightning_fp4.kernels.quantize")
        results["sweep_us"] = {}
        for tile in [(64, 64, 4, None), (64, 64, 8, None), (32, 64, 4, None), (128, 64, 8, None), (64, 64, 4, 96)]:
            module._BLOCK_M, module._BLOCK_N, module._WARPS, module._REGISTERS = tile
            module._plans.clear()
            picked = {name: median_ms(made[name][0], repeats=10) * 1e3 for name in list(made)[:4]}
            results["sweep_us"][str(tile)] = {name: round(us, 1) for name, us in picked.items()}
            print(tile, *(f"{us:8.1f}" for us in picked.values()), flush=True)
    print(write_results("quantize", results))


if __name__ == "__main__":
    main()
