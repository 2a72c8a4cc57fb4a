"""FP4Precision on two processes: DDP, FSDP2, FSDP and spawned launches, on the CPU with gloo and on GPUs with NCCL.

Starting a process takes longer than all that it does here, so one pair of processes runs every scenario and each test
looks at what one of them left behind.
"""

import os
import pickle
import traceback
from datetime import timedelta

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler

from lightning_fp4 import convert_to_fp4, get_recipe
from tests.helpers import RTN, needs_two_gpus, relative_error, run_processes
from tests.trainer_models import WIDTH, Regressor, adamw, layers_of, plugin, sgd, trainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("two processes"),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed"),
]

SR = get_recipe("nvfp4")
TIMEOUT = timedelta(seconds=60)
KINDS = {"cpu": ("cpu", "gloo"), "cuda": ("gpu", "nccl")}  # Lightning's name of an accelerator, and what connects them
SAMPLES = 64  # two processes, four steps of eight rows each


class Model(Regressor):
    """Four steps for each of two processes, with the gradients of the first as the optimizer sees them."""

    def __init__(self, optimizer=sgd, **kwargs):
        super().__init__(optimizer, samples=SAMPLES, **kwargs)
        self.gradients = None

    def train_dataloader(self):
        data = self.loader().dataset
        if not torch.distributed.is_initialized():
            return self.loader()
        # Lightning's own sampler would shuffle.
        return DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))

    def on_before_optimizer_step(self, optimizer):
        if self.gradients is None:
            gradients = {n: p.grad for n, p in self.named_parameters()}
            self.gradients = {n: None if g is None else g.detach().clone() for n, g in gradients.items()}


class Recomputed(Model):
    def step(self, batch):
        out = checkpoint(self.net, batch, use_reentrant=False)
        return nn.functional.mse_loss(out, batch.flip(-1))


class UnusedBranch(Model):
    """The second process never calls the last layer."""

    def step(self, batch):
        hidden = self.net[0](batch)
        return (self.net[2](hidden) if self.global_rank == 0 else hidden).square().mean()


class NoTokens(Model):
    """The last layer gets no tokens on the second process, like an expert that nobody was sent to."""

    def step(self, batch):
        hidden = self.net[0](batch)
        routed = hidden if self.global_rank == 0 else hidden[:0]
        return hidden.square().mean() + self.net[2](routed).square().sum()


class Sharded(Model):
    """FSDP2, applied by the user as Lightning asks for it: each layer, or only the whole."""

    def __init__(self, leaves, convert_first=False, **kwargs):
        super().__init__(**kwargs)
        self.leaves, self.convert_first, self.done = leaves, convert_first, False

    def configure_model(self):
        if self.done:
            return
        self.done = True
        if self.convert_first:
            convert_to_fp4(self.net, RTN)
        mesh = self.device_mesh["data_parallel"]
        for layer in (self.net[0], self.net[2]) if self.leaves else ():
            fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


class CPUFSDPStrategy(FSDPStrategy):
    """FSDP on the CPU: Lightning refuses only the parent class there, PyTorch wants to be told the device."""

    def _setup_model(self, model):
        config = {"mixed_precision": self.mixed_precision_config, "device_id": torch.device("cpu")}
        return FullyShardedDataParallel(model, **config, **self.kwargs)


def device_type():
    """Of the processes that run the scenarios; they are told by an environment variable."""
    return os.environ["TEST_DEVICE_TYPE"]


def connection():
    return {"process_group_backend": KINDS[device_type()][1], "timeout": TIMEOUT}


def outcome(model, fp4=None):
    layers = layers_of(model)
    return {
        "losses": model.losses,
        "gradients": {n: None if g is None else _whole(g) for n, g in model.gradients.items()},
        "weights": {n: _whole(p) for n, p in model.named_parameters()},
        "classes": {name: type(layer).__name__ for name, layer in layers.items()},
        "keys": [int(layer.fp4_rng_state[0]) for layer in layers.values()],
        "steps": [int(layer.fp4_rng_state[1]) for layer in layers.values()],
        "ran": [layer["ran"] for layer in fp4.report()["converted"]] if fp4 else None,
    }


