"""The kernels on a GPU against the reference on the CPU, to the bit.

Nearly all of the time compiles kernels. So the calls are few and each is checked with many matrices; ``cases`` says
which choices meet in them. Tests that use the same kernels are a group, which one process runs:
``pytest -m gpu -n 16 --dist loadgroup tests/kernels``.
"""

import contextlib

import pytest
import torch

from lightning_fp4 import FP4Tensor, Gemm, Quantizer, Recipe, backends, get_recipe, ops, reference
from lightning_fp4.formats import MXFP4, NVFP4, NVFP4_2D, NVFP4_ROW
from lightning_fp4.tensor import Patch
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
from tests.kernels.cases import BOTH, COLUMNS, DTYPES, LONGEST, PATCHED, QUANTIZERS, ROWS, matrices, wide

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

from lightning_fp4 import kernels  # noqa: E402
from lightning_fp4.kernels import Form  # noqa: E402
from tests.kernels.checks import (  # noqa: E402
    check_both,
    check_case,
    check_decode,
    check_mean,
    check_one,
    check_scores,
    check_sums,
    check_tensor_sums,
    check_times_matrix,
    expected_form,
    moved,
    seed,
)

CUDA = torch.device("cuda")
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


def _group(name):
    """Tests that use the same kernels, which one process compiles for all of them."""
    return pytest.mark.xdist_group(name)


@contextlib.contextmanager
def _told(name):
    """Say in a failed assertion with which matrix it failed."""
    try:
        yield
    except AssertionError as failure:
        raise AssertionError(f"with {name}: {failure}") from failure


def test_the_kernels_are_used_unless_switched_off():
    assert backends.backend(CUDA) == "triton"
    backends.enable_kernels(False)
    try:
        assert backends.backend(CUDA) == "reference"
    finally:
        backends.enable_kernels()


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


@pytest.mark.parametrize("case", [*PATCHED, *BOTH, *LONGEST, *COLUMNS, *ROWS], ids=str)
def test_quantize(case, poison):
    for name, x in matrices(case.layout, case.dtype).items():
        with _told(name):
            check_case(case, x.to(CUDA))
    assert poison


SHAPES = [
    *((tokens, 64) for tokens in (0, 1, 7, 15, 16, 17, 31, 33, 100, 127, 129)),
    *((33, features) for features in (1, 8, 24, 172, 192, 576, 1000, 50257)),
    *((1, 1), (1, 33)),
]


@pytest.mark.parametrize(
    ("quantizer", "hadamard"),
    [(Quantizer(), None), (Quantizer(format=NVFP4_2D), None), (STOCHASTIC, 16)],
    ids=str,
)
def test_sizes(quantizer, hadamard, poison):
    for shape in SHAPES:
        with _told(shape):
            check_both(wide(shape, torch.bfloat16).to(CUDA), quantizer, hadamard=hadamard)
    assert poison


def test_strides():
    x = torch.randn(40, 96, device=CUDA).bfloat16()
    for view in (x.T, x[:, ::2], x[1:, 3:], x[:1].expand(20, 96), x[:, 16:48], x[:, 8:40], x[:1, :1].expand(32, 64)):
        check_both(view, Quantizer())
    check_one(x, Quantizer(), hadamard=16)  # rotated along rows


@pytest.mark.parametrize("quantizer", [Quantizer(), Quantizer(format=NVFP4_2D)], ids=str)
def test_patched_sizes(quantizer, poison):
    for shape, count in (((0, 16), 16), ((1, 1), 1), ((129, 33), 33), ((129, 33), 1), ((129, 33), 0)):
        with _told(f"{count} of {shape}"):
            x, patch = torch.randn(shape), Patch(channels=torch.arange(count, device=CUDA), parts=("residual", "value"))
            check_both(x.to(CUDA), quantizer, units=("bf16", None), patch=patch)
    assert poison


DECODED = {(q.format, q.scale_rule.encoded_max): q for q in QUANTIZERS if q.rounding.value == "nearest"}


@pytest.mark.parametrize("quantizer", DECODED.values(), ids=str)
def test_decode(quantizer, poison):
    """All that decoding can tell of a quantiser is its format and the largest encoded value."""
    for shape in ((300, 352), (33, 70), (0, 16)):
        check_decode(wide(shape, torch.float32).to(CUDA), quantizer)
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = wide((33, 70), torch.float32)
        x[3, 5] = bad
        check_decode(x.to(CUDA), quantizer)
    assert poison


def test_decode_one_value(poison):
    for quantizer in (Quantizer(), Quantizer(format=NVFP4_2D)):
        check_decode(torch.randn(1, 1, device=CUDA), quantizer)
    assert poison


