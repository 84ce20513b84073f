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
from .cut import CANDIDATES, FAR, find_cut
from .rules import (
    LARGEST,
    NO_CUT_ID,
    SMALLEST,
    STATUS_EMPTY,
    STATUS_INF,
    STATUS_NAN,
    STATUS_PARAMETER,
    is_greedy,
    is_min_p_on,
    is_top_k_on,
    is_top_p_on,
    scaled,
)
from .sample import draw, rate, tile_masses
from .tiles import END, SLICE, finite, key_of, load_raw, tiling, value_of


@triton.jit
def row_offset(row, inner, stride_outer, stride_inner):
    """Where a row of [outer, inner, V] starts, in elements; `row` is int64."""
    return (row // inner) * stride_outer + (row % inner) * stride_inner


@triton.jit
def inverse_of(temperature):
    """1 / T, clamped so that 0 times it is 0 for the smallest T, and that it is not 0 for the largest."""
    usable = temperature > 0
    return tl.minimum(tl.maximum(1.0 / tl.where(usable, temperature, 1.0), SMALLEST), LARGEST)


@triton.jit
def tile_records(x, per):
    """Maximum and sum of exponentials of each row of [tiles, width]; a NaN sum where there is a NaN or +inf."""
    top = tl.max(x, 1)
    base = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.sum(tl.exp2(scaled(x, base[:, None], per)), 1)


@triton.jit
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
    HAS_MASK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    tile = part * ROWS + tl.arange(0, ROWS)
    ids = tile[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    start = logits_ptr + row_offset(row, inner, stride_outer, stride_inner)
    x = load_raw(start, mask_ptr + row * words, ids, ids < vocab_size, HAS_MASK)
    top, total = tile_records(x, rate(inverse_of(tl.load(temperature_ptr + row))))
    tl.store(tile_max_ptr + row * tiles + tile, top, mask=tile < tiles)
    tl.store(tile_sum_ptr + row * tiles + tile, total, mask=tile < tiles)
    # Most slices hold no -inf, and one comparison says so.
    number = ROWS * WIDTH
    if tl.min(x, axis=None) == float("-inf"):
        number = tl.sum(tl.where(x > float("-inf"), 1, 0), axis=None)
    tl.store(finite_ptr + row * tl.num_programs(1) + part, number)


@triton.jit
def repair(
    logits_ptr,
    mask_ptr,
    tile_max_ptr,
    tile_sum_ptr,
    per,
    tiles,
    vocab_size,
    HAS_MASK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Writes the records of a row with NaN or +inf anew; returns its status and its number of finite logits."""
    status = tl.full([], 0, tl.int32)
    number = tl.full([], 0, tl.int32)
    tl.debug_barrier()
    for first in range(0, tiles, ROWS):
        tile = first + tl.arange(0, ROWS)
        ids = tile[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        raw = load_raw(logits_ptr, mask_ptr, ids, ids < vocab_size, HAS_MASK)
        x = finite(raw)
        bits = tl.where(raw == raw, tl.where(raw == float("inf"), STATUS_INF, 0), STATUS_NAN)
        status = status | tl.max(bits & STATUS_NAN, axis=None) | tl.max(bits & STATUS_INF, axis=None)
        number += tl.sum(tl.where(x > float("-inf"), 1, 0), axis=None)
        top, total = tile_records(x, per)
        tl.store(tile_max_ptr + tile, top, mask=tile < tiles)
        tl.store(tile_sum_ptr + tile, total, mask=tile < tiles)
    tl.debug_barrier()
    return status, number


@triton.jit
def _resolve_kernel(
    logits_ptr,  # [rows, V]
    mask_ptr,  # [rows, words]
    tile_max_ptr,  # [rows, T]
    tile_sum_ptr,  # [rows, T]
    finite_ptr,  # [rows, slices]
    temperature_ptr,  # [rows]
    top_k_ptr,  # [rows]
    top_p_ptr,  # [rows]
    min_p_ptr,  # [rows]
    least_ptr,  # [rows]
    list_ptr,  # [rows, T] scratch
    candidate_ptr,  # [rows, CANDIDATES] scratch
    maximum_ptr,  # [rows]
    inverse_ptr,  # [rows]
    cut_value_ptr,  # [rows]
    cut_id_ptr,  # [rows]
    log_normalizer_ptr,  # [rows]
    size_ptr,  # [rows]
    argmax_ptr,  # [rows]
    status_ptr,  # [rows]
    seed_ptr,  # [rows]
    position_ptr,  # [rows]
    step_ptr,  # [rows]
    uniform_ptr,  # [rows]
    token_ptr,  # [rows]
    stream,
    full_vocab_size,
    vocab_size,
    tiles,
    slices,
    inner,
    stride_outer,
    stride_inner,
    words,
    TOP_K_FIRST: tl.constexpr,
    METHOD: tl.constexpr,
    HAS_MASK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    SLICES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row_offset(row, inner, stride_outer, stride_inner)
    mask_ptr += row * words
    tile_max_ptr += row * tiles
    tile_sum_ptr += row * tiles
    list_ptr += row * tiles
    temperature = tl.load(temperature_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    bad = (temperature >= 0) == 0
    bad = bad | (top_p != top_p) | (min_p != min_p)
    inverse = inverse_of(temperature)

    tile = tl.arange(0, PADDED)
    part = tl.arange(0, SLICES)
    number = tl.sum(tl.load(finite_ptr + row * slices + part, mask=part < slices, other=0), 0)
    tile_sum = tl.load(tile_sum_ptr + tile, mask=tile < tiles, other=0.0)
    status = tl.full([], 0, tl.int32)
    if tl.max((tile_sum != tile_sum).to(tl.int32), 0) == 1:
        status, number = repair(
            logits_ptr,
            mask_ptr,
            tile_max_ptr,
            tile_sum_ptr,
            rate(inverse),
            tiles,
            vocab_size,
            HAS_MASK,
            ROWS,
            WIDTH,
        )
        tile_sum = tl.load(tile_sum_ptr + tile, mask=tile < tiles, other=0.0)
    tile_max = tl.load(tile_max_ptr + tile, mask=tile < tiles, other=float("-inf")) + 0.0

    top = tl.max(tile_max, 0)
    empty = top == float("-inf")
    tile_of_top = tl.min(tl.where(tile_max == top, tile, PADDED), 0)
    ids = tile_of_top * WIDTH + tl.arange(0, WIDTH)
    x = finite(load_raw(logits_ptr, mask_ptr, ids, ids < vocab_size, HAS_MASK))
    argmax = tl.where(empty, 0, tl.min(tl.where(x == top, ids, 2147483647), 0))
    status = status | tl.where(empty, STATUS_EMPTY, 0) | tl.where(bad, STATUS_PARAMETER, 0)
    maximum = tl.where(empty, 0.0, top)

    k = tl.load(top_k_ptr + row)
    k = tl.where(is_top_k_on(k, full_vocab_size), k, FAR)
    p = tl.where(is_top_p_on(top_p), top_p, 2.0 * FAR)
    min_p = tl.where(is_min_p_on(min_p), min_p, 0.0)
    least = tl.maximum(tl.load(least_ptr + row), 1)
    one_hot = is_greedy(temperature) | empty | bad
    cut_value = tl.where(one_hot, top, float("-inf"))
    cut_id = tl.where(one_hot, argmax, NO_CUT_ID)
    size = tl.where(one_hot, 1, number)
    mass_of_tiles = tile_masses(tile_max, tile_sum, maximum, inverse)
    mass = tl.where(one_hot, 1.0, tl.sum(mass_of_tiles, 0))
    if (one_hot == 0) & ((k < FAR) | (p < 1) | (min_p > 0)):
        cut, size, mass = find_cut(
            logits_ptr,
            mask_ptr,
            list_ptr,
            candidate_ptr + row * CANDIDATES,
            tl.where(tile_max > float("-inf"), key_of(tile_max), END),
            mass_of_tiles,
            maximum,
            inverse,
            mass,
            number,
            k,
            p,
            min_p,
            least,
            tiles,
            vocab_size,
            TOP_K_FIRST,
            HAS_MASK,
            WIDTH,
            PADDED,
        )
        cut_value = value_of((cut >> 32).to(tl.int32))
        cut_id = (cut & 0xFFFFFFFF).to(tl.int32)
    inverse = tl.where(one_hot, 0.0, inverse)
    log_normalizer = tl.log(mass)
    tl.store(maximum_ptr + row, maximum)
    tl.store(inverse_ptr + row, inverse)
    tl.store(cut_value_ptr + row, cut_value)
    tl.store(cut_id_ptr + row, cut_id)
    tl.store(log_normalizer_ptr + row, log_normalizer)
    tl.store(size_ptr + row, size)
    tl.store(argmax_ptr + row, argmax.to(tl.int64))
    tl.store(status_ptr + row, status)
    if METHOD != "none":
        token = draw(
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
            METHOD,
            HAS_MASK,
            ROWS,
            WIDTH,
            PADDED,
        )
        tl.store(token_ptr + row, token.to(tl.int64))


class Records(NamedTuple):
    """What the scan left of each row, for the draws that come later."""

    tile_max: torch.Tensor  # float32 [rows, T]
    tile_sum: torch.Tensor  # float32 [rows, T], relative to the tile's maximum


class Noise(NamedTuple):
    """What a draw takes its random numbers from."""

    method: str  # "uniforms", "seeds" or "gumbel"
    seeds: torch.Tensor | None = None  # int64 [rows]
    positions: torch.Tensor | None = None  # int64 [rows]
    steps: torch.Tensor | None = None  # int64 [rows]
    uniforms: torch.Tensor | None = None  # float64 [rows]
    stream: int = 0

    def pointers(self, unused: torch.Tensor) -> list[torch.Tensor]:
        """The four tensors, `unused` where a method does not look."""
        return [unused if t is None else t for t in (self.seeds, self.positions, self.steps, self.uniforms)]


def row_strides(logits: torch.Tensor) -> tuple[int, int, int]:
    """Inner size, outer and inner stride of rows [N] or [B, K + 1], in elements."""
    if logits.dim() == 2:
        return 1, logits.stride(0), 0
    return logits.shape[1], logits.stride(0), logits.stride(1)


def scan(
    logits: torch.Tensor, temperature: torch.Tensor, token_mask: torch.Tensor | None, vocab_size: int | None
) -> tuple[Records, torch.Tensor]:
    """The tile records of rows, and the number of finite logits of each slice int32 [rows, slices]."""
    rows, full = logits.shape[:-1].numel(), logits.shape[-1]
    cut = tiling(full)
    tile_max = torch.empty(rows, cut.count, dtype=torch.float32, device=logits.device)
    tile_sum = torch.empty_like(tile_max)
    number = torch.empty(rows, cut.slices, dtype=torch.int32, device=logits.device)
    _scan_kernel[(rows, cut.slices)](
        logits,
        number if token_mask is None else token_mask,
        temperature,
        tile_max,
        tile_sum,
        number,
        full if vocab_size is None else vocab_size,
        cut.count,
        *row_strides(logits),
        0 if token_mask is None else token_mask.shape[-1],
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
    noise: Noise | None = None,
) -> tuple[FilteredLogits, torch.Tensor | None]:
    """Scan and resolve: the descriptors of rows, and one token int64 of each where there is noise to draw it by."""
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:
        logits = logits.contiguous()
    shape, full, device = logits.shape[:-1], logits.shape[-1], logits.device
    rows, cut = shape.numel(), tiling(full)
    mask = None if token_mask is None else token_mask.reshape(rows, -1).contiguous()
    fields = {
        "maximum": torch.empty(shape, dtype=torch.float32, device=device),
        "inverse_temperature": torch.empty(shape, dtype=torch.float64, device=device),
        "cut_value": torch.empty(shape, dtype=torch.float32, device=device),
        "cut_id": torch.empty(shape, dtype=torch.int32, device=device),
        "log_normalizer": torch.empty(shape, dtype=torch.float64, device=device),
        "support_size": torch.empty(shape, dtype=torch.int32, device=device),
        "argmax": torch.empty(shape, dtype=torch.int64, device=device),
        "status": torch.empty(shape, dtype=torch.int32, device=device),
    }
    tokens = None if noise is None else torch.empty(shape, dtype=torch.int64, device=device)
    records = None
    if rows:
        records, number = scan(logits, params.temperature, mask, vocab_size)
        unused = fields["argmax"]
        drawn = Noise("none") if noise is None else noise
        _resolve_kernel[(rows,)](
            logits,
            number if mask is None else mask,
            *records,
            number,
            *params,
            torch.empty(rows, cut.count, dtype=torch.int32, device=device),
            torch.empty(rows, CANDIDATES.value, dtype=torch.int64, device=device),
            *fields.values(),
            *drawn.pointers(unused),
            unused if tokens is None else tokens,
            drawn.stream,
            full,
            full if vocab_size is None else vocab_size,
            cut.count,
            cut.slices,
            *row_strides(logits),
            0 if mask is None else mask.shape[-1],
            TOP_K_FIRST=order == "top_k_first",
            METHOD=drawn.method,
            HAS_MASK=mask is not None,
            ROWS=max(1, CANDIDATES.value // cut.width),
            WIDTH=cut.width,
            PADDED=cut.padded,
            SLICES=triton.next_power_of_2(cut.slices),
            num_warps=8,
            enable_fp_fusion=False,
        )
    out = FilteredLogits(
        logits, **fields, token_mask=token_mask, vocab_size=vocab_size, backend="triton", source=records
    )
    return out, tokens


def filter_logits(
    logits: torch.Tensor, params: RowParams, order: str, token_mask: torch.Tensor | None, vocab_size: int | None
) -> FilteredLogits:
    """See `triton_specdec.filter_logits`."""
    return resolve(logits, params, order, token_mask, vocab_size)[0]
