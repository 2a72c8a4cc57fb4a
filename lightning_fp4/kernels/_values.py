"""E2M1 values in registers, as float32: rounding to nearest and stochastically.

Every line is one rounded float32 operation in the order of ``lightning_fp4.reference``; launch with
``enable_fp_fusion=False``, or the compiler merges products and sums.
"""

import struct

import triton
import triton.language as tl


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
def e2m1_code(value):
    """The code of a float32 E2M1 value in int32, the inverse of :func:`e2m1_decode`."""
    bits = (value * 1.1754943508222875e-38).to(tl.int32, bitcast=True)  # 2^-126
    return ((bits >> 22) & 7) | ((bits >> 28) & 8)
