"""The arithmetic that all kernels share: roundings, scales, random bits and rotations, on values in registers.

Every line is one rounded float32 operation in the order of ``lightning_fp4.reference``; launch with
``enable_fp_fusion=False``, or the compiler merges products and sums. E4M3 is rounded in integer arithmetic, which also
serves chips and Triton's interpreter, whose own cast is missing or wrong.
"""

import struct

import triton
import triton.language as tl

FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
ONE_SIXTH = tl.constexpr(1.0 / 6.0)
SCALE_NAN = tl.constexpr(0x7F)
PHILOX_ROUNDS = tl.constexpr(7)
# Bit i is set where sign i of the random Hadamard transform is negative; tests compare it with the reference's list.
NEGATIVE_SIGNS = tl.constexpr(0b10100010_01001101_11010111_11101000)


@triton.jit
def magnitude_bits(x):
    """Bits of ``|x|`` as int32. They are ordered like the magnitudes, NaN above all, so their maximum keeps NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def clamp_above(x, limit):
    """``min(x, limit)`` that keeps NaN."""
    return tl.where(x > limit, limit, x)


@triton.jit
def encode_scale(amax, ENCODED_MAX: tl.constexpr):
    """The factor that maps ``amax`` to ``ENCODED_MAX``; 1 where ``amax`` is zero or infinite."""
    scale = clamp_above(tl.div_rn(tl.zeros_like(amax) + ENCODED_MAX, amax), FLOAT32_MAX)
    return tl.where((amax == 0) | (scale == 0), 1.0, scale)


# ----------------------------------------------------------------------------------------------------------------------
# E4M3 and E8M0 scales, as their bytes in int32
# ----------------------------------------------------------------------------------------------------------------------


_TO_E4M3 = tl.constexpr("{ .reg .b16 t; cvt.rn.satfinite.e4m3x2.f32 t, 0f00000000, $1; cvt.u32.u16 $0, t; }")


@triton.jit
def e4m3_nearest(x, NATIVE_E4M3: tl.constexpr = False):
    """Round non-negative float32 to E4M3, ties to even, saturating at 448; NaN stays NaN."""
    if NATIVE_E4M3:
        # Not `x.to(tl.float8e4nv)`: Triton 3.6 gets the bytes of neighbours wrong where they are compared afterwards.
        return tl.inline_asm_elementwise(_TO_E4M3, "=r,f", [x], tl.int32, is_pure=True, pack=1)
    clamped = tl.where(x > 448.0, 448.0, x)
    bits = clamped.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    # Adding 2^14 leaves multiples of 2^-9, the spacing of subnormal E4M3, in the low bits.
    subnormal = (clamped + 16384.0).to(tl.int32, bitcast=True) & 0xF
    byte = tl.where(clamped < 0.015625, subnormal, normal)
    return tl.where(x == x, byte, SCALE_NAN)


@triton.jit
def e4m3_decode(byte):
    """Float32 value of a non-negative E4M3 byte."""
    # The byte's exponent and mantissa in float32's places, with the difference of the exponent biases as a factor.
    value = (byte.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where(byte == SCALE_NAN, float("nan"), value)


@triton.jit
def e4m3_up(x, NATIVE_E4M3: tl.constexpr = False):
    """Round non-negative float32 to the next E4M3 value at or above it, saturating at 448; NaN stays NaN."""
    nearest = e4m3_nearest(x, NATIVE_E4M3)
    too_small = e4m3_decode(nearest) < clamp_above(x, 448.0)
    return nearest + too_small.to(tl.int32)


@triton.jit
def closed_up(x, NATIVE_E4M3: tl.constexpr = False):
    """Round non-negative float32 to the next closed scale (see ``ScaleRule.CLOSED``), saturating at 64."""
    byte = e4m3_up(x, NATIVE_E4M3)
    third = byte & 7
    even = byte + (byte & 1)
    normal = tl.where(third >= 5, byte + 8 - third, even)
    closed = tl.minimum(tl.where(byte < 8, even, normal), 104)
    return tl.where(x == x, closed, SCALE_NAN)


@triton.jit
def closed_nearest(x, NATIVE_E4M3: tl.constexpr = False):
    """Round non-negative float32 to the nearest closed scale, ties up, saturating at 64."""
    above = closed_up(x, NATIVE_E4M3)
    below = tl.where((above > 8) & ((above & 7) == 0), above - 4, tl.maximum(above - 2, 0))
    is_nearer = x - e4m3_decode(below) < e4m3_decode(above) - x
    return tl.where(is_nearer, below, above)


@triton.jit
def closed_next(byte):
    """The closed scale after this one; 64 stays."""
    after = tl.where((byte >= 8) & ((byte & 7) == 4), byte + 4, byte + 2)
    return tl.where(byte == SCALE_NAN, byte, tl.minimum(after, 104))


@triton.jit
def e8m0_up(x):
    """Round non-negative float32 to the next power of two, 2^-127 at least; Inf and NaN become E8M0's NaN."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = bits >> 23
    mantissa = bits & 0x7FFFFF
    # Subnormal float32 are above 2^-127 if they exceed 0x400000 units, at or below it otherwise.
    byte = tl.where(exponent == 0, (mantissa > 0x400000).to(tl.int32), exponent + (mantissa != 0).to(tl.int32))
    return tl.where(exponent == 255, 255, tl.minimum(byte, 254))


