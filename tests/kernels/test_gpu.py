"""The kernels on a GPU against the reference on the CPU, to the bit."""

import pytest
import torch

from lightning_fp4 import FP4Tensor, Gemm, Quantizer, Recipe, get_recipe, ops, reference
from lightning_fp4.formats import MXFP4, NVFP4, NVFP4_2D, NVFP4_ROW
from tests.helpers import (
    assert_same_codes,
    exact_units,
    fp4_linear_layer,
    golden_cases,
    relative_error,
    run,
    same_bits,
    unpack,
)

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

if torch.cuda.is_available():
    from lightning_fp4 import kernels
    from lightning_fp4.kernels import Form
    from tests.kernels.checks import (
        QUANTIZERS,
        check_both,
        check_decode,
        check_mean,
        check_patch,
        check_sums,
        check_times_matrix,
        expected_form,
        seed,
        wide,
    )
else:
    QUANTIZERS = []

CUDA = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float32, torch.float16]
GOLDENS = {
    "1d": Quantizer(format=NVFP4),
    "2d": Quantizer(format=NVFP4_2D),
    "row_scaled": Quantizer(format=NVFP4_ROW),
    "1d_rht": Quantizer(format=NVFP4),
    "4o6_mse256": Quantizer(format=NVFP4, scale_rule="four_over_six"),
    "mxfp4": Quantizer(format=MXFP4, scale_rule="unbiased"),
}
SIZES = [(64, 128, 256), (33, 17, 70), (1, 1, 1), (0, 16, 16), (16, 0, 16), (5, 3, 0), (100, 48, 1000)]
STOCHASTIC = Quantizer(rounding="stochastic", scale_rule="unbiased")


def test_the_kernels_are_used_unless_switched_off():
    assert ops.backend(CUDA) == "triton"
    ops.enable_kernels(False)
    try:
        assert ops.backend(CUDA) == "reference"
    finally:
        ops.enable_kernels()


@pytest.mark.parametrize("name", GOLDENS)
def test_goldens(name):
    quantizer = GOLDENS[name]
    for case in golden_cases(name).values():
        hadamard = 16 if name == "1d_rht" else None
        x = case["x"].to(CUDA)
        by_rows, by_columns = kernels.quantize_both(
            x, Form(quantizer=quantizer), Form(quantizer=quantizer), hadamard=hadamard
        )
        for form, quantized in (("row", by_rows), ("col", by_columns)):
            if f"{form}_data" not in case:
                continue
            assert_same_codes(unpack(quantized.codes), unpack(case[f"{form}_data"]))
            scale = case[f"{form}_scale"]
            if name == "mxfp4":
                assert same_bits(quantized.scales.cpu().float(), scale)
            else:
                rows = quantized.format.block[0]
                assert same_bits(quantized.scales.view(torch.uint8).cpu().repeat_interleave(rows, 0), scale)
                assert same_bits(quantized.amax.flatten().cpu(), case[f"{form}_amax"])
            if f"{form}_dq" in case:
                assert same_bits(kernels.dequantize(quantized).cpu(), case[f"{form}_dq"])


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("index", range(len(QUANTIZERS)), ids=[str(q) for q in QUANTIZERS])
def test_quantize(index, aligned):
    quantizer, block = QUANTIZERS[index], QUANTIZERS[index].format.block[1]
    shape = (300, 352) if aligned else (301, 331)
    check_both(wide(shape, DTYPES[index % 3]).to(CUDA), quantizer)
    check_both(wide(shape, DTYPES[(index + 1) % 3]).to(CUDA), quantizer, hadamard=block)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("units", [("fp8", None), ("fp8", "fp8"), ("bf16", "bf16")])
@pytest.mark.parametrize(
    "quantizer", [Quantizer(), Quantizer(format=NVFP4_2D, scale_rule="closed"), STOCHASTIC], ids=str
)
def test_decoded_at_once(quantizer, units, dtype):
    check_both(wide((300, 352), dtype).to(CUDA), quantizer, hadamard=16, units=units)


@pytest.mark.parametrize("index", range(0, len(QUANTIZERS), 3))
def test_decode(index):
    for shape in ((300, 352), (33, 70), (1, 1), (0, 16)):
        check_decode(wide(shape, torch.float32).to(CUDA), QUANTIZERS[index])


