"""A model as draft: K small forwards, each drawn with the request's own parameters and its own noise."""

from __future__ import annotations

import torch

from ..filter import FilteredLogits, filter_rows
from ..kv import truncate_kv_
from ..models.protocol import KVCache, Model
from ..reference import rules
from ..sample import sample_rows
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
        first = state.lengths.long()
        for i in range(num_tokens):
            logits = self.model.forward(fed, self._cache, last=last)[:, 0]
            self.forwards += 1
            if buffer is None:
                # The padding of the prefill goes; after later rounds' two tokens this changes nothing.
                truncate_kv_(self._cache.lengths, state.lengths)
                buffer = logits.new_empty(batch, num_tokens, vocab)
            row = buffer[:, i].copy_(logits)
            state.adjust_draft_(row, tokens[:, :i])
            law = filter_rows(row, state.params)
            if state.rule == "coupled":
                drawn = sample_rows(law, state.seeds, first + i, method="gumbel")
            elif state.rule == "block":
                # A block looks at every draft of its round, so its noise belongs to this round alone.
                drawn = sample_rows(law, state.seeds, first, torch.full_like(first, i), stream="draft")
            else:
                drawn = sample_rows(law, state.seeds, first + i, stream="draft")
            tokens[:, i] = drawn
            laws.append(law)
            fed, last = drawn[:, None], None
        q = None if state.rule == "coupled" else FilteredLogits.stack(laws, buffer)
        return Proposal(tokens, q, torch.full_like(state.lengths, num_tokens))

    def _feed(self, state: DecodeState) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the first forward of a round is fed, and where its last token stands."""
        if self._state is not state:
            # The prefill: the whole prompt and the anchor, rows padded behind their end.
            self._state = state
            self._cache = self.model.new_cache(len(state.lengths), state.capacity)
            return self._known(state.tokens[:, : state.bound]), state.lengths.long() - 1
        assert self._cache is not None
        # After K accepted drafts the cache is one token short, after fewer it is too long. Feeding the last two
        # committed tokens is right for both, with the same shapes every round.
        truncate_kv_(self._cache.lengths, rules.draft_kept_length(state.lengths))
        self._cache.bound = rules.draft_kept_length(state.bound)
        at = state.lengths.long()[:, None] + torch.arange(-2, 0, device=state.lengths.device)
        return self._known(state.tokens.gather(1, at)), torch.ones_like(state.lengths, dtype=torch.int64)

    def _known(self, tokens: torch.Tensor) -> torch.Tensor:
        """Ids the model has an embedding for: padding becomes 0, and an id of a larger target the last one.

        The second makes a worse guess, not a wrong law.
        """
        return tokens.clamp(0, self.model.vocab_size - 1)
