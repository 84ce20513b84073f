"""A KV cache whose rows have lengths of their own: the token at position i of a row lives in slot i.

Rows of different lengths share a forward: each writes at its own position and attends to its own prefix. What lies
behind a row's length is never attended to, so truncation is a length.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Reach(NamedTuple):
    """Where the tokens of one forward go, and how far a row may look."""

    rows: torch.Tensor  # int64 [B, 1]
    slots: torch.Tensor  # int64 [B, n]: slots, and positions, of the tokens
    stop: int  # no row attends to a slot from here on

    def attended(self, window: int = 0) -> torch.Tensor:
        """Whether each token attends to each slot, bool [B, n, stop]."""
        key = torch.arange(self.stop, device=self.slots.device)
        return attended(self.slots[:, :, None], key, window)


class RowCache:
    """Lengths of a batch, and the slots that the next tokens take.

    Parameters
    ----------
    batch_size, capacity : int
        Rows, and slots of each.
    device : torch.device

    Attributes
    ----------
    lengths : int32 [B]
        Tokens of each row. Lower them with `truncate_kv_`.
    bound : int
        A number no length exceeds, known without reading the device.
    """

    def __init__(self, batch_size: int, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.bound = 0
        self.rows = torch.arange(batch_size, device=device)[:, None]
        self.slots = torch.arange(capacity, device=device)

    def reach(self, count: int) -> Reach:
        """Where `count` more tokens a row go.

        Raises
        ------
        ValueError
            Where the cache has too few slots.
        """
        stop = self.bound + count
        if stop > self.capacity:
            raise ValueError(
                f"the cache has {self.capacity} slots a row, too few for {self.bound} tokens and {count} more"
            )
        return Reach(self.rows, self.lengths.long()[:, None] + self.slots[:count], stop)

    def advance(self, count: int) -> None:
        """Count the tokens of a forward."""
        self.lengths += count
        self.bound += count


def attended(query: torch.Tensor, key: torch.Tensor, window: int = 0) -> torch.Tensor:
    """Whether a token at position `query` attends to the one at position `key`.

    With a window, to itself and the window - 1 tokens before it.
    """
    seen = key <= query
    return seen & (query - key < window) if window else seen
