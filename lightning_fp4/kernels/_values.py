"""E2M1 values in registers, as float32: rounding to nearest and stochastically.

Every line is one rounded float32 operation in the order of ``lightning_fp4.reference``; launch with
``enable_fp_fusion=False``, or the compiler merges products and sums.
"""

import struct

import triton
import triton.language as tl


def _clamp_assembly() -> str:
    """Sixteen values clamped to +-6 unless their largest magnitude ``$16`` is below 7, which rounds to 6: most are."""
    values = range(16)
    moves = "".join(f"mov.f32 v{i}, ${17 + i}; " for i in values)
    clamps = "".join(f"min.NaN.f32 v{i}, v{i}, 0f40C00000; max.NaN.f32 v{i}, v{i}, 0fC0C00000; " for i in values)
    results = "".join(f"mov.f32 ${i}, v{i}; " for i in values)
    return (
        f"{{ .reg .pred p; .reg .f32 v<16>; {moves}setp.lt.f32 p, $16, 0f40E00000; @p bra DONE; {clamps}"
        f"DONE: {results}}}"
    )


_CLAMP_NEAREST = tl.constexpr(_clamp_assembly())
_CLAMP_CONSTRAINTS = tl.constexpr(",".join(["=f"] * 16 + ["f"] * 17))
_SIXTEEN_FLOATS = tl.constexpr((tl.float32,) * 16)


def _stochastic_assembly() -> str:
    """Sixteen values (``$14`` on) times ``$8`` and the bytes of four words (``$10`` on) to eight pairs.

    ``$9`` is the largest magnitude of the products. Float16 truncates them with nine bits below E2M1's last, of which
    a random byte takes the upper eight: its carry rounds up. The spacing at 6 leaves room for one byte, so what is not
    below 6 and a bit is cut first; hardly any group has such values.
    """
    pairs = range(8)
    convert = "".join(
        f"mul.rn.f32 low, ${14 + 2 * i}, $8; mul.rn.f32 high, ${15 + 2 * i}, $8; cvt.rz.f16x2.f32 p{i}, high, low; "
        for i in pairs
    )
    clamp = "".join(f"min.f16x2 p{i}, p{i}, six; max.f16x2 p{i}, p{i}, minus_six; " for i in pairs)
    add = "".join(
        f"prmt.b32 random, ${10 + i // 2}, 0, {0x4140 if i % 2 == 0 else 0x4342:#x}; shl.b32 random, random, 1; "
        f"add.u32 p{i}, p{i}, random; "
        for i in pairs
    )
    mask = "".join(f"and.b32 ${i}, p{i}, 0xFE00FE00; " for i in pairs)
    limit = struct.pack(">f", 6.0078125 * 2**-14).hex().upper()
    return (
        f"{{ .reg .pred fits; .reg .f32 low, high; .reg .b32 p<8>, random, six, minus_six; {convert}"
        f"setp.lt.f32 fits, $9, 0f{limit}; @fits bra DONE; mov.b32 six, 0x0E000E00; mov.b32 minus_six, 0x8E008E00; "
        f"{clamp}DONE: {add}{mask}}}"
    )


_STOCHASTIC = tl.constexpr(_stochastic_assembly())
_STOCHASTIC_CONSTRAINTS = tl.constexpr(",".join(["=r"] * 8 + ["f"] * 2 + ["r"] * 4 + ["f"] * 16))
_EIGHT_WORDS = tl.constexpr((tl.int32,) * 8)
_PAIR = tl.constexpr("""{
    .reg .b32 signs, down;
    mov.b32 down, 0x04000400;
    prmt.b32 signs, $3, $4, 0x7632;
    cvt.rn.f16x2.f32 $0, $2, $1;
    mul.rn.f16x2 $0, $0, down;
    and.b32 signs, signs, 0x80008000;
    or.b32 $0, $0, signs;
}""")
_UNPACK_PAIR = tl.constexpr(
    "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"
)


@triton.jit
def saturate(values, largest, ASM: tl.constexpr):
    """Values of a group within what rounding to nearest takes: magnitudes that it brings to 6 at most. Keeps NaN."""
    out = ()
    if ASM:
        for w in tl.static_range(len(values) // 16):
            inputs = (largest,)
            for i in tl.static_range(16):
                inputs = inputs + (values[16 * w + i],)
            out = out + tl.inline_asm_elementwise(
                _CLAMP_NEAREST, _CLAMP_CONSTRAINTS, inputs, _SIXTEEN_FLOATS, is_pure=True, pack=1
            )
    else:
        for i in tl.static_range(len(values)):
            below = tl.minimum(values[i], 6.0, propagate_nan=tl.PropagateNan.ALL)
            out = out + (tl.maximum(below, -6.0, propagate_nan=tl.PropagateNan.ALL),)
    return out


@triton.jit
def stochastic_pairs(values, factors, largest, words):
    """A group times ``factors``, rounded stochastically by a byte of ``words`` for each, in pairs.

    A pair are two E2M1 values times 2^-14 in float16, whose exponents are E2M1's there: three bits hold a magnitude.
    ``largest`` is the largest magnitude of the group. The values of a group with NaN are arbitrary.
    """
    small = factors * 6.103515625e-05  # 2^-14
    pairs = ()
    for w in tl.static_range(len(values) // 16):
        inputs = (small, largest * small)
        for i in tl.static_range(4):
            inputs = inputs + (words[4 * w + i],)
        for i in tl.static_range(16):
            inputs = inputs + (values[16 * w + i],)
        pairs = pairs + tl.inline_asm_elementwise(
            _STOCHASTIC, _STOCHASTIC_CONSTRAINTS, inputs, _EIGHT_WORDS, is_pure=True, pack=1
        )
    return pairs


@triton.jit
def nearest_pairs(encoded, values):
    """E2M1 values that rounding to nearest made of ``values``, with their signs, as :func:`stochastic_pairs`."""
    pairs = ()
    for i in tl.static_range(len(values) // 2):
        inputs = (encoded[2 * i], encoded[2 * i + 1], values[2 * i], values[2 * i + 1])
        pair = tl.inline_asm_elementwise(_PAIR, "=&r,f,f,f,f", inputs, tl.int32, is_pure=True, pack=1)
        pairs = pairs + (pair,)
    return pairs


@triton.jit
def unpack_pairs(pairs):
    """The E2M1 values of pairs as float32."""
    values = ()
    for i in tl.static_range(len(pairs)):
        low, high = tl.inline_asm_elementwise(
            _UNPACK_PAIR, "=f,=f,r", [pairs[i]], (tl.float32, tl.float32), is_pure=True, pack=1
        )
        values = values + (low * 16384.0, high * 16384.0)
    return values


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
def e2m1_stochastic(x, factors, byte):
    """``x * factors`` to one of the two E2M1 values beside it, up with probability ``floor(256 * distance) / 256``.

    ``byte`` are random bits in int32. NaN stays NaN.
    """
    magnitude = (tl.abs(x) * (factors * 6.103515625e-05)) * 16384.0  # 2^-14 and back, as the reference
    magnitude = tl.minimum(magnitude, 6.0, propagate_nan=tl.PropagateNan.ALL)
    # The power of two below it, at least 1; half of that is E2M1's spacing there.
    octave = tl.maximum(magnitude.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000).to(tl.float32, bitcast=True)
    steps = tl.floor(magnitude * tl.div_rn(tl.zeros_like(octave) + 512.0, octave)) + byte.to(tl.float32)
    return with_sign_of(tl.floor(steps * 0.00390625) * (octave * 0.5), x)  # 1 / 256


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
