"""What do the callbacks cost? Step time of a GPT of about 100M parameters with each of them, over that without any.

    python benchmarks/callbacks.py                 # a GPU, under four minutes; appends to results/callbacks.json
    python benchmarks/callbacks.py --tiny          # the same path on a small model, any machine

All variants run in one process, interleaved, and log to TensorBoard; the times include everything that happens between
two batches, a snapshot of FP4HealthCheck every 100 steps and two logs of PrecisionMonitor every 100 steps included.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_fp4 import FP4Precision
from lightning_fp4.callbacks import AdaptiveGradientClipping, FP4HealthCheck, PrecisionMonitor

RESULTS = Path(__file__).parent / "results" / "callbacks.json"
WARMUP, STEPS = 10, 100

VARIANTS: dict[str, Callable[[], list[Callback]]] = {
    "none": list,
    "AdaptiveGradientClipping": lambda: [AdaptiveGradientClipping()],
    "AdaptiveGradientClipping unitwise": lambda: [AdaptiveGradientClipping("unitwise")],
    "FP4HealthCheck warn": lambda: [FP4HealthCheck("warn")],
    "FP4HealthCheck rollback": lambda: [FP4HealthCheck("rollback")],
    "PrecisionMonitor every 50": lambda: [PrecisionMonitor(every_n_steps=50)],
    "all three": lambda: [AdaptiveGradientClipping(), FP4HealthCheck(), PrecisionMonitor(every_n_steps=50)],
}


class Block(nn.Module):
    """A pre-norm block with causal attention and SwiGLU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        hidden = width * 8 // 3 // 64 * 64
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.self_attn = nn.ModuleDict(
            {name: nn.Linear(width, width, bias=False) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(width, hidden, bias=False),
                "up_proj": nn.Linear(width, hidden, bias=False),
                "down_proj": nn.Linear(hidden, width, bias=False),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        """``x`` is ``[batch, tokens, width]``."""
        normed = self.norm1(x)
        q, k, v = (
            self.self_attn[name](normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.self_attn["o_proj"](out.transpose(1, 2).flatten(-2))
        normed = self.norm2(x)
        return x + self.mlp["down_proj"](
            nn.functional.silu(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed)
        )


class GPT(pl.LightningModule):
    """Embedding, blocks, head."""

    def __init__(self, vocabulary: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        """``tokens`` is ``[batch, length]``."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, fused on a GPU."""
        return torch.optim.AdamW(self.parameters(), lr=3e-4, fused=self.device.type == "cuda")


class Tokens(Dataset):
    """Random tokens."""

    def __init__(self, vocabulary: int, length: int, size: int) -> None:
        self.tokens = torch.randint(vocabulary, (size, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index]


class StepTime(Callback):
    """Mean seconds of the batches ``WARMUP`` to ``WARMUP + steps``; put it first."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.marks: list[float] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note the time once everything before has finished."""
        if batch_idx in (WARMUP, WARMUP + self.steps):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.marks.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """Of one step."""
        first, last = self.marks
        return (last - first) / self.steps


def measure(
    callbacks: list[Callback], size: dict[str, int], batch: int, length: int, recipe: str, steps: int = STEPS
) -> float:
    """Seconds a step with ``callbacks``."""
    torch.manual_seed(0)
    model = GPT(**size)
    data = DataLoader(Tokens(size["vocabulary"], length, batch * (WARMUP + steps + 1)), batch_size=batch)
    timer = StepTime(steps)
    with tempfile.TemporaryDirectory() as directory:
        trainer = pl.Trainer(
            max_epochs=1,
            accelerator="auto",
            devices=1,
            plugins=[FP4Precision(recipe)],
            callbacks=[timer, *callbacks],
            logger=TensorBoardLogger(directory),
            default_root_dir=directory,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, data)
    return timer.seconds


def main() -> None:
    """Run the variants in turn for as long as there is time, and write the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="nvfp4")
    parser.add_argument("--seconds", type=float, default=200, help="begin no round that would end later")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the path")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    size = {"vocabulary": 16384, "width": 768, "depth": 12, "heads": 12}
    batch, length = 16, 1024
    if arguments.tiny:
        size, batch, length = {"vocabulary": 256, "width": 64, "depth": 2, "heads": 2}, 2, 32
    # Compile, fill caches, and let the allocator have page-locked memory for three snapshots.
    warm_up: list[Callback] = [FP4HealthCheck(snapshot_every_n_steps=2, healthy_after_n_steps=1)]
    measure(warm_up, size, batch, length, arguments.recipe, steps=1)
    begin = time.perf_counter()
    seconds: dict[str, list[float]] = defaultdict(list)
    rounds = 0
    while rounds == 0 or (time.perf_counter() - begin) * (rounds + 1) / rounds < arguments.seconds:
        for variant in (*VARIANTS, "none"):
            seconds[variant].append(measure(VARIANTS[variant](), size, batch, length, arguments.recipe))
            print(f"{variant}: {seconds[variant][-1] * 1e3:.2f} ms a step", flush=True)
        rounds += 1
    base = statistics.median(seconds["none"])
    record = {
        "question": "step time with each callback over that without",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})",
        "versions": {"torch": torch.__version__, "lightning": pl.__version__},
        "model": {**size, "parameters": sum(p.numel() for p in GPT(**size).parameters())},
        "batch": batch,
        "length": length,
        "recipe": arguments.recipe,
        "steps": STEPS,
        "rounds": rounds,
        "milliseconds": {name: [round(s * 1e3, 3) for s in values] for name, values in seconds.items()},
        "overhead": {name: round(statistics.median(values) / base - 1, 5) for name, values in seconds.items()},
        "spread_of_none": round(max(seconds["none"]) / min(seconds["none"]) - 1, 5),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    earlier = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    arguments.out.write_text(json.dumps([*earlier, record], indent=1) + "\n")
    print(f"| callbacks | ms a step | overhead |\n|---|---|---|\n| none | {base * 1e3:.2f} | |")
    for name in list(VARIANTS)[1:]:
        print(f"| {name} | {statistics.median(seconds[name]) * 1e3:.2f} | {record['overhead'][name]:+.2%} |")


if __name__ == "__main__":
    main()
