"""The committed tokens of a batch while it is decoded, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .params import RowParams
from .penalties import apply_penalties_
from .reference import rules
from .verify import VerifyResult


@dataclass
class Penalties:
    """Penalties of a batch and the counts they work on."""

    repetition: torch.Tensor  # float64 [B]
    frequency: torch.Tensor  # float64 [B]
    presence: torch.Tensor  # float64 [B]
    counts: torch.Tensor  # int32 [B, V], the output's tokens
    prompt_mask: torch.Tensor  # bool [B, V]

    def count_(self, tokens: torch.Tensor) -> None:
        """Count tokens [B, M]; PAD_TOKEN counts nothing."""
        self.counts.scatter_add_(1, tokens.clamp(min=0), (tokens >= 0).to(self.counts.dtype))

    def apply_(self, logits: torch.Tensor, drafts: torch.Tensor) -> None:
        """Penalise logits [B, K + 1, V], each row with the drafts [B, K] before it."""
        vocab = logits.shape[-1]
        apply_penalties_(
            logits,
            self.counts[:, :vocab],
            repetition=self.repetition,
            frequency=self.frequency,
            presence=self.presence,
            prompt_mask=self.prompt_mask[:, :vocab],
            draft_tokens=drafts,
        )


@dataclass
class DecodeState:
    """What a draft may look at, and what the loop commits to.

    Attributes
    ----------
    tokens : int64 [B, capacity + 1]
        Committed tokens of each row (prompt and output), -1 behind them; the last column takes what is dropped.
    lengths : int32 [B]
        Committed tokens of each row. The last of them, the anchor, is not in the target's cache.
    bound : int
        A number no length exceeds, known to the host.
    seeds : int64 [B]
    params, round_params : RowParams
        One value a request, and one for each of its K + 1 rows.
    rule : str
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    bound: int
    capacity: int
    seeds: torch.Tensor
    params: RowParams
    round_params: RowParams
    rule: str
    active: torch.Tensor  # bool [B]
    prompt_lengths: torch.Tensor  # int32 [B]
    min_tokens: torch.Tensor | None  # int64 [B]; None: no row has any
    stop_ids: list[int]
    penalties: Penalties | None

    def anchors(self) -> torch.Tensor:
        """The last committed token of each row, [B, 1]."""
        return self.tokens.gather(1, self.lengths.long()[:, None] - 1)

    def adjust_(self, logits: torch.Tensor, drafts: torch.Tensor) -> None:
        """Penalties and min_tokens on the target's logits [B, K + 1, V], after 0 .. K drafts [B, K]."""
        if self.penalties is not None:
            self.penalties.apply_(logits, drafts)
        if self.min_tokens is not None:
            step = torch.arange(logits.shape[1], device=logits.device)
            made = (self.lengths - self.prompt_lengths)[:, None] + step
            early = made < self.min_tokens[:, None]
            for token in self.stop_ids:
                if token < logits.shape[-1]:
                    logits[..., token].masked_fill_(early, float("-inf"))

    def adjust_draft_(self, logits: torch.Tensor, drafts: torch.Tensor) -> None:
        """The same on the draft's logits [B, V] after the drafts [B, i] of this round."""
        if self.penalties is None and self.min_tokens is None:
            return
        batch, count = drafts.shape
        rows = logits.new_zeros(batch, count + 1, logits.shape[-1])
        rows[:, count] = logits
        self.adjust_(rows, drafts)
        logits.copy_(rows[:, count])

    def commit_(self, result: VerifyResult) -> torch.Tensor:
        """Append what a round emitted to the active rows; returns how many tokens each took, int32 [B]."""
        taken = torch.where(self.active, result.num_emitted, 0)
        column = torch.arange(result.tokens.shape[1], device=self.tokens.device)
        at = self.lengths.long()[:, None] + column
        emitted = column < taken[:, None]
        self.tokens.scatter_(1, torch.where(emitted, at, self.capacity), result.tokens)
        if self.penalties is not None:
            self.penalties.count_(torch.where(emitted, result.tokens, rules.PAD_TOKEN))
        self.lengths += taken
        return taken
