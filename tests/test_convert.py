"""Conversion: what stays, what is chosen, what is said."""

import copy
import dataclasses
import logging
import pickle
import warnings

import pytest
import torch
from torch import nn

from lightning_fp4 import (
    FP4Linear,
    LayerRule,
    convert_to_fp4,
    fp4_layers,
    get_recipe,
    plan_conversion,
    revert_from_fp4,
    set_recipe,
    use_recipe,
)
from lightning_fp4.convert import BREAK_EVEN_FEATURES
from tests.helpers import RTN, Block, TinyModel, assert_same_run, relative_error, run, same_bits, without_blocks

ALL = without_blocks(RTN)
IN_BLOCK = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def _names(model):
    return set(fp4_layers(model))


def _kept(model, *args, **kwargs):
    return {c.name: c.reason for c in plan_conversion(model, *args, **kwargs).kept}


# ---- what stays ------------------------------------------------------------------------------------------------------


def test_swap_keeps_everything():
    model = TinyModel()
    model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    model.eval()
    seen = []
    model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: seen.append(1))
    modules, parameters = list(model.modules()), list(model.parameters())
    state = {k: v.clone() for k, v in model.state_dict().items()}
    flags = [(p.requires_grad, p.dtype) for p in parameters]
    optimizer = torch.optim.AdamW(parameters)
    assert convert_to_fp4(model, ALL) is model
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
    assert [(p.requires_grad, p.dtype) for p in model.parameters()] == flags
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert not list(model.buffers())
    assert not any(m.training for m in model.modules())
    assert isinstance(model.layers[0].mlp.up_proj, nn.Linear)
    assert model.lm_head.weight is model.embed_tokens.weight
    model(torch.randint(0, 48, (1, 5)))
    assert seen == [1]


def test_plain_checkpoints_both_ways():
    model, plain = convert_to_fp4(TinyModel(), ALL), TinyModel()
    assert not any(model.load_state_dict(plain.state_dict()))
    assert not any(plain.load_state_dict(model.state_dict()))


def test_idempotent():
    """Lightning converts on every fit, validate and test."""
    model = convert_to_fp4(TinyModel(), ALL, seed=1)
    before = {name: (type(m), m.fp4_recipe, m.fp4_rng_state) for name, m in fp4_layers(model).items()}
    for layer in fp4_layers(model).values():
        layer.fp4_rng_state[1] = 9
    convert_to_fp4(model, "mxfp4", seed=2)
    for name, m in fp4_layers(model).items():
        assert (type(m), m.fp4_recipe) == before[name][:2]
        assert m.fp4_rng_state is before[name][2]
        assert int(m.fp4_rng_state[1]) == 9


def test_second_conversion_adds_what_is_new():
    model = convert_to_fp4(TinyModel(), ALL, layers="mlp")
    first = _names(model)
    convert_to_fp4(model, "mxfp4", last_blocks=0)
    assert first < _names(model)
    assert {fp4_layers(model)[n].fp4_recipe.name for n in first} == {"nvfp4"}
    assert {fp4_layers(model)[n].fp4_recipe.name for n in _names(model) - first} == {"mxfp4"}


def test_revert():
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(16, 16), Own(16, 16))
    before, attributes = [type(m) for m in model], [set(vars(m)) for m in model]
    x = torch.randn(4, 16)
    expected = model(x)
    convert_to_fp4(model, RTN)
    assert not same_bits(model(x), expected)
    assert revert_from_fp4(model) is model
    assert [type(m) for m in model] == before
    assert [set(vars(m)) for m in model] == attributes
    assert same_bits(model(x), expected)
    assert not fp4_layers(model)
    revert_from_fp4(model)
    convert_to_fp4(model, RTN)
    assert len(fp4_layers(model)) == 2


