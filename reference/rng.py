"""Counter-based random numbers: Philox4x32-10 in NumPy, the same bits as in the kernels.

Key = the request's seed. Counter = (lane, position, stream). A number depends on nothing else, so a row draws the
same whatever batch it stands in (Salmon et al. 2011).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import rules


def philox4x32(counter: tuple[ArrayLike, ...], key: tuple[ArrayLike, ...]) -> tuple[NDArray[np.uint64], ...]:
    """Philox4x32-10.

    Parameters
    ----------
    counter : four arrays of 32-bit words
    key : two arrays of 32-bit words

    Returns
    -------
    four uint64 arrays that hold 32-bit words

    Examples
    --------
    >>> [hex(int(w)) for w in philox4x32((0, 0, 0, 0), (0, 0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = (np.asarray(word, np.uint64) for word in counter)
    k0, k1 = (np.asarray(word, np.uint64) for word in key)
    return _rounds(c0, c1, c2, c3, k0, k1)


def _rounds(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> tuple[Any, Any, Any, Any]:
    for _ in range(rules.PHILOX_ROUNDS):
        c0, c1, c2, c3 = rules.philox_round(c0, c1, c2, c3, k0, k1)
        k0 = rules.philox_next_key(k0, rules.PHILOX_W0)
        k1 = rules.philox_next_key(k1, rules.PHILOX_W1)
    return c0, c1, c2, c3


def uniforms(seeds: ArrayLike, positions: ArrayLike, stream: ArrayLike, token: ArrayLike = 0) -> NDArray[np.float64]:
    """Uniforms in [0, 1), multiples of 2^-53.

    Parameters
    ----------
    seeds, positions : int64, any shapes that broadcast
        The request's seed and the absolute position of the token that is drawn.
    stream : ints
        ``rules.STREAM_*``; broadcasts with the others.
    token : int64, optional
        Which of the numbers at this position: the token id for noise per token, the step of a round under block
        verification, 0 elsewhere. Two share one call of the generator: lane = token // 2.

    Examples
    --------
    >>> float(uniforms(0, 0, 0)) == ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53
    True
    """
    seeds = np.asarray(seeds, np.int64).view(np.uint64)
    positions = np.asarray(positions, np.int64).view(np.uint64)
    token = np.asarray(token, np.int64).view(np.uint64)
    lane, low, high = (token >> 1) & rules.MASK32, positions & rules.MASK32, positions >> 32
    words = (lane, low, high, np.asarray(stream, np.uint64), seeds & rules.MASK32, seeds >> 32)
    if all(word.size == 1 for word in words):
        # One number: the same rounds on Python's integers, without NumPy's cost of each operation.
        w0, w1, w2, w3 = _rounds(*(int(word.item()) for word in words))
        bits = rules.uniform_bits(w2, w3) if int(token.item()) & 1 else rules.uniform_bits(w0, w1)
        return np.full(np.broadcast_shapes(*(word.shape for word in words)), rules.uniform(float(bits)))
    w0, w1, w2, w3 = _rounds(*words)
    odd = (token & 1) == 1
    bits = rules.uniform_bits(np.where(odd, w2, w0), np.where(odd, w3, w1))
    return rules.uniform(bits.astype(np.float64))


def gumbel(seeds: ArrayLike, positions: ArrayLike, token: ArrayLike) -> NDArray[np.float64]:
    """Standard Gumbel noise per token: -log(-log(1 - u)); u is resolved to 2^-53 where the winners are.

    `seeds`, `positions` and `token` broadcast, as in `uniforms`.
    """
    u = uniforms(seeds, positions, rules.STREAM_GUMBEL, token)
    with np.errstate(divide="ignore"):
        return -np.log(-np.log1p(-u))
