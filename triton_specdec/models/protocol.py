"""What a model must offer to the decode loop."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch

from .. import checks


@runtime_checkable
class KVCache(Protocol):
    """Keys and values of a batch: the token at position i of a row lives in slot i.

    Attributes
    ----------
    lengths : int32 [B], on the model's device
        Tokens in the cache of each row. The loop truncates a row by lowering its length.
    bound : int
        A number no length exceeds, known to the host without reading the device. `Model.forward` adds the tokens it
        was fed; the loop lowers it after its one read of a round.
    """

    lengths: torch.Tensor
    bound: int


@runtime_checkable
class Model(Protocol):
    """A decoder-only language model with a cache per row.

    Attributes
    ----------
    vocab_size : int
        Width of its logits.
    max_length : int
        Most tokens (prompt and answer) it was made for.
    device : torch.device
        Where its tokens go in and its logits come out.

    Notes
    -----
    Two more attributes are used where a model has them: `eos_token_id` (int or list), which ends a row where `generate`
    is given no other, and `tokenizer` (with a `get_vocab()`), by which a draft of another tokenizer is refused.
    """

    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def max_length(self) -> int: ...  # noqa: D102
    @property
    def device(self) -> torch.device: ...  # noqa: D102

    def new_cache(self, batch_size: int, capacity: int) -> KVCache:
        """An empty cache with `capacity` slots a row.

        The loop asks for up to 2 K + 1 more than prompt and answer take: drafts are checked beyond the end of the
        answer and then cut. With an answer that ends at `max_length`, the model is fed positions behind it.
        """
        ...

    def forward(self, tokens: torch.Tensor, cache: Any, *, last: torch.Tensor | None = None) -> torch.Tensor:
        """Feed tokens int64 [B, n] at each row's own length; adds n to every length and to the bound.

        Returns logits [B, n, V] after each token, or [B, 1, V] after token `last[b]` (int64 [B]) alone. They may be
        wider than `vocab_size` (a padded head): what is behind it is never drawn. They are not written to.
        """
        ...


def model_logits(
    model: Model, name: str, tokens: torch.Tensor, cache: KVCache, last: torch.Tensor | None = None
) -> torch.Tensor:
    """One forward of a model, its answer checked: at least as wide as its vocabulary."""
    logits = model.forward(tokens, cache, last=last)
    count = tokens.shape[1] if last is None else 1
    checks.tensor(f"logits of the {name}", logits, checks.LOGIT_DTYPES, (len(tokens), count, None))
    if logits.shape[-1] < model.vocab_size:
        raise ValueError(f"the {name} gave {logits.shape[-1]} logits, fewer than its vocab_size of {model.vocab_size}")
    return logits


def valid_ids(vocab_size: int, logits: torch.Tensor) -> int | None:
    """How many ids of padded logits count; None where all do.

    Padded logits are filtered as they are: cut to an odd vocabulary, their rows could not be read 16 bytes at a time.
    """
    return vocab_size if vocab_size < logits.shape[-1] else None
