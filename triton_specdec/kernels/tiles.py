"""Tiles of the vocabulary, and how a kernel sees a row of logits.

The scan leaves two numbers a tile: its maximum and its sum of exponentials. Every later pass reads only the tiles whose
maximum says that they matter. The width depends on the vocabulary alone, so a row's result never depends on its batch.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .rules import LARGEST, rank_bits, rank_key

# Ids that one program of the scan reads, and the most tiles a row may have.
SLICE = 4096
MOST_TILES = 2048
# The key of -inf: no token from here on is ever kept.
END = tl.constexpr(0x7F800000)


class Tiling(NamedTuple):
    """How a vocabulary is cut."""

    width: int  # ids of a tile, a power of two
    count: int  # T, tiles of a row
    padded: int  # the next power of two, at least 16
    slices: int  # programs of the scan for a row


def tiling(vocab_size: int) -> Tiling:
    """Narrow tiles re-read less, wide tiles have fewer records: 64 ids up to 2^16, 128 up to 2^18, then doubling."""
    width = 64 if vocab_size <= 2**16 else 128
    while -(-vocab_size // width) > MOST_TILES:
        width *= 2
    if width > SLICE:
        raise ValueError(f"logits may have at most {SLICE * MOST_TILES} ids, got {vocab_size}")
    count = -(-vocab_size // width)
    return Tiling(width, count, max(16, triton.next_power_of_2(count)), -(-count * width // SLICE))


@triton.jit
def key_of(x):
    """`rank_key` of float32 values: ascending keys are descending values."""
    return rank_key((x + 0.0).to(tl.int32, bitcast=True))


@triton.jit
def value_of(key):
    """The float32 behind a `rank_key`."""
    return rank_bits(key).to(tl.float32, bitcast=True)


@triton.jit
def load_raw(logits_ptr, mask_ptr, ids, inside, HAS_MASK: tl.constexpr):
    """float32 logits of a row at `ids`; -inf where not `inside` or not allowed."""
    x = tl.load(logits_ptr + ids, mask=inside, other=float("-inf")).to(tl.float32)
    if HAS_MASK:
        words = tl.load(mask_ptr + (ids >> 5), mask=inside, other=0)
        x = tl.where(((words >> (ids & 31)) & 1) == 1, x, float("-inf"))
    return x


@triton.jit
def finite(x):
    """NaN counts as -inf, +inf as the largest finite value, -0.0 as 0.0."""
    return tl.minimum(tl.where(x == x, x + 0.0, float("-inf")), LARGEST)


@triton.jit
def load_tiles(
    logits_ptr,
    mask_ptr,
    list_ptr,
    start,
    count,
    vocab_size,
    HAS_MASK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """ROWS tiles out of a row's list, from `start` on: values and ids, flat [ROWS * WIDTH], ids ascending."""
    slot = start + tl.arange(0, ROWS)
    tile = tl.load(list_ptr + slot, mask=slot < count, other=0)
    ids = tile[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = (slot < count)[:, None] & (ids < vocab_size)
    x = finite(load_raw(logits_ptr, mask_ptr, ids, inside, HAS_MASK))
    return tl.reshape(x, [ROWS * WIDTH]), tl.reshape(ids, [ROWS * WIDTH])


@triton.jit
def list_tiles(list_ptr, tile_keys, last_key, PADDED: tl.constexpr):
    """Writes the tiles whose maximum has a key <= `last_key`, ascending; returns how many."""
    chosen = (tile_keys <= last_key).to(tl.int32)
    place = tl.cumsum(chosen, 0) - 1
    tl.debug_barrier()
    tl.store(list_ptr + place, tl.arange(0, PADDED), mask=chosen == 1)
    tl.debug_barrier()
    return tl.sum(chosen, 0)
