"""Groups of neighbours in registers, tuples of tensors: their maxima, rounded to a dtype, packed into 32-bit words.

The first neighbour is the lowest in a word.
"""

import triton
import triton.language as tl

from lightning_fp4.kernels._scales import e4m3_nearest
from lightning_fp4.kernels._values import e2m1_code

_PACK_E4M3 = tl.constexpr("""{
    .reg .b16 a, b;
    cvt.rn.satfinite.e4m3x2.f32 a, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 b, $4, $3;
    mov.b32 $0, {a, b};
}""")

# Of pairs (see `_values.stochastic_pairs`) the high bytes, s000ccc0: those of even and of odd neighbours.
_PACK_CODES = tl.constexpr("""{
    .reg .b32 even, odd, t;
    prmt.b32 t, $1, $2, 0x7351;
    prmt.b32 odd, $3, $4, 0x7351;
    prmt.b32 even, t, odd, 0x5410;
    prmt.b32 odd, t, odd, 0x7632;
    shr.u32 t, even, 4;
    shr.u32 even, even, 1;
    and.b32 even, even, 0x07070707;
    and.b32 t, t, 0x08080808;
    or.b32 even, even, t;
    shl.b32 t, odd, 3;
    and.b32 t, t, 0x70707070;
    or.b32 even, even, t;
    and.b32 odd, odd, 0x80808080;
    or.b32 $0, even, odd;
}""")
# Pairs hold values times 2^-14 and the factor comes times 2^7, so that both are in float16's range.
_PACK_PAIRS = tl.constexpr("""{
    .reg .b16 low, high;
    .reg .b32 a, b, up;
    mov.b32 up, 0x58005800;
    mul.rn.f16x2 a, $1, up;
    mul.rn.f16x2 b, $2, up;
    mul.rn.f16x2 a, a, $3;
    mul.rn.f16x2 b, b, $3;
    cvt.rn.satfinite.e4m3x2.f16x2 low, a;
    cvt.rn.satfinite.e4m3x2.f16x2 high, b;
    mov.b32 $0, {low, high};
}""")
_TWICE_IN_FLOAT16 = tl.constexpr("cvt.rn.f16x2.f32 $0, $1, $1;")


def _amax_assembly(first: int) -> str:
    """The largest magnitude of eight pairs ``p0`` .. ``p7`` of BF16, in place, to operand ``first``; keeps NaN."""
    pairs = range(8)
    magnitudes = "".join(f"abs.bf16x2 p{i}, p{i}; " for i in pairs)
    maxima = "".join(f"max.NaN.bf16x2 p0, p0, p{i}; " for i in pairs[1:])
    return (
        f"{magnitudes}{maxima}.reg .b32 low, high; shl.b32 low, p0, 16; and.b32 high, p0, 0xFFFF0000; "
        f"max.NaN.f32 ${first}, low, high; "
    )


def _round_assembly() -> str:
    """Sixteen float32 rounded to BF16, and the largest magnitude of the results."""
    convert = "".join(f"cvt.rn.bf16x2.f32 p{i}, ${18 + 2 * i}, ${17 + 2 * i}; " for i in range(8))
    unpack = "".join(f"shl.b32 ${2 * i}, p{i}, 16; and.b32 ${2 * i + 1}, p{i}, 0xFFFF0000; " for i in range(8))
    return f"{{ .reg .b32 p<8>; {convert}{unpack}{_amax_assembly(16)}}}"


_ROUND_BF16 = tl.constexpr(_round_assembly())
_ROUND_CONSTRAINTS = tl.constexpr(",".join(["=&f"] * 17 + ["f"] * 16))
_SEVENTEEN_FLOATS = tl.constexpr((tl.float32,) * 17)
_PAIRS_AMAX = tl.constexpr(
    "{ .reg .b32 p<8>; " + "".join(f"mov.b32 p{i}, ${i + 1}; " for i in range(8)) + _amax_assembly(0) + "}"
)
_PAIRS_CONSTRAINTS = tl.constexpr(",".join(["=f"] + ["r"] * 8))


