"""Support -> token: one draw a row, by the inverse of the cumulative distribution or by Gumbel noise."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import rng, rules
from .filter import Support


def inverse_cdf(weights: NDArray[np.float64], u: NDArray[np.float64]) -> NDArray[np.int64]:
    """The first token, in id order, whose cumulative weight exceeds u * total.

    weights [N, V], not normalised; u [N] in [0, 1). A token of weight 0 is never drawn unless all are (then 0 is).
    """
    cumulative = np.cumsum(weights, -1)
    total = cumulative[:, -1]
    drawn = rules.is_drawn(cumulative, u[:, None], total[:, None])
    token = drawn.argmax(-1)
    # u * total may round up to the total: the last token that adds to the cumulative weight.
    missed = ~drawn[np.arange(len(token)), token]
    if missed.any():
        token[missed] = (cumulative[missed] >= total[missed, None]).argmax(-1)
    return token


def gumbel_argmax(support: Support, seeds: NDArray, positions: NDArray) -> NDArray[np.int64]:
    """argmax of logit / T + Gumbel(seed, position, token id) over the support: a draw from it (Gumbel 1954).

    The noise does not know the distribution, so two models that agree on the logits agree on the token.
    """
    scores = support.scores()
    row, token = np.nonzero(scores > -np.inf)
    scores[row, token] += rng.gumbel(seeds[row], positions[row], token)
    return scores.argmax(-1)


def sample(support: Support, u: NDArray[np.float64]) -> NDArray[np.int64]:
    """One token a row by inverse CDF; u float64 [N]."""
    return inverse_cdf(np.exp(support.scores()), u)
