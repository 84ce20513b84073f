"""Logits -> support: temperature, top-k, top-p, min-p on rows of logits.

Every filter keeps a prefix of the rank order, so a support is described by its last token (cut value, cut id) and
its normaliser; no probabilities are stored. p(x) is one gather and one exponential.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import rules

LARGEST = float(np.finfo(np.float32).max)
# 1 / T stays in this range: times 0 it is 0, it is not 0 itself (one-hot), and log2(e) times it is a finite float32.
FLATTEST = float(np.finfo(np.float32).tiny)
STEEPEST = LARGEST / 2
# The first number of ranks that is looked at; eight times as many whenever a support is longer.
FIRST_WIDTH = 64
# Fields of `Support` with one value a row.
ROW_FIELDS = (
    "maximum",
    "inverse_temperature",
    "cut_value",
    "cut_id",
    "log_normalizer",
    "support_size",
    "argmax",
    "status",
)


@dataclass(frozen=True)
class Support:
    """The filtered distribution of N rows. See `triton_specdec.FilteredLogits` for the public fields."""

    logits: NDArray  # [N, V], borrowed
    maximum: NDArray[np.float32]  # [N], 0 where the row is empty
    inverse_temperature: NDArray[np.float64]  # [N], 0 for a one-hot row
    cut_value: NDArray[np.float32]  # [N]
    cut_id: NDArray[np.int32]  # [N]
    log_normalizer: NDArray[np.float64]  # [N]
    support_size: NDArray[np.int32]  # [N]
    argmax: NDArray[np.int64]  # [N]
    status: NDArray[np.int32]  # [N]
    token_mask: NDArray[np.int32] | None = None  # [N, ceil(V / 32)]
    vocab_size: int | None = None

    def take(self, rows: NDArray | slice) -> Support:
        """The same support for some of the rows."""
        taken: dict[str, Any] = {name: getattr(self, name)[rows] for name in ("logits", *ROW_FIELDS)}
        mask = None if self.token_mask is None else self.token_mask[rows]
        return Support(**taken, token_mask=mask, vocab_size=self.vocab_size)

    def scores(self) -> NDArray[np.float64]:
        """Logits over temperature, relative to the maximum: [N, V], -inf outside the support."""
        x, _ = admissible(self.logits, self.token_mask, self.vocab_size)
        return self._scores(x, np.arange(x.shape[-1]))

    def probs(self) -> NDArray[np.float64]:
        """Filtered and renormalised probabilities, [N, V]."""
        return np.exp(self.scores() - self.log_normalizer[:, None])

    def keep_mask(self) -> NDArray[np.bool_]:
        """Whether a token is in the support, [N, V]."""
        x, _ = admissible(self.logits, self.token_mask, self.vocab_size)
        return rules.is_kept(x, np.arange(x.shape[-1]), self.cut_value[:, None], self.cut_id[:, None])

    def log_prob(self, tokens: NDArray) -> NDArray[np.float64]:
        """Log-probability of tokens [N, M]; -inf outside the support and for ids outside [0, V)."""
        vocab = self.logits.shape[-1]
        inside = (tokens >= 0) & (tokens < vocab)
        ids = np.where(inside, tokens, 0)
        allowed = inside
        x = finite(np.take_along_axis(self.logits, ids, -1))
        if self.vocab_size is not None:
            allowed = allowed & (ids < self.vocab_size)
        if self.token_mask is not None:
            words = np.take_along_axis(self.token_mask, ids >> 5, -1)
            allowed = allowed & (((words >> (ids & 31)) & 1) == 1)
        scores = self._scores(np.where(allowed, x, -np.inf), ids)
        # An empty row keeps token 0, which is where an id outside was looked up.
        return np.where(inside & ~np.isneginf(scores), scores - self.log_normalizer[:, None], -np.inf)

    def prob(self, tokens: NDArray) -> NDArray[np.float64]:
        """Probability of tokens [N, M]."""
        return np.exp(self.log_prob(tokens))

    def _scores(self, x: NDArray, ids: NDArray) -> NDArray[np.float64]:
        kept = rules.is_kept(x, ids, self.cut_value[:, None], self.cut_id[:, None])
        return np.where(kept, _scaled(x, self.maximum, self.inverse_temperature), -np.inf)


@dataclass(frozen=True)
class Probabilities:
    """Given probabilities of N rows, with the methods of `Support` that verification needs."""

    weights: NDArray[np.float64]  # [N, V]
    status: NDArray[np.int32]  # [N]

    @classmethod
    def checked(cls, probs: NDArray) -> Probabilities:
        """NaN, inf and negative entries count as 0 and set a bit in the row's status."""
        p = probs.astype(np.float64)
        bad = (np.isnan(p), np.isposinf(p), p < 0)
        bits = (rules.STATUS_NAN, rules.STATUS_INF, rules.STATUS_NEGATIVE)
        status = sum(b.any(-1) * np.int32(bit) for b, bit in zip(bad, bits, strict=True))
        p = np.where(bad[0] | bad[1] | bad[2], 0.0, p)
        status = status + (p.sum(-1) == 0) * np.int32(rules.STATUS_EMPTY)
        return cls(p, status.astype(np.int32))

    def take(self, rows: NDArray | slice) -> Probabilities:
        """The same distribution for some of the rows."""
        return Probabilities(self.weights[rows], self.status[rows])

    def probs(self) -> NDArray[np.float64]:
        """The probabilities, [N, V]."""
        return self.weights

    def prob(self, tokens: NDArray) -> NDArray[np.float64]:
        """Probability of tokens [N, M]; 0 for ids outside [0, V)."""
        inside = (tokens >= 0) & (tokens < self.weights.shape[-1])
        return np.where(inside, np.take_along_axis(self.weights, np.where(inside, tokens, 0), -1), 0.0)

    def log_prob(self, tokens: NDArray) -> NDArray[np.float64]:
        """Log-probability of tokens [N, M]."""
        with np.errstate(divide="ignore"):
            return np.log(self.prob(tokens))


