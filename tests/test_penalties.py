"""Penalties: by hand, counted along the drafts, in place."""

import pytest
import torch

from triton_specdec import apply_penalties_


def counts(*rows):
    return torch.tensor(rows, dtype=torch.int32)


def test_each_penalty_by_hand():
    x = torch.tensor([[4.0, -4.0, 4.0, -4.0, 1.0]])
    mask = torch.tensor([[False, False, True, True, False]])
    out = apply_penalties_(x, counts([2, 1, 0, 0, 0]), repetition=2.0, frequency=0.5, presence=0.25, prompt_mask=mask)
    assert out is x
    # Repetition over prompt and output; frequency and presence over the output alone.
    assert x[0].tolist() == [2 - 1 - 0.25, -8 - 0.5 - 0.25, 2, -8, 1]


def test_rows_count_the_drafts_before_them():
    x = torch.ones(1, 3, 9)
    apply_penalties_(x, counts([0] * 9), frequency=2.0, draft_tokens=torch.tensor([[7, 7]]))
    assert x[0, :, 7].tolist() == [1, -1, -3]
    assert x[0, :, :7].min() == 1


def test_drafts_outside_the_vocabulary_count_nothing():
    x = torch.ones(1, 3, 4)
    apply_penalties_(x, counts([0] * 4), frequency=2.0, repetition=3.0, draft_tokens=torch.tensor([[-1, 4]]))
    assert torch.equal(x, torch.ones(1, 3, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_off_changes_nothing_and_minus_infinity_stays(dtype):
    x = torch.randn(2, 6).to(dtype)
    x[0, 3] = -torch.inf
    before = x.clone()
    apply_penalties_(x, counts([1] * 6, [0] * 6))
    assert torch.equal(x, before)
    apply_penalties_(x, counts([1] * 6, [0] * 6), repetition=1.5, frequency=0.1)
    assert x[0, 3] == -torch.inf
    assert torch.equal(x[1], before[1])
    assert not x.isnan().any()


def test_one_value_a_request():
    x = torch.ones(2, 2, 3)
    frequency = torch.tensor([1.0, 3.0])
    apply_penalties_(x, counts([1, 0, 0], [1, 0, 0]), frequency=frequency, draft_tokens=torch.tensor([[0], [1]]))
    assert x[:, :, 0].tolist() == [[0, -1], [-2, -2]]
    assert x[:, :, 1].tolist() == [[1, 1], [1, -2]]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"repetition": 0.0}, ValueError, "repetition"),
        ({"repetition": -1.0}, ValueError, "repetition"),
        ({"frequency": float("nan")}, ValueError, "frequency"),
        ({"counts": torch.zeros(2, 3)}, TypeError, "counts"),
        ({"counts": torch.zeros(2, 4, dtype=torch.int32)}, ValueError, "counts"),
        ({"prompt_mask": torch.zeros(2, 3, dtype=torch.int32)}, TypeError, "prompt_mask"),
        ({"draft_tokens": torch.zeros(2, 1, dtype=torch.int64)}, ValueError, "draft_tokens"),
    ],
)
def test_errors_name_the_argument(options, error, words):
    args = {"counts": torch.zeros(2, 3, dtype=torch.int32), **options}
    with pytest.raises(error, match=words):
        apply_penalties_(torch.zeros(2, 3), args.pop("counts"), **args)


@pytest.mark.parametrize("name", ["repetition", "frequency", "presence"])
@pytest.mark.parametrize("value", [float("inf"), torch.tensor([float("inf")] * 2)])
def test_infinite_penalties_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        apply_penalties_(torch.ones(2, 3), counts([0, 1, 2], [0, 0, 0]), **{name: value})


def test_the_smallest_repetition_leaves_unseen_tokens_alone():
    x = torch.tensor([[1.0, -1.0, 1.0]])
    apply_penalties_(x, counts([0, 0, 1]), repetition=1e-320)
    assert x[0, :2].tolist() == [1, -1]
    assert not x.isnan().any()


def test_logits_that_need_a_gradient_are_refused():
    with pytest.raises(ValueError, match="detach"):
        apply_penalties_(torch.ones(1, 3, requires_grad=True) * 2, counts([0, 0, 1]), frequency=1.0)
