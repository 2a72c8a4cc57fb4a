"""What FP4Precision refuses or warns of, and the sentences it does so with; Lightning's own checks included."""

import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_fp4 import FP4Precision, fabric, revert_from_fp4
from tests.trainer_models import WIDTH, Regressor, layers_of, plugin, trainer


@pytest.mark.parametrize("cls", [FP4Precision, fabric.FP4Precision])
@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"recipe": "nvfp"}, ValueError, "`FP4Precision(recipe='nvfp')`: 'nvfp' is not a known recipe. Did you mean "
         "'nvfp4'? Available: "),
        ({"recipe": "zzz"}, ValueError, "'zzz' is not a known recipe. Available: "),
        ({"recipe": {"hadamard": False}}, ValueError, "needs its name under 'name', got the keys ['hadamard']"),
        ({"recipe": {"name": "nvfp4", "hadamar": False}}, ValueError, "has no option 'hadamar'. Its options: "),
        ({"recipe": None}, TypeError, "`FP4Precision(recipe=None)`: A recipe is a name, a dict with a 'name', or a"),
        ({"recipe": 4}, TypeError, "got 4"),
        ({"precision": "16-mixed"}, ValueError, "`FP4Precision(precision='16-mixed')` is not supported. `precision` "
         "is the base precision around the FP4 layers and must be one of: 'bf16-mixed', 'bf16-true', '32-true'."),
        ({"precision": "bf16"}, ValueError, "must be one of"),
        ({"precision": 32}, ValueError, "must be one of"),
        ({"precision": None}, ValueError, "must be one of"),
        ({"layers": "mpl"}, ValueError, "`layers='mpl'` must be 'all', 'mlp' or 'mlp+attention_output'"),
        ({"ignore_modules": "lm_head"}, TypeError, "must be a collection of names, for example ['lm_head']"),
        ({"filter_fn": "mlp"}, TypeError, "`filter_fn='mlp'` must be a function of a module and its name, for example"),
        ({"last_blocks": "2"}, ValueError, "last_blocks='2')` must be a count of blocks or a fraction"),
        ({"first_blocks": float("nan")}, ValueError, "first_blocks=nan)` must be a count of blocks or a fraction"),
        ({"min_features": -1}, ValueError, "`min_features=-1` is negative, and no layer is that small. Give a whole"),
        ({"min_features": 2048.0}, TypeError, "`min_features=2048.0` is of type float. Give a whole number of "),
        ({"min_features": True}, TypeError, "`min_features=True` is of type bool. "),
        ({"min_features": "2048"}, TypeError, "`min_features='2048'` is of type str. "),
    ],
)  # fmt: skip
def test_bad_arguments_fail_at_construction(cls, arguments, error, sentence):
    """On the login node already, not when the job starts."""
    with pytest.raises(error) as raised:
        cls(**arguments)
    assert sentence in str(raised.value)


def test_bad_eval_precision():
    with pytest.raises(ValueError, match=r"`FP4Precision\(eval_precision='bf16'\)` must be 'fp4' or 'base'"):
        FP4Precision(eval_precision="bf16")


def test_settings_are_keywords():
    with pytest.raises(TypeError):
        FP4Precision("nvfp4", "bf16-mixed")


# ----------------------------------------------------------------------------------------------------------------------
# Models that FP4 cannot do much for
# ----------------------------------------------------------------------------------------------------------------------


def test_model_without_linear_layers():
    model = Regressor()
    model.net = nn.Conv1d(8, 8, 1)
    with pytest.raises(TypeError, match=r"no Linear layers that can be converted to FP4 \(found 0, 0 skipped\)"):
        trainer(plugin()).fit(model)


def test_model_whose_linear_layers_cannot_be_converted():
    model = Regressor()
    model.net = nn.LazyLinear(WIDTH)
    with pytest.raises(TypeError, match=r"found 1, 1 skipped.*net: lazy: it has no weight yet"):
        trainer(plugin()).fit(model)


