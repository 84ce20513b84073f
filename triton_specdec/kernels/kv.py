"""Truncate and compact contiguous KV caches on the device, all layers in one launch.

truncate: lengths = min(lengths, max(keep, 0)); with caches, grid (rows, layers of all tensors) zeroes what was dropped.
compact, grid (rows, layers, columns): a program holds its columns of all moved slots in registers before it stores one,
and no other program touches them, so source and target may overlap.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .caches import launches, slot_words
from .rules import is_compaction, is_slot, truncated_length

BLOCK = 1024
# Words of one program, and the most slots that it can hold.
TILE = 2048
MOST_MOVES = 4096


@triton.jit(do_not_specialize=["batch"])
def _truncate_kernel(
    length_ptr,  # [B]
    keep_ptr,  # [B]
    batch,
    stride_length,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(length_ptr + b * stride_length, mask=b < batch, other=0)
    keep = tl.load(keep_ptr + b, mask=b < batch, other=0)
    after = truncated_length(length, keep).to(tl.int32)
    tl.store(length_ptr + b * stride_length, after, mask=b < batch)


@triton.jit
def _scrub_kernel(
    caches,  # [L, B, H, S, W] each
    before_ptr,  # [B]
    keep_ptr,  # [B]
    length_ptr,  # [B]
    placed,
    stride_length,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    item = tl.program_id(1)
    before = tl.load(before_ptr + b)
    after = truncated_length(before, tl.load(keep_ptr + b))
    if item == 0:
        tl.store(length_ptr + b * stride_length, after.to(tl.int32))
    first = tl.maximum(after, 0).to(tl.int32)
    last = tl.minimum(before, placed.slots)
    lane = tl.arange(0, ROWS)
    nothing = tl.zeros([ROWS, COLUMNS], caches[0].dtype.element_ty)
    for start in range(0, placed.heads * WIDTH, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        words = slot_words(caches, placed, b, item, column, WIDTH, UNIT)
        for at in range(first, last, ROWS):
            slot = at + lane
            inside = (slot < last)[:, None] & (column < placed.heads * WIDTH)[None, :]
            where = slot.to(tl.int64) * placed.slot * UNIT
            tl.store(words[None, :] + where[:, None], nothing, mask=inside)


def truncate_kv_(lengths: torch.Tensor, keep: torch.Tensor, caches: list[torch.Tensor]) -> None:
    """See `triton_specdec.truncate_kv_`; caches, where there are any, are scrubbed.

    One launch, and one more for each further kind of cache. Programs that scrub read the old lengths from a copy (4
    bytes a row, on the device): nothing orders them behind the one that writes the new length.
    """
    batch, keep = len(lengths), keep.contiguous()
    if batch == 0:
        return
    parts = list(launches(caches))
    if not parts:
        _truncate_kernel[(triton.cdiv(batch, BLOCK),)](lengths, keep, batch, lengths.stride(0), BLOCK=BLOCK)
        return
    before = lengths.clone(memory_format=torch.contiguous_format)
    for form, placed, tensors in parts:
        columns = min(BLOCK, triton.next_power_of_2(form.columns))
        _scrub_kernel[(batch, len(tensors) * form.layers)](
            tensors,
            before,
            keep,
            lengths,
            placed,
            lengths.stride(0),
            WIDTH=form.width,
            UNIT=form.unit,
            ROWS=min(8, TILE // columns),
            COLUMNS=columns,
        )


@triton.jit(do_not_specialize=["columns"])
def _compact_kernel(
    caches,  # [L, B, H, S, W] each
    source_ptr,  # [B, M]
    start_ptr,  # [B]
    count_ptr,  # [B]
    placed,
    columns,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    MOVES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    start = tl.load(start_ptr + b).to(tl.int64)
    count = tl.load(count_ptr + b).to(tl.int64)
    lane = tl.arange(0, MOVES)
    slot = tl.load(source_ptr + b * columns + lane, mask=(lane < columns) & (lane < count), other=0).to(tl.int64)
    inside = tl.min(is_slot(slot, placed.slots).to(tl.int32), 0) == 1
    count = tl.where(is_compaction(start, count, columns, placed.slots) & inside, count, 0)
    target = start + lane
    moves = (lane < count) & (slot != target)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    words = slot_words(caches, placed, b, tl.program_id(1), column, WIDTH, UNIT)
    mask = moves[:, None] & (column < placed.heads * WIDTH)[None, :]
    held = tl.load(words[None, :] + (slot * placed.slot * UNIT)[:, None], mask=mask, other=0)
    # One thread's target is another's source.
    tl.debug_barrier()
    tl.store(words[None, :] + (target * placed.slot * UNIT)[:, None], held, mask=mask)


def compact_kv_(caches: list[torch.Tensor], source: torch.Tensor, start: torch.Tensor, count: torch.Tensor) -> None:
    """See `triton_specdec.compact_kv_`. One launch, and one more for each further kind of cache.

    Raises
    ------
    ValueError
        More columns of `source` than a program can hold slots, or a cache whose last stride is not 1.
    """
    batch, columns = source.shape
    if columns > MOST_MOVES:
        raise ValueError(f"source may have at most {MOST_MOVES} columns for backend='triton', got {columns}")
    if batch == 0 or columns == 0:
        return
    source, start, count = source.contiguous(), start.contiguous(), count.contiguous()
    moves = triton.next_power_of_2(columns)
    for form, placed, tensors in launches(caches):
        each = min(max(TILE // moves, 2), triton.next_power_of_2(form.columns))
        _compact_kernel[(batch, len(tensors) * form.layers, triton.cdiv(form.columns, each))](
            tensors,
            source,
            start,
            count,
            placed,
            columns,
            WIDTH=form.width,
            UNIT=form.unit,
            MOVES=moves,
            COLUMNS=each,
            num_warps=min(max(moves * each // 512, 1), 16),
        )
