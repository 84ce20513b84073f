"""Verification: the exact law of a round by each rule, planted faults that must fail, hand-worked rounds.

Uniforms go in as arguments, so a law is measured to the last bit and not by chance (see exact_law).
"""

import inspect
import itertools

import numpy as np
import pytest
import torch
from exact_law import find_steps, round_law, total_variation
from scipy import stats

from triton_specdec import Status, filter_logits, sample, verify
from triton_specdec.reference import rng, rules


def probabilities(*rows):
    return torch.tensor(rows, dtype=torch.float32)[None]


def u(*values):
    return torch.tensor([values], dtype=torch.float64)


def one_round(p, q, rule="rejection", call=verify):
    """run(draft[n], uniforms[n, 2]) of a round with one draft; p and q [V], q None for a one-hot draft."""

    def run(draft, uniforms):
        n, vocab = len(draft), len(p)
        target = torch.zeros(n, 2, vocab)
        target[:, :] = torch.from_numpy(np.asarray(p, np.float32))
        law = None if q is None else torch.from_numpy(np.asarray(q, np.float32)).expand(n, 1, -1)
        v = torch.from_numpy(uniforms).clone()
        r = call(torch.from_numpy(draft)[:, None], target, law, rule=rule, uniforms=v)
        return r.tokens[:, 0].numpy(), r.num_accepted.numpy() == 1

    return run


RANDOM = np.random.default_rng(0)
P8 = RANDOM.dirichlet(np.full(8, 0.7))
Q8 = RANDOM.dirichlet(np.full(8, 0.7))
PAIRS = {
    "A accepted .6": ([0.2, 0.4, 0.4], [0.1, 0.1, 0.8]),
    "reversed": ([0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]),
    "filtered draft": ([0.1, 0.2, 0.3, 0.4], [4 / 7, 3 / 7, 0, 0]),
    "equal": ([0.5, 0.5], [0.5, 0.5]),
    "disjoint": ([0.5, 0.5, 0, 0], [0, 0, 0.3, 0.7]),
    "random": (P8, Q8),
    "ties": ([0.25] * 4, [0.5, 0.5, 0, 0]),
}


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("name", PAIRS)
def test_exact_law_of_one_round(name, rule):
    p, q = (np.asarray(x, np.float32).astype(float) for x in PAIRS[name])
    law = round_law(one_round(p, q, rule), q / q.sum())
    assert total_variation(law.tokens, p / p.sum()) < 1e-6
    drawn = q > 0
    assert np.abs(law.acceptance - np.minimum(1, p / np.maximum(q, 1e-9)))[drawn].max() < 1e-6


def test_acceptance_and_residual_by_hand():
    p, q = PAIRS["A accepted .6"]
    law = round_law(one_round(p, q), q)
    assert float((np.array(q) * law.acceptance).sum()) == pytest.approx(0.6, abs=1e-6)
    assert law.acceptance[2] == pytest.approx(0.5, abs=1e-6)
    assert law.residual[2] == pytest.approx([0.25, 0.75, 0], abs=1e-6)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_deterministic_draft_has_a_one_hot_q(rule):
    run = one_round([0.5, 0.5], None, rule)
    assert round_law(run, [1.0, 0.0]).tokens == pytest.approx([0.5, 0.5], abs=1e-6)
    # With the draft model's .6 in the ratio: P(0) = .833.
    wrong = one_round([0.5, 0.5], [0.6, 0.4], rule)
    assert round_law(wrong, [1.0, 0.0]).tokens[0] == pytest.approx(0.8333, abs=1e-3)


def broken(monkeypatch, fault):
    if fault == "acceptance off by 0.2 %":
        monkeypatch.setattr(rules, "is_accepted", lambda u, q, p: u * q * 1.002 < p)
    elif fault == "residual = p":
        monkeypatch.setattr(rules, "residual", lambda p, q: p + 0 * q)
    elif fault == "residual + 1e-4":
        monkeypatch.setattr(rules, "residual", lambda p, q: np.maximum(p - q, 0) + 1e-4)
    elif fault == "not normalised":
        monkeypatch.setattr(rules, "is_drawn", lambda c, u, total: c > u * total * 0.999)


