"""A cache of rows with lengths of their own that the installed Transformers takes for one of its caches."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from .cache import Reach, RowCache


@lru_cache(maxsize=1)
def cache_class() -> type:
    """A `RowCache` that is a cache of the installed Transformers.

    Its interface has changed from release to release; what all of them share is that attention calls `update` with the
    new keys and values of a layer, and goes on with what it returns.
    """
    from transformers import Cache

    class TransformersCache(RowCache, Cache):
        """Keys and values [B, heads, capacity, head_dim] of each layer, made when a layer is first fed."""

        is_compileable = False
        is_initialized = True

        def __init__(self, batch_size: int, capacity: int, device: torch.device) -> None:
            if isinstance(self, torch.nn.Module):
                torch.nn.Module.__init__(self)
            RowCache.__init__(self, batch_size, capacity, device)
            self.keys: list[torch.Tensor] = []
            self.values: list[torch.Tensor] = []
            self.current: Reach | None = None

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            """Write keys and values [B, heads, n, head_dim] of one layer; returns the layer's, up to the bound."""
            if layer_idx == len(self.keys):
                # Zeros, not garbage: a masked slot still meets a weight of 0, and 0 * NaN is NaN.
                for states, kept in ((key_states, self.keys), (value_states, self.values)):
                    batch, heads, _, width = states.shape
                    kept.append(states.new_zeros(batch, heads, self.capacity, width))
            at = self.current
            assert at is not None
            keys, values = self.keys[layer_idx], self.values[layer_idx]
            keys[at.rows, :, at.slots] = key_states.transpose(1, 2)
            values[at.rows, :, at.slots] = value_states.transpose(1, 2)
            return keys[:, :, : at.stop], values[:, :, : at.stop]

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return self.bound

        def get_query_offset(self, layer_idx: int = 0) -> int:
            return self.bound

        def get_mask_sizes(self, query: Any, layer_idx: int = 0) -> tuple[int, int]:
            # The mask is given; what a model still asks for is its width.
            return (self.bound if self.current is None else self.current.stop), 0

        def get_max_length(self, layer_idx: int | None = None) -> int:
            return self.capacity

        def get_max_cache_shape(self, layer_idx: int = 0) -> int:
            return self.capacity

        def get_usable_length(self, new_seq_length: int, layer_idx: int = 0) -> int:
            return self.bound

        def __len__(self) -> int:
            return len(self.keys)

        def __repr__(self) -> str:
            return f"TransformersCache(rows={len(self.lengths)}, capacity={self.capacity})"

        @property
        def layers(self) -> list[Any]:  # type: ignore[override]
            raise NotImplementedError("a cache of rows keeps no objects for its layers")

        @property
        def is_sliding(self) -> list[bool]:
            return [False] * len(self.keys)

        is_linear = is_dummy = is_sliding

    return TransformersCache
