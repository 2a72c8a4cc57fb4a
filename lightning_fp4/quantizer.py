"""How one operand of a GEMM becomes four-bit: format, rounding and scale rule, in combinations that make sense."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from lightning_fp4.formats import E2M1, E4M3, E8M0, FORMATS, NVFP4, BlockFormat


class Rounding(str, Enum):
    """How a scaled value moves to the E2M1 grid."""

    NEAREST = "nearest"
    """Round to nearest, ties to even."""
    STOCHASTIC = "stochastic"
    """Round up with the probability that makes the result right on average; eight random bits a value."""


class ScaleRule(str, Enum):
    """How a block's maximum becomes its stored scale."""

    RNE = "rne"
    """``amax / 6`` rounded to the nearest E4M3. What Blackwell recipes use. Half of the scales round down, so a block's
    maximum saturates; with stochastic rounding that is a bias (slope 0.9966)."""
    UNBIASED = "unbiased"
    """``amax / 6`` rounded **up**, so nothing saturates and stochastic rounding stays unbiased."""
    FOUR_OVER_SIX = "four_over_six"
    """Map the block maximum to 6 or to 4, whichever gives the smaller squared error (arXiv 2512.02010)."""
    CLOSED = "closed"
    """``amax / 6`` rounded to the nearest **closed** scale: one of the 41 E4M3 values (``{1, 1.25, 1.5} * 2^k`` and
    a few small ones) whose product with every E2M1 value is an E4M3 value, so FP8 units multiply the result exactly."""
    CLOSED_UP = "closed_up"
    """``amax / 6`` rounded **up** to a closed scale: exact on FP8 units, and unbiased under stochastic rounding."""
    CLOSED_BEST = "closed_best"
    """Of the three closed scales at or above ``amax / 6`` the one with the smallest squared error."""

    @property
    def scale_max(self) -> float:
        """The E4M3 value that the scale of the tensor's largest block maps to."""
        if self.is_closed:
            return 64.0
        return 256.0 if self is ScaleRule.FOUR_OVER_SIX else E4M3.max

    @property
    def encoded_max(self) -> float:
        """What the tensor's maximum becomes in units of code value times block scale, for example 6 x 448 = 2688."""
        return self.scale_max * E2M1.max

    @property
    def is_closed(self) -> bool:
        """Whether every decoded value, without the global scale, is an E4M3 value."""
        return self in (ScaleRule.CLOSED, ScaleRule.CLOSED_UP, ScaleRule.CLOSED_BEST)

    @property
    def searches(self) -> bool:
        """Whether it compares the errors of several scales, which only makes sense for rounding to nearest."""
        return self in (ScaleRule.FOUR_OVER_SIX, ScaleRule.CLOSED_BEST)


@dataclass(frozen=True, kw_only=True)
class Centering:
    """Subtract the mean over the tokens before quantising, add its part of the product back (Averis, arXiv 2603.10444).

    Args:
        mean: ``"exact"`` keeps the means in float32 and multiplies them by the unquantised weight, a matrix-vector
            product; the cross terms of the weight gradient then vanish. ``"fp4"`` is the paper's form: means rounded to
            the operand's format, times the quantised weight.

    Raises:
        ValueError: for another ``mean``.
    """

    mean: Literal["exact", "fp4"] = "exact"

    def __post_init__(self) -> None:
        if self.mean not in ("exact", "fp4"):
            raise ValueError(f"`Centering(mean={self.mean!r})` must be 'exact' or 'fp4'.")


@dataclass(frozen=True, kw_only=True)
class Quantizer:
    """How one GEMM operand is quantised.

    Args:
        format: block format.
        rounding: :class:`Rounding` or its value as a string.
        scale_rule: :class:`ScaleRule` or its value as a string.
        center: take the mean over the tokens out first, ``None`` to quantise the tensor as it is. For inputs and output
            gradients, not for weights.

    Raises:
        ValueError: for an unknown name, or a rule that the format or the rounding cannot have.
    """

    format: BlockFormat = NVFP4
    rounding: Rounding = Rounding.NEAREST
    scale_rule: ScaleRule = ScaleRule.RNE
    center: Centering | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounding", Rounding(self.rounding))
        object.__setattr__(self, "scale_rule", ScaleRule(self.scale_rule))
        if FORMATS.get(self.format.name) != self.format:
            raise ValueError(
                f"`Quantizer(format=...)`: {self.format!r} is none of the formats that the operators know "
                f"({', '.join(FORMATS)}). Add it to `lightning_fp4.formats.FORMATS`."
            )
        if self.format.scale is E8M0 and self.scale_rule is not ScaleRule.UNBIASED:
            raise ValueError(
                f"`Quantizer(format={self.format}, scale_rule={self.scale_rule.value!r})`: the scales of {self.format} "
                "are powers of two, which always round up. Use scale_rule='unbiased'."
            )
        if self.rounding is Rounding.STOCHASTIC and self.scale_rule.searches:
            raise ValueError(
                f"`Quantizer(rounding='stochastic', scale_rule={self.scale_rule.value!r})`: choosing the scale by the "
                "error makes stochastic rounding biased. Use scale_rule='unbiased' (or 'rne') for gradients."
            )

        # Made here since compilers cannot trace how they are made.
        nearest = self if self.rounding is Rounding.NEAREST else replace(self, rounding=Rounding.NEAREST)
        object.__setattr__(self, "_nearest", nearest)
        object.__setattr__(self, "_plain", nearest if self.center is None else replace(nearest, center=None))

    @property
    def nearest(self) -> Quantizer:
        """The same, rounding to nearest."""
        return self._nearest  # type: ignore[attr-defined]

    @property
    def plain(self) -> Quantizer:
        """The same, rounding to nearest, without centring: for means, and for columns of a patch."""
        return self._plain  # type: ignore[attr-defined]

    def __str__(self) -> str:
        rounding = "SR" if self.rounding is Rounding.STOCHASTIC else "RTN"
        centered = " centered" if self.center else ""
        return f"{self.format} {rounding} {self.scale_rule.value}{centered}"
