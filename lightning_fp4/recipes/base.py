"""What a recipe is: three GEMMs, each with the way its two operands are quantised, and where it wants to be used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_fp4.quantizer import Quantizer

GemmUnits = Literal["auto", "bf16", "fp8"]

_HADAMARD_SIZES = (2, 4, 8, 16, 32)


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """How one product ``lhs @ rhs.T`` runs in four bits.

    Args:
        lhs: quantiser of the left operand, ``None`` to leave it in high precision.
        rhs: quantiser of the right operand, ``None`` to leave it in high precision.
        hadamard: group length of the random Hadamard transform that both operands go through along the contraction
            axis before they are quantised; ``None`` for no transform.
        units: what multiplies: ``"auto"`` for the fastest units that are exact, ``"bf16"`` for BF16 units, which always
            are, or ``"fp8"`` for FP8 units, which round operands once more unless their scale rules are closed.

    Raises:
        ValueError: for a combination that has no meaning.
    """

    lhs: Quantizer | None = None
    rhs: Quantizer | None = None
    hadamard: int | None = None
    units: GemmUnits = "auto"

    def __post_init__(self) -> None:
        if self.units not in ("auto", "bf16", "fp8"):
            raise ValueError(f"`Gemm(units={self.units!r})` must be 'auto', 'bf16' or 'fp8'.")
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

    Raises:
        ValueError: for a negative or fractional number of blocks.
    """

    name: str
    fprop: Gemm | None = None
    dgrad: Gemm | None = None
    wgrad: Gemm | None = None
    first_blocks: int | float = 0
    last_blocks: int | float = 0

    def __post_init__(self) -> None:
        for field in ("first_blocks", "last_blocks"):
            blocks = getattr(self, field)
            if blocks < 0 or (blocks >= 1 and blocks != int(blocks)):
                raise ValueError(
                    f"`Recipe({field}={blocks!r})` must be a count of blocks or a fraction between 0 and 1."
                )

    @property
    def quantizes(self) -> bool:
        """Whether any GEMM runs in four bits."""
        return any(gemm is not None and (gemm.lhs or gemm.rhs) for gemm in (self.fprop, self.dgrad, self.wgrad))
