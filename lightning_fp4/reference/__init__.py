"""What every operation means, in plain PyTorch. Written to be believed; kernels have to match it."""

from lightning_fp4.reference.gemm import gemm
from lightning_fp4.reference.hadamard import hadamard_matrix, rotate
from lightning_fp4.reference.philox import random_bytes
from lightning_fp4.reference.quantize import decode_blocks, dequantize, global_decode, quantize, transpose

__all__ = [
    "decode_blocks",
    "dequantize",
    "gemm",
    "global_decode",
    "hadamard_matrix",
    "quantize",
    "random_bytes",
    "rotate",
    "transpose",
]
