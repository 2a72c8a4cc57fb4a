"""Reading operands: the values are those that the layer multiplies, whatever wraps it."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from lightning_fp4 import convert_to_fp4, fp4_layers
from lightning_fp4.metrics import SQNR, FlushToZero, Saturation, ZeroScaleBlocks
from lightning_fp4.operands import OperandReader, sample_rows
from lightning_fp4.reference import quantize


class MLP(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up_proj, self.down_proj = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down_proj(torch.relu(self.up_proj(x)))


def converted(recipe="nvfp4", **options):
    return convert_to_fp4(MLP(**options), recipe, filter_fn=lambda module, name: True, seed=0)


def by_key(reader):
    return {(s.layer, s.operand): s for s in reader.collect()}


def test_values_are_those_of_the_metrics():
    model, x = converted(), torch.randn(2, 40, 48, generator=torch.Generator().manual_seed(1))
    seen = {}
    model.down_proj.register_forward_pre_hook(lambda m, args: seen.update(x=args[0]))
    with OperandReader(model, max_rows=None, top_k=4) as reader:
        out = model(x)
        out.square().sum().backward()
    measured = by_key(reader)
    assert len(measured) == 6
    recipe = model.up_proj.fp4_recipe
    expected = {
        ("up_proj", "input"): (x, recipe.fprop.lhs),
        ("down_proj", "input"): (seen["x"], recipe.fprop.lhs),
        ("down_proj", "weight"): (model.down_proj.weight, recipe.fprop.rhs),
        ("down_proj", "grad_output"): (2 * out, None),
    }
    for key, (tensor, quantizer) in expected.items():
        matrix = tensor.detach().flatten(0, -2)
        a, values = matrix.numpy().astype(np.float64), measured[key].values
        assert values["amax"] == np.float32(np.abs(a).max())
        np.testing.assert_allclose(values["kurtosis"], scipy.stats.kurtosis(a.ravel()), rtol=1e-4)
        magnitudes = np.sort(np.abs(a).mean(0))
        np.testing.assert_allclose(values["top_channel_ratio"], magnitudes[-4:].mean() / magnitudes.mean(), rtol=1e-4)
        assert set(measured[key].top_channels) == set(np.argsort(np.abs(a).mean(0))[-4:])
        share = len(a) * np.square(a.mean(0)).sum() / np.square(a).sum()
        np.testing.assert_allclose(values["mean_share"], share, rtol=1e-4)
        if quantizer is not None:
            metrics = {"sqnr": SQNR(), "flush_to_zero": FlushToZero(), "saturation": Saturation()}
            for name, metric in {**metrics, "zero_scale_blocks": ZeroScaleBlocks()}.items():
                metric.update(matrix, quantize(matrix, quantizer))
                np.testing.assert_allclose(values[name], metric.compute(), rtol=1e-4, err_msg=str((key, name)))
        assert 10 < values["sqnr"] < 25


def test_hooks_are_gone_and_random_states_untouched_afterwards():
    model = converted()
    state = [layer.fp4_rng_state.clone() for layer in fp4_layers(model).values()]
    torch.manual_seed(3)
    global_state = torch.get_rng_state()
    with OperandReader(model, attention=True) as reader:
        model(torch.randn(32, 48, generator=torch.Generator().manual_seed(0)))
        reader.collect()
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert all(map(torch.equal, state, [layer.fp4_rng_state for layer in fp4_layers(model).values()]))
    assert torch.equal(global_state, torch.get_rng_state())


def test_layers_that_do_not_quantise_have_no_quantisation_statistics():
    with OperandReader(model := converted("high_precision")) as reader:
        model(torch.randn(32, 48)).sum().backward()
    assert all("sqnr" not in s.values and "amax" in s.values for s in reader.collect())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant):
    x = torch.randn(32, 48, requires_grad=True)
    results = []
    for wrapped in (False, True):
        model = converted()
        with OperandReader(model) as reader:
            out = checkpoint(model, x, use_reentrant=use_reentrant) if wrapped else model(x)
            out.square().sum().backward()
        results.append({key: s.values["amax"] for key, s in by_key(reader).items()})
    assert results[0] == results[1]


def test_compiled_models_are_read_too():
    model, counter = converted(), CompileCounter()
    compiled = torch.compile(model, backend=counter)
    x = torch.randn(32, 48)
    for _ in range(2):  # the layers' notes of their GEMM paths make the second call compile once more
        compiled(x)
    before = counter.frame_count
    assert before > 0
    for _ in range(2):
        with OperandReader(model) as reader:
            compiled(x).sum().backward()
        assert len(reader.collect()) == 6
        compiled(x)
    assert counter.frame_count == before  # nothing is compiled anew


def test_autocast_reads_what_is_quantised():
    model, x = converted(), torch.randn(32, 48)
    with torch.autocast("cpu", dtype=torch.bfloat16), OperandReader(model) as reader:
        model(x)
    assert by_key(reader)["up_proj", "input"].values["amax"] == x.bfloat16().abs().max().item()


def test_a_later_change_of_the_weight_is_not_seen():
    model = converted()
    expected = model.up_proj.weight.abs().max().item()
    with OperandReader(model, operands=["weight"]) as reader:
        model(torch.randn(4, 48))
    with torch.no_grad():
        model.up_proj.weight.mul_(3)
    assert by_key(reader)["up_proj", "weight"].values["amax"] == expected


def test_sampled_rows_are_whole_blocks_spread_over_the_matrix():
    x = torch.arange(1000.0)[:, None].expand(-1, 3)
    rows = sample_rows(x, 64)[:, 0].long().tolist()
    assert len(rows) == 64
    assert all(rows[i] % 16 == i % 16 for i in range(64))
    assert rows[-1] > 700
    assert sample_rows(x, None).shape == x.shape
    assert sample_rows(x[:40], 64).shape == (40, 3)


class SoftmaxAttention(nn.Module):
    """Attention written out, as models with attention biases do."""

    def __init__(self, function) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(32, 32), nn.Linear(32, 32)
        self.function = function

    def forward(self, x):
        scores = self.q_proj(x) @ self.k_proj(x).transpose(-1, -2)
        self.scores = scores.detach()
        if self.function == "sdpa":
            q, k = self.q_proj(x)[:, None], self.k_proj(x)[:, None]
            return nn.functional.scaled_dot_product_attention(q, k, q, scale=1.0)
        softmax = torch.softmax if self.function == "torch" else nn.functional.softmax
        return softmax(scores, dim=-1) @ x


@pytest.mark.parametrize("function", ["sdpa", "torch", "functional"])
def test_pre_softmax_maximum(function):
    model = nn.ModuleDict({"self_attn": SoftmaxAttention(function)})
    convert_to_fp4(model, filter_fn=lambda module, name: True)
    x = torch.randn(2, 16, 32)
    with OperandReader(model, attention=True) as reader:
        model["self_attn"](x)
        torch.softmax(x, dim=-1)  # outside attention: not counted
    maxima = reader.attention_maxima()
    assert list(maxima) == ["self_attn"]
    assert maxima["self_attn"] == pytest.approx(model["self_attn"].scores.max().item(), rel=1e-4)