@_group("means")
@pytest.mark.parametrize("shape", [(0, 5), (1, 7), (300, 70), (513, 3), (8, 0), (70000, 16), (4096, 1024)])
def test_means(shape):
    for dtype in DTYPES:
        check_mean((torch.randn(shape, device=CUDA) * torch.randn(shape[0], 1, device=CUDA).exp() ** 3).to(dtype))
    check_mean(torch.randn(shape, device=CUDA).T)
    assert not check_mean(torch.full(shape, -0.0, device=CUDA)).signbit().any()


@_group("means times a matrix")
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


@pytest.mark.parametrize("index", range(len(QUANTIZERS)), ids=[str(q) for q in QUANTIZERS])
def test_sums(index):
    for shape in ((256, 384), (301, 331)):
        x = torch.stack([wide(shape, torch.float32, seed=i) * 10.0**i for i in range(3)])
        x[1, :100] *= 1e-5  # blocks whose scale underflows
        check_sums(x.to(DTYPES[index % 3]).to(CUDA), QUANTIZERS[index])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("block_format", [NVFP4, NVFP4_ROW, NVFP4_2D, MXFP4], ids=str)
def test_sums_non_finite(block_format, bad):
    x = torch.randn(3, 18, 40)
    x[1, 3, 5] = bad
    check_sums(x.to(CUDA), Quantizer(format=block_format, scale_rule="unbiased"))


@_group("tensor sums")
@pytest.mark.parametrize("shape", [(512, 512), (301, 331), (37, 5000), (70, 50), (9, 33), (16, 16), (1, 1)])
def test_tensor_sums(shape, poison):
    check_tensor_sums(shape, CUDA)
    assert poison


@_group("tensor sums")
@pytest.mark.slow
@pytest.mark.large
def test_tensor_sums_of_more_than_two_to_the_31_elements():
    """All is zero but the last block."""
    x, block = torch.zeros(2, 33008, 33008, device=CUDA), torch.randn(16, 16)
    x[1, -16:, -16:] = block.to(CUDA)
    sums, channels = (found.cpu() for found in kernels.tensor_sums(x, 16))
    expected, top = reference.tensor_sums(block[None], 16)
    assert not sums[0].any()
    torch.testing.assert_close(sums[1, [0, 1, 2, 7, 8]], expected[0, [0, 1, 2, 7, 8]], rtol=1e-6, atol=0)
    torch.testing.assert_close(sums[1, 3], expected[0, 3] * 256 / 33008**2, rtol=1e-12, atol=0)
    assert torch.equal(channels[1], top[0] + 33008 - 16)


SCORES = {
    "whole tiles": ((2, 4, 256, 64), (2, 4, 256, 64)),
    "ragged": ((2, 4, 301, 64), (2, 4, 299, 64)),
    "fewer keys": ((4, 300, 128), (4, 100, 128)),
    "more keys": ((4, 100, 128), (4, 300, 128)),
    "grouped": ((2, 6, 200, 80), (2, 2, 200, 80)),
    "broadcast": ((3, 2, 6, 70, 24), (2, 1, 70, 24)),
    "one head": ((1, 1, 70, 24), (3, 70, 24)),
    "matrices": ((150, 16), (150, 16)),
    "one value": ((1, 1), (1, 1)),
    "long": ((2, 2, 200, 256), (2, 1, 200, 256)),
    "nearly as long": ((2, 2, 200, 200), (2, 1, 200, 200)),
}


@pytest.mark.parametrize(
    "shapes", [pytest.param(shapes, marks=_group(f"scores, {name}")) for name, shapes in SCORES.items()], ids=[*SCORES]
)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores(dtype, is_causal, shapes, poison):
    query, key = (torch.randn(shape).to(CUDA, dtype) for shape in shapes)
    check_scores(query, key, is_causal=is_causal)
    check_scores(query, key, is_causal=is_causal, scale=-0.3)
    check_scores(query.abs(), -key.abs(), is_causal=is_causal)  # zeros of padding would be the largest
    assert poison


@_group("scores, strided")
@pytest.mark.parametrize("is_causal", [False, True])
def test_scores_of_strided_heads(is_causal):
    tokens = torch.randn(2, 150, 3 * 4, 64, device=CUDA).bfloat16().transpose(1, 2)
    query, key, _ = tokens.split(4, dim=1)
    check_scores(query, key, is_causal=is_causal)
    check_scores(query[..., ::2], key[..., 1::2], is_causal=is_causal)
    check_scores(query[..., 3:35], key[..., 5:37], is_causal=is_causal)  # not on multiples of 16 bytes
    check_scores(query, torch.randn(2, 4, 64, 90, device=CUDA).bfloat16().mT, is_causal=is_causal)
    check_scores(query, key[:1, :1].expand(2, 4, -1, -1), is_causal=is_causal)


