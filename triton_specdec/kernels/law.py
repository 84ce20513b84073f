"""Target and draft as verification sees them: p(x) out of a descriptor, or out of given probabilities.

KIND says which: "logits" (a `FilteredLogits`), "probs" (a tensor of probabilities), "none" (a deterministic draft).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..filter import FilteredLogits
from .rules import STATUS_EMPTY, STATUS_INF, STATUS_NAN, STATUS_NEGATIVE, is_kept, scaled
from .sample import Support
from .tiles import (
    SLICE,
    Records,
    Row,
    aligned_rows,
    finite,
    flat_mask,
    is_aligned,
    load_raw,
    rate,
    row_start,
    row_strides,
    tiling,
)

# Set in the status of a row of probabilities that has any mass; without it the row is empty.
HAS_MASS = tl.constexpr(1 << 30)


class Law(NamedTuple):
    """The rows of a target or a draft; what a kind has no use for repeats another of its tensors."""

    data: torch.Tensor | tl.tensor  # logits or probabilities [rows, V]
    mask: torch.Tensor | tl.tensor  # int32 [rows, words]
    maximum: torch.Tensor | tl.tensor  # float32 [rows]
    inverse: torch.Tensor | tl.tensor  # float64 [rows]
    cut_value: torch.Tensor | tl.tensor  # float32 [rows]
    cut_id: torch.Tensor | tl.tensor  # int32 [rows]
    log_normalizer: torch.Tensor | tl.tensor  # float64 [rows]
    status: torch.Tensor | tl.tensor  # int32 [rows]
    tile_max: torch.Tensor | tl.tensor  # float32 [rows, T]
    tile_sum: torch.Tensor | tl.tensor  # float32 [rows, T]; float64 of probabilities
    num_tiles: int | tl.tensor
    vocab_size: int | tl.tensor
    full_vocab_size: int | tl.tensor
    inner: int | tl.tensor
    stride_outer: int | tl.tensor
    stride_inner: int | tl.tensor
    words: int | tl.tensor


class Form(NamedTuple):
    """What the compiler must know of a law."""

    kind: str
    has_mask: bool
    aligned: bool


@triton.jit
def _start(law, at, zero, ALIGNED: tl.constexpr):
    return row_start(law.data, at, law.inner, law.stride_outer, law.stride_inner, zero, ALIGNED)


@triton.jit
def row_of(law, at, list_ptr, zero, ALIGNED: tl.constexpr):
    """Row `at` of a law of logits, for a draw."""
    return Row(
        _start(law, at, zero, ALIGNED),
        law.mask + at * law.words + zero,
        list_ptr,
        list_ptr,
        law.tile_max + at * law.num_tiles,
        law.tile_sum + at * law.num_tiles,
        tl.load(law.maximum + at),
        tl.load(law.inverse + at),
        law.num_tiles,
        law.vocab_size,
    )


@triton.jit
def support_of(law, at):
    """The support of row `at` of a law of logits."""
    mass = tl.exp(tl.load(law.log_normalizer + at))
    return Support(tl.load(law.cut_value + at), tl.load(law.cut_id + at), mass)


@triton.jit
def any_bits(bits):
    """The bits that any of a block has; a status has six."""
    out = tl.full([], 0, tl.int32)
    for i in tl.static_range(6):
        out = out | tl.max(bits & (1 << i), 0)
    return out


@triton.jit
def clean(p):
    """NaN, inf and negative probabilities count as 0."""
    return tl.where((p >= 0) & (p < float("inf")), p, 0.0)


@triton.jit
def token_probs(law, at, ids, inside, zero, KIND: tl.constexpr, HAS_MASK: tl.constexpr, ALIGNED: tl.constexpr):
    """Probability and log-probability float64 of one id each of rows `at`; 0 for ids outside and not `inside`."""
    inside = inside & (ids >= 0) & (ids < law.vocab_size)
    ids = tl.where(inside, ids, 0)
    start = _start(law, at, zero, ALIGNED)
    if KIND == "logits":
        x = finite(load_raw(start, law.mask + at * law.words + zero, ids, inside, HAS_MASK))
        cut_value = tl.load(law.cut_value + at, mask=inside, other=0.0)
        kept = inside & is_kept(x, ids, cut_value, tl.load(law.cut_id + at, mask=inside, other=0))
        maximum = tl.load(law.maximum + at, mask=inside, other=0.0).to(tl.float64)
        inverse = tl.load(law.inverse + at, mask=inside, other=0.0)
        # A one-hot row keeps one token, which may be -inf where nothing is finite.
        x = tl.where(kept & (inverse > 0), x.to(tl.float64), maximum)
        log_p = scaled(x, maximum, inverse) - tl.load(law.log_normalizer + at, mask=inside, other=0.0)
        p = tl.where(kept, tl.exp(log_p), 0.0)
        log_p = tl.where(kept, log_p, float("-inf"))
    else:
        p = clean(tl.load(start + ids, mask=inside, other=0.0).to(tl.float64))
        log_p = tl.where(p > 0, tl.log(tl.where(p > 0, p, 1.0)), float("-inf"))
    return p, log_p


@triton.jit
def row_probs(law, at, ids, inside, zero, KIND: tl.constexpr, HAS_MASK: tl.constexpr, ALIGNED: tl.constexpr):
    """Probabilities of many ids of row `at`: float32 out of logits, float64 out of probabilities."""
    inside = inside & (ids < law.vocab_size)
    start = _start(law, at, zero, ALIGNED)
    if KIND == "logits":
        x = finite(load_raw(start, law.mask + at * law.words + zero, ids, inside, HAS_MASK))
        kept = inside & is_kept(x, ids, tl.load(law.cut_value + at), tl.load(law.cut_id + at))
        z = scaled(x, tl.load(law.maximum + at), rate(tl.load(law.inverse + at)))
        z = tl.where(tl.load(law.inverse + at) > 0, z, 0.0)
        p = tl.where(kept, tl.exp2(z) * tl.exp(-tl.load(law.log_normalizer + at)).to(tl.float32), 0.0)
    else:
        p = clean(tl.load(start + ids, mask=inside, other=0.0).to(tl.float64))
    return p


@triton.jit
def needed_tiles(law, at, tile, KIND: tl.constexpr):
    """Whether a tile of row `at` holds a kept token: the others need not be read."""
    needed = tile < law.num_tiles
    if KIND == "logits":
        top = tl.load(law.tile_max + at * law.num_tiles + tile, mask=needed, other=float("-inf"))
        needed = needed & (top >= tl.load(law.cut_value + at))
    return needed


@triton.jit
def row_status(law, at, inside, KIND: tl.constexpr):
    """Status bits of rows `at`, 0 where not `inside`."""
    status = tl.load(law.status + at, mask=inside, other=0)
    if KIND == "probs":
        status = tl.where((status & HAS_MASS) > 0, status - HAS_MASS, status | STATUS_EMPTY)
    return tl.where(inside, status, 0)


@triton.jit
def _scan_probs_kernel(
    law,  # Law of probabilities; writes its tile_sum and status
    zero,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    ids = tile[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    raw = tl.load(_start(law, at, zero, ALIGNED) + ids, mask=ids < law.vocab_size, other=0.0).to(tl.float64)
    total = tl.sum(clean(raw), 1)
    tl.store(law.tile_sum + at * law.num_tiles + tile, total, mask=tile < law.num_tiles)
    nan = tl.max((raw != raw).to(tl.int32), axis=None)
    inf = tl.max((raw == float("inf")).to(tl.int32), axis=None)
    negative = tl.max((raw < 0).to(tl.int32), axis=None)
    some = tl.max((total > 0).to(tl.int32), axis=None)
    bits = nan * STATUS_NAN + inf * STATUS_INF + negative * STATUS_NEGATIVE + some * HAS_MASS
    tl.atomic_or(law.status + at, bits)


def law_of(given: FilteredLogits | torch.Tensor) -> tuple[Law, Form]:
    """A target or a draft for the kernels; given probabilities are scanned, in one launch."""
    if isinstance(given, FilteredLogits):
        return _law_of_logits(given)
    data = aligned_rows(given)
    rows, full = data.shape[:-1].numel(), data.shape[-1]
    cut, aligned = tiling(full), is_aligned(full)
    status = torch.zeros(rows, dtype=torch.int32, device=data.device)
    # Whatever a user gives has mass here if it has any: 1e-60 is no float32.
    tile_sum = torch.empty(rows, cut.tiles, dtype=torch.float64, device=data.device)
    numbers = (tile_sum, status, tile_sum, status, tile_sum)
    law = Law(data, status, *numbers, status, tile_sum, tile_sum, cut.tiles, full, full, *row_strides(data), 0)
    if rows:
        _scan_probs_kernel[(rows, cut.slices)](
            law, 0, ALIGNED=aligned, ROWS=SLICE // cut.width, WIDTH=cut.width, num_warps=8, enable_fp_fusion=False
        )
    return law, Form("probs", False, aligned)


def _law_of_logits(f: FilteredLogits) -> tuple[Law, Form]:
    if not isinstance(f.source, Records):
        raise ValueError("filtered logits have lost their tile records: pass what filter_logits or stack returned")
    rows, full = f.shape.numel(), f.logits.shape[-1]
    mask = flat_mask(f.token_mask, rows)
    law = Law(
        f.logits,
        f.cut_id if mask is None else mask,
        f.maximum.contiguous(),
        f.inverse_temperature.contiguous(),
        f.cut_value.contiguous(),
        f.cut_id.contiguous(),
        f.log_normalizer.contiguous(),
        f.status.contiguous(),
        *f.source,
        tiling(full).tiles,
        full if f.vocab_size is None else f.vocab_size,
        full,
        *row_strides(f.logits),
        0 if mask is None else mask.shape[-1],
    )
    return law, Form("logits", mask is not None, is_aligned(full))
