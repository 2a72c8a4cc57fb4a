"""The registry: names, dicts, objects, error sentences, and a recipe that arrives as one file."""

import dataclasses
import sys

import pytest
import torch
from torch import nn

import lightning_fp4.recipes
from lightning_fp4 import NVFP4, Gemm, Quantizer, Recipe, convert_to_fp4, get_recipe, list_recipes
from tests.helpers import run

NEW = '''"""A recipe that someone wrote today."""

from lightning_fp4.quantizer import Quantizer
from lightning_fp4.recipes.base import Gemm, Recipe


def half_and_half(*, hadamard: int | None = None) -> Recipe:
    """Forward in four bits, backward in high precision.

    Args:
        hadamard: rotate both operands in groups of this length.
    """
    return Recipe(name="half_and_half", fprop=Gemm(lhs=Quantizer(), rhs=Quantizer(), hadamard=hadamard))
'''


def test_known_recipes_have_a_summary():
    recipes = list_recipes()
    assert {"nvfp4", "mxfp4", "high_precision"} <= set(recipes)
    assert list(recipes) == sorted(recipes)
    assert all(summary.endswith((".", ":")) and len(summary) > 20 for summary in recipes.values())


@pytest.mark.parametrize("name", list_recipes())
def test_defaults_of_every_recipe(name):
    recipe = get_recipe(name)
    assert isinstance(recipe, Recipe)
    assert recipe == get_recipe(name)
    assert hash(recipe) == hash(get_recipe({"name": name}))
    assert recipe.name.startswith(name)
    assert get_recipe(recipe) is recipe
    assert recipe.quantizes is (name != "high_precision")
    # Stochastic rounding on weights or activations diverges (numerics.md).
    for gemm, rounded in ((recipe.fprop, ("lhs", "rhs")), (recipe.dgrad, ("rhs",)), (recipe.wgrad, ("rhs",))):
        for side in rounded:
            quantizer = getattr(gemm, side) if gemm else None
            assert quantizer is None or quantizer.rounding.value == "nearest"


def test_options():
    recipe = get_recipe("nvfp4", hadamard=False, last_blocks=4)
    assert recipe.wgrad.hadamard is None
    assert recipe.last_blocks == 4
    assert get_recipe({"name": "nvfp4", "hadamard": False}, last_blocks=4) == recipe
    assert get_recipe("nvfp4").wgrad.hadamard == 16
    assert get_recipe("nvfp4").dgrad.lhs == Quantizer(rounding="stochastic", scale_rule="unbiased")
    assert get_recipe("nvfp4", weight_2d=False).fprop.rhs.format is NVFP4
    assert get_recipe("nvfp4", stochastic_rounding=False).wgrad.lhs.rounding.value == "nearest"
    assert get_recipe("nvfp4", forward_scale="four_over_six").fprop.lhs.scale_rule.value == "four_over_six"
    assert get_recipe("mxfp4").wgrad.hadamard == 32


def test_a_dict_is_left_as_it_was():
    given = {"name": "nvfp4", "hadamard": False}
    get_recipe(given)
    assert given == {"name": "nvfp4", "hadamard": False}


@pytest.mark.parametrize(
    ("recipe", "options", "error", "match"),
    [
        ("nvpf4", {}, ValueError, r"'nvpf4' is not a known recipe\. Did you mean 'nvfp4'\? Available: .*'mxfp4'"),
        ("zzz", {}, ValueError, r"'zzz' is not a known recipe\. Available:"),
        ("base", {}, ValueError, "'base' is not a known recipe"),
        ("nvfp4", {"hadamrd": True}, ValueError, r"'nvfp4' has no option 'hadamrd'\. Its options: .*hadamard"),
        ("high_precision", {"x": 1}, ValueError, r"no option 'x'\. Its options: none"),
        ({"hadamard": False}, {}, ValueError, r"needs its name under 'name', got the keys \['hadamard'\]"),
        ({"name": "nope"}, {}, ValueError, "'nope' is not a known recipe"),
        (None, {}, TypeError, "A recipe is a name, a dict with a 'name', or a `Recipe`; got None"),
        (4, {}, TypeError, "got 4"),
        (Recipe(name="mine"), {"hadamard": False}, ValueError, r"takes no options, got \['hadamard'\]"),
        ("nvfp4", {"gradient_scale": "up"}, ValueError, "'up' is not a valid ScaleRule"),
        ("nvfp4", {"last_blocks": -1}, ValueError, r"last_blocks=-1.*a count of blocks or a fraction"),
        ("nvfp4", {"first_blocks": 2.5}, ValueError, r"first_blocks=2.5.*a count of blocks or a fraction"),
    ],
)
def test_error_sentences(recipe, options, error, match):
    with pytest.raises(error, match=match):
        get_recipe(recipe, **options)


def test_a_recipe_is_one_new_file(tmp_path, monkeypatch):
    """A fresh reader drops one file into the folder: listed, built with its options, and trained with."""
    (tmp_path / "half_and_half.py").write_text(NEW)
    monkeypatch.setattr(lightning_fp4.recipes, "__path__", [*lightning_fp4.recipes.__path__, str(tmp_path)])
    try:
        assert list_recipes()["half_and_half"] == "Forward in four bits, backward in high precision."
        recipe = get_recipe({"name": "half_and_half", "hadamard": 8})
        assert recipe.fprop.hadamard == 8
        with pytest.raises(ValueError, match=r"Did you mean 'half_and_half'\?"):
            get_recipe("half_and_halve")
        model = convert_to_fp4(nn.Sequential(nn.Linear(32, 16)), "half_and_half")
        plain = nn.Linear(32, 16)
        plain.load_state_dict(model[0].state_dict())
        x, grad = torch.randn(8, 32), torch.randn(8, 16)
        actual, expected = run(model[0], x, grad), run(plain, x, grad)
        assert 0.05 < float((actual["y"] - expected["y"]).norm() / expected["y"].norm()) < 0.25
        assert float((actual["dw"] - expected["dw"]).norm() / expected["dw"].norm()) < 1e-6
    finally:
        sys.modules.pop("lightning_fp4.recipes.half_and_half", None)
        if hasattr(lightning_fp4.recipes, "half_and_half"):
            delattr(lightning_fp4.recipes, "half_and_half")
    monkeypatch.undo()
    assert "half_and_half" not in list_recipes()


def test_gemm_combinations_that_mean_nothing():
    with pytest.raises(ValueError, match="blocks of the same length"):
        Gemm(lhs=Quantizer(), rhs=get_recipe("mxfp4").fprop.rhs)
    with pytest.raises(ValueError, match="one of them is None"):
        Gemm(lhs=Quantizer(), hadamard=16)
    for size in (0, 3, 64, True):
        with pytest.raises(ValueError, match=r"must be one of \(2, 4, 8, 16, 32\)"):
            Gemm(lhs=Quantizer(), rhs=Quantizer(), hadamard=size)


def test_recipes_are_frozen_and_replaced():
    recipe = get_recipe("nvfp4")
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.name = "other"
    assert dataclasses.replace(recipe, wgrad=None).wgrad is None
    assert not Recipe(name="nothing", fprop=Gemm()).quantizes
