"""Accept, residual, bonus on the device, out of the descriptors: no [rows, V] tensor is written.

1. residual, grid (requests, steps, slices): the mass of max(carry * p - q, 0) of each tile, at the step where a row
   rejects (all steps under "block"). Each program finds that step itself, from K gathered p and q.
2. emit, grid (requests): accepts, draws a tile by these masses and a token in that one tile, and writes the result.
   The bonus token, and a residual without mass, are drawn from p, as in `sample`.

Under "coupled" the first launch draws the target's own token at each position, and the second compares.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..filter import FilteredLogits
from ..sample import Drawing
from ..verify import VerifyResult
from . import rng
from .law import Form, any_bits, law_of, needed_tiles, row_of, row_probs, row_status, support_of, token_probs
from .rules import (
    PAD_TOKEN,
    STATUS_DRAFT_ID,
    STREAM_ACCEPT,
    STREAM_RESIDUAL,
    block_carry,
    is_accepted,
    is_block_accepted,
    is_usable_draft,
    residual,
)
from .sample import draw_by_uniform, pick_in_tile, pick_tile, sample
from .tiles import tiling

# Drafts that a program looks at together, and ids that one program of the residual reads.
STEPS = tl.constexpr(16)
RESIDUAL_SLICE = 4096


class Round(NamedTuple):
    """The drafts of a round and the noise that decides it."""

    drafts: torch.Tensor | tl.tensor  # int64 [B, K]
    number: torch.Tensor | tl.tensor  # int64 [B]
    num_drafts: int | tl.tensor  # K
    seeds: torch.Tensor | tl.tensor  # int64 [B]
    positions: torch.Tensor | tl.tensor  # int64 [B]
    uniforms: torch.Tensor | tl.tensor  # float64 [B, K + 1]
    drawn: torch.Tensor | tl.tensor  # int64 [B, K + 1], the target's own tokens under "coupled"


@triton.jit
def load_drafts(round, b, steps):
    """Draft tokens of a row at some steps; PAD_TOKEN behind its K."""
    return tl.load(round.drafts + b * round.num_drafts + steps, mask=steps < round.num_drafts, other=PAD_TOKEN)


@triton.jit
def count_usable(round, b, vocab_size):
    """Drafts of a row up to its number and to the first id outside."""
    number = tl.load(round.number + b)
    # Between 0 and K before it becomes 32 bits wide.
    usable = tl.maximum(tl.minimum(number, round.num_drafts), 0).to(tl.int32)
    for first in range(0, round.num_drafts, STEPS):
        steps = first + tl.arange(0, STEPS)
        good = is_usable_draft(load_drafts(round, b, steps), steps, number, vocab_size)
        usable = tl.minimum(usable, tl.min(tl.where(good, round.num_drafts, steps), 0).to(tl.int32))
    return usable


@triton.jit
def test_uniforms(round, b, steps, RULE: tl.constexpr, METHOD: tl.constexpr):
    """The uniforms of the accept tests at some steps; under "block" they belong to the round's first position."""
    if METHOD == "uniforms":
        u = tl.load(round.uniforms + b * (round.num_drafts + 1) + steps, mask=steps < round.num_drafts, other=0.0)
    else:
        seed = tl.load(round.seeds + b)
        position = tl.load(round.positions + b) + tl.zeros_like(steps)
        if RULE == "block":
            u = rng.uniforms(seed, position, STREAM_ACCEPT, steps)
        else:
            u = rng.uniforms(seed, position + steps, STREAM_ACCEPT, tl.zeros_like(steps))
    return u


@triton.jit
def draw_uniform(round, b, accepted, METHOD: tl.constexpr):
    """The uniform of the draw after `accepted` tokens."""
    if METHOD == "uniforms":
        u = tl.load(round.uniforms + b * (round.num_drafts + 1) + round.num_drafts)
    else:
        position = tl.load(round.positions + b) + accepted
        u = rng.uniforms(tl.load(round.seeds + b), position, STREAM_RESIDUAL, tl.zeros_like(position))
    return u


