"""Truncate paged KV caches on the device: one program reads the block table row by row and gives pages back in order.

A page's place in the free list is the number of pages freed before it, a prefix sum over the table, so the list never
depends on timing. Only the blocks past the kept pages are read, twice: to count them, and to move them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .rules import is_freed, kept_pages, truncated_length

# Entries of the table that are looked at together, and how many of them lie in one row.
TILE = 4096
MOST_BLOCKS = 1024


@triton.jit
def load_freed(row_ptr, first, block, blocks, kept, inside, stride_block):
    """Entries of a tile's rows from block `first` on, whether each is freed, and where they lie; rows [ROWS, 1]."""
    at = (first + block)[None, :]
    entry_ptr = row_ptr + at.to(tl.int64) * stride_block
    page = tl.load(entry_ptr, mask=inside & (at < blocks), other=-1)
    return page, is_freed(at, page, kept), entry_ptr


@triton.jit(do_not_specialize=["batch", "blocks", "page_size", "size"])
def _pages_kernel(
    length_ptr,  # [B]
    keep_ptr,  # [B]
    table_ptr,  # [B, P]
    free_ptr,  # [F]
    number_ptr,  # [1]
    batch,
    blocks,
    page_size,
    size,
    stride_length,
    stride_row,
    stride_block,
    stride_free,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    block = tl.arange(0, BLOCKS)
    taken = tl.load(number_ptr).to(tl.int64)
    room = tl.where((taken >= 0) & (taken <= size), size - taken, 0)
    before = tl.full([], 0, tl.int32)
    for start in range(0, batch, ROWS):
        row = tl.arange(0, ROWS).to(tl.int64) + start
        here = row < batch
        length = tl.load(length_ptr + row * stride_length, mask=here, other=0)
        keep = tl.load(keep_ptr + row, mask=here, other=0).to(tl.int64)
        kept = tl.where(here, kept_pages(tl.maximum(keep, 0), page_size), blocks)
        row_ptr = (table_ptr + row * stride_row)[:, None]
        first = (tl.minimum(tl.min(kept, 0), blocks) // BLOCKS * BLOCKS).to(tl.int32)
        total = tl.zeros([ROWS], tl.int32)
        for at in range(first, blocks, BLOCKS):
            _, freed, _ = load_freed(row_ptr, at, block, blocks, kept[:, None], here[:, None], stride_block)
            total += tl.sum(freed.to(tl.int32), 1)
        place = before + tl.cumsum(total, 0) - total
        before += tl.sum(total, 0)
        # Threads of the second pass store what others have read in the first.
        tl.debug_barrier()
        for at in range(first, blocks, BLOCKS):
            page, freed, entry_ptr = load_freed(row_ptr, at, block, blocks, kept[:, None], here[:, None], stride_block)
            number = freed.to(tl.int32)
            to = place[:, None] + tl.cumsum(number, 1) - 1
            fits = freed & (to < room)
            tl.store(free_ptr + (taken + to) * stride_free, page, mask=fits)
            tl.store(entry_ptr, tl.full([ROWS, BLOCKS], -1, tl.int32), mask=fits)
            place += tl.sum(number, 1)
        tl.store(length_ptr + row * stride_length, truncated_length(length, keep).to(tl.int32), mask=here)
    tl.debug_barrier()
    tl.store(number_ptr, (taken + tl.minimum(before, room)).to(tl.int32))


def truncate_paged_kv_(
    lengths: torch.Tensor,
    keep: torch.Tensor,
    block_table: torch.Tensor,
    page_size: int,
    free_pages: torch.Tensor,
    num_free: torch.Tensor,
) -> None:
    """See `triton_specdec.truncate_paged_kv_`. One launch."""
    batch, blocks = block_table.shape
    if batch == 0:
        return
    width = min(MOST_BLOCKS, max(16, triton.next_power_of_2(blocks)))
    _pages_kernel[(1,)](
        lengths,
        keep.contiguous(),
        block_table,
        free_pages,
        num_free,
        batch,
        blocks,
        page_size,
        len(free_pages),
        lengths.stride(0),
        *block_table.stride(),
        free_pages.stride(0),
        ROWS=TILE // width,
        BLOCKS=width,
        num_warps=16,
    )
