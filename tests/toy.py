"""A model small enough to reason about: logits depend on the last two tokens, read back from its cache.

What it reads from the cache is what was written at that slot, so a cache that is one token off changes its text.
"""

import torch


class ToyCache:
    """Remembers which token stands in which slot."""

    def __init__(self, batch_size, capacity):
        self.slots = torch.full((batch_size, capacity), -1)
        self.lengths = torch.zeros(batch_size, dtype=torch.int32)
        self.bound = 0


class ToyModel:
    """Logits [V] after a token x that follows w: first[x] + second[w]."""

    def __init__(self, vocab_size, seed, *, near=None, noise=0.0, max_length=10_000):
        generator = torch.Generator().manual_seed(seed)
        self.vocab_size, self.max_length, self.device = vocab_size, max_length, torch.device("cpu")
        self.first, self.second = torch.randn(2, vocab_size, vocab_size, generator=generator) * 1.5
        if near is not None:
            self.first = near.first[:vocab_size, :vocab_size] + noise * self.first
            self.second = near.second[:vocab_size, :vocab_size] + noise * self.second
        self.caches = []

    def new_cache(self, batch_size, capacity):
        self.caches.append(ToyCache(batch_size, capacity))
        return self.caches[-1]

    def forward(self, tokens, cache, *, last=None):
        batch, n = tokens.shape
        row = torch.arange(batch)[:, None]
        at = cache.lengths.long()[:, None] + torch.arange(n)
        assert int(cache.lengths.max()) <= cache.bound
        assert int(at.max()) < cache.slots.shape[1]
        cache.slots[row, at] = tokens
        before = torch.where(at > 0, cache.slots[row, (at - 1).clamp(min=0)], 0)
        assert (before >= 0).all()
        cache.lengths += n
        cache.bound += n
        logits = self.first[tokens] + self.second[before]
        return logits if last is None else logits[torch.arange(batch), last][:, None]

    def __call__(self, tokens):
        """The same as a function of a whole sequence, for the reference's loop."""
        ids = torch.tensor(tokens)
        before = torch.cat([torch.zeros(1, dtype=torch.int64), ids[:-1]])
        return (self.first[ids] + self.second[before]).numpy()
