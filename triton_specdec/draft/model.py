"""A model as draft: K small forwards, each drawn with the request's own parameters and its own noise."""

from __future__ import annotations

import torch

from ..filter import FilteredLogits, filter_rows
from ..kv import truncate_kv_
from ..models.protocol import KVCache, Model
from ..reference import rules
from ..sample import sample
from ..state import DecodeState
from .proposal import Proposal


class ModelDraft:
    """Drafts with a model over (a prefix of) the target's vocabulary."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.forwards = 0
        self._cache: KVCache | None = None
        self._state: DecodeState | None = None

    def propose(self, state: DecodeState, num_tokens: int) -> Proposal:
        """Draw `num_tokens` tokens after each row's committed ones."""
        fed, last = self._feed(state)
        assert self._cache is not None
        batch, vocab = len(fed), self.model.vocab_size
        tokens = fed.new_empty(batch, num_tokens)
        buffer: torch.Tensor | None = None
        laws: list[FilteredLogits] = []
        for i in range(num_tokens):
            # A target's id the draft has no embedding for stands as its last one: a worse guess, not a wrong law.
            logits = self.model.forward(fed.clamp(max=vocab - 1), self._cache, last=last)[:, 0]
            self.forwards += 1
            if i == 0:
                # The padding of the prefill goes; after later rounds' two tokens this changes nothing.
                truncate_kv_(self._cache.lengths, state.lengths)
            if buffer is None:
                buffer = logits.new_empty(batch, num_tokens, vocab)
            row = buffer[:, i].copy_(logits)
            state.adjust_draft_(row, tokens[:, :i])
            law = filter_rows(row, state.params)
            at = state.lengths.long() + i
            if state.rule == "coupled":
                tokens[:, i] = sample(law, seeds=state.seeds, positions=at, method="gumbel")
            else:
                tokens[:, i] = sample(law, seeds=state.seeds, positions=at, stream="draft")
            laws.append(law)
            fed, last = tokens[:, i : i + 1], torch.zeros_like(last)
        q = None if state.rule == "coupled" else FilteredLogits.stack(laws, buffer)
        return Proposal(tokens, q, torch.full_like(state.lengths, num_tokens))

    def _feed(self, state: DecodeState) -> tuple[torch.Tensor, torch.Tensor]:
        """What the first forward of a round is fed, and where its last token stands."""
        if self._state is not state:
            # The prefill: the whole prompt and the anchor, rows padded behind their end.
            self._state = state
            self._cache = self.model.new_cache(len(state.lengths), state.capacity)
            fed = state.tokens[:, : state.bound].clamp(min=0)
            return fed, state.lengths.long() - 1
        assert self._cache is not None
        # After K accepted drafts the cache is one token short, after fewer it is too long. Feeding the last two
        # committed tokens is right for both, with the same shapes every round.
        truncate_kv_(self._cache.lengths, rules.draft_kept_length(state.lengths))
        self._cache.bound = rules.draft_kept_length(state.bound)
        at = state.lengths.long()[:, None] + torch.tensor([-2, -1], device=state.lengths.device)
        return state.tokens.gather(1, at), torch.ones_like(state.lengths, dtype=torch.int64)