def test_revert_after_a_parametrization_came_on_top():
    layer = convert_to_fp4(nn.Linear(16, 16), RTN)
    nn.utils.parametrizations.weight_norm(layer)
    x = torch.randn(4, 16)
    assert isinstance(layer, FP4Linear)
    quantised = layer(x)
    revert_from_fp4(layer)
    assert not isinstance(layer, FP4Linear)
    assert torch.nn.utils.parametrize.is_parametrized(layer)
    assert same_bits(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    assert not same_bits(layer(x), quantised)
    nn.utils.parametrize.remove_parametrizations(layer, "weight")
    assert type(layer) is nn.Linear


# ---- T06: ties -------------------------------------------------------------------------------------------------------


def test_tied_head_stays_tied_and_in_high_precision():
    model = TinyModel(tied=True)
    count = len(list(model.parameters()))
    assert _kept(model, ALL)["lm_head"] == "weight tied to embed_tokens"
    convert_to_fp4(model, ALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randint(0, 48, (2, 7))).square().mean().backward()
        optimizer.step()
    assert model.lm_head.weight is model.embed_tokens.weight
    assert len(list(model.parameters())) == count
    assert type(model.lm_head) is nn.Linear


def test_a_tied_head_in_fp4_adds_both_gradients():
    tokens = torch.randint(0, 48, (2, 8))
    model = convert_to_fp4(TinyModel(), RTN, filter_fn=lambda _, name: name == "lm_head")
    loss = model(tokens).square().mean()
    loss.backward()
    both = model.embed_tokens.weight.grad.clone()
    untied = copy.deepcopy(model)
    untied.lm_head.weight = nn.Parameter(untied.lm_head.weight.detach().clone())
    untied.zero_grad()
    untied(tokens).square().mean().backward()
    parts = untied.embed_tokens.weight.grad, untied.lm_head.weight.grad
    assert all(part.abs().max() > 0 for part in parts)
    torch.testing.assert_close(both, parts[0] + parts[1], rtol=1e-5, atol=1e-7)


# ---- choosing --------------------------------------------------------------------------------------------------------


def test_a_single_block_follows_the_rules_and_is_no_head():
    """One block is no stack; its width may also be the length of the table of positions."""
    model = TinyModel(blocks=1, width=32, tied=False)
    model.positions = nn.Embedding(32, 32)
    assert _kept(model, "nvfp4") == {"lm_head": "output head"}
    values = {"layers.0.self_attn.v_proj": "post-QK protection: value projection"}
    assert _kept(model, "chon") == {"lm_head": "output head", **values}


def test_a_head_is_told_by_its_size_too():
    model = nn.Sequential(nn.Embedding(48, 32), nn.Linear(32, 32), nn.Linear(32, 48))
    assert _kept(model, "chon") == {"2": "output head"}


def test_what_helps_when_nothing_is_in_fp4():
    class OnlyValues(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.ModuleDict({"qkv": nn.Linear(32, 96)})

    model = nn.Sequential(*(OnlyValues() for _ in range(4)))
    (warning,) = plan_conversion(model).warnings
    assert warning == (
        "No Linear layer runs in FP4: all 4 are kept in high precision (last 1 of 4 blocks; post-QK protection: fused "
        "projection that holds the values). Give a smaller `first_blocks` or `last_blocks` than the recipe's. Take a "
        "recipe without these rules: for `chon`, `{'name': 'chon', 'post_qk_protection': False}`."
    )
    (warning,) = plan_conversion(model, last_blocks=0).warnings
    assert "last_blocks" not in warning
    assert not plan_conversion(model, {"name": "chon", "post_qk_protection": False}, last_blocks=0).warnings


def test_layers_that_are_fp4_already_are_named(caplog):
    caplog.set_level(logging.INFO, "lightning_fp4")
    model = convert_to_fp4(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), "nvfp4")
    assert "already" not in caplog.text
    convert_to_fp4(model, "mxfp4")
    assert "mxfp4: 2 layers were FP4 already and keep their recipe." in caplog.text


def test_the_summary_counts_one_layer():
    assert plan_conversion(nn.Linear(16, 16)).summary() == "converted 1 Linear layer to FP4 (100.0% of Linear FLOPs)"


def test_default_keeps_heads_adapters_and_last_blocks():
    model = TinyModel(blocks=4, tied=False)
    kept = _kept(model, get_recipe("nvfp4"))
    assert kept == {"lm_head": "output head", **{f"layers.3.{n}": "last 1 of 4 blocks" for n in IN_BLOCK}}


@pytest.mark.parametrize(
    ("first", "last", "converted"), [(1, 1, {1, 2}), (0.25, 0.5, {1}), (0, 0, {0, 1, 2, 3}), (2, 0, {2, 3})]
)
def test_first_and_last_blocks(first, last, converted):
    model = convert_to_fp4(TinyModel(blocks=4), "nvfp4", first_blocks=first, last_blocks=last)
    assert _names(model) == {f"layers.{i}.{n}" for i in converted for n in IN_BLOCK}


@pytest.mark.parametrize(("option", "value"), [("first_blocks", -1), ("last_blocks", 2.5)])
def test_block_overrides_are_checked_like_the_recipe_s(option, value):
    with pytest.raises(ValueError, match=rf"{option}={value}.*count of blocks or a fraction"):
        convert_to_fp4(TinyModel(), "nvfp4", **{option: value})


def test_the_recipe_on_the_layers_is_the_given_one():
    """Overriding how many blocks stay is the walker's business: layers compare equal to the recipe."""
    model = convert_to_fp4(TinyModel(), RTN, last_blocks=0)
    assert {layer.fp4_recipe for layer in fp4_layers(model).values()} == {RTN}


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("all", set(IN_BLOCK)),
        ("mlp", {"mlp.up_proj", "mlp.down_proj"}),
        ("mlp+attention_output", {"mlp.up_proj", "mlp.down_proj", "self_attn.o_proj"}),
    ],
)
def test_layers_presets(layers, expected):
    model = convert_to_fp4(TinyModel(blocks=1 + 1), ALL, layers=layers)
    assert _names(model) == {f"layers.{i}.{n}" for i in range(2) for n in expected}


