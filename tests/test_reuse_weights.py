"""Weights that are quantised once for each optimizer step, and never used when they are stale (T01, T09, T10)."""

import copy
import pickle
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

from lightning_fp4 import ops
from lightning_fp4.linear import FP4Linear, fp4_linear
from lightning_fp4.sharing import SharedForms, WeightForms, _state_of
from tests.helpers import RTN, fp4_linear_layer, same_bits
from tests.trainer_models import Regressor, assert_same_weights, layers_of, plugin, trainer


class DataWrites(torch.optim.Optimizer):
    """Writes in a way that PyTorch does not count, and asks for the loss twice in a step."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure):
        for _ in range(2):
            loss = closure()
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.copy_(p.data - 0.05 * p.grad)
        return loss


OPTIMIZERS = {
    "AdamW": partial(AdamW, lr=1e-2),
    "AdamW fused": partial(AdamW, lr=1e-2, fused=True),
    "AdamW foreach": partial(AdamW, lr=1e-2, foreach=True),
    "SGD fused": partial(SGD, lr=1e-1, fused=True),
    "data writes": DataWrites,
}


class Current(pl.Callback):
    """Compares every output of every layer with one computed from a fresh copy of its weight."""

    def __init__(self):
        self.outputs = self.stale = 0

    def on_sanity_check_start(self, trainer, pl_module):
        for layer in layers_of(pl_module).values():
            layer.register_forward_hook(self.compare)

    @torch.no_grad()
    def compare(self, layer, args, output):
        bias = None if layer.bias is None else layer.bias.clone()
        fresh = fp4_linear(args[0].clone(), layer.weight.clone(), bias, layer.fp4_recipe, layer.fp4_rng_state)
        self.outputs += 1
        self.stale += not same_bits(output, fresh)


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_forward_uses_the_current_weight(optimizer, average):
    """Two epochs with accumulation, the sanity check before and validation of averaged weights in the middle."""
    current = Current()
    callbacks = [current, *([EMAWeightAveraging(decay=0.9)] if average else [])]
    options = {"accumulate_grad_batches": 2, "val_check_interval": 3, "num_sanity_val_steps": 2, "callbacks": callbacks}
    model = Regressor(samples=64)
    model.configure_optimizers = lambda: OPTIMIZERS[optimizer](model.parameters())
    trainer(plugin(reuse_weights=True), max_epochs=2, **options).fit(model)
    assert current.outputs > 40
    assert current.stale == 0


@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_same_training_with_fewer_quantisations(accumulate, monkeypatch):
    counts = []
    models = [Regressor(samples=64) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    original = ops.quantize_both
    for model, reuse in zip(models, (False, True), strict=True):
        shapes = []

        def noted(x, *args, shapes=shapes, **kwargs):
            shapes.append(x.data_ptr())
            return original(x, *args, **kwargs)

        monkeypatch.setattr(ops, "quantize_both", noted)
        trainer(plugin(reuse_weights=reuse), accumulate_grad_batches=accumulate).fit(model)
        pointers = [layer.weight.data_ptr() for layer in layers_of(model).values() if layer.fp4_gemm_paths]
        counts.append(sum(shapes.count(pointer) for pointer in pointers))
        assert all(layer.fp4_weight_forms is None for layer in layers_of(model).values())
    assert_same_weights(*models)
    assert counts[0] == counts[1] * accumulate > 0


def _layer(device="cpu"):
    layer = fp4_linear_layer(64, 48, RTN, device=device)
    layer.fp4_weight_forms = WeightForms()
    return layer


@pytest.mark.parametrize(
    "change", ["in place", "data", "load", "assign", "dtype", "recipe", "other parameter", "no grad to grad"]
)
def test_changes_that_are_noticed_without_being_told(change):
    layer = _layer()
    x = torch.randn(16, 64)
    layer(x)
    state = {name: torch.randn_like(value) for name, value in layer.state_dict().items()}
    if change == "in place":
        with torch.no_grad():
            layer.weight.mul_(-2)
    elif change == "data":
        layer.weight.data = torch.randn(48, 64)
    elif change in ("load", "assign"):
        layer.load_state_dict(state, assign=change == "assign")
    elif change == "dtype":
        layer.bfloat16()
        x = x.bfloat16()
    elif change == "recipe":
        layer.fp4_recipe = RTN.in_high_precision("fprop")
    elif change == "other parameter":
        layer.weight = nn.Parameter(torch.randn(48, 64))
    else:
        with torch.no_grad():
            layer(x)
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    y.sum().backward()
    layer.fp4_weight_forms = None
    fresh = x.clone().requires_grad_()
    expected = layer(fresh)
    expected.sum().backward()
    assert same_bits(y, expected)
    assert same_bits(leaf.grad, fresh.grad)


def test_recomputation_takes_the_weight_that_is_kept(monkeypatch):
    layer = _layer()
    calls = []
    original = ops.quantize_both
    monkeypatch.setattr(ops, "quantize_both", lambda x, *a, **k: calls.append(tuple(x.shape)) or original(x, *a, **k))
    x = torch.randn(16, 64, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert calls.count((48, 64)) == 1
    assert calls.count((16, 64)) == 2


def test_inference_mode_between_training_steps():
    layer = _layer()
    x = torch.randn(16, 64)
    with torch.inference_mode():
        layer(x)
    leaf = x.clone().requires_grad_()
    layer(leaf).sum().backward()
    assert leaf.grad is not None
    with torch.inference_mode():
        y = layer(x)
    assert same_bits(y, layer(x))


def test_copies_keep_no_weights():
    """A callback may copy the model between two accumulated batches, and write to the copy as it likes."""
    layer = _layer()
    x = torch.randn(16, 64)
    layer(x)
    assert layer.fp4_weight_forms._forms is not None
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert isinstance(twin, FP4Linear)
        before = twin(x)
        twin.weight.data.neg_()
        twin.bias.data.neg_()
        assert same_bits(twin(x), -before)
        assert twin.fp4_weight_forms is None


def test_compiled_layers_are_compiled_once():
    """However often the plugin gives and takes what they have no use for."""
    layer, counter = _layer(), CompileCounter()
    compiled = torch.compile(layer, backend=counter)
    x = torch.randn(16, 64)
    for forms in (None, WeightForms(), None, WeightForms()):
        layer.fp4_weight_forms = forms
        compiled(x)
    assert counter.frame_count == 1


def test_a_parametrized_weight_is_computed_once():
    """Computing it may change it, as spectral normalisation does."""

    class Doubled(nn.Module):
        calls = 0

        def forward(self, weight):
            self.calls += 1
            return weight * 2

    layer, doubled = _layer(), Doubled()
    nn.utils.parametrize.register_parametrization(layer, "weight", doubled, unsafe=True)
    x = torch.randn(16, 64)
    y = layer(x)
    assert doubled.calls == 1
    layer.fp4_weight_forms = None
    assert same_bits(layer(x), y)


def test_another_thread_cannot_slip_its_weight_in():
    weight, other = torch.randn(48, 64), torch.randn(48, 64)

    class Raced(WeightForms):
        """Another thread writes whenever this one does."""

        @property
        def _forms(self):
            return SharedForms(other, _state_of(other))

        @_forms.setter
        def _forms(self, value):
            pass

    forms = Raced().of(weight)
    assert forms is not None
    assert forms.is_of(weight, _state_of(weight))


def test_not_in_manual_optimization():
    """Where the plugin may never hear of a step."""

    class Manual(Regressor):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.kept = []

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers(use_pl_optimizer=False)
            loss = super().training_step(batch, batch_idx)
            self.kept += [layer.fp4_weight_forms for layer in layers_of(self).values()]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    model = Manual()
    trainer(plugin(reuse_weights=True)).fit(model)
    assert model.kept
    assert set(model.kept) == {None}
