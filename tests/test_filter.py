"""Supports: hand-worked cases, an independent oracle by sorting, hostile rows, views.

The oracle sorts in float64 and shares no code with the reference.
"""

import numpy as np
import pytest
import torch

from triton_specdec import FilteredLogits, Status, filter_logits

LOG = [-0.6931472, -1.3862944, -1.3862944]  # .5 .25 .25


def kept(logits, dtype=torch.float32, **options):
    f = filter_logits(torch.tensor(logits, dtype=dtype)[None], **options)
    ids = f.keep_mask()[0].nonzero()[:, 0].tolist()
    assert int(f.support_size[0]) == len(ids)
    return ids


def log(*probs):
    return np.log(np.array(probs)).tolist()


BY_HAND = [
    ([1, 1, 1, 0], {"top_k": 2}, [0, 1]),
    (log(0.25, 0.25, 0.25, 0.25), {"top_p": 0.5}, [0, 1]),
    (log(0.30, 0.25, 0.24, 0.11, 0.10), {"top_k": 3, "top_p": 0.35}, [0]),
    (log(0.30, 0.25, 0.24, 0.11, 0.10), {"top_k": 3, "top_p": 0.35, "order": "joint"}, [0, 1]),
    ([0.0] * 100, {"top_p": 0.9}, list(range(90))),
    ([0.0] * 10, {"top_p": 0.6}, list(range(6))),
    ([3, 5, 4], {"top_p": 0.0}, [1]),
    ([3, 5, 4], {"top_p": -0.5}, [1]),
    ([3, 5, 4], {"top_p": 1.0}, [0, 1, 2]),
    ([3, 5, 4], {"top_p": 1.5}, [0, 1, 2]),
    ([3, 5, 4], {"top_k": 0}, [0, 1, 2]),
    ([3, 5, 4], {"top_k": -1}, [0, 1, 2]),
    ([3, 5, 4], {"top_k": 3}, [0, 1, 2]),
    ([3, 5, 4], {"top_k": 10**7}, [0, 1, 2]),
    ([2, 4, 3], {"temperature": 0.0}, [1]),
    ([1, 1, 0], {"temperature": 0.0}, [0]),
    ([1, 1, 0], {"temperature": 0.0, "min_tokens_to_keep": 3}, [0]),
    ([5, 4, 3, 2], {"top_p": 0.01, "min_tokens_to_keep": 3}, [0, 1, 2]),
    ([5, 4, 3, 2], {"top_k": 1, "min_tokens_to_keep": 3}, [0, 1, 2]),
    (LOG, {"top_p": 0.75}, [0, 1]),
    (log(0.5, 0.3, 0.15, 0.05), {"min_p": 0.29}, [0, 1, 2]),
    (log(0.5, 0.3, 0.15, 0.05), {"min_p": 0.31}, [0, 1]),
    (log(0.5, 0.3, 0.15, 0.05), {"min_p": 1.0}, [0]),
    ([-0.0, 0.0, -0.0], {"top_k": 2}, [0, 1]),
    ([3, 5, 4, 9, 9], {"vocab_size": 3}, [0, 1, 2]),
    ([3, 5, 4, 9, 9], {"vocab_size": 3, "top_k": 1}, [1]),
]


@pytest.mark.parametrize(("logits", "options", "ids"), BY_HAND)
def test_support_by_hand(logits, options, ids):
    assert kept(logits, **options) == ids


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 0.0}])
def test_ties_in_bfloat16_go_to_the_lowest_id(options):
    assert kept([21.375, 21.375, 0], torch.bfloat16, **options) == [0]


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 2.0**-126, 1e-5])
def test_tiny_temperatures_are_finite_and_one_hot(temperature):
    f = filter_logits(torch.tensor([[2.0, 4.0, 3.0], [11.06, 11.0, -3.0]]), temperature)
    assert f.probs().tolist() == [[0, 1, 0], [1, 0, 0]]
    assert f.log_prob(torch.tensor([1, 0])).tolist() == [0, 0]
    half = filter_logits(torch.tensor([[11.06, 2.0]], dtype=torch.float16), temperature)
    assert half.probs().tolist() == [[1, 0]]


def test_temperature_is_applied_once():
    f = filter_logits(torch.tensor([[0.0, 1.3862944]]), 2.0)
    assert f.probs()[0].tolist() == pytest.approx([1 / 3, 2 / 3])