@triton.jit
def pack_codes(values):
    """E2M1 values to words of eight codes."""
    words = ()
    for w in tl.static_range(len(values) // 8):
        word = e2m1_code(values[8 * w])
        for i in tl.static_range(1, 8):
            word = word | (e2m1_code(values[8 * w + i]) << (4 * i))
        words = words + (word,)
    return words


@triton.jit
def pack_operand(values, factors, UNITS: tl.constexpr, NATIVE_E4M3: tl.constexpr):
    """E2M1 values times their block's factor to words of two BF16 (exact) or four E4M3 (rounded to nearest) values."""
    words = ()
    if UNITS == "bf16":
        for w in tl.static_range(len(values) // 2):
            low = (values[2 * w] * factors).to(tl.int32, bitcast=True)
            high = (values[2 * w + 1] * factors).to(tl.int32, bitcast=True)
            words = words + (((low >> 16) & 0xFFFF) | (high & -0x10000),)
    else:
        for w in tl.static_range(len(values) // 4):
            fields = ()
            for i in tl.static_range(4):
                fields = fields + (values[4 * w + i] * factors,)
            if NATIVE_E4M3:
                word = tl.inline_asm_elementwise(_PACK_E4M3, "=r,f,f,f,f", fields, tl.int32, is_pure=True, pack=1)
            else:
                word = operand_bits(fields[0], UNITS, NATIVE_E4M3)
                for i in tl.static_range(1, 4):
                    word = word | (operand_bits(fields[i], UNITS, NATIVE_E4M3) << (8 * i))
            words = words + (word,)
    return words


@triton.jit
def pack_pair_codes(pairs):
    """Pairs of E2M1 values (see ``_values.stochastic_pairs``) to words of eight codes."""
    words = ()
    for w in tl.static_range(len(pairs) // 4):
        four = (pairs[4 * w], pairs[4 * w + 1], pairs[4 * w + 2], pairs[4 * w + 3])
        word = tl.inline_asm_elementwise(_PACK_CODES, "=r,r,r,r,r", four, tl.int32, is_pure=True, pack=1)
        words = words + (word,)
    return words


@triton.jit
def pack_pair_operand(pairs, factors):
    """Pairs of E2M1 values times their block's factor, an E4M3 scale's, to words of four E4M3 values."""
    twice = tl.inline_asm_elementwise(_TWICE_IN_FLOAT16, "=r,f", [factors * 128.0], tl.int32, is_pure=True, pack=1)
    words = ()
    for w in tl.static_range(len(pairs) // 2):
        inputs = (pairs[2 * w], pairs[2 * w + 1], twice)
        word = tl.inline_asm_elementwise(_PACK_PAIRS, "=r,r,r,r", inputs, tl.int32, is_pure=True, pack=1)
        words = words + (word,)
    return words


@triton.jit
def operand_bits(value, UNITS: tl.constexpr, NATIVE_E4M3: tl.constexpr):
    """One decoded value as the low bits of an int32: BF16 (exact by then) or E4M3 (rounded to nearest)."""
    if UNITS == "bf16":
        return (value.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    elif NATIVE_E4M3:
        return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        sign = (value.to(tl.int32, bitcast=True) >> 24) & 0x80
        return e4m3_nearest(tl.abs(value)) | sign


@triton.jit
def round_to(values, dtype: tl.constexpr, ASM: tl.constexpr):
    """A group of float32 values rounded to those of another dtype, and the largest magnitude of the results."""
    out = ()
    if dtype == tl.bfloat16 and ASM:
        amax = tl.zeros_like(values[0])
        for w in tl.static_range(len(values) // 16):
            inputs = ()
            for i in tl.static_range(16):
                inputs = inputs + (values[16 * w + i],)
            rounded = tl.inline_asm_elementwise(
                _ROUND_BF16, _ROUND_CONSTRAINTS, inputs, _SEVENTEEN_FLOATS, is_pure=True, pack=1
            )
            for i in tl.static_range(16):
                out = out + (rounded[i],)
            amax = rounded[16] if w == 0 else tl.maximum(amax, rounded[16], propagate_nan=tl.PropagateNan.ALL)
    else:
        for i in tl.static_range(len(values)):
            out = out + (round_one(values[i], dtype),)
        amax = group_amax(out)
    return out, amax


@triton.jit
def round_one(x, dtype: tl.constexpr):
    """Round float32 to the values of another dtype."""
    if dtype == tl.bfloat16:  # the interpreter's own cast does not round to nearest
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
        x = tl.where(x == x, rounded, x)
    elif dtype == tl.float16:
        x = x.to(tl.float16).to(tl.float32)
    return x


@triton.jit
def pairs_amax(pairs):
    """Largest magnitude of each group, from 32-bit words of two BF16 values; keeps NaN."""
    for w in tl.static_range(len(pairs) // 8):
        inputs = ()
        for i in tl.static_range(8):
            inputs = inputs + (pairs[8 * w + i],)
        found = tl.inline_asm_elementwise(_PAIRS_AMAX, _PAIRS_CONSTRAINTS, inputs, tl.float32, is_pure=True, pack=1)
        amax = found if w == 0 else tl.maximum(amax, found, propagate_nan=tl.PropagateNan.ALL)  # noqa: F821
    return amax


@triton.jit
def group_amax(values):
    """Largest magnitude of each group; keeps NaN."""
    amax = tl.abs(values[0])
    for i in tl.static_range(1, len(values)):
        amax = tl.maximum(amax, tl.abs(values[i]), propagate_nan=tl.PropagateNan.ALL)
    return amax


@triton.jit
def sum_of_neighbours(values):
    """Sum of a tuple of tensors, whose length is a power of two: of neighbours, then of neighbouring sums."""
    sums = values
    for stage in tl.static_range(5):
        if (1 << stage) < len(values):
            pairs = ()
            for i in tl.static_range(len(values) >> (stage + 1)):
                pairs = pairs + (sums[2 * i] + sums[2 * i + 1],)
            sums = pairs
    return sums[0]
