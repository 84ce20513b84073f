"""Philox4x32-10 on the device: bit for bit the numbers of `triton_specdec.reference.rng`.

counter = (token // 2, position, stream), key = seed; an odd token takes the second half of the words.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rules import (
    MASK32,
    PHILOX_ROUNDS,
    PHILOX_W0,
    PHILOX_W1,
    STREAM_GUMBEL,
    philox_next_key,
    philox_round,
    uniform,
    uniform_bits,
)


@triton.jit
def uniforms(seed, position, stream, token):
    """Uniforms float64 in [0, 1) of tokens (a block or a number), all int64; `stream` broadcasts too."""
    zero = tl.zeros_like(token).to(tl.uint64)
    at = position.to(tl.uint64, bitcast=True)
    key = seed.to(tl.uint64, bitcast=True)
    c0 = (token.to(tl.uint64, bitcast=True) >> 1) & MASK32
    c1 = zero + (at & MASK32)
    c2 = zero + (at >> 32)
    c3 = zero + stream
    k0 = key & MASK32
    k1 = key >> 32
    for _ in tl.static_range(PHILOX_ROUNDS):
        c0, c1, c2, c3 = philox_round(c0, c1, c2, c3, k0, k1)
        k0 = philox_next_key(k0, PHILOX_W0)
        k1 = philox_next_key(k1, PHILOX_W1)
    odd = (token & 1) == 1
    bits = uniform_bits(tl.where(odd, c2, c0), tl.where(odd, c3, c1))
    return uniform(bits.to(tl.int64, bitcast=True).to(tl.float64))


@triton.jit
def gumbel(seed, position, token):
    """Standard Gumbel noise float32 of token ids, -log(-log(1 - u)).

    1 - u is exact, but float32 cannot hold it where u is small, and there the winners are: a series in u.
    """
    u = uniforms(seed, position, STREAM_GUMBEL, token)
    v = (1.0 - u).to(tl.float32)
    s = u.to(tl.float32)
    series = 1.0 / 6.0 + s * (1.0 / 7.0 + s * (1.0 / 8.0))
    series = 1.0 / 3.0 + s * (1.0 / 4.0 + s * (1.0 / 5.0 + s * series))
    series = s * (1.0 + s * (0.5 + s * series))
    exponential = tl.where(s < 0.125, series, -tl.log(v))
    return -tl.log(exponential)
