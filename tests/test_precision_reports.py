"""What FP4Precision tells its user, and how it gets on with other parts of Lightning."""

import inspect
import logging
import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelSummary,
    ThroughputMonitor,
)
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_fp4 import FP4Precision, get_recipe
from tests.helpers import RTN, relative_error
from tests.trainer_models import (
    WIDTH,
    LanguageModel,
    Regressor,
    layers_of,
    messages,
    plugin,
    sgd,
    trainer,
)

SR = get_recipe("nvfp4")


# ----------------------------------------------------------------------------------------------------------------------
# What it says
# ----------------------------------------------------------------------------------------------------------------------


def test_one_line_in_the_log(caplog):
    """T28: how many layers, which not and why, and that FP4 is emulated here; once, not again at the next entry."""
    caplog.set_level(logging.INFO)
    fp4, model = FP4Precision(), LanguageModel(blocks=6)
    runner = trainer(fp4, max_steps=1, limit_val_batches=0)
    runner.fit(model)
    runner.fit(model)
    lines = [message for message in messages(caplog) if "FP4" in message]
    assert len(lines) == 1
    (line,) = lines
    assert line.startswith("FP4Precision('chon', precision='bf16-mixed'): converted 25 Linear layers to FP4 (")
    assert "model.lm_head (weight tied to model.embed_tokens)" in line
    assert "post-QK protection: value projection" in line
    assert "last 1 of 6 blocks" in line
    assert "model.layers (6 x Block)" in line
    assert "FP4 is emulated on cpu" in line


def test_a_recipe_without_fp4_says_so(caplog):
    caplog.set_level(logging.INFO)
    trainer(FP4Precision("high_precision", precision="32-true"), max_steps=1).fit(Regressor())
    (line,) = (message for message in messages(caplog) if "converted" in message)
    assert "The recipe has no FP4 GEMM" in line
    assert "emulated" not in line


def test_report_before_during_and_after():
    fp4, model = FP4Precision(RTN, precision="32-true", ignore_modules=["net.2"]), Regressor()
    with pytest.raises(RuntimeError, match="has not converted a model yet"):
        fp4.report()

    class Before(pl.Callback):
        def on_fit_start(self, trainer, pl_module):
            self.report = trainer.precision_plugin.report()

    callback = Before()
    runner = trainer(fp4, callbacks=[callback])
    runner.fit(model)
    assert callback.report["converted"] == [
        {"name": "net.0", "shape": (WIDTH, WIDTH), "recipe": "nvfp4", "gemm_paths": {}, "ran": False}
    ]
    after = fp4.report()
    assert after["converted"][0]["ran"]
    # The input of the first layer needs no gradient, so its dgrad never ran.
    assert after["converted"][0]["gemm_paths"] == {"fprop": "fp32", "wgrad": "fp32"}
    assert after["gemm_paths"] == {"fprop:fp32": 1, "wgrad:fp32": 1}
    assert after["kept"] == [{"name": "net.2", "shape": (WIDTH, WIDTH), "reason": "ignore_modules"}]
    assert after["flops_share"] == pytest.approx(0.5)
    assert after["recipe"] == "nvfp4"


@pytest.fixture
def asked(monkeypatch):
    """As if on a GPU with FP8 units; the devices that were asked for."""
    devices = []
    monkeypatch.setattr("lightning_fp4.convert._multiplies_on_fp8", lambda recipe, device: not devices.append(device))
    return devices


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "32-true"])
def test_layers_that_bf16_is_faster_for(precision, asked, caplog):
    """In the one line of the log, and as data after the run; in float32 there is no BF16 to compare with."""
    caplog.set_level(logging.INFO)
    fp4 = plugin(precision=precision)
    trainer(fp4, max_steps=1, limit_val_batches=0).fit(Regressor())
    sentence = (
        "2 layers have fewer than 2048 features, where BF16 is faster on this device and FP4 only saves memory: "
        "`min_features=2048` keeps net.0, net.2 in BF16."
    )
    (line,) = (message for message in messages(caplog) if "FP4" in message)
    report = fp4.report()
    marks = [layer.get("recommended") for layer in report["converted"]]
    if precision == "32-true":
        assert "BF16" not in line
        assert (report["recommendations"], marks, asked) == ([], [None, None], [])
    else:
        assert f"converted 2 Linear layers to FP4 (100.0% of Linear FLOPs). {sentence} FP4 is emulated on cpu" in line
        assert (report["recommendations"], marks) == ([sentence], ["bf16", "bf16"])
        assert set(asked) == {torch.device("cpu")}  # where the Trainer runs


