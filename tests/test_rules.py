"""The rules by hand: kernels and reference share them, so neither can judge them.

Every expected value below was worked out on paper or with fractions.
"""

import math

import numpy as np
import pytest

from triton_specdec.reference import rules


@pytest.mark.parametrize(
    ("x", "token", "cut", "cut_id", "kept"),
    [(2.0, 9, 1.0, 3, True), (1.0, 3, 1.0, 3, True), (1.0, 4, 1.0, 3, False), (0.5, 0, 1.0, 3, False)],
)
def test_a_support_is_a_prefix_of_the_rank_order(x, token, cut, cut_id, kept):
    assert rules.is_kept(x, token, cut, cut_id) == kept


def test_nothing_at_minus_infinity_is_kept_when_no_filter_cut():
    assert not rules.is_kept(-math.inf, 0, -math.inf, rules.NO_CUT_ID)
    assert rules.is_kept(-3.0e38, 7, -math.inf, rules.NO_CUT_ID)


def test_rank_key_sorts_descending_and_comes_back():
    x = np.array([math.inf, 3.0e38, 2.0, 1e-45, 0.0, -1e-45, -2.0, -3.0e38, -math.inf], np.float32)
    keys = rules.rank_key(x.view(np.int32))
    assert (np.diff(keys.astype(np.int64)) > 0).all()
    assert (rules.rank_bits(keys).view(np.float32) == x).all()


@pytest.mark.parametrize(("k", "on"), [(-1, False), (0, False), (1, True), (9, True), (10, False), (10**7, False)])
def test_top_k_is_off_at_zero_and_from_the_vocabulary_on(k, on):
    assert rules.is_top_k_on(k, 10) == on


@pytest.mark.parametrize(("p", "on"), [(-0.5, True), (0.0, True), (0.99, True), (1.0, False), (1.5, False)])
def test_top_p_is_off_from_one_on(p, on):
    assert rules.is_top_p_on(p) == on


def test_top_p_looks_at_the_mass_before():
    # .5 .25 .25 with p = .75: exactly .75 stands before the third.
    assert [rules.is_in_top_p(before, 0.75, 1.0) for before in (0.0, 0.5, 0.75)] == [True, True, False]


def test_temperature_takes_the_maximum_first():
    assert rules.scaled(2.0, 4.0, 1.0 / 0.5) == -4.0
    assert rules.scaled(4.0, 4.0, 3.4e38) == 0.0


@pytest.mark.parametrize(
    ("u", "q", "p", "accepted"),
    [
        (0.0, 0.3, 0.0, False),  # p = 0 is never accepted
        (0.0, 0.0, 0.0, False),
        (0.0, 0.0, 0.1, True),
        (0.5, 0.4, 0.2, False),  # u q = p: strictly less
        (0.49, 0.4, 0.2, True),
        (1 - 2.0**-53, 0.3, 0.3, True),  # p = q is always accepted
        (1 - 2.0**-53, 1.0, 1.0, True),
    ],
)
def test_accept(u, q, p, accepted):
    assert rules.is_accepted(u, q, p) == accepted


def test_usable_drafts():
    tokens = [3, -1, 13, 12, 0]
    assert [rules.is_usable_draft(t, i, 4, 13) for i, t in enumerate(tokens)] == [True, False, False, True, False]


def test_p_equal_to_q_is_accepted_for_every_mantissa():
    p = np.random.default_rng(0).random(100_000)
    assert rules.is_accepted(1 - 2.0**-53, p, p).all()


def test_residual_and_bonus():
    assert rules.residual(0.5, 0.2) == pytest.approx(0.3)
    assert rules.residual(0.2, 0.5) == 0
    assert rules.residual(0.2, 0.0) == 0.2


@pytest.mark.parametrize(
    ("carry", "p", "q", "expected"),
    [
        (1.0, 1 / 3, 2 / 3, 0.5),
        (0.5, 2 / 3, 1 / 3, 1.0),
        (1.0, 0.0, 0.0, 0.0),
        (1.0, 0.2, 0.0, 1.0),
        (0.0, 1.0, 0.5, 0.0),
    ],
)
def test_block_carry(carry, p, q, expected):
    assert rules.block_carry(carry, p, q) == pytest.approx(expected)


