"""Penalties on raw logits in place, grid (rows, slices of the vocabulary): only tokens that have occurred are touched.

Each token's count is that of the output plus the drafts before its row. A logit is widened to float64, penalised and
rounded once, as in the reference: the bits of a row do not depend on the backend. That costs little, since a slice in
which nothing has occurred ends after its counts, and a row divides once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .rules import count_penalties, is_count_penalty_on, is_repetition_on, repetition_penalty

BLOCK = 1024


@triton.jit
def penalise_repetition(x, penalty, seen):
    """`repetition_penalty` float64: it multiplies positive logits by one number, and all others by another."""
    one = tl.full([], 1.0, tl.float64)
    factor = tl.where(x > 0, repetition_penalty(one, penalty, one), -repetition_penalty(-one, penalty, one))
    return tl.where(seen, x * factor, x)


@triton.jit
def bf16_value(bits):
    """The float32 of a bfloat16's bits int16."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def bf16_bits(x):
    """The bits int16 of float32 values as bfloat16, to nearest even: casts do not round in the interpreter."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, rounded, 0x7FC0).to(tl.int16)


@triton.jit(do_not_specialize=["steps"])
def _penalties_kernel(
    logits_ptr,  # [B, K + 1, V]
    count_ptr,  # [B, V]
    mask_ptr,  # [B, V]
    draft_ptr,  # [B, K]
    repetition_ptr,  # [B]
    frequency_ptr,  # [B]
    presence_ptr,  # [B]
    vocab_size,
    steps,
    stride_row,
    stride_step,
    stride_count,
    stride_mask,
    HAS_MASK: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
    IS_BF16: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    b = at // steps
    step = at % steps
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    count = tl.load(count_ptr + b * stride_count + ids, mask=inside, other=0)
    if HAS_DRAFTS:
        for i in range(0, step):
            count += (ids == tl.load(draft_ptr + b * (steps - 1) + i)).to(count.dtype)
    seen = count > 0
    if HAS_MASK:
        seen = seen | (tl.load(mask_ptr + b * stride_mask + ids, mask=inside, other=0) != 0)
    touched = inside & (seen | (count != 0))
    if tl.max(touched.to(tl.int32), 0) == 1:
        repetition = tl.load(repetition_ptr + b)
        frequency = tl.load(frequency_ptr + b)
        presence = tl.load(presence_ptr + b)
        repetition = tl.where(is_repetition_on(repetition), repetition, 1.0)
        frequency = tl.where(is_count_penalty_on(frequency), frequency, 0.0)
        presence = tl.where(is_count_penalty_on(presence), presence, 0.0)
        where = logits_ptr + b * stride_row + step * stride_step + ids
        raw = tl.load(where, mask=touched, other=0)
        x = (bf16_value(raw) if IS_BF16 else raw).to(tl.float64)
        x = penalise_repetition(x, repetition, seen)
        x = count_penalties(x, count.to(tl.float64), frequency, presence)
        tl.store(where, bf16_bits(x.to(tl.float32)) if IS_BF16 else x.to(raw.dtype), mask=touched)


def apply_penalties_(
    logits: torch.Tensor,
    counts: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    prompt_mask: torch.Tensor | None,
    draft_tokens: torch.Tensor | None,
) -> None:
    """See `triton_specdec.apply_penalties_`; logits [B, K + 1, V]. One launch."""
    batch, steps, vocab = logits.shape
    if batch * steps == 0:
        return
    given, logits = logits, _rows(logits)
    is_bf16 = logits.dtype == torch.bfloat16
    counts = _rows(counts)
    mask = counts if prompt_mask is None else _rows(prompt_mask).view(torch.uint8)
    _penalties_kernel[(batch * steps, triton.cdiv(vocab, BLOCK))](
        logits.view(torch.int16) if is_bf16 else logits,
        counts,
        mask,
        counts if draft_tokens is None else draft_tokens.contiguous(),
        repetition,
        frequency,
        presence,
        vocab,
        steps,
        *logits.stride()[:-1],
        counts.stride(0),
        mask.stride(0),
        HAS_MASK=prompt_mask is not None,
        HAS_DRAFTS=draft_tokens is not None,
        IS_BF16=is_bf16,
        BLOCK=BLOCK,
        enable_fp_fusion=False,
    )
    if logits is not given:
        given.copy_(logits)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose last stride is 1: a copy where it is not."""
    return tensor if tensor.shape[-1] == 1 or tensor.stride(-1) == 1 else tensor.contiguous()
