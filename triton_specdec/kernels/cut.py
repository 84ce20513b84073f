"""Where a row's support ends: the last kept token, how many are kept, and their mass.

Tokens are integers that ascend in rank order, (rank_key << 32) | id, so a support is "all up to the cut". Three ways:

- `rank_candidates`: at most CANDIDATES tokens are sorted, and the rules are applied to them in order.
- `find_among_tops`: the n-th largest tile maximum bounds the support: what lies above it is in at most n tiles.
- `find_in_bracket`: for long supports. A bracket [first, last) of keys holds the cut; pivots in it are counted and
  weighed in one pass over the row, until few enough tokens are left in it to be sorted, or one value only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rules import is_in_min_p, is_in_min_tokens, is_in_top_k, is_in_top_p, scaled
from .sample import rate, weights
from .tiles import END, finite, key_of, list_tiles, load_raw, load_tiles, value_of

CANDIDATES = tl.constexpr(2048)
PIVOTS = tl.constexpr(8)
# Tiles that the first attempt reads when no top-k says how many: four times as many whenever they do not hold the cut.
FEW = tl.constexpr(16)
FAR = tl.constexpr(2**62)


@triton.jit
def keeps(rank, before, weight, total, k, p, min_p, least):
    """Whether a token stays. What is off holds the value that keeps everything (see `on_or_all`)."""
    stays = is_in_top_k(rank, k) & is_in_top_p(before, p, total) & is_in_min_p(weight, min_p)
    return is_in_min_tokens(rank, least) | stays


@triton.jit
def middle(low, high):
    """Halfway between two int32 without overflow, rounded down."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def nth_top(tile_keys, tile_mass, want, need, first, last):
    """The smallest key up to which there are `want` tiles with a mass of `need` in all; `last` if there are not."""
    while first < last:
        at = middle(first, last)
        inside = tile_keys <= at
        enough = (tl.sum(inside.to(tl.int32), 0) >= want) & (tl.sum(tl.where(inside, tile_mass, 0.0), 0) >= need)
        last = tl.where(enough, at, last)
        first = tl.where(enough, first, at + 1)
    return last


@triton.jit
def last_above(min_p, maximum, inverse, first, last):
    """The last key in [first, last] whose weight reaches min_p."""
    while first < last:
        at = middle(first, last) + 1
        enough = is_in_min_p(weights(value_of(at), maximum, inverse), min_p)
        first = tl.where(enough, at, first)
        last = tl.where(enough, last, at - 1)
    return first


