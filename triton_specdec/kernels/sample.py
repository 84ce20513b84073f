"""Support -> token on the device: one draw a row, by the inverse of the cumulative distribution or by Gumbel noise.

A filtered row reads the tiles whose maximum reaches its cut, in id order; a row that keeps everything draws its tile
from the tiles' masses and reads that one tile; a one-hot row reads nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..filter import FilteredLogits
from ..sample import Drawing
from . import rng
from .probs import described
from .rules import is_drawn, is_kept, scaled
from .tiles import (
    CHUNK,
    END,
    Records,
    Row,
    exact_weights,
    fast_weights,
    flat_mask,
    is_aligned,
    key_of,
    list_tiles,
    load_ids,
    load_listed,
    load_masses,
    row_start,
    row_strides,
    tiling,
)

NO_TOKEN = tl.constexpr(2**31 - 1)


class Support(NamedTuple):
    """Where a row's support ends, and its mass."""

    cut_value: tl.tensor  # float32
    cut_id: tl.tensor  # int32
    mass: tl.tensor  # float64


class Noise(NamedTuple):
    """What the draws of a launch take their random numbers from; a method looks at its own."""

    seeds: torch.Tensor | tl.tensor  # int64 [rows]
    positions: torch.Tensor | tl.tensor  # int64 [rows]
    steps: torch.Tensor | tl.tensor  # int64 [rows]
    uniforms: torch.Tensor | tl.tensor  # float64 [rows]
    stream: int | tl.tensor

    @classmethod
    def of(cls, drawing: Drawing | None, int64: torch.Tensor, float64: torch.Tensor) -> tuple[str, Noise]:
        """The method and the noise of a draw, with the given tensors where it does not look."""
        if drawing is None:
            return "none", cls(int64, int64, int64, float64, 0)
        if drawing.uniforms is not None:
            return "uniforms", cls(int64, int64, int64, drawing.uniforms.contiguous(), 0)
        assert drawing.seeds is not None
        assert drawing.positions is not None
        steps = torch.zeros_like(drawing.positions) if drawing.steps is None else drawing.steps
        method = "gumbel" if drawing.method == "gumbel" else "seeds"
        seeds, positions = drawing.seeds.contiguous(), drawing.positions.contiguous()
        return method, cls(seeds, positions, steps.contiguous(), float64, drawing.stream)


@triton.jit
def first_drawn(weight, ids, before, u, total):
    """The first id whose cumulative weight exceeds u * total, NO_TOKEN where none does.

    A parallel sum may rise a little at a weight of 0, which must not be drawn.
    """
    drawn = is_drawn(before + tl.cumsum(weight, 0), u, total) & (weight > 0)
    return tl.min(tl.where(drawn, ids, NO_TOKEN), 0)


@triton.jit
def last_moving(weight, ids, before):
    """The last id that moves the cumulative weight, 0 where none does: what is drawn where the sum stays below."""
    up_to = before + tl.cumsum(weight, 0)
    return tl.max(tl.where(up_to - weight < up_to, ids, 0), 0)


@triton.jit
def draw_filtered(row, support, u, listed, HAS_MASK: tl.constexpr, WIDTH: tl.constexpr):
    """Inverse CDF over the kept tokens of the listed tiles."""
    ROWS: tl.constexpr = CHUNK // WIDTH if CHUNK > WIDTH else 1
    before = tl.full([], 0.0, tl.float64)
    token = tl.full([], NO_TOKEN, tl.int32)
    last = tl.full([], 0, tl.int32)
    start = 0
    while (start < listed) & (token == NO_TOKEN):
        x, ids = load_listed(row, start, listed, HAS_MASK, ROWS, WIDTH)
        kept = is_kept(x, ids, support.cut_value, support.cut_id)
        weight = tl.where(kept, fast_weights(x, row), 0.0).to(tl.float64)
        token = first_drawn(weight, ids, before, u, support.mass)
        last = tl.maximum(last, last_moving(weight, ids, before))
        before += tl.sum(weight, 0)
        start += ROWS
    return tl.where(token == NO_TOKEN, last, token)


@triton.jit
def pick_tile(mass, u, PADDED: tl.constexpr):
    """The tile of a draw by the tiles' masses float64 [PADDED], and what is left of u inside it, in [0, 1)."""
    tiles = tl.arange(0, PADDED)
    total = tl.sum(mass, 0)
    tile = first_drawn(mass, tiles, tl.zeros_like(total), u, total)
    tile = tl.where(tile == NO_TOKEN, last_moving(mass, tiles, tl.zeros_like(total)), tile)
    before = tl.sum(tl.where(tiles < tile, mass, 0.0), 0)
    own = tl.sum(tl.where(tiles == tile, mass, 0.0), 0)
    return tile, tl.maximum((u * total - before) / tl.where(own > 0, own, 1.0), 0.0)


@triton.jit
def pick_in_tile(weight, ids, inside):
    """The id of a draw inside a tile, by the weights float64 of its ids."""
    own = tl.sum(weight, 0)
    token = first_drawn(weight, ids, tl.zeros_like(own), inside, own)
    return tl.where(token == NO_TOKEN, last_moving(weight, ids, tl.zeros_like(own)), token)


