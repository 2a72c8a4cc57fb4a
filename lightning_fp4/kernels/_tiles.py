"""One tile of a matrix to four bits.

A tile is a tuple with one tensor for each place within a group of neighbours along the contraction axis, so rotation,
block maximum, random bytes and packing of a group stay within a thread. The tensors of a row form are
``[BLOCK_M, groups]``, those of a column form (whose codes leave transposed) ``[groups, BLOCK_N]``.
"""

import triton
import triton.language as tl

from lightning_fp4.kernels import _device


@triton.jit
def load_words(ptr, stride, offs_m, offs_g, rows, groups, C: tl.constexpr, dtype: tl.constexpr):
    """Groups of ``C`` neighbours in rows of contiguous memory, by 16-byte loads; ``ptr`` points to int64 words.

    ``stride`` counts words. ``dtype`` is what the words hold.
    """
    BITS: tl.constexpr = dtype.primitive_bitwidth
    WORDS: tl.constexpr = C * BITS // 64
    mask = (offs_m[:, None] < rows) & (offs_g[None, :] < groups)
    first = ptr + offs_m[:, None] * stride + offs_g[None, :] * WORDS
    pair = tl.arange(0, 2)[None, None, :]
    values = ()
    for i in tl.static_range(WORDS // 2):
        loaded = tl.load(first[:, :, None] + (2 * i + pair), mask=mask[:, :, None], other=0)
        words = tl.split(loaded)
        for k in tl.static_range(2):
            word = words[k]
            for j in tl.static_range(64 // BITS):
                if dtype == tl.float32:
                    value = (word >> (32 * j)).to(tl.int32).to(tl.float32, bitcast=True)
                elif dtype == tl.bfloat16:
                    value = ((word >> (16 * j)).to(tl.int32) << 16).to(tl.float32, bitcast=True)
                else:
                    value = (word >> (16 * j)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
                values = values + (value,)
    return values


@triton.jit
def load_rows(ptr, stride_m, stride_n, offs_m, offs_g, rows, columns, C: tl.constexpr):
    """Groups of ``C`` neighbours along rows of any strides: tensors ``[BLOCK_M, groups]``."""
    values = ()
    for i in tl.static_range(C):
        offs_n = offs_g * C + i
        mask = (offs_m[:, None] < rows) & (offs_n[None, :] < columns)
        x = tl.load(ptr + offs_m[:, None] * stride_m + offs_n[None, :] * stride_n, mask=mask, other=0.0)
        values = values + (x.to(tl.float32),)
    return values


@triton.jit
def load_columns(ptr, stride_m, stride_n, offs_g, offs_n, rows, columns, C: tl.constexpr):
    """Groups of ``C`` neighbours along columns: tensors ``[groups, BLOCK_N]``."""
    values = ()
    for i in tl.static_range(C):
        offs_m = offs_g * C + i
        mask = (offs_m[:, None] < rows) & (offs_n[None, :] < columns)
        x = tl.load(ptr + offs_m[:, None] * stride_m + offs_n[None, :] * stride_n, mask=mask, other=0.0)
        values = values + (x.to(tl.float32),)
    return values


@triton.jit
def over_block_rows(x, R: tl.constexpr, AXIS: tl.constexpr, TAKE_MAX: tl.constexpr):
    """Combine ``R`` neighbours along ``AXIS`` (by maximum or pairwise sum) and give each of them the result."""
    A: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    if AXIS == 0:
        blocks = tl.permute(tl.reshape(x, (A // R, R, B)), (0, 2, 1))
    else:
        blocks = tl.reshape(x, (A, B // R, R))
    P: tl.constexpr = blocks.shape[0]
    Q: tl.constexpr = blocks.shape[1]
    if TAKE_MAX:
        combined = tl.max(blocks, axis=2)
    else:
        for stage in tl.static_range(5):  # neighbours first, as in the reference
            if (1 << stage) < R:
                first, second = tl.split(tl.reshape(blocks, (P, Q, R >> (stage + 1), 2)))
                blocks = first + second
        combined = tl.reshape(blocks, (P, Q))
    spread = tl.broadcast_to(combined[:, :, None], (P, Q, R))
    if AXIS == 0:
        spread = tl.permute(spread, (0, 2, 1))
    return tl.reshape(spread, (A, B))


@triton.jit
def encode(values, factors, words, STOCHASTIC: tl.constexpr, ASM: tl.constexpr):
    """E2M1 values of a tuple of values that share ``factors``; ``words`` holds a random byte for each."""
    encoded = ()
    for i in tl.static_range(len(values)):
        scaled = values[i] * factors
        if STOCHASTIC:
            word = words[i // 4].to(tl.int32, bitcast=True)
            if i % 4 == 0:
                byte = (word << 8) & 0xFF00
            else:
                byte = (word >> (8 * (i % 4) - 8)) & 0xFF00
            encoded = encoded + (_device.e2m1_stochastic(scaled, byte, ASM),)
        else:
            encoded = encoded + (_device.e2m1_nearest(scaled),)
    return encoded


@triton.jit
def squared_error(
    values, encoded, scales, amax, ENCODED_MAX: tl.constexpr, R: tl.constexpr, AXIS: tl.constexpr
):  # fmt: skip
    """Sum over each block of the squared error, for each of the groups in the block."""
    factors = _device.e4m3_decode(scales) * amax
    errors = ()
    for i in tl.static_range(len(values)):
        error = encoded[i] * factors * (1.0 / ENCODED_MAX) - values[i]
        errors = errors + (error * error,)
    for stage in tl.static_range(5):  # neighbours first, as in the reference
        if (1 << stage) < len(values):
            sums = ()
            for i in tl.static_range(len(values) >> (stage + 1)):
                sums = sums + (errors[2 * i] + errors[2 * i + 1],)
            errors = sums
    total = errors[0]
    if R > 1:
        total = over_block_rows(total, R, AXIS, False)
    return total


@triton.jit
def store_words(ptr, words, offs, mask):
    """Store the words of each group, which follow each other in memory at ``offs * len(words)``."""
    first = ptr + offs * len(words)
    two = tl.arange(0, 2)
    if len(words) == 2:
        tl.store(first[:, :, None] + two[None, None, :], tl.join(words[0], words[1]), mask=mask[:, :, None])
    else:
        for i in tl.static_range(len(words) // 4):
            even = tl.join(words[4 * i], words[4 * i + 2])
            odd = tl.join(words[4 * i + 1], words[4 * i + 3])
            place = 4 * i + 2 * two[None, None, :, None] + two[None, None, None, :]
            tl.store(first[:, :, None, None] + place, tl.join(even, odd), mask=mask[:, :, None, None])


@triton.jit
def quantize_groups(
    values, offs_out, offs_g, outs, block_count, amax, out_ptr, scale_ptr, seed_ptr, stream,
    ENCODED_MAX: tl.constexpr, UNITS: tl.constexpr, SHIFT: tl.constexpr, R: tl.constexpr, AXIS: tl.constexpr,
    E8M0: tl.constexpr, RULE: tl.constexpr, STOCHASTIC: tl.constexpr, CANDIDATES: tl.constexpr,
    NATIVE_E4M3: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Quantise and store a tile; a group is a block, or with ``R`` others along ``AXIS`` a square block.

    ``offs_out`` (rows of the output, int64), ``offs_g`` (groups within a row, int64) and ``amax`` (the global maximum)
    broadcast to the shape of the tensors. The output has ``outs`` rows of ``block_count`` groups.
    """
    block_amax = _device.group_amax(values)
    if R > 1:
        bits = over_block_rows(_device.magnitude_bits(block_amax), R, AXIS, True)
        block_amax = bits.to(tl.float32, bitcast=True)
    words = ()
    if STOCHASTIC:
        calls = (offs_out * block_count + offs_g) * (len(values) // 16)
        for i in tl.static_range(len(values) // 16):
            w0, w1, w2, w3 = _device.random_words(calls + i, seed_ptr, stream)
            words = words + (w0, w1, w2, w3)
    global_encode = _device.encode_scale(amax, ENCODED_MAX)
    scales = _device.candidate_scale(block_amax, global_encode, 0, 0, RULE, E8M0)
    encoded = encode(values, _device.block_encode(scales, global_encode, E8M0), words, STOCHASTIC, ASM)
    if CANDIDATES > 1:
        error = squared_error(values, encoded, scales, amax, ENCODED_MAX, R, AXIS)
        candidate = scales
        for k in tl.static_range(1, CANDIDATES):
            candidate = _device.candidate_scale(block_amax, global_encode, candidate, k, RULE, E8M0)
            other = encode(values, _device.block_encode(candidate, global_encode, E8M0), words, STOCHASTIC, ASM)
            other_error = squared_error(values, other, candidate, amax, ENCODED_MAX, R, AXIS)
            is_better = other_error < error
            picked = ()
            for i in tl.static_range(len(values)):
                picked = picked + (tl.where(is_better, other[i], encoded[i]),)
            encoded = picked
            scales = tl.where(is_better, candidate, scales)
            error = tl.where(is_better, other_error, error)
    mask = (offs_out < outs) & (offs_g < block_count)
    offs = offs_out * block_count + offs_g
    decode = _device.scale_decode(scales, E8M0)
    if UNITS == "packed":
        codes = _device.pack_codes(encoded, NATIVE_E4M3)
        visible = ()
        for i in tl.static_range(len(codes)):
            # NaN is in the scale; the codes beside it are zero.
            visible = visible + (tl.where(decode == decode, codes[i], 0),)
        store_words(out_ptr, visible, offs, mask)
        if R > 1:
            mask = mask & (offs_out % R == 0)
            offs = (offs_out // R) * block_count + offs_g
        tl.store(scale_ptr + offs, scales.to(tl.uint8), mask=mask)
    else:
        store_words(out_ptr, _device.pack_operand(encoded, decode * SHIFT, UNITS, NATIVE_E4M3), offs, mask)