@pytest.mark.parametrize("fault", ["acceptance off by 0.2 %", "residual = p", "residual + 1e-4", "not normalised"])
def test_planted_faults_are_seen(monkeypatch, fault):
    broken(monkeypatch, fault)
    p, q = P8.astype(np.float32).astype(float), Q8.astype(np.float32).astype(float)
    assert total_variation(round_law(one_round(p, q), q / q.sum()).tokens, p / p.sum()) > 1e-5


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_exact_law_from_logits_with_filters_on_both_sides(rule):
    generator = torch.Generator().manual_seed(4)
    x, y = torch.randn(2, 10, generator=generator) * 2

    def run(draft, uniforms):
        n = len(draft)
        target = filter_logits(x.expand(n, 2, -1), 0.8, top_k=6, top_p=0.95)
        q = filter_logits(y.expand(n, 1, -1), 1.3, min_p=0.05)
        r = verify(torch.from_numpy(draft)[:, None], target, q, rule=rule, uniforms=torch.from_numpy(uniforms).clone())
        return r.tokens[:, 0].numpy(), r.num_accepted.numpy() == 1

    p = filter_logits(x[None], 0.8, top_k=6, top_p=0.95).probs()[0].double().numpy()
    q = filter_logits(y[None], 1.3, min_p=0.05).probs()[0].double().numpy()
    assert total_variation(round_law(run, q / q.sum()).tokens, p / p.sum()) < 1e-6


def chain_law(rule, first, second, q1, q2, bonus, call=verify, bits=53, draws=True):
    """Exact law of the first two tokens of a round with K = 2, by enumeration of all draft sequences.

    first [V]; second [V, V] given the first token; q1 [V], q2 [V, V] alike; bonus [V] after two.
    The uniforms' steps are found by bisection inside each cell of the accept tests' outcomes. Without `draws` only the
    expected number of accepted tokens is right.
    """
    vocab = len(first)
    law, accepted = np.zeros((vocab, vocab)), 0.0
    for a, b in itertools.product(range(vocab), repeat=2):
        weight = q1[a] * q2[a, b]
        if weight == 0:
            continue
        target = torch.tensor(np.stack([first, second[a], bonus]), dtype=torch.float32)[None]
        draft = torch.tensor(np.stack([q1, q2[a]]), dtype=torch.float32)[None]

        def run(uniforms, target=target, draft=draft, a=a, b=b):
            n = len(uniforms)
            given = torch.tensor([[a, b]]).expand(n, -1)
            v = torch.from_numpy(uniforms).clone()
            return call(given, target.expand(n, -1, -1), draft.expand(n, -1, -1), rule=rule, uniforms=v)

        def outcome(uniforms, run=run):
            return run(uniforms).num_accepted.numpy()

        def token(uniforms, run=run):
            r = run(uniforms)
            return r.tokens[torch.arange(len(r.tokens)), r.num_accepted.long()].numpy()

        outer = find_steps(outcome, m=3, column=0, fixed=(0, 0.999999, 0), bits=bits, probes=33)
        widths = np.diff(np.append(outer.starts, 1.0))
        for start, width in zip(outer.starts, widths, strict=True):
            inner = find_steps(outcome, m=3, column=1, fixed=(start, 0, 0), bits=bits, probes=33)
            for low, span, count in zip(inner.starts, np.diff(np.append(inner.starts, 1.0)), inner.tokens, strict=True):
                share = weight * width * span
                accepted += share * count
                last = np.zeros(vocab)
                if draws and count < 2:
                    last = find_steps(token, m=3, column=2, fixed=(start, low, 0), bits=bits).law(vocab)
                if count == 0:
                    law += share * last[:, None] * second  # the next round draws from the target
                elif count == 1:
                    law[a] += share * last
                else:
                    law[a, b] += share
    return law, accepted


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_exact_law_of_two_drafts_by_enumeration(rule):
    random = np.random.default_rng(5)
    first, q1, bonus = (random.dirichlet(np.ones(3)).astype(np.float32).astype(float) for _ in range(3))
    second, q2 = (random.dirichlet(np.ones(3), 3).astype(np.float32).astype(float) for _ in range(2))
    law, _ = chain_law(rule, first, second, q1, q2, bonus)
    assert total_variation(law, first[:, None] * second) < 1e-6


