"""One tile of a matrix to four bits.

A tile is a tuple with one tensor for each place within a group of neighbours along the contraction axis, so rotation,
block maximum, random bytes and packing of a group stay within a thread. The tensors of a row form are
``[groups, BLOCK_M]`` (so that neighbouring threads hold neighbouring groups of a row), those of a column form, whose
codes leave transposed, ``[groups, BLOCK_N]``.

Pointers come advanced to the tile, so offsets count from its corner and stay small; ``rows`` and ``columns`` (or
``outs`` and ``groups``) are what is left from there. With ``EVEN`` all tiles are whole and nothing is masked.
"""

import triton
import triton.language as tl

from lightning_fp4.kernels import _groups, _random, _scales, _values


@triton.jit
def tile_of_program():
    """``(pid_m, pid_n)`` in int64 of the grid of ``_launch.grid_of``."""
    pid_m = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    return pid_m, tl.program_id(0).to(tl.int64)


@triton.jit
def corner(stride_m, stride_n, pid_m, pid_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Offset in int64 of the first element of a tile; ``pid_m`` and ``pid_n`` are int64."""
    return pid_m * BLOCK_M * stride_m + pid_n * BLOCK_N * stride_n


@triton.jit
def load_words(ptr, stride, offs_m, offs_g, rows, groups, C: tl.constexpr, dtype: tl.constexpr, EVEN: tl.constexpr):
    """Groups of ``C`` neighbours in rows of contiguous memory, by 16-byte loads; ``ptr`` points to int64 words.

    ``stride`` counts words. ``dtype`` is what the words hold. Returns the values, and their bits in 32-bit words.
    """
    BITS: tl.constexpr = dtype.primitive_bitwidth
    WORDS: tl.constexpr = C * BITS // 64
    mask = (offs_m[None, :] < rows) & (offs_g[:, None] < groups)
    first = ptr + (offs_m[None, :] * stride + offs_g[:, None] * WORDS)
    pair = tl.arange(0, 2)[None, None, :]
    values = ()
    bits = ()
    for i in tl.static_range(WORDS // 2):
        if EVEN:
            loaded = tl.load(first[:, :, None] + (2 * i + pair))
        else:
            loaded = tl.load(first[:, :, None] + (2 * i + pair), mask=mask[:, :, None], other=0)
        words = tl.split(loaded)
        for k in tl.static_range(2):
            word = words[k]
            bits = bits + (word.to(tl.int32), (word >> 32).to(tl.int32))
            for j in tl.static_range(64 // BITS):
                if dtype == tl.float32:
                    value = (word >> (32 * j)).to(tl.int32).to(tl.float32, bitcast=True)
                elif dtype == tl.bfloat16:
                    value = ((word >> (16 * j)).to(tl.int32) << 16).to(tl.float32, bitcast=True)
                else:
                    value = (word >> (16 * j)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
                values = values + (value,)
    return values, bits


@triton.jit
def _load(place, mask, EVEN: tl.constexpr):
    if EVEN:
        x = tl.load(place)
    else:
        x = tl.load(place, mask=mask, other=0.0)
    return x.to(tl.float32)


@triton.jit
def load_rows(ptr, stride_m, stride_n, offs_m, offs_g, rows, columns, C: tl.constexpr, EVEN: tl.constexpr):
    """Groups of ``C`` neighbours along rows of any strides: tensors ``[groups, BLOCK_M]``."""
    first = ptr + (offs_m[None, :] * stride_m + (offs_g * C)[:, None] * stride_n)
    values = ()
    for i in tl.static_range(C):
        mask = (offs_m[None, :] < rows) & (offs_g[:, None] * C + i < columns)
        values = values + (_load(first + i * stride_n, mask, EVEN),)
    return values


@triton.jit
def load_columns(ptr, stride_m, stride_n, offs_g, offs_n, rows, columns, C: tl.constexpr, EVEN: tl.constexpr):
    """Groups of ``C`` neighbours along columns: tensors ``[groups, BLOCK_N]``."""
    first = ptr + ((offs_g * C)[:, None] * stride_m + offs_n[None, :] * stride_n)
    values = ()
    for i in tl.static_range(C):
        mask = (offs_g[:, None] * C + i < rows) & (offs_n[None, :] < columns)
        values = values + (_load(first + i * stride_m, mask, EVEN),)
    return values


@triton.jit
def subtract_from_rows(
    values, mean_ptr, offs_m, offs_g, rows, columns, C: tl.constexpr, dtype: tl.constexpr, ASM: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Values of rows without the mean of each column, rounded to ``dtype``, and the largest magnitude of each group."""
    centered = ()
    for i in tl.static_range(C):
        offs_n = offs_g * C + i
        if EVEN:
            value = values[i] - tl.load(mean_ptr + offs_n)[:, None]
        else:
            mean = tl.load(mean_ptr + offs_n, mask=offs_n < columns, other=0.0)
            value = tl.where(offs_m[None, :] < rows, values[i] - mean[:, None], 0.0)  # padding stays zero
        centered = centered + (value,)
    return _groups.round_to(centered, dtype, ASM)


@triton.jit
def subtract_from_columns(
    values, mean_ptr, offs_g, offs_n, rows, columns, C: tl.constexpr, dtype: tl.constexpr, ASM: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """The same for values of columns."""
    if EVEN:
        mean = tl.load(mean_ptr + offs_n)
    else:
        mean = tl.load(mean_ptr + offs_n, mask=offs_n < columns, other=0.0)
    centered = ()
    for i in tl.static_range(C):
        value = values[i] - mean[None, :]
        if not EVEN:
            value = tl.where((offs_g * C + i < rows)[:, None], value, 0.0)  # padding stays zero
        centered = centered + (value,)
    return _groups.round_to(centered, dtype, ASM and C >= 16)


@triton.jit
def load_globals(ptr, offs, mask, ENCODED_MAX: tl.constexpr, BY: tl.constexpr, ASM: tl.constexpr):
    """The global maximum of a form, ``[1]`` or one for each of ``offs``; its encoding scale; and the inverse of that.

    The maximum is 1 if the format has none.
    """
    if BY == "none":
        amax = tl.full((1,), 1.0, tl.float32)
    elif BY == "tensor":
        amax = tl.load(ptr + tl.arange(0, 1))
    else:
        amax = tl.load(ptr + offs, mask=mask, other=0.0)
    global_encode = _scales.encode_scale(amax, ENCODED_MAX)
    return amax, global_encode, _scales.reciprocal(global_encode, ASM)


@triton.jit
def over_block_rows(x, R: tl.constexpr, TAKE_MAX: tl.constexpr):
    """Combine ``R`` neighbours along the last axis (by maximum or pairwise sum) and give each of them the result."""
    A: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    blocks = tl.reshape(x, (A, B // R, R))
    if TAKE_MAX:
        combined = tl.max(blocks, axis=2)
    else:
        for stage in tl.static_range(5):  # neighbours first, as in the reference
            if (1 << stage) < R:
                first, second = tl.split(tl.reshape(blocks, (A, B // R, R >> (stage + 1), 2)))
                blocks = first + second
        combined = tl.reshape(blocks, (A, B // R))
    return tl.reshape(tl.broadcast_to(combined[:, :, None], (A, B // R, R)), (A, B))


@triton.jit
def total(x):
    """Sum of a matrix."""
    return tl.sum(tl.sum(x, axis=1), axis=0)


@triton.jit
def draw_words(values, first, offs, seed_ptr, stream, ASM: tl.constexpr):
    """Random words for groups of values, a byte for each: those of the groups ``first + offs`` of a matrix."""
    words = ()
    calls = (first + _random.in_place_of(offs, values[0], ASM)) * (len(values) // 16)
    for i in tl.static_range(len(values) // 16):
        w0, w1, w2, w3 = _random.random_words(calls + i, seed_ptr, stream)
        words = words + (w0, w1, w2, w3)
    return words


@triton.jit
def encode(values, factors, largest, words, STOCHASTIC: tl.constexpr, PAIRS: tl.constexpr, ASM: tl.constexpr):
    """E2M1 values of a tuple of values that share ``factors``; rounding to nearest loses the sign of zeros.

    ``largest`` is their largest magnitude (or a larger one); ``words`` hold a random byte for each. ``PAIRS``, of
    stochastic rounding with ``ASM`` only, leaves them as ``_values.stochastic_pairs`` makes them.
    """
    encoded = ()
    if STOCHASTIC and ASM:
        encoded = _values.stochastic_pairs(values, factors, largest, words)
        if not PAIRS:
            encoded = _values.unpack_pairs(encoded)
    elif STOCHASTIC:
        for i in tl.static_range(len(values)):
            byte = (words[i // 4] >> (8 * (i % 4))).to(tl.int32) & 0xFF
            encoded = encoded + (_values.e2m1_stochastic(values[i], factors, byte),)
    else:
        scaled = ()
        for i in tl.static_range(len(values)):
            scaled = scaled + (values[i] * factors,)
        scaled = _values.saturate(scaled, largest * factors, ASM)
        for i in tl.static_range(len(values)):
            encoded = encoded + (_values.e2m1_nearest(scaled[i]),)
    return encoded


@triton.jit
def squared_error(values, encoded, scales, amax, ENCODED_MAX: tl.constexpr, R: tl.constexpr):
    """Sum over each block of the squared error, for each of the groups in the block."""
    factors = _scales.e4m3_decode(scales) * amax
    errors = ()
    for i in tl.static_range(len(values)):
        error = encoded[i] * factors * (1.0 / ENCODED_MAX) - values[i]
        errors = errors + (error * error,)
    total = _groups.sum_of_neighbours(errors)
    if R > 1:
        total = over_block_rows(total, R, False)
    return total


@triton.jit
def store_words(ptr, words, offs, mask, EVEN: tl.constexpr):
    """Store the words of each group, which follow each other in memory at ``offs * len(words)``."""
    A: tl.constexpr = words[0].shape[0]
    B: tl.constexpr = words[0].shape[1]
    SPAN: tl.constexpr = 4 if len(words) % 4 == 0 else 2
    first = (ptr + offs * len(words))[:, :, None] + tl.arange(0, SPAN)[None, None, :]
    for i in tl.static_range(len(words) // SPAN):
        if SPAN == 2:
            joined = tl.join(words[2 * i], words[2 * i + 1])
        else:
            even = tl.join(words[4 * i], words[4 * i + 2])
            odd = tl.join(words[4 * i + 1], words[4 * i + 3])
            joined = tl.reshape(tl.join(even, odd), (A, B, 4))
        if EVEN:
            tl.store(first + i * SPAN, joined)
        else:
            tl.store(first + i * SPAN, joined, mask=mask[:, :, None])


@triton.jit
def over_block(amax, R: tl.constexpr):
    """Largest magnitudes of blocks, from those of their groups; keeps NaN."""
    if R > 1:
        amax = over_block_rows(_scales.magnitude_bits(amax), R, True).to(tl.float32, bitcast=True)
    return amax


@triton.jit
def encode_blocks(
    values, group_amax, words, amax, global_encode, global_decode, ENCODED_MAX: tl.constexpr, R: tl.constexpr,
    E8M0: tl.constexpr, RULE: tl.constexpr, STOCHASTIC: tl.constexpr, CANDIDATES: tl.constexpr,
    NATIVE_E4M3: tl.constexpr, ASM: tl.constexpr, PAIRS: tl.constexpr = False,
):  # fmt: skip
    """E2M1 values and scale bytes of a tile; see :func:`encode` and :func:`quantize_groups` for the arguments."""
    block_amax = over_block(group_amax, R)
    scales = _scales.candidate_scale(block_amax, global_encode, 0, 0, RULE, E8M0, NATIVE_E4M3)
    factors = _scales.block_encode(scales, global_decode, E8M0, ASM)
    encoded = encode(values, factors, block_amax, words, STOCHASTIC, PAIRS, ASM)
    if CANDIDATES > 1:
        error = squared_error(values, encoded, scales, amax, ENCODED_MAX, R)
        candidate = scales
        for k in tl.static_range(1, CANDIDATES):
            candidate = _scales.candidate_scale(block_amax, global_encode, candidate, k, RULE, E8M0, NATIVE_E4M3)
            factors = _scales.block_encode(candidate, global_decode, E8M0, ASM)
            other = encode(values, factors, block_amax, words, STOCHASTIC, False, ASM)
            other_error = squared_error(values, other, candidate, amax, ENCODED_MAX, R)
            is_better = other_error < error
            picked = ()
            for i in tl.static_range(len(values)):
                picked = picked + (tl.where(is_better, other[i], encoded[i]),)
            encoded = picked
            scales = tl.where(is_better, candidate, scales)
            error = tl.where(is_better, other_error, error)
    return encoded, scales


@triton.jit
def quantize_groups(
    values, block_amax, first_out, offs_out, first_g, offs_g, outs, block_count, out_stride, amax, global_encode,
    global_decode, out_ptr, scale_ptr, seed_ptr, stream,
    ENCODED_MAX: tl.constexpr, UNITS: tl.constexpr, SHIFT: tl.constexpr, R: tl.constexpr, E8M0: tl.constexpr,
    RULE: tl.constexpr, STOCHASTIC: tl.constexpr, CANDIDATES: tl.constexpr, NATIVE_E4M3: tl.constexpr,
    ASM: tl.constexpr, EVEN: tl.constexpr, KEEP_SCALES: tl.constexpr,
):  # fmt: skip
    """Quantise and store a tile; a group is a block, or with ``R`` others along the last axis a square block.

    ``block_amax`` are the largest magnitudes of the groups.

    ``offs_out`` (rows of the output), ``offs_g`` (groups within a row), and ``amax`` with what ``_scales.encode_scale``
    makes of it and the reciprocal of that, broadcast to the shape of the tensors. The offsets count from ``first_out``
    and ``first_g`` (int64), where the tile starts in an output of ``outs`` rows of ``block_count`` groups,
    whose values or codes start ``out_stride`` groups apart. Scale bytes are stored beside codes, and beside decoded
    values with ``KEEP_SCALES``.
    """
    first = first_out * block_count + first_g
    offs = offs_out * block_count + offs_g
    words = ()
    if STOCHASTIC:
        words = draw_words(values, first, offs, seed_ptr, stream, ASM)
    # Their factors go through float16, which those of E8M0 exceed; candidates are compared as float32.
    PAIRS: tl.constexpr = (
        STOCHASTIC and ASM and CANDIDATES == 1 and (UNITS == "packed" or (UNITS == "fp8" and NATIVE_E4M3 and not E8M0))
    )
    encoded, scales = encode_blocks(
        values, block_amax, words, amax, global_encode, global_decode, ENCODED_MAX, R, E8M0, RULE, STOCHASTIC,
        CANDIDATES, NATIVE_E4M3, ASM, PAIRS,
    )  # fmt: skip
    mask = (first_out + offs_out < outs) & (first_g + offs_g < block_count)
    first_place = first_out * out_stride + first_g
    place = offs_out * out_stride + offs_g
    decode = _scales.scale_decode(scales, E8M0)
    if UNITS == "packed":
        if PAIRS:
            codes = _groups.pack_pair_codes(encoded)
        elif ASM:
            codes = _groups.pack_pair_codes(_values.nearest_pairs(encoded, values))
        else:
            signed = ()
            for i in tl.static_range(len(values)):
                signed = signed + (_values.with_sign_of(encoded[i], values[i]),)
            codes = _groups.pack_codes(signed)
        visible = ()
        for i in tl.static_range(len(codes)):
            # NaN is in the scale; the codes beside it are zero.
            visible = visible + (tl.where(decode == decode, codes[i], 0),)
        store_words(out_ptr + first_place * len(codes), visible, place, mask, EVEN)
    else:
        if PAIRS:
            words = _groups.pack_pair_operand(encoded, decode * SHIFT)
        else:
            words = _groups.pack_operand(encoded, decode * SHIFT, UNITS, NATIVE_E4M3)
        store_words(out_ptr + first_place * len(words), words, place, mask, EVEN)
    if UNITS == "packed" or KEEP_SCALES:
        if R > 1:
            mask = mask & (offs_out % R == 0)
            first = (first_out // R) * block_count + first_g
            offs = (offs_out // R) * block_count + offs_g
        if EVEN and R == 1:
            tl.store(scale_ptr + first + offs, scales.to(tl.uint8))
        else:
            tl.store(scale_ptr + first + offs, scales.to(tl.uint8), mask=mask)
