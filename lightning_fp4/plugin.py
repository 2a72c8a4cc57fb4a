"""What the Trainer plugin and the Fabric plugin share: arguments, conversion, contexts, state and report."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import Any, Literal, get_args

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_fp4 import backends, matmul
from lightning_fp4.convert import ConversionReport, Layers, abbreviate, apply_plan, plan_conversion
from lightning_fp4.linear import FP4Layer
from lightning_fp4.naming import matches
from lightning_fp4.recipes import Recipe, get_recipe

BasePrecision = Literal["bf16-mixed", "bf16-true", "32-true"]

_STATE_VERSION = 1


class FP4Plugin:
    """The common part of ``lightning_fp4.FP4Precision`` and ``lightning_fp4.fabric.FP4Precision``.

    Each mixes it into its own library's ``FSDPPrecision``, the only precision plugin that ``FSDPStrategy`` takes.
    """

    precision: Any

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
    ) -> None:
        name = type(self).__name__
        if precision not in get_args(BasePrecision):
            raise ValueError(
                f"`{name}(precision={precision!r})` is not supported. `precision` is the base precision around the FP4 "
                f"layers and must be one of: {', '.join(map(repr, get_args(BasePrecision)))}."
            )
        try:
            self.recipe = get_recipe(recipe)
        except (TypeError, ValueError) as error:
            raise type(error)(f"`{name}(recipe={recipe!r})`: {error}") from None
        super().__init__(precision=precision)  # type: ignore[call-arg]
        self.seed = seed
        self.choice: dict[str, Any] = {
            "layers": layers,
            "ignore_modules": ignore_modules,
            "filter_fn": filter_fn,
            "first_blocks": first_blocks,
            "last_blocks": last_blocks,
            "lora_adapters": lora_adapters,
            "min_features": min_features,
        }
        # Wrong arguments fail here already, not when the job starts. The user's function sees the user's model only.
        anything = nn.Linear(16, 16, device="meta", dtype=torch.float32)
        plan_conversion(
            anything, self.recipe, **{**self.choice, "filter_fn": None if callable(filter_fn) else filter_fn}
        )
        self._device: torch.device | None = None
        self._converted: list[tuple[nn.Module, ConversionReport]] = []
        self._shared_hot_channels = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.recipe.name!r}, precision={self.precision!r})"

    def __getstate__(self) -> dict[str, Any]:
        # The reports hold the layers; a copy or a spawned process converts its own model.
        return {**self.__dict__, "_converted": [], "_shared_hot_channels": False}

    # ------------------------------------------------------------------------------------------------------------------
    # Conversion
    # ------------------------------------------------------------------------------------------------------------------

    def _convert(self, module: nn.Module, device: torch.device | None = None) -> None:
        """Cast and convert ``module`` in place and say so; ``device`` is where it will run, if that is known."""
        position = next((i for i, (m, _) in enumerate(self._converted) if m is module), len(self._converted))
        known = position < len(self._converted)
        self._device = device
        self._cast(module)
        already = sum(isinstance(m, FP4Layer) for m in module.modules())
        base_dtype = torch.float32 if self.precision == "32-true" else torch.bfloat16
        report = plan_conversion(module, self.recipe, **self.choice)
        report = dataclasses.replace(report, device=device, base_dtype=base_dtype)
        if position:  # names, and so random streams and keys of the state, differ between the models of one Fabric
            choices = (dataclasses.replace(choice, name=f"{position}.{choice.name}") for choice in report.choices)
            report = dataclasses.replace(report, choices=tuple(choices))
        apply_plan(report, self.recipe, self.seed)
        self._converted[position : position + 1] = [(module, report)]
        self._shared_hot_channels &= known
        if known and len(report.converted) == already:
            return
        if already:
            rank_zero_info(f"{self!r}: {already} layers were FP4 already and keep their recipe.")
            ignored = [c.name for c in report.converted if matches(c.name, self.choice["ignore_modules"])]
            small = [c.name for c in report.converted if c.features < (self.choice["min_features"] or 0)]
            for argument, names in (("ignore_modules", ignored), ("min_features", small)):
                if names:
                    rank_zero_warn(
                        f"{self!r}: {abbreviate(names)} stay FP4 in spite of `{argument}`, because they were converted "
                        "before. Call `revert_from_fp4(model)` first."
                    )
        where = "" if device is None else f". {_how_it_runs(self.recipe, device)}"
        rank_zero_info(f"{self!r}: {report.summary()}{where}")
        for message in report.warnings:
            rank_zero_warn(message)
        if self.precision == "bf16-mixed" and any(
            p.requires_grad and p.dtype is torch.bfloat16 for p in module.parameters()
        ):
            rank_zero_warn(
                f"{self!r}: the model has trainable bfloat16 parameters, which lose small updates. Load the model in "
                "float32; precision='bf16-mixed' computes in bfloat16 anyway."
            )

    def _cast(self, module: nn.Module) -> None:
        """To the dtype of a ``"*-true"`` precision, but complex buffers, which ``module.to(dtype)`` would make real."""
        buffers = [
            (owner, name, buffer)
            for owner in module.modules()
            for name, buffer in owner.named_buffers(recurse=False)
            if buffer.is_complex()
        ]
        for owner, name, _ in buffers:
            setattr(owner, name, None)
        super().convert_module(module)  # type: ignore[misc]
        for owner, name, buffer in buffers:
            setattr(owner, name, buffer)

    def report(self) -> dict[str, Any]:
        """What runs in FP4 as plain data.

        Returns:
            ``recipe``; ``converted``: name, shape ``(out, in)``, recipe, ``gemm_paths`` that really ran and ``ran`` of
            each FP4 layer, and ``recommended: "bf16"`` if it is too small to be faster in FP4; ``kept``: name, shape
            and reason; ``flops_share`` of the linear layers, 0 to 1; ``gemm_paths``: number of layers by GEMM and
            units; ``block_stacks``; ``warnings``; ``recommendations``: sentences about speed.

        Raises:
            RuntimeError: before a model was converted.
        """
        if not self._converted:
            raise RuntimeError(
                f"{self!r} has not converted a model yet: `report()` works once fitting or setup has begun."
            )
        reports = [report for _, report in self._converted]
        return dataclasses.replace(
            reports[-1],
            choices=tuple(choice for report in reports for choice in report.choices),
            stacks=tuple(stack for report in reports for stack in report.stacks),
            warnings=tuple(warning for report in reports for warning in report.warnings),
        ).as_dict()

    def _fp4_layers(self) -> dict[str, FP4Layer]:
        """The converted layers by name; empty before conversion."""
        converted = [choice for _, report in self._converted for choice in report.converted]
        return {choice.name: choice.module for choice in converted if isinstance(choice.module, FP4Layer)}

    def _warn_of_idle_layers(self) -> None:
        """Name the FP4 layers that a training step never called."""
        idle = [name for name, layer in self._fp4_layers().items() if not layer.fp4_gemm_paths]
        if idle:
            names = abbreviate(idle)
            rank_zero_warn(
                f"{self!r}: {len(idle)} converted layers were not called in the first training step ({names}). If "
                "other code reads their weights directly, that part does not run in FP4; put them into "
                "`ignore_modules` to have the report say so."
            )

    def _patched_layers(self) -> dict[str, FP4Layer]:
        """The converted layers whose recipe has hot channels."""
        return {
            name: layer
            for name, layer in self._fp4_layers().items()
            if layer.fp4_recipe.fprop is not None and layer.fp4_recipe.fprop.hot_channels is not None
        }

    def _share_first_hot_channels(self, remedy: str) -> None:
        """After the first optimizer step with hot channels: make them rank 0's everywhere, and warn that they stay."""
        layers = self._patched_layers()
        if not layers:  # now, but a schedule may bring them
            return
        self._shared_hot_channels = True
        rank_zero_warn(f"{self!r} keeps the hot channels of its first batch; they will not follow the run. {remedy}")
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            picked = {name: layer.fp4_hot_channels for name, layer in layers.items()}
            host = [{name: channels.cpu() for name, channels in picked.items() if channels is not None}]
            torch.distributed.broadcast_object_list(host, src=0)
            for name, channels in host[0].items():
                layers[name].fp4_hot_channels = channels.to(layers[name].fp4_rng_state.device)

    # ------------------------------------------------------------------------------------------------------------------
    # State
    # ------------------------------------------------------------------------------------------------------------------

    def _fp4_state(self) -> dict[str, Any]:
        """Plain data for a checkpoint: the step of each layer's random state, and its hot channels."""
        layers = self._fp4_layers()
        states = [layer.fp4_rng_state.cpu() for layer in layers.values()]
        steps = torch.stack(states)[:, 1].tolist() if states else []
        state = {"version": _STATE_VERSION, "recipe": self.recipe.name, "steps": dict(zip(layers, steps, strict=True))}
        hot = {name: layer.fp4_hot_channels for name, layer in layers.items()}
        chosen = {name: channels.cpu() for name, channels in hot.items() if channels is not None}
        return {**state, "hot_channels": chosen} if chosen else state

    def _load_fp4_state(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`_fp4_state` was taken; layers it does not know start afresh."""
        if state.get("version") != _STATE_VERSION:
            rank_zero_warn(
                f"{self!r}: the checkpoint holds FP4 state of version {state.get('version')!r}, this is version "
                f"{_STATE_VERSION}. Weights are loaded; stochastic rounding starts with fresh random bits."
            )
            return
        if state["recipe"] != self.recipe.name:
            rank_zero_info(f"{self!r}: the checkpoint was trained with the recipe {state['recipe']!r}.")
        layers = self._fp4_layers()
        for name, layer in layers.items():
            if name in state["steps"]:
                layer.fp4_rng_state[1] = state["steps"][name]
                channels = state.get("hot_channels", {}).get(name)
                layer.fp4_hot_channels = None if channels is None else channels.to(layer.fp4_rng_state.device)
        # As before the first step, which `Tuner.lr_find` goes back to: the next one chooses, and the ranks agree on it.
        self._shared_hot_channels &= "hot_channels" in state
        missing = [name for name in layers if name not in state["steps"]]
        if missing:
            rank_zero_info(
                f"{self!r}: {len(missing)} FP4 layers are new since the checkpoint, for example {missing[0]}."
            )

    # ------------------------------------------------------------------------------------------------------------------
    # Precision hooks
    # ------------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        """Autocast on the model's device for mixed precision, else the default dtype."""
        with contextlib.ExitStack() as contexts:
            if self.precision == "bf16-mixed":
                for device_type in self._device_types():
                    # Without a cache, like Lightning's own plugin: it may hold copies made under no_grad.
                    contexts.enter_context(torch.autocast(device_type, dtype=torch.bfloat16, cache_enabled=False))
            else:
                contexts.enter_context(super().forward_context())  # type: ignore[misc]
            yield

    def _device_types(self) -> set[str]:
        """Where the model computes; if nobody said so, where its weights are and, as they may be offloaded, the GPU."""
        if self._device is not None:
            return {self._device.type}
        found = {p.device.type for module, _ in self._converted for p in module.parameters()} - {"meta"}
        return found | ({"cuda"} if torch.cuda.is_available() else set()) or {"cpu"}

    def convert_input(self, data: Any) -> Any:
        """Casts floating-point tensors for ``bf16-true`` only."""
        return super().convert_input(data) if self.precision == "bf16-true" else data  # type: ignore[misc]


def _how_it_runs(recipe: Recipe, device: torch.device) -> str:
    gemms = (recipe.fprop, recipe.dgrad, recipe.wgrad)
    units = sorted({matmul.describe(gemm, device) for gemm in gemms} - {"high_precision"})
    if not units:
        return "The recipe has no FP4 GEMM: until a schedule changes it, all of them run in the base precision"
    if any(name.startswith("fp4") for name in units):
        return f"GEMMs on {device.type}: {', '.join(units)}"
    is_fast = device.type == "cuda" and all(name.startswith("fp8") for name in units)
    worth = "" if is_fast else ": the numerics of FP4, not its speed"
    return f"FP4 is emulated on {device.type} ({backends.backend(device)} quantiser, GEMMs: {', '.join(units)}){worth}"
