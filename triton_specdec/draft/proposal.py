"""What a draft gives to a round."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch

from ..filter import FilteredLogits

if TYPE_CHECKING:
    from ..state import DecodeState


class Proposal(NamedTuple):
    """Drafted tokens of a batch.

    Attributes
    ----------
    tokens : int64 [B, K], or fewer columns
    q : FilteredLogits or probabilities [B, K, Vq], or None
        What the tokens were drawn from; None for a deterministic draft.
    num_valid : ints [B]
        How many of a row's tokens count.
    """

    tokens: torch.Tensor
    q: FilteredLogits | torch.Tensor | None
    num_valid: torch.Tensor


@runtime_checkable
class Draft(Protocol):
    """Anything with this method drafts for `SpecDecoder`.

    A plain tuple (tokens, q, num_valid) is as good as a `Proposal`. What must last from round to round belongs into
    ``state.session``, which is of one call: the object itself may serve several calls at once.
    """

    def propose(self, state: DecodeState, num_tokens: int) -> Proposal:
        """Up to `num_tokens` tokens that may follow state.tokens[b, :state.lengths[b]].

        Fewer columns make a shorter round: a draft that adapts how much it proposes returns what it wants checked.
        """
        ...
