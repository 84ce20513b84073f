"""The committed tokens of a batch while it is decoded, on the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .params import RowParams
from .penalties import apply_penalties_
from .reference import rules
from .verify import VerifyResult


@dataclass(eq=False)
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
        """Penalise logits [B, K + 1, V], each row with the drafts [B, K] before it; padding stays as it is."""
        vocab = min(logits.shape[-1], self.counts.shape[-1])
        apply_penalties_(
            logits[..., :vocab],
            self.counts[:, :vocab],
            repetition=self.repetition,
            frequency=self.frequency,
            presence=self.presence,
            prompt_mask=self.prompt_mask[:, :vocab],
            draft_tokens=drafts,
        )


@dataclass(eq=False)
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
    params : RowParams
        One value a request.
    rule : str
    logits_width : int
        Width of the target's logits; 0 before its first forward.
    session : dict
        What a draft keeps between the rounds of this call (its cache, say). A draft object may serve several calls at
        once, so it keeps nothing of a call in itself.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    bound: int
    capacity: int
    seeds: torch.Tensor
    params: RowParams
    rule: str
    active: torch.Tensor  # bool [B]
    prompt_lengths: torch.Tensor  # int32 [B]
    min_tokens: torch.Tensor | None  # int64 [B]; None: no row has any
    stop_ids: list[int]
    penalties: Penalties | None
    logits_width: int = 0
    session: dict[str, Any] = field(default_factory=dict)
    _stop_tensors: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)
    _repeated: dict[int, RowParams] = field(default_factory=dict, repr=False)

    def round_params(self, rows: int) -> RowParams:
        """One value for each of `rows` rows of a request."""
        if rows not in self._repeated:
            self._repeated[rows] = self.params.repeated(rows)
        return self._repeated[rows]

    def anchors(self) -> torch.Tensor:
        """The last committed token of each row, [B, 1]."""
        return self.tokens.gather(1, self.lengths.long()[:, None] - 1)

    def adjusted(self, logits: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
        """Logits [B, K + 1, V] with penalties and min_tokens, after 0 .. K drafts [B, K]; a copy where any is on."""
        if self.penalties is None and self.min_tokens is None:
            return logits
        logits = logits.clone()
        if self.penalties is not None:
            self.penalties.apply_(logits, drafts)
        if self.min_tokens is not None:
            step = torch.arange(logits.shape[1], device=logits.device)
            made = (self.lengths - self.prompt_lengths)[:, None] + step
            early = (made < self.min_tokens[:, None])[:, :, None]
            ids = self._stops_below(logits.shape[-1])
            logits[..., ids] = torch.where(early, float("-inf"), logits[..., ids])
        return logits

    def adjusted_draft(self, logits: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
        """The same for the draft's logits [B, V] after the drafts [B, i] of this round."""
        if self.penalties is None and self.min_tokens is None:
            return logits
        count = drafts.shape[1]
        return self.adjusted(logits[:, None].expand(-1, count + 1, -1), drafts)[:, count]

    def _stops_below(self, vocab_size: int) -> torch.Tensor:
        if vocab_size not in self._stop_tensors:
            ids = [token for token in self.stop_ids if token < vocab_size]
            self._stop_tensors[vocab_size] = torch.tensor(ids, dtype=torch.int64, device=self.tokens.device)
        return self._stop_tensors[vocab_size]

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
