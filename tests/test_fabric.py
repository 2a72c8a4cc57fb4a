"""FP4Precision under Lightning Fabric."""

import copy
import inspect
import pickle
import subprocess
import sys

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies import FSDPStrategy
from torch import nn

import lightning_fp4
from lightning_fp4 import convert_to_fp4, get_recipe, revert_from_fp4
from lightning_fp4.callbacks.hot_channel_refresh import choose_channels, start_scoring, stop_scoring
from lightning_fp4.fabric import FP4Precision
from tests.helpers import RTN, TinyModel, relative_error
from tests.trainer_models import WIDTH, assert_same_weights, layers_of, weights

SR = get_recipe("nvfp4")


def fabric(recipe=RTN, *, precision="32-true", **kwargs):
    return Fabric(accelerator="cpu", devices=1, plugins=[FP4Precision(recipe, precision=precision, **kwargs)])


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def batches(count=4):
    return torch.randn(count, 8, WIDTH, generator=torch.Generator().manual_seed(1)).unbind()


def train(runner, model, optimizer, data=None, clip=None):
    losses = []
    for batch in batches() if data is None else data:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch), batch)
        runner.backward(loss)
        if clip:
            runner.clip_gradients(model, optimizer, **clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def plain_loop(model, optimizer, clip=None):
    """The same without Lightning."""
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch), batch)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("together", [True, False], ids=["setup", "setup_module"])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_optimizer_made_before_setup_trains_the_model(together, clip):
    """A plugin that replaced modules would leave the optimizer with orphans; the oracle is a loop without Fabric."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parameters = list(model.parameters())
    runner = fabric()
    if together:
        wrapped, stepper = runner.setup(model, optimizer)
    else:
        wrapped, stepper = runner.setup_module(model), runner.setup_optimizers(optimizer)
    losses = train(runner, wrapped, stepper, clip={"max_norm": clip} if clip else None)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))

    expected = convert_to_fp4(mlp(), RTN)
    assert losses == plain_loop(expected, torch.optim.AdamW(expected.parameters(), lr=1e-2), clip)
    assert_same_weights(model, expected)
    assert len(layers_of(model)) == 2


def test_min_features_and_the_recommendation(monkeypatch):
    """The device is where the weights are when the report is asked for: Fabric moves them after conversion."""
    model = mlp().append(nn.Linear(WIDTH, WIDTH // 2))
    runner = fabric(get_recipe("nvfp4", units="fp8"), precision="bf16-mixed", min_features=WIDTH)
    runner.setup(model)
    assert set(layers_of(model)) == {"0", "2"}
    monkeypatch.setattr("lightning_fp4.backends._has_fp8", lambda device: True)
    assert not runner.strategy.precision.report()["recommendations"]
    monkeypatch.setattr("lightning_fp4.convert._device", lambda module: torch.device("cuda"))
    (sentence,) = runner.strategy.precision.report()["recommendations"]
    assert sentence.endswith("`min_features=2048` keeps 0, 2 in BF16.")


def test_high_precision_recipe_equals_plain_fabric():
    model, expected = mlp(), mlp()
    runner = fabric("high_precision")
    losses = train(runner, *runner.setup(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    assert losses == plain_loop(expected, torch.optim.SGD(expected.parameters(), lr=0.1))
    assert_same_weights(model, expected)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "32-true"])
def test_precisions(precision):
    model = mlp()
    runner = fabric(precision=precision)
    wrapped = runner.setup(model)
    batch = batches()[0]
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append((args[0].dtype, output.dtype)))
    out = wrapped(batch)
    low = torch.float32 if precision == "32-true" else torch.bfloat16
    assert seen == [(torch.bfloat16 if precision == "bf16-true" else torch.float32, low)]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16 if precision == "bf16-true" else torch.float32}
    assert out.dtype is torch.float32  # Fabric's contract: outputs come in the default dtype
    assert 0.03 < relative_error(out, mlp()(batch)) < 0.3
    runner.backward(out.square().mean())
    assert all(p.grad.dtype is p.dtype for p in model.parameters())


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "32-true"])
def test_default_dtype_is_restored_after_an_exception(precision):
    class Failing(nn.Linear):
        def forward(self, x):
            assert torch.get_default_dtype() is (torch.bfloat16 if precision == "bf16-true" else torch.float32)
            assert torch.is_autocast_enabled("cpu") is (precision == "bf16-mixed")
            raise ZeroDivisionError

    runner = fabric(precision=precision)
    wrapped = runner.setup(nn.Sequential(nn.Linear(WIDTH, WIDTH), Failing(WIDTH, WIDTH)))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            wrapped(batches()[0])
        assert torch.get_default_dtype() is torch.float32
        assert not torch.is_autocast_enabled("cpu")


def test_convert_input_leaves_integers_alone():
    for precision in ("bf16-mixed", "bf16-true", "32-true"):
        tokens, mask, x = torch.arange(3), torch.tensor([True]), torch.ones(2)
        converted = FP4Precision(precision=precision).convert_input({"tokens": tokens, "mask": mask, "x": x})
        assert converted["tokens"] is tokens
        assert converted["mask"] is mask
        assert converted["x"].dtype is (torch.bfloat16 if precision == "bf16-true" else torch.float32)


@pytest.mark.parametrize("empty_init", [True, False])
def test_init_module_then_setup(empty_init):
    runner = fabric(precision="bf16-true")
    with runner.init_module(empty_init=empty_init):
        model = mlp()
    assert model[0].weight.dtype is torch.bfloat16
    model.load_state_dict({name: value.bfloat16() for name, value in mlp().state_dict().items()})
    wrapped = runner.setup(model)
    assert torch.isfinite(wrapped(batches()[0])).all()


def test_compiled_model():
    """Fabric unwraps, converts and compiles again; names and numbers are those of the eager model."""
    runner = fabric(ignore_modules=["2"])
    model = mlp()
    compiled = torch.compile(model, backend="eager")
    wrapped = runner.setup(compiled)
    assert [layer["name"] for layer in runner.strategy.precision.report()["converted"]] == ["0"]
    expected = convert_to_fp4(mlp(), RTN, ignore_modules=["2"])
    assert torch.equal(wrapped(batches()[0]), expected(batches()[0]))


def test_tied_model():
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    runner = fabric()
    wrapped, optimizer = runner.setup(model, optimizer)
    tokens = torch.randint(48, (2, 8))
    for _ in range(2):
        runner.backward(wrapped(tokens).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    assert model.lm_head.weight is model.embed_tokens.weight
    assert len(layers_of(model)) == 12


@pytest.mark.parametrize("recipe", [RTN, SR, "chon"], ids=["rtn", "sr", "chon"])
def test_resume_equals_straight_run(recipe, tmp_path):
    """With the plugin among what is saved; the file holds plain data."""

    def new(seed):
        runner = fabric(recipe, seed=7)
        model = mlp(seed)
        wrapped, optimizer = runner.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        return runner, {"model": wrapped, "optimizer": optimizer, "precision": runner.strategy.precision}

    runner, state = new(0)
    train(runner, state["model"], state["optimizer"], batches(8)[:4])
    runner.save(tmp_path / "state.ckpt", state)
    expected = train(runner, state["model"], state["optimizer"], batches(8)[4:])

    saved = torch.load(tmp_path / "state.ckpt", weights_only=True)
    steps = 0 if recipe is RTN else 4
    hot_channels = saved["precision"].pop("hot_channels", {})
    assert {name: len(channels) for name, channels in hot_channels.items()} == (
        {"0": 16, "2": 16} if recipe == "chon" else {}
    )
    name = "chon" if recipe == "chon" else "nvfp4"
    assert saved["precision"] == {"version": 1, "recipe": name, "steps": {"0": steps, "2": steps}}
    assert set(saved["model"]) == set(mlp().state_dict())

    runner, resumed = new(1)
    runner.load(tmp_path / "state.ckpt", resumed)
    assert train(runner, resumed["model"], resumed["optimizer"], batches(8)[4:]) == expected
    plain = mlp(1)
    plain.load_state_dict(saved["model"])


def test_default_recipe_warns_once_that_its_hot_channels_stay(recwarn):
    runner = Fabric(accelerator="cpu", devices=1, plugins=[FP4Precision(precision="32-true")])
    model = mlp()
    wrapped, optimizer = runner.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(runner, wrapped, optimizer)
    assert all(layer.fp4_recipe == get_recipe("chon") for layer in layers_of(model).values())
    (said,) = (str(w.message) for w in recwarn if "hot channels" in str(w.message))
    assert "FP4Precision('chon', precision='32-true') keeps the hot channels of its first batch" in said
    assert "`choose_channels` of `lightning_fp4.callbacks.hot_channel_refresh`" in said


def test_importing_the_package_is_enough():
    """The README's ``lightning_fp4.fabric.FP4Precision`` after ``import lightning_fp4``, in a fresh process."""
    code = "import lightning_fp4 as f; print(f.fabric.FP4Precision(), f.schedules, f.metrics, f.diagnostics)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("lightning_fp4.fabric.FP4Precision('chon'"), done.stderr


def test_hot_channels_chosen_anew_without_a_trainer():
    """What the warning points to."""
    runner, model = fabric("chon"), mlp()
    wrapped, optimizer = runner.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(runner, wrapped, optimizer)
    layers = layers_of(model)
    before = {name: layer.fp4_hot_channels for name, layer in layers.items()}
    start_scoring(layers)
    train(runner, wrapped, optimizer, [batch * torch.linspace(0, 3, WIDTH) for batch in batches()])
    kept = choose_channels(layers, stop_scoring(layers), reduce=runner.all_reduce)
    assert set(kept) == {"0", "2"}
    assert kept["0"] < 1
    assert not torch.equal(layers["0"].fp4_hot_channels, before["0"])


def test_two_models():
    """As in adversarial training: both are reported, both random states are saved, and they draw different bits."""
    runner = fabric(SR, precision="32-true")
    plugin = runner.strategy.precision
    models = [mlp(), mlp()]
    setups = [runner.setup(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in models]
    train(runner, *setups[0])
    names = ["0", "2", "1.0", "1.2"]
    assert [layer["name"] for layer in plugin.report()["converted"]] == names
    state = plugin.state_dict()
    assert state["steps"] == {"0": 4, "2": 4, "1.0": 0, "1.2": 0}
    assert torch.equal(models[0][0].fp4_rng_state[0], models[1][0].fp4_rng_state[0]) is False
    plugin.load_state_dict({**state, "steps": dict(zip(names, [5, 6, 7, 8], strict=True))})
    assert [int(layer.fp4_rng_state[1]) for m in models for layer in layers_of(m).values()] == [5, 6, 7, 8]
    assert plugin.report()["flops_share"] == 1


def test_same_model_set_up_again_is_one_model():
    model = mlp()
    runner = fabric()
    runner.setup(model)
    runner.setup(model)
    assert len(runner.strategy.precision.report()["converted"]) == 2


def test_log_and_report(caplog):
    caplog.set_level("INFO")
    runner = fabric("mxfp4", ignore_modules=["2"])
    with pytest.raises(RuntimeError, match="has not converted a model yet"):
        runner.strategy.precision.report()
    wrapped = runner.setup(mlp())
    wrapped(batches()[0])
    lines = [r.getMessage() for r in caplog.records if "converted 1 Linear" in r.getMessage()]
    assert len(lines) == 1
    assert "2 (ignore_modules)" in lines[0]
    report = runner.strategy.precision.report()
    assert report["converted"][0]["gemm_paths"]["fprop"] == "fp32"
    assert report["recipe"] == report["converted"][0]["recipe"] == "mxfp4"


def test_plain_backward_is_allowed():
    """Overriding a backward hook would make `loss.backward()` an error in Fabric."""
    model = mlp()
    runner = fabric()
    wrapped, _ = runner.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    wrapped(batches()[0]).square().mean().backward()
    assert model[0].weight.grad is not None


def test_gradient_clipping_by_value():
    model = mlp()
    runner = fabric()
    wrapped, optimizer = runner.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    runner.backward(wrapped(batches()[0]).square().mean())
    gradients = [p.grad.clone() for p in model.parameters()]
    runner.clip_gradients(wrapped, optimizer, clip_val=1e-4)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient.clamp(-1e-4, 1e-4))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_plugin_copies(copied):
    runner = fabric(SR, seed=3)
    runner.setup(mlp())
    twin = copied(runner.strategy.precision)
    assert (twin.recipe, twin.seed) == (SR, 3)
    with pytest.raises(RuntimeError, match="has not converted a model yet"):
        twin.report()


def test_model_goes_back_to_plain():
    model = mlp()
    before = weights(model)
    fabric().setup(model)
    revert_from_fp4(model)
    assert_same_weights(model, before)
    assert type(model[0]) is nn.Linear


def test_fsdp_strategy_takes_the_plugin():
    """Fabric's FSDP refuses what does not derive from its FSDPPrecision."""
    assert FSDPStrategy(precision=FP4Precision()).mixed_precision_config.param_dtype is torch.bfloat16
    with pytest.raises(TypeError, match="FSDP strategy can only work with the `FSDPPrecision` plugin"):
        FSDPStrategy(precision=Precision())


def test_precision_flag_beside_the_plugin():
    with pytest.raises(ValueError, match=r"Received both `precision=.*lightning_fp4\.fabric\.FP4Precision\("):
        Fabric(accelerator="cpu", precision="bf16-mixed", plugins=[FP4Precision()])


def test_arguments_are_those_of_the_trainer_plugin():
    ours, theirs = (inspect.signature(cls).parameters for cls in (FP4Precision, lightning_fp4.FP4Precision))
    assert [*ours, "eval_precision", "reuse_weights"] == [*theirs]
    assert all(ours[name] == theirs[name] for name in ours)
