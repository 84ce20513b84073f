"""Truncate the KV cache to the accepted prefix: a length, a block table, or a compaction of slots."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import rules


def truncate_lengths_(lengths: NDArray[np.int32], keep: NDArray[np.int32]) -> None:
    """lengths = min(lengths, keep), at least 0; both [B]."""
    np.minimum(lengths, np.maximum(keep, 0), out=lengths)


def scrub_(cache: NDArray, first: NDArray, last: NDArray) -> None:
    """Zero the slots first[b] .. last[b] - 1 of a cache [..., B, H, S, D]."""
    slot = np.arange(cache.shape[-2])
    dropped = (slot >= first[:, None]) & (slot < last[:, None])
    cache *= ~dropped[:, None, :, None]


def truncate_pages_(
    lengths: NDArray[np.int32],
    keep: NDArray[np.int32],
    block_table: NDArray[np.int32],
    page_size: int,
    free_pages: NDArray[np.int32],
    num_free: NDArray[np.int32],
) -> None:
    """Truncate, and give pages past the kept ones back: -1 in the table, appended to the free list in row order."""
    kept = rules.kept_pages(np.maximum(keep, 0), page_size)
    freed = (np.arange(block_table.shape[-1]) >= kept[:, None]) & (block_table >= 0)
    pages = block_table[freed]
    first = int(num_free[0])
    free_pages[first : first + len(pages)] = pages
    num_free[0] = first + len(pages)
    block_table[freed] = -1
    truncate_lengths_(lengths, keep)


def compact_(cache: NDArray, source: NDArray, start: NDArray, count: NDArray) -> None:
    """Move slots source[b, :count[b]] to start[b] .. start[b] + count[b] - 1 of a cache [..., B, H, S, D].

    All loads come before all stores, so the two ranges may overlap.
    """
    row, column = np.nonzero(np.arange(source.shape[-1]) < count[:, None])
    # Adjacent advanced indices would keep their place; with the head between them they move to the front.
    moved = cache[..., row, :, source[row, column], :].copy()
    cache[..., row, :, start[row] + column, :] = moved
