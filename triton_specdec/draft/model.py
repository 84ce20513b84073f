"""A model as draft: K small forwards, each drawn with the request's own parameters and its own noise."""

from __future__ import annotations

import torch

from ..filter import FilteredLogits
from ..kv import truncate_kv_
from ..models.protocol import KVCache, Model, model_logits, valid_ids
from ..reference import rules
from ..sample import Drawing, sample_rows
from ..state import DecodeState
from .proposal import Proposal


class ModelDraft:
    """Drafts with a model over (a prefix of) the target's vocabulary.

    Parameters
    ----------
    model : Model
    vocab_size : int, optional
        Ids that are drafted, where the model has more.
    """

    def __init__(self, model: Model, vocab_size: int | None = None) -> None:
        self.model = model
        self.vocab_size = model.vocab_size if vocab_size is None else min(vocab_size, model.vocab_size)

    def propose(self, state: DecodeState, num_tokens: int) -> Proposal:
        """Draw `num_tokens` tokens after each row's committed ones."""
        fed, last, cache = self._feed(state)
        batch = len(fed)
        tokens = fed.new_empty(batch, num_tokens)
        buffer: torch.Tensor | None = None
        laws: list[FilteredLogits] = []
        first = state.lengths.long()
        for i in range(num_tokens):
            # No wider than the target's logits, to be compared with them.
            logits = model_logits(self.model, "draft", fed, cache, last)[:, 0, : state.logits_width]
            state.session["draft_forwards"] = state.session.get("draft_forwards", 0) + 1
            if buffer is None:
                # The padding of the prefill goes; after later rounds' two tokens this changes nothing.
                truncate_kv_(cache.lengths, state.lengths)
                buffer = logits.new_empty(batch, num_tokens, logits.shape[-1])
            row = buffer[:, i].copy_(state.adjusted_draft(logits, tokens[:, :i]))
            drawing = self._drawing(state, first, i)
            law, drawn = sample_rows(row, state.params, drawing, valid_ids(self.vocab_size, row))
            tokens[:, i] = drawn
            laws.append(law)
            fed, last = drawn[:, None], None
        q = None if state.rule == "coupled" else FilteredLogits.stack(laws, buffer)
        return Proposal(tokens, q, torch.full_like(state.lengths, num_tokens))

    @staticmethod
    def _drawing(state: DecodeState, first: torch.Tensor, step: int) -> Drawing:
        """The noise of draft number `step` of a round."""
        if state.rule == "coupled":
            return Drawing("gumbel", state.seeds, first + step)
        if state.rule == "block":
            # A block looks at every draft of its round, so its noise belongs to this round alone.
            steps = torch.full_like(first, step)
            return Drawing("inverse_cdf", state.seeds, first, steps, stream=rules.STREAM_DRAFT)
        return Drawing("inverse_cdf", state.seeds, first + step, stream=rules.STREAM_DRAFT)

    def _feed(self, state: DecodeState) -> tuple[torch.Tensor, torch.Tensor | None, KVCache]:
        """What the first forward of a round is fed, where its last token stands, and this call's cache."""
        cache: KVCache | None = state.session.get("draft_cache")
        if cache is None:
            # The prefill: the whole prompt and the anchor, rows padded behind their end.
            cache = state.session["draft_cache"] = self.model.new_cache(len(state.lengths), state.capacity)
            return self._known(state.tokens[:, : state.bound]), state.lengths.long() - 1, cache
        # After K accepted drafts the cache is one token short, after fewer it is too long. Feeding the last two
        # committed tokens is right for both, with the same shapes every round.
        truncate_kv_(cache.lengths, rules.draft_kept_length(state.lengths))
        cache.bound = rules.draft_kept_length(state.bound)
        at = state.lengths.long()[:, None] + torch.arange(-2, 0, device=state.lengths.device)
        return self._known(state.tokens.gather(1, at)), torch.ones_like(state.lengths, dtype=torch.int64), cache

    def _known(self, tokens: torch.Tensor) -> torch.Tensor:
        """Ids the model has an embedding for: padding becomes 0, and an id of a larger target the last one.

        The second makes a worse guess, not a wrong law.
        """
        return tokens.clamp(0, self.model.vocab_size - 1)
