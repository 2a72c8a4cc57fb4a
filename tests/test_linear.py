"""The linear layer: its three GEMMs against expected bits and oracles, in every shape, stride and dtype."""

import copy
import dataclasses
import pickle

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from lightning_fp4 import (
    NVFP4,
    FP4Linear,
    Quantizer,
    backends,
    convert_to_fp4,
    get_recipe,
    list_recipes,
    ops,
    reference,
)
from lightning_fp4.linear import fp4_class, new_rng_state, original_class
from tests.helpers import (
    RTN,
    Block,
    assert_same_codes,
    assert_same_run,
    exact_units,
    fp4_linear_layer,
    golden_cases,
    needs_two_gpus,
    relative_error,
    run,
    same_bits,
    stochastic,
    unpack,
    without_blocks,
)

SR = get_recipe("nvfp4", units="exact")
MX = get_recipe("mxfp4", stochastic_rounding=False)
RECIPES = [get_recipe(name) for name in list_recipes()]


# ---- expected bits ---------------------------------------------------------------------------------------------------


def _golden_layer(case, recipe, device):
    layer = nn.Linear(64, 128, bias=False, device=device, dtype=torch.bfloat16)
    layer.weight.data = case["w"].to(device)
    return convert_to_fp4(layer, recipe)


def _assert_golden_run(case, recipe, device):
    layer = _golden_layer(case, recipe, device)
    actual = run(layer, case["x"].to(device), case["dy"].to(device))
    for name in ("y", "dx", "dw"):
        ours, theirs = actual[name].cpu().float(), case[name].float()
        # Codes and scales are equal to the bit; float32 sums of at most 128 terms may differ in their order, which
        # moves a few results over a BF16 rounding boundary: one BF16 ulp.
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=float(theirs.abs().max()) * 2**-20)
        assert float((ours != theirs).float().mean()) < 0.02


@pytest.mark.parametrize("key", golden_cases("linear_rtn"))
def test_golden_nearest(key, device):
    case = golden_cases("linear_rtn")[key]
    recipe = get_recipe("nvfp4", stochastic_rounding=False, gradient_scale="rne", units="exact")
    quantizers = {
        "x_row": (case["x"], recipe.fprop.lhs, None),
        "x_col": (case["x"].T, recipe.wgrad.rhs, 16),
        "w_row": (case["w"], recipe.fprop.rhs, None),
        "w_col": (case["w"].T, recipe.dgrad.rhs, None),
        "g_row": (case["dy"], recipe.dgrad.lhs, None),
        "g_col": (case["dy"].T, recipe.wgrad.lhs, 16),
    }
    for name, (x, quantizer, hadamard) in quantizers.items():
        quantized = ops.quantize(x.to(device), quantizer, hadamard=hadamard)
        assert_same_codes(unpack(quantized.codes), unpack(case[f"{name}_data"]))
        scales = quantized.scales.view(torch.uint8).cpu().repeat_interleave(quantizer.format.block[0], 0)
        assert same_bits(scales, case[f"{name}_scale"])
        assert same_bits(quantized.amax.flatten().cpu(), case[f"{name}_amax"])
    _assert_golden_run(case, recipe, device)


@pytest.mark.parametrize("key", golden_cases("linear_sr"))
def test_golden_stochastic_with_given_bytes(key, device, monkeypatch):
    case = golden_cases("linear_sr")[key]
    recipe = get_recipe("nvfp4", gradient_scale="rne", units="exact")
    given = {"dgrad": case["dy_row_rbits8"], "wgrad": case["dy_col_rbits8"]}
    drawn = []

    def bytes_from_the_case(rows, columns, seed, stream):
        bits = given["dgrad" if (rows, columns) == (64, 128) else "wgrad"]
        assert bits.shape == (rows, columns)
        drawn.append(stream)
        return bits.to(seed.device)

    monkeypatch.setattr(reference, "random_bytes", bytes_from_the_case)
    monkeypatch.setattr(backends, "_kernels_enabled", False)  # which draw their own
    seed = torch.tensor([1, 0], device=device)
    rows = ops.quantize(case["dy"].to(device), recipe.dgrad.lhs, seed=seed)
    columns = ops.quantize(case["dy"].to(device), recipe.wgrad.lhs, seed=seed, hadamard=16, transposed=True)
    assert_same_codes(unpack(rows.codes), unpack(case["g_row_data"]))
    assert_same_codes(unpack(columns.codes), unpack(case["g_col_data"]))
    _assert_golden_run(case, recipe, device)
    assert len(drawn) == 4
    assert drawn[2] != drawn[3]  # the two operands of one backward use different streams


# ---- the right amount of error (T28) ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list_recipes())
def test_error_of_every_recipe(name, dtype, device):
    """0 would mean that FP4 is off, 1 that the result is zero."""
    recipe = get_recipe(name)
    x, grad = torch.randn(128, 128, device=device, dtype=dtype), torch.randn(128, 64, device=device, dtype=dtype)
    layer = fp4_linear_layer(128, 64, recipe, device=device, dtype=dtype, bias=False)
    actual = run(layer, x, grad)
    w = layer.weight.detach().double()
    expected = {"y": x.double() @ w.T, "dx": grad.double() @ w, "dw": grad.double().T @ x.double()}
    for gemm, result in (("fprop", "y"), ("dgrad", "dx"), ("wgrad", "dw")):
        error = relative_error(actual[result], expected[result])
        side = getattr(recipe, gemm)
        if side is None or not (side.lhs or side.rhs):
            assert error < 4 * torch.finfo(dtype).eps, result
        else:
            assert 0.05 < error < 0.25, result


