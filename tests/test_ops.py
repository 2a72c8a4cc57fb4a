"""The operators: registered properly, equal to the reference, untouched by autocast."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fp4 import MXFP4, NVFP4, NVFP4_2D, NVFP4_ROW, Quantizer, _operators, backends, ops, reference
from lightning_fp4.tensor import Patch
from tests.helpers import golden_cases, relative_error, same_bits, unpack

SEED = (12345, 7)
OPERATORS = (
    *("draw_seed", "quantize", "quantize_both", "dequantize", "operand", "multiply", "token_mean"),
    *("subtract_mean", "times_matrix", "add_outer"),
    *("patch_columns", "patch_values", "concatenate", "channel_scores", "select_channels", "quantization_sums"),
    *("tensor_sums", "pre_softmax_max"),
)
QUANTIZERS = [
    Quantizer(),
    Quantizer(format=NVFP4_2D),
    Quantizer(format=NVFP4_ROW, scale_rule="four_over_six"),
    Quantizer(format=MXFP4, scale_rule="unbiased", rounding="stochastic"),
    Quantizer(format=NVFP4, scale_rule="unbiased", rounding="stochastic"),
]


def _seed(device="cpu"):
    return torch.tensor(SEED, device=device)


def _call(x, quantizer, hadamard=0, transposed=False, stream=0):
    seed = _seed(x.device) if quantizer.rounding.value == "stochastic" else None
    names = (quantizer.format.name, quantizer.rounding.value, quantizer.scale_rule.value)
    return (x, *names, hadamard, transposed, seed, stream)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("hadamard", [0, 16])
@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
@pytest.mark.parametrize("shape", [(17, 40), (0, 16)])
def test_opcheck_quantize(shape, quantizer, hadamard, transposed, device):
    x = torch.randn(shape, device=device)
    torch.library.opcheck(torch.ops.lightning_fp4.quantize.default, _call(x, quantizer, hadamard, transposed))


def test_opcheck_the_others(device):
    x = ops.quantize(torch.randn(17, 40, device=device), Quantizer(format=NVFP4_2D))
    operators = torch.ops.lightning_fp4
    # The schema check multiplies its inputs, which float8 cannot.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for dtype in (torch.float32, torch.bfloat16):
        arguments = (x.codes, x.scales, x.amax, "nvfp4_2d", x.encoded_max, 17, 40, dtype)
        torch.library.opcheck(operators.dequantize.default, arguments, test_utils=checks)
        for units in ("fp32", "bf16", "fp8"):
            arguments = (x.codes, x.scales, x.amax, "nvfp4_2d", x.encoded_max, 17, 40, units)
            torch.library.opcheck(operators.operand.default, arguments, test_utils=checks)
            side = (ops.operand(x, units).values, ops.operand(x, units).factor)
            for bias in (None, torch.randn(17, device=device)):
                torch.library.opcheck(operators.multiply.default, (*side, *side, bias, dtype), test_utils=checks)
    for spec, seed in (("nvfp4_2d/nearest/rne", None), ("mxfp4/stochastic/unbiased", _seed(device))):
        arguments = (torch.randn(3, 17, 40, device=device), spec, seed)
        torch.library.opcheck(operators.quantization_sums.default, arguments)
    torch.library.opcheck(operators.tensor_sums.default, (torch.randn(3, 17, 40, device=device), 5))
    for dtype in (torch.float32, torch.bfloat16):
        query, key = (torch.randn(2, heads, 17, 8, device=device, dtype=dtype) for heads in (4, 2))
        torch.library.opcheck(operators.pre_softmax_max.default, (query, key, None, True))
    torch.library.opcheck(operators.draw_seed.default, (_seed(device),))
    plain = torch.randn(17, 40, device=device)
    torch.library.opcheck(operators.token_mean.default, (plain,))
    mean = ops.token_mean(plain)
    torch.library.opcheck(operators.subtract_mean.default, (plain, mean))
    torch.library.opcheck(operators.times_matrix.default, (mean, plain))
    left = torch.randn(1, 17, device=device)
    torch.library.opcheck(operators.add_outer.default, (plain, left, mean, 3, torch.bfloat16))


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("quantizer", [QUANTIZERS[0], QUANTIZERS[1], QUANTIZERS[-1]], ids=str)
@pytest.mark.parametrize("parts", [("residual", "value"), ("value",)])
def test_patched_operands_are_what_concatenating_gives(quantizer, parts, centred, device):
    x, channels = torch.randn(17, 40, device=device), torch.tensor([0, 3, 17, 39], device=device)
    mean = ops.token_mean(x) if centred else None
    rest = ops.subtract_mean(x, mean) if centred else x
    patch, seed = Patch(channels=channels, parts=parts), _seed(device)
    packed = ops.quantize(rest, quantizer, seed=seed, stream=2)
    expected = ops.operand(ops.concatenate(packed, ops.patch_columns(rest, packed, quantizer, patch)), "bf16")
    alone = ops.quantize(x, quantizer, seed=seed, stream=2, units="bf16", mean=mean, patch=patch)
    options = {"seed": seed, "streams": (2, 3), "units": ("bf16", None), "mean": mean, "patch": patch}
    first, second = ops.quantize_both(x, quantizer, quantizer, **options)
    for found in (alone, first):
        assert found.shape == expected.shape == (17, 48 + 16 * len(parts))
        assert same_bits(found.values, expected.values)
        assert same_bits(found.factor, expected.factor)
    turned = ops.quantize(rest, quantizer, transposed=True, seed=seed, stream=3)
    assert torch.equal(second.codes, turned.codes)
    names = (quantizer.format.name, quantizer.rounding.value, quantizer.scale_rule.value)
    arguments = (x, *names, 0, False, seed, 2, "bf16", mean, channels, "+".join(parts))
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic", "test_schema")
    torch.library.opcheck(torch.ops.lightning_fp4.quantize.default, arguments, test_utils=checks)
    spec = "/".join(names)
    arguments = (x, spec, spec, 0, seed, 2, 3, "bf16", "", mean, channels, "+".join(parts))
    torch.library.opcheck(torch.ops.lightning_fp4.quantize_both.default, arguments, test_utils=checks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_quantize_is_the_reference(quantizer, dtype, device):
    x = torch.randn(33, 48, device=device).to(dtype)
    for transposed in (False, True):
        for hadamard in (None, 16):
            seed = _seed(device)
            actual = ops.quantize(x, quantizer, hadamard=hadamard, transposed=transposed, seed=seed, stream=3)
            matrix = x.T if transposed else x
            matrix = reference.rotate(matrix, hadamard) if hadamard else matrix
            columns = actual.codes.shape[1] * 2
            bits = reference.random_bytes(matrix.shape[0], columns, seed, 3)
            expected = reference.quantize(matrix, quantizer, random_bits=bits)
            assert torch.equal(actual.codes, expected.codes)
            assert torch.equal(actual.scales.view(torch.uint8), expected.scales.view(torch.uint8))
            assert (actual.amax is None) is (expected.amax is None)
            assert actual.amax is None or torch.equal(actual.amax, expected.amax)
            assert actual.shape == ((48, 33) if transposed else (33, 48))
            assert actual.encoded_max == expected.encoded_max


@pytest.mark.gpu
@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_cuda_and_cpu_have_the_same_bits(quantizer):
    for case in golden_cases("1d").values():
        for hadamard in (None, 16):
            host, card = (
                ops.quantize(case["x"].to(d), quantizer, hadamard=hadamard, seed=_seed(d)) for d in ("cpu", "cuda")
            )
            assert torch.equal(host.codes, card.codes.cpu())
            assert torch.equal(host.scales.view(torch.uint8), card.scales.view(torch.uint8).cpu())
            assert same_bits(ops.dequantize(host), ops.dequantize(card).cpu())


def test_draw_seed_advances_in_place(device):
    state = _seed(device)
    assert ops.draw_seed(state).tolist() == [12345, 7]
    assert state.tolist() == [12345, 8]
    assert ops.draw_seed(state).tolist() == [12345, 8]


def test_stochastic_rounding_needs_a_seed():
    with pytest.raises(ValueError, match="needs a `seed`"):
        ops.quantize(torch.randn(4, 16), QUANTIZERS[-1])


def test_streams_differ(device):
    x = torch.randn(16, 64, device=device)
    codes = [ops.quantize(x, QUANTIZERS[-1], seed=_seed(device), stream=s).codes for s in (0, 1)]
    differing = (unpack(codes[0]) != unpack(codes[1])).float().mean()
    assert 0.1 < float(differing) < 0.6  # independent draws differ in 2p(1-p) of the values, a third on average


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype, device):
    x, w = torch.randn(32, 64, device=device), torch.randn(16, 64, device=device)

    def compute():
        a = ops.quantize(x, Quantizer(), hadamard=16)
        b = ops.quantize(w, Quantizer(), hadamard=16)
        return ops.gemm(a, b, None, torch.float32), ops.dequantize(a), a.codes

    expected = compute()
    with torch.autocast(device.type, dtype=dtype):
        actual = compute()
    for a, b in zip(actual, expected, strict=True):
        assert same_bits(a, b)


class _Watch(TorchDispatchMode):
    """Notes the operators that go by."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def _every_operator(x, w):
    """Results of all operators, by way of the functions that the package calls."""
    seed = _seed(x.device)
    a = ops.quantize(x, QUANTIZERS[-1], hadamard=16, seed=seed)
    square = Quantizer(format=NVFP4_2D)
    rows, columns = ops.quantize_both(w, square, square, units=("fp8", None))
    b = ops.quantize(w, square, hadamard=16)
    channels = ops.select_channels(ops.channel_scores(x, ops.quantize(x, square), w, b, "error"), 16)
    mean = ops.token_mean(x)
    rest, outer = ops.subtract_mean(x, mean), ops.add_outer(x, x[:, :1].T, mean, 3, torch.float32)
    patch = ops.patch_columns(w, b, square, Patch(channels=channels, parts=("residual", "value")))
    tensors = [a.codes, a.scales, a.amax, rows.values, rows.factor, columns.codes, columns.scales, columns.amax]
    tensors += [
        ops.draw_seed(seed),
        seed,
        ops.gemm(a, b, None, torch.float32),
        ops.dequantize(a),
        ops.quantization_sums(torch.stack([x, 3 * x]), QUANTIZERS[-1], seed=seed),
        *ops.tensor_sums(torch.stack([x, 3 * x]), 5),
        ops.pre_softmax_max(x, w, is_causal=True),
        channels,
        rest,
        outer,
    ]
    tensors += [*ops.patch_values(w, b, channels), ops.times_matrix(mean, w)]
    wide = ops.concatenate(b, patch)
    return [t.float() for t in (*tensors, patch.codes, patch.scales, wide.codes, wide.scales)]