def test_everything_kept_is_a_warning():
    with pytest.warns(
        UserWarning, match=r"No Linear layer runs in FP4: all 2 are kept in high precision \(filter_fn\)"
    ):
        trainer(plugin(filter_fn=lambda module, name: False)).fit(Regressor())


def test_misspelt_ignore_name_is_a_warning():
    with pytest.warns(UserWarning, match="`ignore_modules`: 'lm_haed' matches no Linear layer of the model") as caught:
        trainer(plugin(ignore_modules=["lm_haed", "net.0"])).fit(Regressor())
    assert not any("'net.0'" in str(w.message) for w in caught)


def test_ignored_layer_that_is_fp4_already_is_a_warning():
    model = Regressor()
    trainer(plugin()).fit(model)
    with pytest.warns(UserWarning, match=r"net\.2 stay FP4 in spite of `ignore_modules`.*`revert_from_fp4\(model\)`"):
        trainer(plugin(ignore_modules=["net.2"])).fit(model)
    trainer(plugin(ignore_modules=["net.2"])).fit(revert_from_fp4(model))
    assert set(layers_of(model)) == {"net.0"}


def test_small_layer_that_is_fp4_already_is_a_warning():
    model = Regressor()
    trainer(plugin()).fit(model)
    choice = {"min_features": WIDTH + 1, "ignore_modules": ["net.2"]}
    with pytest.warns(
        UserWarning, match=r"net\.0, net\.2 stay FP4 in spite of `min_features`.*`revert_from_fp4"
    ) as caught:
        trainer(plugin(**choice)).fit(model)
    assert sum(": net.2 stay FP4 in spite of `ignore_modules`" in str(w.message) for w in caught) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*in spite of.*")
        trainer(plugin(min_features=WIDTH)).fit(model)


# ----------------------------------------------------------------------------------------------------------------------
# The Trainer's own checks: what the user sees names the plugin
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true", 32])
def test_precision_flag_beside_the_plugin(precision):
    with pytest.raises(ValueError, match=r"Received both `precision=.*` and `plugins=.*FP4Precision\('chon', prec"):
        trainer(FP4Precision(), precision=precision)


def test_precision_none_beside_the_plugin_is_fine():
    """What a YAML file over a default config says."""
    assert trainer(FP4Precision(), precision=None).precision == "bf16-mixed"


@pytest.mark.parametrize("other", [FP4Precision, Precision, lambda: MixedPrecision("bf16-mixed", "cpu")])
def test_two_precision_plugins(other):
    with pytest.raises(MisconfigurationException, match="Received multiple values for Precision flags"):
        trainer(FP4Precision(), other())


@pytest.mark.parametrize("plugins", ["nvfp4", FP4Precision, [FP4Precision], "chon"])
def test_plugins_that_are_no_instances(plugins):
    with pytest.raises(MisconfigurationException, match="Found invalid type for plugin"):
        trainer(plugins=plugins)


def test_plugin_given_to_the_strategy():
    model = Regressor()
    trainer(strategy=pl.strategies.SingleDeviceStrategy("cpu", precision_plugin=plugin())).fit(model)
    assert len(layers_of(model)) == 2
    with pytest.raises(MisconfigurationException, match="precision set through both strategy class and plugins"):
        trainer(plugin(), strategy=DDPStrategy(precision_plugin=plugin()))


def test_plugin_given_to_the_strategy_wins_over_the_flag():
    """Lightning drops `precision=` there without a word, and the plugin cannot know; what is shown is true at least."""
    strategy = pl.strategies.SingleDeviceStrategy("cpu", precision_plugin=plugin())
    assert trainer(precision="bf16-mixed", strategy=strategy).precision == "32-true"


def test_no_precision_string():
    """Lightning's strings are a closed list: `plugins=` is the only way in."""
    with pytest.raises(ValueError, match="Precision 'nvfp4' is invalid"):
        trainer(precision="nvfp4")


