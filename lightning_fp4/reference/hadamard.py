"""The randomised Hadamard transform: spread outliers over a group of neighbours before quantising.

Both operands of a GEMM are rotated by the same orthogonal matrix along the contraction axis, so the rotation cancels in
the product (arXiv 2509.25149, appendix C).
"""

from __future__ import annotations

import torch
from torch import Tensor

# Fixed random signs. The first 16 are those of the NVFP4 recipe; a longer transform uses more of the list.
_SIGNS = (
    *(1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1),
    *(-1, 1, -1, -1, 1, 1, -1, 1, 1, -1, 1, 1, 1, -1, 1, -1),
)


def hadamard_matrix(size: int) -> Tensor:
    """The orthogonal matrix ``diag(signs) @ Sylvester(size) / sqrt(size)``, float32; ``size`` is 2, 4, 8, 16 or 32."""
    return rotate(torch.eye(size, dtype=torch.float32), size)


def rotate(x: Tensor, size: int) -> Tensor:
    """Rotate groups of ``size`` neighbours along the last axis; zero-padded there to a multiple of ``size``.

    Written as butterflies, not as a matrix product, so that the result depends neither on a BLAS nor on
    ``torch.set_float32_matmul_precision``.

    Args:
        x: ``[rows, columns]``, any float dtype.
        size: group length, a power of two up to 32.

    Returns:
        ``[rows, padded columns]`` in the dtype of ``x``, summed in float32 and rounded once.
    """
    rows, columns = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, -columns % size))
    groups = padded.shape[1] // size
    # Scaled first, so that no sum overflows that has no need to.
    values = padded.reshape(rows, groups, size) * size**-0.5 * torch.tensor(_SIGNS[:size], device=x.device)
    half = 1
    while half < size:
        first, second = values.reshape(rows, groups, size // (2 * half), 2, half).unbind(3)
        values = torch.stack((first + second, first - second), dim=3)
        half *= 2
    return values.reshape(padded.shape).to(x.dtype)