def test_unknown_preset():
    with pytest.raises(ValueError, match=r"`layers='attn'` must be 'all', 'mlp' or 'mlp\+attention_output'"):
        convert_to_fp4(TinyModel(), layers="attn")


def test_ignore_modules_at_dot_boundaries():
    model = TinyModel(blocks=12)
    kept = _kept(model, ALL, ignore_modules=["layers.1", "o_proj"])
    ignored = {name for name, reason in kept.items() if reason == "ignore_modules"}
    expected = {f"layers.1.{n}" for n in IN_BLOCK} | {f"layers.{i}.self_attn.o_proj" for i in range(12)}
    assert ignored == expected


def test_ignore_modules_misspelt():
    with pytest.warns(UserWarning, match=r"`ignore_modules`: 'lm_haed' matches no Linear layer.*misspelt"):
        convert_to_fp4(TinyModel(), ALL, ignore_modules=["lm_haed"])
    with pytest.raises(TypeError, match=r"must be a collection of names, for example \['lm_head'\]"):
        convert_to_fp4(TinyModel(), ALL, ignore_modules="lm_head")


def test_filter_fn_alone_decides_after_ignore_modules():
    model = TinyModel(blocks=2, tied=False)
    seen = []

    def choose(module, name):
        assert isinstance(module, nn.Linear)
        seen.append(name)
        return name in ("lm_head", "layers.1.mlp.up_proj", "layers.0.mlp.up_proj")

    convert_to_fp4(model, "nvfp4", filter_fn=choose, ignore_modules=["layers.0"], last_blocks=1)
    assert _names(model) == {"lm_head", "layers.1.mlp.up_proj"}
    assert not any(name.startswith("layers.0") for name in seen)
    assert len(seen) == len(IN_BLOCK) + 1


# ---- layers that are too small ---------------------------------------------------------------------------------------