@pytest.mark.parametrize("autocast", [False, True])
def test_bodies_called_directly_are_the_operators(autocast, device, monkeypatch):
    """In eager mode nothing goes through the dispatcher; a mode that watches sees the operators. The bits agree."""
    x, w = torch.randn(32, 64, device=device), torch.randn(48, 64, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
        with _Watch() as watch:
            expected = _every_operator(x, w)
        names = {func.name() for func in watch.seen if func.namespace == "lightning_fp4"}
        assert names == {f"lightning_fp4::{name}" for name in OPERATORS}
        for name in OPERATORS:
            refuse = lambda *args, name=name: pytest.fail(f"{name} went through the dispatcher")  # noqa: E731
            monkeypatch.setattr(getattr(_operators, name), "registered", refuse)
        actual = _every_operator(x, w)
        assert torch.is_autocast_enabled(device.type) is autocast
    assert all(same_bits(a, b) for a, b in zip(actual, expected, strict=True))


def test_autocast_comes_back_after_an_error(device):
    with torch.autocast(device.type, dtype=torch.bfloat16), torch.no_grad():
        with pytest.raises((RuntimeError, ValueError)):
            ops.times_matrix(torch.randn(1, 3, device=device), torch.randn(5, 4, device=device))
        assert torch.is_autocast_enabled(device.type)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_largest_score(is_causal, device):
    """Of any dtypes and sizes; under autocast of what attention multiplies then."""
    query, key = torch.randn(2, 4, 9, 320, device=device), torch.randn(2, 2, 9, 320, device=device)
    for length in (8, 320):
        q, k = query[..., :length], key[..., :length]
        expected = reference.pre_softmax_max(q.cpu().double(), k.cpu().double(), is_causal=is_causal)
        for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.03)):
            found = ops.pre_softmax_max(q.to(dtype), k.to(dtype), is_causal=is_causal)
            assert float(found) == pytest.approx(float(expected), rel=tolerance)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            found = ops.pre_softmax_max(q, k.bfloat16(), is_causal=is_causal)
        assert same_bits(found, ops.pre_softmax_max(q.bfloat16(), k.bfloat16(), is_causal=is_causal))
    with pytest.raises(RuntimeError, match="0 elements"):
        ops.pre_softmax_max(query[:, :, :0].bfloat16(), key.bfloat16(), is_causal=is_causal)
    assert ops.pre_softmax_max(query.to("meta"), key.to("meta"), is_causal=is_causal).shape == ()