@pytest.mark.parametrize("name", list_recipes())
def test_sixteen_codes_a_block_in_every_recipe(name):
    recipe = get_recipe(name)
    gemms = [g for g in (recipe.fprop, recipe.dgrad, recipe.wgrad) if g]
    for quantizer in {q for g in gemms for q in (g.lhs, g.rhs) if q}:
        decoded = ops.dequantize(ops.quantize(torch.randn(32, 64), quantizer, seed=torch.tensor([1, 0])))
        counts = [len(b.unique()) for b in decoded.reshape(-1, quantizer.format.block[1])]
        assert 2 < max(counts) <= 16


def test_gradients_are_the_products_of_the_quantised_operands(device):
    """Forward and both gradients against float64 products of separately quantised operands."""
    x, grad = torch.randn(33, 40, device=device), torch.randn(33, 24, device=device)
    layer = fp4_linear_layer(40, 24, RTN, device=device)
    actual = run(layer, x, grad)

    def decoded(matrix, quantizer, hadamard=None):
        matrix = reference.rotate(matrix, hadamard) if hadamard else matrix
        return reference.dequantize(reference.quantize(matrix, quantizer)).double()

    w = layer.weight.detach()
    expected = {
        "y": decoded(x, RTN.fprop.lhs) @ decoded(w, RTN.fprop.rhs).T + layer.bias.detach().double(),
        "dx": decoded(grad, RTN.dgrad.lhs) @ decoded(w.T, RTN.dgrad.rhs).T,
        "dw": decoded(grad.T, RTN.wgrad.lhs, 16) @ decoded(x.T, RTN.wgrad.rhs, 16).T,
        "db": grad.double().sum(0),
    }
    for name, value in expected.items():
        torch.testing.assert_close(actual[name].double(), value, rtol=1e-5, atol=2e-5)  # float32 sums of 48 terms


# ---- T02, T03, T07: sizes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [RTN, MX], ids=lambda r: r.name)
@pytest.mark.parametrize("tokens", [0, 1, 7, 15, 16, 17, 31, 33, 100, 127, 129])
def test_any_token_count(tokens, recipe, device):
    """Equal to the same call with rows of zeros appended by hand."""
    layer = fp4_linear_layer(64, 32, recipe, device=device)
    x, grad = torch.randn(tokens, 64, device=device), torch.randn(tokens, 32, device=device)
    pad = -tokens % 32 or 32
    padded = run(layer, *(torch.nn.functional.pad(t, (0, 0, 0, pad)) for t in (x, grad)))
    actual = run(layer, x, grad)
    # Appended zeros change neither codes nor scales (test_quantize.py), only perhaps the order of the float32 sums.
    for name, expected in {"y": padded["y"][:tokens], "dx": padded["dx"][:tokens], "dw": padded["dw"]}.items():
        scale = float(padded[name].abs().max())
        torch.testing.assert_close(actual[name], expected, rtol=0, atol=scale * 2**-20)
    torch.testing.assert_close(actual["db"], grad.sum(0), rtol=1e-5, atol=1e-4)
    if tokens > 100:
        assert relative_error(actual["dw"], grad.T @ x) < 0.25


SIZES = [1, 8, 24, 172, 192, 576, 1000]


@pytest.mark.parametrize("recipe", [RTN, MX], ids=lambda r: r.name)
@pytest.mark.parametrize(
    ("in_features", "out_features"), [*((n, 24) for n in SIZES), *((24, n) for n in SIZES), (16, 50257), (172, 64)]
)
def test_any_feature_count(in_features, out_features, recipe, device):
    layer = fp4_linear_layer(in_features, out_features, recipe, device=device, bias=False)
    x, grad = torch.randn(20, in_features, device=device), torch.randn(20, out_features, device=device)
    actual = run(layer, x, grad)
    w = layer.weight.detach()
    for name, expected in {"y": x @ w.T, "dx": grad @ w, "dw": grad.T @ x}.items():
        assert actual[name].shape == expected.shape
        assert relative_error(actual[name], expected) < 0.25


def test_zero_padding_of_features_is_exact(device):
    """A layer of 40 x 24 equals the corner of one padded with zero weights to 48 x 32."""
    small, big = fp4_linear_layer(40, 24, device=device), fp4_linear_layer(48, 32, device=device)
    with torch.no_grad():
        big.weight.zero_()[:24, :40] = small.weight
        big.bias.zero_()[:24] = small.bias
    x, grad = torch.randn(32, 40, device=device), torch.randn(32, 24, device=device)
    actual, padded = run(small, x, grad), run(big, *(torch.nn.functional.pad(t, (0, 8)) for t in (x, grad)))
    corner = {"y": padded["y"][:, :24], "dx": padded["dx"][:, :40], "dw": padded["dw"][:24, :40]}
    for name, value in corner.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-6, atol=1e-5)  # order of float32 sums


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (0, 3, 64)])
def test_zero_tokens(shape, device):
    layer = fp4_linear_layer(64, 32, SR, device=device)
    actual = run(layer, torch.randn(shape, device=device))
    assert actual["y"].shape == (*shape[:-1], 32)
    assert actual["dx"].shape == shape
    assert torch.equal(actual["dw"], torch.zeros(32, 64, device=device))
    assert torch.equal(actual["db"], torch.zeros(32, device=device))


def test_zero_features_compute_like_nn_linear(device):
    x = torch.randn(3, 5, 0, device=device)
    layer = fp4_linear_layer(0, 8, device=device)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    assert run(layer, x)["dw"].shape == (8, 0)
    layer = fp4_linear_layer(8, 0, device=device)
    assert run(layer, torch.randn(3, 8, device=device))["dx"].tolist() == torch.zeros(3, 8).tolist()