class Sizes(nn.Module):
    """A block like a modern one: fused projections, grouped keys, experts."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(48, 3 * 48)
        self.key = nn.Linear(48, 24)
        self.gate_up = nn.Linear(48, 128)
        self.experts = nn.ModuleList(nn.Linear(*sizes) for sizes in ((48, 16), (16, 48)))


SMALL_SIDES = {"qkv": 48, "key": 24, "gate_up": 48, "experts.0": 16, "experts.1": 16}


@pytest.mark.parametrize("least", [None, 0, 1, 16, 17, 24, 25, 48])
def test_min_features_is_about_the_smaller_side(least):
    model = Sizes()
    kept = _kept(model, RTN, min_features=least)
    assert kept == {n: f"smaller than min_features={least}" for n, side in SMALL_SIDES.items() if side < (least or 0)}
    convert_to_fp4(model, RTN, min_features=least)
    assert _names(model) == set(SMALL_SIDES) - set(kept)
    assert all(type(model.get_submodule(name)) is nn.Linear for name in kept)


@pytest.mark.parametrize(("least", "converted"), [(32, 1), (33, 0)])
def test_min_features_of_a_transposed_weight(least, converted):
    pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    model = nn.ModuleList([Conv1D(96, 32), Conv1D(16, 96), nn.Linear(64, 64)])
    convert_to_fp4(model, RTN, min_features=least)
    assert len(_names(model)) == 1 + converted
    assert ("0" in _names(model)) is bool(converted)


def test_min_features_beside_the_other_choices():
    """It keeps more, never fewer, and the reasons of the others come first."""
    model = TinyModel(blocks=4, tied=False)
    wide = {f"layers.{i}.mlp.{n}" for i in range(4) for n in ("up_proj", "down_proj")}
    for name in wide:
        old = model.get_submodule(name)
        parent = model.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], nn.Linear(2 * old.in_features, 2 * old.out_features))
    rule = LayerRule(reason="stays", patterns=[r"0\.self_attn\.q"])
    other = LayerRule(reason="other recipe", patterns=[r"layers\.[01]\.mlp", "k_proj"], recipe=get_recipe("mxfp4"))
    recipe = dataclasses.replace(RTN, rules=(rule, other))
    report = plan_conversion(model, recipe, ignore_modules=["layers.2"], last_blocks=1, min_features=33)
    kept = {choice.name: choice.reason for choice in report.kept}
    small = "smaller than min_features=33"
    assert kept == {
        **{f"layers.{i}.{n}": small for i in (0, 1) for n in IN_BLOCK if "attn" in n},
        "layers.0.self_attn.q_proj": "stays",
        **{f"layers.2.{n}": "ignore_modules" for n in IN_BLOCK},
        **{f"layers.3.{n}": "last 1 of 4 blocks" for n in IN_BLOCK},
        "lm_head": "output head",
    }
    assert {choice.name: choice.rule for choice in report.converted} == {
        name: "other recipe" for name in wide if name[7] in "01"
    }
    chosen = _kept(model, recipe, filter_fn=lambda module, name: name.endswith(("q_proj", "up_proj")), min_features=33)
    assert {n for n, reason in chosen.items() if reason == small} == {f"layers.{i}.self_attn.q_proj" for i in range(4)}
    assert {name for name in wide if name not in chosen} == {f"layers.{i}.mlp.up_proj" for i in range(4)}
    assert set(_kept(model, recipe, layers="mlp", last_blocks=0, min_features=33)) == set(
        _kept(model, recipe, layers="mlp", last_blocks=0)
    )


def test_fp4_layers_stay_in_spite_of_min_features():
    model = convert_to_fp4(Sizes(), RTN)
    convert_to_fp4(model, RTN, min_features=48)
    assert _names(model) == set(SMALL_SIDES)


def test_min_features_above_everything():
    with pytest.warns(
        UserWarning, match=r"all 5 are kept.*\(smaller than.*=49\)\. Give a `min_features` of at most 48"
    ):
        convert_to_fp4(Sizes(), RTN, min_features=49)
    # Not what would stay anyway.
    with pytest.warns(UserWarning, match=r"all 5 are kept.*Give a `min_features` of at most 24\.$"):
        convert_to_fp4(Sizes(), RTN, ignore_modules=["qkv", "gate_up"], min_features=49)


@pytest.mark.parametrize(
    ("value", "error", "sentence"),
    [
        (-1, ValueError, "`min_features=-1` is negative, and no layer is that small. Give a whole number"),
        (2048.0, TypeError, "`min_features=2048.0` is of type float. Give a whole number of features, such as 2048, or "
         "None to convert layers of any size."),
        (True, TypeError, "`min_features=True` is of type bool."),
        (False, TypeError, "`min_features=False` is of type bool."),
        ("2048", TypeError, "`min_features='2048'` is of type str."),
    ],
)  # fmt: skip
@pytest.mark.parametrize("function", [plan_conversion, convert_to_fp4])
def test_bad_min_features(function, value, error, sentence):
    model = Sizes()
    with pytest.raises(error) as raised:
        function(model, RTN, min_features=value)
    assert sentence in str(raised.value)
    assert not fp4_layers(model)


CUDA = torch.device("cuda")
FP8 = get_recipe("nvfp4", units="fp8")


class Wide(nn.Module):
    """Layers around the measured size, without memory."""

    def __init__(self):
        super().__init__()
        sizes = {"even": (2048, 2048), "low": (4096, 2047), "tall": (1024, 14336), "big": (4096, 14336)}
        for name, (in_features, out_features) in sizes.items():
            self.add_module(name, nn.Linear(in_features, out_features, device="meta"))


def _plan(model, recipe=FP8, *, device=CUDA, base_dtype=torch.bfloat16, **kwargs):
    return dataclasses.replace(plan_conversion(model, recipe, **kwargs), device=device, base_dtype=base_dtype)


@pytest.fixture
def fp8_units(monkeypatch):
    monkeypatch.setattr("lightning_fp4.backends._has_fp8", lambda device: True)


def test_small_layers_on_fp8_units_are_recommended_to_stay_in_bf16(fp8_units):
    report = _plan(Wide())
    sentence = (
        "2 layers have fewer than 2048 features, where BF16 is faster on this device and FP4 only saves memory: "
        "`min_features=2048` keeps low, tall in BF16."
    )
    assert BREAK_EVEN_FEATURES == 2048
    assert report.recommendations == (sentence,)
    assert report.summary() == f"converted 4 Linear layers to FP4 (100.0% of Linear FLOPs). {sentence[:-1]}"
    data = report.as_dict()
    assert data["recommendations"] == [sentence]
    assert {layer["name"]: layer.get("recommended") for layer in data["converted"]} == {
        "even": None, "low": "bf16", "tall": "bf16", "big": None
    }  # fmt: skip
    assert pickle.loads(pickle.dumps(data)) == data
    (one,) = _plan(Wide(), ignore_modules=["tall"]).recommendations
    assert one.startswith("1 layer has fewer than 2048 features")


def test_following_the_recommendation_ends_it(fp8_units):
    report = _plan(Wide(), min_features=BREAK_EVEN_FEATURES)
    assert [choice.name for choice in report.kept] == ["low", "tall"]
    assert not report.recommendations
    assert not any("recommended" in layer for layer in report.as_dict()["converted"])


def test_recommendations_follow_the_recipes_of_layers(fp8_units):
    """Those that layers have already, and those of rules; on BF16 units the paths in the report say enough."""
    bf16 = get_recipe("nvfp4", units="bf16")
    small = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
    small[0] = convert_to_fp4(small[0], bf16)
    small[1] = convert_to_fp4(small[1], FP8)
    rules = (LayerRule(reason="bf16 units", patterns=["2"], recipe=bf16),)
    assert [c.name for c in _plan(small, dataclasses.replace(FP8, rules=rules)).faster_in_bf16] == ["1", "3"]
    assert [c.name for c in _plan(small, bf16).faster_in_bf16] == ["1"]


@pytest.mark.parametrize(
    ("recipe", "device", "base_dtype", "expected"),
    [
        (FP8, CUDA, torch.bfloat16, 2),
        (get_recipe("nvfp4", forward_scale="closed", gradient_scale="closed_up", units="fp8"), CUDA, torch.bfloat16, 2),
        (dataclasses.replace(FP8, fprop=None), CUDA, torch.bfloat16, 2),
        (dataclasses.replace(FP8, fprop=get_recipe("nvfp4", units="bf16").fprop), CUDA, torch.bfloat16, 0),
        (get_recipe("nvfp4", units="bf16"), CUDA, torch.bfloat16, 0),
        (get_recipe("mxfp4"), CUDA, torch.bfloat16, 0),
        (get_recipe("high_precision"), CUDA, torch.bfloat16, 0),
        (FP8, CUDA, torch.float32, 0),
        (FP8, torch.device("cpu"), torch.bfloat16, 0),
        (FP8, None, torch.bfloat16, 0),  # weights on the meta device
    ],
)  # fmt: skip
def test_when_there_is_a_recommendation(recipe, device, base_dtype, expected, fp8_units):
    report = _plan(Wide(), recipe, device=device, base_dtype=base_dtype)
    assert len(report.faster_in_bf16) == expected
    assert bool(report.recommendations) is bool(expected)


def test_no_recommendation_without_fp8_units(monkeypatch):
    """Ampere: such a recipe cannot run there, which the first forward says; planning does not fail."""
    monkeypatch.setattr("lightning_fp4.backends._has_fp8", lambda device: False)
    assert not _plan(Wide()).recommendations


def test_the_log_asks_where_the_weights_are(fp8_units, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "lightning_fp4")
    convert_to_fp4(nn.Linear(16, 16), FP8)
    assert "BF16 is faster" not in caplog.text
    monkeypatch.setattr("lightning_fp4.convert._device", lambda module: CUDA)
    convert_to_fp4(nn.Linear(16, 16), FP8)
    assert "nvfp4: converted 1 Linear layer to FP4 (100.0% of Linear FLOPs). 1 layer has fewer than" in caplog.text


def test_wrapped_names_are_clean():
    model = torch.compile(TinyModel())
    assert all(not n.startswith("_orig_mod") for n in _names(convert_to_fp4(model, ALL)))


def test_a_linear_layer_alone():
    layer = nn.Linear(16, 8)
    convert_to_fp4(layer, RTN)
    assert isinstance(layer, FP4Linear)
    assert list(fp4_layers(layer)) == [""]


def test_a_plain_sequential():
    model = convert_to_fp4(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), "nvfp4")
    assert _names(model) == {"0", "2"}


# ---- T23: layers to leave alone, odd layers --------------------------------------------------------------------------


class OwnForward(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def test_odd_layers():
    model = nn.ModuleDict(
        {
            "lazy": nn.LazyLinear(16),
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)),
            "old_normed": nn.utils.weight_norm(nn.Linear(16, 16)),
            "attention": nn.MultiheadAttention(16, 2),
            "own": OwnForward(16, 16),
            "wide": nn.Linear(16, 16).double(),
            "no_bias": nn.Linear(16, 16, bias=False),
            "norm": nn.LayerNorm(16, elementwise_affine=False),
            "embedding": nn.Embedding(4, 8),
            "conv": nn.Conv1d(16, 16, 1),
        }
    )
    patched = nn.Linear(16, 16)
    patched.forward = lambda x: x
    model["patched"] = patched
    classes = {name: type(m) for name, m in model.items()}
    kept = _kept(model, RTN)
    assert kept == {
        "lazy": "lazy: it has no weight yet, so run a batch before converting",
        "normed": "parametrized weight",
        "old_normed": "its weight is not a Parameter",
        "attention.out_proj": "nn.MultiheadAttention reads its weight without calling it",
        "own": "OwnForward has its own forward",
        "wide": "its weight is torch.float64",
        "patched": "Linear has its own forward",
    }
    convert_to_fp4(model, RTN)
    assert _names(model) == {"no_bias"}
    assert {n: type(m) for n, m in model.items() if n != "no_bias"} == {
        n: c for n, c in classes.items() if n != "no_bias"
    }
    x = torch.randn(4, 16)
    assert torch.equal(model["own"](x), nn.functional.linear(x, model["own"].weight, model["own"].bias) * 2)
    assert model["lazy"](x).shape == (4, 16)
    convert_to_fp4(model, RTN)  # now it has a weight
    assert _names(model) == {"no_bias", "lazy"}


def test_a_module_registered_twice_converts_once():
    shared = nn.Linear(16, 16)
    model = convert_to_fp4(nn.ModuleDict({"a": shared, "b": shared}), RTN)
    assert model["a"] is model["b"] is shared
    assert list(fp4_layers(model)) == ["a"]


def test_meta_device_converts_and_materialises():
    with torch.device("meta"):
        model = TinyModel()
    convert_to_fp4(model, get_recipe("nvfp4"), last_blocks=0, seed=1)
    assert all(layer.weight.is_meta for layer in fp4_layers(model).values())
    model.to_empty(device="cpu")
    model.load_state_dict(TinyModel().state_dict())
    model(torch.randint(0, 48, (2, 5))).sum().backward()
    assert all(layer.fp4_rng_state.tolist()[1] == 1 for layer in fp4_layers(model).values())


def test_encoder_layer_warns_of_its_fast_path():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    with pytest.warns(UserWarning, match=r"fast path in eval mode.*set_fastpath_enabled\(False\)"):
        convert_to_fp4(model, ALL)
    assert _names(model) == {f"layers.{i}.linear{j}" for i in range(2) for j in (1, 2)}


def test_every_converted_layer_is_called_in_training_and_evaluation():
    """T17: nothing is claimed that does not run."""
    model = convert_to_fp4(TinyModel(), ALL)
    called = []
    for name, layer in fp4_layers(model).items():
        layer.register_forward_hook(lambda *_, name=name: called.append(name))
    for training in (True, False):
        model.train(training)
        called.clear()
        model(torch.randint(0, 48, (2, 5)))
        assert sorted(called) == sorted(fp4_layers(model))


def test_moe_with_empty_experts(poison):
    """T07: all tokens go to one expert; the others get zeros as gradients, not None and not garbage."""
    experts = convert_to_fp4(nn.ModuleList(nn.Linear(16, 16) for _ in range(4)), get_recipe("nvfp4"), last_blocks=0)
    x = torch.randn(8, 16, requires_grad=True)
    parts = x.split([8, 0, 0, 0])
    torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)]).sum().backward()
    assert experts[0].weight.grad.abs().max() > 0
    for expert in experts[1:]:
        assert torch.equal(expert.weight.grad, torch.zeros(16, 16))
        assert torch.equal(expert.bias.grad, torch.zeros(16))
    assert x.grad.isfinite().all()


# ---- other libraries -------------------------------------------------------------------------------------------------


def _llama(**kwargs):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
        **kwargs,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("tied", [False, True])
def test_llama(tied):
    model = convert_to_fp4(_llama(tie_word_embeddings=tied), "nvfp4")
    assert len(fp4_layers(model)) == 3 * 7
    assert not any(n.startswith(("model.layers.3", "lm_head")) for n in fp4_layers(model))
    report = plan_conversion(model, "nvfp4")
    assert [str(s) for s in report.stacks] == ["model.layers (4 x LlamaDecoderLayer)"]
    tokens = torch.randint(0, 64, (2, 9))
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_gpt2_conv1d():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).eval()
    tokens = torch.randint(0, 64, (2, 9))
    expected = model(input_ids=tokens).logits.detach()
    keys = list(model.state_dict())
    convert_to_fp4(model, ALL)
    expected_names = {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}
    assert _names(model) == {f"transformer.h.{i}.{n}" for i in range(2) for n in expected_names}
    layer = model.transformer.h[0].mlp.c_fc
    # The layer stores [in, out]: it equals an FP4 linear layer with the transposed weight, gradients included.
    twin = nn.Linear(32, 128)
    twin.weight.data, twin.bias.data = layer.weight.detach().T.clone(), layer.bias.detach().clone()
    convert_to_fp4(twin, ALL)
    x, grad = torch.randn(8, 32), torch.randn(8, 128)
    actual, wanted = run(layer, x, grad), run(twin, x, grad)
    assert_same_run({**actual, "dw": actual["dw"].T}, wanted)
    logits = model(input_ids=tokens).logits
    assert 0.001 < relative_error(logits, expected) < 0.25
    assert plan_conversion(model, ALL).as_dict()["converted"][0]["shape"] == (96, 32)
    twin = pickle.loads(pickle.dumps(model))
    assert same_bits(twin(input_ids=tokens).logits, logits)
    revert_from_fp4(model)
    assert same_bits(model(input_ids=tokens).logits.detach(), expected)
    assert list(model.state_dict()) == keys


def test_t5_has_two_stacks():
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=32)
    model = transformers.T5ForConditionalGeneration(config)
    report = plan_conversion(model, "nvfp4", last_blocks=1)
    assert [s.name for s in report.stacks] == ["encoder.block", "decoder.block"]
    assert {c.name.split(".")[2] for c in report.converted} == {"0"}


@pytest.mark.parametrize("order", ["adapters first", "conversion first"])
def test_lora(order):
    """T08: adapters stay in high precision, the base is frozen, gradients reach the first layer, merging works."""
    peft = pytest.importorskip("peft")
    base = _llama()
    plain = copy.deepcopy(base)

    def adapt(model):
        config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"])
        model = peft.get_peft_model(model, config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(1))
            elif "lora_A" in name:
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(2))
        return model

    if order == "adapters first":
        model = convert_to_fp4(adapt(base), ALL)
        kept = {c.reason for c in plan_conversion(model, ALL).kept}
        assert kept == {"LoRA adapter", "output head"}
    else:
        model = adapt(convert_to_fp4(base, ALL))
    assert not any("lora_" in name for name in fp4_layers(model))
    assert len(fp4_layers(model)) == 4 * 7
    plain = adapt(plain)
    tokens = torch.randint(0, 64, (2, 16))
    for m in (model, plain):
        m(input_ids=tokens, labels=tokens).loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if "lora_" in name:
            # Through up to four layers of FP4, of which each adds up to 0.2.
            assert relative_error(ours.grad, theirs.grad) < 0.6, name
        else:
            assert ours.grad is None, name
    assert set(peft.get_peft_model_state_dict(model)) == set(peft.get_peft_model_state_dict(plain))
    merged = model.merge_and_unload()
    assert not any("lora" in key or "base_layer" in key for key in merged.state_dict())
    for key, value in plain.merge_and_unload().state_dict().items():
        torch.testing.assert_close(merged.state_dict()[key], value, rtol=0, atol=0)
    assert len(fp4_layers(merged)) == 4 * 7


# ---- FSDP2 -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def process_group(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("error:FSDP2-wrapped module .FP4:UserWarning", "error:FSDP2-wrapped module .FSDPFP4")
@pytest.mark.parametrize("order", ["convert first", "shard first"])
def test_fully_shard_of_leaves(order, process_group):
    """``fully_shard`` swaps classes as well: both swaps survive, in either order."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))
    expected = convert_to_fp4(copy.deepcopy(model), RTN)
    mesh = init_device_mesh("cpu", (1,))

    def shard():
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    if order == "convert first":
        convert_to_fp4(model, RTN)
        shard()
    else:
        shard()
        convert_to_fp4(model, RTN)
    assert all(isinstance(m, FP4Linear) and isinstance(m, FSDPModule) for m in model)
    assert len(fp4_layers(model)) == 2
    x = torch.randn(8, 32)
    y, wanted = model(x), expected(x)
    assert same_bits(y.detach(), wanted.detach())
    y.sum().backward()
    wanted.sum().backward()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert same_bits(ours.grad.full_tensor(), theirs.grad)
    revert_from_fp4(model)
    assert all(isinstance(m, FSDPModule) and not isinstance(m, FP4Linear) for m in model)
    plain = revert_from_fp4(expected)
    assert same_bits(model(x).detach(), plain(x).detach())