@pytest.mark.parametrize("tokens", [0, 1, 7, 15, 16, 17, 31, 33, 100, 127, 129])
def test_tokens(tokens):
    for quantizer in (Quantizer(), Quantizer(format=NVFP4_2D)):
        check_both(wide((tokens, 64), torch.bfloat16).to(CUDA), quantizer)
        check_both(wide((tokens, 64), torch.bfloat16).to(CUDA), STOCHASTIC, hadamard=16)


@pytest.mark.parametrize("features", [1, 8, 24, 172, 192, 576, 1000, 50257])
def test_features(features):
    for quantizer in (Quantizer(), Quantizer(format=NVFP4_2D)):
        check_both(wide((33, features), torch.bfloat16).to(CUDA), quantizer)


def test_strides():
    x = torch.randn(40, 96, device=CUDA).bfloat16()
    for view in (x.T, x[:, ::2], x[1:, 3:], x[:1].expand(20, 96), x[:, 16:48], x[:, 8:40], x[:1, :1].expand(32, 64)):
        check_both(view, Quantizer())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("block_format", [NVFP4, NVFP4_ROW, NVFP4_2D, MXFP4], ids=str)
def test_non_finite(block_format, bad):
    for dtype in DTYPES:
        x = torch.randn(33, 64, device=CUDA).to(dtype)
        x[3, 5] = bad
        for rounding in ("nearest", "stochastic"):
            quantizer = Quantizer(format=block_format, scale_rule="unbiased", rounding=rounding)
            check_both(x, quantizer)
            check_both(x, quantizer, units=("bf16", "fp8"))
        check_decode(x, Quantizer(format=block_format, scale_rule="unbiased"))


@pytest.mark.parametrize("scale", [0.0, 2.0**-149, 1e-40, 1e-30, 1e-12, 1e4, 1e30, 3e38])
def test_ranges(scale):
    for quantizer in (Quantizer(), STOCHASTIC, Quantizer(format=MXFP4, scale_rule="unbiased")):
        check_both(torch.linspace(-1, 1, 32 * 48).reshape(32, 48).to(CUDA) * scale, quantizer)


def test_poisoned_memory(poison):
    for shape in ((33, 70), (1, 33), (129, 48)):
        for units in ((None, None), ("fp8", "bf16")):
            check_both(torch.randn(shape, device=CUDA), Quantizer(format=NVFP4_2D), units=units)
        check_decode(torch.randn(shape, device=CUDA), Quantizer())
    assert poison


@pytest.mark.parametrize("shape", [(0, 5), (1, 7), (300, 70), (513, 3), (8, 0), (70000, 16), (4096, 1024)])
def test_means(shape):
    for dtype in DTYPES:
        check_mean((torch.randn(shape, device=CUDA) * torch.randn(shape[0], 1, device=CUDA).exp() ** 3).to(dtype))
    check_mean(torch.randn(shape, device=CUDA).T)
    assert not check_mean(torch.full(shape, -0.0, device=CUDA)).signbit().any()


@pytest.mark.parametrize("sizes", [(1, 1), (5, 300), (130, 4000), (1000, 576), (3, 0), (0, 3)])
def test_means_times_a_matrix(sizes):
    outs, length = sizes
    for dtype in DTYPES:
        for matrix in (torch.randn(outs, length, device=CUDA), torch.randn(length, outs, device=CUDA).T):
            check_times_matrix(torch.randn(1, length, device=CUDA), matrix.to(dtype))


@pytest.mark.parametrize("shape", [(19, 300), (256, 512), (0, 3)])
def test_outer_products(shape):
    product, left, right = torch.randn(shape), torch.randn(1, shape[0]), torch.randn(1, shape[1])
    for dtype in DTYPES:
        expected = reference.add_outer(product, left, right, 37, dtype)
        assert same_bits(kernels.add_outer(product.to(CUDA), left.to(CUDA), right.to(CUDA), 37, dtype).cpu(), expected)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("index", range(0, len(QUANTIZERS), 2), ids=[str(q) for q in QUANTIZERS[::2]])
