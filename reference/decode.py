"""Speculative decoding as the papers write it: one sequence, models as functions from tokens to logits.

`triton_specdec.SpecDecoder` is this loop with KV caches, batches and stops; given the same models and seed it emits
the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import rng, rules
from .filter import ROW_FIELDS, Support, filter_logits
from .sample import gumbel_argmax, sample
from .verify import draw_uniforms, verify, verify_coupled

# Tokens of a sequence -> logits [len(tokens), V] after each of them.
Model = Callable[[list[int]], NDArray]


def decode(
    target: Model,
    draft: Model | None,
    prompt: list[int],
    max_new_tokens: int,
    *,
    num_speculative_tokens: int = 4,
    rule: str = "rejection",
    seed: int = 0,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> list[int]:
    """New tokens after `prompt`; draft=None decodes plainly, by Gumbel draws of the target."""

    def support(logits: NDArray) -> Support:
        each = np.ones(len(logits))
        parameters = (temperature * each, top_k * each, top_p * each, min_p * each, each)
        return filter_logits(logits, *parameters)

    def draw(model: Model, tokens: list[int], stream: int, step: int = 0) -> tuple[int, Support]:
        one = support(model(tokens)[-1:])
        at, key = np.array([len(tokens) - step]), np.array([seed])
        if stream == rules.STREAM_GUMBEL:
            return int(gumbel_argmax(one, key, at)[0]), one
        return int(sample(one, rng.uniforms(key, at, stream, step))[0]), one

    coupled = rule == "coupled" or draft is None
    anchor, _ = draw(target, prompt, rules.STREAM_GUMBEL if coupled else rules.STREAM_SAMPLE)
    tokens = [*prompt, anchor]
    end = len(prompt) + max_new_tokens
    while len(tokens) < end:
        drafts: list[int] = []
        laws: list[Support] = []
        for i in range(num_speculative_tokens if draft is not None else 0):
            assert draft is not None
            stream = rules.STREAM_GUMBEL if coupled else rules.STREAM_DRAFT
            token, law = draw(draft, tokens + drafts, stream, i if rule == "block" else 0)
            drafts.append(token)
            laws.append(law)
        given = np.array([drafts], np.int64)
        count, key, at = np.array([len(drafts)]), np.array([seed]), np.array([len(tokens)])
        after = support(target(tokens + drafts)[len(tokens) - 1 :])
        if coupled:
            result = verify_coupled(given, after, count, key, at)
        else:
            u, v = draw_uniforms(key, at, len(drafts), rule)
            q = _stack(laws)
            result = verify(given, after, q, count, rule=rule, accept_uniforms=u, draw_uniforms=v)
        tokens += result.tokens[0, : result.num_emitted[0]].tolist()
    return tokens[len(prompt) : end]


def _stack(laws: list[Support]) -> Support:
    names = ("logits", *ROW_FIELDS)
    stacked: dict[str, Any] = {name: np.concatenate([getattr(law, name) for law in laws]) for name in names}
    return Support(**stacked)
