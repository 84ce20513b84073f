"""Prompt lookup: what followed the last few tokens when they stood in the text before (Saxena 2023)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .. import checks
from ..reference import rules
from .proposal import Proposal

if TYPE_CHECKING:
    from ..state import DecodeState


class PromptLookupDraft:
    """Deterministic draft: the tokens after the most recent earlier match of the longest suffix.

    Parameters
    ----------
    max_ngram, min_ngram : int
        Longest and shortest suffix that is looked up.
    """

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        self.max_ngram = checks.integer("max_ngram", max_ngram, 1)
        self.min_ngram = checks.integer("min_ngram", min_ngram, 1)
        if min_ngram > max_ngram:
            raise ValueError(f"min_ngram must be at most max_ngram ({max_ngram}), got {min_ngram}")

    def propose(self, state: DecodeState, num_tokens: int) -> Proposal:
        """Copy up to `num_tokens` tokens; rows without a match propose none."""
        tokens, lengths = state.tokens[:, : state.bound], state.lengths.long()[:, None]
        column = torch.arange(tokens.shape[1], device=tokens.device)
        follows = torch.zeros_like(lengths)  # where the copied tokens begin; 0: no match
        for n in range(self.min_ngram, self.max_ngram + 1):
            # same[b, e]: the n tokens before e are the row's last n, and stand before its end.
            same = (column >= n) & (column < lengths) & (lengths > n)
            for back in range(1, n + 1):
                last = tokens.gather(1, (lengths - back).clamp(min=0))
                same = same & (tokens.roll(back, 1) == last)
            found = (same * column).amax(1, keepdim=True)
            follows = torch.where(found > 0, found, follows)
        at = follows + torch.arange(num_tokens, device=tokens.device)
        valid = (follows > 0) & (at < lengths)
        drafts = torch.where(valid, tokens.gather(1, at.clamp(max=tokens.shape[1] - 1)), rules.PAD_TOKEN)
        return Proposal(drafts, None, valid.sum(1))