@triton.jit
def gathered(
    target,
    draft,
    round,
    b,
    steps,
    usable,
    zero,
    P: tl.constexpr,
    P_MASK: tl.constexpr,
    P_ALIGNED: tl.constexpr,
    Q: tl.constexpr,
    Q_MASK: tl.constexpr,
    Q_ALIGNED: tl.constexpr,
):
    """p and q float64 of a row's drafts at some steps; 0 behind the usable ones."""
    tokens = load_drafts(round, b, steps)
    live = steps < usable
    p, _ = token_probs(target, b * (round.num_drafts + 1) + steps, tokens, live, zero, P, P_MASK, P_ALIGNED)
    if Q == "none":
        q = tl.where(live, 1.0, 0.0).to(tl.float64)
    else:
        q, _ = token_probs(draft, b * round.num_drafts + steps, tokens, live, zero, Q, Q_MASK, Q_ALIGNED)
    return p, q


@triton.jit
def carry_of(p, q, first, until, carry):
    """The carry of block verification after the steps [first, until) of a chunk of p and q."""
    lane = tl.arange(0, STEPS)
    for i in range(0, STEPS):
        here = lane == i
        moved = block_carry(carry, tl.sum(tl.where(here, p, 0.0), 0), tl.sum(tl.where(here, q, 0.0), 0))
        carry = tl.where(first + i < until, moved, carry)
    return carry


@triton.jit
def residual_weights(
    target,
    draft,
    round,
    b,
    step,
    carry,
    ids,
    inside,
    zero,
    P: tl.constexpr,
    P_MASK: tl.constexpr,
    P_ALIGNED: tl.constexpr,
    Q: tl.constexpr,
    Q_MASK: tl.constexpr,
    Q_ALIGNED: tl.constexpr,
):
    """max(carry * p - q, 0) of ids after `step` drafts."""
    p = row_probs(target, b * (round.num_drafts + 1) + step, ids, inside, zero, P, P_MASK, P_ALIGNED)
    p = p * carry.to(p.dtype)
    if Q == "none":
        drafted = tl.load(round.drafts + b * round.num_drafts + step)
        q = tl.where(ids == drafted, 1.0, 0.0).to(p.dtype)
    else:
        q = row_probs(draft, b * round.num_drafts + step, ids, inside, zero, Q, Q_MASK, Q_ALIGNED)
    return residual(p, q)