def _whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone().cpu()


def distributed(fp4, strategy=None, **kwargs):
    strategy = strategy or DDPStrategy(**connection(), **kwargs.pop("ddp", {}))
    options = {"accelerator": KINDS[device_type()][0], "devices": 2, "limit_val_batches": 0}
    return trainer(fp4, strategy=strategy, **{**options, **kwargs})


def run_ddp(folder, recipe=RTN, model=None, **kwargs):
    fp4, model = plugin(recipe, seed=7), model or Model()
    distributed(fp4, **kwargs).fit(model)
    return outcome(model, fp4)


def run_ddp_resume(folder):
    def keep(name):
        return {
            "callbacks": [ModelCheckpoint(folder / name, every_n_train_steps=4, save_top_k=-1, filename="{step}")],
            "enable_checkpointing": True,
            "max_epochs": 2,
        }

    straight = run_ddp(folder, SR, **keep("straight"))
    fp4, model = plugin(SR, seed=7), Model(seed=1)
    distributed(fp4, **keep("resumed")).fit(model, ckpt_path=folder / "straight" / "step=4.ckpt")
    return {"straight": straight, "resumed": outcome(model, fp4)}


def run_ddp_validate(folder):
    model = Model()
    runner = distributed(plugin(), limit_val_batches=2)
    before = runner.validate(model, verbose=False)[0]["val_loss"]
    runner.fit(model)
    return {"before": before, "after": runner.validate(model, verbose=False)[0]["val_loss"], **outcome(model)}


def model_parallel(tensor_parallel=1):
    return ModelParallelStrategy(
        data_parallel_size=2 // tensor_parallel,
        tensor_parallel_size=tensor_parallel,
        save_distributed_checkpoint=False,
        **connection(),
    )


def run_fsdp2(folder, leaves, recipe=RTN, **kwargs):
    fp4, model = plugin(recipe, seed=7), Sharded(leaves, **kwargs)
    runner = distributed(fp4, model_parallel(), gradient_clip_val=0.05)
    runner.fit(model)
    runner.save_checkpoint(folder / f"leaves-{leaves}.ckpt")
    return outcome(model, fp4)


def run_fsdp2_resume(folder):
    def fit(seed, epochs, ckpt_path=None):
        model = Sharded(True, seed=seed, optimizer=adamw)  # Lightning cannot load the empty state of SGD
        runner = distributed(plugin(SR, seed=7), model_parallel(), max_epochs=epochs)
        runner.fit(model, ckpt_path=ckpt_path)
        return model, runner

    _, runner = fit(0, 1)
    runner.save_checkpoint(folder / "fsdp2.ckpt")
    resumed, _ = fit(1, 2, folder / "fsdp2.ckpt")
    straight, _ = fit(0, 2)
    return {"straight": outcome(straight), "resumed": outcome(resumed)}


class TensorParallel(Model):
    def configure_model(self):
        parallelize_module(
            self.net, self.device_mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )


def run_tensor_parallel(folder):
    result = {}
    for name, ignored in (("all", []), ("one", ["net.0"])):
        model = TensorParallel()
        try:
            distributed(plugin(ignore_modules=ignored), model_parallel(2)).fit(model)
        except NotImplementedError as error:
            result[name] = str(error)
    return result


def run_fsdp1(folder):
    fp4, model = plugin(), Model()
    kind = CPUFSDPStrategy if device_type() == "cpu" else FSDPStrategy
    runner = distributed(fp4, kind(**connection(), use_orig_params=True), gradient_clip_val=0.05)
    runner.fit(model)
    wrapped = isinstance(runner.strategy.model, FullyShardedDataParallel)
    return {"losses": model.losses, "wrapped": wrapped, "report": fp4.report()}


