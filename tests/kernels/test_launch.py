"""Launching without Triton's binder: the compiled kernel that Triton would take, the arguments that it would pass."""

import importlib
import itertools

import pytest
import torch

pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from lightning_fp4.kernels._launch import Launcher, Remembered

FINISH = importlib.import_module("lightning_fp4.kernels.finish")


class _Kernel:
    """Stands in for a ``@triton.jit`` function ``(x_ptr, y_ptr, n, stride, A, B)`` and counts compilations."""

    arg_names = ("x_ptr", "y_ptr", "n", "stride", "A", "B")

    def __init__(self):
        self.compiled, self.launched = [], []

    def __getitem__(self, grid):
        def run(*arguments, num_warps, enable_fp_fusion, **constants):
            bound = {**dict(zip(self.arg_names, arguments, strict=False)), **constants}
            arguments = tuple(bound[name] for name in self.arg_names)
            self.compiled.append(arguments)
            self.launched.append((grid, arguments))
            return _Compiled(self, len(self.compiled))

        return run


class _Compiled:
    def __init__(self, kernel, number):
        self.kernel, self.number = kernel, number

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.launched.append((grid, arguments))


def _launcher():
    kernel = _Kernel()
    return kernel, Launcher(kernel, {"B": 7, "A": "row"})


def test_compiled_once_and_launched_with_the_same_arguments():
    kernel, launch = _launcher()
    x, y = torch.zeros(64), torch.zeros(64, dtype=torch.uint8)
    for _ in range(3):
        launch(5, x, y, 64, 1)
    assert len(kernel.compiled) == 1
    assert len(kernel.launched) == 3
    for grid, arguments in kernel.launched:
        assert grid == (5, 1, 1)
        assert arguments[0] is x
        assert arguments[1] is y
        assert arguments[2:] == (64, 1, "row", 7)


def test_what_a_compiled_kernel_may_depend_on_is_told_apart():
    kernel, launch = _launcher()
    x, words = torch.zeros(65), torch.zeros(65, dtype=torch.int32)
    places = [x[:64], x[1:], words[:64]]  # aligned, not aligned, another dtype
    integers = [0, 1, 2, 16, 17, 2**31, 2**31 + 16, 2**63]
    for a, n, stride in itertools.product(places, integers, integers):
        launch(1, a, a, n, stride)
    assert len(kernel.compiled) == len(places) * len(integers) ** 2
    launch(2, places[0], places[0], 0, 0)
    assert kernel.launched[-1][0] == (2, 1, 1)


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(Remembered, "MOST", 4)
    kernel, launch = _launcher()
    x = torch.zeros(4)
    for n in range(40):
        launch(1, x, x, n, 1)
    assert len(launch._launches) <= 4
    assert [arguments[2] for _, arguments in kernel.launched] == list(range(40))


class _Driver:
    """A CUDA driver without CUDA: loads nothing, and notes what it is told to launch."""

    class utils:
        load_binary = staticmethod(lambda *_: (1, 2, 10, 0, 1024))
        get_device_properties = staticmethod(lambda _: {"max_shared_mem": 232448, "max_num_regs": 65536})

    def __init__(self):
        self.launched = []
        self.launcher_cls = lambda source, metadata: lambda *arguments: self.launched.append(arguments)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 7

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton would keep what was compiled for no device")
def test_the_launcher_passes_what_triton_passes(monkeypatch):
    monkeypatch.setattr(FINISH, "check_device", lambda _: None)
    sums, factor, bias = torch.zeros(19, 300), torch.ones(1, 1), torch.zeros(300).bfloat16()
    fake = _Driver()
    FINISH.launcher.cache_clear()
    monkeypatch.setattr(driver, "_active", fake)
    for _ in range(2):
        out = FINISH.finish(sums, factor, factor, bias, torch.bfloat16)
    FINISH.launcher.cache_clear()
    by_triton, by_launcher = fake.launched
    assert out.shape == (19, 300)
    assert len(by_triton) == len(by_launcher)
    tensors = 0
    for a, b in zip(by_triton, by_launcher, strict=True):
        if isinstance(a, torch.Tensor):
            tensors += 1
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert a is b or a.data_ptr() != sums.data_ptr()
        elif type(a).__name__ != "LazyDict":  # metadata for profilers' hooks
            assert a == b
    assert tensors == 5
