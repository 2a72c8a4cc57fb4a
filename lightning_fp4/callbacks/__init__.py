"""Callbacks that steer the recipe, keep a run alive and show what happens in it: one class, one file."""

from lightning_fp4.callbacks.adaptive_gradient_clipping import AdaptiveGradientClipping
from lightning_fp4.callbacks.averis_toggle import AverisToggle
from lightning_fp4.callbacks.fp4_health_check import FP4HealthCheck, FP4TrainingDivergedError
from lightning_fp4.callbacks.hot_channel_refresh import HotChannelRefresh
from lightning_fp4.callbacks.precision_monitor import PrecisionMonitor
from lightning_fp4.callbacks.recipe_schedule import RecipeSchedule
from lightning_fp4.callbacks.rollback import latest_healthy_checkpoint

__all__ = [
    "AdaptiveGradientClipping",
    "AverisToggle",
    "FP4HealthCheck",
    "FP4TrainingDivergedError",
    "HotChannelRefresh",
    "PrecisionMonitor",
    "RecipeSchedule",
    "latest_healthy_checkpoint",
]
