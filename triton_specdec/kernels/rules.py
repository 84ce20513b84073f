"""The rules of `triton_specdec.reference.rules`, compiled: wrapped once, stated nowhere else.

Kernels see values and never restate a rule. In a process whose Triton interprets, the plain functions are used: the
interpreter needs no wrapping, and a wrapped rule would look for ``triton.language`` in a module without imports.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from ..reference import filter as reference_filter
from ..reference import rules


def _wrapped(rule: Callable) -> Any:
    return rule if triton.knobs.runtime.interpret else triton.jit(rule)


is_kept = _wrapped(rules.is_kept)
rank_key = _wrapped(rules.rank_key)
rank_bits = _wrapped(rules.rank_bits)
is_greedy = _wrapped(rules.is_greedy)
is_top_k_on = _wrapped(rules.is_top_k_on)
is_top_p_on = _wrapped(rules.is_top_p_on)
is_min_p_on = _wrapped(rules.is_min_p_on)
scaled = _wrapped(rules.scaled)
is_in_top_k = _wrapped(rules.is_in_top_k)
is_in_top_p = _wrapped(rules.is_in_top_p)
is_in_min_p = _wrapped(rules.is_in_min_p)
is_in_min_tokens = _wrapped(rules.is_in_min_tokens)
is_drawn = _wrapped(rules.is_drawn)
is_usable_draft = _wrapped(rules.is_usable_draft)
is_child = _wrapped(rules.is_child)
is_accepted = _wrapped(rules.is_accepted)
residual = _wrapped(rules.residual)
block_carry = _wrapped(rules.block_carry)
is_block_accepted = _wrapped(rules.is_block_accepted)
truncated_length = _wrapped(rules.truncated_length)
kept_pages = _wrapped(rules.kept_pages)
is_freed = _wrapped(rules.is_freed)
is_slot = _wrapped(rules.is_slot)
is_compaction = _wrapped(rules.is_compaction)
is_repetition_on = _wrapped(rules.is_repetition_on)
is_count_penalty_on = _wrapped(rules.is_count_penalty_on)
repetition_penalty = _wrapped(rules.repetition_penalty)
count_penalties = _wrapped(rules.count_penalties)
philox_round = _wrapped(rules.philox_round)
philox_next_key = _wrapped(rules.philox_next_key)
uniform_bits = _wrapped(rules.uniform_bits)
uniform = _wrapped(rules.uniform)

NO_CUT_ID = tl.constexpr(rules.NO_CUT_ID)
STATUS_NAN = tl.constexpr(rules.STATUS_NAN)
STATUS_INF = tl.constexpr(rules.STATUS_INF)
STATUS_EMPTY = tl.constexpr(rules.STATUS_EMPTY)
STATUS_PARAMETER = tl.constexpr(rules.STATUS_PARAMETER)
STATUS_DRAFT_ID = tl.constexpr(rules.STATUS_DRAFT_ID)
STATUS_NEGATIVE = tl.constexpr(rules.STATUS_NEGATIVE)
PAD_TOKEN = tl.constexpr(rules.PAD_TOKEN)
STREAM_ACCEPT = tl.constexpr(rules.STREAM_ACCEPT)
STREAM_RESIDUAL = tl.constexpr(rules.STREAM_RESIDUAL)
STREAM_GUMBEL = tl.constexpr(rules.STREAM_GUMBEL)
PHILOX_ROUNDS = tl.constexpr(rules.PHILOX_ROUNDS)
PHILOX_W0 = tl.constexpr(rules.PHILOX_W0)
PHILOX_W1 = tl.constexpr(rules.PHILOX_W1)
MASK32 = tl.constexpr(rules.MASK32)
LARGEST = tl.constexpr(reference_filter.LARGEST)
FLATTEST = tl.constexpr(reference_filter.FLATTEST)
STEEPEST = tl.constexpr(reference_filter.STEEPEST)