def test_a_peak_over_a_long_tail():
    x = torch.cat([torch.tensor([12.0]), torch.randn(151935, generator=torch.Generator().manual_seed(0))])[None]
    f = filter_logits(x, top_k=50, top_p=0.95)
    assert f.keep_mask()[0].nonzero()[:, 0].tolist() == oracle(x[0], top_k=50, top_p=0.95)


def test_a_top_p_that_rounding_cannot_reach_keeps_everything():
    x = torch.randn(1, 40001, generator=torch.Generator().manual_seed(1))
    assert int(filter_logits(x, top_p=1 - 2.0**-53).support_size[0]) == 40001


def test_top_k_per_row_zero_is_off():
    f = filter_logits(torch.randn(2, 100), top_k=torch.tensor([0, 64]))
    assert f.support_size.tolist() == [100, 64]


def oracle(row, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, least=1, order="top_k_first"):
    """Kept ids by a full sort; a loop that follows the words of the rules."""
    x = row.double().numpy()
    ranked = sorted(range(len(x)), key=lambda i: (-x[i], i))
    weight = np.exp((x[ranked] - x.max()) / temperature)
    first = len(x) if top_k <= 0 else min(max(top_k, least), len(x))
    total = weight[:first].sum() if order == "top_k_first" else weight.sum()
    out, before = [], 0.0
    for rank, token in enumerate(ranked):
        stays = rank < first and (top_p >= 1 or before < top_p * total) and weight[rank] >= min_p
        if not (stays or rank < least):
            break
        out.append(token)
        before += weight[rank]
    return sorted(out)


