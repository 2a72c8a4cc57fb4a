"""What recipes call random: the bits of stochastic rounding, and the Hadamard transform with its signs."""

import triton
import triton.language as tl

PHILOX_ROUNDS = tl.constexpr(7)
# Bit i is set where sign i of the random Hadamard transform is negative; tests compare it with the reference's list.
NEGATIVE_SIGNS = tl.constexpr(0b10100010_01001101_11010111_11101000)


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
    all but the smallest float32, so the first butterflies take it into their sums. Signs change by a product: for a
    minus Triton 3.6 subtracts from zero, which loses the sign of a zero.
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
                    sums = sums + (tl.fma(first, 0.25, second * -1.0) if FUSED and stage == 0 else first - second,)
            out = sums
    return out
