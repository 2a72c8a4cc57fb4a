"""What multiplies: FP8 units (as a CPU shows them) under centring and hot channels give what they should."""

import pytest
import torch

from lightning_fp4 import MXFP4, Gemm, Quantizer, backends, get_recipe, matmul, ops, reference
from lightning_fp4.linear import fp4_linear, new_rng_state
from lightning_fp4.tensor import FP4Operand, FP4Tensor
from tests.helpers import fp4_linear_layer, relative_error, run, same_bits

CHANNELS = torch.tensor([0, 1, 5, 17, 40, 63, 64, 79])
CLOSED = {"forward_scale": "closed", "gradient_scale": "closed_up"}
RECIPES = {
    "nvfp4": {},
    "averis": {},
    "averis-fp4": {"mean": "fp4"},
    "chon-single": {"mode": "single"},
    "chon-dual": {"mode": "dual"},
    "chon-high_precision": {"mode": "high_precision"},
    "chon-averis": {"averis": True},
}


def _recipe(name, **options):
    plain = {"post_qk_protection": False} if name.startswith("chon") else {}
    return get_recipe(name.split("-")[0], last_blocks=0, **plain, **RECIPES[name], **options)


def _run(recipe, dtype=torch.float32, tokens=33):
    """Output and gradients of one layer whose inputs have a mean and hot channels."""
    torch.manual_seed(0)
    layer = fp4_linear_layer(80, 48, recipe, dtype=dtype)
    if recipe.fprop.hot_channels is not None:
        layer.fp4_hot_channels = CHANNELS
    x = torch.randn(tokens, 80) + torch.randn(80)
    x[:, CHANNELS] *= 5
    return run(layer, x.to(dtype), (torch.randn(tokens, 48) + torch.randn(48)).to(dtype)), layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
def test_closed_scales_give_the_same_bits_on_fp8_units(name, dtype):
    fp8, layer = _run(_recipe(name, units="fp8", **CLOSED), dtype)
    plain, _ = _run(_recipe(name, **CLOSED), dtype)
    for key, value in plain.items():
        assert same_bits(fp8[key], value), key
    assert set(layer.fp4_gemm_paths.values()) == {"fp8 emulated"}


@pytest.mark.parametrize("name", RECIPES)
def test_other_scales_cost_one_rounding_on_fp8_units(name):
    fp8, layer = _run(_recipe(name, units="fp8", stochastic_rounding=False))
    plain, _ = _run(_recipe(name, stochastic_rounding=False))
    for key in ("y", "dx", "dw"):
        assert 1e-4 < relative_error(fp8[key], plain[key]) < 0.04, key
    assert set(layer.fp4_gemm_paths.values()) == {"fp8 emulated (one extra rounding)"}


@pytest.mark.parametrize("mode", ["single", "dual", "high_precision"])
def test_without_channels_patching_recipes_use_the_units_too(mode):
    x, w = torch.randn(33, 80), torch.randn(48, 80)
    plain = fp4_linear(x, w, None, _recipe("nvfp4", units="fp8", weight_2d=False), new_rng_state(0, 0, "layer"))
    for channels in (None, torch.zeros(0, dtype=torch.int64)):
        recipe = get_recipe("chon", mode=mode, forward_scale="rne", units="fp8")
        assert same_bits(fp4_linear(x, w, None, recipe, new_rng_state(0, 0, "layer"), channels), plain)


def test_one_fp8_gemm_with_patches_is_two():
    x, w = torch.randn(33, 80), torch.randn(48, 80)
    single, dual = (
        fp4_linear(x, w, None, _recipe(f"chon-{mode}", units="fp8"), new_rng_state(0, 0, "layer"), CHANNELS)
        for mode in ("single", "dual")
    )
    # Only the order of float32 sums differs.
    torch.testing.assert_close(single, dual, rtol=1e-5, atol=1e-4)


def test_a_mean_in_four_bits_meets_the_exact_weight():
    """Not the weight that FP8 units round once more."""
    torch.manual_seed(0)
    x, w = torch.randn(33, 80) + 5, torch.randn(48, 80)
    recipe = _recipe("averis-fp4", units="fp8")
    out = fp4_linear(x, w, None, recipe, new_rng_state(0, 0, "layer"))
    mean = ops.token_mean(x)
    rest = ops.subtract_mean(x, mean)
    left, right = recipe.fprop.lhs, recipe.fprop.rhs
    mean = reference.dequantize(reference.quantize(mean, left))
    weight = reference.quantize(w, right)
    a, b = reference.operand(reference.quantize(rest, left), "fp8"), reference.operand(weight, "fp8")
    expected = reference.multiply(a, b) + mean @ reference.dequantize(weight).T
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)  # order of float32 sums
    assert relative_error(mean @ reference.dequantize(weight).T, mean @ (b.values.float() * b.factor).T) > 1e-3


