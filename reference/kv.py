"""Truncate the KV cache to the accepted prefix: a length, a block table, or a compaction of slots."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import rules


def truncate_lengths_(lengths: NDArray[np.int32], keep: NDArray[np.int32]) -> None:
    """lengths = min(lengths, keep), at least 0; both [B]."""
    lengths[...] = rules.truncated_length(lengths, keep)


def scrub_(cache: NDArray, first: NDArray, last: NDArray) -> None:
    """Zero the slots first[b] .. last[b] - 1 of a cache [..., B, H, S, D]."""
    for row, (start, stop) in enumerate(zip(np.maximum(first, 0), np.maximum(last, 0), strict=True)):
        cache[..., row, :, start:stop, :] = 0


def truncate_pages_(
    lengths: NDArray[np.int32],
    keep: NDArray[np.int32],
    block_table: NDArray[np.int32],
    page_size: int,
    free_pages: NDArray[np.int32],
    num_free: NDArray[np.int32],
) -> None:
    """Truncate, and give pages past the kept ones back: -1 in the table, appended to the free list in row order.

    Pages that the free list has no room for stay in the table: none is lost. A count outside the list takes none.
    """
    kept = rules.kept_pages(np.maximum(keep, 0), page_size)
    freed = rules.is_freed(np.arange(block_table.shape[-1]), block_table, kept[:, None])
    first = int(num_free[0])
    room = len(free_pages) - first if 0 <= first <= len(free_pages) else 0
    freed &= freed.cumsum().reshape(freed.shape) <= room
    pages = block_table[freed]
    if len(pages):
        free_pages[first : first + len(pages)] = pages
        num_free[0] = first + len(pages)
        block_table[freed] = -1
    truncate_lengths_(lengths, keep)


def compact_(cache: NDArray, source: NDArray, start: NDArray, count: NDArray) -> None:
    """Move slots source[b, :count[b]] to start[b] .. start[b] + count[b] - 1 of a cache [..., B, H, S, D].

    All loads come before all stores, so the two ranges may overlap. A row that names a slot outside stays as it is.
    """
    columns, slots = source.shape[-1], cache.shape[-2]
    used = np.arange(columns) < count[:, None]
    moves = rules.is_compaction(start, count, columns, slots) & (rules.is_slot(source, slots) | ~used).all(-1)
    row, column = np.nonzero(used & moves[:, None])
    # Adjacent advanced indices would keep their place; with the head between them they move to the front.
    moved = cache[..., row, :, source[row, column], :].copy()
    cache[..., row, :, start[row] + column, :] = moved
