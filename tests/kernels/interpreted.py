"""The kernels in Triton's interpreter; ``test_interpreter.py`` runs this file in a process of its own."""

import pytest
import torch

from lightning_fp4 import MXFP4, NVFP4, NVFP4_2D, NVFP4_ROW, Quantizer, kernels, reference
from lightning_fp4.kernels import _random, attention
from lightning_fp4.reference.hadamard import _SIGNS
from lightning_fp4.tensor import Patch
from tests.kernels.cases import DTYPES, PARTS, QUANTIZERS, wide
from tests.kernels.checks import (
    check_both,
    check_decode,
    check_mean,
    check_one,
    check_patch,
    check_scores,
    check_sums,
    check_tensor_sums,
    check_times_matrix,
    seed,
)


@pytest.mark.parametrize("index", range(len(QUANTIZERS)), ids=[str(q) for q in QUANTIZERS])
def test_quantize(index):
    quantizer = QUANTIZERS[index]
    check_both(wide((33, 62), DTYPES[index % 3]), quantizer)
    block = quantizer.format.block[1]
    check_both(wide((40, 64), DTYPES[(index + 1) % 3]), quantizer, hadamard=block)


@pytest.mark.parametrize("units", [("bf16", "fp8"), ("fp8", "bf16"), ("fp8", None)])
@pytest.mark.parametrize(
    "quantizer",
    [Quantizer(), Quantizer(scale_rule="closed_up", rounding="stochastic"), Quantizer(format=NVFP4_2D), QUANTIZERS[-1]],
    ids=str,
)
def test_decoded_at_once(quantizer, units):
    check_both(wide((20, 48), torch.bfloat16), quantizer, hadamard=16, units=units)


@pytest.mark.parametrize("shape", [(0, 0), (0, 16), (16, 0), (1, 1), (1, 33), (17, 16), (65, 65)])
def test_sizes(shape):
    for quantizer in (Quantizer(), Quantizer(format=NVFP4_2D), Quantizer(format=MXFP4, scale_rule="unbiased")):
        check_both(torch.randn(shape), quantizer)
        check_decode(torch.randn(shape), quantizer)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("block_format", [NVFP4, NVFP4_ROW, NVFP4_2D, MXFP4], ids=str)
def test_non_finite(block_format, bad):
    x = torch.randn(33, 64)
    x[3, 5] = bad
    quantizer = Quantizer(format=block_format, scale_rule="unbiased")
    check_both(x, quantizer)
    check_both(x, quantizer, units=("bf16", "fp8"))
    check_decode(x, quantizer)


@pytest.mark.parametrize("scale", [0.0, 2.0**-149, 1e-40, 1e-30, 1e30, 3e38])
def test_ranges(scale):
    for quantizer in (Quantizer(), Quantizer(format=MXFP4, scale_rule="unbiased")):
        check_both(torch.linspace(-1, 1, 32 * 48).reshape(32, 48) * scale, quantizer)


def test_strides():
    x = torch.randn(40, 66).bfloat16()
    for view in (x.T, x[:, ::2], x[1:, 3:], x[:1].expand(20, 66), x[:, 2:34]):
        check_both(view, Quantizer())


@pytest.mark.parametrize("index", range(0, len(QUANTIZERS), 4))
def test_decode(index):
    check_decode(wide((33, 70), torch.float32), QUANTIZERS[index])


@pytest.mark.parametrize("hadamard", [2, 4, 8, 16, 32])
def test_rotations(hadamard):
    quantizer = Quantizer(format=MXFP4, scale_rule="unbiased")
    check_both(torch.randn(40, 34), quantizer, hadamard=hadamard)
    alone = kernels.quantize(torch.randn(40, 34), quantizer, hadamard=hadamard)  # rotated along rows
    assert alone.shape == (40, 34)


def test_finish():
    sums, bias = torch.randn(19, 300), torch.randn(300).bfloat16()
    for lhs, rhs in ((torch.rand(1, 1), torch.rand(300, 1)), (torch.rand(19, 1), torch.rand(1, 1)), (None, None)):
        expected = sums if lhs is None else sums * (lhs * rhs.T)
        assert torch.equal(kernels.finish(sums, lhs, rhs, None, torch.float32), expected)
        assert torch.equal(kernels.finish(sums, lhs, rhs, bias, torch.float32), expected + bias.float())


