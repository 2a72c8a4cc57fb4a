"""What the launchers launch compiles for every NVIDIA architecture from Ampere to Blackwell, without a GPU."""

import importlib

import pytest
import torch

from lightning_fp4 import MXFP4, NVFP4_2D, NVFP4_ROW, Quantizer, reference
from lightning_fp4.tensor import Patch

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from lightning_fp4.kernels._launch import Remembered  # noqa: E402

MODULES = {
    name: importlib.import_module(f"lightning_fp4.kernels.{name}")
    for name in (
        "amax",
        "quantize",
        "dequantize",
        "finish",
        "centering",
        "hot_channels",
        "seed",
        "statistics",
        "moments",
        "attention",
    )
}
TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.int32: "i32",
    torch.int64: "i64",
}
ARCHITECTURES = [80, 89, 90, 100, 120]


class _Recorder:
    """Stands in for a kernel and notes its launches."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.launches.append((self.kernel, arguments, options))


@pytest.fixture
def launches(monkeypatch):
    noted = []
    for module in MODULES.values():
        for kernel in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, kernel, _Recorder(getattr(module, kernel), noted))
        for check in ("check_device", "check_input"):
            if hasattr(module, check):
                monkeypatch.setattr(module, check, lambda *_: None)
        if hasattr(module, "_plans"):  # which hold the kernels themselves
            monkeypatch.setattr(module, "_plans", Remembered())
    monkeypatch.setattr(MODULES["quantize"], "_BLOCK_M", 64)
    monkeypatch.setattr(MODULES["quantize"], "_BLOCK_N", 32)
    return noted


def _compile(launch, architecture):
    kernel, arguments, options = launch
    names = kernel.arg_names
    signature, constants, attributes = {}, {}, {}
    for i, value in enumerate(arguments):
        if isinstance(value, torch.Tensor):
            signature[names[i]] = f"*{TYPES[value.dtype]}"
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif value == 1:
            signature[names[i]], constants[(i,)] = "constexpr", 1
        else:
            signature[names[i]] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    for name in names[len(arguments) :]:
        signature[name], constants[(names.index(name),)] = "constexpr", options[name]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", architecture, 32)
    names = ("num_warps", "maxnreg", "enable_fp_fusion")
    return triton.compile(source, target=target, options={name: options.get(name) for name in names})


def _launch_quantize(monkeypatch, architecture, dtype, rows, columns, hadamard, units, mean=None, patch=None):
    for name in ("quantize", "hot_channels"):
        monkeypatch.setattr(MODULES[name], "has_e4m3", lambda x: architecture >= 89)
    for name in ("amax", "quantize"):
        monkeypatch.setattr(MODULES[name], "has_early_launch", lambda x: architecture >= 90)
    form = MODULES["quantize"].Form
    MODULES["quantize"].quantize_both(
        torch.zeros(96, 64, dtype=dtype),
        rows and form(quantizer=rows, units=units[0], stream=1, patch=patch),
        columns and form(quantizer=columns, units=units[1], stream=2),
        hadamard=hadamard,
        seed=torch.tensor([1, 2]),
        mean=mean,
    )


RTN, SR = Quantizer(), Quantizer(rounding="stochastic", scale_rule="closed_up")
MXFP4_SR = Quantizer(format=MXFP4, scale_rule="unbiased", rounding="stochastic")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_training_kernels(architecture, launches, monkeypatch):
    """What the nvfp4 recipe launches for an input (forward) and an output gradient (backward), and around its GEMMs."""
    fp8 = "fp8" if architecture >= 89 else "bf16"
    _launch_quantize(monkeypatch, architecture, torch.bfloat16, RTN, RTN, 16, (fp8, None))
    monkeypatch.setattr(MODULES["dequantize"], "has_e4m3", lambda x: architecture >= 89)
    MODULES["dequantize"].operand(reference.quantize(torch.zeros(96, 64), RTN), fp8)
    MODULES["finish"].finish(torch.zeros(96, 64), torch.ones(1, 1), torch.ones(1, 1), torch.ones(64), torch.bfloat16)
    MODULES["seed"].draw_seed(torch.tensor([1, 2]))
    assert [launch[0].__name__ for launch in launches] == [
        "_amax_kernel",
        "_quantize_kernel",
        "_decode_kernel",
        "_finish_kernel",
        "_draw_kernel",
    ]
    for launch in launches:
        compiled = _compile(launch, architecture)
        assert compiled.asm["cubin"]
        if launch[0].__name__ == "_quantize_kernel":
            assert ("cvt.rn.satfinite.e4m3x2" in compiled.asm["ptx"]) is (architecture >= 89)
            assert ("griddepcontrol.wait" in compiled.asm["ptx"]) is (architecture >= 90)
            assert launch[2]["launch_pdl"] is (architecture >= 90)
        if launch[0].__name__ == "_amax_kernel":
            assert ("griddepcontrol.launch_dependents" in compiled.asm["ptx"]) is (architecture >= 90)


PATCH = Patch(channels=torch.arange(0, 64, 3), parts=("residual", "value"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_of_centring_and_hot_channels(architecture, launches, monkeypatch):
    """What chon launches for a weight, chon with centring for an input, and centring around the products."""
    fp8, centering, mean = "fp8" if architecture >= 89 else "bf16", MODULES["centering"], torch.zeros(1, 64)
    square = Quantizer(format=NVFP4_2D)
    centering.token_mean(torch.zeros(300, 64, dtype=torch.bfloat16))
    _launch_quantize(monkeypatch, architecture, torch.bfloat16, RTN, RTN, 16, (fp8, None), mean, PATCH)
    _launch_quantize(monkeypatch, architecture, torch.bfloat16, square, square, None, (fp8, None), None, PATCH)
    for matrix in (torch.zeros(96, 64, dtype=torch.bfloat16), torch.zeros(64, 96, dtype=torch.bfloat16).T):
        centering.times_matrix(mean, matrix)
    centering.add_outer(torch.zeros(96, 64), torch.zeros(1, 96), mean, 5, torch.bfloat16)
    quantised = ["_amax_kernel", "_quantize_kernel", "_patch_kernel"]
    assert [launch[0].__name__ for launch in launches] == [
        *2 * ["_sum_kernel"],
        *2 * quantised,
        *2 * ["_times_kernel"],
        "_outer_kernel",
    ]
    for launch in launches:
        assert _compile(launch, architecture).asm["cubin"]


@pytest.mark.parametrize(
    ("architecture", "quantizer"),
    [
        (80, Quantizer(format=NVFP4_ROW)),
        (90, RTN),
        (90, SR),
        (100, Quantizer(format=NVFP4_2D, scale_rule="four_over_six")),
        (120, Quantizer(format=MXFP4, scale_rule="unbiased")),
    ],
    ids=str,
)
def test_sums(quantizer, architecture, launches, monkeypatch):
    monkeypatch.setattr(MODULES["statistics"], "has_e4m3", lambda x: architecture >= 89)
    MODULES["statistics"].quantization_sums(torch.zeros(3, 96, 64), quantizer, seed=torch.tensor([1, 2]))
    (launch,) = launches
    assert _compile(launch, architecture).asm["cubin"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tensor_sums(architecture, launches):
    MODULES["moments"].tensor_sums(torch.zeros(3, 96, 64), 16)
    assert [launch[0].__name__ for launch in launches] == ["_channels_kernel", "_deviations_kernel"]
    for launch in launches:
        assert _compile(launch, architecture).asm["cubin"]


@pytest.mark.parametrize("length", [64, 80, 128, 256])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_scores(architecture, length, launches):
    """As models pass them, ``[batch, tokens, heads, length]`` transposed; in the memory that every architecture has."""
    is_causal, dtype = length != 80, torch.float16 if length == 128 else torch.bfloat16
    query, key = (torch.zeros(2, 160, heads, length, dtype=dtype).transpose(1, 2) for heads in (4, 2))
    MODULES["attention"].pre_softmax_max(query, key, is_causal=is_causal)
    (launch,) = launches
    compiled = _compile(launch, architecture)
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= 99 * 1024
    assert "max.NaN.f32" in compiled.asm["ptx"]
    assert "max.f32" not in compiled.asm["ptx"]  # which drops NaN
    assert ("wgmma.mma_async" in compiled.asm["ptx"]) is (architecture == 90)


@pytest.mark.parametrize("quantizer", [SR, Quantizer(scale_rule="four_over_six")], ids=str)
def test_other_patches(quantizer, launches, monkeypatch):
    for dtype in (torch.float16, torch.float32):
        _launch_quantize(monkeypatch, 80, dtype, quantizer, None, None, ("bf16", None), None, PATCH)
    for launch in launches:
        assert _compile(launch, 80).asm["cubin"]


CASES = [
    (90, torch.bfloat16, SR, SR, 16, ("fp8", "fp8")),
    (80, torch.bfloat16, SR, SR, 16, ("bf16", "bf16")),
    (120, torch.float16, Quantizer(format=NVFP4_2D, scale_rule="four_over_six"), None, None, (None, None)),
    (100, torch.float32, None, Quantizer(format=NVFP4_2D, scale_rule="closed_best"), None, (None, "bf16")),
    (80, torch.float32, Quantizer(format=NVFP4_ROW), Quantizer(format=NVFP4_ROW), 8, (None, None)),
    (
        89,
        torch.bfloat16,
        *(2 * [MXFP4_SR]),
        32,
        (None, "bf16"),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[f"sm_{case[0]}-{case[2] or case[3]}" for case in CASES])
def test_other_quantisers(case, launches, monkeypatch):
    _launch_quantize(monkeypatch, *case)
    for launch in launches:
        assert _compile(launch, case[0]).asm["cubin"]