@pytest.mark.parametrize("least", [WIDTH, WIDTH + 1])
def test_min_features_in_the_report(least, caplog):
    class Growing(Regressor):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, 64))

        def step(self, batch):
            return self.net(batch).square().mean()

    caplog.set_level(logging.INFO)
    fp4, model = plugin(min_features=least), Growing()
    trainer(fp4, max_steps=1, limit_val_batches=0).fit(model)
    shapes = {} if least == WIDTH else {"net.0": (WIDTH, WIDTH), "net.1": (64, WIDTH)}
    reason = f"smaller than min_features={least}"
    assert fp4.report()["kept"] == [{"name": n, "shape": shape, "reason": reason} for n, shape in shapes.items()]
    assert set(layers_of(model)) == {"net.0", "net.1", "net.2"} - set(shapes)
    (line,) = (message for message in messages(caplog) if "FP4" in message)
    assert (f"kept 2 in high precision: net.0, net.1 ({reason})" in line) is bool(shapes)


class Bypassing(Regressor):
    """Reads a layer's weight in place of calling it."""

    def step(self, batch):
        hidden = nn.functional.linear(batch, self.net[0].weight, self.net[0].bias)
        return nn.functional.mse_loss(self.net[2](self.net[1](hidden)), batch)


@pytest.mark.parametrize("fast", [False, True])
def test_idle_layers_are_named(fast):
    """T17: once, after the first step."""
    with pytest.warns(UserWarning, match=r"1 converted layers were not called .*\(net\.0\)") as caught:
        trainer(plugin(), fast_dev_run=fast).fit(Bypassing())
    assert sum("were not called" in str(w.message) for w in caught) == 1