@pytest.mark.parametrize("shape", [(0, 5), (1, 7), (2, 64), (300, 70), (513, 3), (8, 0)])
def test_means(shape):
    for dtype in DTYPES:
        check_mean((torch.randn(shape) * torch.randn(shape[0], 1).exp() ** 3).to(dtype))
    check_mean(torch.randn(shape).T)
    assert not check_mean(torch.full(shape, -0.0)).signbit().any()


@pytest.mark.parametrize("sizes", [(1, 1), (5, 300), (130, 40), (3, 0), (0, 3)])
def test_means_times_a_matrix(sizes):
    outs, length = sizes
    for matrix in (torch.randn(outs, length).bfloat16(), torch.randn(length, outs).T):
        check_times_matrix(torch.randn(1, length), matrix)


def test_outer_products():
    product, left, right = torch.randn(19, 300), torch.randn(1, 19), torch.randn(1, 300)
    for dtype in (torch.float32, torch.float16):
        expected = reference.add_outer(product, left, right, 37, dtype)
        assert torch.equal(kernels.add_outer(product, left, right, 37, dtype), expected)


@pytest.mark.parametrize("index", range(0, len(QUANTIZERS), 5), ids=[str(q) for q in QUANTIZERS[::5]])
def test_centred(index):
    quantizer = QUANTIZERS[index]
    for shape, dtype in (((33, 70), DTYPES[index % 3]), ((40, 64), DTYPES[(index + 1) % 3])):
        x = (wide(shape, torch.float32) + 3 * torch.randn(shape[1])).to(dtype)
        mean = check_mean(x)
        check_both(x, quantizer, mean=mean)
        check_both(x, quantizer, hadamard=quantizer.format.block[1], units=("fp8", "bf16"), mean=mean)


HOT = torch.tensor([0, 1, 15, 16, 17, 31, 32, 40, 41, 42, 43, 44, 45, 46, 60, 61, 62, 63, 69, 5])


