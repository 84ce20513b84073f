"""The side by side of the decode loop: every way gives the same greedy text, and the counts are what they must be."""

import math

import pytest
from tiny_models import near, tiny

from triton_specdec.bench.decoding import PLAIN, Counted, Pair, compare, embedded_pair, what_differs

PROMPTS = [[3, 4, 5], [9, 1, 2, 3, 4], [10, 11]]


@pytest.fixture(scope="module")
def rows():
    model = tiny("Llama")
    pair = Pair(model, near(model), PROMPTS, 20)
    for one in (pair.target, pair.draft):
        one.generation_config.pad_token_id = 0
    return {row.name: row for row in compare(pair, 4, temperature=0.0, repeats=1)}


def test_every_way_gives_the_same_greedy_text(rows):
    first, *rest = (row.texts for row in rows.values())
    assert all(texts == first for texts in rest)
    assert [len(text) for text in first] == [20] * 3


def test_a_batch_takes_fewer_forwards_than_assisted_generation_row_by_row(rows):
    ours, alone, theirs = (
        rows[name]
        for name in ("triton_specdec, batch", "triton_specdec, one by one", "transformers assisted, one by one")
    )
    assert ours.target_forwards < theirs.target_forwards
    assert ours.draft_forwards < theirs.draft_forwards
    # Alone, the same drafts are accepted. Ours feeds each prompt before the first drafts, theirs with them.
    assert 0 <= alone.target_forwards - theirs.target_forwards <= len(PROMPTS)
    assert rows["triton_specdec, plain, batch"].target_forwards == 20
    assert rows["transformers plain, batch"].target_forwards == 20


def test_the_host_reads_once_a_round(rows):
    for name in ("triton_specdec, batch", "triton_specdec, one by one", "triton_specdec, plain, batch"):
        assert rows[name].host_reads == rows[name].target_forwards
    assert rows["transformers assisted, one by one"].host_reads > rows["triton_specdec, one by one"].host_reads


def test_tokens_fed(rows):
    plain = rows["triton_specdec, plain, batch"]
    assert plain.target_tokens_fed == 3 * 5 + 3 * 19
    ours = rows["triton_specdec, batch"]
    assert ours.target_tokens_fed == 3 * 5 + (ours.target_forwards - 1) * 3 * 5
    assert ours.target_forwards >= 1 + math.ceil(19 / 5)


def test_a_way_with_another_greedy_text_is_not_timed(rows):
    assert what_differs(list(rows.values())) == {}
    wrong = Counted("other", texts=[[0] * 20] * 3)
    assert "greedy tokens" in what_differs([rows[PLAIN], wrong])["other"]


def test_the_embedded_pair():
    pair = embedded_pair(4)
    rows = compare(Pair(pair.target, pair.draft, pair.prompts[:2], 4), 2, 0.8, repeats=1)
    assert [row.new_tokens for row in rows] == [8] * 5
    assert all(row.tokens_per_second > 0 for row in rows)