def test_block_accept_without_a_division():
    # S = .25, carry = .5: h = .25 / .75 = 1/3.
    assert rules.is_block_accepted(0.33, 0.5, 0.25)
    assert not rules.is_block_accepted(0.34, 0.5, 0.25)
    assert not rules.is_block_accepted(0.0, 1.0, 0.0)


def test_draw_is_the_first_that_exceeds():
    cumulative = np.array([0.25, 0.25, 1.0])
    assert rules.is_drawn(cumulative, 0.25, 1.0).tolist() == [False, False, True]
    assert rules.is_drawn(cumulative, 0.0, 1.0).tolist() == [True, True, True]


def test_uniform_bits_are_27_and_26():
    assert rules.uniform(float(rules.uniform_bits(0xFFFFFFFF, 0xFFFFFFFF))) == 1 - 2.0**-53
    assert rules.uniform(float(rules.uniform_bits(1 << 31, 0))) == 0.5
    assert rules.uniform_bits(1 << 5, 1 << 6) == (1 << 26) + 1


def test_kept_lengths():
    # Ten cached, the anchor and four drafts were fed (15), two accepted: 13 stay, two slots go.
    assert rules.kept_length(10, 2) == 13
    # Twelve committed: the draft is fed the last two again.
    assert rules.draft_kept_length(12) == 10
    assert [rules.kept_pages(n, 16) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    cases = [(17, 15, 15), (4, 9, 4), (5, 0, 0), (5, -2, 0), (0, 3, 0), (20, 2**63 - 1, 20), (20, -(2**31), 0)]
    assert [rules.truncated_length(length, keep) for length, keep, _ in cases] == [want for *_, want in cases]


def test_pages_and_slots():
    # Blocks 0 and 1 are kept; block 2 holds page 7, block 3 holds none.
    assert [rules.is_freed(block, page, 2) for block, page in ((0, 5), (1, 0), (2, 7), (3, -1), (4, 0))] == [
        *(False, False, True, False, True)
    ]
    assert [rules.is_slot(slot, 8) for slot in (-1, 0, 7, 8)] == [False, True, True, False]
    # Start, count, columns, slots: three of four to slots 5, 6, 7 of eight.
    assert rules.is_compaction(5, 3, 4, 8)
    for wrong in ((6, 3, 4, 8), (-1, 3, 4, 8), (5, 5, 4, 8), (5, -1, 4, 8), (2**31 - 1, 1, 4, 8)):
        assert not rules.is_compaction(*wrong)
    assert rules.is_compaction(8, 0, 4, 8)


def test_penalties():
    assert rules.repetition_penalty(4.0, 2.0, 1) == 2.0
    assert rules.repetition_penalty(-4.0, 2.0, 1) == -8.0
    assert rules.repetition_penalty(4.0, 2.0, 0) == 4.0
    assert rules.repetition_penalty(-math.inf, 2.0, 1) == -math.inf
    assert rules.repetition_penalty(-math.inf, 2.0, 0) == -math.inf
    assert rules.count_penalties(1.0, 3, 0.5, 0.25) == 1.0 - 1.5 - 0.25
    assert rules.count_penalties(1.0, 0, 0.5, 0.25) == 1.0
    on = [rules.is_repetition_on(r) for r in (1.3, 1e-320, 0.0, -1.0, math.inf, math.nan)]
    assert on == [True, True, False, False, False, False]
    on = [rules.is_count_penalty_on(f) for f in (0.0, -2.0, 1e300, math.inf, -math.inf, math.nan)]
    assert on == [True, True, True, False, False, False]


def test_children_stand_behind_their_parents_and_hold_the_token():
    parents, tokens = np.array([-1, 0, 0, 1, 3]), np.array([9, 5, 6, 5, 7])
    assert rules.is_child(np.arange(5), parents, 0, tokens, 6).tolist() == [False, False, True, False, False]
    assert rules.is_child(np.arange(5), parents, 3, tokens, 7).tolist() == [False] * 4 + [True]
    # A node that names itself, or one behind it, as its parent is no child.
    assert not rules.is_child(np.arange(3), np.array([-1, 1, 2]), 1, np.array([4, 4, 4]), 4).any()
