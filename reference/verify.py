"""Accept, residual, bonus: which drafted tokens stand, and the token after them.

`target` is the distribution after 0 .. K drafted tokens, [B * (K + 1)] rows; `draft` the one each drafted token was
drawn from, [B * K] rows, or None for a deterministic draft (q is one-hot). Accepted are always the first `a` drafts;
a recovered token (from the residual) or the bonus token (all accepted) follows them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import rng, rules
from .filter import Probabilities, Support
from .sample import gumbel_argmax, inverse_cdf

Law = Support | Probabilities


class Verified(NamedTuple):
    """What one round emits. See `triton_specdec.VerifyResult`."""

    tokens: NDArray[np.int64]  # [B, K + 1], PAD_TOKEN after the last emitted token
    num_accepted: NDArray[np.int32]  # [B]
    num_emitted: NDArray[np.int32]  # [B]
    log_probs: NDArray[np.float64]  # [B, K + 1], 0 after the last emitted token
    status: NDArray[np.int32]  # [B]


class VerifiedTree(NamedTuple):
    """What one walk through a tree emits. See `triton_specdec.VerifyTreeResult`."""

    tokens: NDArray[np.int64]  # [B, N], PAD_TOKEN after the last emitted token
    nodes: NDArray[np.int32]  # [B, N - 1], PAD_TOKEN after the last accepted node
    num_accepted: NDArray[np.int32]  # [B]
    num_emitted: NDArray[np.int32]  # [B]
    log_probs: NDArray[np.float64]  # [B, N], 0 after the last emitted token
    status: NDArray[np.int32]  # [B]


def usable_drafts(draft_tokens: NDArray, num_draft_tokens: NDArray, vocab_size: int) -> NDArray[np.int64]:
    """How many drafts a row really has: up to its number and to the first id outside [0, V). [B]"""
    step = np.arange(draft_tokens.shape[-1])
    usable = rules.is_usable_draft(draft_tokens, step, num_draft_tokens[:, None], vocab_size)
    return np.cumprod(usable, -1).sum(-1)


def draw_uniforms(seeds: NDArray, positions: NDArray, num_drafts: int, rule: str) -> tuple[NDArray, NDArray]:
    """Uniforms of the K accept tests, and of the draws after a = 0 .. K accepted drafts.

    Token by token, test i uses position + i: what lies behind the first rejection was never looked at, so the next
    round may look at it. A block looks at all of its tests whatever it accepts. Its test i uses number i of the
    round's first position, which no other round has; with position + i a later round would meet numbers that already
    decided this one, and the output would not follow the target.
    """
    at = positions[:, None] + np.arange(num_drafts + 1)
    if rule == "block":
        steps = np.arange(num_drafts)
        accept = rng.uniforms(seeds[:, None], positions[:, None], rules.STREAM_ACCEPT, steps)
        return accept, rng.uniforms(seeds[:, None], at, rules.STREAM_RESIDUAL)
    streams = np.array([rules.STREAM_ACCEPT, rules.STREAM_RESIDUAL])
    accept, draw = rng.uniforms(seeds[:, None], at, streams[:, None, None])
    return accept[:, :-1], draw


def accept_tokens(u: NDArray, q: NDArray, p: NDArray, usable: NDArray) -> NDArray[np.int64]:
    """Token by token: the number of drafts before the first rejection. u, q, p [B, K]; usable [B]."""
    accepted = rules.is_accepted(u, q, p) & (np.arange(p.shape[-1]) < usable[:, None])
    return np.cumprod(accepted, -1).sum(-1)


def accept_block(
    u: NDArray, q: NDArray, p: NDArray, usable: NDArray, target: Law, draft: Law | None, tokens: NDArray
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Block verification (Sun et al. 2024, algorithm 2): the longest accepted prefix, and its carry p_i."""
    batch, num_drafts = p.shape
    carry = np.ones(batch)
    accepted = np.zeros(batch, np.int64)
    accepted_carry = np.ones(batch)
    for i in range(1, num_drafts + 1):
        live = usable >= i
        carry = np.where(live, rules.block_carry(carry, p[:, i - 1], q[:, i - 1]), 0.0)
        inner = np.flatnonzero(usable > i)
        stands = live & rules.is_accepted(u[:, i - 1], 1.0, carry)
        if inner.size:
            left = _residual(target, draft, tokens, inner, np.full(inner.size, i), carry[inner]).sum(-1)
            stands[inner] = rules.is_block_accepted(u[inner, i - 1], carry[inner], left)
        accepted = np.where(stands, i, accepted)
        accepted_carry = np.where(stands, carry, accepted_carry)
    return accepted, accepted_carry