def test_expected_accepted_ten_and_eleven_ninths():
    p, q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
    two = np.stack([p, p]), np.stack([q, q])
    _, by_token = chain_law("rejection", p, two[0], q, two[1], p)
    _, by_block = chain_law("block", p, two[0], q, two[1], p)
    assert by_token == pytest.approx(10 / 9, abs=1e-5)
    assert by_block == pytest.approx(11 / 9, abs=1e-5)


def expected_accepted(p, q, by_block):
    """Exact mean of the accepted drafts of a round, K = len(q), over all draft sequences and all uniforms.

    p[i], q[i] [V]: the laws at step i (of a model without context). Given the drafts the tests are independent.
    """
    count, vocab = q.shape
    mean = 0.0
    for drafts in itertools.product(range(vocab), repeat=count):
        weight = np.prod([q[i, d] for i, d in enumerate(drafts)])
        carry, passes = 1.0, []
        for i, d in enumerate(drafts):
            if not by_block:
                passes.append(min(p[i, d] / q[i, d], 1.0))
                continue
            carry = rules.block_carry(carry, p[i, d], q[i, d])
            if i + 1 < count:
                left = rules.residual(carry * p[i + 1], q[i + 1]).sum()
                bound = left + 1 - carry
                passes.append(left / bound if bound > 0 else 1.0)
                # The rule agrees with this threshold on both sides of it.
                assert rules.is_block_accepted(passes[-1] * (1 - 1e-9), carry, left) or left == 0
                assert not rules.is_block_accepted(passes[-1] * (1 + 1e-9) + 1e-12, carry, left)
            else:
                passes.append(carry)
        if by_block:
            # The last test that passes decides.
            none_behind = np.append(np.cumprod(1 - np.array(passes[::-1]))[::-1][1:], 1.0)
            mean += weight * sum(
                (i + 1) * h * rest for i, (h, rest) in enumerate(zip(passes, none_behind, strict=True))
            )
        else:
            mean += weight * np.cumprod(passes).sum()
    return mean


def test_the_block_rule_never_accepts_fewer_in_expectation():
    random = np.random.default_rng(7)
    gains = []
    for i in range(100):
        count, vocab = 2 + i % 2, 2 + i % 3
        p, q = random.dirichlet(np.full(vocab, 0.8), count + 1), random.dirichlet(np.full(vocab, 0.8), count)
        gains.append(expected_accepted(p, q, True) - expected_accepted(p, q, False))
    assert min(gains) > -1e-12
    assert max(gains) > 0.05


def by_plain_pytorch(drafts, p, q):
    """The rule as one writes it in PyTorch, batched: p [B, K + 1, V], q [B, K, V] -> tokens [B, K + 1]."""
    batch, count = drafts.shape
    of_draft = drafts[..., None]
    ratio = p[:, :-1].gather(-1, of_draft)[..., 0] / q.gather(-1, of_draft)[..., 0]
    accepted = (torch.rand(batch, count, dtype=p.dtype) < ratio).int().cumprod(1).sum(1)
    none = torch.zeros_like(p[:, :1])
    left = (p - torch.cat([q, none], 1)).clamp(min=0)[torch.arange(batch), accepted]
    left = torch.where(left.sum(-1, keepdim=True) > 0, left, p[torch.arange(batch), accepted])
    out = torch.cat([drafts, torch.zeros(batch, 1, dtype=drafts.dtype)], 1)
    out[torch.arange(batch), accepted] = torch.multinomial(left, 1)[:, 0]
    return torch.where(torch.arange(count + 1) <= accepted[:, None], out, -1)


