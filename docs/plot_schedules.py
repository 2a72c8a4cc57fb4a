"""Draw the learning-rate schedules of ``lightning_fp4.schedules``: ``python docs/plot_schedules.py``."""

from __future__ import annotations

import functools
import pathlib

from matplotlib.figure import Figure

from lightning_fp4.schedules import fp4_warmup_cosine, steps_of_tokens, warmup_cosine

TOKENS_PER_STEP = 4 * 2**20
TOTAL = int(steps_of_tokens(400e9, TOKENS_PER_STEP))

SCHEDULES = {
    "warmup_cosine": functools.partial(warmup_cosine, warmup_steps=2000, total_steps=TOTAL),
    "fp4_warmup_cosine, peak 0.8": functools.partial(fp4_warmup_cosine, warmup_steps=2000, total_steps=TOTAL, peak=0.8),
    "fp4_warmup_cosine, 15 % less every 50B tokens, cosine after 200B": functools.partial(
        fp4_warmup_cosine,
        warmup_steps=2000,
        total_steps=TOTAL,
        decay=0.15,
        decay_every_steps=steps_of_tokens(50e9, TOKENS_PER_STEP),
        cosine_start=int(steps_of_tokens(200e9, TOKENS_PER_STEP)),
    ),
}

if __name__ == "__main__":
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    steps = range(0, TOTAL + 1, 100)
    for label, schedule in SCHEDULES.items():
        axes.plot([s * TOKENS_PER_STEP / 1e9 for s in steps], [schedule(s) for s in steps], label=label)
    axes.set(xlabel="billion tokens", ylabel="factor on the high-precision rate", xlim=(0, 400), ylim=(0, 1.05))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(pathlib.Path(__file__).with_name("schedules.png"), dpi=120)
