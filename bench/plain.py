"""Plain PyTorch, written as well as one can: no host reads, `topk` instead of a sort where k allows it.

The provider that all ratios are against. Rows may differ in everything; where all share one filter, only that is done.
"""

from __future__ import annotations

import torch

from .inputs import PAGE, Cache, Occurred, Params, Round, Rows


def filtered(logits: torch.Tensor, params: Params) -> torch.Tensor:
    """Filtered and renormalised probabilities float32 [N, V]."""
    one = params.one
    if one is None:
        return _sorted(logits, params)
    if one.temperature == 0:
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    if one.top_k:
        probs, ids = _top(logits, params)
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, ids, probs)
    probs = _softmax(logits, one.temperature)
    if one.min_p:
        probs = probs.masked_fill(probs < one.min_p * probs.amax(-1, keepdim=True), 0)
    elif one.top_p < 1:
        probs = _nucleus(probs, one.top_p)
    else:
        return probs
    return probs.div_(probs.sum(-1, keepdim=True))


def _softmax(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """In one kernel where there is no temperature."""
    if temperature == 1:
        return torch.softmax(logits, -1, dtype=torch.float32)
    return torch.softmax(logits.float().div_(temperature), -1)


def _nucleus(probs: torch.Tensor, top_p: float | torch.Tensor) -> torch.Tensor:
    """Zeros behind the nucleus; not renormalised."""
    ranked, ids = probs.sort(-1, descending=True)
    before = ranked.cumsum(-1).sub_(ranked)
    return torch.zeros_like(probs).scatter_(-1, ids, ranked.masked_fill_(before >= top_p, 0))


def _top(logits: torch.Tensor, params: Params) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and ids [N, k] of rows that share a top-k, with or without top-p inside it."""
    one = params.one
    assert one is not None
    values, ids = logits.topk(min(one.top_k, logits.shape[-1]), -1)
    probs = _softmax(values, one.temperature)
    if one.top_p < 1:
        before = probs.cumsum(-1) - probs
        probs = probs.masked_fill(before >= one.top_p, 0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs, ids


def _sorted(logits: torch.Tensor, params: Params) -> torch.Tensor:
    """Rows whose filters differ: one sort serves top-k and top-p of all."""
    vocab = logits.shape[-1]
    temperature = params.temperature.float()[:, None]
    greedy = temperature == 0
    ranked, ids = logits.sort(stable=True, dim=-1, descending=True)
    weight = ((ranked.float() - ranked[:, :1].float()) / temperature.masked_fill(greedy, 1)).exp_()
    k = torch.where(params.top_k <= 0, vocab, params.top_k).masked_fill(greedy[:, 0], 1)
    weight.masked_fill_(torch.arange(vocab, device=logits.device) >= k[:, None], 0)
    total = weight.sum(-1, keepdim=True)
    before = weight.cumsum(-1).sub_(weight)
    off = params.top_p >= 1
    limit = torch.where(off[:, None], torch.inf, params.top_p.float()[:, None] * total)
    weight.masked_fill_((before >= limit) | (weight < params.min_p.float()[:, None]), 0)
    weight /= weight.sum(-1, keepdim=True)
    return torch.zeros_like(weight).scatter_(-1, ids, weight)


def draw(probs: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """One id a row, in proportion to its probability: an exponential race, which needs no host read."""
    noise = torch.empty_like(probs).exponential_(generator=generator)
    return (probs / noise).argmax(-1)


def sampled(given: Rows) -> torch.Tensor:
    """Logits -> one token a row int64 [N]."""
    one = given.params.one
    if one is not None and one.temperature == 0:
        return given.logits.argmax(-1)
    if one is not None and one.top_k:
        probs, ids = _top(given.logits, given.params)
        return ids.gather(-1, draw(probs)[:, None])[:, 0]
    return draw(filtered(given.logits, given.params))


def verified(given: Round, every: Params, draft_probs: torch.Tensor | None) -> torch.Tensor:
    """Tokens int64 [B, K + 1] by rejection, -1 behind the last emitted one.

    `every` has the filter of each of the B * (K + 1) rows; the draft's probabilities [B, K, V] are at hand.
    """
    batch, drafts = given.tokens.shape
    flat = given.target.reshape(-1, given.target.shape[-1])
    p = filtered(flat, every).view(batch, drafts + 1, -1)
    ids = given.tokens[..., None]
    of_target = p[:, :-1].gather(-1, ids)[..., 0]
    of_draft = torch.ones_like(of_target) if draft_probs is None else draft_probs.gather(-1, ids)[..., 0]
    accepts = torch.rand_like(of_target) * of_draft < of_target
    accepted = accepts.long().cumprod(-1).sum(-1)
    row = torch.arange(batch, device=p.device)
    last = p[row, accepted]
    step = accepted.clamp(max=drafts - 1)
    if draft_probs is None:
        left = last.scatter(-1, given.tokens[row, step][:, None], 0)
    else:
        left = (last - draft_probs[row, step]).clamp_(min=0)
    recovers = (accepted < drafts)[:, None] & (left.sum(-1, keepdim=True) > 0)
    token = draw(torch.where(recovers, left, last))
    column = torch.arange(drafts + 1, device=p.device)
    padded = torch.nn.functional.pad(given.tokens, (0, 1), value=-1)
    out = torch.where(column < accepted[:, None], padded, -1)
    return torch.where(column == accepted[:, None], token[:, None], out)


def truncated(given: Cache) -> None:
    """One operation of the KV cache, in place; scrub and compact go over the layers one by one."""
    b, moves = given.source.shape
    if given.operation == "compact":
        lane = torch.arange(moves, device=given.source.device)
        target = (given.start[:, None] + lane).long()
        source = torch.where(lane < given.count[:, None], given.source.long(), target)
        row = torch.arange(b, device=source.device)[:, None]
        for cache in given.caches:
            cache[row, :, target] = cache[row, :, source]
        return
    after = torch.minimum(given.lengths, given.keep.clamp(min=0))
    if given.operation == "scrub":
        slots = torch.arange(given.caches[0].shape[2], device=after.device)
        dropped = (slots >= after[:, None]) & (slots < given.lengths[:, None])
        for cache in given.caches:
            cache.masked_fill_(dropped[:, None, :, None], 0)
    elif given.operation == "pages":
        _give_back(given, after)
    given.lengths.copy_(after)


def _give_back(given: Cache, after: torch.Tensor) -> None:
    """Pages behind the kept length go to the free list in row order, without a host read."""
    table = given.table
    block = torch.arange(table.shape[1], device=table.device)
    freed = (block >= (after[:, None] + PAGE - 1) // PAGE) & (table >= 0)
    place = freed.flatten().long().cumsum(0) - 1 + given.num_free
    # Pages that stay are written behind the list.
    room = torch.cat([given.free, given.free.new_empty(1)])
    room.scatter_(0, torch.where(freed.flatten(), place, len(given.free)), table.flatten())
    given.free.copy_(room[:-1])
    given.num_free.add_(freed.sum().int())
    table.masked_fill_(freed, -1)


def penalised(given: Occurred) -> None:
    """Repetition, frequency and presence penalty of all steps, in place; row i also counts the first i drafts."""
    x = given.logits
    batch, columns, vocab = x.shape
    drafted = torch.zeros(batch, columns, vocab, dtype=torch.int32, device=x.device)
    if columns > 1:
        ones = torch.ones(batch, columns - 1, 1, dtype=torch.int32, device=x.device)
        drafted[:, 1:].scatter_(-1, given.tokens[..., None], ones)
    count = drafted.cumsum(1, dtype=torch.int32).add_(given.counts[:, None])
    seen = (count > 0) | given.prompt_mask[:, None]
    y = x.float()
    y = torch.where(seen, torch.where(y > 0, y / given.repetition, y * given.repetition), y)
    y = y - given.frequency * count - given.presence * (count > 0)
    x.copy_(y)
