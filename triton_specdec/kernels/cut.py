"""Where a row's support ends: the last kept token, how many are kept, and their mass.

Tokens are integers that ascend in rank order, (rank_key << 32) | id, and a support is all of them up to the cut. At
most CANDIDATES of them are sorted, and the rules applied in order; all else is about which ones:

- The n-th largest tile maximum bounds the support: what lies above it is in the n tiles whose maximum reaches it. So
  the top-k lie in k tiles, and a nucleus in the first few, or in as many as a sample of the row suggests.
- A support of more tokens is bracketed: of the keys in [first, last) some are kept. Pivots in the bracket are counted
  and weighed in one pass over the row, until few enough tokens are left in it, or ties of a single value.

Guesses only decide what is read next. What is kept is decided by counts and masses of tokens that were read.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .rules import LARGEST, is_in_min_p, is_in_min_tokens, is_in_top_k, is_in_top_p
from .tiles import (
    CHUNK,
    END,
    exact_weights,
    fast_weights,
    key_of,
    list_tiles,
    load_ids,
    load_listed,
    load_masses,
    load_maxima,
    value_of,
)

CANDIDATES = tl.constexpr(2048)
PIVOTS = tl.constexpr(8)
# Tiles that hold most nuclei: what is read first where no top-k says how many are needed, and four times as many next.
FEW = tl.constexpr(16)
# A filter that is off holds a value that keeps everything: this top-k, twice this top-p, a min-p of 0.
FAR = tl.constexpr(2**62)
MOST_ROUNDS = tl.constexpr(64)
LAST = tl.constexpr(2**63 - 1)
LOWEST = tl.constexpr(-(2**63))

# What is searched: among the tops of the tiles; the top-k alone, in the bracket; the support, in the bracket.
TOPS = tl.constexpr(0)
TOP_K = tl.constexpr(1)
BRACKET = tl.constexpr(2)
FOUND = tl.constexpr(3)


class Filters(NamedTuple):
    """The filters of a row; see FAR for those that are off."""

    k: tl.tensor  # int64
    p: tl.tensor  # float64
    min_p: tl.tensor  # float64
    least: tl.tensor  # int64, min_tokens_to_keep


class Bracket(NamedTuple):
    """Every token with a key < first is kept, none with a key >= last is."""

    first: tl.tensor  # int32
    rank: tl.tensor  # int32, the tokens before first
    mass: tl.tensor  # float64, their mass
    last: tl.tensor  # int32
    rank_last: tl.tensor  # int32, the tokens before last, or more


@triton.jit
def keeps(rank, before, weight, total, filters):
    """Whether a token stays that `rank` tokens of mass `before` precede."""
    stays = is_in_top_k(rank, filters.k) & is_in_top_p(before, filters.p, total) & is_in_min_p(weight, filters.min_p)
    return is_in_min_tokens(rank, filters.least) | stays


@triton.jit
def nth_top(row, want, need, first, last, PADDED: tl.constexpr):
    """The smallest key up to which there are `want` tiles with a mass of `need` in all; `last` if there are not."""
    tile_keys = key_of(load_maxima(row, PADDED))
    tile_mass = load_masses(row, PADDED).to(tl.float32)
    while first < last:
        # Halfway without overflow, rounded down.
        at = (first & last) + ((first ^ last) >> 1)
        inside = tile_keys <= at
        enough = (tl.sum(inside.to(tl.int32), 0) >= want) & (tl.sum(tl.where(inside, tile_mass, 0.0), 0) >= need)
        last = tl.where(enough, at, last)
        first = tl.where(enough, first, at + 1)
    return last


@triton.jit
def last_in_min_p(row, min_p, first, last):
    """The last key in [first, last] whose weight reaches min_p <= 1; that of `first`, the maximum, does."""
    while first < last:
        at = (first & last) + ((first ^ last) >> 1) + 1
        enough = is_in_min_p(exact_weights(value_of(at), row), min_p)
        first = tl.where(enough, at, first)
        last = tl.where(enough, last, at - 1)
    return first


@triton.jit
def gather(row, first, last, listed, HAS_MASK: tl.constexpr, WIDTH: tl.constexpr):
    """Writes as many as fit of the tokens with keys in [first, last); returns their number, mass, and last in rank."""
    ROWS: tl.constexpr = CHUNK // WIDTH if CHUNK > WIDTH else 1
    count = tl.full([], 0, tl.int32)
    mass = tl.full([], 0.0, tl.float64)
    lowest = tl.full([], LOWEST, tl.int64)
    tl.debug_barrier()
    for start in range(0, listed, ROWS):
        x, ids = load_listed(row, start, listed, HAS_MASK, ROWS, WIDTH)
        key = key_of(x)
        inside = (key >= first) & (key < last)
        one = inside.to(tl.int32)
        place = count + tl.cumsum(one, 0) - 1
        token = (key.to(tl.int64) << 32) | ids.to(tl.int64)
        tl.store(row.candidates + place, token, mask=inside & (place < CANDIDATES))
        count += tl.sum(one, 0)
        mass += tl.sum(tl.where(inside, fast_weights(x, row), 0.0), 0).to(tl.float64)
        lowest = tl.maximum(lowest, tl.max(tl.where(inside, token, LOWEST), 0))
    tl.debug_barrier()
    return count, mass, lowest


@triton.jit
def rank_candidates(row, count, bracket, filters, total, sum_top_k, sum_all):
    """Sorts `count` candidates that follow the bracket's first tokens, and applies the rules to them in order.

    Where they complete the top-k (`sum_top_k`) or all there is (`sum_all`), their own mass is the exact total. Returns
    the last kept token, the number and mass of the tokens up to it, the mass up to the last candidate, and the total.
    """
    lane = tl.arange(0, CANDIDATES)
    valid = lane < count
    token = tl.sort(tl.load(row.candidates + lane, mask=valid, other=LAST))
    weight = tl.where(valid, exact_weights(value_of((token >> 32).to(tl.int32)), row), 0.0)
    rank = bracket.rank + lane
    up_to = bracket.mass + tl.cumsum(weight, 0)
    everything = bracket.mass + tl.sum(weight, 0)
    in_k = is_in_top_k(rank, filters.k) | is_in_min_tokens(rank, filters.least)
    top_k = bracket.mass + tl.sum(tl.where(in_k, weight, 0.0), 0)
    total = tl.where(sum_top_k, top_k, tl.where(sum_all, everything, total))
    kept = keeps(rank, up_to - weight, weight, total, filters) & valid
    number = tl.sum(kept.to(tl.int32), 0)
    at = lane == number - 1
    cut = tl.sum(tl.where(at, token, 0), 0)
    mass = tl.where(number == 0, bracket.mass, tl.sum(tl.where(at, up_to, 0.0), 0))
    return cut, bracket.rank + number, mass, everything, total


@triton.jit
def guess_pivots(row, bracket, filters, total, mass_all, is_first, HAS_MASK: tl.constexpr, WIDTH: tl.constexpr):
    """Keys around the cut that an even sample of the row suggests [PIVOTS], and a key behind it with its rank.

    What the sample holds of the bracket stands for all of it: once the bracket is a part of the row, for its size.
    """
    SAMPLE: tl.constexpr = CANDIDATES
    lane = tl.arange(0, SAMPLE)
    tile = (lane // WIDTH) * row.num_tiles // (SAMPLE // WIDTH if SAMPLE > WIDTH else 1)
    key = tl.sort(key_of(load_ids(row, tile * WIDTH + lane % WIDTH, HAS_MASK)))
    passed = tl.sum((key < bracket.first).to(tl.int32), 0)
    inside = (key >= bracket.first) & (key < bracket.last)
    weight = tl.where(inside, fast_weights(value_of(key), row), 0.0)
    number = tl.maximum(tl.sum(inside.to(tl.int32), 0), 1)
    each = (bracket.rank_last - bracket.rank).to(tl.float64) / number.to(tl.float64)
    rank = bracket.rank + ((lane - passed) * each).to(tl.int32)
    # From the tail, which many tokens make up: a few heavy ones would spoil an estimate from the head. What precedes a
    # later bracket is known. A first one that is not the row is the top-k.
    up_to = tl.cumsum(weight, 0)
    tail = tl.where(bracket.last == END, mass_all, total) - (tl.sum(weight, 0) - up_to + weight).to(tl.float64) * each
    before = tl.where(is_first, tail, bracket.mass + (up_to - weight).to(tl.float64) * each)
    kept = keeps(rank, before, weight.to(tl.float64), total, filters) & inside
    centre = passed + tl.sum(kept.to(tl.int32), 0)
    # A rank of the sample errs by about 22 at most.
    i = tl.arange(0, PIVOTS)
    place = tl.minimum(tl.maximum(centre + around(i), 0), SAMPLE - 1)
    previous = tl.minimum(tl.maximum(centre + around(i - 1), 0), SAMPLE - 1)
    behind = tl.minimum(centre + 4 + (2 * tl.sqrt((centre - passed).to(tl.float32))).to(tl.int32), SAMPLE - 1)
    tl.debug_barrier()
    tl.store(row.candidates + lane, key.to(tl.int64))
    tl.debug_barrier()
    pivots = tl.load(row.candidates + place).to(tl.int32)
    # Ties are pinned from both sides: the second pivot of a value stands behind it.
    pivots += ((i > 0) & (tl.load(row.candidates + previous).to(tl.int32) == pivots)).to(tl.int32)
    end = tl.load(row.candidates + behind).to(tl.int32)
    return pivots, end, bracket.rank + ((behind - passed) * each).to(tl.int32)


@triton.jit
def around(i):
    """Places of the pivots in the sample, from the cut: -48, -24, -8, 0, 0, 8, 24, 48."""
    away = tl.where(i < 3, tl.where(i == 0, -48, tl.where(i == 1, -24, -8)), 0)
    return tl.where(i > 4, tl.where(i == 7, 48, tl.where(i == 6, 24, 8)), away)


@triton.jit
def even_pivots(bracket):
    """Keys in the bracket [PIVOTS]: half of them evenly by value, and half evenly by key, so that it always ends."""
    PARTS: tl.constexpr = PIVOTS // 2 + 1
    i = tl.arange(0, PIVOTS)
    part = i // 2 + 1
    first = bracket.first.to(tl.int64)
    by_key = first + (bracket.last.to(tl.int64) - first) * part // PARTS
    high = value_of(bracket.first).to(tl.float64)
    low = tl.maximum(value_of(bracket.last), -LARGEST).to(tl.float64)
    by_value = key_of((high + (low - high) * part.to(tl.float64) / PARTS).to(tl.float32))
    return tl.where(i % 2 == 0, by_key.to(tl.int32), by_value)


@triton.jit
def weigh_pivots(row, pivots, listed, HAS_MASK: tl.constexpr, WIDTH: tl.constexpr):
    """Number and mass of the tokens before each pivot, in one pass over the listed tiles."""
    ROWS: tl.constexpr = CHUNK // 4 // WIDTH if CHUNK // 4 > WIDTH else 1
    number = tl.zeros([PIVOTS], tl.int32)
    mass = tl.zeros([PIVOTS], tl.float64)
    # In float32 no more than a few sums one after another: those of equal weights all err to one side.
    for begin in range(0, listed, ROWS * FEW):
        count = tl.zeros([ROWS * WIDTH, PIVOTS], tl.int32)
        part = tl.zeros([ROWS * WIDTH, PIVOTS], tl.float32)
        for start in range(begin, tl.minimum(begin + ROWS * FEW, listed), ROWS):
            x, _ = load_listed(row, start, listed, HAS_MASK, ROWS, WIDTH)
            before = key_of(x)[:, None] < pivots[None, :]
            count += before.to(tl.int32)
            part += tl.where(before, fast_weights(x, row)[:, None], 0.0)
        number += tl.sum(count, 0)
        mass += tl.sum(part.to(tl.float64), 0)
    return number, mass


@triton.jit
def narrow(row, bracket, pivots, number, mass, total, filters):
    """The bracket between the last pivot that is kept and the first that is not."""
    stays = keeps(number, mass, exact_weights(value_of(pivots), row), total, filters)
    return Bracket(
        tl.maximum(bracket.first, tl.max(tl.where(stays, pivots, bracket.first), 0)),
        tl.maximum(bracket.rank, tl.max(tl.where(stays, number, 0), 0)),
        tl.maximum(bracket.mass, tl.max(tl.where(stays, mass, 0.0), 0)),
        tl.minimum(bracket.last, tl.min(tl.where(stays, bracket.last, pivots), 0)),
        tl.minimum(bracket.rank_last, tl.min(tl.where(stays, bracket.rank_last, number), 0)),
    )


@triton.jit
def cut_ties(row, bracket, total, filters, listed, HAS_MASK: tl.constexpr, WIDTH: tl.constexpr):
    """The cut among the ties of a bracket of one key: how many of them stay, and the last of those by id."""
    ROWS: tl.constexpr = CHUNK // WIDTH if CHUNK > WIDTH else 1
    own = exact_weights(value_of(bracket.first), row)
    kept = tl.full([], 0, tl.int32)
    high = bracket.rank_last - bracket.rank
    while kept < high:
        at = (kept + high + 1) // 2
        stays = keeps(bracket.rank + at - 1, bracket.mass + (at - 1) * own, own, total, filters)
        kept = tl.where(stays, at, kept)
        high = tl.where(stays, high, at - 1)
    # The first is kept: the bracket says so, from masses that were summed in another order.
    kept = tl.maximum(kept, 1)
    seen = tl.full([], 0, tl.int32)
    token = tl.full([], 0, tl.int32)
    start = 0
    while (start < listed) & (seen < kept):
        x, ids = load_listed(row, start, listed, HAS_MASK, ROWS, WIDTH)
        same = (key_of(x) == bracket.first).to(tl.int32)
        at_place = seen + tl.cumsum(same, 0)
        token = tl.maximum(token, tl.max(tl.where((same == 1) & (at_place == kept), ids, 0), 0))
        seen += tl.sum(same, 0)
        start += ROWS
    cut = (bracket.first.to(tl.int64) << 32) | token.to(tl.int64)
    return cut, bracket.rank + kept, bracket.mass + kept * own


@triton.jit
def last_before(row, key, listed, HAS_MASK: tl.constexpr, WIDTH: tl.constexpr):
    """The last token, in rank order, before a key."""
    ROWS: tl.constexpr = CHUNK // WIDTH if CHUNK > WIDTH else 1
    found = tl.full([], LOWEST, tl.int64)
    for start in range(0, listed, ROWS):
        x, ids = load_listed(row, start, listed, HAS_MASK, ROWS, WIDTH)
        own = key_of(x)
        token = (own.to(tl.int64) << 32) | ids.to(tl.int64)
        found = tl.maximum(found, tl.max(tl.where(own < key, token, LOWEST), 0))
    return found


@triton.jit
def find_cut(
    row,
    filters,
    mass_all,
    num_finite,
    TOP_K_FIRST: tl.constexpr,
    HAS_MASK: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """The last kept token of a row with at least one filter on, the number of kept tokens, and their mass."""
    k_on = filters.k < FAR
    p_on = filters.p < 1
    top = key_of(row.maximum)
    # The mass that top-p is a part of is not known before the top-k are.
    is_total_open = TOP_K_FIRST & k_on & p_on
    # What the tops must hold: the top-k; or a few and, by the tiles' sums, the mass; or all that min-p keeps.
    limit = tl.full([], END - 1, tl.int32)
    if (filters.min_p > 0) & (is_total_open == 0):
        limit = last_in_min_p(row, filters.min_p, top, limit)
    is_nucleus = p_on & (k_on == 0)
    small = num_finite <= CANDIDATES
    want = tl.maximum(tl.where(k_on, filters.k, tl.where(p_on, FEW, row.num_tiles + 1)), filters.least)
    by_tops = small | (want <= tl.minimum(row.num_tiles, CANDIDATES)) | ((k_on | p_on) == 0)
    want = tl.where(small, row.num_tiles + 1, want)

    bracket = Bracket(
        top, tl.full([], 0, tl.int32), tl.full([], 0.0, tl.float64), tl.full([], END, tl.int32), num_finite
    )
    total = mass_all
    # Every round narrows what is searched, so long as nobody writes the logits meanwhile: then the row is its maximum.
    cut = (top.to(tl.int64) << 32) | 0x7FFFFFFF
    size = tl.full([], 1, tl.int32)
    mass = tl.full([], 1.0, tl.float64)
    rounds = tl.full([], 0, tl.int32)
    tries = tl.full([], 0, tl.int32)
    guessed = tl.full([], 0, tl.int32)
    pivots = tl.zeros([PIVOTS], tl.int32)
    guess = tl.full([], 0, tl.int32)
    guess_rank = tl.full([], 0, tl.int32)
    phase = tl.where(by_tops, TOPS, tl.where(is_total_open, TOP_K, BRACKET))
    while (phase < FOUND) & (rounds < MOST_ROUNDS):
        rounds += 1
        now = Filters(
            filters.k,
            tl.where(phase == TOP_K, 2.0 * FAR, filters.p),
            tl.where(phase == TOP_K, 0.0, filters.min_p),
            filters.least,
        )
        is_long = (bracket.rank_last - bracket.rank > CANDIDATES) & (bracket.first + 1 < bracket.last)
        stale = (guessed == 2) & is_long & (phase != TOPS)
        if stale | ((guessed == 0) & tl.where(phase == TOPS, tries == 2, is_long)):
            pivots, guess, guess_rank = guess_pivots(row, bracket, now, total, mass_all, guessed == 0, HAS_MASK, WIDTH)
            guessed += 1
        if phase == TOPS:
            if tries < 2:
                end = nth_top(row, want, tl.where(is_nucleus, now.p * total, 0.0), top, limit, PADDED) + 1
                listed = list_tiles(row, end - 1, PADDED)
                ready = (is_nucleus == 0) | small | (listed <= tl.maximum(want, 4 * FEW))
            else:
                end = tl.minimum(tl.maximum(guess, bracket.first + 1), limit + 1)
                listed = list_tiles(row, end - 1, PADDED)
                ready = guess_rank - bracket.rank <= CANDIDATES - CANDIDATES // 4
        else:
            if is_long:
                # Two guesses, and from then on what is certain to end.
                if guessed == 4:
                    pivots = even_pivots(bracket)
                guessed = tl.minimum(guessed + 1, 4)
                pivots = tl.minimum(tl.maximum(pivots, bracket.first + 1), bracket.last - 1)
                listed = list_tiles(row, bracket.last - 1, PADDED)
                counts, masses = weigh_pivots(row, pivots, listed, HAS_MASK, WIDTH)
                bracket = narrow(row, bracket, pivots, counts, masses, total, now)
            end = bracket.last
            listed = list_tiles(row, end - 1, PADDED)
            ready = bracket.rank_last - bracket.rank <= CANDIDATES

        found = phase == FOUND
        if ready:
            count, gathered, lowest = gather(row, bracket.first, end, listed, HAS_MASK, WIDTH)
            number = bracket.rank + count
            below = bracket.mass + gathered
            fits = count <= CANDIDATES
            is_all = number >= num_finite
            if fits:
                cut, size, mass, below, total_now = rank_candidates(
                    row, count, bracket, now, total, is_total_open & (phase == TOPS), is_all & (total == mass_all)
                )
                stays = keeps(number, below, exact_weights(value_of(end), row), total_now, now)
                found = (phase > TOPS) | is_all | (stays == 0)
            elif ((k_on | p_on) == 0) & (number >= filters.least):
                # min-p alone keeps all of them.
                cut = lowest
                size = number
                mass = below
                found = phase == TOPS
            if found:
                if size == bracket.rank:
                    cut = last_before(row, bracket.first, listed, HAS_MASK, WIDTH)
            else:
                # What was read narrows the bracket: of the top-k alone while the total is open.
                rules = Filters(
                    now.k,
                    tl.where(is_total_open, 2.0 * FAR, now.p),
                    tl.where(is_total_open, 0.0, now.min_p),
                    now.least,
                )
                bracket = narrow(row, bracket, end + tl.zeros([PIVOTS], tl.int32), number, below, total, rules)
        elif (phase > TOPS) & (bracket.first + 1 == bracket.last):
            cut, size, mass = cut_ties(row, bracket, total, now, listed, HAS_MASK, WIDTH)
            found = phase > TOPS
        if found:
            if phase == TOP_K:
                # The mass of the top-k is the total; the nucleus in it is another search.
                total = mass
                bracket = Bracket(
                    top,
                    tl.full([], 0, tl.int32),
                    tl.full([], 0.0, tl.float64),
                    bracket.last,
                    bracket.rank_last,
                )
                is_total_open = phase == FOUND
                is_nucleus = phase == TOP_K
                want = tl.maximum(filters.least, FEW)
                tries = tl.full([], 0, tl.int32)
                guessed = tl.full([], 0, tl.int32)
                phase = tl.where(want <= row.num_tiles, TOPS, BRACKET)
            else:
                phase = tl.full([], FOUND, tl.int32)
        elif phase == TOPS:
            more = is_nucleus & (tries < 2)
            want = tl.maximum(want, 4 * FEW)
            # A nucleus that the first tops say is long is guessed at once.
            tries = tl.where(ready, tries + 1, 2)
            phase = tl.where(more, TOPS, tl.where(is_total_open, TOP_K, BRACKET))
    return cut, size, mass