def test_autograd_still_meets_the_operators(device):
    """None has a derivative of its own: what goes through them says so in backward, and is no constant."""
    x = torch.randn(4, 16, device=device, requires_grad=True)
    rest = ops.subtract_mean(x, ops.token_mean(x.detach()))
    assert rest.requires_grad
    with pytest.raises(RuntimeError, match="has no derivative"):
        rest.sum().backward()
    assert not ops.quantize(x.detach(), Quantizer()).amax.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gemm_rounds_once(dtype, device):
    a = ops.quantize(torch.randn(32, 64, device=device), Quantizer())
    b = ops.quantize(torch.randn(16, 64, device=device), Quantizer(format=NVFP4_2D))
    bias = torch.randn(16, device=device).to(dtype)
    assert same_bits(ops.gemm(a, b, bias, dtype), reference.gemm(a, b, bias).to(dtype))


def test_dequantize_dtype(device):
    quantized = ops.quantize(torch.randn(5, 40, device=device), Quantizer())
    full = ops.dequantize(quantized)
    assert full.shape == (5, 40)
    assert same_bits(ops.dequantize(quantized, torch.bfloat16), full.bfloat16())


def test_outputs_are_contiguous(device):
    """What the fake implementations promise to the compiler."""
    x = torch.randn(40, 33, device=device)
    for transposed in (False, True):
        for view in (x, x.T):
            quantized = ops.quantize(view, Quantizer(format=NVFP4_2D), transposed=transposed)
            assert all(t.is_contiguous() for t in (quantized.codes, quantized.scales, quantized.amax))


def test_meta_tensors_have_shapes():
    quantized = ops.quantize(torch.empty(17, 40, device="meta"), Quantizer())
    assert quantized.codes.is_meta
    assert quantized.codes.shape == (17, 24)
    assert ops.gemm(quantized, quantized, None, torch.bfloat16).shape == (17, 17)


def test_paths_by_device():
    assert backends.gemm_path(torch.device("cpu")) == "fp32"
    assert backends.gemm_path(torch.device("cuda")) == "bf16"
    assert backends.backend(torch.device("cpu")) == "reference"


def test_poisoned_memory_is_never_read(poison, device):
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        x = torch.randn(17, 40, device=device)
        quantized = ops.quantize(x, Quantizer(format=NVFP4_2D), hadamard=16, transposed=True)
        results.append(ops.dequantize(quantized).nan_to_num(1e9))
    assert torch.equal(*results)
    assert relative_error(results[0], reference.rotate(x.T, 16)[:, :17]) < 0.25
