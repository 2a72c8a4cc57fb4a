"""Which layers of a model run in four bits: choose them, convert them in place, switch their recipe, revert them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed
from torch import nn

from lightning_fp4 import matmul
from lightning_fp4.blocks import BlockStack, block_count, find_block_stacks, is_linear
from lightning_fp4.linear import FP4Layer, fp4_class, is_conv1d, new_rng_state, original_class
from lightning_fp4.naming import Role, clean_name, is_linear_attention, matches, role_of
from lightning_fp4.recipes import LayerRule, Recipe, get_recipe

log = logging.getLogger(__name__)

FilterFn = Callable[[nn.Module, str], bool]
Layers = Literal["all", "mlp", "mlp+attention_output"]

_HEAD_NAMES = {"lm_head", "embed_out", "output_projection", "unembed", "output", "head", "score", "classifier"}
_ADAPTER_PREFIX = "lora_"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SMALL = "smaller than min_features="

BREAK_EVEN_FEATURES = 2048
"""Where FP4 on FP8 units is as fast as BF16: a layer whose smaller side is below this is faster in BF16.

Measured by ``benchmarks/linear.py`` (``benchmarks/results/linear.json``) on an H200: one linear layer, forward and
backward, 16384 tokens, ``nvfp4`` with ``units="fp8"``. Speed over BF16's: 1.06 for 2048 x 2048, 1.40 for 4096 x 4096,
1.53 for 4096 x 14336. What FP8 units save grows with the product of both sides, what quantising costs with their sum,
so smaller layers lose more. Recipes that do more (``chon``: 0.87 for 2048 x 2048) break even later. On BF16 units (0.61
to 0.86) no size is faster.
"""


@dataclass(frozen=True, kw_only=True)
class LayerChoice:
    """What was decided for one linear layer.

    Args:
        name: clean qualified name.
        module: the layer.
        shape: ``(out_features, in_features)`` of the whole layer; ``(0, 0)`` for a lazy one.
        reason: why it stays in high precision, ``None`` if it runs in FP4.
        recipe: what it uses in place of the model's recipe by one of that recipe's rules, ``None`` if none applies.
        rule: the reason that this rule gives.
    """

    name: str
    module: nn.Module
    shape: tuple[int, int]
    reason: str | None
    recipe: Recipe | None = None
    rule: str | None = None

    @property
    def size(self) -> int:
        """Number of weights, which is also its FLOPs per token divided by six."""
        return self.shape[0] * self.shape[1]

    @property
    def features(self) -> int:
        """The smaller of ``in_features`` and ``out_features``."""
        return min(self.shape)


@dataclass(frozen=True, kw_only=True)
class ConversionReport:
    """What runs in FP4 and what does not, with reasons.

    Args:
        recipe: of the model.
        choices: one entry for every linear layer of the model.
        stacks: the lists of transformer blocks that were found.
        warnings: what the user should know, each a sentence.
        device: where the layers will run, ``None`` for where their weights are.
        base_dtype: what the layers that stay in high precision compute in.
    """

    recipe: Recipe
    choices: tuple[LayerChoice, ...]
    stacks: tuple[BlockStack, ...]
    warnings: tuple[str, ...]
    device: torch.device | None = None
    base_dtype: torch.dtype = torch.bfloat16

    @property
    def converted(self) -> list[LayerChoice]:
        """Layers that run in FP4."""
        return [choice for choice in self.choices if choice.reason is None]

    @property
    def kept(self) -> list[LayerChoice]:
        """Layers that stay in high precision."""
        return [choice for choice in self.choices if choice.reason is not None]

    @property
    def flops_share(self) -> float:
        """Share of the linear layers' FLOPs that runs in FP4, 0 to 1."""
        return sum(c.size for c in self.converted) / max(1, sum(c.size for c in self.choices))

    @property
    def faster_in_bf16(self) -> list[LayerChoice]:
        """Layers that run in FP4, on a GPU's FP8 units, though too small to gain speed: ``BREAK_EVEN_FEATURES``."""
        return [
            choice
            for choice in self.converted
            if self.base_dtype is torch.bfloat16
            and choice.features < BREAK_EVEN_FEATURES
            and _multiplies_on_fp8(self._recipe_of(choice), self.device or _device(choice.module))
        ]

    @property
    def recommendations(self) -> tuple[str, ...]:
        """What would make the run faster, each a sentence."""
        names = [choice.name for choice in self.faster_in_bf16]
        if not names:
            return ()
        layers = "layer has" if len(names) == 1 else "layers have"
        return (
            f"{len(names)} {layers} fewer than {BREAK_EVEN_FEATURES} features, where BF16 is faster on this device and "
            f"FP4 only saves memory: `min_features={BREAK_EVEN_FEATURES}` keeps {abbreviate(names)} in BF16.",
        )

    def _recipe_of(self, choice: LayerChoice) -> Recipe:
        module = choice.module
        return module.fp4_recipe if isinstance(module, FP4Layer) else choice.recipe or self.recipe

    def summary(self) -> str:
        """One line for a log."""
        layers = "layer" if len(self.converted) == 1 else "layers"
        text = f"converted {len(self.converted)} Linear {layers} to FP4 ({self.flops_share:.1%} of Linear FLOPs)"
        if self.kept:
            names = defaultdict(list)
            for choice in self.kept:
                names[choice.reason].append(choice.name)
            reasons = (f"{abbreviate(group)} ({reason})" for reason, group in names.items())
            text += f", kept {len(self.kept)} in high precision: {'; '.join(reasons)}"
        ruled = defaultdict(list)
        for choice in self.converted:
            if choice.rule is not None:
                ruled[choice.rule].append(choice.name)
        if ruled:
            text += f". By rule: {'; '.join(f'{abbreviate(group)} ({rule})' for rule, group in ruled.items())}"
        if self.stacks:
            text += f". Transformer blocks: {', '.join(map(str, self.stacks))}"
        return ". ".join([text, *(sentence.removesuffix(".") for sentence in self.recommendations)])

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data; ``gemm_paths`` counts the layers by the units that ran their GEMMs so far."""
        paths: dict[str, int] = defaultdict(int)
        converted = []
        slow = {choice.name for choice in self.faster_in_bf16}
        for choice in self.converted:
            module = choice.module
            gemms = dict(getattr(module, "fp4_gemm_paths", {}))
            for gemm, path in gemms.items():
                paths[f"{gemm}:{path}"] += 1
            rule = {} if choice.rule is None else {"rule": choice.rule}
            recommended = {"recommended": "bf16"} if choice.name in slow else {}
            converted.append(
                {
                    "name": choice.name,
                    "shape": choice.shape,
                    "recipe": self._recipe_of(choice).name,
                    "gemm_paths": gemms,
                    "ran": bool(gemms),
                    **rule,
                    **recommended,
                }
            )
        return {
            "recipe": self.recipe.name,
            "converted": converted,
            "kept": [{"name": c.name, "shape": c.shape, "reason": c.reason} for c in self.kept],
            "flops_share": self.flops_share,
            "gemm_paths": dict(paths),
            "block_stacks": [{"name": s.name, "length": s.length, "block": s.block} for s in self.stacks],
            "warnings": list(self.warnings),
            "recommendations": list(self.recommendations),
        }


def plan_conversion(
    model: nn.Module,
    recipe: str | Recipe | Mapping[str, Any] = "chon",
    *,
    layers: Layers = "all",
    ignore_modules: Collection[str] = (),
    filter_fn: FilterFn | None = None,
    first_blocks: int | float | None = None,
    last_blocks: int | float | None = None,
    lora_adapters: bool = False,
    min_features: int | None = None,
) -> ConversionReport:
    """Decide which linear layers would run in FP4, and change nothing.

    Arguments and errors are those of :func:`convert_to_fp4`.
    """
    recipe = get_recipe(recipe)
    if first_blocks is not None:
        recipe = dataclasses.replace(recipe, first_blocks=first_blocks)
    if last_blocks is not None:
        recipe = dataclasses.replace(recipe, last_blocks=last_blocks)
    if layers not in ("all", "mlp", "mlp+attention_output"):
        raise ValueError(f"`layers={layers!r}` must be 'all', 'mlp' or 'mlp+attention_output'.")
    if isinstance(ignore_modules, str):
        raise TypeError(
            f"`ignore_modules={ignore_modules!r}` must be a collection of names, for example [{ignore_modules!r}]."
        )
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(
            f"`filter_fn={filter_fn!r}` must be a function of a module and its name, for example "
            '`lambda module, name: "mlp" in name`.'
        )
    _check_min_features(min_features)
    found = [(clean_name(name), module) for name, module in model.named_modules() if is_linear(module)]
    stacks = find_block_stacks(model)
    shared, vocabulary = _embedding_owners(model), _vocabulary_sizes(model)
    find_rule = _rule_finder(model, recipe)

    def default_reason(name: str, module: nn.Module) -> str | None:
        if not lora_adapters and any(part.startswith(_ADAPTER_PREFIX) for part in name.split(".")):
            return "LoRA adapter"
        tied_to = shared.get(id(module.weight))
        if tied_to is not None:
            return f"weight tied to {tied_to}"
        position = next(((s, i) for s in stacks if (i := s.index(name)) is not None), None)
        role = role_of(name)
        if position is None:
            # A width may happen to be the length of a table of positions, so names go before sizes.
            could_be_head = role in (Role.OTHER, Role.MLP_OTHER, Role.ATTENTION_OTHER)
            if name.rpartition(".")[2] in _HEAD_NAMES or (could_be_head and _shape(module)[0] in vocabulary):
                return "output head"
        else:
            stack, index = position
            leading, trailing = (block_count(n, stack.length) for n in (recipe.first_blocks, recipe.last_blocks))
            if index < leading:
                return f"first {leading} of {stack.length} blocks"
            if index >= stack.length - trailing:
                return f"last {trailing} of {stack.length} blocks"
            if layers == "mlp" and not role.is_mlp:
                return "layers='mlp'"
            if layers == "mlp+attention_output" and not (role.is_mlp or role is Role.ATTENTION_OUTPUT):
                return "layers='mlp+attention_output'"
        rule = find_rule(name)
        return rule.reason if rule is not None and rule.recipe is None else None

    choices = []
    for name, module in found:
        shape = _shape(module)
        reason: str | None
        if isinstance(module, FP4Layer):
            reason = None
        else:
            reason = _obstacle(module)
            if reason is None and matches(name, ignore_modules):
                reason = "ignore_modules"
            if reason is None and filter_fn is not None:
                reason = None if filter_fn(module, name) else "filter_fn"
            elif reason is None:
                reason = default_reason(name, module)
            if reason is None and min(shape) < (min_features or 0):
                reason = f"{_SMALL}{min_features}"
        rule = find_rule(name) if reason is None else None
        ruled = rule is not None and rule.recipe is not None
        choices.append(
            LayerChoice(
                name=name,
                module=module,
                shape=shape,
                reason=reason,
                recipe=rule.recipe if rule is not None else None,
                rule=rule.reason if rule is not None and ruled else None,
            )
        )
    report = ConversionReport(
        recipe=recipe,
        choices=tuple(choices),
        stacks=tuple(stacks),
        warnings=tuple(_warnings(model, recipe, found, choices, ignore_modules)),
    )
    if not any(_obstacle(choice.module) is None for choice in choices):
        skipped = "".join(f" {c.name}: {c.reason}." for c in report.kept[:5])
        raise TypeError(
            f"The model has no Linear layers that can be converted to FP4 (found {len(found)}, {len(report.kept)} "
            f"skipped).{skipped} Convert a model with `nn.Linear` layers, or train without FP4."
        )
    return report


def convert_to_fp4(
    model: nn.Module,
    recipe: str | Recipe | Mapping[str, Any] = "chon",
    *,
    layers: Layers = "all",
    ignore_modules: Collection[str] = (),
    filter_fn: FilterFn | None = None,
    first_blocks: int | float | None = None,
    last_blocks: int | float | None = None,
    lora_adapters: bool = False,
    min_features: int | None = None,
    seed: int | None = None,
) -> nn.Module:
    """Make the linear layers of ``model`` compute in four bits, in place.

    Only the layers' classes change: parameters, ties, hooks, ``requires_grad``, train/eval mode and state-dict keys
    stay. Layers that are FP4 already keep their recipe. Without ``filter_fn``, these stay in high precision: output
    heads, weights tied to an embedding, LoRA adapters, the first and last blocks that the recipe asks for, and the
    layers that one of its rules names.

    Args:
        model: any module; the outermost ``ModuleList``/``Sequential`` of like blocks is taken as its block stack.
        recipe: name, dict with a ``"name"``, or :class:`Recipe`. The default ``"chon"`` picks each layer's hot channels
            from its first training batch, on every rank by itself; the Trainer's plugin and callbacks do more.
        layers: within blocks, ``"all"``, only the ``"mlp"``, or ``"mlp+attention_output"``.
        ignore_modules: names to keep in high precision, each with all below it; a name may start at any dot.
        filter_fn: ``filter_fn(module, name)`` alone decides (but for ``ignore_modules`` and ``min_features``) which
            layers to convert.
        first_blocks: count or fraction of blocks to keep, in place of the recipe's.
        last_blocks: count or fraction of blocks to keep, in place of the recipe's.
        lora_adapters: convert LoRA adapters too.
        min_features: keep layers whose smaller side, of ``in_features`` and ``out_features``, is below this; by default
            none. On an H200's FP8 units, FP4 was measured to break even with BF16 at 2048; the log names the layers
            below that.
        seed: of stochastic rounding, ``torch.initial_seed()`` if not given; ranks and layers draw different bits.

    Returns:
        ``model`` itself.

    Raises:
        ValueError: for an unknown recipe or option, or a negative ``min_features``.
        TypeError: if the model has no linear layer that could be converted, or for a ``min_features`` that is no int.

    Example::

        model = convert_to_fp4(model, ignore_modules=["vision_tower"])
    """
    report = plan_conversion(
        model,
        recipe,
        layers=layers,
        ignore_modules=ignore_modules,
        filter_fn=filter_fn,
        first_blocks=first_blocks,
        last_blocks=last_blocks,
        lora_adapters=lora_adapters,
        min_features=min_features,
    )
    already = len(fp4_layers(model))
    apply_plan(report, get_recipe(recipe), seed)
    if _rank() == 0:
        if already:
            log.info("%s: %d layers were FP4 already and keep their recipe.", report.recipe.name, already)
        log.info("%s: %s", report.recipe.name, report.summary())
        for message in report.warnings:
            warnings.warn(message, stacklevel=2)
    return model


def apply_plan(report: ConversionReport, recipe: Recipe, seed: int | None = None) -> None:
    """Convert what ``report`` chose; layers that are FP4 already stay as they are."""
    seed = torch.initial_seed() if seed is None else seed
    for choice in report.converted:
        module = choice.module
        if isinstance(module, FP4Layer):
            continue
        rng_state = new_rng_state(seed, _rank(), choice.name)
        weight: Any = module.weight
        module.__class__ = fp4_class(type(module))
        assert isinstance(module, FP4Layer)
        module.fp4_recipe = choice.recipe or recipe
        module.fp4_rng_state = rng_state if weight.is_meta else rng_state.to(weight.device)
        module.fp4_gemm_paths = {}


def revert_from_fp4(model: nn.Module) -> nn.Module:
    """Undo :func:`convert_to_fp4` in place: every FP4 layer becomes what it was, with its present weights.

    Returns:
        ``model`` itself.
    """
    for module in fp4_layers(model).values():
        for attribute in [name for name in vars(module) if name.startswith("fp4_")]:
            delattr(module, attribute)
        original: Any = original_class(type(module))
        module.__class__ = original
    return model


def fp4_layers(model: nn.Module) -> dict[str, FP4Layer]:
    """The FP4 layers of a model by clean name."""
    return {clean_name(name): module for name, module in model.named_modules() if isinstance(module, FP4Layer)}


def set_recipe(
    model: nn.Module, recipe: str | Recipe | Mapping[str, Any], *, filter_fn: FilterFn | None = None
) -> dict[str, Recipe]:
    """Replace the recipe of FP4 layers; weights, optimizer state and random states stay.

    Args:
        model: a converted model, or one FP4 layer.
        recipe: the new recipe. ``"high_precision"`` makes the layers compute like ``nn.Linear``. Its rules apply; a
            layer that a rule keeps in high precision computes like ``nn.Linear``.
        filter_fn: ``filter_fn(module, name)`` chooses the layers, all if not given.

    Returns:
        The recipes before, by layer name.
    """
    recipe = get_recipe(recipe)
    find_rule = _rule_finder(model, recipe)
    before = {}
    for name, module in fp4_layers(model).items():
        if filter_fn is None or filter_fn(module, name):
            before[name] = module.fp4_recipe
            rule = find_rule(name)
            module.fp4_recipe = recipe if rule is None else rule.recipe or recipe.in_high_precision()
    return before


@contextlib.contextmanager
def use_recipe(model: nn.Module, recipe: str | Recipe | Mapping[str, Any]) -> Iterator[None]:
    """Within the context all FP4 layers use ``recipe``; afterwards each has its own again."""
    before = set_recipe(model, recipe)
    try:
        yield
    finally:
        for name, module in fp4_layers(model).items():
            module.fp4_recipe = before.get(name, module.fp4_recipe)


# ----------------------------------------------------------------------------------------------------------------------


def _check_min_features(min_features: object) -> None:
    remedy = f"Give a whole number of features, such as {BREAK_EVEN_FEATURES}, or None to convert layers of any size."
    if min_features is None:
        return
    if not isinstance(min_features, int) or isinstance(min_features, bool):
        raise TypeError(f"`min_features={min_features!r}` is of type {type(min_features).__name__}. {remedy}")
    if min_features < 0:
        raise ValueError(f"`min_features={min_features!r}` is negative, and no layer is that small. {remedy}")


def _multiplies_on_fp8(recipe: Recipe, device: torch.device) -> bool:
    """Whether this device is a GPU whose FP8 units multiply in every FP4 GEMM of the recipe."""
    if device.type != "cuda":
        return False
    try:
        units = {matmul.units_of(gemm, device) for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad)}
    except ValueError:  # units that the device lacks, of which the first forward will say so
        return False
    return units - {None} == {"fp8"}


def _obstacle(module: nn.Module) -> str | None:
    """Why this linear layer cannot be converted, ``None`` if it can."""
    module_class = type(module)
    if isinstance(module, FP4Layer):
        return None
    if isinstance(module.weight, nn.parameter.UninitializedParameter):
        return "lazy: it has no weight yet, so run a batch before converting"
    if torch.nn.utils.parametrize.is_parametrized(module):
        return "parametrized weight"
    if not isinstance(module.weight, nn.Parameter):
        return "its weight is not a Parameter"
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weight without calling it"
    own_forward = not is_conv1d(module_class) and module_class.forward is not nn.Linear.forward
    if own_forward or "forward" in vars(module):
        return f"{module_class.__name__} has its own forward"
    if module.weight.dtype not in _DTYPES:
        return f"its weight is {module.weight.dtype}"
    return None


def _rule_finder(model: nn.Module, recipe: Recipe) -> Callable[[str], LayerRule | None]:
    """A function from a layer's clean name to the first rule of ``recipe`` that applies to it."""
    classes = {clean_name(name): type(module).__name__ for name, module in model.named_modules()}

    def in_linear_attention(name: str) -> bool:
        # Names and classes of the modules around the layer; the first that is attention at all decides.
        parts = name.split(".")[:-1]
        for end in range(len(parts), 0, -1):
            labels = (parts[end - 1], classes.get(".".join(parts[:end]), ""))
            if any(is_linear_attention(label) for label in labels):
                return True
            if any("attention" in label.lower() or "attn" in label.lower() for label in labels):
                # A gate's key projection beside queries and keys is a mark of linear attention by itself.
                prefix = ".".join(parts[:end])
                return any(known.startswith(f"{prefix}.gk_proj") for known in classes)
        return False

    def find(name: str) -> LayerRule | None:
        if not recipe.rules:
            return None
        role, linear = role_of(name), in_linear_attention(name)
        return next((rule for rule in recipe.rules if rule.applies(name, role, linear_attention=linear)), None)

    return find


