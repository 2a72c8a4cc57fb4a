"""Hot channels of a layer: the algebra of each mode, odd sizes, the first pick, and what compilation and copies do."""

import copy
import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from lightning_fp4 import HotChannels, convert_to_fp4, fp4_layers, get_recipe, matmul, reference, set_recipe
from lightning_fp4.linear import fp4_linear, new_rng_state
from lightning_fp4.matmul import Operand
from tests.helpers import TinyModel, fp4_linear_layer, relative_error, run, same_bits, without_blocks


def chon(**options):
    return get_recipe("chon", stochastic_rounding=False, post_qk_protection=False, last_blocks=0, **options)


def _tensors(tokens=37, features=100, out=24):
    torch.manual_seed(features)
    x = torch.randn(tokens, features) * (1 + 6 * (torch.rand(features) < 0.1))
    return x, torch.randn(out, features)


def _output(x, w, recipe, channels):
    return fp4_linear(x, w, None, recipe, new_rng_state(0, 0, "layer"), channels)


def _pieces(x, w, recipe, channels):
    """``X, W`` on the hot channels, and what quantising made of all of them."""
    xq, wq = (reference.dequantize(reference.quantize(m, q)) for m, q in ((x, recipe.fprop.lhs), (w, recipe.fprop.rhs)))
    hot = (x[:, channels], w[:, channels], xq[:, channels], wq[:, channels])
    return xq, wq, *hot