# ----------------------------------------------------------------------------------------------------------------------
# The wrong library, the wrong strategy
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(32, 32)), Regressor()], ids=["module", "lightning_module"])
def test_trainer_plugin_under_fabric(model):
    runner = Fabric(accelerator="cpu", devices=1, plugins=[FP4Precision()])
    with pytest.raises(MisconfigurationException, match=r"With Fabric, use `lightning_fp4\.fabric\.FP4Precision`"):
        runner.setup(model)
    assert not layers_of(model)


def test_fabric_plugin_under_a_trainer():
    """Lightning refuses it; the plugin's name says which one it is."""
    with pytest.raises(
        MisconfigurationException, match=r"invalid type for plugin lightning_fp4\.fabric\.FP4Precision\("
    ):
        trainer(fabric.FP4Precision())


def test_pytorch_lightning_trainer():
    """Another copy of the same library: its check comes before any code of ours, and shows the plugin's name."""
    pytorch_lightning = pytest.importorskip("pytorch_lightning")
    with pytest.raises(Exception, match=r"Found invalid type for plugin FP4Precision\('chon'"):
        pytorch_lightning.Trainer(accelerator="cpu", logger=False, plugins=[FP4Precision()])


def test_pytorch_lightning_module_under_our_trainer():
    pytorch_lightning = pytest.importorskip("pytorch_lightning")
    with pytest.raises(TypeError, match="You passed a `pytorch_lightning` object"):
        trainer(plugin()).fit(pytorch_lightning.LightningModule())


def test_deepspeed():
    strategy = DeepSpeedStrategy.__new__(DeepSpeedStrategy)  # deepspeed itself need not be installed
    fp4, model = plugin(), Regressor()
    model.trainer = trainer()
    model.trainer.strategy.__class__ = type("Stub", (DeepSpeedStrategy,), {"__del__": lambda self: None})
    assert isinstance(model.trainer.strategy, type(strategy))
    with pytest.raises(MisconfigurationException, match=r"does not support `DeepSpeedStrategy`.*ModelParallelStrategy"):
        fp4.convert_module(model)
    assert not layers_of(model)


def test_fsdp_strategy_takes_the_plugin():
    """It takes no plugin that does not derive from Lightning's FSDPPrecision."""
    strategy = FSDPStrategy(precision_plugin=plugin(precision="bf16-mixed"))
    assert strategy.mixed_precision_config.param_dtype is torch.bfloat16
    assert FSDPStrategy(precision_plugin=plugin()).mixed_precision_config.param_dtype is torch.float32
    with pytest.raises(TypeError, match="FSDP strategy can only work with the `FSDPPrecision` plugin"):
        FSDPStrategy(precision_plugin=Precision())


def test_clipping_by_norm_with_only_submodules_in_fsdp():
    fp4, model = plugin(), Regressor()
    optimizer = model.configure_optimizers()
    fp4.connect(model, [optimizer], [])
    fp4.clip_grad_by_norm(optimizer, 1.0)  # no FSDP at all
    model.wrapped = nn.Module()
    model.wrapped.__class__ = type("Wrapped", (FullyShardedDataParallel,), {})
    with pytest.raises(MisconfigurationException, match="needs the whole model in one `FullyShardedDataParallel`"):
        fp4.clip_grad_by_norm(optimizer, 1.0)


def test_safe_lightning_is_required():
    """2.6.2 and 2.6.3 on PyPI were malicious; 2.6.6 closes a hole in `load_from_checkpoint`."""
    assert '"lightning>=2.6.6"' in (Path(__file__).parents[1] / "pyproject.toml").read_text()


def test_no_warning_in_a_plain_run():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=UserWarning, message=".*FP4.*")
        trainer(plugin("nvfp4", precision="bf16-mixed")).fit(Regressor())
