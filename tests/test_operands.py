"""Reading operands: the values are those that the layer multiplies, whatever wraps it."""

from __future__ import annotations

import contextlib
import copy

import numpy as np
import pytest
import scipy.stats
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_fp4 import Gemm, Quantizer, Recipe, backends, convert_to_fp4, fp4_layers, get_recipe, metrics, ops
from lightning_fp4.metrics import SQNR, FlushToZero, Saturation, ZeroScaleBlocks
from lightning_fp4.operands import OperandReader, sample_rows, tensor_statistics
from lightning_fp4.reference import quantize, tensor_sums

STOCHASTIC = Quantizer(rounding="stochastic", scale_rule="unbiased")
DGRAD = Gemm(lhs=STOCHASTIC, rhs=Quantizer())


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
            measures = {"sqnr": SQNR(), "flush_to_zero": FlushToZero(), "saturation": Saturation()}
            for name, metric in {**measures, "zero_scale_blocks": ZeroScaleBlocks()}.items():
                metric.update(matrix, quantize(matrix, quantizer))
                np.testing.assert_allclose(values[name], metric.compute(), rtol=1e-4, err_msg=str((key, name)))
        assert 10 < values["sqnr"] < 25


def test_statistics_of_any_matrix_are_those_of_the_metrics(device):
    """Those of the functions in ``metrics``; constant blocks, no whole block and huge means included."""
    x = torch.randn(37, 50, generator=torch.Generator().manual_seed(0))
    spotted = x.clone()
    spotted[:16, :16] = 0.1
    cases = [x, x + 1e4, spotted, torch.full_like(x, 0.1), torch.zeros_like(x), x * 1e-30, x * 1e30]
    for stack in (torch.stack(cases), torch.stack([case[:9] for case in cases])):
        sums, channels = ops.tensor_sums(stack.to(device), 4)
        found = tensor_statistics(sums.cpu(), [tuple(stack.shape[1:])] * len(stack), 4)
        magnitudes = stack.double().abs().mean(-2)
        top = magnitudes.topk(4).values.mean(-1)
        largest = stack.abs().amax((-2, -1), keepdim=True)  # taken out where float32 squares would overflow
        expected = [
            largest.flatten().double(),
            metrics.kurtosis(stack, (-2, -1)),
            metrics.block_kurtosis(stack).nanmean(-1),
            top / magnitudes.mean(-1).where(top != 0, 1.0),
            metrics.mean_share(
                stack.double() / stack.abs().amax((-2, -1), keepdim=True).where((top != 0)[:, None, None], 1.0)
            ),
        ]
        torch.testing.assert_close(found, torch.stack(expected, -1), rtol=1e-5, atol=1e-9, equal_nan=True)
        assert channels.shape == (len(stack), 4)


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


