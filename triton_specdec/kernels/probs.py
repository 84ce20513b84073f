"""Probabilities out of the descriptor: dense for those who want them, and at single tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..filter import FilteredLogits
from .rules import is_kept, scaled
from .tiles import finite, flat_mask, is_aligned, load_raw, row_start, row_strides

BLOCK = 1024


@triton.jit
def load_log_probs(
    logits_ptr,
    mask_ptr,
    described,
    at,
    ids,
    inside,
    HAS_MASK: tl.constexpr,
):
    """Log-probability float64 of a row's ids, and whether they are kept; `logits_ptr` stands at the row's start."""
    x = finite(load_raw(logits_ptr, mask_ptr, ids, inside, HAS_MASK))
    kept = inside & is_kept(x, ids, tl.load(described[2] + at), tl.load(described[3] + at))
    maximum = tl.load(described[0] + at).to(tl.float64)
    inverse = tl.load(described[1] + at)
    # A one-hot row keeps one token, which may be -inf where nothing is finite.
    at_maximum = tl.where(inverse > 0, 0, 1) == 1
    z = scaled(tl.where(kept, tl.where(at_maximum, maximum, x.to(tl.float64)), maximum), maximum, inverse)
    return z - tl.load(described[4] + at), kept


@triton.jit(do_not_specialize=["full_vocab_size", "inner", "stride_outer", "stride_inner", "words", "zero"])
def _dense_kernel(
    logits_ptr,  # [rows, V]
    mask_ptr,  # [rows, words]
    described,  # maximum, inverse temperature, cut value, cut id, log normaliser; [rows] each
    out_ptr,  # [rows, V]
    full_vocab_size,
    vocab_size,
    inner,
    stride_outer,
    stride_inner,
    words,
    zero,
    ALIGNED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = row_start(logits_ptr, at, inner, stride_outer, stride_inner, zero, ALIGNED)
    z, kept = load_log_probs(start, mask_ptr + at * words + zero, described, at, ids, ids < vocab_size, HAS_MASK)
    out = tl.where(kept, tl.exp(z.to(tl.float32)), 0.0) if WEIGHTS else kept
    tl.store(out_ptr + at * full_vocab_size + ids, out, mask=ids < full_vocab_size)


@triton.jit(do_not_specialize=["tokens_per_row", "inner", "stride_outer", "stride_inner", "words", "zero"])
def _log_prob_kernel(
    logits_ptr,  # [rows, V]
    mask_ptr,  # [rows, words]
    described,  # as above
    token_ptr,  # [rows, M]
    out_ptr,  # [rows, M]
    tokens_per_row,
    vocab_size,
    inner,
    stride_outer,
    stride_inner,
    words,
    zero,
    ALIGNED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < tokens_per_row
    ids = tl.load(token_ptr + at * tokens_per_row + column, mask=here, other=-1)
    inside = (ids >= 0) & (ids < vocab_size)
    ids = tl.where(inside, ids, 0)
    start = row_start(logits_ptr, at, inner, stride_outer, stride_inner, zero, ALIGNED)
    z, kept = load_log_probs(start, mask_ptr + at * words + zero, described, at, ids, inside, HAS_MASK)
    tl.store(out_ptr + at * tokens_per_row + column, tl.where(kept, z, float("-inf")).to(tl.float32), mask=here)


def described(f: FilteredLogits) -> tuple[torch.Tensor, ...]:
    """The fields of the descriptor that a probability needs."""
    fields = (f.maximum, f.inverse_temperature, f.cut_value, f.cut_id, f.log_normalizer)
    return tuple(field.contiguous() for field in fields)


def _dense(f: FilteredLogits, dtype: torch.dtype) -> torch.Tensor:
    rows, full = f.shape.numel(), f.logits.shape[-1]
    out = torch.empty(f.logits.shape, dtype=dtype, device=f.logits.device)
    if rows:
        mask = flat_mask(f.token_mask, rows)
        _dense_kernel[(rows, triton.cdiv(full, BLOCK))](
            f.logits,
            f.argmax if mask is None else mask,
            described(f),
            out,
            full,
            full if f.vocab_size is None else f.vocab_size,
            *row_strides(f.logits),
            0 if mask is None else mask.shape[-1],
            0,
            ALIGNED=is_aligned(full),
            HAS_MASK=mask is not None,
            WEIGHTS=dtype == torch.float32,
            BLOCK=BLOCK,
            enable_fp_fusion=False,
        )
    return out


def probs(f: FilteredLogits) -> torch.Tensor:
    """See `FilteredLogits.probs`."""
    return _dense(f, torch.float32)


def keep_mask(f: FilteredLogits) -> torch.Tensor:
    """See `FilteredLogits.keep_mask`."""
    return _dense(f, torch.bool)


def log_prob(f: FilteredLogits, tokens: torch.Tensor) -> torch.Tensor:
    """See `FilteredLogits.log_prob`."""
    rows, full = f.shape.numel(), f.logits.shape[-1]
    out = torch.empty(tokens.shape, dtype=torch.float32, device=tokens.device)
    if tokens.numel():
        mask = flat_mask(f.token_mask, rows)
        each = tokens.numel() // rows
        block = min(BLOCK, triton.next_power_of_2(each))
        _log_prob_kernel[(rows, triton.cdiv(each, block))](
            f.logits,
            f.argmax if mask is None else mask,
            described(f),
            tokens.contiguous(),
            out,
            each,
            full if f.vocab_size is None else f.vocab_size,
            *row_strides(f.logits),
            0 if mask is None else mask.shape[-1],
            0,
            ALIGNED=is_aligned(full),
            HAS_MASK=mask is not None,
            BLOCK=block,
            enable_fp_fusion=False,
        )
    return out
