"""The exact output law of a sampler, without a random number.

Every uniform goes into a kernel as an argument, and the token is a step function of each of them. A
finite number of bisections finds every step to the last bit of the uniform's grid, and the steps
are the law. Chance plays no part, so a law that is off by 1e-4 shows at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Run = Callable[[NDArray[np.float64]], NDArray[np.int64]]


@dataclass(frozen=True)
class Steps:
    """A step function of one uniform.

    Attributes
    ----------
    starts : [S] where each step starts, the first at 0
    tokens : [S] the value of each step
    runs : how many batches of uniforms it took
    """

    starts: NDArray[np.float64]
    tokens: NDArray[np.int64]
    runs: int

    def law(self, size: int) -> NDArray[np.float64]:
        """Probability of the tokens 0 .. size - 1."""
        widths = np.diff(np.append(self.starts, 1.0))
        law = np.zeros(size)
        np.add.at(law, self.tokens, widths)
        return law


def find_steps(
    run: Run,
    m: int = 1,
    column: int = 0,
    fixed: ArrayLike | None = None,
    bits: int = 53,
    probes: int = 64,
) -> Steps:
    """Find every step of a step function of one uniform.

    Parameters
    ----------
    run : callable
        ``run(uniforms[n, m]) -> tokens[n]``; row i of the result depends on row i alone.
    m : int
        Uniforms that one draw takes.
    column : int
        The uniform that varies.
    fixed : [m], optional
        The other uniforms; 0 by default.
    bits : int
        Uniforms are multiples of 2^-bits: 53 for float64, 24 for float32.
    probes : int
        Uniforms tried at first, evenly spread. Two probes with the same token are taken to
        lie on one step, which holds for a token that rises or falls with the uniform,
        whatever `probes` is; for other functions a step narrower than 1 / probes between
        two equal ones is missed.

    Returns
    -------
    Steps
    """
    grid = 1 << bits
    base = np.zeros(m) if fixed is None else np.asarray(fixed, np.float64)
    runs = 0

    def tokens_at(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        nonlocal runs
        runs += 1
        uniforms = np.tile(base, (numbers.size, 1))
        uniforms[:, column] = numbers / grid
        return np.asarray(run(uniforms), np.int64)

    numbers = np.unique(np.linspace(0, grid - 1, min(probes, grid)).astype(np.int64))
    tokens = tokens_at(numbers)
    while True:
        # Between two neighbours with different tokens lies at least one step: halve until
        # they are next to each other.
        open_ = np.flatnonzero((tokens[1:] != tokens[:-1]) & (np.diff(numbers) > 1))
        if open_.size == 0:
            break
        middle = numbers[open_] + (numbers[open_ + 1] - numbers[open_]) // 2
        found = tokens_at(middle)
        numbers = np.insert(numbers, open_ + 1, middle)
        tokens = np.insert(tokens, open_ + 1, found)
        # Only the ends of each run of equal tokens matter from here on.
        keep = np.ones(numbers.size, bool)
        keep[1:-1] = (tokens[1:-1] != tokens[:-2]) | (tokens[1:-1] != tokens[2:])
        numbers, tokens = numbers[keep], tokens[keep]
    first = np.append(True, tokens[1:] != tokens[:-1])
    return Steps(numbers[first] / grid, tokens[first], runs)


def sampler_law(run: Run, size: int, bits: int = 53, probes: int = 64) -> NDArray[np.float64]:
    """Exact law over `size` tokens of a sampler that takes one uniform."""
    return find_steps(run, bits=bits, probes=probes).law(size)


@dataclass(frozen=True)
class RoundLaw:
    """The law of one draft token's accept / residual round.

    Attributes
    ----------
    tokens : [V] probability of every output token
    acceptance : [V] probability that the draft token is accepted, given that it is proposed
    residual : [V, V] law of the recovered token, given the rejected draft token; zero where the
        draft token is always accepted
    """

    tokens: NDArray[np.float64]
    acceptance: NDArray[np.float64]
    residual: NDArray[np.float64]


def round_law(
    run: Callable[[NDArray[np.int64], NDArray[np.float64]], tuple[NDArray[np.int64], NDArray[np.bool_]]],
    draft: ArrayLike,
    bits: int = 53,
    probes: int = 64,
) -> RoundLaw:
    """Exact law of one accept / residual round with a draft token that follows `draft`.

    Parameters
    ----------
    run : callable
        ``run(draft_tokens[n], uniforms[n, 2]) -> (tokens[n], accepted[n])``; the first uniform
        accepts, the second draws the recovered token. Acceptance must stop at one uniform and not
        come back.
    draft : [V]
        Probabilities of the draft token.
    bits : int
        Uniforms are multiples of 2^-bits.
    """
    draft = np.asarray(draft, np.float64)
    size = draft.size
    acceptance = np.ones(size)
    residual = np.zeros((size, size))
    largest = 1.0 - 2.0**-bits
    for token in np.flatnonzero(draft > 0):

        def accepted(uniforms: NDArray[np.float64], token: int = token) -> NDArray[np.int64]:
            return np.asarray(run(np.full(len(uniforms), token), uniforms)[1]).astype(np.int64)

        def recovered(uniforms: NDArray[np.float64], token: int = token) -> NDArray[np.int64]:
            return run(np.full(len(uniforms), token), uniforms)[0]

        acceptance[token] = find_steps(accepted, m=2, bits=bits, probes=2).law(2)[1]
        if acceptance[token] < 1:
            steps = find_steps(recovered, m=2, column=1, fixed=(largest, 0.0), bits=bits, probes=probes)
            residual[token] = steps.law(size)
    tokens = draft * acceptance + (draft * (1 - acceptance)) @ residual
    return RoundLaw(tokens, acceptance, residual)


def total_variation(p: ArrayLike, q: ArrayLike) -> float:
    """Half the sum of the absolute differences of two laws."""
    return 0.5 * float(np.abs(np.asarray(p, np.float64) - np.asarray(q, np.float64)).sum())