def by_hugging_face(drafts, p, q):
    """One request at a time, as Transformers' assisted generation does it."""
    utils = pytest.importorskip("transformers.generation.utils", reason="Transformers is not installed")
    # Older versions ask whether the candidate has ended.
    known = inspect.signature(utils._speculative_sampling).parameters
    options = {"is_done_candidate": False} if "is_done_candidate" in known else {}
    out = torch.full((len(drafts), drafts.shape[1] + 1), -1)
    for i, row in enumerate(drafts):
        ids = torch.cat([torch.zeros(1, dtype=torch.int64), row])[None]
        laws = q[i : i + 1].log().float(), len(row), p[i : i + 1].log().float()
        tokens, _ = utils._speculative_sampling(ids, *laws, **options)
        out[i, : tokens.shape[1]] = tokens[0]
    return out


@pytest.mark.parametrize(("peer", "count"), [(by_plain_pytorch, 40_000), (by_hugging_face, 8_000)])
def test_side_by_side_with_peers_on_the_law(peer, count):
    """The first two tokens of a round: all follow the target; ours to the last bit (see above), peers by chi-square."""
    torch.manual_seed(11)
    random = np.random.default_rng(11)
    first, second = random.dirichlet(np.ones(3), 3), random.dirichlet(np.ones(3), 2)
    p, q = torch.from_numpy(first).expand(count, -1, -1), torch.from_numpy(second).expand(count, -1, -1)
    drafts = torch.stack([torch.multinomial(q[:, i], 1)[:, 0] for i in range(2)], 1)
    seeds = torch.arange(count)
    ours = verify(drafts, p, q, seeds=seeds).tokens
    theirs = peer(drafts, p, q)
    law = np.outer(first[0], first[1])
    for tokens in (ours, theirs):
        assert stats.chisquare(np.bincount(tokens[:, 0], minlength=3), count * first[0]).pvalue > 1e-4
        long = tokens[tokens[:, 1] >= 0]
        # Given that the first was accepted the second follows the target, whatever the first.
        share = np.bincount(long[:, 1], minlength=3) / len(long)
        assert share == pytest.approx(law.sum(0), abs=5 / np.sqrt(len(long)))
    assert (ours[:, 1] >= 0).float().mean().item() == pytest.approx((theirs[:, 1] >= 0).float().mean().item(), abs=0.03)
    # The control: a residual that is all of p.
    wrong = torch.where(ours[:, 1] >= 0, ours[:, 0], torch.multinomial(p[:, 0], 1)[:, 0])
    assert stats.chisquare(np.bincount(wrong, minlength=3), count * first[0]).pvalue < 1e-4


def test_block_law_over_rounds_by_chi_square():
    """Three tokens from rounds with K = 2, seeded, against the target's chain.

    Drafts keyed by their own position must fail: a block looks at all its drafts, so the next round would meet noise
    that has already decided.
    """
    random = np.random.default_rng(6)
    w, v = torch.from_numpy(random.normal(size=(2, 4, 4))).float()

    def sequences(n, by_step):
        state = torch.zeros(n, dtype=torch.int64)
        seeds = torch.arange(n)
        out = torch.full((n, 6), -1)
        have = torch.zeros(n, dtype=torch.int64)
        while int(have.min()) < 3:
            context, drafts, laws = state.clone(), [], []
            for i in range(2):
                law = filter_logits(v[context])
                key = {"positions": have, "steps": torch.full((n,), i)} if by_step else {"positions": have + i}
                context = sample(law, seeds=seeds, stream="draft", **key)
                drafts.append(context)
                laws.append(law)
            given = torch.stack(drafts, 1)
            target = filter_logits(w[torch.cat([state[:, None], given], 1)])
            r = verify(given, target, type(target).stack(laws), rule="block", seeds=seeds, positions=have)
            for i in range(3):
                live = (i < r.num_emitted) & (have + i < 6)
                out[live, (have + i)[live]] = r.tokens[live, i]
            state = r.tokens[torch.arange(n), r.num_accepted.long()]
            have = have + r.num_emitted
        return np.bincount((out[:, 0] * 16 + out[:, 1] * 4 + out[:, 2]).numpy(), minlength=64)

    first, rest = w[0].softmax(-1).double().numpy(), w.softmax(-1).double().numpy()
    expected = (first[:, None, None] * rest[:, :, None] * rest).reshape(-1)
    n = 30_000
    assert stats.chisquare(sequences(n, True), n * expected / expected.sum()).pvalue > 1e-4
    assert stats.chisquare(sequences(n, False), n * expected / expected.sum()).pvalue < 1e-6


