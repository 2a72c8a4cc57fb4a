"""FP4Precision from the YAML files and the command line of LightningCLI."""

import sys
from unittest import mock

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI

from lightning_fp4 import FP4Precision, get_recipe
from tests.trainer_models import Regressor, layers_of

pytest.importorskip("jsonargparse")

QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


class CliModel(Regressor):
    """A model that the command line can make."""

    def __init__(self, samples: int = 32) -> None:
        super().__init__(samples=samples)


def cli(tmp_path, plugins, *arguments, run=True, **trainer_options):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"trainer": {**QUIET, **trainer_options, "plugins": plugins}}))
    command = ["main.py", *(["fit"] if run else []), "--config", str(config), *arguments]
    with mock.patch.object(sys, "argv", command):
        return LightningCLI(CliModel, save_config_callback=None, run=run)


def fp4(**init_args):
    return [{"class_path": "lightning_fp4.FP4Precision", "init_args": init_args}]


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("nvfp4", get_recipe("nvfp4")),
        ({"name": "nvfp4"}, get_recipe("nvfp4")),
        ({"name": "nvfp4", "hadamard": False}, get_recipe("nvfp4", hadamard=False)),
        (
            {"name": "nvfp4", "stochastic_rounding": False, "last_blocks": 0},
            get_recipe("nvfp4", stochastic_rounding=False, last_blocks=0),
        ),
        ({"name": "mxfp4", "last_blocks": 0.5}, get_recipe("mxfp4", last_blocks=0.5)),
    ],
    ids=str,
)
def test_recipes(recipe, expected, tmp_path):
    """A dict with nothing but a name must not become `Recipe(name=...)`, which would quantise nothing."""
    fit = cli(tmp_path, fp4(recipe=recipe))
    plugin = fit.trainer.precision_plugin
    assert plugin.recipe == expected
    assert plugin.recipe.quantizes
    assert {layer.fp4_recipe for layer in layers_of(fit.model).values()} == {expected}
    assert len(fit.model.losses) == 4
    assert fit.model.losses[-1] != fit.model.losses[0]


def test_default_recipe(tmp_path):
    fit = cli(tmp_path, fp4())
    assert {layer.fp4_recipe for layer in layers_of(fit.model).values()} == {get_recipe("chon")}


def test_all_arguments(tmp_path):
    plugin = cli(
        tmp_path,
        fp4(
            recipe="mxfp4",
            precision="bf16-true",
            layers="mlp",
            ignore_modules=["lm_head", "vision"],
            first_blocks=1,
            last_blocks=0.25,
            lora_adapters=True,
            min_features=2048,
            seed=3,
            eval_precision="base",
        ),
        run=False,
    ).trainer.precision_plugin
    assert plugin.precision == "bf16-true"
    assert (plugin.seed, plugin.eval_precision) == (3, "base")
    assert plugin.choice == {
        "layers": "mlp",
        "ignore_modules": ["lm_head", "vision"],
        "filter_fn": None,
        "first_blocks": 1,
        "last_blocks": 0.25,
        "lora_adapters": True,
        "min_features": 2048,
    }


@pytest.mark.parametrize(("least", "converted"), [(None, 2), (0, 2), (32, 2), (33, 0)])
@pytest.mark.filterwarnings("ignore:No Linear layer runs in FP4")
def test_min_features(least, converted, tmp_path):
    fit = cli(tmp_path, fp4(min_features=least))
    assert len(layers_of(fit.model)) == converted
    command = ["--trainer.plugins.min_features", "null" if least is None else str(least)]
    fit = cli(tmp_path, [], "--trainer.plugins+=FP4Precision", *command)
    assert len(layers_of(fit.model)) == converted


@pytest.mark.parametrize("value", [-1, 2048.5, True, "wide"])
def test_bad_min_features(value, tmp_path, capsys):
    """Other types are jsonargparse's to refuse, which names the argument."""
    with pytest.raises((SystemExit, ValueError)) as raised:
        cli(tmp_path, fp4(min_features=value), run=False)
    shown = str(raised.value) + capsys.readouterr().err
    assert "min_features" in shown
    if value == -1:
        assert "`min_features=-1` is negative, and no layer is that small. Give a whole number of features" in shown


def _no_net_0(module, name):
    return name != "net.0"


def test_filter_function_by_import_path(tmp_path):
    fit = cli(tmp_path, fp4(filter_fn=f"{__name__}._no_net_0"))
    assert set(layers_of(fit.model)) == {"net.2"}


@pytest.mark.parametrize("precision", [None, "absent"])
def test_precision_null(precision, tmp_path):
    options = {} if precision == "absent" else {"precision": precision}
    assert cli(tmp_path, fp4(), run=False, **options).trainer.precision == "bf16-mixed"


def test_precision_beside_the_plugin(tmp_path):
    with pytest.raises((SystemExit, ValueError)):
        cli(tmp_path, fp4(), run=False, precision="bf16-mixed")


def test_command_line(tmp_path):
    """The short class name works once the package is imported, and arguments after it."""
    command = ["--trainer.plugins+=FP4Precision", "--trainer.plugins.recipe=mxfp4", "--trainer.plugins.seed=1"]
    plugin = cli(tmp_path, [], *command, run=False).trainer.precision_plugin
    assert isinstance(plugin, FP4Precision)
    assert (plugin.recipe, plugin.seed) == (get_recipe("mxfp4"), 1)


@pytest.mark.parametrize("recipe", ["nvfp4", {"name": "nvfp4"}, {"name": "nvfp4", "hadamard": False}], ids=str)
def test_print_config_round_trip(recipe, tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli(tmp_path, fp4(recipe=recipe, ignore_modules=["net.0"]), "--print_config")
    printed = yaml.safe_load(capsys.readouterr().out)
    (plugin,) = printed["trainer"]["plugins"]
    assert plugin["class_path"].endswith("FP4Precision")
    assert plugin["init_args"]["recipe"] == recipe
    assert plugin["init_args"]["precision"] == "bf16-mixed"

    config = tmp_path / "printed.yaml"
    config.write_text(yaml.safe_dump(printed))
    with mock.patch.object(sys, "argv", ["main.py", "fit", "--config", str(config)]):
        fit = LightningCLI(CliModel, save_config_callback=None)
    assert fit.trainer.precision_plugin.recipe == get_recipe(recipe)
    assert set(layers_of(fit.model)) == {"net.2"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"recipe": "nvfp"}, "'nvfp' is not a known recipe. Did you mean 'nvfp4'? Available: "),
        ({"recipe": {"name": "nvfp4", "hadamar": False}}, "has no option 'hadamar'"),
        ({"recipe": {"hadamard": False}}, "needs its name under 'name'"),
    ],
    ids=str,
)
def test_wrong_recipe_says_our_sentence(arguments, sentence, tmp_path, capsys):
    with pytest.raises((SystemExit, ValueError)) as raised:
        cli(tmp_path, fp4(**arguments), run=False)
    assert sentence in str(raised.value) + capsys.readouterr().err


def test_help_explains_every_argument(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli(tmp_path, [], "--trainer.plugins.help=FP4Precision", run=False)
    shown = " ".join(capsys.readouterr().out.split())
    for text in (
        "a recipe's name (see ``list_recipes``)",
        "modules to keep in the base precision",
        "layers whose smaller side, of ``in_features`` and ``out_features``",
        "the base precision",
    ):
        assert text in shown