@pytest.mark.parametrize("vocab", [1, 2, 111, 1025, 3001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kept_ids_equal_a_full_sort(vocab, dtype):
    random = np.random.default_rng(vocab)
    for case in range(40):
        spread = random.choice([0.05, 1.0, 5.0])
        x = (torch.from_numpy(random.normal(size=vocab)) * spread).to(dtype)
        if case % 3 == 0:
            x = (x * 2).round() / 2  # many ties
        options = {
            "temperature": float(random.choice([0.3, 1.0, 2.0])),
            "top_k": int(random.choice([0, 1, 7, 64, 65, 900])),
            "top_p": float(random.choice([1.0, 0.95, 0.5, 0.1])),
            "min_p": float(random.choice([0.0, 0.02, 0.5])),
            "order": str(random.choice(["top_k_first", "joint"])),
        }
        least = int(random.choice([1, 3]))
        f = filter_logits(x[None], min_tokens_to_keep=least, **options)
        ids = oracle(x, least=min(least, vocab), **options)
        assert f.keep_mask()[0].nonzero()[:, 0].tolist() == ids, (options, least)
        assert f.support_size.tolist() == [len(ids)]
        assert float(f.probs().sum()) == pytest.approx(1, abs=1e-6)


def test_rows_of_one_call_do_not_know_each_other():
    x = torch.randn(6, 2000, generator=torch.Generator().manual_seed(2)) * 3
    t = torch.tensor([0.0, 0.5, 1.0, 1.0, 2.0, 1.0])
    k = torch.tensor([0, 5, 0, 1999, 70, 0])
    p = torch.tensor([1.0, 0.9, 0.99, 0.5, 1.0, 1.0], dtype=torch.float64)
    together = filter_logits(x, t, k, p)
    for i in range(6):
        alone = filter_logits(x[i : i + 1], float(t[i]), int(k[i]), float(p[i]))
        for name in ("maximum", "cut_value", "cut_id", "log_normalizer", "support_size", "argmax", "status"):
            assert getattr(together, name)[i].item() == getattr(alone, name)[0].item(), name


def test_hostile_rows_say_so_and_leave_their_neighbours_alone():
    good = torch.randn(2, 50)
    nan = good[0].clone()
    nan[7] = torch.nan
    inf = good[0].clone()
    inf[[9, 20]] = torch.inf
    x = torch.stack([good[0], nan, torch.full((50,), -torch.inf), inf, torch.full((50,), torch.nan), good[1]])
    f = filter_logits(x, top_p=0.9)
    assert f.status.tolist() == [0, Status.NAN, Status.EMPTY, Status.INF, Status.NAN | Status.EMPTY, 0]
    alone = filter_logits(good, top_p=0.9)
    assert torch.equal(f.probs()[[0, 5]], alone.probs())
    assert not f.keep_mask()[1, 7]
    assert f.keep_mask()[2].nonzero().tolist() == [[0]]
    assert f.keep_mask()[4].nonzero().tolist() == [[0]]
    assert f.probs()[3].nonzero()[:, 0].tolist() == [9, 20]
    assert f.argmax[[2, 3, 4]].tolist() == [0, 9, 0]
    assert torch.isfinite(f.probs()).all()


def test_token_mask_and_padding():
    x = torch.randn(3, 70)
    words = torch.zeros(3, 3, dtype=torch.int32)
    words[0, 1] = 1 << 4  # id 36
    words[1] = -1  # everything
    f = filter_logits(x, token_mask=words, vocab_size=65)
    assert f.keep_mask()[0].nonzero().tolist() == [[36]]
    assert f.support_size.tolist() == [1, 65, 1]
    assert f.status.tolist() == [0, 0, Status.EMPTY]
    assert f.log_prob(torch.tensor([36, 66, 5])).tolist()[:2] == [0, -np.inf]
    three = filter_logits(x[:, None], token_mask=words[:, None])
    assert torch.equal(three.keep_mask()[:2, 0, :65], f.keep_mask()[:2, :65])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_views_are_as_their_copies_and_stay_unwritten(dtype):
    big = torch.randn(4, 300).to(dtype)
    before = big.clone()
    for view in (big[:, :111], big[:, 1:112], big.t()[:111].t(), big[::2, :111]):
        a, b = filter_logits(view, top_k=9), filter_logits(view.clone(memory_format=torch.contiguous_format), top_k=9)
        assert torch.equal(a.keep_mask(), b.keep_mask())
        assert torch.equal(a.probs(), b.probs())
    assert torch.equal(big, before)


def test_empty_batches():
    f = filter_logits(torch.empty(0, 7), top_k=3, top_p=0.5)
    assert f.support_size.shape == (0,)
    assert f.probs().shape == (0, 7)
    assert filter_logits(torch.empty(0, 3, 7)).status.shape == (0, 3)


def test_shapes_and_dtypes_of_the_contract():
    f = filter_logits(torch.randn(2, 3, 9).bfloat16(), top_k=torch.tensor([1, 4]), top_p=torch.full((6,), 0.9))
    assert isinstance(f, FilteredLogits)
    assert (f.support_size.dtype, f.status.dtype, f.argmax.dtype) == (torch.int32, torch.int32, torch.int64)
    assert f.support_size.shape == f.status.shape == f.argmax.shape == (2, 3)
    assert f.probs().shape == f.keep_mask().shape == (2, 3, 9)
    assert (f.probs().dtype, f.keep_mask().dtype) == (torch.float32, torch.bool)
    assert f.support_size[0].tolist() == [1, 1, 1]
    ids = torch.zeros(2, 3, 4, dtype=torch.int64)
    assert f.log_prob(ids).shape == (2, 3, 4)
    assert f.log_prob(ids[..., 0]).dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"temperature": -1.0}, ValueError, "temperature must be at least 0"),
        ({"temperature": float("nan")}, ValueError, "temperature"),
        ({"temperature": None}, TypeError, "temperature"),
        ({"temperature": torch.tensor([1.0, -1.0])}, ValueError, "temperature"),
        ({"temperature": torch.ones(3)}, ValueError, "temperature"),
        ({"top_k": 2.5}, TypeError, "top_k"),
        ({"top_k": True}, TypeError, "top_k"),
        ({"top_k": torch.tensor([1.0, 2.0])}, TypeError, "top_k"),
        ({"top_p": float("nan")}, ValueError, "top_p"),
        ({"top_p": "0.9"}, TypeError, "top_p"),
        ({"min_p": 1.5}, ValueError, "min_p"),
        ({"min_p": -0.1}, ValueError, "min_p"),
        ({"min_tokens_to_keep": 0}, ValueError, "min_tokens_to_keep"),
        ({"min_tokens_to_keep": torch.tensor([1, 0])}, ValueError, "min_tokens_to_keep"),
        ({"order": "top_p_first"}, ValueError, "'top_k_first', 'joint'"),
        ({"vocab_size": 0}, ValueError, "vocab_size"),
        ({"vocab_size": 6}, ValueError, "vocab_size"),
        ({"token_mask": torch.zeros(2, 2, dtype=torch.int32)}, ValueError, "token_mask"),
        ({"token_mask": torch.zeros(2, 1, dtype=torch.int64)}, TypeError, "token_mask"),
        ({"backend": "cuda"}, ValueError, "backend"),
    ],
)
def test_errors_name_the_argument(options, error, words):
    with pytest.raises(error, match=words):
        filter_logits(torch.zeros(2, 5), **options)