@triton.jit
def draw_whole(row, u, HAS_MASK: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Inverse CDF over a row that keeps everything: the tile by the tiles' masses, the token by that tile's weights."""
    tile, inside = pick_tile(load_masses(row, PADDED), u, PADDED)
    ids = tile * WIDTH + tl.arange(0, WIDTH)
    x = load_ids(row, ids, HAS_MASK)
    return pick_in_tile(tl.where(x > float("-inf"), exact_weights(x, row), 0.0), ids, inside)


@triton.jit
def draw_by_uniform(row, support, u, HAS_MASK: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Inverse CDF over a row, whatever its support; `row.inverse` is 0 where it is one-hot."""
    token = tl.maximum(support.cut_id, 0)
    if row.inverse > 0:
        if support.cut_value == float("-inf"):
            token = draw_whole(row, u, HAS_MASK, WIDTH, PADDED)
        else:
            listed = list_tiles(row, key_of(support.cut_value), PADDED)
            token = draw_filtered(row, support, u, listed, HAS_MASK, WIDTH)
    return token


@triton.jit
def draw_gumbel(row, support, seed, position, listed, HAS_MASK: tl.constexpr, WIDTH: tl.constexpr):
    """The first maximum of logit / T + Gumbel(seed, position, id) over the kept tokens of the listed tiles."""
    ROWS: tl.constexpr = CHUNK // WIDTH if CHUNK > WIDTH else 1
    best = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], NO_TOKEN, tl.int32)
    per = row.inverse.to(tl.float32)
    for start in range(0, listed, ROWS):
        x, ids = load_listed(row, start, listed, HAS_MASK, ROWS, WIDTH)
        kept = is_kept(x, ids, support.cut_value, support.cut_id) & (x > float("-inf"))
        score = scaled(x, row.maximum, per) + rng.gumbel(seed, position, ids.to(tl.int64))
        score = tl.where(kept, score, float("-inf"))
        top = tl.max(score, 0)
        first = tl.min(tl.where(kept & (score == top), ids, NO_TOKEN), 0)
        token = tl.where((top > best) | (token == NO_TOKEN), first, token)
        best = tl.maximum(best, top)
    return token


@triton.jit
def draw_by_gumbel(row, support, seed, position, HAS_MASK: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """The Gumbel draw of a row, whatever its support; `row.inverse` is 0 where it is one-hot."""
    token = tl.maximum(support.cut_id, 0)
    if row.inverse > 0:
        listed = list_tiles(row, tl.minimum(key_of(support.cut_value), END - 1), PADDED)
        token = draw_gumbel(row, support, seed, position, listed, HAS_MASK, WIDTH)
    return token


@triton.jit
def draw(
    row,
    at,
    support,
    noise,
    METHOD: tl.constexpr,
    HAS_MASK: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """One token of row number `at`, int64."""
    if METHOD == "gumbel":
        seed = tl.load(noise.seeds + at)
        position = tl.load(noise.positions + at)
        token = draw_by_gumbel(row, support, seed, position, HAS_MASK, WIDTH, PADDED)
    else:
        if METHOD == "uniforms":
            u = tl.load(noise.uniforms + at)
        else:
            step = tl.load(noise.steps + at)
            u = rng.uniforms(tl.load(noise.seeds + at), tl.load(noise.positions + at), noise.stream, step)
        token = draw_by_uniform(row, support, u, HAS_MASK, WIDTH, PADDED)
    return token.to(tl.int64)


@triton.jit(do_not_specialize=["tiles", "inner", "stride_outer", "stride_inner", "words", "zero"])
def _sample_kernel(
    logits_ptr,  # [rows, V]
    mask_ptr,  # [rows, words]
    records,  # Records, [rows, T] each
    described,  # maximum, inverse temperature, cut value, cut id, log normaliser; [rows] each
    noise,  # Noise, [rows] each
    token_ptr,  # [rows]
    list_ptr,  # [rows, T] scratch
    vocab_size,
    tiles,
    inner,
    stride_outer,
    stride_inner,
    words,
    zero,
    METHOD: tl.constexpr,
    ALIGNED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    row = Row(
        row_start(logits_ptr, at, inner, stride_outer, stride_inner, zero, ALIGNED),
        mask_ptr + at * words + zero,
        list_ptr + at * tiles,
        list_ptr + at * tiles,
        records.tile_max + at * tiles,
        records.tile_sum + at * tiles,
        tl.load(described[0] + at),
        tl.load(described[1] + at),
        tiles,
        vocab_size,
    )
    mass = tl.exp(tl.load(described[4] + at))
    support = Support(tl.load(described[2] + at), tl.load(described[3] + at), mass)
    tl.store(token_ptr + at, draw(row, at, support, noise, METHOD, HAS_MASK, WIDTH, PADDED))


def sample(f: FilteredLogits, drawing: Drawing) -> torch.Tensor:
    """One token a row in one launch; see `triton_specdec.sample`."""
    if not isinstance(f.source, Records):
        raise ValueError("filtered has lost its tile records: pass what filter_logits or FilteredLogits.stack returned")
    rows, full, device = f.shape.numel(), f.logits.shape[-1], f.logits.device
    tokens = torch.empty(f.shape, dtype=torch.int64, device=device)
    if rows:
        cut = tiling(full)
        mask = flat_mask(f.token_mask, rows)
        method, noise = Noise.of(drawing, tokens, f.log_normalizer)
        _sample_kernel[(rows,)](
            f.logits,
            tokens if mask is None else mask,
            f.source,
            described(f),
            noise,
            tokens,
            torch.empty(rows, cut.tiles, dtype=torch.int32, device=device),
            full if f.vocab_size is None else f.vocab_size,
            cut.tiles,
            *row_strides(f.logits),
            0 if mask is None else mask.shape[-1],
            0,
            METHOD=method,
            ALIGNED=is_aligned(full),
            HAS_MASK=mask is not None,
            WIDTH=cut.width,
            PADDED=cut.padded,
            num_warps=8,
            enable_fp_fusion=False,
        )
    return tokens
