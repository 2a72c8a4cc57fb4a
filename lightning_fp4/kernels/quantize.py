"""A matrix to four bits in one read: its row form, its column form, or both; packed, or ready for a GEMM."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from lightning_fp4.formats import E8M0, FORMATS
from lightning_fp4.kernels import _groups, _random
from lightning_fp4.kernels._launch import (
    Launch,
    Launcher,
    Plan,
    Remembered,
    ceil_div,
    check_input,
    constants_of,
    grid_of,
    has_e4m3,
    has_early_launch,
    is_even,
    is_interpreted,
    is_wide,
    is_word_aligned,
    traits,
)
from lightning_fp4.kernels._tiles import (
    corner,
    load_columns,
    load_globals,
    load_rows,
    load_words,
    quantize_groups,
    subtract_from_columns,
    subtract_from_rows,
    tile_of_program,
)
from lightning_fp4.kernels.amax import amax
from lightning_fp4.kernels.hot_channels import append_patch
from lightning_fp4.quantizer import Quantizer, Rounding, ScaleRule
from lightning_fp4.tensor import FP4Operand, FP4Tensor, Patch, Units, operand_shift

_BLOCK_M, _BLOCK_N, _WARPS, _REGISTERS = 64, 64, 4, None


@triton.jit
def store_factor(ptr, amax, offs, mask, ENCODED_MAX: tl.constexpr, SHIFT: tl.constexpr, BY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write what multiplies a decoded operand to give the values."""
    factor = tl.div_rn(amax, tl.zeros_like(amax) + ENCODED_MAX) * (1.0 / SHIFT)
    if BY == "tensor":
        tl.store(ptr + tl.arange(0, 1), factor)
    elif BY == "row":
        tl.store(ptr + offs, factor, mask=mask)