# ---- T04: shapes and strides -----------------------------------------------------------------------------------------


def test_any_leading_shape(device):
    layer = fp4_linear_layer(64, 32, device=device)
    x, grad = torch.randn(24, 64, device=device), torch.randn(24, 32, device=device)
    expected = run(layer, x, grad)
    for lead in ((3, 8), (2, 3, 4), (1, 24), (24, 1, 1)):
        actual = run(layer, x.reshape(*lead, 64), grad.reshape(*lead, 32))
        assert actual["y"].shape == (*lead, 32)
        flat = {"y": actual["y"].reshape(24, 32), "dx": actual["dx"].reshape(24, 64)}
        assert_same_run({**actual, **flat}, expected)


@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (0, 4)])
def test_output_is_no_view_and_takes_in_place_operations(lead, device):
    layer = fp4_linear_layer(64, 32, device=device)
    x = torch.randn(*lead, 64, device=device)
    y = layer(x)
    assert not y._is_view()
    layer.zero_grad()
    y.relu_().sum().backward()
    in_place = layer.weight.grad.clone()
    layer.zero_grad()
    layer(x).relu().sum().backward()
    assert same_bits(in_place, layer.weight.grad)


def test_one_dimensional_input(device):
    layer = fp4_linear_layer(64, 32, device=device)
    x, grad = torch.randn(64, device=device), torch.randn(32, device=device)
    actual, expected = run(layer, x, grad), run(layer, x[None], grad[None])
    assert actual["y"].shape == (32,)
    assert_same_run(actual, {**expected, "y": expected["y"][0], "dx": expected["dx"][0]})


def _strided(kind, x):
    return {
        "transposed": lambda: x.T.contiguous().T,
        "every other": lambda: torch.stack((x, x), -1)[..., 0],
        "offset": lambda: torch.nn.functional.pad(x, (3, 5, 1, 1))[1:-1, 3:-5],
        "channels last": lambda: x.reshape(2, 4, 4, -1).contiguous(memory_format=torch.channels_last).reshape(x.shape),
    }[kind]()


@pytest.mark.parametrize("kind", ["transposed", "every other", "offset", "channels last"])
def test_strides_of_input_gradient_and_weight(kind, device):
    layer = fp4_linear_layer(64, 32, device=device)
    x, grad = torch.randn(32, 64, device=device), torch.randn(32, 32, device=device)
    expected = run(layer, x, grad)
    view = _strided(kind, x).requires_grad_()
    layer.zero_grad()
    y = layer(view)
    y.backward(_strided(kind, grad))
    assert_same_run({"y": y, "dx": view.grad, "dw": layer.weight.grad, "db": layer.bias.grad}, expected)
    layer.weight.data = layer.weight.data.T.contiguous().T
    assert_same_run(run(layer, x, grad), expected)


def test_expanded_gradient_of_sum_and_expanded_input(device):
    layer = fp4_linear_layer(64, 32, device=device)
    x = torch.randn(17, 64, device=device, requires_grad=True)
    layer(x).sum().backward()  # its gradient has strides (0, 0)
    expected = run(layer, x, torch.ones(17, 32, device=device))
    layer.zero_grad()
    x.grad = None
    layer(x).sum().backward()
    assert same_bits(x.grad, expected["dx"])
    assert same_bits(layer.weight.grad, expected["dw"])
    row = torch.randn(1, 64, device=device)
    assert same_bits(layer(row.expand(17, 64)), layer(row.repeat(17, 1)))


def test_transposed_output_in_the_loss(device):
    layer = fp4_linear_layer(64, 32, device=device)
    x, grad = torch.randn(2, 9, 64, device=device), torch.randn(9, 64, device=device)
    a, b = (x.clone().requires_grad_() for _ in range(2))
    layer(a).transpose(0, 1).reshape(9, 64).backward(grad)
    layer(b).backward(grad.reshape(9, 2, 32).transpose(0, 1).contiguous())
    assert same_bits(a.grad, b.grad)


# ---- T12, T14, T15: values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [RTN, MX, SR], ids=["nvfp4 RTN", "mxfp4 RTN", "nvfp4 SR"])
@pytest.mark.parametrize("zero", ["x", "w", "g", "row", "block"])
def test_zeros(zero, recipe, device):
    layer = fp4_linear_layer(64, 32, recipe, device=device)
    x, grad = torch.randn(32, 64, device=device), torch.randn(32, 32, device=device)
    with torch.no_grad():
        layer.bias.zero_()
        if zero == "w":
            layer.weight.zero_()
        target = {"x": x, "g": grad, "row": x[3], "block": x[:16, :32]}.get(zero)
        if target is not None:
            target.zero_()
    actual = run(layer, x, grad)
    assert all(value.isfinite().all() for value in actual.values())
    zeros = {"x": ("y", "dw"), "w": ("y", "dx"), "g": ("dx", "dw", "db")}.get(zero, ())
    for name, value in actual.items():
        assert bool(value.any()) is (name not in zeros), name
    if zero == "row":
        assert not actual["y"][3].any()


def test_zero_lora_b_gives_exact_zero_gradient_to_a(device):
    a, b = fp4_linear_layer(64, 16, device=device, bias=False), fp4_linear_layer(16, 32, device=device, bias=False)
    nn.init.zeros_(b.weight)
    b(a(torch.randn(8, 64, device=device))).sum().backward()
    assert not a.weight.grad.any()
    assert b.weight.grad.any()


