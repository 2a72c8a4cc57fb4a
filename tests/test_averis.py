"""Mean centring: exact algebra, one token, no tokens, and what it is good for."""

import dataclasses

import pytest
import torch

from lightning_fp4 import Centering, Gemm, Quantizer, Recipe, get_recipe, matmul, ops, reference
from lightning_fp4.linear import fp4_linear, new_rng_state
from lightning_fp4.tensor import FP4Tensor
from tests.helpers import fp4_linear_layer, relative_error, run, same_bits


def averis(**options):
    return get_recipe("averis", stochastic_rounding=False, last_blocks=0, **options)


@pytest.fixture
def identity_quantizer(monkeypatch):
    """Quantising changes no value, so what is left of the product is the algebra around it."""

    def quantize(x, quantizer, *, hadamard=None, transposed=False, mean=None, **_):
        x = x if mean is None else ops.subtract_mean(x, mean)
        matrix = x.T if transposed else x
        return reference.rotate(matrix, hadamard) if hadamard else matrix

    def quantize_both(x, rows, columns, *, hadamard=None, mean=None, **_):
        x = x if mean is None else ops.subtract_mean(x, mean)
        return x, quantize(x, columns, hadamard=hadamard, transposed=True)

    monkeypatch.setattr(ops, "quantize", quantize)
    monkeypatch.setattr(ops, "quantize_both", quantize_both, raising=False)
    monkeypatch.setattr(ops, "dequantize", lambda x, dtype=torch.float32: x.to(dtype))


