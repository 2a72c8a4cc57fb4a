"""The reference's operations in Triton: the same bits, faster. Importing needs Triton: ``backends`` decides on it."""

from lightning_fp4.kernels.amax import amax
from lightning_fp4.kernels.attention import pre_softmax_max, reads_heads
from lightning_fp4.kernels.centering import add_outer, times_matrix, token_mean
from lightning_fp4.kernels.dequantize import dequantize, operand
from lightning_fp4.kernels.finish import finish
from lightning_fp4.kernels.moments import tensor_sums
from lightning_fp4.kernels.quantize import Form, quantize, quantize_both, supports
from lightning_fp4.kernels.seed import draw_seed
from lightning_fp4.kernels.statistics import quantization_sums

__all__ = [
    "Form",
    "add_outer",
    "amax",
    "dequantize",
    "draw_seed",
    "finish",
    "operand",
    "pre_softmax_max",
    "quantization_sums",
    "quantize",
    "quantize_both",
    "reads_heads",
    "supports",
    "tensor_sums",
    "times_matrix",
    "token_mean",
]