SCENARIOS = {
    "ddp": run_ddp,
    "ddp_clipped": lambda folder: run_ddp(folder, gradient_clip_val=0.05),
    "ddp_sr": lambda folder: run_ddp(folder, SR),
    "ddp_accumulated": lambda folder: run_ddp(folder, accumulate_grad_batches=2),
    "ddp_recomputed": lambda folder: run_ddp(folder, SR, Recomputed(), ddp={"static_graph": True}),
    "ddp_unused": lambda folder: run_ddp(folder, RTN, UnusedBranch(), ddp={"find_unused_parameters": True}),
    "ddp_no_tokens": lambda folder: run_ddp(folder, RTN, NoTokens()),
    "ddp_resume": run_ddp_resume,
    "ddp_validate": run_ddp_validate,
    "fsdp2_leaves": lambda folder: run_fsdp2(folder, leaves=True),
    "fsdp2_root": lambda folder: run_fsdp2(folder, leaves=False),
    "fsdp2_converted_before": lambda folder: run_fsdp2(folder, leaves=True, convert_first=True),
    "fsdp2_resume": run_fsdp2_resume,
    "fsdp1": run_fsdp1,
    "tensor_parallel": run_tensor_parallel,
}


def worker(rank, port, device_type, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank), NODE_RANK="0")
    os.environ["TEST_DEVICE_TYPE"] = device_type
    for name, scenario in SCENARIOS.items():
        try:
            torch.manual_seed(0)
            result = scenario(folder)
        except Exception:
            result = {"error": traceback.format_exc()}
        torch.save(result, folder / f"{name}-{rank}.pt")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_two_gpus])])
def device(request):
    return torch.device(request.param)


@pytest.fixture(scope="module")
def folder(device, tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    run_processes(worker, find_free_network_port(), device.type, folder)
    return folder


@pytest.fixture
def ranks(folder):
    """What both processes found in a scenario."""

    def load(name):
        results = [torch.load(folder / f"{name}-{rank}.pt") for rank in range(2)]
        for rank, result in enumerate(results):
            assert "error" not in result, f"rank {rank}: {result['error']}"
        return results

    return load


def first_batches(device):
    """The first batch of each process: the sampler deals the rows out in turn."""
    data = torch.cat(list(Model().loader())).to(device)
    return [data[rank::2][:8] for rank in range(2)]


def local_gradients(device):
    """The oracle: what each process computes before anything is exchanged."""
    for batch in first_batches(device):
        model = convert_to_fp4(Model().to(device), RTN)
        model.step(batch).backward()
        yield {name: p.grad.cpu() for name, p in model.named_parameters()}


def assert_same(actual, expected):
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


# ----------------------------------------------------------------------------------------------------------------------
# DDP
# ----------------------------------------------------------------------------------------------------------------------


def test_ddp_converts_and_averages_the_gradients(device, ranks):
    """DDP drops what `convert_module` returns, so conversion must be in place (T20)."""
    results = ranks("ddp")
    first, second = local_gradients(device)
    for result in results:
        assert result["classes"] == {"net.0": "FP4Linear", "net.2": "FP4Linear"}
        assert result["ran"] == [True, True]
        assert len(result["losses"]) == 4
        assert_same(result["gradients"], {name: (first[name] + second[name]) / 2 for name in first})
    assert_same(results[0]["weights"], results[1]["weights"])
    assert results[0]["losses"] != results[1]["losses"]
    plain = Model().to(device)
    for result, batch in zip(results, first_batches(device), strict=True):
        assert 1e-4 < abs(result["losses"][0] / plain.step(batch).item() - 1) < 0.1


def test_ddp_clips_the_averaged_gradients(ranks):
    plain, clipped = ranks("ddp"), ranks("ddp_clipped")
    assert_same(clipped[0]["gradients"], plain[0]["gradients"])  # seen before clipping
    assert_same(clipped[0]["weights"], clipped[1]["weights"])
    assert clipped[0]["losses"][1:] != plain[0]["losses"][1:]


def test_ddp_ranks_draw_different_bits(ranks):
    """T16: else stochastic rounding would not average out over the processes."""
    first, second = ranks("ddp_sr")
    assert len({*first["keys"], *second["keys"]}) == 4
    assert first["steps"] == second["steps"] == [4, 4]
    assert_same(first["weights"], second["weights"])


def test_ddp_accumulation(device, ranks):
    """T22: two batches per step, exchanged once (`no_sync` before)."""
    results = ranks("ddp_accumulated")
    data = torch.cat(list(Model().loader())).to(device)
    expected = None
    for rank in range(2):
        model = convert_to_fp4(Model().to(device), RTN)
        for start in (0, 8):
            (model.step(data[rank::2][start : start + 8]) / 2).backward()
        gradients = {name: p.grad.cpu() / 2 for name, p in model.named_parameters()}
        expected = gradients if expected is None else {n: g + expected[n] for n, g in gradients.items()}
    for result in results:
        for name, gradient in result["gradients"].items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-8)
    assert_same(results[0]["weights"], results[1]["weights"])