@pytest.mark.parametrize("recipe", [RTN, MX], ids=lambda r: r.name)
@pytest.mark.parametrize(
    ("s", "t", "u"),
    [(1e-30, 1, 1), (1, 1e-30, 1), (1, 1, 1e-30), (1e-12, 1e-6, 1e-12), (1e4, 1e4, 1e-6), (1e30, 1e-6, 1)],
)
def test_error_does_not_depend_on_magnitude(s, t, u, recipe, device):
    layer = fp4_linear_layer(64, 32, recipe, device=device, bias=False)
    x, grad = torch.randn(64, 64, device=device), torch.randn(64, 32, device=device)
    base, w = run(layer, x, grad), layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight *= t
    scaled = run(layer, x * s, grad * u)
    x, w, grad = x.double(), w.double(), grad.double()
    expected = {"y": (x @ w.T, s * t), "dx": (grad @ w, u * t), "dw": (grad.T @ x, u * s)}
    for name, (value, factor) in expected.items():
        error = relative_error(scaled[name].double() / factor, value)
        # A scale that is no power of two moves values across rounding boundaries; power-of-two block scales also change
        # where in its octave a block maximum lies, which moves the error between the two ends of its range.
        assert error == pytest.approx(relative_error(base[name], value), rel=0.1 if recipe is RTN else 0.35)


@pytest.mark.parametrize("recipe", [RTN, MX, SR], ids=["nvfp4 RTN", "mxfp4 RTN", "nvfp4 SR"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_non_finite_stays_visible(bad, dtype, recipe, device):
    x, grad = torch.randn(32, 64, device=device, dtype=dtype), torch.randn(32, 32, device=device, dtype=dtype)
    layer = fp4_linear_layer(64, 32, recipe, device=device, dtype=dtype)
    spoilt = x.clone()
    spoilt[3, 5] = bad
    actual = run(layer, spoilt, grad)
    assert not actual["y"][3].isfinite().any()
    assert not actual["dw"][:, 5].isfinite().any()
    spoilt = grad.clone()
    spoilt[3, 5] = bad
    actual = run(layer, x, spoilt)
    assert not actual["dx"][3].isfinite().any()
    assert not actual["dw"][5].isfinite().any()
    assert not actual["db"][5].isfinite()
    with torch.no_grad():
        layer.weight[3, 5] = bad
    actual = run(layer, x, grad)
    assert not actual["y"][:, 3].isfinite().any()
    assert not actual["dx"][:, 5].isfinite().any()


def test_detect_anomaly_sees_nan(device):
    layer = fp4_linear_layer(64, 32, device=device)
    x = torch.randn(4, 64, device=device, requires_grad=True)
    with torch.autograd.detect_anomaly(check_nan=True), pytest.raises(RuntimeError, match="returned nan values"):
        layer(x).backward(torch.full((4, 32), float("nan"), device=device))


# ---- T13: dtypes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", [RTN, get_recipe("high_precision")], ids=lambda r: r.name)
def test_dtypes_follow_nn_linear(input_dtype, weight_dtype, autocast, recipe, device):
    plain = nn.Linear(64, 32, device=device, dtype=weight_dtype)
    layer = convert_to_fp4(copy.deepcopy(plain), recipe)

    def attempt(module):
        with torch.autocast(device.type, dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            x = torch.ones(8, 64, device=device, dtype=input_dtype, requires_grad=True)
            y = module(x)
        y.float().sum().backward()
        return [y.dtype, x.grad.dtype, module.weight.grad.dtype, module.bias.grad.dtype]

    if autocast is None and input_dtype is not weight_dtype:
        with pytest.raises(RuntimeError):
            attempt(plain)
        with pytest.raises(TypeError, match=r"Give both the same dtype or use autocast"):
            attempt(layer)
    else:
        assert attempt(layer) == attempt(plain)


def test_high_precision_recipe_is_nn_linear(device):
    plain = nn.Linear(64, 32, device=device)
    layer = convert_to_fp4(copy.deepcopy(plain), "high_precision")
    x, grad = torch.randn(8, 64, device=device), torch.randn(8, 32, device=device)
    actual, expected = run(layer, x, grad), run(plain, x, grad)
    for name in ("y", "dx", "dw", "db"):
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-5, atol=1e-5)  # order of float32 sums


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.complex64])
def test_other_dtypes_are_refused(dtype):
    layer = fp4_linear_layer(16, 8)
    with pytest.raises(TypeError, match=r"torch\.\w+ input for a torch.float32 weight"):
        layer(torch.ones(4, 16, dtype=dtype))
    with pytest.raises(TypeError), torch.autocast("cpu", dtype=torch.bfloat16):
        layer(torch.ones(4, 16, dtype=dtype))


def test_float64_layers_say_what_to_do():
    layer = fp4_linear_layer(16, 8).double()
    with pytest.raises(TypeError, match=r"computes from float32, bfloat16 or float16, got torch\.float64"):
        layer(torch.ones(4, 16, dtype=torch.float64))


def test_wrong_features():
    with pytest.raises(ValueError, match=r"in_features=16, got an input of shape \(4, 8\)"):
        fp4_linear_layer(16, 8)(torch.ones(4, 8))
    with pytest.raises(ValueError, match=r"in_features=16, got an input of shape \(\)"):
        fp4_linear_layer(16, 8)(torch.tensor(1.0))


def test_float16_large_values_do_not_overflow_inside(device):
    layer = fp4_linear_layer(16, 16, device=device, dtype=torch.float16, bias=False)
    with torch.no_grad():
        layer.weight.fill_(2.0**-10)
    actual = run(layer, torch.full((16, 16), 30000.0, device=device, dtype=torch.float16))
    assert all(value.isfinite().all() for name, value in actual.items() if name != "dw")
    assert actual["y"][0, 0].item() == pytest.approx(16 * 30000 / 1024, rel=0.02)


