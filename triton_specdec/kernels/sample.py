"""Support -> token on the device: one draw a row, by the inverse of the cumulative distribution or by Gumbel noise.

A filtered row reads the tiles whose maximum reaches its cut, in id order; a row that keeps everything draws its tile
from the tiles' masses and reads that one tile; a one-hot row reads nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import rng
from .rules import LARGEST, is_drawn, is_kept, scaled
from .tiles import END, finite, key_of, list_tiles, load_raw, load_tiles

LOG2_E = tl.constexpr(1.4426950408889634)
NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def tile_masses(tile_max, tile_sum, maximum, inverse):
    """Mass of each tile relative to the row's maximum, float64; 0 for tiles without a finite logit."""
    z = scaled(tile_max.to(tl.float64), maximum.to(tl.float64), inverse)
    return tl.where(tile_max > float("-inf"), tile_sum.to(tl.float64) * tl.exp(z), 0.0)


@triton.jit
def weights(x, maximum, inverse):
    """exp((x - maximum) / T), float64: for the few tokens that decide where a cut is."""
    return tl.exp(scaled(x.to(tl.float64), maximum.to(tl.float64), inverse))


@triton.jit
def rate(inverse):
    """1 / T in float32 and for base 2, so that exp2(scaled(x, maximum, rate)) is a weight."""
    return tl.minimum(inverse * LOG2_E, LARGEST).to(tl.float32)


@triton.jit
def first_drawn(weight, ids, before, u, total):
    """The first id whose cumulative weight exceeds u * total, NO_TOKEN where none does.

    A parallel sum may rise a little at a weight of 0, which must not be drawn.
    """
    drawn = is_drawn(before + tl.cumsum(weight, 0), u, total) & (weight > 0)
    return tl.min(tl.where(drawn, ids, NO_TOKEN), 0)


@triton.jit
def draw_filtered(
    logits_ptr,
    mask_ptr,
    list_ptr,
    count,
    u,
    total,
    maximum,
    inverse,
    cut_value,
    cut_id,
    vocab_size,
    HAS_MASK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Inverse CDF over the kept tokens of the listed tiles."""
    before = tl.zeros_like(total)
    token = tl.full([], NO_TOKEN, tl.int32)
    last = tl.full([], -1, tl.int32)
    start = 0
    while (start < count) & (token == NO_TOKEN):
        x, ids = load_tiles(logits_ptr, mask_ptr, list_ptr, start, count, vocab_size, HAS_MASK, ROWS, WIDTH)
        w = tl.exp2(scaled(x, maximum, rate(inverse)))
        w = tl.where(is_kept(x, ids, cut_value, cut_id), w, 0.0).to(tl.float64)
        token = first_drawn(w, ids, before, u, total)
        last = tl.maximum(last, tl.max(tl.where(w > 0, ids, -1), 0))
        before += tl.sum(w, 0)
        start += ROWS
    # The masses of the tiles may add up to a hair less than the total: the last token that has any.
    return tl.where(token == NO_TOKEN, last, token)


@triton.jit
def draw_unfiltered(
    logits_ptr,
    mask_ptr,
    tile_mass,
    u,
    maximum,
    inverse,
    vocab_size,
    HAS_MASK: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Inverse CDF over a whole row: the tile by the tiles' masses, the token by that tile's weights."""
    tiles = tl.arange(0, PADDED)
    total = tl.sum(tile_mass, 0)
    tile = first_drawn(tile_mass, tiles, tl.zeros_like(total), u, total)
    tile = tl.where(tile == NO_TOKEN, tl.max(tl.where(tile_mass > 0, tiles, 0), 0), tile)
    before = tl.sum(tl.where(tiles < tile, tile_mass, 0.0), 0)
    inside = (u * total - before) / tl.sum(tl.where(tiles == tile, tile_mass, 0.0), 0)
    ids = tile * WIDTH + tl.arange(0, WIDTH)
    x = finite(load_raw(logits_ptr, mask_ptr, ids, ids < vocab_size, HAS_MASK))
    w = tl.where(x > float("-inf"), weights(x, maximum, inverse), 0.0)
    own = tl.sum(w, 0)
    token = first_drawn(w, ids, tl.zeros_like(own), tl.maximum(inside, 0.0), own)
    return tl.where(token == NO_TOKEN, tl.max(tl.where(w > 0, ids, 0), 0), token)


@triton.jit
def draw_gumbel(
    logits_ptr,
    mask_ptr,
    list_ptr,
    count,
    seed,
    position,
    maximum,
    inverse,
    cut_value,
    cut_id,
    vocab_size,
    HAS_MASK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The first maximum of logit / T + Gumbel(seed, position, id) over the kept tokens of the listed tiles."""
    best = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], NO_TOKEN, tl.int32)
    per = tl.minimum(inverse, LARGEST).to(tl.float32)
    for start in range(0, count, ROWS):
        x, ids = load_tiles(logits_ptr, mask_ptr, list_ptr, start, count, vocab_size, HAS_MASK, ROWS, WIDTH)
        score = scaled(x, maximum, per) + rng.gumbel(seed, position, ids.to(tl.int64))
        kept = is_kept(x, ids, cut_value, cut_id) & (ids < vocab_size)
        score = tl.where(kept, score, float("-inf"))
        top = tl.max(score, 0)
        first = tl.min(tl.where(kept & (score == top), ids, NO_TOKEN), 0)
        token = tl.where(top > best, first, token)
        best = tl.maximum(best, top)
    return token


@triton.jit
def draw(
    logits_ptr,
    mask_ptr,
    list_ptr,
    seed_ptr,
    position_ptr,
    step_ptr,
    uniform_ptr,
    row,
    stream,
    tile_max,
    tile_sum,
    maximum,
    inverse,
    cut_value,
    cut_id,
    log_normalizer,
    vocab_size,
    METHOD: tl.constexpr,
    HAS_MASK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """One token of a row, whatever its support."""
    is_one_hot = inverse == 0
    is_whole = cut_value == float("-inf")
    token = tl.maximum(cut_id, 0)
    last_key = tl.minimum(key_of(cut_value), END - 1)
    if METHOD == "gumbel":
        if not is_one_hot:
            count = list_tiles(list_ptr, key_of(tile_max), last_key, PADDED)
            seed = tl.load(seed_ptr + row)
            position = tl.load(position_ptr + row)
            token = draw_gumbel(
                logits_ptr,
                mask_ptr,
                list_ptr,
                count,
                seed,
                position,
                maximum,
                inverse,
                cut_value,
                cut_id,
                vocab_size,
                HAS_MASK,
                ROWS,
                WIDTH,
            )
    else:
        if METHOD == "uniforms":
            u = tl.load(uniform_ptr + row)
        else:
            u = rng.uniforms(tl.load(seed_ptr + row), tl.load(position_ptr + row), stream, tl.load(step_ptr + row))
        if not is_one_hot:
            if is_whole:
                mass = tile_masses(tile_max, tile_sum, maximum, inverse)
                token = draw_unfiltered(
                    logits_ptr, mask_ptr, mass, u, maximum, inverse, vocab_size, HAS_MASK, WIDTH, PADDED
                )
            else:
                count = list_tiles(list_ptr, key_of(tile_max), last_key, PADDED)
                token = draw_filtered(
                    logits_ptr,
                    mask_ptr,
                    list_ptr,
                    count,
                    u,
                    tl.exp(log_normalizer),
                    maximum,
                    inverse,
                    cut_value,
                    cut_id,
                    vocab_size,
                    HAS_MASK,
                    ROWS,
                    WIDTH,
                )
    return token