@triton.jit
def gather(
    logits_ptr,
    mask_ptr,
    list_ptr,
    candidate_ptr,
    tiles,
    first,
    last,
    maximum,
    inverse,
    vocab_size,
    HAS_MASK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Writes the tokens with keys in [first, last) in id order, as many as fit; returns their number and mass."""
    count = tl.full([], 0, tl.int32)
    mass = tl.full([], 0.0, tl.float64)
    tl.debug_barrier()
    for start in range(0, tiles, ROWS):
        x, ids = load_tiles(logits_ptr, mask_ptr, list_ptr, start, tiles, vocab_size, HAS_MASK, ROWS, WIDTH)
        key = key_of(x)
        inside = (key >= first) & (key < last)
        place = count + tl.cumsum(inside.to(tl.int32), 0) - 1
        token = (key.to(tl.int64) << 32) | ids.to(tl.int64)
        tl.store(candidate_ptr + place, token, mask=inside & (place < CANDIDATES))
        count += tl.sum(inside.to(tl.int32), 0)
        w = tl.where(inside, tl.exp2(scaled(x, maximum, rate(inverse))), 0.0)
        mass += tl.sum(w, 0).to(tl.float64)
    tl.debug_barrier()
    return count, mass


@triton.jit
def rank_candidates(
    candidate_ptr,
    count,
    rank_before,
    mass_before,
    maximum,
    inverse,
    total,
    sum_top_k,
    sum_all,
    k,
    p,
    min_p,
    least,
    SIZE: tl.constexpr,
):
    """Sorts `count` candidates that follow `rank_before` tokens of `mass_before`, and applies the rules in order.

    Where they hold the whole top-k (`sum_top_k`) or all there is (`sum_all`), their own mass is the exact total.
    Returns the last kept token, the number and mass of the tokens up to it, the mass of all candidates, the total.
    """
    lane = tl.arange(0, SIZE)
    valid = lane < count
    token = tl.sort(tl.load(candidate_ptr + lane, mask=valid, other=9223372036854775807))
    w = tl.where(valid, weights(value_of((token >> 32).to(tl.int32)), maximum, inverse), 0.0)
    rank = rank_before + lane
    up_to = mass_before + tl.cumsum(w, 0)
    everything = mass_before + tl.sum(w, 0)
    top_k = mass_before + tl.sum(tl.where(rank < tl.maximum(k, least), w, 0.0), 0)
    total = tl.where(sum_top_k, top_k, tl.where(sum_all, everything, total))
    kept = keeps(rank, up_to - w, w, total, k, p, min_p, least) & valid
    number = tl.sum(kept.to(tl.int32), 0)
    at = lane == number - 1
    cut = tl.sum(tl.where(at, token, 0), 0)
    mass = tl.where(number == 0, mass_before, tl.sum(tl.where(at, up_to, 0.0), 0))
    return cut, rank_before + number, mass, everything, total


@triton.jit
def sample_pivots(
    logits_ptr,
    mask_ptr,
    maximum,
    inverse,
    total,
    mass_all,
    finite_tokens,
    k,
    p,
    min_p,
    least,
    tiles,
    vocab_size,
    HAS_MASK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Keys around the cut that an even sample of the row's tiles suggests [PIVOTS]; a guess, nothing relies on it."""
    lane = tl.arange(0, CANDIDATES)
    tile = (lane // WIDTH) * tiles // (CANDIDATES // WIDTH)
    ids = tile * WIDTH + lane % WIDTH
    x = finite(load_raw(logits_ptr, mask_ptr, ids, ids < vocab_size, HAS_MASK))
    key = tl.sort(key_of(x))
    w = tl.exp2(scaled(value_of(key), maximum, rate(inverse)))
    w = tl.where(key < END, w, 0.0)
    up_to = tl.cumsum(w, 0)
    each = finite_tokens / tl.maximum(tl.sum((key < END).to(tl.int32), 0), 1).to(tl.float64)
    per = mass_all / tl.maximum(tl.sum(w, 0), 1e-30).to(tl.float64)
    before = (up_to - w).to(tl.float64) * per
    kept = keeps((lane * each).to(tl.int32), before, w.to(tl.float64), total, k, p, min_p, least) & (key < END)
    centre = tl.sum(kept.to(tl.int32), 0)
    # The error of a sample of 2048 is about 22 of its ranks. The middle value is pinned from both sides, for ties.
    i = tl.arange(0, PIVOTS)
    away = tl.where(i < 3, tl.where(i == 0, -56, tl.where(i == 1, -28, -7)), 0)
    away = tl.where(i > 4, tl.where(i == 7, 56, tl.where(i == 6, 28, 7)), away)
    place = tl.minimum(tl.maximum(centre + away, 0), CANDIDATES - 1)
    pivots = tl.sum(tl.where(lane[:, None] == place[None, :], key[:, None], 0), 0)
    return pivots + (i == 4).to(tl.int32)


@triton.jit
def even_pivots(first, last):
    """Keys between two others [PIVOTS]: half of them evenly by value, half evenly by key, so that it always ends."""
    i = tl.arange(0, PIVOTS)
    part = i // 2 + 1
    parts: tl.constexpr = PIVOTS // 2 + 1
    by_key = first.to(tl.int64) + (last.to(tl.int64) - first.to(tl.int64)) * part // parts
    high = value_of(first).to(tl.float64)
    low = tl.maximum(value_of(last), -3.4028234663852886e38).to(tl.float64)
    by_value = key_of((high + (low - high) * part.to(tl.float64) / parts).to(tl.float32))
    return tl.where(i % 2 == 0, by_key.to(tl.int32), by_value)


@triton.jit
def weigh_pivots(
    logits_ptr,
    mask_ptr,
    list_ptr,
    count,
    pivots,
    maximum,
    inverse,
    vocab_size,
    HAS_MASK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Number and mass of the tokens before each pivot, in one pass over the listed tiles."""
    number = tl.zeros([ROWS * WIDTH, PIVOTS], tl.int32)
    mass = tl.zeros([ROWS * WIDTH, PIVOTS], tl.float32)
    for start in range(0, count, ROWS):
        x, _ = load_tiles(logits_ptr, mask_ptr, list_ptr, start, count, vocab_size, HAS_MASK, ROWS, WIDTH)
        w = tl.exp2(scaled(x, maximum, rate(inverse)))
        before = key_of(x)[:, None] < pivots[None, :]
        number += before.to(tl.int32)
        mass += tl.where(before, w[:, None], 0.0)
    return tl.sum(number, 0), tl.sum(mass.to(tl.float64), 0)


@triton.jit
def ties_kept(rank, mass, weight, ties, total, k, p, min_p, least):
    """How many of `ties` equal tokens stay behind `rank` tokens of `mass`."""
    low = tl.full([], 0, tl.int32)
    high = ties
    while low < high:
        at = (low + high + 1) // 2
        stays = keeps(rank + at - 1, mass + (at - 1) * weight, weight, total, k, p, min_p, least)
        low = tl.where(stays, at, low)
        high = tl.where(stays, high, at - 1)
    return low


@triton.jit
def nth_tie(
    logits_ptr,
    mask_ptr,
    list_ptr,
    count,
    key,
    number,
    vocab_size,
    HAS_MASK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Id of the `number`-th token, by id, of one key."""
    seen = tl.full([], 0, tl.int32)
    found = tl.full([], 0, tl.int32)
    start = 0
    while (start < count) & (seen < number):
        x, ids = load_tiles(logits_ptr, mask_ptr, list_ptr, start, count, vocab_size, HAS_MASK, ROWS, WIDTH)
        same = key_of(x) == key
        at = seen + tl.cumsum(same.to(tl.int32), 0)
        found = tl.maximum(found, tl.max(tl.where(same & (at == number), ids, 0), 0))
        seen += tl.sum(same.to(tl.int32), 0)
        start += ROWS
    return found


@triton.jit
def last_before(
    logits_ptr,
    mask_ptr,
    list_ptr,
    count,
    key,
    vocab_size,
    HAS_MASK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The last token, in rank order, before a key."""
    found = tl.full([], -9223372036854775808, tl.int64)
    for start in range(0, count, ROWS):
        x, ids = load_tiles(logits_ptr, mask_ptr, list_ptr, start, count, vocab_size, HAS_MASK, ROWS, WIDTH)
        own = key_of(x)
        token = (own.to(tl.int64) << 32) | ids.to(tl.int64)
        found = tl.maximum(found, tl.max(tl.where(own < key, token, -9223372036854775808), 0))
    return found


@triton.jit
def find_cut(
    logits_ptr,
    mask_ptr,
    list_ptr,
    candidate_ptr,
    tile_keys,
    tile_mass,
    maximum,
    inverse,
    mass_all,
    finite_tokens,
    k,
    p,
    min_p,
    least,
    tiles,
    vocab_size,
    TOP_K_FIRST: tl.constexpr,
    HAS_MASK: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """The last kept token of a row with at least one filter on, the number of kept tokens, and their mass."""
    ROWS: tl.constexpr = CANDIDATES // WIDTH if CANDIDATES > WIDTH else 1
    HALF: tl.constexpr = ROWS // 2 if ROWS > 1 else 1
    k_on = k < FAR
    p_on = p < 1
    # The mass that top-p is a part of is not known before the top-k are.
    of_top_k = TOP_K_FIRST & k_on & p_on
    top = key_of(maximum)
    limit = tl.full([], END - 1, tl.int32)
    if (min_p > 0) & (of_top_k == 0):
        limit = last_above(min_p, maximum, inverse, top, limit)
    # What the tops must hold: the top-k; or a few and, by the tiles' sums, enough mass; or all above min-p.
    want = tl.maximum(tl.where(k_on, k, tl.where(p_on, FEW, tiles + 1)), least)
    need = tl.where(p_on & (k_on == 0), p * mass_all, 0.0)
    small = finite_tokens <= CANDIDATES
    want = tl.where(small, tiles + 1, want)
    by_tops = small | (want <= tl.minimum(tiles, CANDIDATES)) | ((k_on | p_on) == 0)

    first = top
    rank_first = tl.full([], 0, tl.int32)
    mass_first = tl.full([], 0.0, tl.float64)
    last = tl.full([], END, tl.int32)
    rank_last = finite_tokens
    total = mass_all
    guessed = tl.full([], 0, tl.int32)
    cut = tl.full([], 0, tl.int64)
    size = tl.full([], 0, tl.int32)
    mass = tl.full([], 0.0, tl.float64)
    # 0: among the tops; 1: the top-k alone, in the bracket; 2: all rules, in the bracket; 3: found.
    phase = tl.where(by_tops, 0, tl.where(of_top_k, 1, 2))
    while phase < 3:
        p_now = tl.where(phase == 1, 2.0 * FAR, p)
        min_p_now = tl.where(phase == 1, 0.0, min_p)
        begin = top
        end = last
        begin_rank = tl.full([], 0, tl.int32)
        begin_mass = tl.full([], 0.0, tl.float64)
        ready = phase == 0
        if phase == 0:
            end = nth_top(tile_keys, tile_mass, want, need, top, limit) + 1
        else:
            if (rank_last - rank_first > CANDIDATES) & (last - first > 1):
                listed = list_tiles(list_ptr, tile_keys, last - 1, PADDED)
                if guessed == 0:
                    pivots = sample_pivots(
                        logits_ptr,
                        mask_ptr,
                        maximum,
                        inverse,
                        total,
                        mass_all,
                        finite_tokens,
                        k,
                        p_now,
                        min_p_now,
                        least,
                        tiles,
                        vocab_size,
                        HAS_MASK,
                        WIDTH,
                    )
                else:
                    pivots = even_pivots(first, last)
                guessed = 1
                pivots = tl.minimum(tl.maximum(pivots, first + 1), last - 1)
                number, below = weigh_pivots(
                    logits_ptr,
                    mask_ptr,
                    list_ptr,
                    listed,
                    pivots,
                    maximum,
                    inverse,
                    vocab_size,
                    HAS_MASK,
                    HALF,
                    WIDTH,
                )
                own = weights(value_of(pivots), maximum, inverse)
                stays = keeps(number, below, own, total, k, p_now, min_p_now, least)
                first = tl.maximum(first, tl.max(tl.where(stays, pivots, first), 0))
                rank_first = tl.maximum(rank_first, tl.max(tl.where(stays, number, 0), 0))
                mass_first = tl.maximum(mass_first, tl.max(tl.where(stays, below, 0.0), 0))
                last = tl.minimum(last, tl.min(tl.where(stays, last, pivots), 0))
                rank_last = tl.minimum(rank_last, tl.min(tl.where(stays, rank_last, number), 0))
            begin = first
            end = last
            begin_rank = rank_first
            begin_mass = mass_first
            ready = rank_last - rank_first <= CANDIDATES
        listed = list_tiles(list_ptr, tile_keys, end - 1, PADDED)
        if (phase == 0) & p_on & (k_on == 0) & (small == 0) & (listed > 16 * FEW):
            # Nuclei that long do not fit among the candidates.
            ready = phase > 3
            phase = tl.full([], 2, tl.int32)
        found = phase > 3
        if ready:
            count, gathered = gather(
                logits_ptr,
                mask_ptr,
                list_ptr,
                candidate_ptr,
                listed,
                begin,
                end,
                maximum,
                inverse,
                vocab_size,
                HAS_MASK,
                ROWS,
                WIDTH,
            )
            exhausted = count >= finite_tokens
            sum_top_k = (phase == 0) & of_top_k
            here = total
            if count <= CANDIDATES:
                cut, size, mass, gathered, here = rank_candidates(
                    candidate_ptr,
                    count,
                    begin_rank,
                    begin_mass,
                    maximum,
                    inverse,
                    total,
                    sum_top_k,
                    exhausted,
                    k,
                    p_now,
                    min_p_now,
                    least,
                    CANDIDATES,
                )
            if phase == 0:
                fits = count <= CANDIDATES
                own = weights(value_of(end), maximum, inverse)
                stays = keeps(count, gathered, own, here, k, p, min_p, least)
                found = fits & (exhausted | (stays == 0))
                # What was seen narrows the bracket; for the top-k of phase 1 by their own rule.
                p_next = tl.where(of_top_k, 2.0 * FAR, p)
                stays = keeps(count, gathered, own, total, k, p_next, tl.where(of_top_k, 0.0, min_p), least)
                first = tl.where(stays, end, first)
                rank_first = tl.where(stays, count, rank_first)
                mass_first = tl.where(stays, gathered, mass_first)
                last = tl.where(stays, last, end)
                rank_last = tl.where(stays, rank_last, count)
                want = want * 4
                more = fits & (k_on == 0) & p_on & (want < tiles)
                phase = tl.where(found, 3, tl.where(more, 0, tl.where(of_top_k, 1, 2)))
            else:
                if size == begin_rank:
                    cut = last_before(
                        logits_ptr, mask_ptr, list_ptr, listed, begin, vocab_size, HAS_MASK, ROWS, WIDTH
                    )
                found = phase < 3
        else:
            if last - first == 1:
                own = weights(value_of(first), maximum, inverse)
                ties = ties_kept(
                    rank_first, mass_first, own, rank_last - rank_first, total, k, p_now, min_p_now, least
                )
                token = nth_tie(
                    logits_ptr, mask_ptr, list_ptr, listed, first, ties, vocab_size, HAS_MASK, ROWS, WIDTH
                )
                cut = (first.to(tl.int64) << 32) | token.to(tl.int64)
                size = rank_first + ties
                mass = mass_first + ties * own
                found = phase < 3
        if found & (phase < 3):
            # The top-k are known, and with them the mass that top-p is a part of; else this is the end.
            total = tl.where(phase == 1, mass, total)
            first = top
            rank_first = tl.full([], 0, tl.int32)
            mass_first = tl.full([], 0.0, tl.float64)
            guessed = tl.full([], 0, tl.int32)
            phase = tl.where(phase == 1, 2, 3)
    return cut, size, mass
