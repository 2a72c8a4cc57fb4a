"""FP4 units: the layout of their scales, the call that they get, and layers on a float32 stand-in for that call."""

import logging
import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.functional import ScalingType, SwizzleType

from lightning_fp4 import (
    MXFP4,
    NVFP4,
    NVFP4_2D,
    NVFP4_ROW,
    FP4Precision,
    Gemm,
    Quantizer,
    Recipe,
    backends,
    blackwell,
    get_recipe,
    matmul,
    ops,
)
from lightning_fp4.tensor import FP4Operand, FP4Tensor
from tests.helpers import decode_codes, fp4_linear_layer, relative_error, run, same_bits, unpack
from tests.trainer_models import LanguageModel, messages, trainer

CHANNELS = torch.tensor([0, 1, 5, 17, 40, 63, 64, 79])
SCALED_MM = functional.scaled_mm
B200, RTX_5090, H200 = (10, 0), (12, 0), (9, 0)


# ---- the layout ------------------------------------------------------------------------------------------------------


def _place(row: int, column: int, columns: int) -> int:
    """Where cuBLAS looks for the scale of a row and a block: tiles of 128 x 4 row by row, 32 x 4 x 4 within a tile."""
    tile = row // 128 * -(-columns // 4) + column // 4
    return tile * 512 + (row % 32) * 16 + (row // 32 % 4) * 4 + column % 4


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu])
@pytest.mark.parametrize("shape", [(128, 4), (1, 1), (127, 3), (129, 5), (256, 8), (300, 17), (33, 4), (5, 0), (0, 5)])
def test_scales_lie_where_the_units_read_them(shape, dtype):
    rows, columns = shape
    scales = torch.randint(1, 127, shape, dtype=torch.uint8)
    swizzled = blackwell.swizzle(scales.view(dtype))
    assert swizzled.dtype is dtype
    assert swizzled.is_contiguous()
    flat = swizzled.view(torch.uint8).tolist()
    assert len(flat) == -(-rows // 128) * -(-columns // 4) * 512
    places = {_place(row, column, columns): (row, column) for row in range(rows) for column in range(columns)}
    for place, byte in enumerate(flat):
        assert byte == (scales[places[place]] if place in places else 0), place


# ---- the call --------------------------------------------------------------------------------------------------------


def _read_scales(swizzled: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    offsets = torch.tensor([[_place(row, column, columns) for column in range(columns)] for row in range(rows)])
    return swizzled.cpu().view(torch.uint8)[offsets].view(swizzled.dtype).float()


def _check_as_pytorch_does(*args, bias, output_dtype):
    """PyTorch's own function of shapes, on fake CUDA tensors of the same sizes, strides and dtypes."""

    def fake(x):
        if isinstance(x, list):
            return [fake(item) for item in x]
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") if torch.is_tensor(x) else x

    with FakeTensorMode():
        return SCALED_MM(*map(fake, args), bias=fake(bias), output_dtype=output_dtype).shape


class StandIn:
    """``scaled_mm`` for FP4: the checks of the real one, then a float32 product of what its arguments mean."""

    def __init__(self):
        self.calls = []

    def __call__(
        self, a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, *, bias=None, output_dtype=None
    ):
        self.calls.append((tuple(a.shape), tuple(b.shape), len(scale_a), bias is not None, output_dtype))
        block = {ScalingType.BlockWise1x16: 16, ScalingType.BlockWise1x32: 32}[recipe_a[0]]
        (m, k), n = a.shape, b.shape[1]
        k *= 2
        # The checks of ScaledBlas.cpp (torch 2.11 and 2.13), and 16-byte alignment for cuBLAS.
        assert recipe_a == recipe_b == [recipe_a[0], ScalingType.TensorWise][: len(scale_a)]
        assert swizzle_a == swizzle_b == [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE][: len(scale_a)]
        assert a.dtype is b.dtype is torch.float4_e2m1fn_x2
        assert a.stride() == (k // 2, 1)
        assert b.stride() == (1, k // 2)
        assert k % 32 == 0
        assert n % 16 == 0
        assert m * n * k
        assert all(x.data_ptr() % 16 == 0 for x in (a, b, scale_a[0], scale_b[0]))
        scale_dtype = torch.float8_e4m3fn if block == 16 else torch.float8_e8m0fnu
        for scales, rows in ((scale_a, m), (scale_b, n)):
            assert scales[0].dtype is scale_dtype
            assert scales[0].is_contiguous()
            assert scales[0].numel() == -(-rows // 128) * 128 * -(-(k // block) // 4) * 4
            assert all(x.dtype is torch.float32 and x.numel() == 1 for x in scales[1:])
        if bias is not None:
            assert output_dtype is bias.dtype
            assert output_dtype in (torch.bfloat16, torch.float16)
            assert bias.shape == (n,)
        if block == 32:  # a kernel that knows no other output and no bias
            assert output_dtype is torch.bfloat16
            assert bias is None
        # The shape function of PyTorch takes a row of MXFP4 for half as long as it is, which shows above 128 columns.
        if block == 16 or k <= 128:
            lists = (scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b)
            assert _check_as_pytorch_does(a, b, *lists, bias=bias, output_dtype=output_dtype) == (m, n)

        sides = []
        for codes, scales in ((a, scale_a), (b.T, scale_b)):
            values = decode_codes(unpack(codes.view(torch.uint8)))
            factors = _read_scales(scales[0], codes.shape[0], k // block).repeat_interleave(block, dim=1)
            sides.append((values * factors).to(a.device))
        out = sides[0] @ sides[1].T
        if len(scale_a) > 1:
            out = out * (scale_a[1] * scale_b[1])
        return (out if bias is None else out + bias.float()).to(output_dtype)


@pytest.fixture
def stand_in(monkeypatch):
    """A device with FP4 units, as far as this package can tell."""
    stand_in = StandIn()
    monkeypatch.setattr(functional, "scaled_mm", stand_in)
    monkeypatch.setattr(blackwell, "obstacle", lambda device, *formats: "nothing to ask" if None in formats else None)
    return stand_in


PAIRS = [(NVFP4, NVFP4), (NVFP4, NVFP4_2D), (NVFP4_ROW, NVFP4), (NVFP4_ROW, NVFP4_ROW), (NVFP4_2D, NVFP4_ROW)]
RULES = {NVFP4: "rne", NVFP4_2D: "four_over_six", NVFP4_ROW: "unbiased", MXFP4: "unbiased"}


@pytest.mark.parametrize("sizes", [(1, 16, 1), (33, 80, 48), (130, 172, 50), (128, 64, 144)], ids=str)
@pytest.mark.parametrize("formats", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def test_products_are_those_of_other_units(formats, sizes, stand_in, device):
    m, k, n = sizes
    a, b = (
        ops.quantize(torch.randn(rows, k, device=device) * 3, Quantizer(format=f, scale_rule=RULES[f]))
        for rows, f in zip((m, n), formats, strict=True)
    )
    largest_sum = float((ops.dequantize(a).abs() @ ops.dequantize(b).abs().T).max())
    biases = [None] + [torch.randn(n, device=device).to(dtype) for dtype in (torch.float32, torch.bfloat16)]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for bias in biases:
            out = ops.gemm(a, b, bias, dtype, "fp4")
            expected = ops.gemm(a, b, bias, dtype, "bf16" if device.type == "cuda" else "fp32")
            assert out.dtype is dtype
            assert out.is_contiguous()
            # Only the order of float32 sums differs, which may move a narrower result to its neighbour.
            rtol = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
            torch.testing.assert_close(out, expected, rtol=rtol, atol=1e-6 * largest_sum)
    # Tensor-wide factors go into the call, and with them a bias of the output's dtype; others multiply its result.
    inside = all(f.global_scale == "tensor" for f in formats) or (m, n) == (1, 1)
    assert {call[2] for call in stand_in.calls} == {2 if inside else 1}
    assert sum(call[3] for call in stand_in.calls) == (1 if inside else 0)
    expected_dtypes = {torch.float32, torch.bfloat16, torch.float16} if inside else {torch.float32}
    assert {call[4] for call in stand_in.calls} == expected_dtypes


@pytest.mark.parametrize("sizes", [(1, 32, 1), (33, 80, 48), (130, 172, 50), (128, 400, 144)], ids=str)
def test_mxfp4_costs_one_rounding_to_bfloat16(sizes, stand_in, device):
    m, k, n = sizes
    mxfp4 = Quantizer(format=MXFP4, scale_rule="unbiased")
    a, b = (ops.quantize(torch.randn(rows, k, device=device), mxfp4) for rows in (m, n))
    bias = torch.randn(n, device=device)
    exact = ops.gemm(a, b, None, torch.float32, "bf16" if device.type == "cuda" else "fp32")
    rounded = ops.gemm(a, b, None, torch.float32, "fp4")
    torch.testing.assert_close(rounded, exact, rtol=2**-8, atol=1e-5)
    assert same_bits(rounded, rounded.bfloat16().float())
    assert same_bits(ops.gemm(a, b, bias, torch.float32, "fp4"), rounded + bias)
    assert not backends.is_exact("fp4", mxfp4, mxfp4)
    assert backends.is_exact("fp4", Quantizer(), Quantizer(format=NVFP4_ROW))


@pytest.mark.parametrize("sizes", [(0, 32, 5), (3, 0, 5), (3, 32, 0)], ids=str)
@pytest.mark.parametrize("block_format", [NVFP4, NVFP4_ROW, MXFP4], ids=str)
def test_nothing_to_multiply(block_format, sizes, stand_in):
    m, k, n = sizes
    quantizer = Quantizer(format=block_format, scale_rule=RULES[block_format])
    a, b, bias = ops.quantize(torch.randn(m, k), quantizer), ops.quantize(torch.randn(n, k), quantizer), torch.randn(n)
    out = ops.gemm(a, b, bias, torch.bfloat16, "fp4")
    assert same_bits(out, bias.bfloat16().expand(m, n))
    assert not stand_in.calls


def test_zero_and_nan_go_through(stand_in):
    x = torch.randn(4, 32)
    zeros, nan = (
        ops.quantize(torch.zeros(3, 32), Quantizer()),
        ops.quantize(x.index_fill(0, torch.tensor([1]), float("nan")), Quantizer()),
    )
    assert same_bits(ops.gemm(zeros, ops.quantize(x, Quantizer()), None, torch.float32, "fp4"), torch.zeros(3, 4))
    assert ops.gemm(nan, ops.quantize(x, Quantizer()), None, torch.float32, "fp4").isnan().any()


def test_operator_is_registered_properly(stand_in, device):
    quantized = ops.quantize(torch.randn(17, 40, device=device), Quantizer(format=NVFP4_2D))
    storage = (quantized.codes, quantized.scales, quantized.amax, "nvfp4_2d", quantized.encoded_max)
    # The schema check multiplies its inputs, which float8 cannot.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for bias in (None, torch.randn(17, device=device)):
        arguments = (*storage, *storage, 40, bias, torch.bfloat16)
        torch.library.opcheck(torch.ops.lightning_fp4.multiply_packed.default, arguments, test_utils=checks)


# ---- layers ----------------------------------------------------------------------------------------------------------

RECIPES = {
    "nvfp4": {},
    "nvfp4 1x16": {"weight_2d": False, "hadamard": False},
    "four_over_six": {},
    "averis": {},
    "averis fp4": {"mean": "fp4"},
    "chon single": {"mode": "single"},
    "chon dual": {"mode": "dual"},
    "chon high_precision": {"mode": "high_precision"},
    "chon averis": {"averis": True},
}


def _recipe(name, units):
    plain = {"post_qk_protection": False} if name.startswith("chon") else {}
    return get_recipe(name.split()[0], last_blocks=0, units=units, **plain, **RECIPES[name])


def _run(recipe, dtype=torch.float32, sizes=(33, 80, 48), device="cpu"):
    tokens, k, n = sizes
    torch.manual_seed(0)
    layer = fp4_linear_layer(k, n, recipe, dtype=dtype, device=device)
    if recipe.fprop.hot_channels is not None:
        layer.fp4_hot_channels = CHANNELS.to(device)
    x, grad = torch.randn(tokens, k) + torch.randn(k), torch.randn(tokens, n) + torch.randn(n)
    x[:, CHANNELS % k] *= 5
    return run(layer, x.to(device, dtype), grad.to(device, dtype)), layer.fp4_gemm_paths


def _assert_close(actual, expected, dtype):
    # Only the order of float32 sums differs. In bfloat16 that rounds one to its neighbour, 2^-8 away, once in a while.
    tolerance = 1e-5 if dtype is torch.float32 else 1e-3
    for name, value in expected.items():
        assert relative_error(actual[name], value) < tolerance, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
def test_layers_give_what_other_units_give(name, dtype, stand_in, device):
    actual, paths = _run(_recipe(name, "fp4"), dtype, device=device)
    count = len(stand_in.calls)
    assert paths == dict.fromkeys(("fprop", "dgrad", "wgrad"), "fp4")
    assert count == (4 if name == "chon dual" else 3)
    patched = {"chon single": 80 + 2 * 16, "chon averis": 80 + 2 * 16}.get(name, 80)
    assert stand_in.calls[0][0] == (33, -(-patched // 32) * 16)
    expected, paths = _run(_recipe(name, "bf16"), dtype, device=device)
    assert set(paths.values()) == {"bf16" if device.type == "cuda" else "fp32"}
    assert len(stand_in.calls) == count
    _assert_close(actual, expected, dtype)


@pytest.mark.parametrize("sizes", [(1, 8, 5), (7, 172, 50), (130, 64, 129), (0, 32, 16)], ids=str)
def test_layers_of_odd_sizes(sizes, stand_in):
    actual, _ = _run(_recipe("nvfp4", "fp4"), sizes=sizes)
    expected, _ = _run(_recipe("nvfp4", "bf16"), sizes=sizes)
    if sizes[0] == 0:
        assert all(same_bits(actual[name], value) for name, value in expected.items())
    else:
        _assert_close(actual, expected, torch.float32)


def test_row_scaled_layer(stand_in):
    def recipe(units):
        row = Quantizer(format=NVFP4_ROW)
        gemm = Gemm(lhs=row, rhs=row, units=units)
        return Recipe(name="row_scaled", fprop=gemm, dgrad=gemm, wgrad=gemm)

    actual, paths = _run(recipe("fp4"))
    expected, _ = _run(recipe("bf16"))
    _assert_close(actual, expected, torch.float32)
    assert set(paths.values()) == {"fp4"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_layer(dtype, stand_in):
    actual, paths = _run(get_recipe("mxfp4", units="fp4"), dtype)
    expected, _ = _run(get_recipe("mxfp4", units="bf16"), dtype)
    assert set(paths.values()) == {"fp4 (one extra rounding)"}
    for name in ("y", "dx", "dw"):
        # Sums rounded to BF16: at most 2^-9 of each, on average a third of that or so.
        assert relative_error(actual[name], expected[name]) < 2**-9 + 1e-3 * (dtype is torch.bfloat16), name
    assert len(stand_in.calls) == 3


def test_a_fit_reports_them(stand_in, caplog):
    caplog.set_level(logging.INFO)
    fp4, model = FP4Precision({"name": "nvfp4", "units": "fp4"}), LanguageModel(blocks=3)
    trainer(fp4, max_steps=1, limit_val_batches=0).fit(model)
    assert any("GEMMs on cpu: fp4" in line for line in messages(caplog))
    assert fp4.report()["gemm_paths"] == {"fprop:fp4": 18, "dgrad:fp4": 18, "wgrad:fp4": 18}
    assert len(stand_in.calls) >= 3 * 18


def test_a_compiled_layer_gives_the_same(stand_in):
    x = torch.randn(33, 80)
    results = []
    for compiles in (False, True):
        layer = fp4_linear_layer(80, 48, _recipe("nvfp4", "fp4"))
        if compiles:
            layer.compile(backend="aot_eager", fullgraph=True)
        results.append(run(layer, x))
    assert len(stand_in.calls) == 6
    assert all(same_bits(results[1][name], value) for name, value in results[0].items())


@pytest.mark.parametrize("name", RECIPES)
def test_operands_stay_packed(name, stand_in, monkeypatch):
    monkeypatch.setattr(ops, "operand", lambda *_: pytest.fail("decoded"))
    original = ops.quantize_both
    forms = []

    def quantize_both(*args, **kwargs):
        forms.extend(original(*args, **kwargs))
        return forms[-2:]

    monkeypatch.setattr(ops, "quantize_both", quantize_both)
    _run(_recipe(name, "fp4"))
    assert len(forms) == 6
    assert all(isinstance(form, FP4Tensor) and not isinstance(form, FP4Operand) for form in forms)


# ---- the choice ------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    """Sets the compute capability of a CUDA device that need not be there."""

    def become(capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: capability)
        return torch.device("cuda")

    return become


@pytest.mark.parametrize("capability", [B200, (10, 3), RTX_5090])
def test_blackwell_takes_its_fp4_units_when_asked(capability, gpu):
    cuda = gpu(capability)
    for lhs, rhs in PAIRS:
        for rule in ("rne", "closed"):
            quantizers = (Quantizer(format=lhs, scale_rule=rule), Quantizer(format=rhs, scale_rule=rule))
            assert backends.gemm_path(cuda, *quantizers, "fp4") == "fp4"
            assert backends.gemm_path(cuda, *quantizers) != "fp4"
            assert backends.gemm_path(cuda, *quantizers, "bf16") == "bf16"
    assert backends.gemm_path(cuda, Quantizer(), Quantizer(), "fp8") == "fp8"
    assert matmul.describe(Gemm(lhs=Quantizer(), rhs=Quantizer(), units="fp4"), cuda) == "fp4"


def test_mxfp4_has_to_be_asked_for(gpu):
    mxfp4 = Quantizer(format=MXFP4, scale_rule="unbiased")
    for capability in (B200, RTX_5090):
        assert backends.gemm_path(gpu(capability), mxfp4, mxfp4) == "bf16"
    assert backends.gemm_path(gpu(B200), mxfp4, mxfp4, "fp4") == "fp4"
    with pytest.raises(ValueError, match=re.escape("mxfp4 on compute capability 10.x only, and cuda has 12.x. Use")):
        backends.gemm_path(gpu(RTX_5090), mxfp4, mxfp4, "fp4")


def test_other_devices_have_none(gpu):
    hopper = gpu(H200)
    assert backends.gemm_path(hopper, Quantizer(), Quantizer()) == "bf16"
    for device in (hopper, torch.device("cpu")):
        with pytest.raises(ValueError, match=rf"`units='fp4'`: {device} has no FP4 units.*Use units='auto'"):
            backends.gemm_path(device, Quantizer(), Quantizer(), "fp4")
    layer = fp4_linear_layer(32, 16, get_recipe("nvfp4", units="fp4"))
    with pytest.raises(ValueError, match="cpu has no FP4 units"):
        layer(torch.randn(4, 32))


def test_pytorch_without_the_call(gpu, monkeypatch):
    cuda = gpu(B200)
    monkeypatch.delattr(functional, "scaled_mm")
    assert "has no `torch.nn.functional.scaled_mm`" in blackwell.obstacle(cuda, NVFP4, NVFP4)
    assert backends.gemm_path(cuda, Quantizer(), Quantizer()) == "bf16"
    with pytest.raises(ValueError, match=r"no `torch.nn.functional.scaled_mm` for FP4\. Use units='auto'"):
        backends.gemm_path(cuda, Quantizer(), Quantizer(), "fp4")


def test_two_quantised_operands_are_needed(gpu):
    cuda = gpu(B200)
    for formats in ((NVFP4, None), (None, None), (NVFP4, MXFP4)):
        assert "two operands" in blackwell.obstacle(cuda, *formats)


# ---- the hardware ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(128, 256, 128), (33, 80, 48), (1, 172, 50), (1000, 4096, 512)], ids=str)
@pytest.mark.parametrize("formats", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def test_real_units(formats, sizes):
    """What a stand-in cannot show; skipped before Blackwell."""
    cuda = torch.device("cuda")
    if (reason := blackwell.obstacle(cuda, *formats)) is not None:
        pytest.skip(reason)
    m, k, n = sizes
    a, b = (
        ops.quantize(torch.randn(rows, k, device=cuda), Quantizer(format=f))
        for rows, f in zip((m, n), formats, strict=True)
    )
    bias = torch.randn(n, device=cuda).bfloat16()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for added in (None, bias):
            out, expected = (ops.gemm(a, b, added, dtype, units) for units in ("fp4", "bf16"))
            assert relative_error(out, expected) < {torch.float32: 1e-5}.get(dtype, 2e-3)
