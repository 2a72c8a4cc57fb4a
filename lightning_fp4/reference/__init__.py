"""What every operation means, in plain PyTorch. Written to be believed; kernels have to match it."""

from lightning_fp4.reference.gemm import gemm, multiply, sums
from lightning_fp4.reference.hadamard import hadamard_matrix, rotate
from lightning_fp4.reference.philox import random_bytes
from lightning_fp4.reference.quantize import decode_blocks, dequantize, global_decode, operand, quantize, transpose

__all__ = [
    "decode_blocks",
    "dequantize",
    "gemm",
    "global_decode",
    "hadamard_matrix",
    "multiply",
    "operand",
    "quantize",
    "random_bytes",
    "rotate",
    "sums",
    "transpose",
]