def verify(
    draft_tokens: NDArray,
    target: Law,
    draft: Law | None,
    num_draft_tokens: NDArray,
    *,
    rule: str,
    accept_uniforms: NDArray,
    draw_uniforms: NDArray,
) -> Verified:
    """One round by rule "rejection" (Leviathan et al. 2023) or "block" (Sun et al. 2024).

    Parameters
    ----------
    draft_tokens : int64 [B, K]
    target : [B * (K + 1)] rows
    draft : [B * K] rows, or None
    num_draft_tokens : int64 [B]
    accept_uniforms : float64 [B, K]
    draw_uniforms : float64 [B, K + 1], the draw after a accepted tokens uses column a
    """
    batch, num_drafts = draft_tokens.shape
    row = np.arange(batch)
    vocab = _vocab(target)
    usable = usable_drafts(draft_tokens, num_draft_tokens, vocab)
    beside_bonus = np.concatenate([draft_tokens, np.full((batch, 1), rules.PAD_TOKEN)], -1)
    p = target.prob(beside_bonus.reshape(-1, 1)).reshape(beside_bonus.shape)[:, :-1]
    q = np.ones(p.shape) if draft is None else draft.prob(draft_tokens.reshape(-1, 1)).reshape(p.shape)
    carry = np.ones(batch)
    if rule == "block":
        accepted, carry = accept_block(accept_uniforms, q, p, usable, target, draft, draft_tokens)
    else:
        accepted = accept_tokens(accept_uniforms, q, p, usable)

    # The draw: from the residual after a rejection, from all of p after the last usable draft.
    final = target.take(row * (num_drafts + 1) + accepted)
    weights = final.probs()
    rejected = np.flatnonzero(accepted < usable)
    if rejected.size:
        left = _residual(target, draft, draft_tokens, rejected, accepted[rejected], carry[rejected])
        found = left.sum(-1) > 0
        weights = weights.copy()
        weights[rejected[found]] = left[found]
    token = inverse_cdf(weights, draw_uniforms[row, accepted])
    looked = usable if rule == "block" else accepted
    return _emit(draft_tokens, accepted, looked, token, target, draft, num_draft_tokens)


def verify_coupled(
    draft_tokens: NDArray,
    target: Support,
    num_draft_tokens: NDArray,
    seeds: NDArray,
    positions: NDArray,
) -> Verified:
    """The coupled rule: accept while the draft is what plain Gumbel sampling of the target gives there."""
    batch, num_drafts = draft_tokens.shape
    at = (positions[:, None] + np.arange(num_drafts + 1)).reshape(-1)
    drawn = gumbel_argmax(target, np.repeat(seeds, num_drafts + 1), at).reshape(batch, num_drafts + 1)
    usable = usable_drafts(draft_tokens, num_draft_tokens, _vocab(target))
    same = (draft_tokens == drawn[:, :-1]) & (np.arange(num_drafts) < usable[:, None])
    accepted = np.cumprod(same, -1).sum(-1)
    token = drawn[np.arange(batch), accepted]
    return _emit(draft_tokens, accepted, accepted, token, target, None, num_draft_tokens)