@pytest.mark.parametrize(
    ("logits", "error"),
    [
        ([[1.0]], TypeError),
        (torch.zeros(2, 5, dtype=torch.float64), TypeError),
        (torch.zeros(2, 5, dtype=torch.int32), TypeError),
        (torch.zeros(5), ValueError),
        (torch.zeros(2, 0), ValueError),
        (torch.zeros(1, 2, 3, 4), ValueError),
    ],
)
def test_logits_are_checked(logits, error):
    with pytest.raises(error, match="logits"):
        filter_logits(logits)


def test_a_large_vocabulary_is_no_pain():
    import time

    x = torch.randn(40, 151936) * 3
    times = []
    for _ in range(3):
        start = time.perf_counter()
        filter_logits(x, top_k=50, top_p=0.95)
        times.append(time.perf_counter() - start)
    # About .25 s here; the bound leaves room for a busy machine and still fails for a full sort in Python.
    assert min(times) < 2


def test_an_infinite_temperature_is_uniform_over_what_is_allowed():
    mask = torch.tensor([[0b1011]], dtype=torch.int32)
    for temperature in (float("inf"), 1e300):
        f = filter_logits(torch.randn(1, 8), temperature, token_mask=mask)
        assert f.probs()[0].tolist() == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3, 0, 0, 0, 0])
    assert int(filter_logits(torch.tensor([[1.0, 0, 0, -torch.inf]]), float("inf"), top_p=0.5).support_size) == 2


@pytest.mark.parametrize("shape", [(0, 5), (0, 3, 5)])
def test_log_prob_of_no_rows(shape):
    f = filter_logits(torch.zeros(shape))
    assert f.log_prob(torch.zeros(shape[:-1], dtype=torch.int64)).shape == shape[:-1]
    assert f.log_prob(torch.zeros(*shape[:-1], 4, dtype=torch.int64)).shape == (*shape[:-1], 4)


def test_ids_outside_have_no_probability_in_any_row():
    x = torch.stack([torch.zeros(4), torch.full((4,), -torch.inf), torch.tensor([1.0, 2, 3, 4])])
    f = filter_logits(x, torch.tensor([1.0, 1.0, 0.0]))
    assert torch.isneginf(f.log_prob(torch.tensor([[-1, 4, 2**40]] * 3))).all()
    assert f.log_prob(torch.tensor([[0], [0], [3]]))[1:].tolist() == [[0], [0]]


@pytest.mark.parametrize("value", [torch.ones(3, 2), torch.ones(1, 6), torch.ones(6, 1), torch.ones(3)])
def test_parameters_of_another_shape_are_refused(value):
    with pytest.raises(ValueError, match="temperature"):
        filter_logits(torch.zeros(2, 3, 7), value)


def test_numpy_scalars_and_any_int_are_numbers():
    f = filter_logits(torch.randn(1, 9), np.float32(0.5), np.int64(2), np.float64(0.9))
    assert int(f.support_size) <= 2
    for k in (10**30, -(10**30)):
        assert int(filter_logits(torch.randn(1, 9), top_k=k).support_size) == 9
    with pytest.raises(ValueError, match="temperature"):
        filter_logits(torch.randn(1, 9), 10**400)


def test_a_token_mask_that_is_no_tensor():
    with pytest.raises(TypeError, match="token_mask"):
        filter_logits(torch.zeros(1, 4), token_mask=[[1]])


def test_stack_joins_rows_and_refuses_what_does_not_fit():
    x = torch.randn(2, 3, 8)
    parts = [filter_logits(x[:, i], top_k=3) for i in range(3)]
    for joined in (FilteredLogits.stack(iter(parts)), FilteredLogits.stack(parts, x)):
        assert torch.equal(joined.probs(), filter_logits(x, top_k=3).probs())
    for wrong in ([], [filter_logits(x)], [parts[0], filter_logits(x[:, 1], vocab_size=4)], [parts[0], 3]):
        with pytest.raises(ValueError, match="parts"):
            FilteredLogits.stack(wrong)
    with pytest.raises(ValueError, match="logits"):
        FilteredLogits.stack(parts, x[:, :2])
