"""Logits -> support on the device, in two launches and little more than one read of the logits.

scan, grid (rows, slices of the vocabulary): each tile's maximum and sum of exp((x - maximum) / T), one read.
resolve, grid (rows): the descriptor of each row out of its tiles, reading again only those that hold its support; and
one token a row, where one is wanted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..filter import FilteredLogits
from ..params import RowParams
from ..sample import Drawing
from .cut import CANDIDATES, FAR, Filters, find_cut
from .rules import (
    FLATTEST,
    NO_CUT_ID,
    STATUS_EMPTY,
    STATUS_INF,
    STATUS_NAN,
    STATUS_PARAMETER,
    STEEPEST,
    is_greedy,
    is_min_p_on,
    is_top_k_on,
    is_top_p_on,
    scaled,
)
from .sample import Noise, Support, draw
from .tiles import (
    CHUNK,
    SLICE,
    Records,
    Row,
    aligned_rows,
    finite,
    flat_mask,
    is_aligned,
    load_ids,
    load_masses,
    load_maxima,
    load_raw,
    rate,
    row_start,
    row_strides,
    tiling,
    value_of,
)


@triton.jit
def inverse_of(temperature):
    """1 / T, clamped so that 0 times it is 0 for the smallest T, and that it is not 0 for the largest."""
    usable = temperature > 0
    return tl.minimum(tl.maximum(1.0 / tl.where(usable, temperature, 1.0), FLATTEST), STEEPEST)


@triton.jit
def tile_records(x, per):
    """Maximum and sum of exponentials of each row of [tiles, width]; a NaN sum where there is a NaN or +inf."""
    top = tl.max(x, 1)
    base = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.sum(tl.exp2(scaled(x, base[:, None], per)), 1)


@triton.jit(do_not_specialize=["tiles", "inner", "stride_outer", "stride_inner", "words", "zero"])
def _scan_kernel(
    logits_ptr,  # [rows, V]
    mask_ptr,  # [rows, words]
    temperature_ptr,  # [rows]
    tile_max_ptr,  # [rows, T]
    tile_sum_ptr,  # [rows, T]
    finite_ptr,  # [rows, slices]
    vocab_size,
    tiles,
    inner,
    stride_outer,
    stride_inner,
    words,
    zero,
    ALIGNED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    tile = part * ROWS + tl.arange(0, ROWS)
    ids = tile[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    start = row_start(logits_ptr, row, inner, stride_outer, stride_inner, zero, ALIGNED)
    x = load_raw(start, mask_ptr + row * words + zero, ids, ids < vocab_size, HAS_MASK)
    top, total = tile_records(x, rate(inverse_of(tl.load(temperature_ptr + row))))
    tl.store(tile_max_ptr + row * tiles + tile, top, mask=tile < tiles)
    tl.store(tile_sum_ptr + row * tiles + tile, total, mask=tile < tiles)
    # Most slices hold no -inf, and one comparison says so.
    number = ROWS * WIDTH
    if tl.min(x, axis=None) == float("-inf"):
        number = tl.sum(tl.where(x > float("-inf"), 1, 0), axis=None)
    tl.store(finite_ptr + row * tl.num_programs(1) + part, number)


@triton.jit
def repair(row, HAS_MASK: tl.constexpr, WIDTH: tl.constexpr):
    """Writes the records of a row with NaN or +inf anew; returns its status and its number of finite logits."""
    ROWS: tl.constexpr = CHUNK // WIDTH if CHUNK > WIDTH else 1
    status = tl.full([], 0, tl.int32)
    number = tl.full([], 0, tl.int32)
    tl.debug_barrier()
    for first in range(0, row.num_tiles, ROWS):
        tile = first + tl.arange(0, ROWS)
        ids = tile[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        raw = load_raw(row.logits, row.mask, ids, ids < row.vocab_size, HAS_MASK)
        x = finite(raw)
        nan = tl.max((raw != raw).to(tl.int32), axis=None)
        inf = tl.max((raw == float("inf")).to(tl.int32), axis=None)
        status = status | nan * STATUS_NAN | inf * STATUS_INF
        number += tl.sum((x > float("-inf")).to(tl.int32), axis=None)
        top, total = tile_records(x, rate(row.inverse))
        tl.store(row.tile_max + tile, top, mask=tile < row.num_tiles)
        tl.store(row.tile_sum + tile, total, mask=tile < row.num_tiles)
    tl.debug_barrier()
    return status, number


@triton.jit
def first_top(row, tile_max, HAS_MASK: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """The first id of the row's maximum; 0 in a row without a finite logit."""
    tile = tl.arange(0, PADDED)
    top = tl.max(tile_max, 0)
    ids = tl.min(tl.where(tile_max == top, tile, PADDED), 0) * WIDTH + tl.arange(0, WIDTH)
    first = tl.min(tl.where(load_ids(row, ids, HAS_MASK) == top, ids, 2147483647), 0)
    return tl.where(top == float("-inf"), 0, first)