def test_residual_is_never_drawn_from_p():
    r = verify(
        torch.tensor([[1]]),
        probabilities([0.5, 0.3, 0.2], [1, 0, 0]),
        probabilities([0.2, 0.5, 0.3]),
        uniforms=u(0.99, 0.9),
    )
    assert r.tokens.tolist() == [[0, -1]]
    assert r.log_probs[0].tolist() == pytest.approx([np.log(0.5), 0], abs=1e-6)


def test_p_zero_and_u_zero_is_rejected():
    r = verify(
        torch.tensor([[0]]), probabilities([0, 0.4, 0.6], [1, 0, 0]), probabilities([1, 0, 0]), uniforms=u(0.0, 0.0)
    )
    assert r.num_accepted.tolist() == [0]
    assert r.tokens[0, 0].item() == 1


def test_the_largest_uniform_accepts_equal_laws():
    p = probabilities([0.1, 0.9], [0.3, 0.7])
    r = verify(torch.tensor([[0]]), p, p[:, :1], uniforms=u(1 - 2.0**-53, 0.5))
    assert r.tokens.tolist() == [[0, 1]]
    assert r.log_probs[0].tolist() == pytest.approx(np.log([0.1, 0.7]).tolist(), abs=1e-6)


def test_a_residual_without_mass_draws_from_p():
    # q > p everywhere (unnormalised by rounding): the rejection leaves nothing.
    r = verify(
        torch.tensor([[1]]),
        probabilities([0.0, 0.5, 0.5], [1, 0, 0]),
        probabilities([0.5, 0.6, 0.6]),
        uniforms=u(0.99, 0.7),
    )
    assert r.tokens[0].tolist() == [2, -1]


@pytest.mark.parametrize("pad", [-1, 9, -7, 2**40])
def test_a_draft_id_outside_ends_the_row_and_p_is_whole(pad):
    p = probabilities([0, 0, 0, 0, 0, 1], [0.5, 0.5, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0])
    for q in (None, probabilities([0, 0, 0, 0, 0, 1], [0.5, 0.5, 0, 0, 0, 0])):
        r = verify(torch.tensor([[5, pad]]), p, q, uniforms=u(0.3, 0.0, 0.25))
        assert r.tokens.tolist() == [[5, 0, -1]]
        assert r.status.tolist() == [0 if pad == -1 else Status.DRAFT_ID]


def test_a_smaller_draft_vocabulary_leaves_the_rest_reachable():
    p = [0.1, 0.2, 0.3, 0.4]
    law = round_law(one_round(p, [0.7, 0.3]), [0.7, 0.3, 0, 0])
    assert total_variation(law.tokens, p) < 1e-6
    r = verify(torch.tensor([[3]]), probabilities(p, p), probabilities([0.7, 0.3]), uniforms=u(0.99, 0.5))
    assert r.num_accepted.tolist() == [1]  # q = 0 and p > 0


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_what_lies_behind_a_row_is_not_looked_at(rule):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 4, 6, generator=generator)
    y = torch.randn(2, 3, 6, generator=generator)
    tokens = torch.tensor([[1, 2, 3], [0, 4, 5]])
    count = torch.tensor([1, 2])
    seeds = torch.tensor([3, 4])
    draft = None if rule == "coupled" else filter_logits(y)
    want = verify(tokens, filter_logits(x), draft, num_draft_tokens=count, rule=rule, seeds=seeds)
    x[0, 2:], x[1, 3:], y[0, 1:], y[1, 2:] = torch.nan, torch.nan, torch.nan, torch.inf
    tokens[0, 1:], tokens[1, 2:] = -99, 10**9
    draft = None if rule == "coupled" else filter_logits(y)
    got = verify(tokens, filter_logits(x), draft, num_draft_tokens=count, rule=rule, seeds=seeds)
    for name, a, b in zip(want._fields, want, got, strict=True):
        assert torch.equal(a, b), name
    assert got.status.tolist() == [0, 0]
    assert (got.num_emitted <= count + 1).all()