@pytest.mark.parametrize("name", RECIPES)
def test_what_stays_packed(name, monkeypatch):
    """Decoded at once unless a patch of its own or a mean in four bits has to read the codes; backward's kept ones."""
    forms = []
    original = ops.gemm

    def gemm(lhs, rhs, *args, **kwargs):
        forms.append((type(lhs), type(rhs)))
        return original(lhs, rhs, *args, **kwargs)

    monkeypatch.setattr(ops, "gemm", gemm)
    _run(_recipe(name))
    packed = name in ("chon-dual", "chon-high_precision", "averis-fp4")
    forward = (FP4Tensor, FP4Tensor) if packed else (FP4Operand, FP4Operand)
    assert forms[:-2] == [forward] * (2 if name == "chon-dual" else 1)
    assert forms[-2:] == [(FP4Operand, FP4Tensor)] * 2  # dgrad and wgrad


@pytest.mark.parametrize("name", ["nvfp4", "averis"])
def test_gradients_come_from_one_read(name, monkeypatch):
    calls = []
    original = ops.quantize_both
    monkeypatch.setattr(ops, "quantize_both", lambda *a, **k: calls.append(a[0].shape) or original(*a, **k))
    monkeypatch.setattr(ops, "quantize", lambda *a, **k: pytest.fail("a form was quantised alone"))
    _run(_recipe(name))
    assert calls == [(33, 80), (48, 80), (33, 48)]  # input, weight, output gradient


def test_fp8_units_need_one_scale_per_tensor():
    mxfp4 = Quantizer(format=MXFP4, scale_rule="unbiased")
    with pytest.raises(ValueError, match="one scale per tensor"):
        matmul.units_of(Gemm(lhs=mxfp4, rhs=mxfp4, units="fp8"), torch.device("cpu"))
    with pytest.raises(ValueError, match="'auto', 'exact', 'bf16', 'fp8', 'fp4'"):
        Gemm(units="int8")


def test_closed_rules_take_fp8_units_where_there_are_some(monkeypatch):
    closed, plain, cuda = Quantizer(scale_rule="closed"), Quantizer(), torch.device("cuda")
    mxfp4, path = Quantizer(format=MXFP4, scale_rule="unbiased"), backends.gemm_path
    for capability, units in (((8, 0), "bf16"), ((8, 9), "fp8"), ((9, 0), "fp8")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert path(cuda, closed, closed) == path(cuda, closed, closed, "exact") == units
        assert path(cuda, closed, closed, "bf16") == path(cuda, closed, plain) == "bf16"
        assert path(cuda, plain, plain, "auto") == path(cuda, closed, closed, "auto") == units
        assert path(cuda, mxfp4, mxfp4, "auto") == path(cuda, plain, None, "auto") == "bf16"
        if units == "fp8":
            assert path(cuda, plain, plain, "fp8") == "fp8"
        else:
            with pytest.raises(ValueError, match="no FP8 units"):
                path(cuda, closed, closed, "fp8")


def test_named_recipes_take_the_fast_units_and_parts_the_exact_ones(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    cuda = torch.device("cuda")
    for name in ("nvfp4", "four_over_six", "averis", "chon"):
        for gemm in ("fprop", "dgrad", "wgrad"):
            assert matmul.describe(getattr(get_recipe(name), gemm), cuda) == "fp8 (one extra rounding)"
            assert matmul.describe(getattr(get_recipe(name, units="exact"), gemm), cuda) == "bf16"
    assert matmul.describe(get_recipe("nvfp4", **CLOSED).fprop, cuda) == "fp8"
    assert matmul.describe(get_recipe("mxfp4").fprop, cuda) == "bf16"
    assert matmul.describe(Gemm(lhs=Quantizer(), rhs=Quantizer()), cuda) == "bf16"


def test_e4m3_operands_saturate():
    """An infinite value has scale 448, four over six expects 384 at most; PyTorch 2.11's cast would make it NaN."""
    x = torch.randn(2, 32)
    x[0, 3] = float("inf")
    values = reference.operand(reference.quantize(x, Quantizer(scale_rule="four_over_six")), "fp8").values.float()
    assert values[0, 3] == 448
    assert values.isfinite().all()
