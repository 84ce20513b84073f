"""Penalties on raw logits, before any filter: repetition, then frequency and presence."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import rules


def counts_per_step(counts: NDArray, draft_tokens: NDArray | None) -> NDArray:
    """Counts [B, V] as seen after 0 .. K drafted tokens: [B, K + 1, V]. Ids outside [0, V) count nothing."""
    if draft_tokens is None:
        return counts[:, None]
    batch, num_drafts = draft_tokens.shape
    added = np.zeros((batch, num_drafts + 1, counts.shape[-1]), counts.dtype)
    row, step = np.nonzero((draft_tokens >= 0) & (draft_tokens < counts.shape[-1]))
    added[row, step + 1, draft_tokens[row, step]] = 1
    return counts[:, None] + added.cumsum(1)


def apply_penalties_(
    logits: NDArray,
    counts: NDArray,
    repetition: NDArray,
    frequency: NDArray,
    presence: NDArray,
    prompt_mask: NDArray | None,
    draft_tokens: NDArray | None,
) -> None:
    """Penalise logits [B, K + 1, V] in place; counts int [B, V], parameters float64 [B], prompt_mask bool [B, V].

    A parameter that cannot be applied is off.
    """
    seen_by = counts_per_step(counts, draft_tokens)
    seen = seen_by > 0
    if prompt_mask is not None:
        seen = seen | prompt_mask[:, None]
    repetition = np.where(rules.is_repetition_on(repetition), repetition, 1.0)
    frequency, presence = (np.where(rules.is_count_penalty_on(v), v, 0.0) for v in (frequency, presence))
    r, f, s = (value[:, None, None] for value in (repetition, frequency, presence))
    with np.errstate(over="ignore", invalid="ignore"):
        # What overflows is +inf, which the filter counts as the largest finite value; NaN stays NaN.
        x = rules.repetition_penalty(logits.astype(np.float64), r, seen)
        logits[...] = rules.count_penalties(x, seen_by, f, s)