def test_coupled_is_plain_gumbel_sampling_for_any_draft():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(50, 5, 20, generator=generator)
    f = filter_logits(x, 0.7, top_p=0.9)
    seeds, at = torch.arange(50), torch.arange(50) * 3
    plain = sample(f, seeds=seeds, positions=at[:, None] + torch.arange(5), method="gumbel")
    drafts = torch.where(torch.rand(50, 4, generator=generator) < 0.7, plain[:, :4], 0)
    drafts[3, 2] = -1
    r = verify(drafts, f, rule="coupled", seeds=seeds, positions=at)
    for b in range(50):
        n = int(r.num_emitted[b])
        assert r.tokens[b, :n].tolist() == plain[b, :n].tolist()
        assert r.tokens[b, n:].tolist() == [-1] * (5 - n)
        agreed = [*(drafts[b] == plain[b, :4]).tolist(), False].index(False)
        assert n == agreed + 1


def test_the_draft_noise_is_not_the_residual_noise():
    """Drafts drawn by Gumbel noise: output p. With that noise in the residual it would be [.0998 .2004 .2667 .4331]."""
    p, q = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.4, 0.3, 0.2, 0.1])
    n = 100_000
    seeds, at = torch.arange(n), torch.full((n,), 5)
    draft = filter_logits(q.log().expand(n, -1))
    tokens = sample(draft, seeds=seeds, positions=at, method="gumbel")
    target = filter_logits(p.log().expand(n, 2, -1))
    r = verify(tokens[:, None], target, type(draft).stack([draft]), seeds=seeds, positions=at)
    seen = np.bincount(r.tokens[:, 0].numpy(), minlength=4)
    assert stats.chisquare(seen, n * p.double().numpy() / float(p.double().sum())).pvalue > 1e-4
    # The same with reused noise, drawn by hand, must fail.
    reused = torch.from_numpy(rng.gumbel(seeds[:, None], at[:, None], np.arange(4)))
    again = ((p - q).clamp(min=0).log() + reused).argmax(-1)
    wrong = torch.where(r.num_accepted == 1, tokens, again)
    seen = np.bincount(wrong.numpy(), minlength=4)
    assert stats.chisquare(seen, n * p.double().numpy() / float(p.double().sum())).pvalue < 1e-6
    assert seen / n == pytest.approx([0.0998, 0.2004, 0.2667, 0.4331], abs=0.005)


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_rows_verify_as_they_do_alone(rule):
    generator = torch.Generator().manual_seed(8)
    x, y = torch.randn(6, 4, 30, generator=generator), torch.randn(6, 3, 30, generator=generator)
    x[2] = torch.nan
    tokens = torch.randint(0, 30, (6, 3), generator=generator)
    t = torch.tensor([0.0, 1.0, 1.0, 0.5, 1.0, 2.0])
    seeds, at, count = torch.arange(6), torch.arange(6) + 10, torch.tensor([3, 2, 3, 0, 1, 3])

    def run(rows):
        q = None if rule == "coupled" else filter_logits(y[rows], t[rows])
        target = filter_logits(x[rows], t[rows], top_k=9)
        return verify(
            tokens[rows], target, q, num_draft_tokens=count[rows], rule=rule, seeds=seeds[rows], positions=at[rows]
        )

    together = run(slice(0, 6))
    for b in range(6):
        for name, a, c in zip(together._fields, together, run(slice(b, b + 1)), strict=True):
            assert torch.equal(a[b : b + 1], c), name
    assert together.status[2].item() == Status.NAN | Status.EMPTY
    assert together.tokens.max() < 30
    assert ((together.num_emitted >= 1) & (together.num_emitted <= count + 1)).all()


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_greedy_rows_follow_the_argmax(rule):
    x = torch.tensor([[[0.0, 2, 2], [3, 0, 0], [0, 0, 1]]])
    f = filter_logits(x, 0.0)
    for drafts, tokens in (([1, 0], [1, 0, 2]), ([2, 0], [1, -1, -1]), ([1, 1], [1, 0, -1])):
        r = verify(torch.tensor([drafts]), f, rule=rule, seeds=torch.tensor([5]))
        assert r.tokens.tolist() == [tokens]
        assert r.log_probs.abs().max() == 0


