"""FP4 training of large language models with PyTorch Lightning."""

from lightning_fp4 import diagnostics, fabric, metrics, schedules
from lightning_fp4.callbacks import (
    AdaptiveGradientClipping,
    AverisToggle,
    FP4HealthCheck,
    FP4TrainingDivergedError,
    HotChannelRefresh,
    PrecisionMonitor,
    RecipeSchedule,
    latest_healthy_checkpoint,
)
from lightning_fp4.convert import convert_to_fp4, fp4_layers, plan_conversion, revert_from_fp4, set_recipe, use_recipe
from lightning_fp4.formats import MXFP4, NVFP4, NVFP4_2D, NVFP4_ROW, BlockFormat
from lightning_fp4.linear import FP4Linear
from lightning_fp4.monitoring import PrecisionReport, layer_sensitivity, monitor_precision
from lightning_fp4.precision import FP4Precision
from lightning_fp4.quantizer import Centering, Quantizer, Rounding, ScaleRule
from lightning_fp4.recipes import Gemm, HotChannels, HotChannelUpdates, LayerRule, Recipe, get_recipe, list_recipes
from lightning_fp4.tensor import FP4Tensor

__all__ = [
    "FP4Precision",
    "HotChannelRefresh",
    "RecipeSchedule",
    "AverisToggle",
    "AdaptiveGradientClipping",
    "FP4HealthCheck",
    "FP4TrainingDivergedError",
    "latest_healthy_checkpoint",
    "PrecisionMonitor",
    "monitor_precision",
    "PrecisionReport",
    "layer_sensitivity",
    "convert_to_fp4",
    "plan_conversion",
    "set_recipe",
    "use_recipe",
    "fp4_layers",
    "revert_from_fp4",
    "list_recipes",
    "get_recipe",
    "Recipe",
    "Gemm",
    "HotChannels",
    "HotChannelUpdates",
    "LayerRule",
    "Quantizer",
    "Centering",
    "Rounding",
    "ScaleRule",
    "BlockFormat",
    "NVFP4",
    "NVFP4_ROW",
    "NVFP4_2D",
    "MXFP4",
    "FP4Tensor",
    "FP4Linear",
    "fabric",
    "metrics",
    "diagnostics",
    "schedules",
]
