"""Truncation is a length; pages come back; compaction loads before it stores."""

import numpy as np
import pytest
import torch

from triton_specdec import compact_kv_, truncate_kv_, truncate_paged_kv_
from triton_specdec.reference import rules


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_lengths():
    n = ints(17, 4, 9, 0, 5)
    out = truncate_kv_(n, ints(15, 9, 0, 3, -2))
    assert out is n
    assert n.tolist() == [15, 4, 0, 0, 0]


def test_keep_may_come_as_int64_from_a_sum():
    n = ints(17)
    assert truncate_kv_(n, torch.tensor([3])).tolist() == [3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("layers", [(), (3,)])
def test_scrub_zeroes_the_dropped_slots_only(dtype, layers):
    cache = torch.ones(*layers, 2, 2, 8, 4).to(dtype)
    other = cache.clone()
    n = ints(6, 5)
    truncate_kv_(n, ints(4, 9), [cache, other], scrub=True)
    want = torch.ones(*layers, 2, 2, 8, 4)
    want[..., 0, :, 4:6, :] = 0
    assert torch.equal(cache.float(), want)
    assert torch.equal(other.float(), want)


@pytest.mark.parametrize("layers", [(), (3,)])
def test_heads_and_slots_in_the_other_order(layers):
    cache = torch.arange(2.0 * 8 * 3 * 4).view(2, 8, 3, 4).expand(*layers, 2, 8, 3, 4).clone()
    want, n = cache.clone(), ints(6, 5)
    truncate_kv_(n, ints(4, 9), [cache], scrub=True, layout="bshd")
    want[..., 0, 4:6, :, :] = 0
    assert torch.equal(cache, want)
    compact_kv_([cache], ints(7, 6, 3, 4).view(2, 2), ints(6, 2), ints(2, 1), layout="bshd")
    moved = want.clone()
    moved[..., 0, 6, :, :], moved[..., 0, 7, :, :] = want[..., 0, 7, :, :], want[..., 0, 6, :, :]
    moved[..., 1, 2, :, :] = want[..., 1, 3, :, :]
    assert torch.equal(cache, moved)


def test_scrub_of_a_slice_stays_inside_it():
    base = torch.ones(4, 2, 12, 6)
    truncate_kv_(ints(8, 8), ints(5, -1), [base[1:3, :, 2:10, 1:5]], scrub=True)
    want = torch.ones(4, 2, 12, 6)
    want[1, :, 7:10, 1:5] = 0
    want[2, :, 2:10, 1:5] = 0
    assert torch.equal(base, want)


def test_scrub_takes_nan_away():
    cache = torch.full((1, 1, 4, 2), torch.nan)
    truncate_kv_(ints(4), ints(0), [cache], scrub=True)
    assert cache.abs().sum() == 0


def test_without_scrub_caches_stay():
    cache = torch.ones(1, 1, 4, 2)
    truncate_kv_(ints(4), ints(1), [cache])
    assert torch.equal(cache, torch.ones(1, 1, 4, 2))


def paged(lengths, keep, table, free=(), room=16, page=16):
    n, t = ints(*lengths), torch.tensor(table, dtype=torch.int32)
    pages, count = torch.full((room,), -1, dtype=torch.int32), ints(len(free))
    pages[: len(free)] = ints(*free)
    truncate_paged_kv_(n, ints(*keep), t, page, pages, count)
    return n.tolist(), t.tolist(), pages[: int(count)].tolist()


@pytest.mark.parametrize(
    ("lengths", "keep", "table", "free", "want"),
    [
        # 15 cached, 5 appended, none accepted: the anchor makes 16, one page kept, one freed.
        ([20], [16], [[3, 7]], [], ([16], [[3, -1]], [7])),
        ([20], [17], [[3, 7]], [], ([17], [[3, 7]], [])),
        ([20], [40], [[3, 7]], [], ([20], [[3, 7]], [])),
        ([20], [0], [[3, 7]], [1], ([0], [[-1, -1]], [1, 3, 7])),
        ([33, 33], [1, 17], [[1, 2, 3], [4, 5, 6]], [9], ([1, 17], [[1, -1, -1], [4, 5, -1]], [9, 2, 3, 6])),
        ([5], [3], [[2, -1]], [], ([3], [[2, -1]], [])),
    ],
)
def test_pages_by_hand(lengths, keep, table, free, want):
    assert paged(lengths, keep, table, free) == want


def test_no_page_is_lost_or_doubled():
    random = np.random.default_rng(0)
    batch, blocks, page = 5, 8, 4
    total = batch * blocks
    table = torch.full((batch, blocks), -1, dtype=torch.int32)
    n = torch.zeros(batch, dtype=torch.int32)
    pages, count = torch.arange(total, dtype=torch.int32), ints(total)
    for _ in range(300):
        for b in range(batch):  # append up to 9 tokens, taking pages from the end of the free list
            n[b] = min(int(n[b]) + int(random.integers(0, 10)), blocks * page)
            for i in range(-(-int(n[b]) // page)):
                if table[b, i] < 0:
                    count -= 1
                    table[b, i] = pages[int(count)]
        keep = torch.from_numpy(random.integers(0, 34, batch)).int()
        before = n.clone()
        truncate_paged_kv_(n, keep, table, page, pages, count)
        assert torch.equal(n, torch.minimum(before, keep))
        assert ((table >= 0).sum(1) == (n + page - 1) // page).all()
        held = table[table >= 0].tolist() + pages[: int(count)].tolist()
        assert sorted(held) == list(range(total))


def test_a_full_free_list_is_an_error_and_changes_nothing():
    n, table, pages, count = ints(20), torch.tensor([[3, 7]], dtype=torch.int32), ints(1, 2), ints(2)
    with pytest.raises(ValueError, match="no room"):
        truncate_paged_kv_(n, ints(1), table, 16, pages, count)
    assert (n.tolist(), table.tolist(), count.tolist()) == ([20], [[3, 7]], [2])


@pytest.mark.parametrize("layers", [(), (2,)])
def test_compaction_loads_before_it_stores(layers):
    cache = torch.arange(8.0).view(1, 1, 8, 1).expand(*layers, 2, 3, 8, 4).clone()
    source = torch.tensor([[0, 2, 5], [6, 5, 7]], dtype=torch.int32)
    compact_kv_([cache], source, ints(0, 5), ints(3, 2))
    assert cache[..., 0, 1, :, 2].reshape(-1, 8)[0].tolist() == [0, 2, 5, 3, 4, 5, 6, 7]
    assert cache[..., 1, 2, :, 0].reshape(-1, 8)[-1].tolist() == [0, 1, 2, 3, 4, 6, 5, 7]


def test_a_cache_that_layers_share_is_moved_once():
    cache = torch.arange(8.0).view(1, 1, 8, 1)
    compact_kv_([cache, cache.view(1, 1, 8, 1)], ints(2, 1)[None], ints(1), ints(2))
    assert cache.flatten().tolist() == [0, 2, 1, 3, 4, 5, 6, 7]


def test_compaction_of_nothing_moves_nothing():
    cache = torch.randn(2, 1, 4, 2).bfloat16()
    before = cache.clone()
    compact_kv_([cache], torch.full((2, 3), 99, dtype=torch.int32), ints(9, 9), ints(0, 0))
    assert torch.equal(cache, before)


def test_attention_over_a_truncated_cache_is_that_of_one_that_never_held_the_rejected():
    from triton_specdec.models import load_embedded_pair

    model = load_embedded_pair().draft
    prompt, rejected, after = torch.tensor([[72, 105, 32]]), torch.tensor([[1, 2, 3, 4]]), torch.tensor([[116, 104]])
    with torch.inference_mode():
        clean = model.new_cache(1, 32)
        model(prompt, clean)
        want = model(after, clean)
        dirty = model.new_cache(1, 32)
        model(prompt, dirty)
        model(rejected, dirty)
        truncate_kv_(dirty.lengths, ints(3))
        got = model(after, dirty)
        # Zeroing instead of truncating: a zeroed key still takes attention.
        zeroed = model.new_cache(1, 32)
        model(prompt, zeroed)
        model(rejected, zeroed)
        zeroed.keys[..., 3:7, :] = 0
        zeroed.values[..., 3:7, :] = 0
        wrong = model(after, zeroed)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert (wrong - want).abs().max() > 0.1


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: truncate_kv_(torch.tensor([3]), ints(1)), TypeError, "lengths"),
        (lambda: truncate_kv_(ints(3), ints(1, 2)), ValueError, "keep"),
        (lambda: truncate_kv_(ints(3), ints(1), scrub=True), ValueError, "caches"),
        (lambda: truncate_kv_(ints(5), ints(1), [torch.ones(1, 8, 4, 2)], scrub=True), ValueError, "have 4 slots"),
        (lambda: truncate_kv_(ints(3), ints(1), [torch.ones(2, 1, 4, 2)]), ValueError, r"caches\[0\]"),
        (lambda: truncate_kv_(ints(3), ints(1), [torch.ones(4, 2)]), ValueError, r"caches\[0\]"),
        (lambda: truncate_kv_(ints(3), ints(1), [torch.ones(1, 4, 1, 2)], layout="sbhd"), ValueError, "layout"),
        (lambda: truncate_kv_(ints(3), ints(1), [torch.ones(2, 4, 1, 2)], layout="bshd"), ValueError, "1, S, H, D"),
        (lambda: truncate_kv_(ints(3), ints(1), [torch.ones(1, 1, 4, 2).to(torch.complex128)]), TypeError, "8 bytes"),
        (lambda: paged([3], [1], [[0]], page=0), ValueError, "page_size"),
        (lambda: paged([3], [1], [[0], [1]]), ValueError, "block_table"),
        (lambda: compact_kv_([], ints(0)[None], ints(0), ints(1)), ValueError, "caches"),
        (lambda: compact_kv_([torch.ones(1, 1, 4, 2)], ints(4)[None], ints(0), ints(1)), ValueError, "source"),
        (lambda: compact_kv_([torch.ones(1, 1, 4, 2)], ints(0)[None], ints(4), ints(1)), ValueError, "start"),
        (lambda: compact_kv_([torch.ones(1, 1, 4, 2)], ints(0)[None], ints(0), ints(2)), ValueError, "count"),
        (
            lambda: compact_kv_([torch.ones(1, 1, 4, 2)], ints(0)[None], ints(1), ints(1), layout="bshd"),
            ValueError,
            "sta",
        ),
        (
            lambda: compact_kv_([torch.ones(1, 1, 4, 2)], ints(0)[None], ints(0), ints(1), layout="s"),
            ValueError,
            "layo",
        ),
    ],
)
def test_errors_name_the_argument(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_largest_keep_keeps_everything(dtype):
    n, table, pages, count = ints(20), torch.tensor([[0, 1, -1]], dtype=torch.int32), ints(7, 7), ints(0)
    keep = torch.tensor([torch.iinfo(dtype).max], dtype=dtype)
    truncate_paged_kv_(n, keep, table, 16, pages, count)
    assert (n.tolist(), table.tolist(), count.tolist()) == ([20], [[0, 1, -1]], [0])
    truncate_paged_kv_(n, torch.ones_like(keep), table, 2**40, pages, count)
    assert (n.tolist(), table.tolist(), pages.tolist()) == ([1], [[0, -1, -1]], [1, 7])
    n[0] = 20
    assert truncate_kv_(n, keep).tolist() == [20]


def test_a_start_that_would_wrap_is_refused():
    with pytest.raises(ValueError, match="start"):
        compact_kv_([torch.ones(1, 1, 4, 2)], ints(0)[None], ints(2**31 - 1), ints(1))


@pytest.mark.parametrize("caches", [torch.ones(1, 1, 4, 2), 5])
def test_caches_are_a_list(caches):
    with pytest.raises(TypeError, match="caches"):
        truncate_kv_(ints(1), ints(0), caches, scrub=True)
    with pytest.raises(TypeError, match="caches"):
        compact_kv_(caches, ints(0)[None], ints(0), ints(1))


# The rules by hand: kernels and reference share them.


@pytest.mark.parametrize(
    ("length", "keep", "want"),
    [(5, 3, 3), (5, 5, 5), (5, 9, 5), (5, 0, 0), (5, -2, 0), (0, 4, 0), (-1, 4, -1), (7, 2**62, 7)],
)
def test_the_truncated_length(length, keep, want):
    assert rules.truncated_length(length, keep) == want


@pytest.mark.parametrize(
    ("start", "count", "inside"),
    [
        (0, 4, True),
        (4, 4, True),
        (5, 4, False),
        (-1, 2, False),
        (0, 5, False),
        (0, -1, False),
        (8, 0, True),
        (9, 0, False),
    ],
)
def test_a_compaction_of_at_most_four_slots_into_eight(start, count, inside):
    assert rules.is_compaction(start, count, 4, 8) == inside


def test_slots_and_freed_blocks():
    assert [rules.is_slot(i, 8) for i in (-1, 0, 7, 8)] == [False, True, True, False]
    assert [rules.is_freed(i, page, 2) for i, page in ((1, 7), (2, 7), (2, -1), (3, 0))] == [False, True, False, True]
