"""What a recipe is: three GEMMs, each with the way its two operands are quantised, and where it wants to be used."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from lightning_fp4.naming import Role
from lightning_fp4.quantizer import Centering, Quantizer

GemmName = Literal["fprop", "dgrad", "wgrad"]

GemmUnits = Literal["auto", "exact", "bf16", "fp8", "fp4"]

_HADAMARD_SIZES = (2, 4, 8, 16, 32)
_GEMMS: tuple[GemmName, ...] = ("fprop", "dgrad", "wgrad")


@dataclass(frozen=True, kw_only=True)
class HotChannelUpdates:
    """When ``HotChannelRefresh`` picks the hot channels anew.

    Args:
        interval: optimizer steps between refreshes, the first one at the first step.
        growth: factor on the interval after each refresh: hot channels move early in training and settle later.
        max_interval: the interval grows no further than this; ``None`` for no bound.
        freeze_step: no refresh from this optimizer step on; ``None`` to go on for ever.
        freeze_overlap: a layer keeps its channels for good once this share of them (0 to 1) was found again by a
            refresh; ``None`` for never.
        variance_threshold: while the variance of the elements of the weight gradients, averaged over the layers, is
            above this, each refresh raises the ratio; ``None`` keeps the ratio fixed.
        ratio_growth: factor on the ratio at each raise.
        ratio_max: the ratio rises no further than this.

    Raises:
        ValueError: for a value out of range.
    """

    interval: int = 1000
    growth: float = 1.0
    max_interval: int | None = None
    freeze_step: int | None = None
    freeze_overlap: float | None = None
    variance_threshold: float | None = None
    ratio_growth: float = 1.2
    ratio_max: float = 0.15

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ValueError(f"`HotChannelUpdates(interval={self.interval!r})` must be at least 1 optimizer step.")
        for name in ("growth", "ratio_growth"):
            if getattr(self, name) < 1:
                raise ValueError(f"`HotChannelUpdates({name}={getattr(self, name)!r})` must be at least 1.")
        for name in ("freeze_overlap", "ratio_max"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"`HotChannelUpdates({name}={value!r})` must lie between 0 and 1.")


@dataclass(frozen=True, kw_only=True)
class HotChannels:
    """Patch the channels whose quantisation errors matter most (Hot-Channel Patch, arXiv 2602.02047).

    With ``X = Xq + R``, ``W = Wq + S`` and the hot channels ``I`` of the contraction axis, the product gets
    ``R_I @ Wq_I.T + Xq_I @ S_I.T`` added; what is left of the error on those channels is ``R_I @ S_I.T``.

    Args:
        mode: ``"single"`` appends the columns to the operands, one GEMM over ``K + 2k`` columns; ``"dual"`` adds a
            second, small FP4 GEMM; ``"high_precision"`` computes the patch from unquantised residuals.
        operands: whose errors to patch: ``"both"``, or only those of the ``"activations"`` or the ``"weights"``, which
            takes ``K + k`` columns.
        score: what makes a channel hot. ``"error"`` (the paper's): ``mean|R_j| + mean|S_j|``. ``"product"``: the size
            of what the patch adds, ``mean|R_j| * norm(W_j) + mean|S_j| * norm(X_j) / sqrt(tokens)``.
        ratio: share of the channels to patch, 0 to 1, rounded up to a multiple of 16 channels.
        updates: when to choose them anew.

    Raises:
        ValueError: for an unknown name or a ratio out of range.
    """

    mode: Literal["single", "dual", "high_precision"] = "single"
    operands: Literal["both", "activations", "weights"] = "both"
    score: Literal["error", "product"] = "error"
    ratio: float = 0.09
    updates: HotChannelUpdates = field(default_factory=HotChannelUpdates)

    def __post_init__(self) -> None:
        for name, allowed in (
            ("mode", ("single", "dual", "high_precision")),
            ("operands", ("both", "activations", "weights")),
            ("score", ("error", "product")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"`HotChannels({name}={getattr(self, name)!r})` must be one of {allowed}.")
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"`HotChannels(ratio={self.ratio!r})` is a share of the channels, between 0 and 1.")

    def count(self, channels: int, ratio: float | None = None) -> int:
        """How many of ``channels`` to patch: a multiple of 16, or all of them. ``ratio`` replaces the recipe's."""
        wanted = (self.ratio if ratio is None else ratio) * channels
        # Products like .07 * 1600 land a hair above the whole number.
        return min(math.ceil(wanted / 16 - 1e-9) * 16, channels)


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """How one product ``lhs @ rhs.T`` runs in four bits.

    Args:
        lhs: quantiser of the left operand, ``None`` to leave it in high precision.
        rhs: quantiser of the right operand, ``None`` to leave it in high precision.
        hadamard: group length of the random Hadamard transform that both operands go through along the contraction
            axis before they are quantised; ``None`` for no transform.
        units: what multiplies: ``"exact"`` for FP8 units where they are exact and BF16 units elsewhere; ``"auto"``, the
            default of the named recipes, for FP8 units wherever the device has them and they take the formats;
            ``"bf16"`` for BF16 units, which always are exact; ``"fp8"`` for FP8 units, which round operands once more
            unless their scale rules are closed; or ``"fp4"`` for Blackwell's FP4 units, which round the sums of MXFP4
            operands once more. Reports name what ran, and its extra rounding.
        hot_channels: patch some channels of the contraction axis; ``None`` for none.

    Raises:
        ValueError: for a combination that has no meaning.
    """

    lhs: Quantizer | None = None
    rhs: Quantizer | None = None
    hadamard: int | None = None
    units: GemmUnits = "exact"
    hot_channels: HotChannels | None = None

    def __post_init__(self) -> None:
        if self.units not in get_args(GemmUnits):
            raise ValueError(
                f"`Gemm(units={self.units!r})` must be one of {', '.join(map(repr, get_args(GemmUnits)))}."
            )
        if self.lhs and self.rhs and self.lhs.format.block[1] != self.rhs.format.block[1]:
            raise ValueError(
                f"`Gemm(lhs={self.lhs}, rhs={self.rhs})`: both operands need blocks of the same length along the "
                "contraction axis. Use two NVFP4 formats or two MXFP4 formats."
            )
        if self.hadamard is not None and (self.lhs is None or self.rhs is None):
            raise ValueError(
                "`Gemm(hadamard=...)` rotates both operands, so both need a quantiser; one of them is None."
            )
        if self.hadamard is not None and self.hadamard not in _HADAMARD_SIZES:
            raise ValueError(f"`Gemm(hadamard={self.hadamard!r})` must be one of {_HADAMARD_SIZES} or None.")
        if self.hot_channels is not None and (self.lhs is None or self.rhs is None):
            raise ValueError(
                "`Gemm(hot_channels=...)` patches the errors of quantised operands, so both need a quantiser; one of "
                "them is None."
            )
        if self.hot_channels is not None and self.hadamard is not None:
            raise ValueError(
                f"`Gemm(hadamard={self.hadamard}, hot_channels=...)`: a rotation mixes the channels, so none of them "
                "stays hot. Use one of the two."
            )


@dataclass(frozen=True, kw_only=True)
class LayerRule:
    """What a recipe does with some layers instead.

    A layer is meant if its role is among ``roles`` or its name matches one of ``patterns``, and it lies in the kind of
    attention that ``attention`` names.

    Args:
        reason: why, shown in reports.
        roles: roles that the names of the layers give them.
        patterns: regular expressions, searched in the layer's clean qualified name.
        attention: only within ``"softmax"`` or ``"linear"`` attention; ``None`` for anywhere.
        recipe: what the layers use, ``None`` to keep them in high precision.

    Raises:
        ValueError: if the rule names no layers or a pattern is no regular expression.
    """

    reason: str
    roles: tuple[Role, ...] = ()
    patterns: tuple[str, ...] = ()
    attention: Literal["softmax", "linear"] | None = None
    recipe: Recipe | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "roles", tuple(Role(role) for role in self.roles))
        object.__setattr__(self, "patterns", tuple(self.patterns))
        if not self.roles and not self.patterns:
            raise ValueError(f"`LayerRule(reason={self.reason!r})` names no layers. Give `roles` or `patterns`.")
        for pattern in self.patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"`LayerRule(patterns=[{pattern!r}])` is no regular expression: {error}.") from None

    def applies(self, name: str, role: Role, *, linear_attention: bool) -> bool:
        """Whether the layer of this clean name and role is meant."""
        if self.attention is not None and (self.attention == "linear") is not linear_attention:
            return False
        return role in self.roles or any(re.search(pattern, name) for pattern in self.patterns)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a linear layer computes: ``None`` in place of a GEMM keeps that GEMM in high precision.

    With input ``X [tokens, in]``, weight ``W [out, in]`` and output gradient ``D [tokens, out]``:

    Args:
        name: shown in reports and error messages.
        fprop: ``Y = X @ W.T``; lhs is ``X``, rhs is ``W``.
        dgrad: ``dX = D @ W``; lhs is ``D``, rhs is ``W.T``.
        wgrad: ``dW = D.T @ X``; lhs is ``D.T``, rhs is ``X.T``.
        first_blocks: transformer blocks at the start of the stack to leave in high precision: a count, or a fraction
            below 1 that is rounded to the nearest count.
        last_blocks: the same for the end of the stack.
        rules: exceptions for some layers; the first that applies decides.

    Raises:
        ValueError: for a negative or fractional number of blocks, or an option on an operand that cannot have it.
    """

    name: str
    fprop: Gemm | None = None
    dgrad: Gemm | None = None
    wgrad: Gemm | None = None
    first_blocks: int | float = 0
    last_blocks: int | float = 0
    rules: tuple[LayerRule, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))
        for option in ("first_blocks", "last_blocks"):
            blocks = getattr(self, option)
            if not isinstance(blocks, (int, float)) or not blocks >= 0 or (blocks >= 1 and blocks % 1 != 0):
                raise ValueError(
                    f"`Recipe({option}={blocks!r})` must be a count of blocks or a fraction between 0 and 1."
                )
        for name in ("dgrad", "wgrad"):
            gemm = getattr(self, name)
            if gemm is not None and gemm.hot_channels is not None:
                raise ValueError(
                    f"`Recipe({name}=Gemm(hot_channels=...))`: only fprop contracts over the input's channels. Set "
                    "`hot_channels` on fprop."
                )
        for name in ("fprop", "dgrad"):
            gemm = getattr(self, name)
            if gemm is not None and gemm.rhs is not None and gemm.rhs.center is not None:
                raise ValueError(
                    f"`Recipe({name}=Gemm(rhs=Quantizer(center=...)))`: the right side is the weight, which has no "
                    "tokens to take a mean over. Centre the left side."
                )
        centers = [q.center if q else None for q in (self.wgrad.lhs, self.wgrad.rhs)] if self.wgrad else [None]
        if len(set(centers)) > 1:
            raise ValueError(
                "`Recipe(wgrad=...)` centres its operands differently. Give both quantisers the same `center`, or none."
            )

    def map(self, change: Callable[[GemmName, Gemm], Gemm | None]) -> Recipe:
        """The recipe with ``change`` applied to each of its GEMMs, those of its rules included."""
        gemms: dict[str, Any] = {name: gemm and change(name, gemm) for name in _GEMMS for gemm in [getattr(self, name)]}
        rules = tuple(
            rule if rule.recipe is None else dataclasses.replace(rule, recipe=rule.recipe.map(change))
            for rule in self.rules
        )
        return dataclasses.replace(self, rules=rules, **gemms)

    def with_centering(self, center: Centering | None) -> Recipe:
        """The recipe with (or, for ``None``, without) centred inputs and output gradients."""

        def change(name: GemmName, gemm: Gemm) -> Gemm:
            sides = ("lhs", "rhs") if name == "wgrad" else ("lhs",)
            quantizers = [getattr(gemm, side) for side in sides]
            if None in quantizers:
                return gemm
            centered = (dataclasses.replace(quantizer, center=center) for quantizer in quantizers)
            return dataclasses.replace(gemm, **dict(zip(sides, centered, strict=True)))

        return self.map(change)

    def in_high_precision(self, *gemms: GemmName) -> Recipe:
        """The recipe with these GEMMs in high precision, for example ``"fprop"``; with all three if none is named.

        Raises:
            ValueError: for a name that is none of fprop, dgrad, wgrad.
        """
        unknown = sorted(set(gemms) - set(_GEMMS))
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no GEMM of a recipe. Choose from {_GEMMS}.")
        return self.map(lambda name, gemm: None if not gemms or name in gemms else gemm)

    @property
    def quantizes(self) -> bool:
        """Whether any GEMM runs in four bits."""
        return any(gemm is not None and (gemm.lhs or gemm.rhs) for gemm in (self.fprop, self.dgrad, self.wgrad))