@pytest.mark.parametrize("tokens", [1, 16, 37])
@pytest.mark.parametrize("bias", [True, False])
def test_with_an_identity_quantiser_it_is_a_linear_layer(identity_quantizer, tokens, bias):
    torch.manual_seed(0)
    x = (torch.randn(tokens, 40) + 3 * torch.randn(40)).requires_grad_()
    w = torch.randn(24, 40, requires_grad=True)
    b = torch.randn(24, requires_grad=True) if bias else None
    grad = torch.randn(tokens, 24) + torch.randn(24)
    leaves = [t for t in (x, w, b) if t is not None]
    recipe = averis(hadamard=False, weight_2d=False)
    out = fp4_linear(x, w, b, recipe, new_rng_state(0, 0, "layer"))
    expected = torch.nn.functional.linear(x, w, b)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)
    for found, wanted in zip(
        torch.autograd.grad(out, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=3e-4)


def test_the_product_is_mean_times_weight_plus_rest_in_four_bits():
    torch.manual_seed(0)
    x, w = torch.randn(33, 48) + 5, torch.randn(16, 48)
    out = fp4_linear(x, w, None, averis(), new_rng_state(0, 0, "layer"))
    recipe = averis()
    mean = x.mean(0)
    rest = reference.dequantize(reference.quantize(x - mean, dataclasses.replace(recipe.fprop.lhs, center=None)))
    expected = rest @ reference.dequantize(reference.quantize(w, recipe.fprop.rhs)).T + mean @ w.T
    assert relative_error(out, expected) < 1e-3  # a mean summed in another order may move a code


def test_one_token_is_exact_in_every_product():
    torch.manual_seed(0)
    layer = fp4_linear_layer(40, 24, averis())
    x, grad = torch.randn(1, 40), torch.randn(1, 24)
    found = run(layer, x, grad)
    torch.testing.assert_close(found["y"], x @ layer.weight.T + layer.bias, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found["dx"], grad @ layer.weight, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found["dw"], grad.T @ x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mean", ["exact", "fp4"])
@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens_give_finite_results_of_the_right_shape(mean, tokens):
    layer = fp4_linear_layer(40, 24, averis(mean=mean))
    found = run(layer, torch.randn(tokens, 40), torch.randn(tokens, 24))
    assert found["y"].shape == (tokens, 24)
    assert all(value.isfinite().all() for value in found.values())
    if tokens == 0:
        assert not found["dw"].any()


@pytest.mark.parametrize("weight_2d", [True, False])
def test_it_beats_nvfp4_where_the_mean_dominates(weight_2d):
    """Output, input gradient and weight gradient; the paper's FP4 means lose the weight gradient, ours do not."""
    torch.manual_seed(0)
    x, grad = torch.randn(256, 128) + 4 * torch.randn(128), torch.randn(256, 64) + 4 * torch.randn(64)
    errors = {}
    for name, recipe in {
        "nvfp4": get_recipe("nvfp4", stochastic_rounding=False, weight_2d=weight_2d),
        "exact": averis(weight_2d=weight_2d),
        "fp4": averis(weight_2d=weight_2d, mean="fp4"),
    }.items():
        layer = fp4_linear_layer(128, 64, recipe, bias=False)
        found = run(layer, x, grad)
        exact = {"y": x @ layer.weight.T, "dx": grad @ layer.weight, "dw": grad.T @ x}
        errors[name] = {key: relative_error(found[key], value) for key, value in exact.items()}
    for key in ("y", "dx"):
        assert errors["exact"][key] < 0.5 * errors["nvfp4"][key]
    assert errors["exact"]["dw"] < 0.5 * errors["nvfp4"]["dw"] < errors["fp4"]["dw"]


def test_bfloat16_under_autocast():
    torch.manual_seed(0)
    layer = fp4_linear_layer(128, 64, averis())
    x = torch.randn(64, 128) + 3
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype is torch.bfloat16
    assert relative_error(out, layer(x)) < 0.02
    out.float().sum().backward()
    assert layer.weight.grad.dtype is torch.float32


def test_stochastic_gradients_draw_for_each_backward():
    layer = fp4_linear_layer(64, 32, get_recipe("averis", last_blocks=0))
    x, grad = torch.randn(64, 64), torch.randn(64, 32)
    first, second = run(layer, x, grad), run(layer, x, grad)
    assert same_bits(first["y"], second["y"])
    assert not same_bits(first["dw"], second["dw"])


def test_input_is_centred_once_for_both_of_its_forms(monkeypatch):
    calls = []
    original = ops.token_mean
    monkeypatch.setattr(ops, "token_mean", lambda x: calls.append(1) or original(x))
    layer = fp4_linear_layer(64, 32, averis())
    layer(torch.randn(16, 64, requires_grad=True))
    assert len(calls) == 1


def test_a_frozen_weight_still_gets_the_input_gradient():
    layer = fp4_linear_layer(64, 32, averis())
    layer.weight.requires_grad_(False)
    x = torch.randn(16, 64, requires_grad=True)
    grad = torch.randn(16, 32) + 2
    layer(x).backward(grad)
    assert relative_error(x.grad, grad @ layer.weight) < 0.2


def test_centering_can_be_added_to_any_recipe_and_taken_away():
    for base in ("nvfp4", "chon", "mxfp4", "four_over_six"):
        recipe = get_recipe(base)
        centered = recipe.with_centering(Centering())
        assert centered.fprop.lhs.center == centered.wgrad.rhs.center == Centering()
        assert centered.fprop.rhs.center is None
        assert centered.with_centering(None) == recipe
    assert get_recipe("chon", averis=True) == get_recipe("chon").with_centering(Centering())


def test_wrong_places_are_refused():
    center = Quantizer(center=Centering())
    with pytest.raises(ValueError, match="weight, which has no"):
        Recipe(name="r", fprop=Gemm(lhs=center, rhs=center))
    with pytest.raises(ValueError, match="differently"):
        Recipe(name="r", wgrad=Gemm(lhs=center, rhs=Quantizer()))
    with pytest.raises(ValueError, match="'exact' or 'fp4'"):
        Centering(mean="bf16")


def test_means_of_the_reference():
    x = torch.randn(10, 6) + 2
    mean = reference.token_mean(x)
    rest = reference.subtract_mean(x, mean)
    assert mean.shape == (1, 6)
    torch.testing.assert_close(mean[0], x.mean(0))
    torch.testing.assert_close(rest + mean, x)
    none = x[:0].bfloat16()
    mean = reference.token_mean(none)
    rest = reference.subtract_mean(none, mean)
    assert rest.shape == (0, 6)
    assert rest.dtype is torch.bfloat16
    assert not mean.any()
    assert isinstance(matmul.quantize_rows(x, matmul.Operand.lhs(averis().fprop, 0)).matrix, FP4Tensor)


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 16, 37])
def test_means_sum_neighbours_first(tokens):
    """In float32, and in this order on every device: an order of another device would move codes."""
    x = torch.randn(tokens, 5) * torch.randn(tokens, 1).exp() ** 4
    rows = [row.tolist() for row in x]
    for i in range(5):
        sums = [torch.tensor(row[i]) for row in rows]
        while len(sums) > 1:
            sums = [sums[j] + sums[j + 1] if j + 1 < len(sums) else sums[j] for j in range(0, len(sums), 2)]
        assert reference.token_mean(x)[0, i] == sums[0] / torch.tensor(float(tokens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantising_with_a_mean_is_quantising_the_rest(dtype, device):
    x = (torch.randn(33, 48, device=device) + 3).to(dtype)
    mean = ops.token_mean(x)
    rest, quantizer, seed = ops.subtract_mean(x, mean), Quantizer(rounding="stochastic"), torch.tensor([1, 2])
    options = {"seed": seed.to(device), "hadamard": 16}
    for transposed in (False, True):
        alone = ops.quantize(x, quantizer, transposed=transposed, mean=mean, **options)
        expected = ops.quantize(rest, quantizer, transposed=transposed, **options)
        assert torch.equal(alone.codes, expected.codes)
        assert torch.equal(alone.amax, expected.amax)
    both = ops.quantize_both(x, quantizer, quantizer, mean=mean, **options)
    for form, expected in zip(both, ops.quantize_both(rest, quantizer, quantizer, **options), strict=True):
        assert torch.equal(form.codes, expected.codes)
        assert same_bits(ops.dequantize(form), ops.dequantize(expected))
