"""How much loss does each recipe cost against BF16? Train one small GPT under every recipe, on the same bytes in order.

    PYTHONPATH=. python benchmarks/loss_gap.py --text /usr/share/doc --budget-seconds 540
    python benchmarks/loss_gap.py --report                      # the table and the plot from the results so far
    python benchmarks/loss_gap.py --merge a.json b.json         # take in what other GPUs have run, then the same

The model reads bytes. A run is one variant (a recipe, and which layers stay in high precision) with one seed; finished
runs are kept in ``results/loss_gap.json`` and not repeated, so a long list can be done in several calls. By default
values are rounded to the FP4 grid and multiplied as BF16 (``--path fake``), which is what makes this fast; ``--path
real`` runs the package's own FP4 layers.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gzip
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fp4.convert import apply_plan, fp4_layers, plan_conversion, set_recipe
from lightning_fp4.recipes import Recipe, get_recipe
from lightning_fp4.recipes.chon import POST_QK_PROTECTION
from lightning_fp4.reference import hadamard_matrix, select_channels

sys.path.insert(0, str(Path(__file__).parent))
import _fake_quantize as fake
import _harness as harness

VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {"name": "high_precision"},
    # As NVIDIA specifies it: gradient scales rounded to nearest, which biases stochastic rounding.
    "nvfp4-rne-2d": {"name": "nvfp4", "gradient_scale": "rne"},
    "nvfp4-rne-1d": {"name": "nvfp4", "gradient_scale": "rne", "weight_2d": False},
    "nvfp4-2d": {"name": "nvfp4"},
    "nvfp4-1d": {"name": "nvfp4", "weight_2d": False},
    "four_over_six-2d": {"name": "four_over_six"},
    "four_over_six-1d": {"name": "four_over_six", "weight_2d": False},
    "averis-2d": {"name": "averis"},
    "averis-1d": {"name": "averis", "weight_2d": False},
    "four_over_six-rne-1d": {"name": "four_over_six", "gradient_scale": "rne", "weight_2d": False},
    "averis-rne-1d": {"name": "averis", "gradient_scale": "rne", "weight_2d": False},
    "averis-fp4mean-1d": {"name": "averis", "mean": "fp4", "weight_2d": False},
    "averis-4o6-1d": {"name": "averis", "forward_scale": "four_over_six", "weight_2d": False},
    "chon-rne-2d": {"name": "chon", "forward_scale": "rne", "gradient_scale": "rne", "weight_2d": True},
    "chon-rne-1d": {"name": "chon", "forward_scale": "rne", "gradient_scale": "rne", "weight_2d": False},
    "chon-2d": {"name": "chon", "forward_scale": "rne", "weight_2d": True},
    "chon-1d": {"name": "chon", "forward_scale": "rne", "weight_2d": False},
    "chon-gate2d": {"name": "chon", "forward_scale": "rne", "weight_2d": False, "gate_weight_2d": True},
    "chon-product-1d": {"name": "chon", "forward_scale": "rne", "score": "product", "weight_2d": False},
    "chon-activations-1d": {"name": "chon", "forward_scale": "rne", "operands": "activations", "weight_2d": False},
    "chon-weights-1d": {"name": "chon", "forward_scale": "rne", "operands": "weights", "weight_2d": False},
    "chon-high_precision-1d": {"name": "chon", "forward_scale": "rne", "mode": "high_precision", "weight_2d": False},
    "chon-averis-2d": {"name": "chon", "forward_scale": "rne", "averis": True, "weight_2d": True},
    "chon-averis-1d": {"name": "chon", "forward_scale": "rne", "averis": True, "weight_2d": False},
    "chon-4o6-1d": {"name": "chon", "forward_scale": "four_over_six", "weight_2d": False},
    "chon-4o6-2d": {"name": "chon", "forward_scale": "four_over_six", "weight_2d": True},
    "chon-averis-4o6-1d": {"name": "chon", "averis": True, "forward_scale": "four_over_six", "weight_2d": False},
    "chon-product-4o6-1d": {"name": "chon", "score": "product", "forward_scale": "four_over_six", "weight_2d": False},
    "chon-4o6-rne-1d": {
        "name": "chon",
        "forward_scale": "four_over_six",
        "gradient_scale": "rne",
        "weight_2d": False,
    },
    "closed_best-1d": {
        "name": "nvfp4",
        "forward_scale": "closed_best",
        "gradient_scale": "closed_up",
        "weight_2d": False,
    },
    "chon-averis-product-4o6-1d": {
        "name": "chon",
        "averis": True,
        "score": "product",
        "forward_scale": "four_over_six",
        "weight_2d": False,
    },
    "nvfp4-norht-1d": {"name": "nvfp4", "hadamard": False, "weight_2d": False},
}
"""Recipes by the name that the table shows; more with ``--recipe LABEL=JSON``."""

FINISH, FP8 = "+finish", "+fp8"
"""A variant's name with these at the end computes fprop in BF16 for the last 18 % of the steps, or multiplies operands
that are rounded to E4M3 (as FP8 units do it for scale rules that are not closed)."""


def layer_choice(recipe: Recipe, layers: str) -> Recipe:
    """The recipe with another choice of layers that stay in high precision.

    Args:
        recipe: the recipe.
        layers: ``"all"`` for every linear layer of every block in FP4, ``"protected"`` for all but the last block and
            the layers behind the attention scores, ``"recipe"`` for the recipe's own choice.
    """
    kept = tuple(rule for rule in recipe.rules if rule.recipe is not None)
    if layers == "all":
        return dataclasses.replace(recipe, first_blocks=0, last_blocks=0, rules=kept)
    if layers == "protected":
        return dataclasses.replace(recipe, first_blocks=0, last_blocks=1, rules=(*POST_QK_PROTECTION, *kept))
    return recipe


# ----------------------------------------------------------------------------------------------------------------------
# The model
# ----------------------------------------------------------------------------------------------------------------------


def rotation_table(tokens: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary position embedding: float32 ``[tokens, width / 2]`` each.

    Made once a step: inside the compiled blocks they would be computed anew for every head of every sequence.
    """
    frequency = 10000 ** (-torch.arange(width // 2, device=device) / (width // 2))
    angle = torch.arange(tokens, device=device)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotary(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding of ``[batch, heads, tokens, width]``."""
    cos, sin = table
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """``[batch, tokens, width]`` to the same."""
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(rotary(q, table), rotary(k, table), v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., width]`` to the same."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.mlp = Attention(width, heads), MLP(width, 3 * width)

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """``[batch, tokens, width]`` to the same."""
        x = x + self.attention(self.norm_1(x), table)
        return x + self.mlp(self.norm_2(x))


class ByteGPT(nn.Module):
    """A GPT over bytes."""

    def __init__(self, blocks: int, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * blocks) if residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of predicting ``tokens[:, 1:]`` from ``tokens[:, :-1]``, int64 ``[batch, tokens]``."""
        x = self.embed(tokens[:, :-1])
        table = rotation_table(x.shape[1], self.head_width, x.device)
        for block in self.blocks:
            x = block(x, table)
        logits = self.lm_head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


# ----------------------------------------------------------------------------------------------------------------------
# The text
# ----------------------------------------------------------------------------------------------------------------------


def read_text(paths: Sequence[Path], max_bytes: int) -> bytes:
    """All text below ``paths`` in the order of the files' names; ``.gz`` is unpacked, files with NUL are skipped."""
    pieces, total = [], 0
    files = sorted(f for path in paths for f in ([path] if path.is_file() else path.rglob("*")) if f.is_file())
    for file in files:
        content = file.read_bytes()
        if file.suffix == ".gz":
            with contextlib.suppress(OSError, EOFError):
                content = gzip.decompress(content)
        if b"\0" not in content:
            pieces.append(content)
            total += len(content)
        if total >= max_bytes:
            break
    return b"\n".join(pieces)[:max_bytes]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """Bytes on the device, cut into windows.

    Args:
        data: uint8 ``[bytes]``.
        window: bytes a window holds; neighbours share the byte that one predicts last and the next reads first.
        held_out: number of windows, evenly spread, that training never sees.
    """

    data: Tensor
    window: int
    held_out: int

    def windows(self) -> tuple[Tensor, Tensor]:
        """First bytes of the windows: ``(training, held out)``, int64."""
        starts = torch.arange(0, self.data.numel() - self.window, self.window - 1)
        if len(starts) <= self.held_out:
            raise ValueError(
                f"The text has {self.data.numel()} bytes, which are {len(starts)} windows of {self.window}: not more "
                f"than the {self.held_out} held out. Give more text, or a smaller --held-out or --context."
            )
        held_out = torch.zeros(len(starts), dtype=torch.bool)
        held_out[torch.linspace(0, len(starts) - 1, self.held_out).long()] = True
        return starts[~held_out], starts[held_out]

    def batch(self, starts: Tensor) -> Tensor:
        """The windows that begin at ``starts``: int64 ``[len(starts), window]``."""
        offsets = torch.arange(self.window, device=self.data.device)
        return self.data[starts.to(self.data.device)[:, None] + offsets].long()


def training_order(starts: Tensor, count: int, seed: int) -> Tensor:
    """``count`` windows in an order that depends on the seed only; every window once before any comes again."""
    generator = torch.Generator().manual_seed(seed)
    rounds = math.ceil(count / len(starts))
    return torch.cat([starts[torch.randperm(len(starts), generator=generator)] for _ in range(rounds)])[:count]


# ----------------------------------------------------------------------------------------------------------------------
# One run
# ----------------------------------------------------------------------------------------------------------------------


class Converted:
    """The FP4 layers of a model, whichever path they use."""

    def __init__(self, model: nn.Module, recipe: Recipe, *, real: bool, seed: int, device: torch.device) -> None:
        self.fp4_share = 0.0
        self.layers: dict[str, Any] = {}
        if not recipe.quantizes:
            return
        plan = plan_conversion(model, recipe)
        self.fp4_share = plan.flops_share
        if real:
            apply_plan(plan, recipe, seed)
            self.layers = dict(fp4_layers(model))
            return
        size = recipe.wgrad.hadamard if recipe.wgrad else None
        matrix = None if size is None else hadamard_matrix(size).to(device)
        for choice in plan.converted:
            assert isinstance(choice.module, nn.Linear)
            fake.fake_convert(choice.module, choice.recipe or recipe, matrix)
            self.layers[choice.name] = choice.module

    def finish_in_bf16(self) -> None:
        """From now on fprop runs in BF16."""
        for layer in self.layers.values():
            if isinstance(layer, fake.FakeFP4Linear):
                layer.recipe = layer.recipe.in_high_precision("fprop")
            else:
                set_recipe(layer, layer.fp4_recipe.in_high_precision("fprop"))

    def refresh(self, forward: Callable[[], object]) -> None:
        """Choose the hot channels from one forward pass, run without compilation."""
        real = not any(isinstance(layer, fake.FakeFP4Linear) for layer in self.layers.values())
        recipe_of, scores_of, channels_of = (
            ("fp4_recipe", "fp4_channel_scores", "fp4_hot_channels") if real else ("recipe", "scores", "channels")
        )
        patched = [
            layer
            for layer in self.layers.values()
            if (gemm := getattr(layer, recipe_of).fprop) is not None and gemm.hot_channels is not None
        ]
        if not patched:
            return
        for layer in patched:
            setattr(layer, scores_of, torch.zeros(layer.in_features, device=layer.weight.device))
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            forward()
        for layer in patched:
            count = getattr(layer, recipe_of).fprop.hot_channels.count(layer.in_features)
            setattr(layer, channels_of, select_channels(getattr(layer, scores_of), count))
            setattr(layer, scores_of, None)


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine down to 5 %."""
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    progress = (step - options.warmup) / max(1, options.steps - options.warmup)
    return options.lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def evaluate(model: nn.Module, text: Text, starts: Tensor, batch: int, context: Callable[[], Any]) -> float:
    """Mean loss over the held-out windows, without compilation (another batch size would compile everything again)."""
    model.eval()
    losses, counts = [], []
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for part in starts.split(batch):
            with context():
                losses.append(model(text.batch(part)).float() * len(part))
            counts.append(len(part))
    model.train()
    return float(torch.stack(losses).sum() / sum(counts))


def train(recipe: Recipe, finish: float | None, text: Text, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run: train, evaluate, and say what it took.

    Args:
        recipe: how the linear layers compute.
        finish: share of the steps after which fprop runs in BF16, ``None`` for never.
        text: training and held-out windows.
        seed: of the initial weights, the order of the windows and stochastic rounding.
        options: the command line.
    """
    device = text.data.device
    cuda = device.type == "cuda"
    began = time.perf_counter()
    torch.manual_seed(seed)
    model = ByteGPT(options.blocks, options.width, options.heads).to(device)
    layers = Converted(model, recipe, real=options.path == "real", seed=seed, device=device)
    starts, held_out = text.windows()
    order = training_order(starts, options.steps * options.batch, seed).to(device).view(options.steps, options.batch)
    decay = [p for p in model.parameters() if p.ndim >= 2]
    other = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), fused=cuda)

    def context() -> contextlib.AbstractContextManager:
        return torch.autocast("cuda", torch.bfloat16) if cuda else contextlib.nullcontext()

    if options.compile:
        torch.compiler.reset()
        for block in model.blocks:
            block.compile(dynamic=False)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    curve: list[tuple[int, float]] = []
    running = torch.zeros((), device=device)
    timed_from, timed_since = 0, time.perf_counter()
    finish_step = None if finish is None else int(finish * options.steps)
    for step in range(options.steps):
        tokens = text.batch(order[step])
        if step % options.hot_interval == 0:
            with context():
                layers.refresh(lambda tokens=tokens: model(tokens[:8]))
        if step == finish_step:
            layers.finish_in_bf16()
        if step == min(20, options.steps // 2):  # compiled and warm by now
            _synchronize(device)
            timed_from, timed_since = step, time.perf_counter()
        with context():
            loss = model(tokens)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options)
        optimizer.step()
        running += loss.detach()
        if (step + 1) % options.log_every == 0:
            curve.append((step + 1, round(float(running) / options.log_every, 5)))
            running.zero_()
            if not math.isfinite(curve[-1][1]):
                break
    _synchronize(device)
    trained = time.perf_counter() - timed_since
    tokens_per_second = (step + 1 - timed_from) * options.batch * options.context / trained
    held_out_loss = evaluate(model, text, held_out, options.batch, context)
    return {
        "loss": held_out_loss,
        "fp4_share": round(layers.fp4_share, 4),
        "tokens_per_second": round(tokens_per_second),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3) if cuda else None,
        "seconds": round(time.perf_counter() - began, 1),
        "curve": curve,
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# ----------------------------------------------------------------------------------------------------------------------
# The table
# ----------------------------------------------------------------------------------------------------------------------


def summarize(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each variant and choice of layers, the smallest increase over BF16 first within each choice.

    The increase is taken seed by seed against BF16 with that seed (same initial weights, same windows), so what seeds
    have in common drops out; the spread is half the range of those increases.
    """
    rows = []
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["settings"], record["path"], record["layers"], record["variant"]), []).append(record)
    for (settings, path, layers, variant), runs in groups.items():
        base = {r["seed"]: r["loss"] for r in records if r["variant"] == "bf16" and r["settings"] == settings}
        losses = [run["loss"] for run in runs]
        increases = [100 * (run["loss"] / base[run["seed"]] - 1) for run in runs if run["seed"] in base]
        memory = [run["peak_memory_gib"] for run in runs if run["peak_memory_gib"] is not None]
        if variant == "bf16":
            mean = statistics.mean(losses)
            increases = []
            spread = 100 * (max(losses) - min(losses)) / 2 / mean
        else:
            spread = (max(increases) - min(increases)) / 2 if increases else math.nan
        rows.append(
            {
                "variant": variant,
                "layers": "" if variant == "bf16" else layers,
                "path": path,
                "seeds": len(runs),
                "loss": f"{statistics.mean(losses):.4f}",
                "increase %": f"{statistics.mean(increases):+.2f}" if increases else None,
                "spread ±%": f"{spread:.2f}" if len(runs) > 1 else None,
                "FP4 share %": f"{100 * runs[0]['fp4_share']:.0f}",
                "Mtokens/s": f"{statistics.median(r['tokens_per_second'] for r in runs) / 1e6:.3f}",
                "peak GiB": f"{max(memory):.1f}" if memory else None,
                "settings": settings,
                "_order": (settings, path, layers if variant != "bf16" else "", statistics.mean(increases or [-99])),
            }
        )
    return sorted(rows, key=lambda row: row["_order"])


_COLUMNS = (
    *("variant", "layers", "path", "seeds", "loss", "increase %", "spread ±%", "FP4 share %", "Mtokens/s"),
    "peak GiB",
)


def write_report(results: Path) -> str:
    """Write the Markdown table and the plot beside the results; return the table."""
    records = harness.load_results(results)
    parts = []
    for settings in sorted({record["settings"] for record in records}):
        chosen = [record for record in records if record["settings"] == settings]
        head = f"{chosen[-1]['device']}, torch {chosen[-1]['versions']['torch']}; {settings}\n\n"
        parts.append(head + harness.markdown_table(summarize(chosen), _COLUMNS))
    table = "\n".join(parts)
    results.with_suffix(".md").write_text(table)
    _plot(records, results.with_suffix(".png"))
    return table


def _plot(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Training loss over BF16 in per cent along the run, mean over seeds, one line a variant."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        print("No plot: install matplotlib (`pip install lightning_fp4[bench]`).", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    settings = records[-1]["settings"]
    records = [record for record in records if record["settings"] == settings]
    base = {record["seed"]: dict(record["curve"]) for record in records if record["variant"] == "bf16"}
    choices = sorted({record["layers"] for record in records if record["variant"] != "bf16"})
    figure, axes = plt.subplots(1, max(1, len(choices)), figsize=(7 * max(1, len(choices)), 5), squeeze=False)
    for axis, layers in zip(axes[0], choices, strict=False):
        chosen = [r for r in records if r["layers"] == layers and r["variant"] != "bf16"]
        for variant in sorted({record["variant"] for record in chosen}):
            curves = [
                {step: 100 * (loss / base[r["seed"]][step] - 1) for step, loss in r["curve"] if step in base[r["seed"]]}
                for r in chosen
                if r["variant"] == variant and r["seed"] in base
            ]
            steps = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
            if steps:
                axis.plot(steps, [statistics.mean(c[step] for c in curves) for step in steps], label=variant)
        axis.set(title=f"layers: {layers}", xlabel="step", ylabel="training loss over BF16, %")
        axis.set_ylim(-0.5, 6)
        axis.grid(alpha=0.3)
        if axis.get_lines():
            axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


# ----------------------------------------------------------------------------------------------------------------------
# The command
# ----------------------------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--text", nargs="+", type=Path, default=[Path("/usr/share/doc")], help="files or folders of text, .gz too")
    add("--variants", nargs="*", default=["bf16", "nvfp4-rne-2d", "nvfp4-2d"], help=", ".join(VARIANTS))
    add("--recipe", **harness.LABELLED_RECIPES, help="one more variant, a recipe as a dict")
    add("--layers", nargs="+", default=["all"], choices=["all", "protected", "recipe"], help="what runs in FP4")
    add("--seeds", nargs="+", type=int, default=[0])
    add("--path", choices=["fake", "real"], default="fake")
    add("--steps", type=int, default=1100)
    add("--warmup", type=int, default=100)
    add("--batch", type=int, default=96, help="sequences a step")
    add("--context", type=int, default=512)
    add("--blocks", type=int, default=8)
    add("--width", type=int, default=512)
    add("--heads", type=int, default=8)
    add("--lr", type=float, default=1.5e-3)
    add("--held-out", type=int, default=1024, help="windows to evaluate on")
    add("--hot-interval", type=int, default=100, help="steps between choices of the hot channels")
    add("--max-bytes", type=int, default=2**27, help="read no more text than this")
    add("--log-every", type=int, default=25)
    add("--budget-seconds", type=float, default=math.inf, help="start no run that would not end within this")
    add("--device", default=None)
    add("--compile", action=argparse.BooleanOptionalAction, default=None, help="torch.compile (on a GPU: yes)")
    add("--results", type=Path, default=harness.RESULTS / "loss_gap.json")
    add("--report", action="store_true", help="only write the table and the plot from the results")
    add("--merge", nargs="+", type=Path, default=[], metavar="FILE", help="add these files' runs to --results, report")
    add(
        "--insert",
        type=Path,
        default=None,
        help="with --report or --merge: put the table between this file's loss_gap marks",
    )
    return parser.parse_args(arguments)


def runs_of(options: argparse.Namespace) -> Iterator[tuple[str, str, int, Recipe, float | None]]:
    """``(variant, layers, seed, recipe, finish)`` for every run that was asked for, all of one seed before the next."""
    extra = dict(options.recipe)
    known = VARIANTS | extra
    variants = [*options.variants, *extra]
    for variant in variants:
        if _base_name(variant) not in known:
            raise SystemExit(f"{variant!r} is no known variant. Known: {', '.join(known)}; or use --recipe LABEL=JSON.")
    for seed in options.seeds:
        for layers in options.layers:
            for variant in variants:
                if variant == "bf16" and layers != options.layers[0]:
                    continue
                recipe = layer_choice(get_recipe(known[_base_name(variant)]), layers)
                if FP8 in variant:
                    recipe = recipe.map(lambda _, gemm: dataclasses.replace(gemm, units="fp8"))
                yield (variant, layers, seed, recipe, 0.82 if FINISH in variant else None)


def _base_name(variant: str) -> str:
    return variant.replace(FINISH, "").replace(FP8, "")


_KEY = ("variant", "layers", "seed", "path", "settings")
"""What tells one run from another."""


def merge(results: Path, others: Sequence[Path]) -> None:
    """Add the runs in ``others`` to ``results``; a run that is in several files is taken from the last of them.

    Raises:
        FileNotFoundError: if one of ``others`` is missing.
    """
    runs = {tuple(record[name] for name in _KEY): record for record in harness.load_results(results)}
    for other in others:
        if not other.exists():
            raise FileNotFoundError(f"`--merge {other}`: there is no such file.")
        runs |= {tuple(record[name] for name in _KEY): record for record in harness.load_results(other)}
    harness.write_results(results, list(runs.values()))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, then report."""
    options = parse(arguments)
    if options.merge:
        merge(options.results, options.merge)
    if options.report or options.merge:
        table = write_report(options.results)
        if options.insert is not None:
            harness.insert_between_marks(options.insert, "loss_gap", table)
        print(table)
        return
    began = time.perf_counter()
    device = harness.pick_device(options.device)
    if options.compile is None:
        options.compile = device.type == "cuda"
    torch.set_float32_matmul_precision("high")
    content = read_text(options.text, options.max_bytes)
    data = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
    text = Text(data=data, window=options.context + 1, held_out=options.held_out)
    settings = (
        f"{options.blocks} blocks, width {options.width}, {options.heads} heads, context {options.context}, batch "
        f"{options.batch}, {options.steps} steps, lr {options.lr:g}, {len(content)} bytes of text"
    )
    print(f"{harness.describe_device(device)}: {settings}", flush=True)
    longest = 0.0
    for variant, layers, seed, recipe, finish in runs_of(options):
        key = {
            "variant": variant,
            "layers": "all" if variant == "bf16" else layers,
            "seed": seed,
            "path": "bf16" if variant == "bf16" else options.path,
            "settings": settings,
        }
        done = [{name: record[name] for name in _KEY} for record in harness.load_results(options.results)]
        if key in done:
            continue
        left = options.budget_seconds - (time.perf_counter() - began)
        if left < 1.1 * longest:
            print(f"{left:.0f} s left, a run takes {longest:.0f} s: stopping before {variant} ({layers}, seed {seed}).")
            break
        result = train(recipe, finish, text, seed, options)
        longest = max(longest, result["seconds"])
        source = {"device": harness.describe_device(device), "versions": harness.versions(), "recipe": str(recipe)}
        harness.append_result(options.results, {**key, **result, **source})
        print(
            f"{variant} ({layers}, seed {seed}): loss {result['loss']:.4f}, {result['fp4_share']:.0%} in FP4, "
            f"{result['tokens_per_second'] / 1e6:.3f} Mtokens/s, {result['seconds']:.0f} s",
            flush=True,
        )
    print(write_report(options.results))


if __name__ == "__main__":
    main()
