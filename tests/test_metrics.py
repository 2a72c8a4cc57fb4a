"""Every metric against plain NumPy or SciPy, and its sum over batches and ranks."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import scipy.stats
import torch
import torch.distributed

from lightning_fp4 import metrics
from lightning_fp4.formats import E2M1_VALUES, MXFP4, NVFP4, NVFP4_2D
from lightning_fp4.quantizer import Quantizer, ScaleRule
from lightning_fp4.reference import attention, dequantize, quantize
from lightning_fp4.reference.packing import unpack
from tests.helpers import run_processes

QUANTIZERS = {
    "nvfp4": Quantizer(format=NVFP4),
    "nvfp4_unbiased": Quantizer(format=NVFP4, scale_rule=ScaleRule.UNBIASED),
    "nvfp4_2d": Quantizer(format=NVFP4_2D),
    "mxfp4": Quantizer(format=MXFP4, scale_rule=ScaleRule.UNBIASED),
}


def tensors(rows: int = 48, columns: int = 64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(rows, columns, generator=generator)
    outliers = random.clone()
    outliers[:, 3] *= 300
    outliers[5] = 0
    tiny = random * 1e-3
    tiny[0, 0] = 1e4  # the blocks elsewhere get a zero scale
    return {
        "random": random,
        "outliers": outliers,
        "shifted": random + 50,
        "constant": torch.full((rows, columns), 0.1),
        "zero": torch.zeros(rows, columns),
        "underflow": tiny,
        "odd": torch.randn(37, 50, generator=generator),
    }


CASES = [pytest.param(x, id=name) for name, x in tensors().items()]


def block_limits(quantized) -> np.ndarray:
    """6 x the decode scale of each element, from the stored tensors."""
    scales = quantized.scales.float().numpy().astype(np.float64)
    if quantized.amax is not None:
        scales = scales * quantized.amax.numpy() / quantized.encoded_max
    rows, columns = quantized.format.block
    return 6 * np.kron(scales, np.ones((rows, columns)))[: quantized.shape[0], : quantized.shape[1]]


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("x", CASES)
def test_quantization_metrics_equal_numpy(x, name):
    quantized = quantize(x, QUANTIZERS[name])
    a, b = x.numpy().astype(np.float64), dequantize(quantized).numpy().astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        sqnr = 10 * np.log10(np.square(a).sum() / np.square(b - a).sum())
    flushed = ((a != 0) & (b == 0)).sum() / max(1, (a != 0).sum())
    saturated = (np.abs(a) > block_limits(quantized) * (1 + 1e-6)).mean()
    rows, columns = quantized.format.block
    lost, blocks = 0, 0
    for i in range(0, a.shape[0], rows):
        for j in range(0, a.shape[1], columns):
            blocks += 1
            scale = quantized.scales.float()[i // rows, j // columns]
            lost += bool((a[i : i + rows, j : j + columns] != 0).any() and scale == 0)
    expected = {
        metrics.SQNR: sqnr,
        metrics.FlushToZero: flushed,
        metrics.Saturation: saturated,
        metrics.ZeroScaleBlocks: lost / blocks,
    }
    for metric_class, value in expected.items():
        metric = metric_class()
        metric.update(x, quantized)
        np.testing.assert_allclose(metric.compute().numpy(), value, rtol=1e-6, err_msg=metric_class.__name__)


def test_the_cases_have_something_to_count():
    cases = tensors()
    for metric_class, case in (
        (metrics.Saturation, "random"),
        (metrics.FlushToZero, "outliers"),
        (metrics.ZeroScaleBlocks, "underflow"),
    ):
        metric = metric_class()
        metric.update(cases[case], quantize(cases[case], QUANTIZERS["nvfp4"]))
        assert metric.compute() > 0
    unbiased = metrics.Saturation()
    unbiased.update(cases["random"], quantize(cases["random"], QUANTIZERS["nvfp4_unbiased"]))
    assert unbiased.compute() == 0  # scales round up, so nothing saturates


def test_codes_of_magnitude_six_are_the_largest():
    quantized = quantize(torch.tensor([[6.0] + [0.0] * 15]), QUANTIZERS["nvfp4"])
    assert E2M1_VALUES[int(unpack(quantized.codes)[0, 0])] == 6.0


@pytest.mark.parametrize("x", CASES)
def test_kurtosis_equals_scipy(x):
    a = x.numpy().astype(np.float64)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # SciPy on a constant
        expected = scipy.stats.kurtosis(a.ravel())
    metric = metrics.ExcessKurtosis()
    metric.update(x)
    np.testing.assert_allclose(metric.compute().numpy(), expected, rtol=1e-5)
    blocks = []
    for i in range(0, a.shape[0] // 16 * 16, 16):
        for j in range(0, a.shape[1] // 16 * 16, 16):
            block = a[i : i + 16, j : j + 16].ravel()
            if block.std() > 1e-12:
                blocks.append(scipy.stats.kurtosis(block))
    by_block = metrics.BlockKurtosis()
    by_block.update(x)
    np.testing.assert_allclose(by_block.compute().numpy(), np.mean(blocks) if blocks else np.nan, rtol=1e-5)


@pytest.mark.parametrize("x", CASES)
def test_channel_metrics_equal_numpy(x):
    a = x.numpy().astype(np.float64)
    magnitudes = np.abs(a).mean(0)
    top = metrics.TopChannels(num_channels=a.shape[1], k=4)
    top.update(x)
    values, indices = top.compute()
    np.testing.assert_allclose(values.numpy(), np.sort(magnitudes)[::-1][:4], rtol=1e-6)
    np.testing.assert_allclose(magnitudes[indices.numpy()], values.numpy(), rtol=1e-6)
    np.testing.assert_allclose(metrics.channel_magnitudes(x).numpy(), magnitudes, rtol=1e-5)
    energy = np.square(a).sum()
    share = a.shape[0] * np.square(a.mean(0)).sum() / energy if energy else 0.0
    metric = metrics.MeanShare(num_channels=a.shape[1])
    metric.update(x)
    np.testing.assert_allclose(metric.compute().numpy(), share, rtol=1e-5)
    np.testing.assert_allclose(metrics.mean_share(x).numpy(), share, rtol=1e-4, atol=1e-7)
    amax = metrics.Amax()
    amax.update(x)
    assert amax.compute().item() == np.float32(np.abs(a).max())


def test_amax_keeps_nan_visible():
    metric = metrics.Amax()
    for value in (1.0, float("nan"), 2.0):
        metric.update(torch.tensor([value]))
    assert metric.compute().isnan()


def test_channel_overlap_counts_what_stayed():
    metric = metrics.ChannelOverlap()
    metric.update(torch.tensor([1, 2, 3, 4]))
    assert metric.compute().isnan()
    metric.update(torch.tensor([4, 3, 9, 10]))
    assert metric.compute() == 0.5
    metric.update(torch.tensor([9, 10, 3, 4]))
    assert metric.compute() == 0.75
    metric.reset()
    metric.update(torch.tensor([1]))
    assert metric.compute().isnan()


def all_metrics(columns: int) -> dict[str, torch.nn.Module]:
    return {
        "sqnr": metrics.SQNR(),
        "flush": metrics.FlushToZero(),
        "saturation": metrics.Saturation(),
        "zero_scale": metrics.ZeroScaleBlocks(),
        "amax": metrics.Amax(),
        "kurtosis": metrics.ExcessKurtosis(),
        "block_kurtosis": metrics.BlockKurtosis(),
        "top": metrics.TopChannels(num_channels=columns, k=3),
        "mean_share": metrics.MeanShare(num_channels=columns),
    }


def feed(metric, x: torch.Tensor) -> None:
    if isinstance(metric, (metrics.SQNR, metrics.FlushToZero, metrics.Saturation, metrics.ZeroScaleBlocks)):
        metric.update(x, quantize(x, QUANTIZERS["nvfp4"]))
    else:
        metric.update(x)


def value(metric) -> np.ndarray:
    out = metric.compute()
    return (out[0] if isinstance(out, tuple) else out).numpy()


def batches() -> list[torch.Tensor]:
    cases = tensors()
    return [cases[name] for name in ("random", "outliers", "constant", "underflow")]


def expected_of_batches() -> dict[str, np.ndarray]:
    """Over all batches together, by hand."""
    all_x = torch.cat(batches())
    decoded = torch.cat([dequantize(quantize(x, QUANTIZERS["nvfp4"])) for x in batches()])
    a, b = all_x.numpy().astype(np.float64), decoded.numpy().astype(np.float64)
    limits = np.concatenate([block_limits(quantize(x, QUANTIZERS["nvfp4"])) for x in batches()])
    return {
        "sqnr": 10 * np.log10(np.square(a).sum() / np.square(b - a).sum()),
        "flush": ((a != 0) & (b == 0)).sum() / (a != 0).sum(),
        "saturation": (np.abs(a) > limits * (1 + 1e-6)).mean(),
        "amax": np.abs(a).max(),
        "kurtosis": scipy.stats.kurtosis(a.ravel()),
        "top": np.sort(np.abs(a).mean(0))[::-1][:3],
        "mean_share": a.shape[0] * np.square(a.mean(0)).sum() / np.square(a).sum(),
    }


def test_metrics_accumulate_over_batches():
    collected = all_metrics(64)
    for x in batches():
        for metric in collected.values():
            feed(metric, x)
    for name, expected in expected_of_batches().items():
        np.testing.assert_allclose(value(collected[name]), expected, rtol=1e-5, err_msg=name)


def _run_rank(rank: int, directory: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    collected = all_metrics(64)
    # Unequal shares: one batch on rank 0, three on rank 1.
    for x in batches()[:1] if rank == 0 else batches()[1:]:
        for metric in collected.values():
            feed(metric, x)
    torch.save({name: value(metric) for name, metric in collected.items()}, f"{directory}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_metrics_accumulate_over_ranks(tmp_path):
    run_processes(_run_rank, str(tmp_path))
    local = all_metrics(64)
    for x in batches():
        for metric in local.values():
            feed(metric, x)
    expected = {name: value(metric) for name, metric in local.items()} | expected_of_batches()
    for rank in range(2):
        seen = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        for name in expected:
            np.testing.assert_allclose(seen[name], expected[name], rtol=1e-5, err_msg=name)


def test_functions_take_leading_axes():
    x = torch.stack([tensors()["random"], tensors()["outliers"]])
    for function in (metrics.mean_share, metrics.channel_magnitudes, metrics.block_kurtosis):
        torch.testing.assert_close(function(x), torch.stack([function(one) for one in x]), equal_nan=True)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("keys", [1, 3, 5, 9])
@pytest.mark.parametrize("rows", [1, 2, 1024])
def test_pre_softmax_max_equals_numpy(is_causal, kv_heads, keys, rows, monkeypatch):
    monkeypatch.setattr(attention, "_CAUSAL_QUERIES", rows)
    for seed in range(5):  # the largest is in another place each time
        torch.manual_seed(seed)
        query, key = torch.randn(3, 4, 5, 8), torch.randn(3, kv_heads, keys, 8)
        largest = -np.inf
        for b in range(3):
            for h in range(4):
                scores = query[b, h].numpy() @ key[b, h * kv_heads // 4].numpy().T / np.sqrt(8)
                if is_causal:
                    scores = scores[np.tril_indices(5, m=keys)]
                largest = max(largest, scores.max())
        np.testing.assert_allclose(metrics.pre_softmax_max(query, key, is_causal=is_causal), largest, rtol=1e-5)


def test_pre_softmax_max_of_what_is_not_finite():
    query, key = torch.ones(2, 4, 8), torch.ones(2, 4, 8)
    key[1, 2, 3] = torch.inf
    assert metrics.pre_softmax_max(query, key) == torch.inf
    assert metrics.pre_softmax_max(query, key, scale=-0.5) == -torch.inf
    key[1, 3, 3] = torch.nan
    assert metrics.pre_softmax_max(query, key).isnan()
    assert metrics.pre_softmax_max(query[:, :3], key, is_causal=True) == torch.inf  # nobody sees the last key
    with pytest.raises(RuntimeError, match="0 elements"):
        metrics.pre_softmax_max(query[:, :0], key)
    with pytest.raises(RuntimeError, match="0 elements"):
        metrics.pre_softmax_max(query[:, :0], key, is_causal=True)


@pytest.mark.parametrize("is_causal", [False, True])
def test_pre_softmax_max_a_few_heads_at_a_time(is_causal, monkeypatch):
    torch.manual_seed(0)
    query, key = torch.randn(3, 4, 5, 8), torch.randn(1, 2, 6, 8)  # one batch entry for all
    expected = metrics.pre_softmax_max(query, key.expand(3, -1, -1, -1), is_causal=is_causal)
    sizes = []
    monkeypatch.setattr(attention, "_MOST_SCORES", 5 * 6 * 5)
    matmul = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda q, k: (sizes.append(len(q)), matmul(q, k))[1])
    assert metrics.pre_softmax_max(query, key, is_causal=is_causal) == pytest.approx(expected)
    assert sizes == [5, 5, 2]
    assert metrics.pre_softmax_max(query[0, 0], key[0, 0]) == pytest.approx(
        (query[0, 0] @ key[0, 0].T).max().item() / 8**0.5
    )


def test_wrong_arguments_say_what_to_do():
    with pytest.raises(ValueError, match=r"Pass a matrix \[rows, 8\]"):
        metrics.MeanShare(num_channels=8).update(torch.zeros(2, 9))
    with pytest.raises(ValueError, match="between 1 and num_channels=4"):
        metrics.TopChannels(num_channels=4, k=5)
    with pytest.raises(ValueError, match="must be 2 or more"):
        metrics.BlockKurtosis(size=1)
