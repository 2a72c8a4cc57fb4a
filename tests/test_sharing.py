"""Layers given one tensor quantise it once; nothing else is ever shared, and nothing stays alive for it."""

import contextlib
import copy
import dataclasses
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_fp4 import convert_to_fp4, get_recipe, ops, set_recipe, sharing
from tests.helpers import RTN, same_bits
from tests.test_ops import _Watch

RECIPES = {
    "nvfp4": get_recipe("nvfp4", last_blocks=0),
    "mxfp4": get_recipe("mxfp4"),
    "averis": get_recipe("averis", last_blocks=0),
    "chon": get_recipe("chon", last_blocks=0, post_qk_protection=False),
    "chon averis": get_recipe("chon", last_blocks=0, post_qk_protection=False, averis=True),
}


class Projections(nn.Module):
    """Three layers of one input, each with its own weight."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, width, bias=bias) for width in (48, 32, 32))

    def forward(self, x):
        return torch.cat([self.q(x), self.k(x), self.v(x)], dim=-1)


def _projections(recipe=RTN, device="cpu", dtype=torch.float32):
    torch.manual_seed(0)
    return convert_to_fp4(Projections(), recipe, seed=3, filter_fn=lambda *_: True).to(device, dtype)


@contextlib.contextmanager
def _unshared():
    """In here, nothing is shared."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "forms_of", lambda source, user: None)
        yield


@pytest.fixture
def quantised(monkeypatch):
    """The shapes of what was quantised, in order."""
    shapes = []
    for name in ("quantize", "quantize_both"):
        original = getattr(ops, name)

        def noted(x, *args, original=original, **kwargs):
            shapes.append(tuple(x.shape))
            return original(x, *args, **kwargs)

        monkeypatch.setattr(ops, name, noted)
    return shapes


def _steps(model, x, call=None):
    """Outputs and gradients of two steps; ``call`` in place of the model's own."""
    results = []
    for step in range(2):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        y = (call or model)(leaf * 1.0)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(step)).to(y))
        results += [y.detach(), leaf.grad, *(p.grad for p in model.parameters())]
    return results


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_the_same_bits_as_without_sharing(name, autocast, device):
    x = torch.randn(2, 17, 64, device=device) + 0.5
    models = [_projections(RECIPES[name], device) for _ in range(2)]
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
        shared = _steps(models[0], x)
        with _unshared():
            alone = _steps(models[1], x)
    assert all(same_bits(a, b) for a, b in zip(shared, alone, strict=True))


def test_three_projections_quantise_their_input_once(quantised, device):
    model = _projections(device=device)
    y = model(torch.randn(33, 64, device=device, requires_grad=True) * 1.0)
    assert quantised.count((33, 64)) == 1
    assert len(quantised) == 4  # and three weights
    y.sum().backward()
    assert len(quantised) == 7  # and three output gradients
    quantised.clear()
    with torch.no_grad():
        model(torch.randn(33, 64, device=device))
    assert quantised.count((33, 64)) == 1


@pytest.mark.parametrize("recipe", [RTN, RECIPES["chon"]], ids=lambda recipe: recipe.name)
def test_saved_activations_are_shared(recipe, device):
    """Also where each layer patches channels of its own, in the operand that is not saved."""
    saved = {}

    def note(x):
        storage = x.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return x

    model, x = _projections(recipe, device), torch.randn(1024, 64, device=device, requires_grad=True)
    x = x * 1.0
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        y = model(x)
    assert y.requires_grad
    total = sum(saved.values())
    weights = (48 + 32 + 32) * 64
    assert total < 0.6 * 1024 * 64 + weights  # one packed input, not three


def test_a_layer_that_runs_again_starts_anew(quantised, device):
    """Each forward pass quantises: a tensor may have been written to in ways that PyTorch does not count."""
    model = _projections(device=device)
    x = torch.randn(16, 64, device=device)
    first = model(x)
    x.data.copy_(-x)
    assert same_bits(model(x), -first)
    assert quantised.count((16, 64)) == 2


@pytest.mark.parametrize("change", ["in place", "through a view", "set data", "another object"])
def test_changed_inputs_are_quantised_anew(change, device):
    model = _projections(device=device)
    x = torch.randn(16, 64, device=device)
    model.q(x)
    y = x
    if change == "in place":
        x.neg_()
    elif change == "through a view":
        x[:8].neg_()
    elif change == "set data":
        x.data = torch.randn(16, 64, device=device)
    else:
        y = torch.randn(16, 64, device=device)
    actual = model.k(y)
    assert same_bits(actual, copy.deepcopy(model).k(y.clone()))