def test_autocast_quantises_the_weight_from_its_own_dtype(device):
    layer = fp4_linear_layer(64, 32, device=device, bias=False)
    x = torch.randn(16, 64, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = layer(x)
    expected = ops.gemm(
        ops.quantize(x.bfloat16(), RTN.fprop.lhs),
        ops.quantize(layer.weight.detach(), RTN.fprop.rhs),
        None,
        torch.bfloat16,
    )
    assert same_bits(y.detach(), expected)


# ---- T01, T09, T10: the weight is always the present one -------------------------------------------------------------


def _merge_lora(layer):
    with torch.no_grad():
        layer.weight.data += torch.randn(32, 4) @ torch.randn(4, 64)


CHANGES = {
    "data.add_": lambda layer: layer.weight.data.add_(1.0),
    "data = new": lambda layer: setattr(layer.weight, "data", torch.randn(32, 64)),
    "data.copy_": lambda layer: layer.weight.data.copy_(torch.randn(32, 64)),
    "load_state_dict": lambda layer: layer.load_state_dict({**layer.state_dict(), "weight": torch.randn(32, 64)}),
    "load_state_dict(assign)": lambda layer: layer.load_state_dict(
        {**layer.state_dict(), "weight": torch.randn(32, 64)}, assign=True
    ),
    "to(bf16) and back": lambda layer: layer.to(torch.bfloat16).to(torch.float32),
    "new parameter": lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(32, 64))),
    "lora merge": _merge_lora,
    "fused adam": lambda layer: torch.optim.AdamW(layer.parameters(), lr=1.0, fused=True).step(),
    "fused sgd": lambda layer: torch.optim.SGD(layer.parameters(), lr=1.0, fused=True).step(),
    "foreach adam": lambda layer: torch.optim.AdamW(layer.parameters(), lr=1.0, foreach=True).step(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_forward_and_backward_use_the_present_weight(change):
    layer = fp4_linear_layer(64, 32)
    x, grad = torch.randn(16, 64), torch.randn(16, 32)
    before = run(layer, x, grad)
    CHANGES[change](layer)
    fresh = fp4_linear_layer(64, 32)
    fresh.weight.data, fresh.bias.data = layer.weight.detach().clone(), layer.bias.detach().clone()
    actual = run(layer, x, grad)
    assert_same_run(actual, run(fresh, x, grad))
    assert not same_bits(actual["y"], before["y"])


def test_eval_and_inference_mode_between_training_steps(device):
    layer, twin = (fp4_linear_layer(64, 32, SR, device=device) for _ in range(2))
    x, grad = torch.randn(16, 64, device=device), torch.randn(16, 32, device=device)
    layer.eval()
    with torch.inference_mode():
        evaluated = layer(x.clone())
    layer.train()
    actual = [run(layer, x, grad)]
    with torch.no_grad():
        layer(x)
    actual.append(run(layer, x, grad))
    expected = [run(twin, x, grad) for _ in range(2)]
    for a, b in zip(actual, expected, strict=True):
        assert_same_run(a, b)
    assert same_bits(evaluated.clone(), expected[0]["y"])


def test_convert_inside_inference_mode_then_train():
    layer = nn.Linear(64, 32)
    with torch.inference_mode():
        convert_to_fp4(layer, SR)
        layer(torch.randn(4, 64))
    assert run(layer, torch.randn(4, 64))["dw"].any()


def test_freeze_and_unfreeze(device):
    layer = fp4_linear_layer(64, 32, device=device)
    x, grad = torch.randn(16, 64, device=device), torch.randn(16, 32, device=device)
    expected = run(layer, x, grad)
    layer.requires_grad_(False)
    frozen = run(layer, x, grad)
    assert frozen["dw"] is None
    assert frozen["db"] is None
    assert same_bits(frozen["dx"], expected["dx"])
    layer.requires_grad_(True)
    assert_same_run(run(layer, x, grad), expected)


# ---- T08: what a frozen weight costs ---------------------------------------------------------------------------------


def _count_quantise_calls(monkeypatch):
    calls = []
    quantize, quantize_both = ops.quantize, ops.quantize_both

    def counted(x, *args, **kwargs):
        calls.append((tuple(x.shape), kwargs.get("transposed", False)))
        return quantize(x, *args, **kwargs)

    def counted_both(x, *args, **kwargs):
        calls.append((tuple(x.shape), "both"))
        return quantize_both(x, *args, **kwargs)

    monkeypatch.setattr(ops, "quantize", counted)
    monkeypatch.setattr(ops, "quantize_both", counted_both)
    return calls


def test_frozen_weight_has_no_wgrad_work_and_keeps_nothing_of_the_input(monkeypatch):
    layer = fp4_linear_layer(64, 32, bias=False).requires_grad_(False)
    calls = _count_quantise_calls(monkeypatch)
    x = torch.randn(16, 64, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = layer(x)
    y.backward(torch.randn(16, 32))
    assert calls == [((16, 64), False), ((32, 64), "both"), ((16, 32), False)]
    assert sum(t.nbytes for t in kept) == 64 * 32 // 2 + (64 // 16) * (32 // 16) + 4  # the weight alone
    # The silent drop of upstream gradients: the input's is there.
    assert x.grad.abs().max() > 0


def test_input_without_gradient_has_no_dgrad_work(monkeypatch):
    layer = fp4_linear_layer(64, 32, bias=False)
    calls = _count_quantise_calls(monkeypatch)
    layer(torch.randn(16, 64)).backward(torch.randn(16, 32))
    assert calls == [((16, 64), "both"), ((32, 64), False), ((16, 32), True)]


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_backward_keeps_the_input_packed(name, dtype, device):
    """0.5625 byte an element (MXFP4 0.53125) and one float32 maximum; and nothing shares memory with the input."""
    tokens, in_features = 64, 96
    layer = fp4_linear_layer(in_features, 32, get_recipe(name), device=device, dtype=dtype, bias=False)
    x = torch.randn(tokens, in_features, device=device, dtype=dtype)  # needs no gradient: no weight is kept
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = layer(x * 1)  # the product is what would be kept
    bits = layer.fp4_recipe.wgrad.rhs.format.bits_per_value
    amax = 4 if name == "nvfp4" else 0
    assert sum(t.nbytes for t in kept) == tokens * in_features * bits / 8 + amax
    assert {t.dtype for t in kept} <= {torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float32}
    assert all(t.numel() == 1 for t in kept if t.dtype is torch.float32)
    # The graph holds no tensor outside of what the hooks saw.
    node = y.grad_fn
    while "_FP4Linear" not in node.name():
        node = node.next_functions[0][0]
    beside = {name: getattr(node, name) for name in set(dir(node)) - set(dir(type(node)))}
    assert "recipe" in beside
    assert [name for name, value in beside.items() if isinstance(value, torch.Tensor)] == ["rng_state"]


def test_both_operands_packed_when_both_gradients_are_needed():
    layer = fp4_linear_layer(64, 32, SR, bias=False)
    x = torch.randn(48, 64, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    weight = 64 * 32 // 2 + 64 // 16 * 32 // 16 + 4
    assert sum(t.nbytes for t in kept) == 48 * 64 * 0.5625 + 4 + weight


def test_saved_tensors_can_move_off_the_device():
    layer = fp4_linear_layer(64, 32)
    x, grad = torch.randn(16, 64), torch.randn(16, 32)
    expected = run(layer, x, grad)
    with torch.autograd.graph.save_on_cpu():
        assert_same_run(run(layer, x, grad), expected)


# ---- T11: activation checkpointing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", [RTN, SR], ids=["RTN", "SR"])
def test_checkpointing_gives_the_same_bits(recipe, reentrant, device):
    from torch.utils.checkpoint import checkpoint

    results = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        block = convert_to_fp4(Block(32), recipe, seed=3).to(device)
        x = torch.randn(2, 9, 32, device=device, requires_grad=True)
        for _ in range(2):
            y = checkpoint(block, x, use_reentrant=reentrant) if checkpointed else block(x)
            y.square().sum().backward()
        results.append([x.grad, *(p.grad for p in block.parameters())])
    for a, b in zip(*results, strict=True):
        assert same_bits(a, b)


def test_backward_uses_the_recipe_of_its_forward():
    """Also if the recipe changed in between, as when a context ends before ``loss.backward()``."""
    from lightning_fp4 import set_recipe

    layer = fp4_linear_layer(64, 32, RTN)
    x, grad = torch.randn(16, 64), torch.randn(16, 32)
    expected = run(layer, x, grad)
    a = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(a)
    set_recipe(layer, "high_precision")
    y.backward(grad)
    assert_same_run({"y": y, "dx": a.grad, "dw": layer.weight.grad, "db": layer.bias.grad}, expected)


# ---- T16: stochastic rounding ----------------------------------------------------------------------------------------


def test_gradients_are_unbiased():
    """The mean of many draws of dx is what the gradient in high precision gives with the same quantised weight."""
    layer = fp4_linear_layer(16, 32, SR, bias=False)
    grad = torch.randn(16, 32)
    draws = torch.stack([run(layer, torch.zeros(16, 16), grad)["dx"] for _ in range(400)]).double()
    weight = ops.dequantize(ops.quantize(layer.weight.detach(), SR.dgrad.rhs)).double()
    expected = grad.double() @ weight
    error = draws.mean(0) - expected
    sigma = draws.std(0) / 400**0.5
    # Eight bits round probabilities down by up to 1/256 of a step: allow 1/256 of sum |w| times the largest step.
    slack = (grad.abs().max() / 3 / 256) * weight.abs().sum(0)
    assert bool((error.abs() <= 4.5 * sigma + slack).all())
    assert 0.9 < float(draws[0].norm() / expected.norm()) < 1.1


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_draws_are_fresh_and_seeded(name, device):
    recipe = get_recipe(name)
    x, grad = torch.randn(32, 64, device=device), torch.randn(32, 32, device=device)
    a = fp4_linear_layer(64, 32, recipe, device=device, seed=1)
    first, second = run(a, x, grad), run(a, x, grad)
    for key in ("dx", "dw"):
        assert not same_bits(first[key], second[key])
    for key in ("y", "db"):
        assert same_bits(first[key], second[key])
    again = fp4_linear_layer(64, 32, recipe, device=device, seed=1)
    assert_same_run(run(again, x, grad), first)
    assert_same_run(run(again, x, grad), second)
    other = run(fp4_linear_layer(64, 32, recipe, device=device, seed=2), x, grad)
    assert not same_bits(other["dx"], first["dx"])


def test_forward_draws_nothing():
    """Evaluation and recomputed forwards leave the random state where it was."""
    layer = fp4_linear_layer(64, 32, SR)
    before = layer.fp4_rng_state.clone()
    with torch.no_grad():
        layer(torch.randn(4, 64))
    layer(torch.randn(4, 64))
    assert torch.equal(layer.fp4_rng_state, before)
    run(layer, torch.randn(4, 64))
    assert layer.fp4_rng_state.tolist() == [before[0].item(), before[1].item() + 1]


def test_states_differ_by_seed_rank_and_name():
    states = [tuple(new_rng_state(*args).tolist()) for args in ((0, 0, "a"), (1, 0, "a"), (0, 1, "a"), (0, 0, "b"))]
    assert len(set(states)) == 4
    assert all(key >= 0 and step == 0 for key, step in states)
    assert new_rng_state(0, 0, "a").tolist() == list(states[0])


def test_global_generator_is_untouched(device):
    layer = fp4_linear_layer(64, 32, SR, device=device)
    x = torch.randn(4, 64, device=device)
    torch.manual_seed(5)
    expected = torch.rand(3), torch.rand(3, device=device)
    fresh = nn.Linear(16, 16)
    torch.manual_seed(5)
    convert_to_fp4(fresh, SR)
    run(layer, x)
    assert torch.equal(torch.rand(3), expected[0])
    assert torch.equal(torch.rand(3, device=device), expected[1])


def test_two_backwards_through_one_graph_draw_twice():
    layer = fp4_linear_layer(64, 32, SR)
    y = layer(torch.randn(16, 64))
    grad = torch.randn(16, 32)
    grads = [torch.autograd.grad(y, layer.weight, grad, retain_graph=True)[0] for _ in range(2)]
    assert not same_bits(*grads)


def test_rounding_stays_within_one_step_of_nearest(device):
    """Not zeros and not garbage: the stochastic gradient is as close as four bits allow."""
    layer = fp4_linear_layer(64, 64, SR, device=device, bias=False)
    x, grad = torch.randn(64, 64, device=device), torch.randn(64, 64, device=device)
    actual = run(layer, x, grad)
    for name, expected in {"dx": grad @ layer.weight.detach(), "dw": grad.T @ x}.items():
        assert 0.9 < float(actual[name].norm() / expected.norm()) < 1.15
        assert relative_error(actual[name], expected) < 0.25


# ---- T21: poisoned memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [RTN, SR, MX], ids=["nvfp4 RTN", "nvfp4 SR", "mxfp4"])
@pytest.mark.parametrize(
    ("tokens", "in_features", "out_features"), [(0, 64, 32), (7, 40, 24), (33, 172, 8), (129, 16, 50)]
)
def test_poisoned_memory_changes_nothing(tokens, in_features, out_features, recipe, device, request):
    x, grad = torch.randn(tokens, in_features, device=device), torch.randn(tokens, out_features, device=device)
    expected = run(fp4_linear_layer(in_features, out_features, recipe, device=device), x, grad)
    layer = fp4_linear_layer(in_features, out_features, recipe, device=device)
    filled = request.getfixturevalue("poison")
    assert torch.empty(3).isnan().all()
    assert filled
    assert_same_run(run(layer, x, grad), expected)


# ---- T24: copies -----------------------------------------------------------------------------------------------------


class OwnLinear(nn.Linear):
    """A subclass without its own forward: it converts, and its class is made at run time."""

    def greet(self):
        return "hello"


class Stateful(nn.Linear):
    def __getstate__(self):
        return {**self.__dict__, "packed": True}


@pytest.mark.parametrize("module_class", [nn.Linear, OwnLinear])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_compute_the_same_and_share_nothing(how, module_class, tmp_path):
    layer = convert_to_fp4(nn.Sequential(module_class(64, 32)), SR, seed=1)
    x, grad = torch.randn(16, 64), torch.randn(16, 32)
    for steps in range(2):  # before and after the first step
        if how == "deepcopy":
            twin = copy.deepcopy(layer)
        elif how == "pickle":
            twin = pickle.loads(pickle.dumps(layer))
        else:
            torch.save(layer, tmp_path / "model.pt")
            twin = torch.load(tmp_path / "model.pt", weights_only=False)
        assert type(twin[0]) is type(layer[0])
        assert twin[0].fp4_rng_state.tolist()[1] == steps
        assert twin[0].fp4_rng_state.data_ptr() != layer[0].fp4_rng_state.data_ptr()
        assert twin[0].fp4_gemm_paths is not layer[0].fp4_gemm_paths
        assert_same_run(run(twin[0], x, grad), run(layer[0], x, grad))
        with torch.no_grad():
            twin[0].weight.zero_()
        assert layer[0].weight.any()


def test_own_getstate_is_respected():
    layer = convert_to_fp4(Stateful(16, 16), RTN)
    assert copy.deepcopy(layer).packed


def test_mixed_class_is_both():
    layer = convert_to_fp4(OwnLinear(16, 16), RTN)
    assert isinstance(layer, OwnLinear)
    assert isinstance(layer, FP4Linear)
    assert layer.greet() == "hello"
    assert type(layer).__name__ == "FP4OwnLinear"
    assert fp4_class(OwnLinear) is type(layer)
    assert original_class(type(layer)) is OwnLinear
    assert original_class(FP4Linear) is nn.Linear


def test_averaged_model_copies():
    model = convert_to_fp4(nn.Sequential(nn.Linear(32, 32)), RTN)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    x = torch.randn(4, 32)
    assert same_bits(averaged(x).detach(), model(x).detach())


def test_is_made_by_conversion_only():
    with pytest.raises(TypeError, match=r"use `convert_to_fp4\(nn.Linear"):
        FP4Linear(16, 8)


def test_repr_names_the_recipe():
    assert repr(fp4_linear_layer(16, 8)) == "FP4Linear(in_features=16, out_features=8, bias=True, recipe='nvfp4')"


# ---- the rest --------------------------------------------------------------------------------------------------------


def test_second_derivatives_are_refused():
    layer = fp4_linear_layer(16, 8)
    x = torch.randn(4, 16, requires_grad=True)
    (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_gradient_accumulation_is_the_sum():
    layer = fp4_linear_layer(64, 32)
    x, grad = torch.randn(32, 64), torch.randn(32, 32)
    halves = [run(layer, x[i : i + 16], grad[i : i + 16])["dw"] for i in (0, 16)]
    layer.zero_grad()
    for i in (0, 16):
        layer(x[i : i + 16]).backward(grad[i : i + 16])
    assert same_bits(layer.weight.grad, halves[0] + halves[1])


def test_default_dtype_changes_nothing():
    layer = fp4_linear_layer(64, 32, SR)
    x, grad = torch.randn(16, 64), torch.randn(16, 32)
    expected = run(layer, x, grad)
    layer.fp4_rng_state[1] = 0
    for default in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(default)
        try:
            assert_same_run(run(layer, x, grad), expected)
            layer.fp4_rng_state[1] = 0
        finally:
            torch.set_default_dtype(torch.float32)


def test_default_device_does_not_matter():
    with torch.device("meta"):
        layer = convert_to_fp4(nn.Linear(64, 32), SR)
        assert layer.fp4_rng_state.device.type == "cpu"
    layer = fp4_linear_layer(64, 32)
    x, grad = torch.randn(16, 64), torch.randn(16, 32)
    expected = run(layer, x, grad)
    with torch.device("meta"):
        assert_same_run(run(layer, x, grad), expected)


def test_random_state_follows_the_input(device):
    layer = fp4_linear_layer(64, 32, SR)
    key = layer.fp4_rng_state.tolist()
    layer.to(device)(torch.randn(4, 64, device=device)).sum().backward()
    assert layer.fp4_rng_state.device.type == device.type
    assert layer.fp4_rng_state.tolist() == [key[0], 1]


@pytest.mark.gpu
@needs_two_gpus
@pytest.mark.parametrize("name", ["nvfp4", "averis", "chon", "mxfp4"])
def test_a_gpu_that_is_not_the_current_one(name):
    recipe = without_blocks(get_recipe(name))
    results = []
    for place in ("cuda:0", "cuda:1"):
        layer = fp4_linear_layer(96, 80, recipe, device=place, dtype=torch.bfloat16)
        x = torch.randn(70, 96, generator=torch.Generator().manual_seed(1)).to(place, torch.bfloat16)
        results.append([run(layer, x) for _ in range(3)])  # plans are made, then used
        assert torch.cuda.current_device() == 0
    for first, second in zip(*results, strict=True):
        assert all(value.device.index == 1 for value in second.values())
        assert_same_run({key: value.to("cuda:0") for key, value in second.items()}, first)


def test_meta_device_forward_has_shapes():
    layer = fp4_linear_layer(64, 32, SR).to("meta")
    assert layer(torch.empty(2, 3, 64, device="meta")).shape == (2, 3, 32)


def test_hooks_run():
    layer = fp4_linear_layer(16, 8)
    seen = []
    layer.register_forward_pre_hook(lambda *_: seen.append("pre"))
    layer.register_forward_hook(lambda *_: seen.append("post"))
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    layer(torch.randn(4, 16, requires_grad=True)).sum().backward()
    assert seen == ["pre", "post", "backward"]


def test_paths_that_ran(device):
    layer = fp4_linear_layer(64, 32, device=device)
    unit = exact_units(device)
    with torch.no_grad():
        layer(torch.randn(4, 64, device=device))
    assert layer.fp4_gemm_paths == {"fprop": unit}
    run(layer, torch.randn(4, 64, device=device))
    assert layer.fp4_gemm_paths == dict.fromkeys(("fprop", "dgrad", "wgrad"), unit)


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_each_gemm_can_stay_in_high_precision(gemm, device):
    recipe = dataclasses.replace(RTN, **{gemm: None})
    layer = fp4_linear_layer(64, 32, recipe, device=device, bias=False)
    x, grad = torch.randn(64, 64, device=device), torch.randn(64, 32, device=device)
    actual, w = run(layer, x, grad), layer.weight.detach()
    for name, of, expected in (("y", "fprop", x @ w.T), ("dx", "dgrad", grad @ w), ("dw", "wgrad", grad.T @ x)):
        error = relative_error(actual[name], expected)
        assert error < 1e-6 if of == gemm else 0.05 < error < 0.25


@pytest.mark.parametrize("side", ["lhs", "rhs"])
def test_one_side_alone_can_be_quantised(side, device):
    recipe = dataclasses.replace(
        RTN, fprop=dataclasses.replace(RTN.fprop, **{side: None}), wgrad=dataclasses.replace(RTN.wgrad, hadamard=None)
    )
    layer = fp4_linear_layer(64, 32, recipe, device=device, bias=False)
    x = torch.randn(64, 64, device=device)
    y = run(layer, x)["y"]
    assert 0.03 < relative_error(y, x @ layer.weight.detach().T) < 0.15


def test_every_stochastic_recipe_says_so():
    assert stochastic(SR)
    assert not stochastic(RTN)
    assert without_blocks(SR).last_blocks == 0
    assert {r.name for r in RECIPES} >= {"nvfp4", "mxfp4", "high_precision"}
    assert Quantizer().format is NVFP4


@pytest.mark.parametrize("grad", [False, True])
def test_forward_mode_is_refused(grad, device):
    """Not only where gradients are on, which forward mode takes no heed of: the reference would round tangents off."""
    layer = fp4_linear_layer(64, 48, RTN, device=device)
    x = torch.randn(8, 64, device=device)
    with torch.set_grad_enabled(grad), forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        layer(forward_ad.make_dual(x, torch.ones_like(x)))
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match="setup_context"):
        torch.func.jvp(layer, (x,), (x,))
