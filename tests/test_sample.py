"""Draws: hand-worked uniforms, the exact law of one draw, tails, seeds."""

import numpy as np
import pytest
import torch
from exact_law import sampler_law, total_variation
from scipy import stats

from triton_specdec import filter_logits, sample


def rows(logits, n):
    return torch.tensor(logits, dtype=torch.float32).expand(n, -1)


def u(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_the_first_token_that_exceeds():
    x = torch.tensor([0.25, 0.0, 0.75]).log().expand(4, -1)
    assert sample(filter_logits(x), uniforms=u(0.0, 0.2499, 0.25, 1 - 2.0**-53)).tolist() == [0, 0, 2, 2]


def test_the_largest_uniform_draws_a_token_with_mass():
    random = np.random.default_rng(0)
    x = torch.from_numpy(random.normal(size=(500, 40))).float() * 5
    x[:, 35:] = -torch.inf
    tokens = sample(filter_logits(x, top_p=0.9), uniforms=torch.full((500,), 1 - 2.0**-53, dtype=torch.float64))
    assert filter_logits(x, top_p=0.9).keep_mask().gather(1, tokens[:, None]).all()


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.8, "temperature": 1.7}, {"min_p": 0.1}])
def test_exact_law_of_one_draw(options):
    x = np.random.default_rng(1).normal(size=12) * 2

    def run(uniforms, shift=0.0):
        v = torch.from_numpy(uniforms[:, 0] * (1 - shift)).contiguous()
        return sample(filter_logits(rows(x, len(v)), **options), uniforms=v).numpy()

    p = filter_logits(rows(x, 1), **options).probs()[0].double().numpy()
    assert total_variation(sampler_law(run, 12), p) < 1e-6
    # A total that is off by a thousandth must fail.
    assert total_variation(sampler_law(lambda v: run(v, 1e-3), 12), p) > 1e-5


def test_tail_of_a_peaked_row():
    # 262144 tokens that together hold 3.3e-4: exponentials or uniforms in float32 never reach them.
    x = torch.full((1, 262145), -20.5)
    x[0, 0] = 0
    f = filter_logits(x)
    mass = 262144 * np.exp(-20.5) / (1 + 262144 * np.exp(-20.5))
    uniforms = np.random.default_rng(0).random(100_000)
    edge = 1 - mass
    tail = int((uniforms >= edge).sum())
    assert 15 < tail < 60
    for v in uniforms[uniforms >= edge][:3]:
        assert int(sample(f, uniforms=u(v))[0]) > 0
    assert int(sample(f, uniforms=u(edge - 1e-9))[0]) == 0


def test_every_id_of_a_flat_row_is_reachable():
    vocab = 131072
    f = filter_logits(torch.zeros(1, vocab, dtype=torch.bfloat16))
    for token in (0, 1, 77777, vocab - 1):
        assert int(sample(f, uniforms=u((token + 0.5) / vocab))[0]) == token


@pytest.mark.parametrize("method", ["inverse_cdf", "gumbel"])
def test_seeded_draws_follow_the_law_and_a_wrong_law_fails(method):
    x = np.array([0.0, 1.0, -1.0, 2.0, 0.5])
    n = 40_000
    f = filter_logits(rows(x, n), top_k=4)
    tokens = sample(f, seeds=torch.arange(n), positions=torch.full((n,), 7), method=method)
    p = f.probs()[0].double().numpy()
    seen = np.bincount(tokens.numpy(), minlength=5)
    assert seen[p == 0].sum() == 0
    keep = p > 0
    assert stats.chisquare(seen[keep], n * p[keep] / p[keep].sum()).pvalue > 1e-4
    wrong = np.where(keep, p + 0.02, 0)
    assert stats.chisquare(seen[keep], n * wrong[keep] / wrong.sum()).pvalue < 1e-6