def test_ddp_static_graph_with_activation_checkpointing(ranks):
    """T11, T20: the recomputed forward draws the same bits, so nothing differs from a run without."""
    for plain, recomputed in zip(ranks("ddp_sr"), ranks("ddp_recomputed"), strict=True):
        assert recomputed["losses"] == plain["losses"]
        assert_same(recomputed["weights"], plain["weights"])


def test_ddp_branch_unused_on_one_rank(device, ranks):
    first, second = ranks("ddp_unused")
    model = convert_to_fp4(Model().to(device), RTN)
    model.net[2](model.net[0](first_batches(device)[0])).square().mean().backward()
    for result in (first, second):
        assert torch.equal(result["gradients"]["net.2.weight"], model.net[2].weight.grad.cpu() / 2)
    assert_same(first["weights"], second["weights"])
    assert (first["ran"], second["ran"]) == ([True, True], [True, False])


def test_ddp_layer_without_tokens_on_one_rank(device, ranks):
    """T07, T20: zeros, not nothing and not garbage; and the exchange does not hang."""
    first, second = ranks("ddp_no_tokens")
    model = convert_to_fp4(Model().to(device), RTN)
    hidden = model.net[0](first_batches(device)[0])
    (hidden.square().mean() + model.net[2](hidden).square().sum()).backward()
    for result in (first, second):
        assert torch.equal(result["gradients"]["net.2.weight"], model.net[2].weight.grad.cpu() / 2)
        assert torch.equal(result["gradients"]["net.2.bias"], model.net[2].bias.grad.cpu() / 2)
    assert_same(first["weights"], second["weights"])


def test_ddp_resumes_to_the_bit(ranks):
    """Only the first process's state is in the file; the second must go on with its own bits all the same."""
    for result in ranks("ddp_resume"):
        assert len(result["straight"]["losses"]) == 8
        assert result["resumed"]["losses"] == result["straight"]["losses"][4:]
        assert_same(result["resumed"]["weights"], result["straight"]["weights"])
        for name in ("keys", "steps"):
            assert result["resumed"][name] == result["straight"][name]


def test_ddp_validates_before_and_after(ranks):
    for plain, result in zip(ranks("ddp"), ranks("ddp_validate"), strict=True):
        assert result["after"] < result["before"]
        assert result["losses"] == plain["losses"]
        assert_same(result["weights"], plain["weights"])