def test_hostile_probabilities_count_as_zero():
    p = probabilities([torch.nan, 0.5, -3.0], [0, 0, 0])
    r = verify(torch.tensor([[1]]), p, None, uniforms=u(0.4, 0.3))
    assert r.tokens.tolist() == [[1, 0]]
    assert r.status.tolist() == [Status.NAN | Status.NEGATIVE | Status.EMPTY]


@pytest.mark.parametrize(("batch", "drafts"), [(0, 3), (2, 0), (0, 0)])
def test_empty_batches_and_no_drafts(batch, drafts):
    target = filter_logits(torch.zeros(batch, drafts + 1, 5))
    for rule in ("rejection", "block", "coupled"):
        r = verify(torch.zeros(batch, drafts, dtype=torch.int64), target, rule=rule)
        assert r.tokens.shape == (batch, drafts + 1)
        assert r.num_emitted.tolist() == [1] * batch
    assert (r.tokens.dtype, r.num_accepted.dtype, r.log_probs.dtype) == (torch.int64, torch.int32, torch.float32)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"rule": "typical"}, ValueError, "rule"),
        ({"draft_tokens": torch.zeros(2, 3)}, TypeError, "draft_tokens"),
        ({"draft_tokens": torch.zeros(2, 4, dtype=torch.int64)}, ValueError, "target"),
        ({"target": torch.zeros(2, 4, 5, dtype=torch.int64)}, TypeError, "target"),
        ({"target": "p"}, TypeError, "target"),
        ({"draft": torch.zeros(2, 4, 5)}, ValueError, "draft"),
        ({"draft": torch.zeros(2, 3, 6)}, ValueError, "more than the target's 5"),
        ({"num_draft_tokens": torch.tensor([1, 2, 3])}, ValueError, "num_draft_tokens"),
        ({"seeds": torch.tensor([1])}, ValueError, "seeds"),
        ({"positions": torch.tensor([1.0, 2.0])}, TypeError, "positions"),
        ({"uniforms": torch.zeros(2, 3, dtype=torch.float64)}, ValueError, "uniforms"),
        ({"uniforms": torch.ones(2, 4, dtype=torch.float64)}, ValueError, "uniforms"),
        ({"rule": "coupled", "uniforms": torch.zeros(2, 4, dtype=torch.float64)}, ValueError, "coupled"),
        ({"rule": "coupled"}, TypeError, "coupled"),
    ],
)
def test_errors_name_the_argument(change, error, words):
    args = {"draft_tokens": torch.zeros(2, 3, dtype=torch.int64), "target": torch.full((2, 4, 5), 0.2), **change}
    with pytest.raises(error, match=words):
        verify(args.pop("draft_tokens"), args.pop("target"), args.pop("draft", None), **args)


def test_a_block_answers_for_every_step_that_decided_it():
    p = filter_logits(torch.tensor([[[0.1, 1e-9, 0.45, 0.45], [0.25] * 4, [0.25] * 4]]).log())
    y = torch.zeros(1, 2, 4)
    y[0, 1, 2] = torch.nan
    r = verify(torch.tensor([[0, 1]]), p, filter_logits(y), rule="block", uniforms=u(0.95, 0.95, 0.3))
    assert r.status.tolist() == [Status.NAN]
    by_token = verify(torch.tensor([[0, 1]]), p, filter_logits(y), uniforms=u(0.95, 0.95, 0.3))
    assert (by_token.num_accepted.tolist(), by_token.status.tolist()) == ([0], [0])


def test_probabilities_may_be_float64():
    p = probabilities([0.5, 0.3, 0.2], [1, 0, 0]).double()
    assert verify(torch.tensor([[1]]), p, p[:, :1], uniforms=u(0.99, 0.5)).tokens.tolist() == [[1, 0]]