@pytest.mark.parametrize("index", range(0, len(QUANTIZERS), 2), ids=[str(q) for q in QUANTIZERS[::2]])
def test_patched(index):
    quantizer, units = QUANTIZERS[index], ("bf16", "fp8")[index // 2 % 2]
    choices = [PARTS[0], PARTS[1 + index // 2 % 3]]
    check_patch(wide((33, 70), DTYPES[index % 3]), quantizer, HOT, units, choices=choices)
    x = wide((17, 64), DTYPES[(index + 1) % 3])
    check_patch(x, quantizer, torch.arange(64), units, kernels.token_mean(x), [PARTS[index // 2 % 4]])


@pytest.mark.parametrize("shape", [(0, 16), (1, 1), (65, 33)])
def test_patched_sizes(shape):
    for quantizer in (Quantizer(), Quantizer(format=NVFP4_2D)):
        for count in {0, 1, shape[1]}:
            check_patch(torch.randn(shape), quantizer, torch.arange(count))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize(
    "quantizer",
    [
        Quantizer(scale_rule="four_over_six"),
        Quantizer(format=NVFP4_ROW, scale_rule="unbiased"),
        Quantizer(format=NVFP4_2D, scale_rule="four_over_six"),
        Quantizer(format=MXFP4, scale_rule="unbiased"),
    ],
    ids=str,
)
def test_patched_non_finite(quantizer, bad):
    """The channel itself, and those of its block, which are hot too, and finite."""
    x = torch.randn(33, 70) * (bad != 0)
    x[3, 5] = bad
    check_patch(x, quantizer, HOT)


@pytest.mark.parametrize("block_format", [NVFP4, NVFP4_2D], ids=str)
def test_patched_by_the_scales_that_were_chosen(block_format):
    """Of several candidates, in whole tiles and in others, centred and not, beside a column form."""
    quantizer = Quantizer(format=block_format, scale_rule="four_over_six")
    patch = Patch(channels=HOT, parts=("residual", "value"))
    for shape in ((64, 128), (33, 70)):
        x = (wide(shape, torch.float32) + 3 * torch.randn(shape[1])).bfloat16()
        for mean in (None, kernels.token_mean(x)):
            check_both(x, quantizer, units=("fp8", None), columns=Quantizer(), mean=mean, patch=patch)


def test_patched_strides():
    x, parts = torch.randn(40, 66).bfloat16(), ("residual", "value")
    for view in (x.T, x[:, ::2], x[1:, 3:], x[:1].expand(20, 66)):
        channels = torch.arange(0, view.shape[1], 2)[::2].flip(0)  # in any order, and themselves not contiguous
        for quantizer in (Quantizer(), Quantizer(format=NVFP4_2D, scale_rule="four_over_six")):
            check_one(view, quantizer, units="bf16", patch=Patch(channels=channels, parts=parts))


def stack(shape, dtype):
    """Matrices that share nothing: of other scales, one of them zero but for a large value in a corner."""
    x = torch.stack([wide(shape, torch.float32, seed=i) * 10.0**i for i in range(3)])
    x[1, : shape[0] // 2] *= 1e-5  # blocks whose scale underflows
    x[2] = 0
    x[2, -1, -1] = 7
    return x.to(dtype)


@pytest.mark.parametrize("index", range(0, len(QUANTIZERS), 2), ids=[str(q) for q in QUANTIZERS[::2]])
def test_sums(index):
    sums = check_sums(stack((33, 70), DTYPES[index % 3]), QUANTIZERS[index])
    if QUANTIZERS[index] == Quantizer():
        assert sums.any(0).all()  # there is something of each kind to count


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("block_format", [NVFP4, NVFP4_ROW, NVFP4_2D, MXFP4], ids=str)
def test_sums_non_finite(block_format, bad):
    x = torch.randn(3, 18, 40)
    x[1, 3, 5] = bad
    check_sums(x, Quantizer(format=block_format, scale_rule="unbiased"))


def test_sums_of_other_sizes():
    for shape in ((2, 64, 64), (1, 1, 1), (2, 3, 130)):
        check_sums(torch.randn(shape).transpose(1, 2), Quantizer())
    assert kernels.quantization_sums(torch.randn(0, 4, 16), Quantizer()).shape == (0, 6)
    assert not kernels.quantization_sums(torch.randn(2, 0, 16), Quantizer()).any()


@pytest.mark.parametrize("shape", [(70, 50), (9, 33), (16, 16), (1, 1)])
def test_tensor_sums(shape, poison):
    check_tensor_sums(shape, "cpu")
    assert poison


def test_tensor_sums_of_many_strips_and_of_nothing(monkeypatch):
    monkeypatch.setattr("lightning_fp4.kernels.moments._SPAN", 2)  # strips that a program adds at a time
    check_tensor_sums((17, 150), "cpu", count=2)
    assert [found.shape for found in kernels.tensor_sums(torch.randn(0, 4, 16), 5)] == [(0, 9), (0, 5)]
    for x in (torch.randn(2, 0, 16), torch.randn(2, 16), torch.randn(2, 3, 16).double()):
        with pytest.raises(ValueError, match="not empty"):
            kernels.tensor_sums(x, 5)


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(attention, "_tile", lambda block_d: (16, 2, 4))


# The interpreter multiplies the bits of bfloat16 as if they were integers.
SCORES = [((2, 4, 33, 20), (2, 2, 40, 20)), ((3, 17, 16), (3, 7, 16)), ((16, 3), (50, 3)), ((1, 1, 8), (2, 3, 1, 8))]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shapes", SCORES, ids=str)
def test_scores(shapes, is_causal, small_tiles):
    query, key = (torch.randn(shape).half() for shape in shapes)
    check_scores(query, key, is_causal=is_causal)
    check_scores(query, key, is_causal=is_causal, scale=-0.3)
    check_scores(query.abs(), -key.abs(), is_causal=is_causal)  # zeros of padding would be the largest


def test_scores_of_strided_heads(small_tiles):
    query = torch.randn(20, 2, 3, 1, 12).half().permute(1, 3, 2, 0, 4)  # [2, 1, 3, 20, 12]
    key = torch.randn(2, 3, 12, 19).half().transpose(-1, -2)  # [2, 3, 19, 12], broadcast to [2, 2, 3, 19, 12]
    check_scores(query, key, is_causal=True)
    check_scores(query[..., ::2], key[..., 1::2])
    check_scores(query[:, 0, :1], key[:1, :1].expand(2, 3, -1, -1))


def test_the_largest_score_in_each_place(small_tiles):
    """One key at a time is large, and one query at a time is not zero."""
    for i, j in ((0, 0), (0, 1), (15, 15), (15, 16), (16, 15), (16, 16), (36, 36), (36, 35), (35, 36), (36, 2)):
        query, key = torch.zeros(1, 37, 16).half(), torch.ones(1, 37, 16).half()
        query[0, i], key[0, j] = 1, 4
        for is_causal in (False, True):
            found = check_scores(query, key, is_causal=is_causal, scale=1.0)
            assert found == (64 if j <= i or not is_causal else 16)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_scores_that_are_no_numbers(bad, small_tiles):
    """In the first and the last tile, of queries and of keys, seen by some, by all and by none."""
    for side, place in ((0, 0), (0, 19), (1, 0), (1, 17), (1, 36)):
        heads = torch.randn(20, 16).half(), torch.randn(37, 16).half()
        heads[side][place, 5] = bad
        for is_causal in (False, True):
            check_scores(*heads, is_causal=is_causal)


def test_signs_are_the_references():
    mask = _random.NEGATIVE_SIGNS.value
    assert tuple(-1 if mask >> i & 1 else 1 for i in range(32)) == _SIGNS


def test_rotated_zeros_keep_their_signs():
    """Triton 3.6 subtracts from zero for a minus: one negative zero beside the zeros of a ragged end shows it."""
    x = torch.randn(17, 16).bfloat16()
    x[16] = torch.where(torch.arange(16) % 3 > 0, -0.0, 0.0)
    check_both(x, Quantizer(), hadamard=16)


@pytest.mark.parametrize("rows", ["tensor", "row", None])
@pytest.mark.parametrize("columns", ["tensor", "row"])
@pytest.mark.parametrize("hadamard", [None, 16])
def test_maxima_begin_at_multiples_of_16_bytes(rows, columns, hadamard):
    """As compilers ask of an operator's results."""
    for maxima in kernels.amax(torch.randn(33, 21), rows, columns, hadamard):
        assert maxima is None or maxima.storage_offset() % 4 == 0


def test_launchers_state_what_they_assume():
    with pytest.raises(ValueError, match="matrices"):
        kernels.quantize(torch.randn(2, 3, 4), Quantizer())
    with pytest.raises(ValueError, match="matrices"):
        kernels.quantize(torch.randn(2, 16).double(), Quantizer())
    with pytest.raises(ValueError, match="seed"):
        kernels.quantize(torch.randn(2, 16), Quantizer(rounding="stochastic", scale_rule="unbiased"))
    with pytest.raises(ValueError, match="longer than the blocks"):
        kernels.quantize(torch.randn(2, 32), Quantizer(), hadamard=32)
    with pytest.raises(ValueError, match="must be one of"):
        kernels.quantize(torch.randn(2, 32), Quantizer(), hadamard=3)
    with pytest.raises(ValueError, match="'bf16' or 'fp8'"):
        kernels.operand(reference.quantize(torch.randn(2, 32), Quantizer()), "fp32")
    patch = Patch(channels=torch.arange(3), parts=("value",))
    with pytest.raises(ValueError, match="decoded row form"):
        kernels.quantize(torch.randn(2, 32), Quantizer(), patch=patch)
    with pytest.raises(ValueError, match="stack of matrices"):
        kernels.quantization_sums(torch.randn(2, 16), Quantizer())
    with pytest.raises(ValueError, match="seed"):
        kernels.quantization_sums(torch.randn(1, 2, 16), Quantizer(rounding="stochastic", scale_rule="unbiased"))
    with pytest.raises(ValueError, match="float32 mean"):
        kernels.times_matrix(torch.randn(1, 3), torch.randn(2, 4))
    with pytest.raises(ValueError, match="contiguous float32"):
        kernels.add_outer(torch.randn(3, 2).T, torch.randn(1, 2), torch.randn(1, 3), 1, torch.float32)
    heads = torch.randn(1, 4, 5, 8).half()
    for query, key in ((heads.float(), heads), (heads, heads[..., :4]), (heads[:, :, :0], heads)):
        with pytest.raises(ValueError, match="heads of 1 to 256 values"):
            kernels.pre_softmax_max(query, key)
    with pytest.raises(ValueError, match="heads of 1 to 256 values"):
        kernels.pre_softmax_max(*2 * [torch.ones(1, 1, 257).half()])
    with pytest.raises(ValueError, match="3 heads of keys cannot serve 4 heads"):
        kernels.pre_softmax_max(heads, heads[:, :3])
    with pytest.raises(ValueError, match="both operands"):
        kernels.finish(torch.randn(2, 2), torch.rand(1, 1), None, None, torch.float32)


def test_stream_and_step_change_the_bits():
    quantizer = Quantizer(rounding="stochastic", scale_rule="unbiased")
    x = torch.randn(16, 64)
    first = kernels.quantize(x, quantizer, seed=seed(), stream=0).codes
    assert not torch.equal(first, kernels.quantize(x, quantizer, seed=seed(), stream=1).codes)
    assert not torch.equal(first, kernels.quantize(x, quantizer, seed=seed() + torch.tensor([0, 1]), stream=0).codes)
    assert torch.equal(first, kernels.quantize(x, quantizer, seed=seed(), stream=0).codes)