def test_readers_may_close_in_any_order():
    """As PrecisionMonitor's and FP4HealthCheck's do: the one that opens first closes first."""
    counter = CompileCounter()
    compiled = torch.compile(torch.nn.functional.relu, backend=counter)

    def compiles() -> bool:
        torch._dynamo.reset()
        before = counter.frame_count
        compiled(torch.ones(2))
        return counter.frame_count > before

    model = converted()
    first, second = OperandReader(model), OperandReader(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not compiles()
    second.__exit__(None, None, None)
    assert compiles()


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
    assert torch.equal(sample_rows(x, None), x)
    assert torch.equal(sample_rows(x[:40], 64), x[:40])
    turned = torch.arange(3.0 * 1000).reshape(3, 1000).T
    assert torch.equal(sample_rows(turned, 64)[:, 0].long(), torch.tensor(rows))
    assert sample_rows(x[:10], 8).shape == (10, 3)  # less than a block


def test_sampled_rows_are_a_copy_in_float32():
    for max_rows in (None, 16):
        x = torch.randn(48, 3).bfloat16()
        rows = sample_rows(x, max_rows)
        before = rows.clone()
        x.zero_()
        assert rows.dtype == torch.float32
        assert torch.equal(rows, before)
        assert rows.any()


def test_only_the_statistics_that_are_wanted():
    model = converted()
    with OperandReader(model, statistics=["saturation"]) as reader:
        model(torch.randn(32, 48)).sum().backward()
    with OperandReader(model, statistics=["amax", "sqnr"]) as both:
        model(torch.randn(32, 48)).sum().backward()
    assert all(set(s.values) == {"saturation"} and not s.top_channels for s in reader.collect())
    assert all(set(s.values) == {"amax", "sqnr"} and len(s.top_channels) == 16 for s in both.collect())


class Three(nn.Module):
    """Layers that are given the same input one after the other, the second recipe unlike the others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x, write=False):
        first = self.q_proj(x)
        if write:
            x.mul_(2)
        return first + self.k_proj(x) + self.v_proj(x)


def test_layers_with_one_input_share_what_was_measured(monkeypatch):
    stacks, sums = [], ops.tensor_sums
    monkeypatch.setattr(ops, "tensor_sums", lambda x, k: (stacks.append(len(x)), sums(x, k))[1])
    x = torch.randn(32, 32)
    model = convert_to_fp4(Three(), filter_fn=lambda module, name: True)
    expected = {}
    for name, layer in fp4_layers(model).items():
        with OperandReader(model, names=[name], operands=["input"]) as reader:
            layer(x)
        expected[name, "input"] = reader.collect()[0]
    stacks.clear()
    with OperandReader(model, operands=["input"]) as reader:
        model(x)
    assert by_key(reader) == expected
    assert stacks == [1]
    model.k_proj.fp4_recipe = copy.deepcopy(model.k_proj.fp4_recipe)  # an equal one
    with OperandReader(model, operands=["input"]) as reader:
        model(x)
    assert by_key(reader) == expected
    assert stacks == [1, 1]
    model.k_proj.fp4_recipe = get_recipe("mxfp4")
    with OperandReader(model, operands=["input"]) as reader:
        model(x)
    seen = by_key(reader)
    assert stacks == [1, 1, 2]
    assert seen["q_proj", "input"] == expected["q_proj", "input"]
    assert seen["v_proj", "input"] == expected["v_proj", "input"]
    assert seen["k_proj", "input"].values["sqnr"] != seen["q_proj", "input"].values["sqnr"]
    with OperandReader(model, operands=["input"]) as reader:
        model(x, write=True)
    seen = by_key(reader)
    assert seen["k_proj", "input"].values["amax"] == 2 * seen["q_proj", "input"].values["amax"]


def test_values_depend_on_no_other_layer():
    """Not on what is stacked with it: the tensor scale, and the random bits of stochastic rounding, are its own."""
    x = torch.randn(40, 48)
    found = []
    for names in (None, ["down_proj"]):
        model = converted(Recipe(name="sr", fprop=Gemm(lhs=Quantizer(), rhs=Quantizer()), dgrad=DGRAD, wgrad=None))
        with OperandReader(model, names=names) as reader:
            (1e3 * model(x)).square().sum().backward()
        found.append({key: s for key, s in by_key(reader).items() if key[0] == "down_proj"})
    assert found[0] == found[1]
    assert found[0]["down_proj", "grad_output"].values["sqnr"] > 5


def test_the_last_pass_counts():
    """Also where its shape is that of an earlier one, with another between."""
    model = converted()
    with OperandReader(model, operands=["input"]) as reader:
        for rows, scale in ((32, 1.0), (48, 2.0), (32, 3.0)):
            model(torch.full((rows, 48), scale))
    assert by_key(reader)["up_proj", "input"].values["amax"] == 3


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def operators_of_a_look(depth: int, **options) -> int:
    """Operators that reading a model takes beyond running it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(depth)))
    convert_to_fp4(model, filter_fn=lambda module, name: True, seed=0)
    x, counts = torch.randn(64, 32), []
    for reader in (None, OperandReader(model, max_rows=32, **options)):
        with _Count() as counter, reader or contextlib.nullcontext():
            model(x).sum().backward()
            if reader is not None:
                reader.collect()
        counts.append(counter.count)
    return counts[1] - counts[0]


def test_a_layer_more_costs_hardly_an_operator_more_than_its_copies():
    """Everything else is done for all layers together; on a GPU, operators are what a look costs."""
    few, many = (operators_of_a_look(depth) for depth in (4, 12))
    per_operand = (many - few) / (3 * 8)
    assert per_operand <= 1.5  # a copy; detach, unless it is a gradient; less what sharing saves
    assert few - 4 * 3 * per_operand < 75  # half of them on the CPU, in the end
    assert operators_of_a_look(4, statistics=["saturation"]) < few / 2


def test_the_statistics_of_a_stack_take_few_operators():
    with _Count() as counter:
        tensor_sums(torch.randn(3, 32, 32), 4)
    assert counter.count <= 40  # views included


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


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4", "four_over_six"])
def test_a_gpu_measures_what_the_reference_does(recipe):
    found = []
    for enabled in (True, False):
        backends.enable_kernels(enabled)
        try:
            model = converted(recipe).cuda()
            with torch.autocast("cuda", dtype=torch.bfloat16), OperandReader(model, max_rows=32) as reader:
                model(
                    torch.randn(2, 40, 48, generator=torch.Generator().manual_seed(1)).cuda()
                ).square().sum().backward()
            found.append(by_key(reader))
        finally:
            backends.enable_kernels()
    assert found[0].keys() == found[1].keys()
    for key, s in found[0].items():
        assert s.values == pytest.approx(found[1][key].values, rel=1e-5, nan_ok=True), key