# ---- what is said ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model", [nn.Sequential(nn.ReLU()), nn.Sequential(nn.LazyLinear(4)), nn.MultiheadAttention(16, 2)]
)
def test_nothing_to_convert_is_an_error(model):
    with pytest.raises(TypeError, match=r"no Linear layers that can be converted to FP4 \(found [01], [01] skipped\)"):
        convert_to_fp4(model, RTN)


def test_everything_kept_is_a_warning():
    with pytest.warns(
        UserWarning, match=r"No Linear layer runs in FP4: all 13 are kept in high precision \(filter_fn\)"
    ):
        convert_to_fp4(TinyModel(), RTN, filter_fn=lambda *_: False)
    with pytest.warns(UserWarning, match=r"all 13 are kept.*last 2 of 2 blocks"):
        convert_to_fp4(TinyModel(), RTN, last_blocks=99)
    with pytest.warns(UserWarning, match=r"last 4 of 4 blocks.*\)\. Give a smaller `first_blocks` or `last_blocks`"):
        convert_to_fp4(TinyModel(blocks=4), last_blocks=4)


def test_an_ordinary_conversion_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert_to_fp4(TinyModel(), ALL)


def test_one_info_line(caplog):
    with caplog.at_level(logging.INFO, logger="lightning_fp4"):
        convert_to_fp4(TinyModel(blocks=4), "nvfp4")
    (line,) = caplog.messages
    assert line.startswith("nvfp4: converted 18 Linear layers to FP4 (")
    assert "kept 7 in high precision" in line
    assert (
        "layers.3.self_attn.q_proj, layers.3.self_attn.k_proj, layers.3.self_attn.v_proj and 3 more (last 1 of 4"
        in line
    )
    assert "lm_head (weight tied to embed_tokens)" in line
    assert line.endswith("Transformer blocks: layers (4 x Block)")


