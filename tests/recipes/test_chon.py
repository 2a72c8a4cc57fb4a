"""Which layers CHON protects, in models of several families, and how its options become data."""

import pytest
import torch
from torch import nn

from lightning_fp4 import (
    NVFP4,
    NVFP4_2D,
    Gemm,
    HotChannels,
    HotChannelUpdates,
    LayerRule,
    Quantizer,
    Recipe,
    convert_to_fp4,
    fp4_layers,
    get_recipe,
    plan_conversion,
    set_recipe,
)
from tests.helpers import TinyModel


def _model(attention: nn.Module, mlp: nn.Module | None = None) -> nn.Module:
    model = nn.Module()
    block = nn.Module()
    block.attn = attention
    if mlp is not None:
        block.mlp = mlp
    other = nn.Module()
    other.attn = type(attention)()
    other.attn.load_state_dict(attention.state_dict(), strict=False)
    if mlp is not None:
        other.mlp = mlp
    model.layers = nn.ModuleList([block, other])
    return model


def _holding(class_name: str, *names: str) -> nn.Module:
    """A module of a class of this name with linear layers of these names."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        for name in names:
            self.add_module(name, nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 16)) if name == "gk_proj" else _linear())

    return type(class_name, (nn.Module,), {"__init__": __init__})()


def _linear() -> nn.Linear:
    return nn.Linear(16, 16, bias=False)


def _kept(model: nn.Module, **options) -> dict[str, str]:
    plan = plan_conversion(model, get_recipe("chon", last_blocks=0, **options))
    return {c.name.removeprefix("layers.0."): c.reason for c in plan.kept if c.name.startswith("layers.0.")}


@pytest.mark.parametrize(
    ("attention", "kept"),
    [
        (("LlamaAttention", "q_proj", "k_proj", "v_proj", "o_proj"), {"attn.v_proj"}),
        (("BertSelfAttention", "query", "key", "value"), {"attn.value"}),
        (("Attention", "Wqkv", "out_proj"), {"attn.Wqkv"}),
        (("GPT2Attention", "c_attn", "c_proj"), {"attn.c_attn"}),
        (("Attention", "qkv", "proj"), {"attn.qkv"}),
        (("LinearAttention", "q_proj", "k_proj", "v_proj", "o_proj"), {"attn.o_proj"}),
        (("GatedDeltaNet", "q_proj", "k_proj", "v_proj", "g_proj", "o_proj"), {"attn.o_proj"}),
        (
            ("GatedLinearAttention", "q_proj", "k_proj", "v_proj", "g_proj", "gk_proj", "o_proj"),
            {"attn.o_proj", "attn.gk_proj.0", "attn.gk_proj.1"},
        ),
        # Told by its structure, a gate's key projection, where names tell nothing.
        (("Attention", "q_proj", "k_proj", "v_proj", "gk_proj", "o_proj"), None),
    ],
    ids=lambda x: x[0] if isinstance(x, tuple) else "",
)
def test_post_qk_protection(attention, kept):
    found = _kept(_model(_holding(*attention)))
    assert set(found) == (kept or {"attn.o_proj", "attn.gk_proj.0", "attn.gk_proj.1"})
    assert all(reason.startswith("post-QK protection") for reason in found.values())
    assert not _kept(_model(_holding(*attention)), post_qk_protection=False)


def test_hybrid_models_are_told_apart_layer_by_layer():
    model = _model(_holding("LlamaAttention", "q_proj", "v_proj", "o_proj"))
    model.layers[0].linear_attn = _holding("Qwen3NextGatedDeltaNet", "in_proj_qkvz", "v_proj", "out_proj")
    assert set(_kept(model)) == {"attn.v_proj", "linear_attn.out_proj"}


def test_the_report_names_the_protected_layers():
    model = TinyModel()
    plan = plan_conversion(model, get_recipe("chon", last_blocks=1))
    assert "layers.0.self_attn.v_proj (post-QK protection: value projection)" in plan.summary()
    assert "last 1 of 2 blocks" in plan.summary()
    convert_to_fp4(model, get_recipe("chon", last_blocks=1))
    assert type(model.layers[0].self_attn.v_proj) is nn.Linear


def test_gating_layers_take_other_blocks():
    class SwiGLU(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (_linear() for _ in range(3))

    model = _model(_holding("LlamaAttention", "q_proj", "v_proj", "o_proj"), SwiGLU())
    recipe = get_recipe("chon", last_blocks=0, weight_2d=False, gate_weight_2d=True)
    plan = plan_conversion(model, recipe)
    assert "mlp.gate_proj (gating layer: 16x16 weights)" in plan.summary() or "gate_proj" in plan.summary()
    convert_to_fp4(model, recipe)
    formats = {name: layer.fp4_recipe.fprop.rhs.format for name, layer in fp4_layers(model).items()}
    assert formats["layers.0.mlp.gate_proj"] == NVFP4_2D
    assert {f for name, f in formats.items() if "gate_proj" not in name} == {NVFP4}
    rules = {c["name"]: c.get("rule") for c in plan.as_dict()["converted"]}
    assert rules["layers.0.mlp.gate_proj"] == "gating layer: 16x16 weights"
    assert rules["layers.0.mlp.up_proj"] is None


def test_rules_hold_when_the_recipe_is_set_later():
    model = TinyModel()
    convert_to_fp4(model, get_recipe("nvfp4", last_blocks=0))
    set_recipe(model, get_recipe("chon", last_blocks=0))
    layers = fp4_layers(model)
    value, query = (layers[f"layers.0.self_attn.{name}_proj"] for name in "vq")
    assert not value.fp4_recipe.quantizes
    assert query.fp4_recipe.fprop.hot_channels == HotChannels()
    tokens = torch.arange(6)[None]
    model(tokens).sum().backward()
    assert value.fp4_hot_channels is None
    assert query.fp4_hot_channels is not None


def test_only_this_recipe_leaves_the_weight_blocks_of_its_paper():
    """1x16 weights lose less in the table of losses; the others are what their names say."""
    assert get_recipe("chon").fprop.rhs.format is NVFP4
    assert get_recipe("chon", weight_2d=True).fprop.rhs.format is NVFP4_2D
    assert {get_recipe(name).fprop.rhs.format for name in ("nvfp4", "averis", "four_over_six")} == {NVFP4_2D}


def test_options_become_data():
    recipe = get_recipe(
        {
            "name": "chon",
            "mode": "dual",
            "score": "product",
            "channels_ratio": 0.05,
            "update_interval": 7,
            "averis": True,
        }
    )
    hot = recipe.fprop.hot_channels
    assert hot == HotChannels(mode="dual", score="product", ratio=0.05, updates=HotChannelUpdates(interval=7))
    assert recipe.fprop.lhs.center is not None
    assert recipe.dgrad.hot_channels is None
    assert recipe.last_blocks == 0.15
    assert hash(recipe) == hash(get_recipe(recipe))


def test_a_gemm_in_high_precision_by_name():
    recipe = get_recipe("chon", weight_2d=False, gate_weight_2d=True)
    late = recipe.in_high_precision("fprop")
    assert late.fprop is None
    assert late.wgrad == recipe.wgrad
    assert late.rules[-1].recipe.fprop is None
    assert not recipe.in_high_precision().quantizes
    with pytest.raises(ValueError, match="'forward' is no GEMM"):
        recipe.in_high_precision("forward")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: HotChannels(mode="triple"), "mode='triple'"),
        (lambda: HotChannels(operands="x"), "operands='x'"),
        (lambda: HotChannels(score="x"), "score='x'"),
        (lambda: HotChannels(ratio=9), "between 0 and 1"),
        (lambda: get_recipe("chon", channels_ratio=9), r"`HotChannels\(ratio=9\)`"),
        (lambda: HotChannelUpdates(interval=0), "interval=0"),
        (lambda: HotChannelUpdates(growth=0.5), "growth=0.5"),
        (lambda: HotChannelUpdates(freeze_overlap=2), "freeze_overlap=2"),
        (lambda: Gemm(lhs=Quantizer(), hot_channels=HotChannels()), "both need a quantiser"),
        (lambda: Gemm(lhs=Quantizer(), rhs=Quantizer(), hadamard=16, hot_channels=HotChannels()), "rotation mixes"),
        (
            lambda: Recipe(name="r", wgrad=Gemm(lhs=Quantizer(), rhs=Quantizer(), hot_channels=HotChannels())),
            "only fprop",
        ),
        (lambda: LayerRule(reason="r"), "names no layers"),
        (lambda: LayerRule(reason="r", patterns=["("]), "no regular expression"),
        (lambda: LayerRule(reason="r", roles=["nose"]), "nose"),
    ],
)
def test_wrong_options_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_rule_by_pattern():
    recipe = get_recipe("nvfp4", last_blocks=0)
    rule = LayerRule(reason="experts stay", patterns=[r"mlp\.up"])
    plan = plan_conversion(TinyModel(), Recipe(name="mine", fprop=recipe.fprop, rules=(rule,)))
    assert {c.name for c in plan.kept if c.reason == "experts stay"} == {f"layers.{i}.mlp.up_proj" for i in (0, 1)}
    # A filter of the user's own decides alone which layers to convert.
    plan = plan_conversion(
        TinyModel(), Recipe(name="mine", fprop=recipe.fprop, rules=(rule,)), filter_fn=lambda m, n: True
    )
    assert not plan.kept
