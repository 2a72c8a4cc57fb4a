"""What every operation means, in plain PyTorch. Written to be believed; kernels have to match it."""

from lightning_fp4.reference.attention import pre_softmax_max
from lightning_fp4.reference.centering import add_outer, subtract_mean, times_matrix, token_mean
from lightning_fp4.reference.gemm import gemm, multiply, sums
from lightning_fp4.reference.hadamard import hadamard_matrix, rotate
from lightning_fp4.reference.hot_channels import (
    channel_scores,
    concatenate,
    gather,
    patch_columns,
    patch_values,
    select_channels,
)
from lightning_fp4.reference.moments import TENSOR_SUMS, tensor_sums
from lightning_fp4.reference.philox import random_bytes
from lightning_fp4.reference.quantize import decode_blocks, dequantize, global_decode, operand, quantize, transpose
from lightning_fp4.reference.statistics import QUANTIZATION_SUMS, quantization_sums

__all__ = [
    "QUANTIZATION_SUMS",
    "TENSOR_SUMS",
    "add_outer",
    "channel_scores",
    "concatenate",
    "decode_blocks",
    "dequantize",
    "gather",
    "gemm",
    "global_decode",
    "hadamard_matrix",
    "multiply",
    "operand",
    "patch_columns",
    "patch_values",
    "pre_softmax_max",
    "quantization_sums",
    "quantize",
    "random_bytes",
    "rotate",
    "select_channels",
    "subtract_mean",
    "sums",
    "tensor_sums",
    "times_matrix",
    "token_mean",
    "transpose",
]