@_group("scores, whole tiles")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_scores_that_are_no_numbers(bad):
    """In the first and the last tile, of queries and of keys, seen by some, by all and by none."""
    for place in (0, 127, 128, 255):
        for side in (0, 1):
            heads = torch.randn(1, 2, 256, 64), torch.randn(1, 2, 256, 64)
            heads[side][0, -1, place, 5] = bad
            query, key = (x.to(CUDA, torch.bfloat16) for x in heads)
            for is_causal in (False, True):
                check_scores(query, key, is_causal=is_causal)
                check_scores(query[:, :, :128], key, is_causal=is_causal)


@_group("scores, whole tiles")
def test_the_kernel_scores_unless_switched_off():
    query, key = (torch.randn(2, 4, 256, 64, device=CUDA).bfloat16() for _ in range(2))
    exact = kernels.pre_softmax_max(query, key)
    assert same_bits(ops.pre_softmax_max(query, key), exact)
    backends.enable_kernels(False)
    try:
        rounded = ops.pre_softmax_max(query, key)
    finally:
        backends.enable_kernels()
    assert same_bits(rounded, reference.pre_softmax_max(query, key))
    assert float(rounded) == pytest.approx(float(exact), rel=2**-8)


@pytest.mark.slow
@pytest.mark.large
def test_scores_of_keys_beyond_32_bits():
    key = torch.zeros(1, 1, 2**25 + 5, 64, dtype=torch.bfloat16, device=CUDA)
    key[..., -1, -1] = 3
    query = torch.ones(1, 1, 1, 64, dtype=torch.bfloat16, device=CUDA)
    assert kernels.pre_softmax_max(query, key, scale=1.0) == 3
    assert kernels.pre_softmax_max(key, query, scale=1.0) == 3
    assert kernels.pre_softmax_max(query, key.mT.contiguous().mT, scale=1.0) == 3


@pytest.mark.slow
@pytest.mark.large
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


@pytest.mark.slow
@pytest.mark.large
def test_rows_so_long_that_offsets_within_a_tile_exceed_32_bits():
    """All is zero but the first and the last two blocks of each row, which are those of a small matrix."""
    tokens, features = 33, 2**31 // 31 + 20
    assert features % 16 == 6
    ends = wide((tokens, 32 + 22), torch.bfloat16)
    x = torch.zeros(tokens, features, dtype=torch.bfloat16, device=CUDA)
    x[:, :32], x[:, -22:] = ends[:, :32].to(CUDA), ends[:, 32:].to(CUDA)

    def of_ends(long, last):
        return torch.cat([part.cpu().float() for part in (long[:, :32], long[:, -last:])], 1)

    mean, expected_mean = kernels.token_mean(x), reference.token_mean(ends)
    assert same_bits(of_ends(mean, 22), expected_mean)
    hot, parts = torch.tensor([0, 5, 31, 32, 53]), ("residual", "value")
    patch = Patch(channels=(hot + (hot >= 32) * (features - 54)).to(CUDA), parts=parts)
    by_rows, by_columns = kernels.quantize_both(
        x, Form(quantizer=Quantizer(), units="fp8", patch=patch), Form(quantizer=Quantizer()), hadamard=16, mean=mean
    )
    expected = expected_form(ends, Quantizer(), mean=expected_mean, patch=Patch(channels=hot, parts=parts))
    expected = reference.operand(expected, "fp8")
    assert same_bits(of_ends(by_rows.values, 32 + 2 * 16), expected.values.float())
    assert same_bits(by_rows.factor.cpu(), expected.factor)
    expected = expected_form(ends, Quantizer(), hadamard=16, transposed=True, mean=expected_mean)
    assert torch.equal(of_ends(by_columns.codes.T, 22), expected.codes.T.float())
    assert same_bits(of_ends(by_columns.scales.T, 22), expected.scales.T.float())
    assert same_bits(by_columns.amax.cpu(), expected.amax)


