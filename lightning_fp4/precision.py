"""FP4Precision: the one line that a user adds to the Trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision.fsdp import FSDPPrecision
from lightning.pytorch.plugins.precision.precision import Precision
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fp4.convert import Layers
from lightning_fp4.plugin import BasePrecision, FP4Plugin
from lightning_fp4.recipes import Recipe, get_recipe
from lightning_fp4.sharing import WeightForms

CHECKPOINT_KEY = "lightning_fp4"


class FP4Precision(FP4Plugin, FSDPPrecision):
    """Train the linear layers of a LightningModule in four bits: ``Trainer(plugins=[FP4Precision()])``.

    The layers are converted in place when fitting (validating, testing, predicting) starts; parameters, ties,
    optimizers and checkpoint keys stay what they are, so checkpoints are plain and load anywhere. One log line says
    which layers run in FP4, which do not, and why; :meth:`report` returns it as data. After fitting the layers stay
    FP4, see ``revert_from_fp4``. Works on one device and with DDP, FSDP and ``ModelParallelStrategy`` (FSDP2). Trainer
    and model must come from ``lightning.pytorch``: to the separate package ``pytorch_lightning`` this is no plugin.

    Args:
        recipe: a recipe's name (see ``list_recipes``), a dict with its ``name`` and options, or a ``Recipe``. The
            default ``"chon"`` picks its hot channels in the first training step; add the callback ``HotChannelRefresh``
            to have them chosen anew as the run goes on. They are in the checkpoint. ``"nvfp4"`` is NVIDIA's recipe.
        precision: the base precision, in place of ``Trainer(precision=...)``: ``"bf16-mixed"`` (float32 weights,
            bfloat16 autocast), ``"bf16-true"`` or ``"32-true"``.
        layers: within transformer blocks, ``"all"`` linear layers, the ``"mlp"``, or ``"mlp+attention_output"``.
        ignore_modules: modules to keep in the base precision, each with all below it; a name may start at any dot.
        filter_fn: ``filter_fn(module, name)`` alone decides (but for ``ignore_modules`` and ``min_features``) which
            layers to convert. Spawned processes (``ddp_spawn``) need a function that can be pickled, so no lambda.
        first_blocks: transformer blocks at the start to keep, a count or a fraction, in place of the recipe's.
        last_blocks: transformer blocks at the end to keep, a count or a fraction, in place of the recipe's.
        lora_adapters: convert LoRA adapters too.
        min_features: layers whose smaller side, of ``in_features`` and ``out_features``, is below this stay in the base
            precision; by default none. It is for speed: on an H200's FP8 units, FP4 was measured to break even with
            BF16 at 2048. On GPUs with such units the log and the report name the layers below that.
        seed: of stochastic rounding, PyTorch's initial seed (``seed_everything``) if not given.
        eval_precision: whether validation, test and prediction run in ``"fp4"`` too or in the ``"base"`` precision.
        reuse_weights: keep the quantised weights from one optimizer step to the next, for accumulated batches and
            recomputed forwards. Costs up to 1.6 bytes (2.6 with BF16 units) for each weight, of whole layers also under
            FSDP, and assumes that between two steps nothing writes to weights by ``weight.data``, which PyTorch does
            not count: no callback, and no optimizer before it has evaluated the loss. Has no effect in manual
            optimization and in compiled modules.

    Raises:
        ValueError: for an unknown recipe, recipe option, base precision or ``eval_precision``, or a negative
            ``min_features``.
        TypeError: for a ``min_features`` that is no int.

    Example::

        trainer = Trainer(plugins=[FP4Precision(ignore_modules=["vision_tower"])], callbacks=[HotChannelRefresh()])
        trainer.fit(model)
        print(trainer.precision_plugin.report())
    """

    def __init__(
        self,
        recipe: str | dict[str, Any] | Recipe = "chon",
        *,
        precision: BasePrecision = "bf16-mixed",
        layers: Layers = "all",
        ignore_modules: Collection[str] = (),
        filter_fn: Callable[[nn.Module, str], bool] | None = None,
        first_blocks: int | float | None = None,
        last_blocks: int | float | None = None,
        lora_adapters: bool = False,
        min_features: int | None = None,
        seed: int | None = None,
        eval_precision: Literal["fp4", "base"] = "fp4",
        reuse_weights: bool = False,
    ) -> None:
        super().__init__(
            recipe,
            precision=precision,
            layers=layers,
            ignore_modules=ignore_modules,
            filter_fn=filter_fn,
            first_blocks=first_blocks,
            last_blocks=last_blocks,
            lora_adapters=lora_adapters,
            min_features=min_features,
            seed=seed,
        )
        if eval_precision not in ("fp4", "base"):
            raise ValueError(f"`FP4Precision(eval_precision={eval_precision!r})` must be 'fp4' or 'base'.")
        self.eval_precision = eval_precision
        self.reuse_weights = reuse_weights
        self._root: nn.Module | None = None
        self._stepped = self._looked_for_idle_layers = False

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_root": None}

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert ``module`` in place; the strategy calls it each time it sets up."""
        trainer = _trainer_of(module)
        if trainer is None:
            raise MisconfigurationException(
                f"`{self!r}` got a {type(module).__name__} that belongs to no Trainer. With Fabric, use "
                "`lightning_fp4.fabric.FP4Precision`; without Lightning, use `convert_to_fp4(model, recipe)`."
            )
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise MisconfigurationException(
                "`FP4Precision` does not support `DeepSpeedStrategy`, whose engine runs backward and step itself. Use "
                "`ModelParallelStrategy` (FSDP2), `FSDPStrategy` or `DDPStrategy`."
            )
        if not any(module is known for known, _ in self._converted):
            self._converted.clear()
            self._stepped = self._looked_for_idle_layers = False
        self._convert(module, trainer.strategy.root_device)
        return module

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Remember the wrapped root, which FSDP needs to clip gradients."""
        self._root = model
        return super().connect(model, optimizers, lr_schedulers)

    @override
    def teardown(self) -> None:
        """Let go of the wrapped root; report and state stay, since checkpoints may be saved later."""
        self._root = None
        self._forget_weights()
        self._look_for_idle_layers()
        super().teardown()

    @override
    @contextlib.contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        """The context of a training step; the first one after an optimizer step looks for layers never called."""
        self._look_for_idle_layers()
        if self.reuse_weights and all(getattr(m, "automatic_optimization", False) for m, _ in self._converted):
            for layer in self._fp4_layers().values():
                layer.fp4_weight_forms = layer.fp4_weight_forms or WeightForms()
        with super().train_step_context():
            yield

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """The base precision's step."""

        def closure_before_change() -> Any:
            try:
                return closure()
            finally:
                self._forget_weights()

        result = super().optimizer_step(optimizer, model=model, closure=closure_before_change, **kwargs)
        self._stepped = True
        if not self._shared_hot_channels:
            trainer = _trainer_of(model)
            if trainer is not None and not _refreshes_hot_channels(trainer):
                self._share_first_hot_channels(
                    "To choose them anew as it goes on, write `Trainer(callbacks=[lightning_fp4.HotChannelRefresh()])`."
                )
        return result

    def _forget_weights(self) -> None:
        """The next forward quantises the weights anew."""
        if self.reuse_weights:
            for layer in self._fp4_layers().values():
                layer.fp4_weight_forms = None

    def _look_for_idle_layers(self) -> None:
        # Not within `optimizer_step`: with several optimizers, some layers run after the first of them has stepped.
        if self._stepped and not self._looked_for_idle_layers:
            self._looked_for_idle_layers = True
            self._warn_of_idle_layers()

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip by the norm over all parameters, across the shards of FSDP too."""
        if isinstance(self._root, FullyShardedDataParallel):
            self._root.clip_grad_norm_(clip_val)
            return
        if self._root is not None and any(isinstance(m, FullyShardedDataParallel) for m in self._root.modules()):
            raise MisconfigurationException(
                "`gradient_clip_algorithm='norm'` needs the whole model in one `FullyShardedDataParallel`, but only "
                "submodules are wrapped, so each process sees another norm. Let `FSDPStrategy` wrap the model, or use "
                "`gradient_clip_algorithm='value'`."
            )
        Precision.clip_grad_by_norm(self, optimizer, clip_val)

    @override
    @contextlib.contextmanager
    def val_step_context(self) -> Generator[None, None, None]:
        """The context of a validation step, in ``eval_precision``."""
        with self._evaluation_recipe(), super().val_step_context():
            yield

    @override
    @contextlib.contextmanager
    def test_step_context(self) -> Generator[None, None, None]:
        """The context of a test step, in ``eval_precision``."""
        with self._evaluation_recipe(), super().test_step_context():
            yield

    @override
    @contextlib.contextmanager
    def predict_step_context(self) -> Generator[None, None, None]:
        """The context of a prediction step, in ``eval_precision``."""
        with self._evaluation_recipe(), super().predict_step_context():
            yield

    @contextlib.contextmanager
    def _evaluation_recipe(self) -> Generator[None, None, None]:
        self._forget_weights()  # callbacks evaluate averaged weights
        if self.eval_precision == "fp4":
            yield
            return
        layers = self._fp4_layers().values()
        before = [(layer.fp4_recipe, layer.fp4_gemm_paths) for layer in layers]
        base = get_recipe("high_precision")
        for layer in layers:
            layer.fp4_recipe, layer.fp4_gemm_paths = base, {}
        try:
            yield
        finally:
            for layer, (recipe, paths) in zip(layers, before, strict=True):
                # The report goes on to tell what training ran, if it did.
                layer.fp4_recipe, layer.fp4_gemm_paths = recipe, paths or layer.fp4_gemm_paths

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put the random state's steps under ``"lightning_fp4"``, a key that no renaming of classes touches."""
        checkpoint[CHECKPOINT_KEY] = self._fp4_state()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on where the checkpoint was saved; one from a run without FP4 has nothing to restore."""
        if CHECKPOINT_KEY in checkpoint:
            self._load_fp4_state(checkpoint[CHECKPOINT_KEY])


def _refreshes_hot_channels(trainer: pl.Trainer) -> bool:
    """Whether a callback chooses the hot channels (``HotChannelRefresh``, told by its mark)."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return any(getattr(callback, "refreshes_hot_channels", False) for callback in callbacks)


def _trainer_of(module: nn.Module) -> pl.Trainer | None:
    """The Trainer that ``module`` is attached to."""
    try:
        trainer = module.trainer if isinstance(module, pl.LightningModule) else None
    except RuntimeError:  # Lightning's way to say that there is none
        return None
    return trainer if isinstance(trainer, pl.Trainer) else None
