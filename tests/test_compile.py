"""``torch.compile`` of converted layers: the same bits, without graph breaks, without many compilations."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from lightning_fp4 import convert_to_fp4, get_recipe, set_recipe
from tests.helpers import RTN, Block, same_bits

BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


class Linears(nn.Module):
    """Linear layers alone: other operations may round differently when a compiler fuses them."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 48, bias=bias), nn.Linear(48, 32, bias=False)

    def forward(self, x):
        return self.b(self.a(x))


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _steps(model, module, device, tokens=(16, 16, 16)):
    """A few training steps; what each gives."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    results = []
    for count in tokens:
        x = torch.randn(count, 64, generator=generator).to(device).requires_grad_()
        y = model(x)
        y.backward(torch.randn(count, 32, generator=generator).to(device))
        results += [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return results


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "rtn"])
def test_compiled_is_eager_to_the_bit(name, backend, device):
    """Forward and backward over several steps, so that random bits differ from step to step as in eager mode."""
    # Inductor sums the bias gradient (an ordinary reduction, not a quantised one) in an order of its own.
    bias = backend != "inductor"
    eager = convert_to_fp4(Linears(bias), RTN if name == "rtn" else get_recipe(name), seed=1).to(device)
    twin = copy.deepcopy(eager)
    expected = _steps(eager, eager, device)
    actual = _steps(torch.compile(twin, fullgraph=True, backend=backend), twin, device)
    for a, b in zip(actual, expected, strict=True):
        assert same_bits(a, b)
    if name != "rtn":
        assert [layer.fp4_rng_state.tolist()[1] for layer in (twin.a, twin.b)] == [3, 3]


@pytest.mark.parametrize("plain", ["fprop", "dgrad", "wgrad"])
def test_compiled_with_a_gemm_in_high_precision(plain, device):
    eager = convert_to_fp4(Linears(), dataclasses.replace(get_recipe("nvfp4"), **{plain: None}), seed=1).to(device)
    twin = copy.deepcopy(eager)
    expected = _steps(eager, eager, device)
    actual = _steps(torch.compile(twin, fullgraph=True, backend="aot_eager"), twin, device)
    for a, b in zip(actual, expected, strict=True):
        assert same_bits(a, b)


def test_few_compilations_over_token_counts(device):
    model = convert_to_fp4(Linears(), "nvfp4", seed=1).to(device)
    twin = copy.deepcopy(model)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    tokens = (16, 33, 7, 100, 64)
    actual = _steps(torch.compile(twin, fullgraph=True, backend=backend), twin, device, tokens)
    for a, b in zip(actual, _steps(model, model, device, tokens), strict=True):
        assert same_bits(a, b)
    assert 1 <= len(graphs) <= 3


def test_one_compilation_for_steps_of_one_shape(device):
    """What a layer notes down in its first call is no reason to compile its second one anew."""
    model = convert_to_fp4(Linears(), "nvfp4", seed=1).to(device)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    _steps(torch.compile(model, fullgraph=True, backend=backend), model, device)
    assert len(graphs) == 1
    assert set(model.b.fp4_gemm_paths) == {"fprop", "dgrad", "wgrad"}


def test_autocast_train_and_eval_in_turn(device):
    model = convert_to_fp4(Block(64), RTN).to(device)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 9, 64, device=device)
    for training in (True, False, True):
        model.train(training)
        with torch.autocast(device.type, dtype=torch.bfloat16), torch.set_grad_enabled(training):
            actual, expected = compiled(x), model(x)
        assert actual.dtype is expected.dtype
        # The quantisers may see inputs that differ in a last bit: other operations are free to round differently.
        assert float((actual.float() - expected.float()).norm() / expected.float().norm()) < 0.02


def test_switching_the_recipe_reaches_a_compiled_model(device):
    """The recipe is guarded, not frozen at trace time."""
    model = convert_to_fp4(Linears(), RTN).to(device)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(16, 64, device=device)
    quantised = compiled(x)
    set_recipe(model, "high_precision")
    plain = compiled(x)
    assert same_bits(plain, model(x))
    assert not same_bits(plain, quantised)
    set_recipe(model, RTN)
    assert same_bits(compiled(x), quantised)


def test_compiled_before_conversion(device):
    model = Linears().to(device)
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(16, 64, device=device)
    before = compiled(x)
    convert_to_fp4(compiled, RTN)
    assert same_bits(compiled(x), model(x))
    assert not same_bits(compiled(x), before)
