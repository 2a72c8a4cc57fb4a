"""Callbacks that keep an FP4 run alive and show what happens in it: one class, one file."""

from lightning_fp4.callbacks.adaptive_gradient_clipping import AdaptiveGradientClipping
from lightning_fp4.callbacks.fp4_health_check import FP4HealthCheck, FP4TrainingDivergedError
from lightning_fp4.callbacks.precision_monitor import PrecisionMonitor
from lightning_fp4.callbacks.rollback import latest_healthy_checkpoint

__all__ = [
    "AdaptiveGradientClipping",
    "FP4HealthCheck",
    "FP4TrainingDivergedError",
    "PrecisionMonitor",
    "latest_healthy_checkpoint",
]
