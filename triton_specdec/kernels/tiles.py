"""Tiles of the vocabulary, and how a kernel sees a row of logits.

The scan leaves two numbers a tile: its maximum and its sum of exponentials. Every later pass reads only the tiles whose
maximum says that they matter. The width depends on the vocabulary alone, so a row's result never depends on its batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .rules import LARGEST, rank_bits, rank_key, scaled

# Ids that one program of the scan reads, ids that a later pass reads at a time, and the most tiles a row may have.
SLICE = 8192
CHUNK = tl.constexpr(1024)
MOST_TILES = 2048
# The key of -inf: no token from here on is ever kept.
END = tl.constexpr(0x7F800000)
LOG2_E = tl.constexpr(1.4426950408889634)


class Tiling(NamedTuple):
    """How a vocabulary is cut."""

    width: int  # ids of a tile, a power of two
    tiles: int  # T, tiles of a row
    padded: int  # the next power of two, at least 16
    slices: int  # programs of the scan for a row


class Row(NamedTuple):
    """One row as the kernels hand it on; pointers stand at its start."""

    logits: tl.tensor  # [V]
    mask: tl.tensor  # [words], not looked at without HAS_MASK
    tiles: tl.tensor  # int32 [T], scratch: the tiles that a pass reads
    candidates: tl.tensor  # int64 [CANDIDATES], scratch
    tile_max: tl.tensor  # float32 [T]
    tile_sum: tl.tensor  # float32 [T], relative to the tile's maximum
    maximum: tl.tensor  # float32
    inverse: tl.tensor  # float64, 1 / T
    num_tiles: tl.tensor
    vocab_size: tl.tensor


class Records(NamedTuple):
    """What the scan left of each row, for the draws that come later."""

    tile_max: torch.Tensor  # float32 [rows, T]
    tile_sum: torch.Tensor  # float32 [rows, T], relative to the tile's maximum


def tiling(vocab_size: int) -> Tiling:
    """Narrow tiles re-read less, wide tiles have fewer records: 64 ids up to 2^16, 128 up to 2^18, then doubling."""
    width = 64 if vocab_size <= 2**16 else 128
    while -(-vocab_size // width) > MOST_TILES:
        width *= 2
    if width > SLICE:
        raise ValueError(f"logits may have at most {SLICE * MOST_TILES} ids, got {vocab_size}")
    count = -(-vocab_size // width)
    return Tiling(width, count, max(16, triton.next_power_of_2(count)), -(-count * width // SLICE))


def row_strides(logits: torch.Tensor) -> tuple[int, int, int]:
    """Inner size, outer and inner stride of rows [N] or [B, K + 1]: in elements, or in 16 where rows are aligned."""
    unit = 16 if is_aligned(logits.shape[-1]) else 1
    if logits.dim() == 2:
        return 1, logits.stride(0) // unit, 0
    return logits.shape[1], logits.stride(0) // unit, logits.stride(1) // unit


def aligned_rows(logits: torch.Tensor) -> torch.Tensor:
    """Logits whose rows a kernel can read.

    A copy where the last stride is not 1, or where a vocabulary of a multiple of 16 ids does not lie at multiples of
    16 ids and bytes (see `row_start`).
    """
    if logits.shape[-1] > 1 and logits.stride(-1) != 1:
        return logits.contiguous()
    if is_aligned(logits.shape[-1]) and (logits.data_ptr() % 16 or any(s % 16 for s in logits.stride()[:-1])):
        return logits.clone(memory_format=torch.contiguous_format)
    return logits


def flat_mask(token_mask: torch.Tensor | None, rows: int) -> torch.Tensor | None:
    """A token mask as [rows, words] without gaps."""
    return None if token_mask is None else token_mask.reshape(rows, -1).contiguous()


def is_aligned(vocab_size: int) -> bool:
    """Whether the rows of a vocabulary are read 16 bytes at a time."""
    return vocab_size % 16 == 0


@triton.jit
def row_start(logits_ptr, row, inner, stride_outer, stride_inner, zero, ALIGNED: tl.constexpr):
    """Where a row of [outer, inner, V] starts; `row` is int64.

    Vector loads change which thread holds which id, and with it the order of a sum. A row's bits must not depend on
    where it lies, so the vocabulary alone decides: without ALIGNED, the compiler may not see that an address is.
    """
    start = (row // inner) * stride_outer + (row % inner) * stride_inner
    return logits_ptr + start * 16 if ALIGNED else logits_ptr + zero + start


@triton.jit
def key_of(x):
    """`rank_key` of float32 values: ascending keys are descending values."""
    return rank_key((x + 0.0).to(tl.int32, bitcast=True))


@triton.jit
def value_of(key):
    """The float32 behind a `rank_key`."""
    return rank_bits(key).to(tl.float32, bitcast=True)


@triton.jit
def rate(inverse):
    """1 / T in float32 and for base 2, so that exp2(scaled(x, maximum, rate)) is a weight."""
    return (inverse * LOG2_E).to(tl.float32)


@triton.jit
def fast_weights(x, row):
    """exp((x - maximum) / T) in float32, for the mass of many tokens."""
    return tl.exp2(scaled(x, row.maximum, rate(row.inverse)))


@triton.jit
def exact_weights(x, row):
    """exp((x - maximum) / T) in float64, for the few tokens that decide where a support ends."""
    return tl.exp(scaled(x.to(tl.float64), row.maximum.to(tl.float64), row.inverse))


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
def load_ids(row, ids, HAS_MASK: tl.constexpr):
    """Logits of a row as the filters see them; -inf for ids behind the vocabulary."""
    return finite(load_raw(row.logits, row.mask, ids, ids < row.vocab_size, HAS_MASK))


@triton.jit
def load_listed(row, start, count, HAS_MASK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """ROWS of a row's `count` listed tiles, from `start` on: values and ids, flat [ROWS * WIDTH], ids ascending.

    Ids past the list are those of its padding: their values are -inf.
    """
    slot = start + tl.arange(0, ROWS)
    tile = tl.load(row.tiles + slot, mask=slot < count, other=0)
    ids = tile[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = (slot < count)[:, None] & (ids < row.vocab_size)
    x = finite(load_raw(row.logits, row.mask, ids, inside, HAS_MASK))
    return tl.reshape(x, [ROWS * WIDTH]), tl.reshape(ids, [ROWS * WIDTH])


@triton.jit
def load_maxima(row, PADDED: tl.constexpr):
    """The tiles' maxima [PADDED], -inf behind them."""
    tile = tl.arange(0, PADDED)
    return tl.load(row.tile_max + tile, mask=tile < row.num_tiles, other=float("-inf")) + 0.0


@triton.jit
def load_masses(row, PADDED: tl.constexpr):
    """Mass of each tile relative to the row's maximum, float64 [PADDED]; 0 for tiles without a finite logit."""
    tile = tl.arange(0, PADDED)
    total = tl.load(row.tile_sum + tile, mask=tile < row.num_tiles, other=0.0)
    top = load_maxima(row, PADDED)
    some = top > float("-inf")
    return tl.where(some, total.to(tl.float64) * exact_weights(tl.where(some, top, row.maximum), row), 0.0)


@triton.jit
def list_tiles(row, last_key, PADDED: tl.constexpr):
    """Lists the tiles whose maximum has a key <= `last_key` < END, ascending; returns how many."""
    chosen = (key_of(load_maxima(row, PADDED)) <= last_key).to(tl.int32)
    place = tl.cumsum(chosen, 0) - 1
    # Scratch is written by all threads and read by others: a barrier on both sides.
    tl.debug_barrier()
    tl.store(row.tiles + place, tl.arange(0, PADDED), mask=chosen == 1)
    tl.debug_barrier()
    return tl.sum(chosen, 0)