class Modes(nn.Module):
    """Counts the function modes that are on while it runs, before and after a layer in four bits."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x, fails=False):
        self.seen = [torch._C._len_torch_function_stack()]
        self.q_proj.register_forward_hook(
            lambda *_: self.seen.append(torch._C._len_torch_function_stack()), prepend=True
        )
        q = self.q_proj(x)
        self.seen.append(torch._C._len_torch_function_stack())
        if fails:
            raise RuntimeError("on purpose")
        return self.o_proj(nn.functional.scaled_dot_product_attention(q, q, q))


def test_the_mode_is_on_in_attention_only_and_off_in_its_fp4_layers(monkeypatch):
    """Where a mode is on, operators go through the dispatcher and nothing is shared."""
    model = convert_to_fp4(nn.ModuleDict({"self_attn": Modes()}), filter_fn=lambda module, name: True)
    attention, x = model["self_attn"], torch.randn(2, 16, 32)
    with OperandReader(model, attention=True) as reader:
        attention(x)
        assert attention.seen == [1, 0, 1]
        assert torch._C._len_torch_function_stack() == 0
        with pytest.raises(RuntimeError, match="on purpose"):
            attention(x, fails=True)
        assert torch._C._len_torch_function_stack() == 0
    assert list(reader.attention_maxima()) == ["self_attn"]

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", interrupt)  # no hook is called
    with pytest.raises(KeyboardInterrupt), OperandReader(model, attention=True):
        attention(x)
    assert torch._C._len_torch_function_stack() == 0


def test_a_mode_of_the_model_within_attention_stays():
    class Within(Modes):
        def forward(self, x):
            with torch.device("cpu"):
                return super().forward(x)

    model = convert_to_fp4(nn.ModuleDict({"self_attn": Within()}), filter_fn=lambda module, name: True)
    with OperandReader(model, attention=True) as reader:
        model["self_attn"](torch.randn(2, 16, 32))
        assert model["self_attn"].seen == [2, 2, 2]
        assert torch._C._len_torch_function_stack() == 0
    assert list(reader.attention_maxima()) == ["self_attn"]


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


@pytest.mark.parametrize("shape", [(0, 16, 32), (2, 0, 32)])
@pytest.mark.parametrize("function", ["sdpa", "torch"])
def test_attention_without_tokens_has_no_maximum(function, shape):
    """As on a rank that got no samples: the model computes, so its reader may not fail."""
    model = nn.ModuleDict({"self_attn": SoftmaxAttention(function)})
    convert_to_fp4(model, filter_fn=lambda module, name: True)
    with OperandReader(model, attention=True) as reader:
        model["self_attn"](torch.randn(shape))
    assert reader.attention_maxima() == {}
    assert {operand for _, operand in by_key(reader)} == {"weight"}


def attend_nested(q, k):
    offsets = torch.tensor([0, 3, 16])
    q, k = (torch.nested.nested_tensor_from_jagged(x[0, :, None], offsets).transpose(1, 2) for x in (q, k))
    return nn.functional.scaled_dot_product_attention(q, k, k).transpose(1, 2).values()


def attend_mapped(q, k):
    return torch.vmap(lambda q, k: nn.functional.scaled_dot_product_attention(q, k, k))(q[:, None], k[:, None])


@pytest.mark.parametrize("attend", [attend_nested, attend_mapped])
def test_attention_that_cannot_be_read_is_left_alone(attend):
    class Attention(SoftmaxAttention):
        def forward(self, x):
            return attend(self.q_proj(x), self.k_proj(x))

    model = convert_to_fp4(nn.ModuleDict({"self_attn": Attention("")}), filter_fn=lambda module, name: True)
    x = torch.randn(2, 16, 32)
    expected = model["self_attn"](x)
    with OperandReader(model, attention=True) as reader:
        torch.testing.assert_close(model["self_attn"](x), expected)
    assert reader.attention_maxima() == {}


@pytest.mark.parametrize("autocast", [False, True])
def test_pre_softmax_maximum_under_other_modes(autocast, device):
    """With the mode of a default device below, and in half precision, which a kernel scores on a GPU."""
    model = nn.ModuleDict({"self_attn": SoftmaxAttention("sdpa")})
    convert_to_fp4(model, filter_fn=lambda module, name: True)
    model.to(device, torch.float32 if autocast else torch.bfloat16)
    x = torch.randn(2, 16, 32, device=device, dtype=torch.float32 if autocast else torch.bfloat16)
    reader, halved = OperandReader(model, attention=True), torch.autocast(device.type, torch.bfloat16, enabled=autocast)
    with torch.device(device), halved, reader:
        model["self_attn"](x)
    largest = model["self_attn"].scores.max().item()
    assert reader.attention_maxima() == {"self_attn": pytest.approx(largest, rel=2**-7)}
