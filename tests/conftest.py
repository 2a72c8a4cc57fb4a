"""Fixtures for all tests: the devices to run on, and a default state of PyTorch before and after each test."""

import os

import pytest
import torch

# Threads of test processes that share cores wait for each other, and spend more time at that than at these small sizes.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # more are processes, which import PyTorch first


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def poison(monkeypatch):
    """Fill what ``torch.empty`` and its relatives return with NaN, or 0x7F for integers (bytes of E4M3's NaN)."""
    filled = []

    def poisoned(original):
        def call(*args, **kwargs):
            out = original(*args, **kwargs)
            if isinstance(out, torch.Tensor) and not out.is_meta and out.numel():
                filled.append(out.shape)
                if out.dtype.is_floating_point and out.element_size() > 1:
                    out.data.fill_(float("nan"))
                elif out.dtype is not torch.bool:
                    out.data.view(torch.uint8).fill_(0x7F) if out.is_contiguous() else None
            return out

        return call

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
    return filled
