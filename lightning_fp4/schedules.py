"""Learning-rate schedules as plain functions: a step goes in, the factor on the base learning rate comes out.

Made for ``torch.optim.lr_scheduler.LambdaLR``; the base learning rate is the one that the same model would use in high
precision::

    schedule = functools.partial(fp4_warmup_cosine, warmup_steps=500, total_steps=20_000, peak=0.8)
    scheduler = LambdaLR(optimizer, schedule)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
"""

from __future__ import annotations

import math


def warmup_cosine(step: int, *, warmup_steps: int, total_steps: int, final: float = 0.1) -> float:
    """Linear warm-up to 1, then half a cosine down to ``final``, which stays.

    Args:
        step: optimizer steps taken, 0 and up.
        warmup_steps: steps until the factor reaches 1; the first step already moves (``1 / warmup_steps``).
        total_steps: steps at which the factor reaches ``final``.
        final: share of the peak at the end, 0 to 1.

    Raises:
        ValueError: if the lengths do not fit together.
    """
    return fp4_warmup_cosine(step, warmup_steps=warmup_steps, total_steps=total_steps, final=final)


def fp4_warmup_cosine(
    step: int,
    *,
    warmup_steps: int,
    total_steps: int,
    peak: float = 1.0,
    decay: float = 0.0,
    decay_every_steps: float | None = None,
    cosine_start: int | None = None,
    final: float = 0.1,
) -> float:
    """Warm-up, an optional exponential decay, then a cosine: the FP4 practice with each of its numbers a parameter.

    Four-bit runs take a peak at or below the high-precision rate and lower it early: the factor falls by ``decay``
    (0.15 is usual) in every ``decay_every_steps`` (50 billion tokens are usual, see :func:`steps_of_tokens`), smoothly,
    until ``cosine_start``; from there half a cosine leads to ``final * peak``.

    Args:
        step: optimizer steps taken, 0 and up.
        warmup_steps: steps of the linear warm-up, 0 for none.
        total_steps: steps at which the factor reaches ``final * peak``; later ones keep it.
        peak: peak rate relative to the high-precision rate.
        decay: share lost in each ``decay_every_steps`` between warm-up and ``cosine_start``, 0 to below 1.
        decay_every_steps: how many steps one decay takes; needed if ``decay`` is not 0.
        cosine_start: first step of the cosine; the end of the warm-up if not given.
        final: share of ``peak`` at the end, 0 to 1.

    Returns:
        The factor on the base learning rate.

    Raises:
        ValueError: if the lengths or shares do not fit together.
    """
    start = warmup_steps if cosine_start is None else cosine_start
    if not 0 <= warmup_steps <= start < total_steps:
        raise ValueError(
            f"`warmup_steps={warmup_steps}`, `cosine_start={cosine_start}` and `total_steps={total_steps}` must come "
            "in this order, with at least one step for the cosine."
        )
    if not (0 <= final <= 1 and peak > 0 and 0 <= decay < 1):
        raise ValueError(
            f"`final={final}` must be from 0 to 1, `peak={peak}` above 0, and `decay={decay}` from 0 to below 1."
        )
    if decay and not (decay_every_steps and decay_every_steps > 0):
        raise ValueError(
            f"`decay={decay}` needs `decay_every_steps`, got {decay_every_steps}. For a decay every 50 billion tokens "
            "pass `decay_every_steps=steps_of_tokens(50e9, tokens_per_step)`."
        )
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps

    def decayed(at: int) -> float:
        return peak * (1 - decay) ** ((at - warmup_steps) / decay_every_steps) if decay_every_steps else peak

    if step < start:
        return decayed(step)
    top, bottom = decayed(start), final * peak
    progress = min(1.0, (step - start) / (total_steps - start))
    # A long decay may have passed the final value already: then it stays there.
    return top if top <= bottom else bottom + (top - bottom) * 0.5 * (1 + math.cos(math.pi * progress))


def steps_of_tokens(tokens: float, tokens_per_step: float) -> float:
    """How many optimizer steps ``tokens`` take; ``tokens_per_step`` counts all ranks and accumulated batches.

    Example::

        steps_of_tokens(50e9, tokens_per_step=4 * 2**20)  # 11920.9 steps
    """
    if tokens_per_step <= 0:
        raise ValueError(f"`tokens_per_step={tokens_per_step}` must be above 0.")
    return tokens / tokens_per_step