def test_report_is_plain_data():
    model = TinyModel(blocks=4)
    report = plan_conversion(model, "nvfp4")
    assert not fp4_layers(model)
    data = report.as_dict()
    per_block, head = 4 * 32 * 32 + 2 * 32 * 64, 32 * 48
    assert data["flops_share"] == 3 * per_block / (4 * per_block + head)
    assert data["recipe"] == "nvfp4"
    assert data["converted"][0] == {
        "name": "layers.0.self_attn.q_proj",
        "shape": (32, 32),
        "recipe": "nvfp4",
        "gemm_paths": {},
        "ran": False,
    }
    assert {"name": "lm_head", "shape": (48, 32), "reason": "weight tied to embed_tokens"} in data["kept"]
    assert data["block_stacks"] == [{"name": "layers", "length": 4, "block": "Block"}]
    assert data["gemm_paths"] == {}
    assert pickle.loads(pickle.dumps(data)) == data


def test_shapes_of_flat_weights():
    """FSDP1 keeps shards between steps, and a second fit plans again."""
    conv1d = type("Conv1D", (nn.Module,), {"__module__": "transformers.pytorch_utils"})()
    conv1d.nf, conv1d.nx, conv1d.weight = 48, 16, nn.Parameter(torch.zeros(0))
    model = nn.Sequential(convert_to_fp4(nn.Linear(16, 32)), conv1d)
    model[0].weight = nn.Parameter(torch.zeros(256))
    report = plan_conversion(model)
    assert [choice.shape for choice in report.choices] == [(32, 16), (48, 16)]
    assert [choice.size for choice in report.choices] == [512, 768]


