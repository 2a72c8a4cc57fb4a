"""Callbacks that steer the recipe while training: one class, one file."""

from lightning_fp4.callbacks.averis_toggle import AverisToggle
from lightning_fp4.callbacks.hot_channel_refresh import HotChannelRefresh
from lightning_fp4.callbacks.recipe_schedule import RecipeSchedule

__all__ = ["AverisToggle", "HotChannelRefresh", "RecipeSchedule"]