@triton.jit
def _quantize_kernel(  # type: ignore[no-untyped-def]
    x_ptr, word_ptr, stride_m, stride_n, rows, columns, mean_ptr, seed_ptr, out_stride,
    row_amax_ptr, row_out_ptr, row_scale_ptr, row_factor_ptr, row_stream,
    column_amax_ptr, column_out_ptr, column_scale_ptr, column_factor_ptr, column_stream,
    ROW_UNITS: tl.constexpr, ROW_BY: tl.constexpr, ROW_MAX: tl.constexpr, ROW_SHIFT: tl.constexpr,
    ROW_R: tl.constexpr, ROW_C: tl.constexpr, ROW_E8M0: tl.constexpr, ROW_RULE: tl.constexpr,
    ROW_STOCHASTIC: tl.constexpr, ROW_CANDIDATES: tl.constexpr,
    COLUMN_UNITS: tl.constexpr, COLUMN_BY: tl.constexpr, COLUMN_MAX: tl.constexpr, COLUMN_SHIFT: tl.constexpr,
    COLUMN_R: tl.constexpr, COLUMN_C: tl.constexpr, COLUMN_E8M0: tl.constexpr, COLUMN_RULE: tl.constexpr,
    COLUMN_STOCHASTIC: tl.constexpr, COLUMN_CANDIDATES: tl.constexpr,
    CENTER: tl.constexpr, HADAMARD: tl.constexpr, PATCHED: tl.constexpr, WORDS: tl.constexpr,
    NATIVE_E4M3: tl.constexpr, ASM: tl.constexpr, EARLY: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One tile of ``x`` ``[rows, columns]`` to the forms whose ``UNITS`` are not ``"none"``.

    With ``WORDS`` the rows are contiguous and whole numbers of groups, and ``word_ptr`` is ``x_ptr`` to int64. With
    ``WIDE`` offsets within a tile may exceed 32 bits. With ``CENTER`` the mean of each column is taken out first. Rows
    of the row form are ``out_stride`` groups apart. With ``PATCHED`` the row form leaves the scale bytes of its blocks
    also if it is decoded. With ``EARLY`` the kernel before it, which finds the maxima, may still run; all else was
    there before that one.
    """
    pid_m, pid_n = tile_of_program()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    index_type: tl.constexpr = tl.int64 if WIDE else tl.int32
    first_m = pid_m * BLOCK_M
    first_n = pid_n * BLOCK_N
    offs_m = tl.arange(0, BLOCK_M).to(index_type)
    offs_n = tl.arange(0, BLOCK_N).to(index_type)
    start = x_ptr + corner(stride_m, stride_n, pid_m, pid_n, BLOCK_M, BLOCK_N)
    if ROW_UNITS != "none":
        first_g = pid_n * (BLOCK_N // ROW_C)
        offs_g = tl.arange(0, BLOCK_N // ROW_C).to(index_type)
        groups = (columns + ROW_C - 1) // ROW_C
        if WORDS:
            PER_WORD: tl.constexpr = 64 // dtype.primitive_bitwidth
            stride = stride_m // PER_WORD
            words = word_ptr + corner(stride, 1, pid_m, pid_n, BLOCK_M, BLOCK_N // PER_WORD)
            values, pairs = load_words(
                words, stride, offs_m, offs_g, rows - first_m, groups - first_g, ROW_C, dtype, EVEN
            )
        else:
            values = load_rows(
                start, stride_m, stride_n, offs_m, offs_g, rows - first_m, columns - first_n, ROW_C, EVEN
            )
        if CENTER:
            values, block_amax = subtract_from_rows(
                values, mean_ptr + first_n, offs_m, offs_g, rows - first_m, columns - first_n, ROW_C, dtype, ASM, EVEN
            )
        elif WORDS and dtype == tl.bfloat16 and ASM:
            block_amax = _groups.pairs_amax(pairs)
        else:
            block_amax = _groups.group_amax(values)
        if EARLY:
            gdc_wait()
        in_rows = first_m + offs_m < rows
        amax, encode, decode = load_globals(row_amax_ptr, first_m + offs_m, in_rows, ROW_MAX, ROW_BY, ASM)
        if ROW_UNITS != "packed" and pid_n == 0 and (ROW_BY == "row" or pid_m == 0):
            store_factor(row_factor_ptr, amax, first_m + offs_m, in_rows, ROW_MAX, ROW_SHIFT, ROW_BY)
        quantize_groups(
            values, block_amax, first_m, offs_m[None, :], first_g, offs_g[:, None], rows, groups, out_stride,
            amax[None, :], encode[None, :], decode[None, :], row_out_ptr, row_scale_ptr, seed_ptr, row_stream,
            ROW_MAX, ROW_UNITS, ROW_SHIFT, ROW_R, ROW_E8M0, ROW_RULE, ROW_STOCHASTIC, ROW_CANDIDATES,
            NATIVE_E4M3, ASM, EVEN, PATCHED,
        )  # fmt: skip
    if COLUMN_UNITS != "none":
        first_g = pid_m * (BLOCK_M // COLUMN_C)
        offs_g = tl.arange(0, BLOCK_M // COLUMN_C).to(index_type)
        groups = (rows + COLUMN_C - 1) // COLUMN_C
        values = load_columns(
            start, stride_m, stride_n, offs_g, offs_n, rows - first_m, columns - first_n, COLUMN_C, EVEN
        )
        if CENTER:
            values, block_amax = subtract_from_columns(
                values, mean_ptr + first_n, offs_g, offs_n, rows - first_m, columns - first_n, COLUMN_C, dtype, ASM,
                EVEN,
            )  # fmt: skip
        if HADAMARD > 0:
            values, block_amax = _groups.round_to(_random.rotate(values, HADAMARD, dtype), dtype, ASM)
        elif not CENTER:
            block_amax = _groups.group_amax(values)
        if EARLY and ROW_UNITS == "none":
            gdc_wait()
        in_columns = first_n + offs_n < columns
        amax, encode, decode = load_globals(column_amax_ptr, first_n + offs_n, in_columns, COLUMN_MAX, COLUMN_BY, ASM)
        if COLUMN_UNITS != "packed" and pid_m == 0 and (COLUMN_BY == "row" or pid_n == 0):
            store_factor(column_factor_ptr, amax, first_n + offs_n, in_columns, COLUMN_MAX, COLUMN_SHIFT, COLUMN_BY)
        quantize_groups(
            values, block_amax, first_n, offs_n[None, :], first_g, offs_g[:, None], columns, groups, groups,
            amax[None, :], encode[None, :], decode[None, :], column_out_ptr, column_scale_ptr, seed_ptr, column_stream,
            COLUMN_MAX, COLUMN_UNITS, COLUMN_SHIFT, COLUMN_R, COLUMN_E8M0, COLUMN_RULE, COLUMN_STOCHASTIC,
            COLUMN_CANDIDATES, NATIVE_E4M3, ASM, EVEN, False,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Form:
    """What one form of a matrix becomes.

    Args:
        quantizer: how.
        stream: random stream of stochastic rounding.
        units: ``None`` for packed codes and scales, ``"bf16"`` or ``"fp8"`` for the values those units multiply.
        patch: columns that a decoded row form gains, ``None`` for none.
    """

    quantizer: Quantizer
    stream: int = 0
    units: Units | None = None
    patch: Patch | None = None


class _Layout:
    """What the forms of all matrices by one quantiser, for the same units, have in common."""

    def __init__(self, quantizer: Quantizer, units: Units | None) -> None:
        block_format = quantizer.format
        self.format, self.units = block_format, units
        self.block_rows, self.block_columns = block_format.block
        self.encoded_max = quantizer.scale_rule.encoded_max
        self.scale_dtype = torch.float8_e8m0fnu if block_format.scale is E8M0 else torch.float8_e4m3fn
        self.dtype = {None: torch.uint8, "bf16": torch.bfloat16}.get(units, torch.float8_e4m3fn)
        self.constants = {
            **constants_of(quantizer),
            "UNITS": units or "packed",
            "SHIFT": operand_shift(units, self.encoded_max),
        }


_UNUSED = {**_Layout(Quantizer(), None).constants, "UNITS": "none", "BY": "none"}
"""The constants of a form that is left out."""


@functools.cache
def _layout(block_format: str, rounding: Rounding, scale_rule: ScaleRule, units: Units | None) -> _Layout:
    return _Layout(Quantizer(format=FORMATS[block_format], rounding=rounding, scale_rule=scale_rule), units)


@functools.cache
def _launcher(
    kernel: Any,
    rows: _Layout | None,
    columns: _Layout | None,
    warps: int,
    registers: int | None,
    early: bool,
    **constants: Any,
) -> Launcher:
    by_rows = {f"ROW_{name}": value for name, value in (rows.constants if rows else _UNUSED).items()}
    by_columns = {f"COLUMN_{name}": value for name, value in (columns.constants if columns else _UNUSED).items()}
    known = {**by_rows, **by_columns, "ASM": not is_interpreted(), "EARLY": early}
    return Launcher(kernel, {**known, **constants}, warps, registers, early)


_Arguments = tuple[Tensor, Tensor, Tensor, Tensor, int]
"""What the kernel takes for a form: maxima, codes or values, scale bytes, factor, random stream."""


class _Output:
    """Memory for one form of ``[rows, columns]`` matrices, and the kernel's arguments for it."""

    def __init__(self, form: Form, rows: int, columns: int) -> None:
        quantizer = form.quantizer
        self.layout = layout = _layout(quantizer.format.name, quantizer.rounding, quantizer.scale_rule, form.units)
        blocks = ceil_div(columns, layout.block_columns)
        width = blocks * layout.block_columns
        self.shape = (rows, columns)
        self._has_scales = layout.units is None or form.patch is not None
        if form.patch is not None:
            width += form.patch.width(layout.block_columns)
            self.shape = (rows, width)
        self.stride = width // layout.block_columns  # groups from one row to the next
        self._out_shape = (rows, width // 2 if layout.units is None else width)
        self._scale_shape = (ceil_div(rows, layout.block_rows), blocks)
        self._stream = form.stream

    def make(self, x: Tensor, amax: Tensor | None) -> tuple[FP4Tensor | FP4Operand, _Arguments]:
        """The form, still empty, and the kernel's pointers and stream for it; words stand for what it does not use."""
        layout = self.layout
        out = x.new_empty(self._out_shape, dtype=layout.dtype)
        words = out.view(torch.int32) if out.numel() else out  # a group of neighbours fills whole words
        maxima = words if amax is None else amax
        scales = x.new_empty(self._scale_shape, dtype=torch.uint8) if self._has_scales else words
        if layout.units is None:
            packed = FP4Tensor(
                codes=out, scales=scales.view(layout.scale_dtype), amax=amax, encoded_max=layout.encoded_max,
                format=layout.format, shape=self.shape,
            )  # fmt: skip
            return packed, (maxima, words, scales, words, self._stream)
        factor = None if amax is None else torch.empty_like(amax)
        decoded = FP4Operand(values=out, factor=factor, shape=self.shape)
        return decoded, (maxima, words, scales, words if factor is None else factor, self._stream)


def supports(quantizer: Quantizer, hadamard: int | None = None, units: Units | None = None) -> bool:
    """Whether the kernels can do this: rotations no longer than a block, codes or operands of a GPU's units."""
    return (hadamard is None or hadamard <= quantizer.format.block[1]) and units in (None, "bf16", "fp8")


def quantize_both(
    x: Tensor,
    rows: Form | None,
    columns: Form | None,
    *,
    hadamard: int | None = None,
    seed: Tensor | None = None,
    mean: Tensor | None = None,
    pool: bool = True,
) -> tuple[FP4Tensor | FP4Operand | None, FP4Tensor | FP4Operand | None]:
    """Quantise ``x`` along its rows, and ``x.T`` along its rows, reading ``x`` once (and once for the maxima).

    Args:
        x: ``[M, N]``, float32, bfloat16 or float16, any strides, any size.
        rows: what the row form becomes, ``None`` to leave it out.
        columns: what the column form becomes, ``None`` to leave it out.
        hadamard: rotate groups of this length along the columns for the column form.
        seed: int64 ``[2]``, key and step; needed by stochastic rounding only.
        mean: float32 ``[1, N]``, taken out of each row of ``x`` first as ``reference.subtract_mean`` does.
        pool: whether the maxima may be slices of a larger tensor, see ``_launch.zeros``.

    Returns:
        The row form ``[M, N]``, with a patch ``[M, padded N + its width]``, and the column form ``[N, M]``.

    Raises:
        ValueError: for what :func:`supports` denies, a missing seed, a patch of a form that cannot have one, or an
            ``x`` that the kernels cannot read.
    """
    mean = None if mean is None else mean.contiguous()
    key = (
        hadamard, _identity(rows), _identity(columns), *traits(x), None if mean is None else traits(mean),
        None if seed is None else seed.data_ptr() % 16,
    )  # fmt: skip
    plan = _plans.get(key) or _plans.keep(key, _Plan(x, rows, columns, hadamard, seed, mean))
    return plan.on_its_device(x, seed, mean, None if rows is None else rows.patch, pool)


def _identity(form: Form | None) -> tuple | None:
    """Tells forms apart as far as plans do, in less time than their hashes; a plan holds its quantisers."""
    if form is None:
        return None
    patch = form.patch
    return id(form.quantizer), form.stream, form.units, None if patch is None else (len(patch.channels), patch.parts)


class _Plan(Plan):
    """What quantising matrices that are alike has in common."""

    def __init__(
        self,
        x: Tensor,
        rows: Form | None,
        columns: Form | None,
        hadamard: int | None,
        seed: Tensor | None,
        mean: Tensor | None,
    ) -> None:
        check_input(x, hadamard)
        if (rows and rows.patch and rows.units is None) or (columns and columns.patch):
            raise ValueError("Only a decoded row form can have a `patch`.")
        if columns is not None and not supports(columns.quantizer, hadamard):
            raise ValueError(f"`hadamard={hadamard}` is longer than the blocks of {columns.quantizer.format}.")
        if seed is None and any(form and form.quantizer.rounding is Rounding.STOCHASTIC for form in (rows, columns)):
            raise ValueError("Stochastic rounding needs a `seed`, an int64 tensor [key, step].")
        super().__init__(x.get_device())
        self._quantizers = tuple(form.quantizer if form else None for form in (rows, columns))  # whose ids are the key
        self._stream, self._hadamard = rows.stream if rows else 0, hadamard if columns else None
        self._row_scale = rows.quantizer.format.global_scale if rows else None
        self._column_scale = columns.quantizer.format.global_scale if columns else None
        self._rows = None if rows is None else _Output(rows, x.shape[0], x.shape[1])
        self._columns = None if columns is None else _Output(columns, x.shape[1], x.shape[0])
        self._words = rows is not None and is_word_aligned(x, rows.quantizer.format.block[1])
        self._sizes = (*x.stride(), *x.shape)
        self._launch: Launch | None = None
        if x.numel() and (rows or columns):
            follows_amax = self._row_scale is not None or self._column_scale is not None
            self._launch = _launcher(
                _quantize_kernel,
                self._rows and self._rows.layout, self._columns and self._columns.layout,
                CENTER=mean is not None, HADAMARD=self._hadamard or 0, PATCHED=bool(rows and rows.patch),
                WORDS=self._words, NATIVE_E4M3=has_e4m3(x),
                EVEN=is_even(x, _BLOCK_M, _BLOCK_N), WIDE=is_wide(x, _BLOCK_M, _BLOCK_N),
                BLOCK_M=_BLOCK_M, BLOCK_N=_BLOCK_N, warps=_WARPS, registers=_REGISTERS,
                early=follows_amax and has_early_launch(x),
            ).on(grid_of(x, _BLOCK_M, _BLOCK_N))  # fmt: skip

    def __call__(
        self, x: Tensor, seed: Tensor | None, mean: Tensor | None, patch: Patch | None, pool: bool
    ) -> tuple[FP4Tensor | FP4Operand | None, FP4Tensor | FP4Operand | None]:
        row_amax, column_amax = amax(x, self._row_scale, self._column_scale, self._hadamard, mean, pool)
        by_rows, by_columns, stride = None, None, 0
        row_arguments: _Arguments = (x, x, x, x, 0)
        column_arguments = row_arguments
        if self._rows is not None:
            by_rows, row_arguments = self._rows.make(x, row_amax)
            stride = self._rows.stride
        if self._columns is not None:
            by_columns, column_arguments = self._columns.make(x, column_amax)
        if self._launch is not None:
            self._launch(
                x, x.view(torch.int64) if self._words else x, *self._sizes, x if mean is None else mean,
                x if seed is None else seed, stride, *row_arguments, *column_arguments,
            )  # fmt: skip
        else:
            for form in (by_rows, by_columns):
                if isinstance(form, FP4Operand) and form.factor is not None:
                    form.factor.zero_()
        quantizer = self._quantizers[0]
        if patch is not None and quantizer is not None and isinstance(by_rows, FP4Operand):
            append_patch(
                x, by_rows.values, row_amax, row_arguments[2], quantizer, patch, mean=mean, seed=seed,
                stream=self._stream,
            )  # fmt: skip
        return by_rows, by_columns


_plans = Remembered[_Plan]()


def quantize(
    x: Tensor,
    quantizer: Quantizer,
    *,
    hadamard: int | None = None,
    transposed: bool = False,
    seed: Tensor | None = None,
    stream: int = 0,
    units: Units | None = None,
    mean: Tensor | None = None,
    patch: Patch | None = None,
    pool: bool = True,
) -> FP4Tensor | FP4Operand:
    """One form alone: ``x``, or ``x.T`` if ``transposed``, quantised along its last axis.

    Arguments are those of ``lightning_fp4.ops.quantize`` and ``pool``; that and errors are those of
    :func:`quantize_both`.
    """
    form = Form(quantizer=quantizer, stream=stream, units=units, patch=patch)
    if hadamard and not transposed:
        assert mean is None
        x, transposed = x.T, True  # rotations run along columns
    if transposed:
        _, quantized = quantize_both(x, None, form, hadamard=hadamard, seed=seed, mean=mean, pool=pool)
    else:
        quantized, _ = quantize_both(x, form, None, seed=seed, mean=mean, pool=pool)
    assert quantized is not None
    return quantized