# ----------------------------------------------------------------------------------------------------------------------
# FSDP
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", ["fsdp2_leaves", "fsdp2_root", "fsdp2_converted_before"])
def test_fsdp2_equals_ddp(scenario, ranks):
    """T19: the weight is whole in forward, so its scales are; clipping by norm sees all shards."""
    results = ranks(scenario)
    for result, expected in zip(results, ranks("ddp_clipped"), strict=True):
        name = "FP4Linear" if scenario == "fsdp2_root" else "FP4FSDPLinear"
        if scenario == "fsdp2_converted_before":
            name = "FSDPFP4Linear"
        assert result["classes"] == {"net.0": name, "net.2": name}
        assert result["ran"] == [True, True]
        assert result["losses"][0] == expected["losses"][0]
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-3)
        for name, gradient in result["gradients"].items():
            torch.testing.assert_close(gradient, expected["gradients"][name], rtol=1e-5, atol=1e-7)
        for name, value in result["weights"].items():
            assert relative_error(value, expected["weights"][name]) < 1e-3
    assert_same(results[0]["weights"], results[1]["weights"])


@pytest.mark.parametrize("leaves", [True, False])
def test_fsdp2_checkpoint_loads_into_a_plain_model(leaves, folder, ranks):
    weights = ranks("fsdp2_leaves" if leaves else "fsdp2_root")[0]["weights"]
    saved = torch.load(folder / f"leaves-{leaves}.ckpt", weights_only=True)
    plain = Regressor(seed=1)
    plain.load_state_dict(saved["state_dict"])
    assert_same(dict(plain.named_parameters()), weights)
    assert set(saved["lightning_fp4"]["steps"]) == {"net.0", "net.2"}


def test_fsdp2_resumes_to_the_bit(ranks):
    """Here the checkpoint is loaded after conversion, into sharded parameters."""
    for result in ranks("fsdp2_resume"):
        assert result["resumed"]["losses"] == result["straight"]["losses"][4:]
        assert_same(result["resumed"]["weights"], result["straight"]["weights"])
        assert result["resumed"]["steps"] == result["straight"]["steps"] == [8, 8]


def test_fsdp1(ranks):
    """It takes only FSDPPrecision, whose clipping by norm raises; ours asks the root."""
    for result, expected in zip(ranks("fsdp1"), ranks("ddp_clipped"), strict=True):
        assert result["wrapped"]
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-3)
        # The weights are flat shards by then.
        assert [(c["shape"], c["ran"]) for c in result["report"]["converted"]] == [((WIDTH, WIDTH), True)] * 2


def test_tensor_parallel_is_refused(ranks):
    for result in ranks("tensor_parallel"):
        for name in ("all", "one"):
            assert "(tensor parallelism), which is not supported. Keep such layers in high precision" in result[name]


# ----------------------------------------------------------------------------------------------------------------------
# Launching by spawn, which pickles Trainer and plugin
# ----------------------------------------------------------------------------------------------------------------------


def _not_the_last(module, name):
    return name != "net.2"


class Checking(pl.Callback):
    def on_train_end(self, trainer, pl_module):
        assert set(layers_of(pl_module)) == {"net.0"}
        assert trainer.precision_plugin.report()["converted"][0]["ran"]


def test_ddp_spawn():
    """The plugin goes to the new process by pickle, a module-level filter with it, and the weights come back."""
    model = Model()
    options = {"strategy": "ddp_spawn", "devices": 1, "limit_val_batches": 0, "callbacks": [Checking()]}
    trainer(plugin(filter_fn=_not_the_last), **options).fit(model)
    expected = Model()
    trainer(plugin(filter_fn=_not_the_last), limit_val_batches=0).fit(expected)
    assert_same(dict(model.named_parameters()), dict(expected.named_parameters()))


def test_ddp_spawn_with_a_lambda_says_so():
    """Python's own error, before any process starts, names the lambda."""
    runner = trainer(plugin(filter_fn=lambda module, name: True), strategy="ddp_spawn", devices=2)
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        runner.fit(Model())
