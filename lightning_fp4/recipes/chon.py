"""CHON: NVFP4 with the hot channels' errors patched and what follows attention scores protected (arXiv 2602.02047)."""

from __future__ import annotations

import dataclasses
from typing import Literal

from lightning_fp4.naming import Role
from lightning_fp4.quantizer import Centering
from lightning_fp4.recipes.base import GemmUnits, HotChannels, HotChannelUpdates, LayerRule, Recipe
from lightning_fp4.recipes.nvfp4 import nvfp4

POST_QK_PROTECTION = (
    LayerRule(reason="post-QK protection: value projection", roles=(Role.VALUE,), attention="softmax"),
    LayerRule(
        reason="post-QK protection: fused projection that holds the values", roles=(Role.QKV,), attention="softmax"
    ),
    LayerRule(
        reason="post-QK protection: linear attention's output", roles=(Role.ATTENTION_OUTPUT,), attention="linear"
    ),
    LayerRule(reason="post-QK protection: gate's key projection", roles=(Role.GATE_KEY,), attention="linear"),
)
"""What errs most behind attention scores: values in softmax attention, outputs and gate keys in linear attention."""


def chon(
    *,
    mode: Literal["single", "dual", "high_precision"] = "single",
    operands: Literal["both", "activations", "weights"] = "both",
    score: Literal["error", "product"] = "error",
    channels_ratio: float = 0.09,
    update_interval: int = 1000,
    interval_growth: float = 1.0,
    freeze_step: int | None = None,
    freeze_overlap: float | None = None,
    variance_threshold: float | None = None,
    ratio_max: float = 0.15,
    post_qk_protection: bool = True,
    averis: bool = False,
    weight_2d: bool = False,
    gate_weight_2d: bool | None = None,
    stochastic_rounding: bool = True,
    hadamard: bool = True,
    gradient_scale: str = "unbiased",
    forward_scale: str = "four_over_six",
    units: GemmUnits = "auto",
    first_blocks: int | float = 0,
    last_blocks: int | float = 0.15,
) -> Recipe:
    """NVFP4 with a patch for the channels that err most, and value projections and the last blocks in high precision.

    The plugins' default. Until the first training step no channels are hot, and it computes as ``nvfp4`` does with the
    same options; evaluation and prediction choose none, they use what training or the checkpoint chose.

    Args:
        mode: how the patch is multiplied, see ``HotChannels``.
        operands: whose errors are patched.
        score: what makes a channel hot, the paper's ``"error"`` or ``"product"``.
        channels_ratio: share of the channels to patch.
        update_interval: optimizer steps between choices of the hot channels (by the ``HotChannelRefresh`` callback).
        interval_growth: factor on the interval after each choice.
        freeze_step: optimizer step from which the hot channels stay, ``None`` for never.
        freeze_overlap: a layer's hot channels stay once this share of them was chosen again, ``None`` for never.
        variance_threshold: raise the ratio by 1.2 at a refresh while the gradients' variance is above this.
        ratio_max: the ratio rises no further.
        post_qk_protection: keep the value projections of softmax attention, and the output and gate key projections of
            linear attention, in high precision.
        averis: centre inputs and gradients as well, with exact means.
        weight_2d: quantise weights in 16x16 blocks, as NVIDIA's recipe does. In the README's table of losses 1x16
            weights lose less in most pairs, so they are the default here; the other recipes keep 16x16.
        gate_weight_2d: the same for the gates of gated feed-forward layers only; ``None`` to treat them like the rest.
        stochastic_rounding: round output gradients stochastically.
        hadamard: rotate both operands of the weight gradient.
        gradient_scale: scale rule of gradients, see ``nvfp4``.
        forward_scale: scale rule of inputs and weights, see ``nvfp4``. In the README's table of losses
            ``"four_over_six"`` loses less than ``"rne"`` wherever both were run, so it is the default here; ``"rne"``
            needs no search and is faster (see the table of speed).
        units: what multiplies, see ``Gemm``.
        first_blocks: blocks at the start to leave in high precision, a count or a fraction.
        last_blocks: blocks at the end to leave in high precision, a count or a fraction (the paper: four).
    """
    hot_channels = HotChannels(
        mode=mode,
        operands=operands,
        score=score,
        ratio=channels_ratio,
        updates=HotChannelUpdates(
            interval=update_interval,
            growth=interval_growth,
            freeze_step=freeze_step,
            freeze_overlap=freeze_overlap,
            variance_threshold=variance_threshold,
            ratio_max=max(ratio_max, min(channels_ratio, 1.0)),  # a ratio out of range is named as such below
        ),
    )

    def build(weight_2d: bool) -> Recipe:
        base = nvfp4(
            weight_2d=weight_2d,
            stochastic_rounding=stochastic_rounding,
            hadamard=hadamard,
            gradient_scale=gradient_scale,
            forward_scale=forward_scale,
            units=units,
            first_blocks=first_blocks,
            last_blocks=last_blocks,
        )
        assert base.fprop is not None
        patched = dataclasses.replace(
            base, name="chon", fprop=dataclasses.replace(base.fprop, hot_channels=hot_channels)
        )
        return patched.with_centering(Centering()) if averis else patched

    rules: tuple[LayerRule, ...] = POST_QK_PROTECTION if post_qk_protection else ()
    if gate_weight_2d is not None and gate_weight_2d != weight_2d:
        shape = "16x16" if gate_weight_2d else "1x16"
        gates = LayerRule(
            reason=f"gating layer: {shape} weights", roles=(Role.GATE, Role.GATE_UP), recipe=build(gate_weight_2d)
        )
        rules += (gates,)
    return dataclasses.replace(build(weight_2d), rules=rules)