def test_report_says_what_really_ran():
    model = convert_to_fp4(TinyModel(), ALL)
    report = plan_conversion(model, ALL)
    model(torch.randint(0, 48, (2, 5))).sum().backward()
    data = report.as_dict()
    assert data["gemm_paths"] == {"fprop:fp32": 12, "dgrad:fp32": 12, "wgrad:fp32": 12}
    assert all(layer["ran"] for layer in data["converted"])


# ---- recipes on layers -----------------------------------------------------------------------------------------------


def test_set_recipe_switches_and_returns_what_was():
    """T25: whole layers to high precision and back; parameters and random states stay."""
    model = convert_to_fp4(Block(32), "nvfp4")
    plain = Block(32)
    plain.load_state_dict(model.state_dict())
    x = torch.randn(2, 5, 32)
    parameters = list(model.parameters())
    before = set_recipe(model, "high_precision")
    assert {r.name for r in before.values()} == {"nvfp4"}
    torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-5)  # order of float32 sums
    set_recipe(model, before[next(iter(before))])
    assert relative_error(model(x), plain(x)) > 0.02
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    chosen = set_recipe(model, "mxfp4", filter_fn=lambda _, name: name.startswith("mlp"))
    assert set(chosen) == {"mlp.up_proj", "mlp.down_proj"}
    assert {m.fp4_recipe.name for m in fp4_layers(model).values()} == {"nvfp4", "mxfp4"}


