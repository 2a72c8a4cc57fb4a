"""The largest magnitudes that global scales come from: one pass over the matrix, for both of its forms."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from lightning_fp4.formats import GlobalScale
from lightning_fp4.kernels import _groups, _random, _scales
from lightning_fp4.kernels._launch import (
    Launch,
    Plan,
    Remembered,
    ceil_div,
    check_input,
    grid_of,
    has_early_launch,
    is_even,
    is_interpreted,
    is_wide,
    launcher,
    traits,
    zeros,
)
from lightning_fp4.kernels._tiles import corner, load_columns, subtract_from_columns, tile_of_program


@triton.jit
def _amax_kernel(  # type: ignore[no-untyped-def]
    x_ptr, stride_m, stride_n, rows, columns, mean_ptr, maxima_ptr, first_row, first_column,
    CENTER: tl.constexpr, TENSOR: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr, ROTATED: tl.constexpr,
    HADAMARD: tl.constexpr, ASM: tl.constexpr, EARLY: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Fold one tile into the maxima, which are float32 bits in int32, zero at the start.

    ``TENSOR``: one for ``x``, the first. ``ROW``, ``COLUMN``: one for each row from ``first_row`` on, and (after the
    rotation) for each column from ``first_column`` on. ``ROTATED``: one for the rotated ``x``, in the place of
    ``COLUMN``. ``CENTER``: of ``x`` without the mean of each column. ``EARLY``: the next kernel may start already.
    """
    if EARLY:
        gdc_launch_dependents()
    pid_m, pid_n = tile_of_program()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    index_type: tl.constexpr = tl.int64 if WIDE else tl.int32
    start = x_ptr + corner(stride_m, stride_n, pid_m, pid_n, BLOCK_M, BLOCK_N)
    rows = rows - pid_m * BLOCK_M
    columns = columns - pid_n * BLOCK_N
    mean_ptr += pid_n * BLOCK_N if CENTER else 0
    row_ptr = maxima_ptr + first_row + pid_m * BLOCK_M
    column_ptr = maxima_ptr + first_column + (pid_n * BLOCK_N if COLUMN else 0)
    offs_n = tl.arange(0, BLOCK_N).to(index_type)
    if HADAMARD == 0:
        offs_m = tl.arange(0, BLOCK_M).to(index_type)
        place = start + (offs_m[:, None] * stride_m + offs_n[None, :] * stride_n)
        if EVEN:
            x = tl.load(place)
        else:
            x = tl.load(place, mask=(offs_m[:, None] < rows) & (offs_n[None, :] < columns), other=0.0)
        x = x.to(tl.float32)
        if CENTER:
            mean = tl.load(mean_ptr + offs_n, mask=offs_n < columns, other=0.0)
            x = _groups.round_one(tl.where(offs_m[:, None] < rows, x - mean[None, :], 0.0), dtype)
        bits = _scales.magnitude_bits(x)
        if TENSOR:
            tl.atomic_max(maxima_ptr, tl.max(tl.max(bits, axis=1), axis=0), sem="relaxed")
        if ROW:
            tl.atomic_max(row_ptr + offs_m, tl.max(bits, axis=1), mask=offs_m < rows, sem="relaxed")
        if COLUMN:
            tl.atomic_max(column_ptr + offs_n, tl.max(bits, axis=0), mask=offs_n < columns, sem="relaxed")
    else:
        offs_g = tl.arange(0, BLOCK_M // HADAMARD).to(index_type)
        values = load_columns(start, stride_m, stride_n, offs_g, offs_n, rows, columns, HADAMARD, EVEN)
        if CENTER:
            values, largest = subtract_from_columns(
                values, mean_ptr, offs_g, offs_n, rows, columns, HADAMARD, dtype, ASM, EVEN
            )
        else:
            largest = _groups.group_amax(values)
        if TENSOR:
            plain = _scales.magnitude_bits(largest)
            tl.atomic_max(maxima_ptr, tl.max(tl.max(plain, axis=1), axis=0), sem="relaxed")
        if ROW:
            for i in tl.static_range(HADAMARD):
                offs_m = offs_g * HADAMARD + i
                by_row = tl.max(_scales.magnitude_bits(values[i]), axis=1)
                tl.atomic_max(row_ptr + offs_m, by_row, mask=offs_m < rows, sem="relaxed")
        # Rounding is monotonic, so rounding the maximum is as good as rounding all.
        rotated = _groups.group_amax(_random.rotate(values, HADAMARD, dtype))
        rotated = _scales.magnitude_bits(_groups.round_one(rotated, dtype))
        if ROTATED:
            tl.atomic_max(column_ptr, tl.max(tl.max(rotated, axis=1), axis=0), sem="relaxed")
        if COLUMN:
            tl.atomic_max(column_ptr + offs_n, tl.max(rotated, axis=0), mask=offs_n < columns, sem="relaxed")


def amax(
    x: Tensor,
    rows: GlobalScale | None,
    columns: GlobalScale | None,
    hadamard: int | None = None,
    mean: Tensor | None = None,
    pool: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """The maxima that the row form and the column form of ``x`` ``[M, N]`` need.

    Args:
        x: float32, bfloat16 or float16, any strides.
        rows: what the row form scales by: ``"tensor"``, each ``"row"``, or ``None``.
        columns: the same for the column form, whose rows are the columns of ``x``.
        hadamard: the column form's rotation, along the columns of ``x``.
        mean: float32 ``[1, N]``, contiguous, taken out of each row of ``x`` first.
        pool: whether they may be slices of a larger tensor, see ``_launch.zeros``.

    Returns:
        float32 ``[1, 1]``, ``[M, 1]`` / ``[N, 1]`` or ``None`` for each form. NaN propagates.
    """
    key = (rows, columns, hadamard, *traits(x), None if mean is None else traits(mean))
    plan = _plans.get(key) or _plans.keep(key, _Plan(x, rows, columns, hadamard, mean))
    return plan.on_its_device(x, mean, pool)


class _Plan(Plan):
    """What the maxima of matrices that are alike have in common."""

    def __init__(
        self,
        x: Tensor,
        rows: GlobalScale | None,
        columns: GlobalScale | None,
        hadamard: int | None,
        mean: Tensor | None,
    ) -> None:
        check_input(x, hadamard)
        super().__init__(x.get_device())
        plain = rows == "tensor" or (columns == "tensor" and not hadamard)
        rotated = columns == "tensor" and bool(hadamard)
        # Each kind begins at a multiple of 16 bytes, as the results of operators have to.
        first_row = 4 if plain else 0
        row_count = x.shape[0] if rows == "row" else 0
        first_column = first_row + ceil_div(row_count, 4) * 4
        self._count = first_column + (x.shape[1] if columns == "row" else int(rotated))
        places = {None: None, "tensor": slice(0, 1)}
        self._rows = {**places, "row": slice(first_row, first_row + row_count)}[rows]
        self._columns = slice(first_column, self._count) if rotated or columns == "row" else places[columns]
        self._sizes, self._places = (*x.stride(), *x.shape), (first_row, first_column)
        self._launch: Launch | None = None
        if self._count and x.numel():
            block_m, block_n = (128, 64) if hadamard else (64, 128)
            self._launch = launcher(
                _amax_kernel, CENTER=mean is not None, TENSOR=plain, ROW=rows == "row", COLUMN=columns == "row",
                ROTATED=rotated, HADAMARD=hadamard if hadamard and columns else 0, ASM=not is_interpreted(),
                EARLY=has_early_launch(x), EVEN=is_even(x, block_m, block_n), WIDE=is_wide(x, block_m, block_n),
                BLOCK_M=block_m, BLOCK_N=block_n,
            ).on(grid_of(x, block_m, block_n))  # fmt: skip

    def __call__(self, x: Tensor, mean: Tensor | None, pool: bool) -> tuple[Tensor | None, Tensor | None]:
        if self._rows is None and self._columns is None:
            return None, None
        bits = zeros(self._count, x, pool)  # which sort as the non-negative floats do
        if self._launch is not None:
            self._launch(x, *self._sizes, x if mean is None else mean, bits, *self._places)
        maxima = bits.view(torch.float32)
        return (
            None if self._rows is None else maxima[self._rows],
            None if self._columns is None else maxima[self._columns],
        )


_plans = Remembered[_Plan]()