@triton.jit(
    do_not_specialize=["full_vocab_size", "tiles", "slices", "inner", "stride_outer", "stride_inner", "words", "zero"]
)
def _resolve_kernel(
    logits_ptr,  # [rows, V]
    mask_ptr,  # [rows, words]
    tile_max_ptr,  # [rows, T]
    tile_sum_ptr,  # [rows, T]
    finite_ptr,  # [rows, slices]
    row_params,  # RowParams, [rows] each
    out,  # Fields, [rows] each
    noise,  # Noise
    token_ptr,  # [rows]
    list_ptr,  # [rows, T] scratch
    candidate_ptr,  # [rows, CANDIDATES] scratch
    full_vocab_size,
    vocab_size,
    tiles,
    slices,
    inner,
    stride_outer,
    stride_inner,
    words,
    zero,
    TOP_K_FIRST: tl.constexpr,
    METHOD: tl.constexpr,
    ALIGNED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    SLICES: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    temperature = tl.load(row_params.temperature + at)
    top_p = tl.load(row_params.top_p + at)
    min_p = tl.load(row_params.min_p + at)
    least = tl.load(row_params.min_tokens_to_keep + at)
    in_range = (temperature >= 0) & (top_p == top_p) & (min_p >= 0) & (min_p <= 1) & (least >= 1)
    bad = in_range == 0

    tile = tl.arange(0, PADDED)
    part = tl.arange(0, SLICES)
    number = tl.sum(tl.load(finite_ptr + at * slices + part, mask=part < slices, other=0), 0)
    row = Row(
        row_start(logits_ptr, at, inner, stride_outer, stride_inner, zero, ALIGNED),
        mask_ptr + at * words + zero,
        list_ptr + at * tiles,
        candidate_ptr + at * CANDIDATES,
        tile_max_ptr + at * tiles,
        tile_sum_ptr + at * tiles,
        tl.full([], 0.0, tl.float32),
        inverse_of(temperature),
        tiles,
        vocab_size,
    )
    status = tl.full([], 0, tl.int32)
    sums = tl.load(row.tile_sum + tile, mask=tile < tiles, other=0.0)
    if tl.max((sums != sums).to(tl.int32), 0) == 1:
        status, number = repair(row, HAS_MASK, WIDTH)

    tile_max = load_maxima(row, PADDED)
    top = tl.max(tile_max, 0)
    empty = top == float("-inf")
    argmax = first_top(row, tile_max, HAS_MASK, WIDTH, PADDED)
    status = status | tl.where(empty, STATUS_EMPTY, 0) | tl.where(bad, STATUS_PARAMETER, 0)
    one_hot = is_greedy(temperature) | empty | bad
    row = Row(
        row.logits,
        row.mask,
        row.tiles,
        row.candidates,
        row.tile_max,
        row.tile_sum,
        tl.where(empty, 0.0, top),
        tl.where(one_hot, 0.0, row.inverse),
        tiles,
        vocab_size,
    )
    k = tl.load(row_params.top_k + at)
    filters = Filters(
        tl.where(is_top_k_on(k, full_vocab_size), k, FAR),
        tl.where(is_top_p_on(top_p), top_p, 2.0 * FAR),
        tl.where(is_min_p_on(min_p), min_p, 0.0),
        least,
    )
    cut_value = tl.where(one_hot, top, float("-inf"))
    cut_id = tl.where(one_hot, argmax, NO_CUT_ID)
    size = tl.where(one_hot, 1, number)
    mass = tl.where(one_hot, 1.0, tl.sum(load_masses(row, PADDED), 0))
    if (one_hot == 0) & ((filters.k < FAR) | (filters.p < 1) | (filters.min_p > 0)):
        cut, size, mass = find_cut(row, filters, mass, number, TOP_K_FIRST, HAS_MASK, WIDTH, PADDED)
        cut_value = value_of((cut >> 32).to(tl.int32))
        cut_id = (cut & 0xFFFFFFFF).to(tl.int32)
    tl.store(out.maximum + at, row.maximum)
    tl.store(out.inverse_temperature + at, row.inverse)
    tl.store(out.cut_value + at, cut_value)
    tl.store(out.cut_id + at, cut_id)
    tl.store(out.log_normalizer + at, tl.log(mass))
    tl.store(out.support_size + at, size)
    tl.store(out.argmax + at, argmax.to(tl.int64))
    tl.store(out.status + at, status)
    if METHOD != "none":
        support = Support(cut_value, cut_id, mass)
        token = draw(row, at, support, noise, METHOD, HAS_MASK, WIDTH, PADDED)
        tl.store(token_ptr + at, token)


class Fields(NamedTuple):
    """The descriptor of rows: `triton_specdec.FilteredLogits` has their meaning."""

    maximum: torch.Tensor
    inverse_temperature: torch.Tensor
    cut_value: torch.Tensor
    cut_id: torch.Tensor
    log_normalizer: torch.Tensor
    support_size: torch.Tensor
    argmax: torch.Tensor
    status: torch.Tensor

    @classmethod
    def empty(cls, shape: torch.Size, device: torch.device) -> Fields:
        """Unwritten fields for rows of a shape."""
        f32, f64, i32, i64 = torch.float32, torch.float64, torch.int32, torch.int64
        dtypes = (f32, f64, f32, i32, f64, i32, i64, i32)
        return cls(*(torch.empty(shape, dtype=dtype, device=device) for dtype in dtypes))


def scan(
    logits: torch.Tensor, temperature: torch.Tensor, token_mask: torch.Tensor | None, vocab_size: int | None
) -> tuple[Records, torch.Tensor]:
    """The tile records of rows, and the number of finite logits of each slice int32 [rows, slices]."""
    rows, full = logits.shape[:-1].numel(), logits.shape[-1]
    cut = tiling(full)
    tile_max = torch.empty(rows, cut.tiles, dtype=torch.float32, device=logits.device)
    tile_sum = torch.empty_like(tile_max)
    number = torch.empty(rows, cut.slices, dtype=torch.int32, device=logits.device)
    if rows:
        _scan_kernel[(rows, cut.slices)](
            logits,
            number if token_mask is None else token_mask,
            temperature,
            tile_max,
            tile_sum,
            number,
            full if vocab_size is None else vocab_size,
            cut.tiles,
            *row_strides(logits),
            0 if token_mask is None else token_mask.shape[-1],
            0,
            ALIGNED=is_aligned(full),
            HAS_MASK=token_mask is not None,
            ROWS=SLICE // cut.width,
            WIDTH=cut.width,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return Records(tile_max, tile_sum), number


def resolve(
    logits: torch.Tensor,
    params: RowParams,
    order: str,
    token_mask: torch.Tensor | None,
    vocab_size: int | None,
    drawing: Drawing | None = None,
) -> tuple[FilteredLogits, torch.Tensor]:
    """Scan and resolve: the descriptors of rows, and one token int64 of each where a drawing is wanted."""
    logits = aligned_rows(logits)
    shape, full, device = logits.shape[:-1], logits.shape[-1], logits.device
    rows, cut = shape.numel(), tiling(full)
    mask = flat_mask(token_mask, rows)
    fields = Fields.empty(shape, device)
    tokens = fields.argmax if drawing is None else torch.empty(shape, dtype=torch.int64, device=device)
    method, noise = Noise.of(drawing, fields.argmax, fields.log_normalizer)
    records, number = scan(logits, params.temperature, mask, vocab_size)
    if rows:
        _resolve_kernel[(rows,)](
            logits,
            number if mask is None else mask,
            *records,
            number,
            params,
            fields,
            noise,
            tokens,
            torch.empty(rows, cut.tiles, dtype=torch.int32, device=device),
            torch.empty(rows, CANDIDATES.value, dtype=torch.int64, device=device),
            full,
            full if vocab_size is None else vocab_size,
            cut.tiles,
            cut.slices,
            *row_strides(logits),
            0 if mask is None else mask.shape[-1],
            0,
            TOP_K_FIRST=order == "top_k_first",
            METHOD=method,
            ALIGNED=is_aligned(full),
            HAS_MASK=mask is not None,
            WIDTH=cut.width,
            PADDED=cut.padded,
            SLICES=triton.next_power_of_2(cut.slices),
            num_warps=8,
            enable_fp_fusion=False,
        )
    out = FilteredLogits(
        logits, **fields._asdict(), token_mask=token_mask, vocab_size=vocab_size, backend="triton", source=records
    )
    return out, tokens


def filter_logits(
    logits: torch.Tensor, params: RowParams, order: str, token_mask: torch.Tensor | None, vocab_size: int | None
) -> FilteredLogits:
    """See `triton_specdec.filter_logits`."""
    return resolve(logits, params, order, token_mask, vocab_size)[0]


def filter_sample(
    logits: torch.Tensor,
    params: RowParams,
    order: str,
    token_mask: torch.Tensor | None,
    vocab_size: int | None,
    drawing: Drawing,
) -> tuple[FilteredLogits, torch.Tensor]:
    """See `triton_specdec.sample_logits`."""
    return resolve(logits, params, order, token_mask, vocab_size, drawing)


def stack_source(parts: list[FilteredLogits]) -> Records:
    """The records of rows [B, K] out of those of K times rows [B]."""
    records = [part.source for part in parts if isinstance(part.source, Records)]
    if len(records) < len(parts):
        raise ValueError("a part has lost its tile records: pass what filter_logits returned")
    return Records(*(torch.stack(each, 1).flatten(0, 1) for each in zip(*records, strict=True)))