def finite(logits: NDArray) -> NDArray[np.float32]:
    """float32 logits in which NaN counts as -inf and +inf as the largest finite value; -0.0 becomes 0.0."""
    x = np.add(logits, np.float32(0), dtype=np.float32)
    np.copyto(x, -np.inf, where=np.isnan(x))
    return np.minimum(x, np.float32(LARGEST), out=x)


def admissible(
    logits: NDArray, token_mask: NDArray | None, vocab_size: int | None
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Logits as the filters see them (masked and padded ids at -inf) and each row's status bits."""
    vocab = logits.shape[-1]
    x = np.add(logits, np.float32(0), dtype=np.float32)
    if vocab_size is not None and vocab_size < vocab:
        x[:, vocab_size:] = -np.inf
    if token_mask is not None:
        words = np.ascontiguousarray(token_mask).view(np.uint8)
        allowed = np.unpackbits(words, axis=-1, count=vocab, bitorder="little")
        np.copyto(x, -np.inf, where=allowed == 0)
    status = np.zeros(len(x), np.int32)
    # One pass decides whether there is anything to repair: a maximum over NaN is NaN.
    top = x.max(-1, initial=-np.inf)
    if not (top <= LARGEST).all():
        nan = np.isnan(x)
        inf = np.isposinf(x)
        status += nan.any(-1) * np.int32(rules.STATUS_NAN) + inf.any(-1) * np.int32(rules.STATUS_INF)
        x[nan] = -np.inf
        x[inf] = LARGEST
    return x, status


def filter_logits(
    logits: NDArray,
    temperature: NDArray,
    top_k: NDArray,
    top_p: NDArray,
    min_p: NDArray,
    min_tokens_to_keep: NDArray,
    *,
    order: str = "top_k_first",
    token_mask: NDArray | None = None,
    vocab_size: int | None = None,
) -> Support:
    """Filter rows of logits.

    Parameters
    ----------
    logits : floats [N, V]
    temperature, top_p, min_p : float64 [N]
    top_k, min_tokens_to_keep : int64 [N]
    order : "top_k_first" (top-p on the mass that top-k left) or "joint" (top-p on the full mass)
    token_mask : int32 [N, ceil(V / 32)], bit 1 = allowed
    vocab_size : ids from here on are padding

    Returns
    -------
    Support
    """
    x, status = admissible(logits, token_mask, vocab_size)
    rows, vocab = x.shape
    bad = ~((temperature >= 0) & ~np.isnan(top_p) & (min_p >= 0) & (min_p <= 1) & (min_tokens_to_keep >= 1))
    argmax = x.argmax(-1)
    top = x[np.arange(rows), argmax]
    empty = np.isneginf(top)
    one_hot = rules.is_greedy(temperature) | empty | bad
    status = status + empty * np.int32(rules.STATUS_EMPTY) + bad * np.int32(rules.STATUS_PARAMETER)
    maximum = np.where(empty, np.float32(0), top)
    with np.errstate(over="ignore"):
        inverse = np.where(one_hot, 0.0, np.clip(1.0 / np.where(one_hot, 1.0, temperature), FLATTEST, STEEPEST))

    # Rows that keep everything, and one-hot rows.
    weights = np.exp(_scaled(x, maximum, inverse))
    total = weights.sum(-1)
    size = np.where(one_hot, 1, (x > -np.inf).sum(-1))
    cut_value = np.where(one_hot, top, np.float32(-np.inf))
    cut_id = np.where(one_hot, argmax, rules.NO_CUT_ID)
    mass = np.where(one_hot, 1.0, total)

    # Rows with a filter: look at the first ranks, and at more of them while the support is longer.
    k_on = rules.is_top_k_on(top_k, vocab)
    p_on = rules.is_top_p_on(top_p)
    m_on = rules.is_min_p_on(min_p)
    left = np.flatnonzero(~one_hot & (k_on | p_on | m_on))
    keys = _rank_keys(x[left])
    width = FIRST_WIDTH if vocab > 1024 else vocab
    while left.size:
        width = min(width, vocab)
        values, ids = _first_ranks(keys, width)
        column = (left, None)
        w = np.exp(_scaled(values, maximum[left], inverse[left]))
        rank = np.arange(width)
        least = rules.is_in_min_tokens(rank, min_tokens_to_keep[column])
        in_k = ~k_on[column] | rules.is_in_top_k(rank, top_k[column]) | least
        in_k &= values > -np.inf
        cumulative = np.cumsum(np.where(in_k, w, 0.0), -1)
        before = np.concatenate([np.zeros((left.size, 1)), cumulative[:, :-1]], -1)
        of = np.where(k_on[left] & (order == "top_k_first"), cumulative[:, -1], total[left])
        in_p = ~p_on[column] | rules.is_in_top_p(before, top_p[column], of[:, None]) | least
        in_m = ~m_on[column] | rules.is_in_min_p(w, min_p[column]) | least
        kept = (in_k & in_p & in_m).sum(-1)
        known = ~k_on[left] | (np.maximum(top_k, min_tokens_to_keep)[left] <= width)
        done = (known & (kept < width)) | (width == vocab)
        row, last = left[done], kept[done] - 1
        size[row] = kept[done]
        cut_value[row] = values[done, last]
        cut_id[row] = ids[done, last]
        mass[row] = cumulative[done, last]
        left, keys, width = left[~done], keys[~done], width * 8
    return Support(
        logits,
        maximum,
        inverse,
        cut_value,
        cut_id.astype(np.int32),
        np.log(mass),
        size.astype(np.int32),
        argmax,
        status.astype(np.int32),
        token_mask,
        vocab_size,
    )


def _scaled(x: NDArray, maximum: NDArray, inverse_temperature: NDArray) -> NDArray[np.float64]:
    """z of rows [N, M]; 0 in one-hot rows, whose only token has probability 1."""
    with np.errstate(invalid="ignore", over="ignore"):
        z = rules.scaled(x.astype(np.float64), maximum[:, None], inverse_temperature[:, None])
    return np.where(inverse_temperature[:, None] == 0, 0.0, z)


def _rank_keys(x: NDArray[np.float32]) -> NDArray[np.int64]:
    """One integer a token that sorts as the rank order: logit descending, then id ascending."""
    high = rules.rank_key(x.view(np.int32)).astype(np.int64) << 32
    return high | np.arange(x.shape[-1])


def _first_ranks(keys: NDArray[np.int64], width: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Values and ids of the first `width` ranks of each row, in order."""
    if width < keys.shape[-1]:
        keys = np.partition(keys, width - 1, axis=-1)[:, :width]
    keys = np.sort(keys, axis=-1)
    values = rules.rank_bits((keys >> 32).astype(np.int32)).view(np.float32)
    return values, keys & rules.MASK32