@pytest.mark.parametrize("weight_2d", [True, False])
def test_unquantised_residuals_leave_the_second_order_term(weight_2d):
    """The error of the patched channels alone is the product of the residuals."""
    x, w = _tensors()
    recipe, channels = chon(mode="high_precision", weight_2d=weight_2d), torch.arange(5, 53, 3)
    xq, wq, xi, wi, xqi, wqi = _pieces(x, w, recipe, channels)
    others = torch.ones(100, dtype=torch.bool)
    others[channels] = False
    rest = xq[:, others] @ wq[:, others].T
    expected = rest + xi @ wi.T - (xi - xqi) @ (wi - wqi).T
    # Float32 sums of 100 products of size up to 20.
    torch.testing.assert_close(_output(x, w, recipe, channels), expected, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("operands", ["activations", "weights"])
def test_one_sided_patches_take_back_the_errors_of_that_side(operands):
    x, w = _tensors()
    recipe, channels = chon(mode="high_precision", operands=operands), torch.arange(5, 53, 3)
    xq, wq, xi, wi, xqi, wqi = _pieces(x, w, recipe, channels)
    patch = (xi - xqi) @ wqi.T if operands == "activations" else xqi @ (wi - wqi).T
    torch.testing.assert_close(_output(x, w, recipe, channels), xq @ wq.T + patch, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("operands", ["both", "activations", "weights"])
@pytest.mark.parametrize("weight_2d", [True, False])
@pytest.mark.parametrize("features", [100, 64, 16, 8])
def test_one_gemm_and_two_give_the_same(operands, weight_2d, features):
    """``features`` that are no multiple of 16 too; only the order of float32 sums differs."""
    x, w = _tensors(features=features)
    channels = torch.arange(0, features, 2)
    single, dual = (
        _output(x, w, chon(mode=mode, operands=operands, weight_2d=weight_2d), channels) for mode in ("single", "dual")
    )
    torch.testing.assert_close(single, dual, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("mode", ["single", "dual", "high_precision"])
def test_the_patch_is_the_sum_of_its_products(mode):
    """Against the definition written out with decoded matrices."""
    x, w = _tensors()
    recipe, channels = chon(mode=mode), torch.tensor([0, 1, 2, 15, 16, 50, 98, 99, *range(60, 68)])
    xq, wq, xi, wi, xqi, wqi = _pieces(x, w, recipe, channels)
    if mode == "high_precision":
        patch = (xi - xqi) @ wqi.T + xqi @ (wi - wqi).T
    else:
        ax, aw = x.abs().max()[None, None], w.abs().max()[None, None]

        def q(matrix, quantizer, amax):
            return reference.dequantize(reference.quantize(matrix, quantizer, amax=amax))

        lhs, rhs = recipe.fprop.lhs, recipe.fprop.rhs
        patch = q(xi - xqi, lhs, ax) @ q(wi, rhs, aw).T + q(xi, lhs, ax) @ q(wi - wqi, rhs, aw).T
    torch.testing.assert_close(_output(x, w, recipe, channels), xq @ wq.T + patch, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("mode", ["single", "dual", "high_precision"])
def test_no_channels_is_the_plain_product(mode):
    x, w = _tensors()
    plain = _output(x, w, get_recipe("nvfp4", weight_2d=False, forward_scale="four_over_six"), None)
    assert same_bits(_output(x, w, chon(mode=mode), torch.zeros(0, dtype=torch.int64)), plain)
    assert same_bits(_output(x, w, chon(mode=mode), None), plain)


@pytest.mark.parametrize("mode", ["single", "dual", "high_precision"])
@pytest.mark.parametrize("features", [100, 96])
def test_all_channels_leave_a_much_smaller_error(mode, features):
    x, w = _tensors(features=features)
    patched = _output(x, w, chon(mode=mode), torch.arange(features))
    plain = _output(x, w, get_recipe("nvfp4"), None)
    # First-order errors of about 14 % become second-order ones: 1 %, plus 10 % of 14 % where residuals have four bits.
    assert relative_error(patched, x @ w.T) < 0.25 * relative_error(plain, x @ w.T)


def test_hot_channels_help_more_than_others():
    torch.manual_seed(0)
    x, w = torch.randn(64, 256), torch.randn(32, 256)
    x[:, [7, 99, 200]] *= 8
    layer = fp4_linear_layer(256, 32, chon())
    layer.weight.data.copy_(w)
    layer(x)
    hot = layer.fp4_hot_channels
    # The outliers themselves, and neighbours whose scales they spoil.
    assert set((hot // 16).tolist()) <= {0, 6, 12}
    assert len(hot) == 32
    cold = torch.tensor([c for c in range(256) if c not in hot.tolist()][: len(hot)])
    recipe, exact = chon(), x @ w.T
    errors = [relative_error(_output(x, w, recipe, channels), exact) for channels in (hot, cold, None)]
    assert errors[0] < 0.9 * errors[1]
    assert errors[1] < errors[2]


@pytest.mark.parametrize("weight_2d", [True, False])
def test_backward_does_not_depend_on_the_patch(weight_2d):
    layer = fp4_linear_layer(100, 24, chon(weight_2d=weight_2d))
    options = {"stochastic_rounding": False, "weight_2d": weight_2d, "forward_scale": "four_over_six"}
    plain = fp4_linear_layer(100, 24, get_recipe("nvfp4", **options))
    x, _ = _tensors()
    grad = torch.randn(37, 24)
    patched, expected = run(layer, x, grad), run(plain, x, grad)
    assert not same_bits(patched["y"], expected["y"])
    for name in ("dx", "dw", "db"):
        assert same_bits(patched[name], expected[name])


@pytest.mark.parametrize(
    ("ratio", "features", "count"),
    [(0.09, 512, 48), (0.09, 100, 16), (0.0, 512, 0), (1.0, 512, 512), (1.0, 100, 100), (0.07, 1600, 112), (0.5, 8, 8)],
)
def test_count_is_a_multiple_of_16_or_all(ratio, features, count):
    assert HotChannels(ratio=ratio).count(features) == count


def test_first_training_forward_picks_and_evaluation_does_not():
    layer = fp4_linear_layer(100, 24, chon())
    x, _ = _tensors()
    layer.eval()
    layer(x)
    assert layer.fp4_hot_channels is None
    layer.train()
    layer(x[:0])
    assert layer.fp4_hot_channels is None  # a batch without tokens says nothing
    layer(x)
    expected = matmul.channel_scores(x, layer.weight.detach(), layer.fp4_recipe.fprop)
    assert torch.equal(layer.fp4_hot_channels, reference.select_channels(expected, 16))
    before = layer.fp4_hot_channels
    layer(x.flip(1))
    assert layer.fp4_hot_channels is before


def test_a_layer_never_called_has_none_and_others_do_not_care():
    model = TinyModel(tied=False)
    convert_to_fp4(model, chon())
    layers = fp4_layers(model)
    idle = layers.pop("layers.1.mlp.up_proj")
    model.layers[1].mlp = torch.nn.Identity()
    model(torch.arange(10)[None]).sum().backward()
    assert idle.fp4_hot_channels is None
    assert all(layer.fp4_hot_channels is not None for name, layer in layers.items() if "layers.1.mlp" not in name)


def test_no_state_dict_keys_no_buffers_and_copies_keep_the_channels():
    layer = fp4_linear_layer(100, 24, chon())
    keys = list(layer.state_dict())
    layer(_tensors()[0])
    assert list(layer.state_dict()) == keys == ["weight", "bias"]
    assert not list(layer.buffers())
    clone = copy.deepcopy(layer)
    assert torch.equal(clone.fp4_hot_channels, layer.fp4_hot_channels)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("options", [{}, {"averis": True}], ids=str)
def test_recomputed_forward_is_the_same_on_the_first_step_too(use_reentrant, options):
    x, _ = _tensors()
    results = []
    for checkpointed in (False, True):
        layer = fp4_linear_layer(100, 24, get_recipe("chon", last_blocks=0, **options))
        a = x.clone().requires_grad_()
        out = checkpoint(layer, a, use_reentrant=use_reentrant) if checkpointed else layer(a)
        out.square().sum().backward()
        results.append((out.detach(), a.grad, layer.weight.grad, layer.fp4_hot_channels.float()))
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"averis": True, "mode": "dual"}, {"mode": "high_precision"}], ids=str)
def test_compiled_layer_is_the_eager_one(options):
    x, _ = _tensors()
    grad = torch.randn(37, 24)
    eager, compiled = (fp4_linear_layer(100, 24, chon(**options)) for _ in range(2))
    compiled.compile(fullgraph=True, backend="aot_eager")
    for _ in range(3):
        expected, found = run(eager, x, grad), run(compiled, x, grad)
        assert all(same_bits(found[name], value) for name, value in expected.items())
    assert torch.equal(eager.fp4_hot_channels, compiled.fp4_hot_channels)


def test_saved_memory_stays_packed():
    saved = []
    layer = fp4_linear_layer(128, 64, chon(averis=True))
    x = torch.randn(256, 128, requires_grad=True)
    layer(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x)
    own = [t for t in saved if t.data_ptr() != layer.weight.data_ptr()]
    packed = (256 * 128 + 64 * 128) * 0.5625
    assert sum(t.nbytes for t in own) <= packed + 4 * 128 + 1024


def test_scores_are_collected_while_asked_for_and_only_when_training():
    layer = fp4_linear_layer(100, 24, chon(score="product"))
    x, _ = _tensors()
    layer(x)
    layer.fp4_channel_scores = torch.zeros(100)
    layer.eval()
    layer(x)
    assert not layer.fp4_channel_scores.any()
    layer.train()
    layer(x)
    layer(x)
    expected = matmul.channel_scores(x, layer.weight.detach(), layer.fp4_recipe.fprop)
    torch.testing.assert_close(layer.fp4_channel_scores, 2 * expected)


def test_switching_the_recipe_keeps_the_channels():
    layer = fp4_linear_layer(100, 24, chon())
    x, _ = _tensors()
    layer(x)
    channels = layer.fp4_hot_channels
    set_recipe(layer, "high_precision")
    assert same_bits(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
    set_recipe(layer, chon())
    layer(x)
    assert layer.fp4_hot_channels is channels


def test_operands_are_quantised_as_without_a_patch():
    x, _ = _tensors()
    recipe = without_blocks(chon())
    side = matmul.quantize_rows(x, Operand.lhs(recipe.fprop, 0))
    assert torch.equal(side.matrix.codes, reference.quantize(x, recipe.fprop.lhs).codes)
    unpatched = get_recipe("nvfp4", weight_2d=False, forward_scale="four_over_six")
    assert dataclasses.replace(recipe.fprop, hot_channels=None) == unpatched.fprop


@pytest.mark.parametrize("kind", ["fake", "meta", "vmap", "export"])
def test_channels_are_not_picked_from_what_does_not_last(kind):
    """Nor does a layer remember channels that nobody can read afterwards."""
    layer = fp4_linear_layer(64, 48, chon())
    x = torch.randn(3, 8, 64)
    with torch.no_grad():
        if kind == "fake":
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                layer(mode.from_tensor(x))
        elif kind == "meta":
            values = [p.clone() for p in layer.parameters()]
            layer.to("meta")(x.to("meta"))
            layer.to_empty(device="cpu")
            for p, value in zip(layer.parameters(), values, strict=True):
                p.copy_(value)
        elif kind == "vmap":
            torch.vmap(layer)(x)
        else:
            torch.export.export(layer, (x,), strict=False)
        assert layer.fp4_hot_channels is None
        assert same_bits(layer(x), fp4_linear_layer(64, 48, chon())(x))
    assert layer.fp4_hot_channels is not None