def test_no_false_alarm_of_idle_layers_with_two_optimizers():
    """The second optimizer's layers run after the first optimizer has stepped."""

    class Two(Regressor):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self):
            return sgd(self.net[0].parameters()), sgd(self.net[2].parameters())

        def training_step(self, batch, batch_idx):
            for layer, optimizer in zip((self.net[0], self.net[2]), self.optimizers(), strict=True):
                self.manual_backward(layer(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()

    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*were not called.*")
        trainer(plugin(), limit_val_batches=0).fit(Two())


def test_transformer_encoder_fast_path_is_named():
    """T17: in eval mode it reads `linear1.weight` directly, so evaluation would not be in FP4."""

    class Encoder(Regressor):
        def __init__(self):
            super().__init__()
            self.net = nn.TransformerEncoderLayer(WIDTH, 2, 64, batch_first=True, dropout=0.0)

        def step(self, batch):
            return self.net(batch[None]).square().mean()

    fp4 = plugin()
    with pytest.warns(UserWarning, match="fast path in eval mode") as caught:
        trainer(fp4).fit(Encoder())
    assert not any("were not called" in str(w.message) for w in caught)
    assert {layer["name"] for layer in fp4.report()["converted"]} == {"net.linear1", "net.linear2"}
    kept = {layer["name"]: layer["reason"] for layer in fp4.report()["kept"]}
    assert kept == {"net.self_attn.out_proj": "nn.MultiheadAttention reads its weight without calling it"}


def test_bfloat16_master_weights_are_warned_of():
    """T27: under bf16-mixed, where they are an accident; not under bf16-true, and not for frozen ones (LoRA)."""
    with pytest.warns(UserWarning, match="trainable bfloat16 parameters, which lose small updates"):
        trainer(plugin(precision="bf16-mixed"), max_steps=1).fit(Regressor().bfloat16())

    frozen = Regressor()
    frozen.net[0].bfloat16().requires_grad_(False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*bfloat16 parameters.*")
        trainer(plugin(precision="bf16-true"), max_steps=1).fit(Regressor().bfloat16())
        trainer(plugin(precision="bf16-mixed"), max_steps=1).fit(frozen)


# ----------------------------------------------------------------------------------------------------------------------
# Beside other parts of Lightning
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"fast_dev_run": True}, {"barebones": True}, {"detect_anomaly": True}], ids=str)
def test_trainer_modes(options):
    model = Regressor()
    kwargs = {"accelerator": "cpu", "max_epochs": 1, "plugins": [plugin(SR)], **options}
    if "barebones" not in options:
        kwargs.update(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    pl.Trainer(**kwargs).fit(model)
    assert len(layers_of(model)) == 2
    assert len(model.losses) == (1 if "fast_dev_run" in options else 4)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_model_summary_and_throughput_monitor(precision, tmp_path):
    class Measured(Regressor):
        # Lightning casts no example inputs, so with any plugin they do not fit a bfloat16 model.
        example_input_array = None if precision == "bf16-true" else torch.ones(2, WIDTH)

        def forward(self, x):
            return self.net(x)

    runner = trainer(
        plugin(precision=precision),
        logger=CSVLogger(tmp_path),
        log_every_n_steps=2,
        enable_model_summary=True,
        callbacks=[ModelSummary(max_depth=3), ThroughputMonitor(batch_size_fn=len, window_size=2)],
    )
    runner.fit(Measured(samples=64))
    assert runner.precision == precision
    (logged,) = (v for k, v in runner.logged_metrics.items() if k.startswith("train") and k.endswith("samples_per_sec"))
    assert logged > 0


def test_averaging_with_buffers_in_later_modules():
    """EMA pairs parameters and buffers by position, before conversion: no layer may add one."""

    class Normalised(Regressor):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(self.net, nn.BatchNorm1d(WIDTH))

    average = EMAWeightAveraging(decay=0.5)
    model = Normalised()
    runner = trainer(plugin(), callbacks=[average])
    runner.fit(model)
    plain = Normalised()
    trainer(plugin("high_precision"), callbacks=[EMAWeightAveraging(decay=0.5)]).fit(plain)
    for name, value in plain.state_dict().items():
        assert model.state_dict()[name].shape == value.shape
        assert relative_error(model.state_dict()[name], value) < 0.3, name
    assert int(model.net[1].num_batches_tracked) == int(plain.net[1].num_batches_tracked) > 0


def test_lora_freezing_and_unfreezing_mid_run():
    class Unfreeze(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            pl_module.net[0].requires_grad_(batch_idx >= 2)

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            weight_now = pl_module.net[0].weight.detach()
            seen.append(torch.equal(weight_now, initial))

    seen = []
    model = Regressor(sgd)
    initial = model.net[0].weight.detach().clone()
    trainer(plugin(SR), callbacks=[Unfreeze()]).fit(model)
    assert seen == [True, True, False, False]


def test_plugin_has_no_truth_value_and_no_length():
    """Lightning asks `isinstance(plugins, Iterable)` and `if self.precision_plugin:`."""
    for attribute in ("__iter__", "__len__", "__bool__"):
        assert not hasattr(FP4Precision, attribute)
    assert trainer(plugins=plugin()).precision_plugin.recipe is RTN


def test_docstring_lists_every_argument():
    """LightningCLI shows it as help."""
    documented = inspect.getdoc(FP4Precision)
    for name in list(inspect.signature(FP4Precision).parameters):
        assert f"    {name}: " in documented