def test_what_differs_is_not_shared(quantised, device):
    """Recipes, dtypes under autocast, and passes that need the column form."""
    model = _projections(device=device)
    x = torch.randn(16, 64, device=device)
    set_recipe(model.k, get_recipe("nvfp4", forward_scale="four_over_six", last_blocks=0))
    model.q(x), model.k(x), model.v(x)
    assert quantised.count((16, 64)) == 3
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert same_bits(model.q(x), copy.deepcopy(model).q(x.clone()))
    with torch.no_grad():
        y = model.k(x)
    assert same_bits(y, copy.deepcopy(model).k(x.clone()))


def test_random_roundings_are_not_shared(quantised, device):
    recipe = get_recipe("nvfp4", last_blocks=0)
    lhs = dataclasses.replace(recipe.fprop.lhs, rounding="stochastic", scale_rule="unbiased")
    recipe = dataclasses.replace(recipe, fprop=dataclasses.replace(recipe.fprop, lhs=lhs))
    model = _projections(recipe, device)
    model(torch.randn(16, 64, device=device))
    assert quantised.count((16, 64)) == 3


def test_nothing_is_kept_alive(device):
    model = _projections(device=device)
    x = torch.randn(64, 64, device=device)
    alive = weakref.ref(x)
    with torch.no_grad():
        model(x)
    made = sharing._latest.forms._made
    assert made
    del x
    gc.collect()
    assert alive() is None
    assert not made


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_the_same(reentrant, device):
    x = torch.randn(33, 64, device=device)
    models = [_projections(RECIPES["nvfp4"], device) for _ in range(2)]
    with _unshared():
        plain = _steps(models[0], x)
    recomputed = _steps(models[1], x, lambda y: checkpoint(models[1], y, use_reentrant=reentrant))
    assert all(same_bits(a, b) for a, b in zip(recomputed, plain, strict=True))


def test_not_in_inference_mode_nor_under_modes(quantised, device):
    model = _projections(device=device)
    with torch.inference_mode():
        model(torch.randn(16, 64, device=device))
    assert quantised.count((16, 64)) == 3
    quantised.clear()
    with torch.no_grad(), _Watch() as watch:
        model(torch.randn(16, 64, device=device))
    assert [f.name() for f in watch.seen].count("lightning_fp4::quantize") == 6


def test_threads_do_not_share(quantised, device):
    model = _projections(device=device)
    x = torch.randn(16, 64, device=device)
    model.q(x)
    thread = threading.Thread(target=model.k, args=(x,))
    thread.start()
    thread.join()
    assert quantised.count((16, 64)) == 2


def test_layers_travel_without_what_was_shared(device):
    model = _projections(device=device)
    x = torch.randn(16, 64, device=device)
    expected = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same_bits(twin(x.clone()), expected)


def test_parameters_are_not_shared(device):
    """A fused optimizer writes to them without a trace."""
    model = _projections(device=device)
    prompt = nn.Parameter(torch.randn(16, 64, device=device))
    optimizer = torch.optim.AdamW([prompt], lr=0.1, fused=True)
    version = prompt._version
    model.k(prompt).sum().backward()  # one layer in this step, the other in the next
    optimizer.step()
    assert prompt._version == version
    assert same_bits(model.v(prompt), copy.deepcopy(model).v(prompt.detach().clone()))


def test_a_trace_has_no_constants_from_before(device):
    """What was quantised before ``torch.jit.trace``, of the example input by another layer, is not its result."""
    model = _projections(device=device).requires_grad_(False)
    x = torch.randn(16, 64, device=device)
    model.q(x)
    traced = torch.jit.trace(model.k, (x,), check_trace=False)
    other = torch.randn(16, 64, device=device)
    assert same_bits(traced(other), model.k(other))


@pytest.mark.gpu
def test_streams_do_not_share(quantised):
    model = _projections(device="cuda")
    x = torch.randn(16, 64, device="cuda")
    torch.cuda.synchronize()
    model.q(x)
    with torch.cuda.stream(torch.cuda.Stream()):
        model.k(x)
    torch.cuda.synchronize()
    assert quantised.count((16, 64)) == 2


@pytest.mark.gpu
def test_a_captured_graph_quantises_what_it_is_given():
    """Not what an eager pass before the capture made of the same buffer."""
    model = _projections(device="cuda").requires_grad_(False)
    x = torch.randn(16, 64, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        model(x)
        model.q(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        y = model.k(x)
    x.copy_(torch.randn(16, 64, device="cuda"))
    graph.replay()
    assert same_bits(y, model.k(x.clone()))
