"""Callbacks that keep an FP4 run alive and show what happens in it: one class, one file."""

from lightning_fp4.callbacks.adaptive_gradient_clipping import AdaptiveGradientClipping

__all__ = ["AdaptiveGradientClipping"]