def verify_tree(
    tree_tokens: NDArray, parents: NDArray, target: Support, seeds: NDArray, positions: NDArray
) -> VerifiedTree:
    """Walk a tree of drafts along what plain Gumbel sampling of the target gives, until no child holds it.

    Node 0 is the anchor. The token after a node of depth d is drawn with the noise of position + d; the walk goes on to
    the first child with that token. tree_tokens, parents int64 [B, N]; target [B * N] rows; seeds, positions int64 [B].
    """
    batch, size = tree_tokens.shape
    tokens = np.full((batch, size), rules.PAD_TOKEN, np.int64)
    nodes = np.full((batch, max(size - 1, 0)), rules.PAD_TOKEN, np.int32)
    log_probs = np.zeros((batch, size))
    status = np.zeros(batch, np.int32)
    emitted = np.zeros(batch, np.int32)
    node = np.zeros(batch, np.int64)
    live = np.arange(batch)
    for depth in range(size):
        row = live * size + node[live]
        here = target.take(row)
        drawn = gumbel_argmax(here, seeds[live], positions[live] + depth)
        tokens[live, depth] = drawn
        log_probs[live, depth] = here.log_prob(drawn[:, None])[:, 0]
        status[live] |= here.status
        emitted[live] += 1
        child = rules.is_child(np.arange(size), parents[live], node[live, None], tree_tokens[live], drawn[:, None])
        goes_on = child.any(-1)
        live, child = live[goes_on], child[goes_on]
        if not live.size:
            break
        node[live] = child.argmax(-1)
        nodes[live, depth] = node[live]
    return VerifiedTree(tokens, nodes, emitted - np.int32(1), emitted, log_probs, status)


def _emit(
    draft_tokens: NDArray,
    accepted: NDArray,
    looked: NDArray,
    token: NDArray,
    target: Law,
    draft: Law | None,
    num_draft_tokens: NDArray,
) -> Verified:
    batch, num_drafts = draft_tokens.shape
    column = np.arange(num_drafts + 1)
    emitted = column <= accepted[:, None]
    tokens = np.full((batch, num_drafts + 1), rules.PAD_TOKEN, np.int64)
    tokens[:, :num_drafts] = np.where(emitted[:, 1:], draft_tokens, rules.PAD_TOKEN)
    tokens[np.arange(batch), accepted] = token
    log_probs = np.where(emitted, target.log_prob(tokens.reshape(-1, 1)).reshape(tokens.shape), 0.0)
    # A row answers for what decided it: the steps up to the first rejection, or all of a block.
    decided = column <= looked[:, None]
    status = np.bitwise_or.reduce(np.where(decided, target.status.reshape(tokens.shape), 0), -1)
    used = decided[:, :num_drafts] & (column[:-1] < num_draft_tokens[:, None])
    if num_drafts:
        outside = ((draft_tokens < 0) & (draft_tokens != rules.PAD_TOKEN)) | (draft_tokens >= _vocab(target))
        status |= (outside & used).any(-1) * np.int32(rules.STATUS_DRAFT_ID)
        if draft is not None:
            draft_status = draft.status.reshape(batch, num_drafts)
            status |= np.bitwise_or.reduce(np.where(used, draft_status, 0), -1)
    count = accepted.astype(np.int32)
    return Verified(tokens, count, count + np.int32(1), log_probs, status.astype(np.int32))


def _residual(
    target: Law, draft: Law | None, tokens: NDArray, row: NDArray, step: NDArray, carry: NDArray
) -> NDArray[np.float64]:
    """max(carry * p - q, 0) of some rows after `step` drafts, [len(row), V]; both laws as they are at that step."""
    num_drafts = tokens.shape[-1]
    p = carry[:, None] * target.take(row * (num_drafts + 1) + step).probs()
    if draft is None:
        q = np.zeros_like(p)
        q[np.arange(len(row)), tokens[row, step]] = 1.0
        return rules.residual(p, q)
    q = draft.take(row * num_drafts + step).probs()
    # A smaller draft vocabulary: the missing ids have q = 0.
    p[:, : q.shape[-1]] = rules.residual(p[:, : q.shape[-1]], q)
    return p


def _vocab(law: Law) -> int:
    return (law.logits if isinstance(law, Support) else law.weights).shape[-1]