def test_forward_only_high_precision():
    layer = convert_to_fp4(nn.Linear(64, 64, bias=False), RTN)
    set_recipe(layer, dataclasses.replace(RTN, fprop=None))
    x, grad = torch.randn(64, 64), torch.randn(64, 64)
    actual, w = run(layer, x, grad), layer.weight.detach()
    assert relative_error(actual["y"], x @ w.T) < 1e-6
    assert 0.05 < relative_error(actual["dx"], grad @ w) < 0.25


def test_use_recipe_restores_each_layer_even_after_an_error():
    model = convert_to_fp4(Block(32), "nvfp4")
    set_recipe(model, "mxfp4", filter_fn=lambda _, name: name.startswith("mlp"))
    before = {n: m.fp4_recipe for n, m in fp4_layers(model).items()}
    inside = set()

    def fail():
        with use_recipe(model, "high_precision"):
            inside.update(m.fp4_recipe.name for m in fp4_layers(model).values())
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert inside == {"high_precision"}
    assert {n: m.fp4_recipe for n, m in fp4_layers(model).items()} == before


def test_use_recipe_survives_conversion_inside():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    convert_to_fp4(model, RTN, ignore_modules=["1"])
    with use_recipe(model, "high_precision"):
        convert_to_fp4(model, "mxfp4")
    assert [m.fp4_recipe.name for m in model] == ["nvfp4", "mxfp4"]


# ---- seeds -----------------------------------------------------------------------------------------------------------


def _states(**kwargs):
    return [tuple(m.fp4_rng_state.tolist()) for m in fp4_layers(convert_to_fp4(TinyModel(), ALL, **kwargs)).values()]


def test_seeds(monkeypatch):
    assert len(set(_states(seed=1))) == 12
    assert _states(seed=1) == _states(seed=1)
    assert not set(_states(seed=1)) & set(_states(seed=2))
    torch.manual_seed(7)
    default = _states()
    assert default == _states(seed=7)
    monkeypatch.setattr("lightning_fp4.convert._rank", lambda: 1)
    assert not set(_states(seed=7)) & set(default)