@triton.jit
def _residual_kernel(
    target,  # Law [B * (K + 1)]
    draft,  # Law [B * K]
    round,  # Round
    mass_ptr,  # [B, S, T], S = K under "block", else 1
    zero,
    RULE: tl.constexpr,
    METHOD: tl.constexpr,
    P: tl.constexpr,
    P_MASK: tl.constexpr,
    P_ALIGNED: tl.constexpr,
    Q: tl.constexpr,
    Q_MASK: tl.constexpr,
    Q_ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    usable = count_usable(round, b, target.full_vocab_size)
    carry = tl.full([], 1.0, tl.float64)
    if RULE == "block":
        step = tl.program_id(1)
        for first in range(0, step, STEPS):
            steps = first + tl.arange(0, STEPS).to(tl.int64)
            p, q = gathered(target, draft, round, b, steps, usable, zero, P, P_MASK, P_ALIGNED, Q, Q_MASK, Q_ALIGNED)
            carry = carry_of(p, q, first, step, carry)
    else:
        step = first_rejection(
            target, draft, round, b, usable, zero, METHOD, P, P_MASK, P_ALIGNED, Q, Q_MASK, Q_ALIGNED
        )
    if step < usable:
        tile = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
        ids = tile[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        needed = needed_tiles(target, b * (round.num_drafts + 1) + step, tile, P)
        weight = residual_weights(
            target,
            draft,
            round,
            b,
            step,
            carry,
            ids,
            needed[:, None],
            zero,
            P,
            P_MASK,
            P_ALIGNED,
            Q,
            Q_MASK,
            Q_ALIGNED,
        )
        place = (b * tl.num_programs(1) + tl.program_id(1)) * target.num_tiles + tile
        total = tl.sum(weight, 1).to(mass_ptr.dtype.element_ty)
        tl.store(mass_ptr + place, total, mask=tile < target.num_tiles)


@triton.jit
def first_rejection(
    target,
    draft,
    round,
    b,
    usable,
    zero,
    METHOD: tl.constexpr,
    P: tl.constexpr,
    P_MASK: tl.constexpr,
    P_ALIGNED: tl.constexpr,
    Q: tl.constexpr,
    Q_MASK: tl.constexpr,
    Q_ALIGNED: tl.constexpr,
):
    """The step of the first rejected draft, token by token; `usable` where none is."""
    stop = usable
    first = 0
    while first < stop:
        steps = first + tl.arange(0, STEPS).to(tl.int64)
        p, q = gathered(target, draft, round, b, steps, usable, zero, P, P_MASK, P_ALIGNED, Q, Q_MASK, Q_ALIGNED)
        accepted = is_accepted(test_uniforms(round, b, steps, "rejection", METHOD), q, p)
        stop = tl.minimum(stop, tl.min(tl.where(accepted, usable, steps.to(tl.int32)), 0))
        first += STEPS
    return stop


@triton.jit
def block_accepted(
    target,
    draft,
    round,
    mass_ptr,
    b,
    usable,
    zero,
    METHOD: tl.constexpr,
    P: tl.constexpr,
    P_MASK: tl.constexpr,
    P_ALIGNED: tl.constexpr,
    Q: tl.constexpr,
    Q_MASK: tl.constexpr,
    Q_ALIGNED: tl.constexpr,
    PADDED: tl.constexpr,
):
    """The longest prefix that stands as a block, and its carry."""
    lane = tl.arange(0, STEPS)
    tile = tl.arange(0, PADDED)
    accepted = tl.full([], 0, tl.int32)
    carry = tl.full([], 1.0, tl.float64)
    carry_there = tl.full([], 1.0, tl.float64)
    for first in range(0, usable, STEPS):
        steps = first + lane.to(tl.int64)
        p, q = gathered(target, draft, round, b, steps, usable, zero, P, P_MASK, P_ALIGNED, Q, Q_MASK, Q_ALIGNED)
        u = test_uniforms(round, b, steps, "block", METHOD)
        for i in range(0, tl.minimum(usable - first, STEPS)):
            here = lane == i
            carry = block_carry(carry, tl.sum(tl.where(here, p, 0.0), 0), tl.sum(tl.where(here, q, 0.0), 0))
            test = tl.sum(tl.where(here, u, 0.0), 0)
            length = first + i + 1
            # The residual after the whole prefix; there is none behind the last usable draft.
            place = (b * round.num_drafts + length) * target.num_tiles + tile
            inner = tile < tl.where(length < usable, target.num_tiles, 0)
            left = tl.sum(tl.load(mass_ptr + place, mask=inner, other=0.0).to(tl.float64), 0)
            inside = is_block_accepted(test, carry, left)
            stands = tl.where(length < usable, inside, is_accepted(test, 1.0, carry))
            accepted = tl.where(stands, length, accepted)
            carry_there = tl.where(stands, carry, carry_there)
    return accepted, carry_there


@triton.jit
def draw_from_target(
    target,
    at,
    list_ptr,
    u,
    zero,
    P: tl.constexpr,
    P_MASK: tl.constexpr,
    P_ALIGNED: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """A token from all of p in row `at`."""
    if P == "logits":
        row = row_of(target, at, list_ptr, zero, P_ALIGNED)
        token = draw_by_uniform(row, support_of(target, at), u, P_MASK, WIDTH, PADDED)
    else:
        tile = tl.arange(0, PADDED)
        here = tile < target.num_tiles
        mass = tl.load(target.tile_sum + at * target.num_tiles + tile, mask=here, other=0.0).to(tl.float64)
        chosen, inside = pick_tile(mass, u, PADDED)
        ids = chosen * WIDTH + tl.arange(0, WIDTH)
        p = row_probs(target, at, ids, ids >= 0, zero, P, P_MASK, P_ALIGNED)
        token = pick_in_tile(p.to(tl.float64), ids, inside)
    return token


@triton.jit
def _emit_kernel(
    target,  # Law [B * (K + 1)]
    draft,  # Law [B * K]
    round,  # Round
    mass_ptr,  # [B, S, T]
    list_ptr,  # [B, T] scratch
    token_ptr,  # [B, K + 1]
    accepted_ptr,  # [B]
    emitted_ptr,  # [B]
    log_prob_ptr,  # [B, K + 1]
    status_ptr,  # [B]
    zero,
    RULE: tl.constexpr,
    METHOD: tl.constexpr,
    P: tl.constexpr,
    P_MASK: tl.constexpr,
    P_ALIGNED: tl.constexpr,
    Q: tl.constexpr,
    Q_MASK: tl.constexpr,
    Q_ALIGNED: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    columns = round.num_drafts + 1
    usable = count_usable(round, b, target.full_vocab_size)
    carry = tl.full([], 1.0, tl.float64)
    if RULE == "coupled":
        accepted = usable
        for first in range(0, usable, STEPS):
            steps = first + tl.arange(0, STEPS)
            own = tl.load(round.drawn + b * columns + steps, mask=steps < usable, other=0)
            same = (own == load_drafts(round, b, steps)) | (steps >= usable)
            accepted = tl.minimum(accepted, tl.min(tl.where(same, usable, steps), 0))
        token = tl.load(round.drawn + b * columns + accepted)
        looked = accepted
    else:
        if RULE == "block":
            accepted, carry = block_accepted(
                target,
                draft,
                round,
                mass_ptr,
                b,
                usable,
                zero,
                METHOD,
                P,
                P_MASK,
                P_ALIGNED,
                Q,
                Q_MASK,
                Q_ALIGNED,
                PADDED,
            )
            looked = usable
            place = b * round.num_drafts + accepted
        else:
            accepted = first_rejection(
                target, draft, round, b, usable, zero, METHOD, P, P_MASK, P_ALIGNED, Q, Q_MASK, Q_ALIGNED
            )
            looked = accepted
            place = b
        u = draw_uniform(round, b, accepted, METHOD)
        tile = tl.arange(0, PADDED)
        left = tile < tl.where(accepted < usable, target.num_tiles, 0)
        mass = tl.load(mass_ptr + place * target.num_tiles + tile, mask=left, other=0.0).to(tl.float64)
        if tl.sum(mass, 0) > 0:
            chosen, inside = pick_tile(mass, u, PADDED)
            ids = chosen * WIDTH + tl.arange(0, WIDTH)
            weight = residual_weights(
                target,
                draft,
                round,
                b,
                accepted,
                carry,
                ids,
                ids >= 0,
                zero,
                P,
                P_MASK,
                P_ALIGNED,
                Q,
                Q_MASK,
                Q_ALIGNED,
            )
            token = pick_in_tile(weight.to(tl.float64), ids, inside).to(tl.int64)
        else:
            token = draw_from_target(
                target,
                b * columns + accepted,
                list_ptr + b * target.num_tiles,
                u,
                zero,
                P,
                P_MASK,
                P_ALIGNED,
                WIDTH,
                PADDED,
            ).to(tl.int64)

    # What decided the row: the steps up to the first rejection, or all of a block.
    status = tl.full([], 0, tl.int32)
    number = tl.load(round.number + b)
    for first in range(0, columns, STEPS):
        step = first + tl.arange(0, STEPS).to(tl.int64)
        here = step < columns
        drafted = load_drafts(round, b, step)
        out = tl.where(step < accepted, drafted, tl.where(step == accepted, token, PAD_TOKEN))
        tl.store(token_ptr + b * columns + step, out, mask=here)
        emitted = here & (step <= accepted)
        _, log_p = token_probs(target, b * columns + step, out, emitted, zero, P, P_MASK, P_ALIGNED)
        tl.store(log_prob_ptr + b * columns + step, tl.where(emitted, log_p, 0.0).to(tl.float32), mask=here)
        decided = here & (step <= looked)
        status = status | any_bits(row_status(target, b * columns + step, decided, P))
        used = decided & (step < round.num_drafts) & (step < number)
        outside = ((drafted < 0) & (drafted != PAD_TOKEN)) | (drafted >= target.full_vocab_size)
        status = status | any_bits(tl.where(used & outside, STATUS_DRAFT_ID, 0))
        if Q != "none":
            status = status | any_bits(row_status(draft, b * round.num_drafts + step, used, Q))
    tl.store(accepted_ptr + b, accepted)
    tl.store(emitted_ptr + b, accepted + 1)
    tl.store(status_ptr + b, status)


def verify(
    draft_tokens: torch.Tensor,
    target: FilteredLogits | torch.Tensor,
    draft: FilteredLogits | torch.Tensor | None,
    num_draft_tokens: torch.Tensor,
    rule: str,
    seeds: torch.Tensor | None,
    positions: torch.Tensor | None,
    uniforms: torch.Tensor | None,
) -> VerifyResult:
    """See `triton_specdec.verify`; either seeds and positions, or uniforms. Two launches on descriptors."""
    batch, num_drafts = draft_tokens.shape
    device, columns = draft_tokens.device, num_drafts + 1
    tokens = torch.empty(batch, columns, dtype=torch.int64, device=device)
    accepted = torch.empty(batch, dtype=torch.int32, device=device)
    emitted, status = torch.empty_like(accepted), torch.empty_like(accepted)
    log_probs = torch.empty(batch, columns, dtype=torch.float32, device=device)
    result = VerifyResult(tokens, accepted, emitted, log_probs, status)
    if not batch:
        return result
    p, p_form = law_of(target)
    q, q_form = (p, Form("none", False, False)) if draft is None or rule == "coupled" else law_of(draft)
    drawn = tokens
    if rule == "coupled":
        assert isinstance(target, FilteredLogits)
        assert seeds is not None
        assert positions is not None
        at = positions[:, None] + torch.arange(columns, device=device)
        drawn = sample(target, Drawing("gumbel", seeds[:, None].expand(batch, columns), at))
    noise = uniforms if seeds is None else seeds
    assert noise is not None
    drafts = Round(
        draft_tokens.contiguous(),
        num_draft_tokens.contiguous(),
        num_drafts,
        noise if seeds is None else seeds.contiguous(),
        noise if positions is None else positions.contiguous(),
        noise if uniforms is None else uniforms.contiguous(),
        drawn,
    )
    cut = tiling(p.full_vocab_size)
    steps = num_drafts if rule == "block" else 1
    forms = {
        "RULE": rule,
        "METHOD": "seeds" if uniforms is None else "uniforms",
        "P": p_form.kind,
        "P_MASK": p_form.has_mask,
        "P_ALIGNED": p_form.aligned,
        "Q": q_form.kind,
        "Q_MASK": q_form.has_mask,
        "Q_ALIGNED": q_form.aligned,
    }
    # Given probabilities may be of any size; those out of logits are not.
    wide = torch.float64 if "probs" in (p_form.kind, q_form.kind) else torch.float32
    mass = torch.empty(batch, max(steps, 1), cut.tiles, dtype=wide, device=device)
    if rule != "coupled" and num_drafts:
        tiles = max(1, RESIDUAL_SLICE // cut.width)
        _residual_kernel[(batch, steps, triton.cdiv(cut.tiles, tiles))](
            p, q, drafts, mass, 0, **forms, ROWS=tiles, WIDTH=cut.width, num_warps=4, enable_fp_fusion=False
        )
    scratch = torch.empty(batch, cut.tiles, dtype=torch.int32, device=device)
    _emit_kernel[(batch,)](
        p,
        q,
        drafts,
        mass,
        scratch,
        *result,
        0,
        **forms,
        WIDTH=cut.width,
        PADDED=cut.padded,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return result
