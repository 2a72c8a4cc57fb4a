"""Block scales in registers: their rules, their bytes (in int32), and the factors that they make.

Every line is one rounded float32 operation in the order of ``lightning_fp4.reference``; launch with
``enable_fp_fusion=False``, or the compiler merges products and sums.
E4M3 is rounded in integer arithmetic where the chip (or Triton's interpreter) has no cast that can be relied on.
"""

import triton
import triton.language as tl

FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
ONE_SIXTH = tl.constexpr(1.0 / 6.0)
SCALE_NAN = tl.constexpr(0x7F)


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