def test_centred(index, aligned):
    quantizer, shape = QUANTIZERS[index], (256, 384) if aligned else (301, 331)
    x = (wide(shape, torch.float32) + 3 * torch.randn(shape[1])).to(DTYPES[index // 2 % 3]).to(CUDA)
    mean = check_mean(x)
    for hadamard in (None, quantizer.format.block[1]):
        check_both(x, quantizer, hadamard=hadamard, mean=mean)
        check_both(x, quantizer, hadamard=hadamard, units=("fp8", "bf16"), mean=mean)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("index", range(len(QUANTIZERS)), ids=[str(q) for q in QUANTIZERS])
def test_patched(index, aligned):
    quantizer, units = QUANTIZERS[index], ("bf16", "fp8")[index % 2]
    shape = (256, 384) if aligned else (301, 331)
    x = wide(shape, DTYPES[index % 3]).to(CUDA)
    channels = torch.randperm(shape[1], generator=torch.Generator().manual_seed(index))
    check_patch(x, quantizer, channels[: 96 if aligned else 37].sort().values, units)
    check_patch(x, quantizer, channels, units, kernels.token_mean(x))  # all of them, in any order


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("index", range(len(QUANTIZERS)), ids=[str(q) for q in QUANTIZERS])
def test_sums(index, aligned):
    shape = (256, 384) if aligned else (301, 331)
    x = torch.stack([wide(shape, torch.float32, seed=i) * 10.0**i for i in range(3)])
    x[1, :100] *= 1e-5  # blocks whose scale underflows
    check_sums(x.to(DTYPES[index % 3]).to(CUDA), QUANTIZERS[index])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("block_format", [NVFP4, NVFP4_ROW, NVFP4_2D, MXFP4], ids=str)
def test_sums_non_finite(block_format, bad):
    x = torch.randn(3, 18, 40)
    x[1, 3, 5] = bad
    check_sums(x.to(CUDA), Quantizer(format=block_format, scale_rule="unbiased"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize("block_format", [NVFP4, NVFP4_ROW, NVFP4_2D, MXFP4], ids=str)
def test_patched_non_finite(block_format, bad):
    x = torch.randn(33, 70) * (bad != 0)
    x[3, 5] = bad
    check_patch(x.to(CUDA), Quantizer(format=block_format, scale_rule="unbiased"), torch.arange(0, 70, 3))


@pytest.mark.parametrize("shape", [(0, 16), (1, 1), (129, 33)])
def test_patched_sizes(shape, poison):
    for quantizer in (Quantizer(), Quantizer(format=NVFP4_2D)):
        for count in {0, 1, shape[1]}:
            check_patch(torch.randn(shape, device=CUDA), quantizer, torch.arange(count))
    assert poison


@pytest.mark.slow
def test_more_than_two_to_the_31_elements():
    rows, columns = 524304, 4104
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device=CUDA)
    for chunk in x.split(65536):
        chunk.normal_()
    x[0, 0] = 50.0
    by_rows, by_columns = kernels.quantize_both(
        x, Form(quantizer=STOCHASTIC, stream=1), Form(quantizer=STOCHASTIC, stream=2), seed=seed(CUDA)
    )
    ends = torch.cat([x[:16], x[-16:]]).cpu()
    assert float(by_rows.amax) == 50.0
    groups = (columns + 8) // 16
    bits = reference.random_bytes(1, 16, seed(), 1)  # only to see that the first group is where it should be
    plain = reference.quantize(ends, Quantizer(scale_rule="unbiased"))
    assert torch.equal(by_rows.scales.view(torch.uint8)[-16:].cpu(), plain.scales.view(torch.uint8)[16:])
    turned = reference.quantize(ends.T, Quantizer(scale_rule="unbiased"))
    assert torch.equal(by_columns.scales.view(torch.uint8)[:, -1].cpu(), turned.scales.view(torch.uint8)[:, 1])
    first = reference.quantize(ends[:1, :16], STOCHASTIC, random_bits=bits)
    assert torch.equal(by_rows.codes[:1, :8].cpu(), first.codes)
    # Stochastic codes stay beside the value: within one step of the decoded one.
    decoded = reference.dequantize(
        FP4Tensor(
            codes=by_rows.codes[-16:].cpu(),
            scales=by_rows.scales.view(torch.uint8)[-16:].cpu().view(torch.float8_e4m3fn),
            amax=by_rows.amax.cpu(),
            encoded_max=by_rows.encoded_max,
            format=by_rows.format,
            shape=(16, columns),
        )
    )
    assert by_rows.codes.shape[1] == groups * 8
    assert 0.05 < relative_error(decoded, ends[16:]) < 0.25


# ---- products --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_on_bf16_units(sizes, dtype):
    m, n, k = sizes
    a, b = wide((m, k), torch.float32), wide((n, k), torch.float32, 1)
    bias = torch.randn(n)
    for f, g in ((NVFP4, NVFP4_2D), (NVFP4_ROW, NVFP4), (MXFP4, MXFP4)):
        rule = "unbiased"
        lhs, rhs = (Quantizer(format=h, scale_rule=rule) for h in (f, g))
        left, right = reference.dequantize(expected_form(a, lhs)), reference.dequantize(expected_form(b, rhs))
        expected = left.double() @ right.double().T + bias.double()
        bound = (k + 4) * 2**-24 * (left.abs().double() @ right.abs().double().T) + 1e-6
        for units in ("bf16", None):
            out = ops.gemm(
                ops.quantize(a.to(CUDA), lhs, units=units), ops.quantize(b.to(CUDA), rhs), bias.to(CUDA), dtype
            )
            rounding = torch.finfo(dtype).eps * (expected.abs() + bound)
            assert ((out.cpu().double() - expected).abs() <= bound + rounding).all()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("rule", ["closed", "closed_up", "closed_best", "rne", "four_over_six"])
def test_products_on_fp8_units(sizes, rule):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no FP8 units")
    m, n, k = sizes
    a, b = torch.randn(m, k), torch.randn(n, k)
    lhs, rhs = Quantizer(scale_rule=rule), Quantizer(format=NVFP4_2D, scale_rule=rule)
    host = [reference.operand(expected_form(x, q), "fp8") for x, q in ((a, lhs), (b, rhs))]
    expected = reference.multiply(*host)
    card = [ops.quantize(x.to(CUDA), q, units="fp8") for x, q in ((a, lhs), (b, rhs))]
    for bias in (None, torch.randn(n)):
        for dtype in (torch.float32, torch.bfloat16):
            for bias_dtype in (torch.float32, torch.bfloat16):
                added = None if bias is None else bias.to(bias_dtype)
                out = ops.gemm(card[0], card[1], None if added is None else added.to(CUDA), dtype)
                assert out.dtype is dtype
                wanted = expected if added is None else expected + added.float()
                # FP8 units keep about 14 bits of a sum before they add it to the float32 one.
                tolerance = torch.finfo(dtype).eps + 2e-4
                scale = host[0].values.float().abs() @ host[1].values.float().abs().T
                scale = scale * (host[0].factor * host[1].factor.T) + wanted.abs()
                assert ((out.cpu().float() - wanted).abs() <= tolerance * scale + 1e-7).all()
    if lhs.scale_rule.is_closed and m * n * k:
        left, right = (reference.dequantize(expected_form(x, q)).double() for x, q in ((a, lhs), (b, rhs)))
        assert relative_error(expected, left @ right.T) < 1e-6


def test_choice_of_units():
    closed, plain, exact = Quantizer(scale_rule="closed"), Quantizer(), exact_units(CUDA)
    has_fp8 = torch.cuda.get_device_capability() >= (8, 9)
    assert ops.gemm_path(CUDA, closed, closed) == ("fp8" if has_fp8 and exact == "bf16" else exact)
    assert ops.gemm_path(CUDA, closed, plain) == exact
    assert ops.gemm_path(CUDA, closed, closed, "bf16") == "bf16"
    if has_fp8:
        assert ops.gemm_path(CUDA, plain, plain, "fp8") == "fp8"


# ---- layers ----------------------------------------------------------------------------------------------------------


def _recipe(units, **options):
    return get_recipe("nvfp4", units=units, **options)


@pytest.mark.parametrize("sizes", [(37, 64, 48), (128, 256, 128), (1, 172, 64)], ids=str)
def test_layer_matches_the_cpu(sizes):
    tokens, k, n = sizes
    recipe = _recipe("auto", stochastic_rounding=False)
    x, grad = torch.randn(tokens, k), torch.randn(tokens, n)
    host = run(fp4_linear_layer(k, n, recipe), x, grad)
    card = run(fp4_linear_layer(k, n, recipe, device=CUDA), x.to(CUDA), grad.to(CUDA))
    for name, value in host.items():
        assert relative_error(card[name], value) < 2e-6, name


@pytest.mark.parametrize("units", ["auto", "fp8"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("averis", {}),
        ("averis", {"mean": "fp4"}),
        ("chon", {"mode": "single"}),
        ("chon", {"mode": "dual"}),
        ("chon", {"mode": "high_precision"}),
        ("chon", {"averis": True}),
    ],
    ids=str,
)
def test_centred_and_patched_layers_match_the_cpu(name, options, units):
    """Closed scales, so that all units multiply the same values."""
    options = {**options, "forward_scale": "closed", "gradient_scale": "closed_up", "stochastic_rounding": False}
    recipe = get_recipe(name, units=units, **options)
    layers = {"cpu": fp4_linear_layer(172, 64, recipe), "cuda": fp4_linear_layer(172, 64, recipe, device=CUDA)}
    x, grad = torch.randn(37, 172) + torch.randn(172), torch.randn(37, 64) + torch.randn(64)
    found = {}
    for device, layer in layers.items():
        if name == "chon":
            layer.fp4_hot_channels = torch.arange(0, 172, 7, device=device)
        found[device] = run(layer, x.to(device), grad.to(device))
    # Codes are equal to the bit, means included. FP8 units keep about 14 bits of a sum: an error of 2e-4 of the sum of
    # magnitudes (see above), which is at most the product of the norms of its two vectors, rotated or not.
    norms = {"x": x.norm(), "d": grad.norm(), "w": layers["cpu"].weight.detach().norm()}
    for key, operands in {"y": "xw", "dx": "dw", "dw": "dx"}.items():
        bound = 2e-4 * float(norms[operands[0]] * norms[operands[1]] / found["cpu"][key].norm())
        assert bound < 1e-2
        assert relative_error(found["cuda"][key], found["cpu"][key]) < bound, key
    assert relative_error(found["cuda"]["db"], found["cpu"]["db"]) < 1e-5


@pytest.mark.parametrize("units", ["auto", "fp8"])
@pytest.mark.parametrize("options", [{}, {"forward_scale": "closed", "gradient_scale": "closed_up"}], ids=str)
def test_layer_error_is_that_of_four_bits(units, options):
    layer = fp4_linear_layer(256, 128, _recipe(units, **options), device=CUDA, dtype=torch.bfloat16)
    x, grad = torch.randn(512, 256, device=CUDA).bfloat16(), torch.randn(512, 128, device=CUDA).bfloat16()
    found = run(layer, x, grad)
    plain = torch.nn.Linear(256, 128, device=CUDA)
    plain.load_state_dict(layer.state_dict())
    expected = run(plain, x.float(), grad.float())
    for name in ("y", "dx", "dw"):
        assert 0.05 < relative_error(found[name], expected[name]) < 0.3, name
    path = exact_units(CUDA)
    if units == "fp8" or (options and path == "bf16" and torch.cuda.get_device_capability() >= (8, 9)):
        path = "fp8" if options else "fp8 (one extra rounding)"
    assert layer.fp4_gemm_paths == {"fprop": path, "dgrad": path, "wgrad": path}


@pytest.mark.parametrize("name", ["nvfp4", "averis", "chon"])
def test_no_host_sync(name):
    layer = fp4_linear_layer(256, 128, get_recipe(name, units="fp8"), device=CUDA, dtype=torch.bfloat16)
    x = torch.randn(64, 256, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    layer(x).backward(torch.ones(64, 128, device=CUDA, dtype=torch.bfloat16))
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).backward(torch.ones(64, 128, device=CUDA, dtype=torch.bfloat16))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("units", ["bf16", "fp8"])
def test_graph_replays_draw_fresh_bits(units):
    layer = fp4_linear_layer(256, 128, _recipe(units), device=CUDA, dtype=torch.bfloat16, bias=False)
    x = torch.randn(64, 256, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(64, 128, device=CUDA, dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            x.grad = layer.weight.grad = None
            layer(x).backward(grad)
    torch.cuda.current_stream().wait_stream(side)
    x.grad = layer.weight.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(x).backward(grad)
    seen = []
    for _ in range(2):
        step = int(layer.fp4_rng_state[1])
        graph.replay()
        torch.cuda.synchronize()
        assert int(layer.fp4_rng_state[1]) == step + 1
        seen.append((x.grad.clone(), layer.weight.grad.clone()))
    assert not torch.equal(seen[0][0], seen[1][0])
    assert not torch.equal(seen[0][1], seen[1][1])
    layer.fp4_rng_state[1] -= 1
    graph.replay()
    assert torch.equal(x.grad, seen[1][0])  # the same step, the same bits


def test_recipes_with_one_side_in_high_precision():
    layer = fp4_linear_layer(64, 32, Recipe(name="half", fprop=Gemm(lhs=Quantizer())), device=CUDA)
    assert run(layer, torch.randn(16, 64, device=CUDA))["y"].isfinite().all()