def _embedding_owners(model: nn.Module) -> dict[int, str]:
    """Names of the non-linear modules that own each parameter, by the parameter's id."""
    return {
        id(parameter): clean_name(name)
        for name, module in model.named_modules()
        if not is_linear(module)
        for parameter in module.parameters(recurse=False)
    }


def _vocabulary_sizes(model: nn.Module) -> set[int]:
    return {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}


def _warnings(
    model: nn.Module,
    recipe: Recipe,
    found: list[tuple[str, nn.Module]],
    choices: list[LayerChoice],
    ignore_modules: Collection[str],
) -> Iterator[str]:
    for ignored in ignore_modules:
        if not any(matches(name, [ignored]) for name, _ in found):
            yield f"`ignore_modules`: {ignored!r} matches no Linear layer of the model. Is it misspelt?"
    if choices and all(choice.reason is not None for choice in choices):
        reasons = sorted({str(choice.reason) for choice in choices})
        kept = f"No Linear layer runs in FP4: all {len(choices)} are kept in high precision ({'; '.join(reasons)})."
        if any(reason.startswith(("first ", "last ")) for reason in reasons):
            kept += " Give a smaller `first_blocks` or `last_blocks` than the recipe's."
        if any(rule.reason in reasons for rule in recipe.rules):
            kept += " Take a recipe without these rules: for `chon`, `{'name': 'chon', 'post_qk_protection': False}`."
        small = [choice.features for choice in choices if str(choice.reason).startswith(_SMALL)]
        if small:
            kept += f" Give a `min_features` of at most {max(small)}."
        yield kept
    if (
        any(isinstance(m, nn.TransformerEncoderLayer) for m in model.modules())
        and torch.backends.mha.get_fastpath_enabled()
    ):
        yield (
            "nn.TransformerEncoderLayer has a fast path in eval mode that does not call its Linear layers, so "
            "evaluation would not run in FP4. Call `torch.backends.mha.set_fastpath_enabled(False)` if it should."
        )


def _shape(module: nn.Module) -> tuple[int, int]:
    """``(out_features, in_features)``."""
    layer: Any = module
    is_plain = isinstance(layer, nn.Linear)
    if isinstance(layer.weight, nn.parameter.UninitializedParameter):
        return (0, 0)
    if layer.weight.ndim != 2:  # FSDP1 keeps a flat shard between steps
        return (layer.out_features, layer.in_features) if is_plain else (layer.nf, layer.nx)
    rows, columns = layer.weight.shape
    return (rows, columns) if is_plain else (columns, rows)


def _device(module: nn.Module) -> torch.device:
    weight: Any = module.weight
    return weight.device


def abbreviate(names: list[str], most: int = 3) -> str:
    """The first few names, and how many more there are."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _rank() -> int:
    return (
        torch.distributed.get_rank() if torch.distributed.is_available() and torch.distributed.is_initialized() else 0
    )