@pytest.mark.parametrize("method", ["inverse_cdf", "gumbel"])
def test_each_row_draws_as_it_does_alone(method):
    seeds = torch.tensor([1111, 2222, 3333, 4444])
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    at = torch.tensor([5, 6, 7, 8])
    together = sample(filter_logits(x), seeds=seeds, positions=at, method=method)
    for i in range(4):
        one = sample(filter_logits(x[i : i + 1]), seeds=seeds[i : i + 1], positions=at[i : i + 1], method=method)
        assert one.item() == together[i].item()


@pytest.mark.parametrize("method", ["inverse_cdf", "gumbel"])
def test_greedy_and_empty_rows(method):
    x = torch.tensor([[1.0, 1.0, 0.0], [-torch.inf] * 3])
    for seed in range(20):
        tokens = sample(filter_logits(x, 0.0), seeds=torch.tensor([seed, seed]), method=method)
        assert tokens.tolist() == [0, 0]


def test_draft_and_sample_streams_differ():
    x = filter_logits(torch.zeros(200, 1000))
    seeds = torch.arange(200)
    assert (sample(x, seeds=seeds) == sample(x, seeds=seeds, stream="draft")).sum() < 10


def test_torch_manual_seed_decides_where_no_seed_is_given():
    f = filter_logits(torch.zeros(3, 1000))
    torch.manual_seed(3)
    first = sample(f)
    torch.manual_seed(3)
    assert torch.equal(sample(f), first)
    assert not torch.equal(sample(f), first)


def test_rows_of_a_request_share_its_seed():
    f = filter_logits(torch.randn(2, 3, 30))
    at = torch.tensor([[4, 5, 6], [9, 10, 11]])
    flat = sample(f, seeds=torch.tensor([1, 1, 1, 2, 2, 2]), positions=at.reshape(-1))
    assert torch.equal(sample(f, seeds=torch.tensor([1, 2]), positions=at), flat)
    assert flat.shape == (2, 3)
    assert flat.dtype == torch.int64


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"method": "argmax"}, ValueError, "method"),
        ({"stream": "accept"}, ValueError, "stream"),
        ({"method": "gumbel", "stream": "draft"}, ValueError, "gumbel"),
        ({"seeds": 3}, TypeError, "seeds"),
        ({"seeds": torch.tensor([1])}, ValueError, "seeds"),
        ({"uniforms": torch.tensor([0.5, 1.0], dtype=torch.float64)}, ValueError, "uniforms"),
        ({"uniforms": torch.tensor([0.5, 0.1])}, TypeError, "uniforms"),
        ({"uniforms": u(0.1, 0.2), "seeds": torch.tensor([1, 2])}, ValueError, "uniforms"),
        ({"uniforms": u(0.1, 0.2), "method": "gumbel"}, ValueError, "gumbel"),
        ({"positions": torch.tensor([1])}, ValueError, "positions"),
    ],
)
def test_errors_name_the_argument(options, error, words):
    with pytest.raises(error, match=words):
        sample(filter_logits(torch.zeros(2, 4)), **options)


def test_probabilities_are_not_logits():
    with pytest.raises(TypeError, match="filter_logits"):
        sample(torch.zeros(2, 4))


def test_seeds_of_another_shape_and_steps_out_of_range_are_refused():
    f = filter_logits(torch.zeros(2, 3, 7))
    with pytest.raises(ValueError, match="seeds"):
        sample(f, seeds=torch.arange(6).reshape(3, 2))
    for step in (-1, 2**32):
        with pytest.raises(ValueError, match="steps"):
            sample(f, steps=torch.full((6,), step))


def test_steps_are_numbers_of_their_own_alone_and_in_a_batch():
    f = filter_logits(torch.zeros(5, 1000))
    seeds, steps = torch.full((5,), 3), torch.tensor([0, 1, 2, 3, 2**32 - 1])
    together = sample(f, seeds=seeds, steps=steps, stream="draft")
    assert len(set(together.tolist())) == 5
    for i in range(5):
        one = filter_logits(torch.zeros(1, 1000))
        assert sample(one, seeds=seeds[i : i + 1], steps=steps[i : i + 1], stream="draft").item() == together[i].item()