@triton.jit
def e8m0_decode(byte):
    """Float32 value of an E8M0 byte."""
    bits = tl.where(byte == 0, 0x400000, byte.to(tl.int32) << 23)
    return tl.where(byte == 255, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def scale_decode(byte, E8M0: tl.constexpr):
    """Float32 value of a scale byte."""
    return e8m0_decode(byte) if E8M0 else e4m3_decode(byte)


@triton.jit
def candidate_scale(
    amax, global_encode, previous, INDEX: tl.constexpr, RULE: tl.constexpr, E8M0: tl.constexpr,
    NATIVE_E4M3: tl.constexpr,
):  # fmt: skip
    """The scale byte that ``RULE`` tries in place ``INDEX`` for blocks with maximum ``amax``."""
    if E8M0:
        byte = e8m0_up(tl.div_rn(amax, tl.zeros_like(amax) + 6.0))
    elif RULE == "unbiased":
        byte = e4m3_up(amax * (global_encode * ONE_SIXTH), NATIVE_E4M3)
    elif RULE == "closed":
        byte = closed_nearest(amax * (global_encode * ONE_SIXTH), NATIVE_E4M3)
    elif RULE == "closed_up":
        byte = closed_up(amax * (global_encode * ONE_SIXTH), NATIVE_E4M3)
    elif RULE == "closed_best" and INDEX > 0:
        byte = closed_next(previous)
    elif RULE == "closed_best":
        byte = closed_up(amax * (global_encode * ONE_SIXTH), NATIVE_E4M3)
    elif INDEX > 0:  # four over six: the second candidate maps the maximum to 4
        byte = e4m3_nearest(amax * (global_encode * ONE_SIXTH) * 1.5, NATIVE_E4M3)
    else:  # rne, and the first candidate of four over six
        byte = e4m3_nearest(amax * (global_encode * ONE_SIXTH), NATIVE_E4M3)
    return byte


@triton.jit
def reciprocal(x, ASM: tl.constexpr):
    """``1 / x``, rounded to nearest."""
    if ASM:
        return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.div_rn(tl.zeros_like(x) + 1.0, x)


@triton.jit
def block_encode(byte, global_decode, E8M0: tl.constexpr, ASM: tl.constexpr):
    """The float32 factor that maps a block to the E2M1 range."""
    decode = scale_decode(byte, E8M0)
    if not E8M0:
        decode = decode * global_decode
    return clamp_above(reciprocal(decode, ASM), FLOAT32_MAX)


# ----------------------------------------------------------------------------------------------------------------------
# E2M1 values, as float32
# ----------------------------------------------------------------------------------------------------------------------


def _clamp_assembly(limit: float) -> str:
    """Sixteen values clamped to +-6 if their largest magnitude ``$16`` is not below the limit: hardly any are."""
    values = range(16)
    moves = "".join(f"mov.f32 v{i}, ${17 + i}; " for i in values)
    clamps = "".join(f"min.NaN.f32 v{i}, v{i}, 0f40C00000; max.NaN.f32 v{i}, v{i}, 0fC0C00000; " for i in values)
    results = "".join(f"mov.f32 ${i}, v{i}; " for i in values)
    bits = struct.pack(">f", limit).hex().upper()
    return (
        f"{{ .reg .pred p; .reg .f32 v<16>; {moves}setp.lt.f32 p, $16, 0f{bits}; @p bra DONE; {clamps}DONE: {results}}}"
    )


# Nearest: up to 7 rounds to 6. Stochastic: 6 and less than one random bit of its spacing still rounds down to 6.
_CLAMP_NEAREST = tl.constexpr(_clamp_assembly(7.0))
_CLAMP_STOCHASTIC = tl.constexpr(_clamp_assembly(6.0078125))
_CLAMP_CONSTRAINTS = tl.constexpr(",".join(["=f"] * 16 + ["f"] * 17))
_SIXTEEN_FLOATS = tl.constexpr((tl.float32,) * 16)
_RANDOM_BYTE = tl.constexpr(tuple(f"prmt.b32 $0, $1, 0x42800000, 0x76{i}4;" for i in range(4)))


@triton.jit
def saturate(values, largest, STOCHASTIC: tl.constexpr, ASM: tl.constexpr):
    """Values of a group within what the rounding below takes: magnitudes that it brings to 6 at most. Keeps NaN."""
    out = ()
    if ASM:
        for w in tl.static_range(len(values) // 16):
            inputs = (largest,)
            for i in tl.static_range(16):
                inputs = inputs + (values[16 * w + i],)
            out = out + tl.inline_asm_elementwise(
                _CLAMP_STOCHASTIC if STOCHASTIC else _CLAMP_NEAREST, _CLAMP_CONSTRAINTS, inputs, _SIXTEEN_FLOATS,
                is_pure=True, pack=1,
            )  # fmt: skip
    else:
        for i in tl.static_range(len(values)):
            below = tl.minimum(values[i], 6.0, propagate_nan=tl.PropagateNan.ALL)
            out = out + (tl.maximum(below, -6.0, propagate_nan=tl.PropagateNan.ALL),)
    return out


@triton.jit
def magnitude_times(x, factor, ASM: tl.constexpr):
    """``|x| * factor`` in one instruction."""
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t; abs.f32 t, $1; mul.rn.f32 $0, t, $2; }", "=f,f,f", [x, factor], tl.float32, is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        return tl.abs(x) * factor


@triton.jit
def with_sign_of(magnitude, x):
    """``magnitude`` with the sign of ``x``."""
    bits = magnitude.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -0x80000000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e2m1_nearest(x):
    """The E2M1 value nearest to ``x``, ties to even, which has to be below 7; NaN stays NaN, zeros become +0.

    Beside ``anchor * 2^22`` float32 has E2M1's spacing at ``x``: the sum rounds, the difference is exact. The anchor is
    a little smaller than ``|x|``, so that the sum stays below the next power of two, and an even multiple of the
    spacing where ``x`` is a tie.
    """
    anchor = tl.maximum(tl.abs(x) * 0.99999904632568359375, 1.5)  # 1 - 2^-20
    return tl.fma(anchor, -4194304.0, tl.fma(anchor, 4194304.0, x))


@triton.jit
def e2m1_stochastic(magnitude, word, BYTE: tl.constexpr, ASM: tl.constexpr):
    """One of the two E2M1 values beside ``magnitude``, up with probability ``floor(256 * distance) / 256``.

    The random bits are those of one of the four bytes of ``word``.
    """
    # The power of two below it, at least 1; half of that is E2M1's spacing there.
    octave = tl.maximum(magnitude.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000).to(tl.float32, bitcast=True)
    # The byte as a float32 without a conversion: in the mantissa of 64 it counts in 1/512, half of u = byte / 256.
    if ASM:
        random = tl.inline_asm_elementwise(_RANDOM_BYTE[BYTE], "=f,r", [word], tl.float32, is_pure=True, pack=1)
    else:
        random = ((((word >> (8 * BYTE)) & 0xFF) << 8) | 0x42800000).to(tl.float32, bitcast=True)
    raised = tl.fma(random - 64.0, octave, magnitude)  # spacing * RN(|x| / spacing + u); every product here is exact
    if ASM:
        raised = tl.inline_asm_elementwise(
            "fma.rm.f32 $0, $1, 0f4A800000, $2;", "=f,f,f", [octave, raised], tl.float32, is_pure=True, pack=1
        )  # rounds down beside 2^22 octaves
        return tl.fma(octave, -4194304.0, raised)
    else:
        return tl.floor(raised * tl.div_rn(tl.zeros_like(octave) + 2.0, octave)) * (octave * 0.5)


@triton.jit
def e2m1_decode(code):
    """Float32 value of an int32 code."""
    # The same move of exponent and mantissa as in e4m3_decode.
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def _e2m1_code(value):
    """The code of a float32 E2M1 value in int32, the inverse of :func:`e2m1_decode`."""
    bits = (value * 1.1754943508222875e-38).to(tl.int32, bitcast=True)  # 2^-126
    return ((bits >> 22) & 7) | ((bits >> 28) & 8)


# ----------------------------------------------------------------------------------------------------------------------
# Groups of neighbours: tuples of tensors, packed into 32-bit words with the first neighbour lowest
# ----------------------------------------------------------------------------------------------------------------------

# Through E4M3, whose byte for value / 64 is s00ccc00 with the code's bits c. Needs sm_89.
_PACK_CODES = tl.constexpr("""{
    .reg .b16 a, b, c, d;
    .reg .b32 x, y, u, v;
    cvt.rn.satfinite.e4m3x2.f32 a, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 b, $4, $3;
    cvt.rn.satfinite.e4m3x2.f32 c, $6, $5;
    cvt.rn.satfinite.e4m3x2.f32 d, $8, $7;
    mov.b32 x, {a, b};
    mov.b32 y, {c, d};
    shr.u32 u, x, 2;
    shr.u32 v, x, 4;
    and.b32 u, u, 0x07070707;
    and.b32 v, v, 0x08080808;
    or.b32 x, u, v;
    shr.u32 u, x, 4;
    or.b32 x, x, u;
    shr.u32 u, y, 2;
    shr.u32 v, y, 4;
    and.b32 u, u, 0x07070707;
    and.b32 v, v, 0x08080808;
    or.b32 y, u, v;
    shr.u32 u, y, 4;
    or.b32 y, y, u;
    prmt.b32 $0, x, y, 0x6420;
}""")
_PACK_E4M3 = tl.constexpr("""{
    .reg .b16 a, b;
    cvt.rn.satfinite.e4m3x2.f32 a, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 b, $4, $3;
    mov.b32 $0, {a, b};
}""")


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
def pack_codes(values, NATIVE_E4M3: tl.constexpr):
    """E2M1 values to words of eight codes."""
    words = ()
    for w in tl.static_range(len(values) // 8):
        if NATIVE_E4M3:
            fields = ()
            for i in tl.static_range(8):
                fields = fields + (values[8 * w + i] * 0.015625,)
            word = tl.inline_asm_elementwise(_PACK_CODES, "=r,f,f,f,f,f,f,f,f", fields, tl.int32, is_pure=True, pack=1)
        else:
            word = _e2m1_code(values[8 * w])
            for i in tl.static_range(1, 8):
                word = word | (_e2m1_code(values[8 * w + i]) << (4 * i))
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


# ----------------------------------------------------------------------------------------------------------------------
# Random bits and the Hadamard transform
# ----------------------------------------------------------------------------------------------------------------------


@triton.jit
def in_place_of(offs, values, ASM: tl.constexpr):
    """``offs``, held by the threads that hold ``values``: what is computed from it needs no exchange between threads.

    The compiler takes the layout from the operands, so it gets a zero that it believes to depend on ``values``.
    """
    if ASM:
        zero = tl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,f", [values], tl.int32, is_pure=True, pack=1)
        offs = offs + zero
    return offs


@triton.jit
def _times(word, MULTIPLIER: tl.constexpr):
    """High and low 32 bits of a product."""
    product = word.to(tl.uint64) * MULTIPLIER
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def random_words(group, seed_ptr, stream):
    """Four random 32-bit words for each int64 group index: the Philox 4x32-7 of ``reference.random_bytes``."""
    key = tl.load(seed_ptr)
    step = tl.load(seed_ptr + 1)
    k0 = (key & 0xFFFFFFFF).to(tl.uint32)
    k1 = (key >> 32).to(tl.uint32)
    c0 = (group & 0xFFFFFFFF).to(tl.uint32)
    c1 = (group >> 32).to(tl.uint32)
    c2 = (step & 0xFFFFFFFF).to(tl.uint32)
    c3 = tl.cast(stream, tl.uint32)
    for _ in tl.static_range(PHILOX_ROUNDS):
        high_0, low_0 = _times(c0, 0xD2511F53)
        high_1, low_1 = _times(c2, 0xCD9E8D57)
        c0 = high_1 ^ c1 ^ k0
        c1 = low_1
        c2 = high_0 ^ c3 ^ k1
        c3 = low_0
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def rotate(values, SIZE: tl.constexpr, dtype: tl.constexpr):
    """Rotate groups of ``SIZE`` neighbours of a tuple of tensors by the butterflies of ``reference.rotate``.

    ``dtype`` is what the values were before they were float32. Sixteen values need a factor of 1/4, which is exact for
    all but the smallest float32, so the first butterflies take it into their sums.
    """
    FUSED: tl.constexpr = SIZE == 16 and dtype != tl.float32
    out = ()
    for i in tl.static_range(len(values)):
        if FUSED and i % 2 == 0:
            out = out + (values[i],)
        else:
            out = out + (values[i] * (SIZE**-0.5),)
    signed = ()
    for i in tl.static_range(len(values)):
        if (NEGATIVE_SIGNS >> (i % SIZE)) & 1:
            signed = signed + (out[i] * -1.0,)
        else:
            signed = signed + (out[i],)
    out = signed
    for stage in tl.static_range(5):
        if (1 << stage) < SIZE:
            sums = ()
            for i in tl.static_range(len(values)):
                if (i >> stage) % 2 == 0:
                    first, second = out[i], out[i + (1 << stage)]
                    sums = sums + (tl.fma(first, 0.25, second) if FUSED and stage == 0 else first + second,)
                else:
                    first, second = out[i - (1 << stage)], out[i]
                    sums = sums + (tl.fma(first, 0.25, -second) if FUSED and stage == 0 else first - second,)
            out = sums
    return out