# ---- products --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("formats", [(NVFP4, NVFP4_2D), (NVFP4_ROW, NVFP4), (MXFP4, MXFP4)], ids=str)
def test_products_on_bf16_units(formats):
    for m, n, k in SIZES:
        a, b, bias = wide((m, k), torch.float32), wide((n, k), torch.float32, 1), torch.randn(n)
        lhs, rhs = (
            expected_form(x, Quantizer(format=f, scale_rule="unbiased")) for x, f in zip((a, b), formats, strict=True)
        )
        left, right = reference.dequantize(lhs), reference.dequantize(rhs)
        expected = left.double() @ right.double().T + bias.double()
        bound = (k + 4) * 2**-24 * (left.abs().double() @ right.abs().double().T) + 1e-6
        for operand in (lhs, reference.operand(lhs, "bf16")):  # packed, or decoded when it was quantised
            for dtype in (torch.float32, torch.bfloat16):
                out = ops.gemm(moved(operand, CUDA), moved(rhs, CUDA), bias.to(CUDA), dtype)
                rounding = torch.finfo(dtype).eps * (expected.abs() + bound)
                assert ((out.cpu().double() - expected).abs() <= bound + rounding).all()


@_group("products on FP8 units")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("rule", ["closed", "closed_up", "closed_best", "rne", "four_over_six"])
def test_products_on_fp8_units(sizes, rule):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no FP8 units")
    m, n, k = sizes
    a, b = torch.randn(m, k), torch.randn(n, k)
    lhs, rhs = Quantizer(scale_rule=rule), Quantizer(format=NVFP4_2D, scale_rule=rule)
    packed = [expected_form(x, q) for x, q in ((a, lhs), (b, rhs))]
    host = [reference.operand(form, "fp8") for form in packed]
    expected = reference.multiply(*host)
    card = [moved(operand, CUDA) for operand in host]
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
        left, right = (reference.dequantize(form).double() for form in packed)
        assert relative_error(expected, left @ right.T) < 1e-6


def test_choice_of_units():
    closed, plain, exact = Quantizer(scale_rule="closed"), Quantizer(), exact_units(CUDA)
    has_fp8 = torch.cuda.get_device_capability() >= (8, 9)
    assert backends.gemm_path(CUDA, closed, closed) == ("fp8" if has_fp8 and exact == "bf16" else exact)
    assert backends.gemm_path(CUDA, closed, plain) == exact
    assert backends.gemm_path(CUDA, closed, closed, "bf16") == "bf16"
    if has_fp8:
        assert backends.gemm_path(CUDA, plain, plain, "fp8") == "fp8"


# ---- layers ----------------------------------------------------------------------------------------------------------


def _recipe(units, **options):
    return get_recipe("nvfp4", units=units, **options)


@pytest.mark.parametrize("sizes", [(37, 64, 48), (128, 256, 128), (1, 172, 64)], ids=str)
def test_layer_matches_the_cpu(sizes):
    tokens, k, n = sizes
    recipe = _recipe("exact", stochastic_rounding=False)
    x, grad = torch.randn(tokens, k), torch.randn(tokens, n)
    host = run(fp4_linear_layer(k, n, recipe), x, grad)
    card = run(fp4_linear_layer(k, n, recipe, device=CUDA), x.to(CUDA), grad.to(CUDA))
    for name, value in host.items():
        assert relative_error(card[name], value) < 2e-6, name


@pytest.mark.parametrize("units", ["exact", "fp8"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("averis", {}, marks=_group("averis")),
        pytest.param("averis", {"mean": "fp4"}, marks=_group("averis")),
        pytest.param("chon", {"mode": "single"}, marks=_group("chon")),
        pytest.param("chon", {"averis": True}, marks=_group("chon")),
        pytest.param("chon", {"mode": "dual"}, marks=_group("chon, two patches")),
        pytest.param("chon", {"mode": "high_precision"}, marks=_group("chon, two patches")),
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


CLOSED = {"forward_scale": "closed", "gradient_scale": "closed_up"}


@pytest.mark.parametrize(
    ("units", "options"),
    [
        pytest.param("exact", {}, marks=_group("layers on bf16 units")),
        pytest.param("fp8", {}, marks=_group("layers on fp8 units")),
        pytest.param("exact", CLOSED, marks=_group("closed layers")),
        pytest.param("fp8", CLOSED, marks=_group("closed layers")),
    ],
    ids=str,
)
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


@pytest.mark.parametrize(
    "name", [pytest.param("nvfp4", marks=_group("layers on fp8 units")), "averis", "chon"], ids=str
)
def test_no_host_sync(name):
    layer = fp4_linear_layer(256, 128, get_recipe(name, units="fp8"), device=CUDA, dtype=torch.bfloat16)
    x = torch.randn(64, 256, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    layer(x).backward(torch.ones(64, 128, device=CUDA, dtype=torch.bfloat16))
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).backward(torch.ones(64, 128, device=CUDA, dtype=torch.bfloat16))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "units", [pytest.param(units, marks=_group(f"layers on {units} units")) for units in ("bf16", "fp8")]
)
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
