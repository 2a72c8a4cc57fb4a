"""The recipes by name. This folder is the registry: ``recipes/NAME.py`` holds a function ``NAME(...) -> Recipe``.

To add a recipe, add one file. Its keyword arguments become the recipe's options, its first docstring line the summary
that ``list_recipes`` shows.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from lightning_fp4.recipes.base import Gemm, HotChannels, HotChannelUpdates, LayerRule, Recipe

__all__ = ["Gemm", "HotChannelUpdates", "HotChannels", "LayerRule", "Recipe", "get_recipe", "list_recipes"]


def _names() -> list[str]:
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "base" and not m.name.startswith("_"))


def _builder(name: str) -> Callable[..., Recipe]:
    return getattr(importlib.import_module(f"{__name__}.{name}"), name)


def list_recipes() -> dict[str, str]:
    """Every recipe's name with one line on what it does."""
    return {name: (inspect.getdoc(_builder(name)) or "").partition("\n")[0] for name in _names()}


def get_recipe(recipe: str | Recipe | Mapping[str, Any], **options: Any) -> Recipe:
    """Turn a recipe's name, dictionary or object into a :class:`Recipe`.

    Args:
        recipe: a name, for example ``"nvfp4"``; a mapping with the name under ``"name"`` and options beside it, for
            example ``{"name": "nvfp4", "hadamard": False}``; or a :class:`Recipe`, which is returned as it is.
        **options: options of the recipe, see its function in ``lightning_fp4.recipes``.

    Raises:
        ValueError: for an unknown name or option, or options beside a finished :class:`Recipe`.
        TypeError: for anything that is none of the three.
    """
    if isinstance(recipe, Recipe):
        if options:
            raise ValueError(f"A finished recipe takes no options, got {sorted(options)}. Use `dataclasses.replace`.")
        return recipe
    if isinstance(recipe, Mapping):
        given = {**recipe, **options}
        if "name" not in given:
            raise ValueError(f"A recipe given as a dict needs its name under 'name', got the keys {sorted(given)}.")
        return get_recipe(given.pop("name"), **given)
    if not isinstance(recipe, str):
        raise TypeError(f"A recipe is a name, a dict with a 'name', or a `Recipe`; got {recipe!r}.")
    names = _names()
    if recipe not in names:
        close = difflib.get_close_matches(recipe, names, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{recipe!r} is not a known recipe.{hint} Available: {', '.join(map(repr, names))}.")
    builder = _builder(recipe)
    known = inspect.signature(builder).parameters
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(
            f"The recipe {recipe!r} has no option {unknown[0]!r}. Its options: {', '.join(known) or 'none'}."
        )
    return builder(**options)
