"""The verification kernels: the reference's results in every mode, exact laws of compiled code, what they cost.

Rows of one batch differ in everything: filters on both sides, greedy and one-hot rows, numbers of drafts, ids outside.
"""

from functools import partial

import numpy as np
import pytest
import torch
from exact_law import round_law, total_variation
from filter_cases import filters, rows
from kernel_modes import ALL_MODES, COMPILED_MODES, MODES, machine, needs_compiler
from test_verify import PAIRS, chain_law, one_round

triton = pytest.importorskip("triton", reason="kernels need triton")

from gpuless import compile_for, report  # noqa: E402

from triton_specdec import filter_logits, sample, verify, verify_tree  # noqa: E402

RULES = ["rejection", "block", "coupled"]
on_triton = partial(verify, backend="triton")


def to(m, given):
    """Tensors, options and filtered logits on a machine."""
    if isinstance(given, torch.Tensor):
        return m.put(given)
    return {name: to(m, value) for name, value in given.items()} if isinstance(given, dict) else given


class Batch:
    """A ragged batch of requests: logits of both models and the options of their filters."""

    def __init__(self, count, drafts, vocab, draft_vocab=None, dtype=torch.float32, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.vocab, self.drafts = vocab, drafts
        own = draft_vocab or vocab
        self.p = (torch.randn(count, drafts + 1, vocab, generator=g) * 2).to(dtype)
        near = self.p[:, :drafts, :own].float()
        self.q = (near + torch.randn(count, drafts, own, generator=g)).to(dtype)
        # Equal laws, rows that leave nothing, ties.
        self.q[0], self.p[1] = near[0].to(dtype), self.p[1].round()
        if count > 10 and drafts:
            # Hostile rows, and a row without anything finite.
            self.p[7, 0, 3], self.p[8, 1, 5], self.q[9, 0, 2], self.p[10, 0] = (
                torch.nan,
                torch.inf,
                torch.nan,
                -torch.inf,
            )
        each = filters(count, seed)
        self.p_options = {**each, "min_p": torch.zeros(count, dtype=torch.float64)}
        self.q_options = {"temperature": each["temperature"], "top_k": each["top_k"].clamp(max=3 * own // 4)}
        self.seeds = torch.randint(-(2**63), 2**63 - 1, (count,), generator=g)
        self.at = torch.randint(0, 2**33, (count,), generator=g)
        self.number = torch.randint(0, drafts + 1, (count,), generator=g)
        self.number[: count // 2] = drafts
        q = filter_logits(self.q, **self.q_options) if drafts else None
        columns = torch.arange(drafts)
        self.tokens = torch.zeros(count, 0, dtype=torch.int64)
        if q is not None:
            draw = partial(sample, q, seeds=self.seeds, positions=self.at[:, None] + columns)
            self.tokens = torch.where(
                torch.arange(count)[:, None] % 2 == 0, draw(stream="draft"), draw(method="gumbel")
            )
        if drafts > 2 and count > 4:
            self.tokens[2, 2], self.tokens[3, 1], self.tokens[4, 0] = -1, vocab + 5, -7
        self.u = torch.rand(count, drafts + 1, dtype=torch.float64, generator=g)

    def laws(self, m=None, **options):
        """Target and draft, on a machine or by the reference."""
        p, q = (self.p, self.q) if m is None else (m.put(self.p), m.put(self.q))
        p_options, q_options = (o if m is None else to(m, o) for o in (self.p_options, self.q_options))
        return filter_logits(p, **p_options, **options), filter_logits(q, **q_options, **options)


def assert_same(ours, reference, near=()):
    """Equal rounds; a row may be that of another uniform, a millionth away."""
    same = torch.zeros(len(ours.tokens), dtype=torch.bool)
    for other in (reference, *near):
        same |= (ours.tokens.cpu() == other.tokens).all(-1)
    assert same.all()
    agreed = (ours.tokens.cpu() == reference.tokens).all(-1)
    assert agreed.float().mean() > 0.8
    for name in ("num_accepted", "num_emitted", "status"):
        assert torch.equal(getattr(ours, name).cpu()[agreed], getattr(reference, name)[agreed]), name
    a, b = ours.log_probs.cpu()[agreed], reference.log_probs[agreed]
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def check(mode, batch, rule, has_draft=True):
    p, q = batch.laws()
    with machine(mode, check=mode == "interpreter" or batch.vocab < 500) as m:
        on_p, on_q = batch.laws(m, backend="triton")
        drafts, number = m.put(batch.tokens), m.put(batch.number)
        keys = {"seeds": m.put(batch.seeds), "positions": m.put(batch.at)}
        on_draft, draft = (on_q, q) if has_draft and batch.drafts else (None, None)
        by_seed = verify(drafts, on_p, on_draft, num_draft_tokens=number, rule=rule, **keys)
        launches = [x.name for x in m.device.launches][-4:] if m.device else None
        by_uniform = None
        if rule != "coupled":
            by_uniform = verify(drafts, on_p, on_draft, num_draft_tokens=number, rule=rule, uniforms=m.put(batch.u))
    call = partial(verify, batch.tokens, p, draft, num_draft_tokens=batch.number, rule=rule)
    assert_same(by_seed, call(seeds=batch.seeds, positions=batch.at))
    if by_uniform is not None:
        near = [call(uniforms=(batch.u + by).clamp(0, 1 - 2.0**-53)) for by in (-1e-6, 1e-6)]
        assert_same(by_uniform, call(uniforms=batch.u), near)
    return launches


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("has_draft", [True, False])
def test_rounds_are_the_reference_s(mode, rule, has_draft):
    launches = check(mode, Batch(18, 5, 300, seed=1), rule, has_draft)
    middle = "_sample_kernel" if rule == "coupled" else "_residual_kernel"
    assert launches is None or launches[-2:] == [middle, "_emit_kernel"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize(("drafts", "vocab", "draft_vocab"), [(0, 40, None), (1, 2, None), (20, 3000, 1111)])
def test_few_drafts_many_drafts_and_a_smaller_draft_vocabulary(mode, rule, drafts, vocab, draft_vocab):
    check(mode, Batch(6, drafts, vocab, draft_vocab, seed=2), rule)


@pytest.mark.parametrize("mode", COMPILED_MODES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("vocab", "draft_vocab", "dtype"),
    [(50257, 50000, torch.float32), (128256, 128256, torch.bfloat16)],
)
def test_rounds_of_real_sizes(mode, rule, vocab, draft_vocab, dtype):
    check(mode, Batch(6, 3, vocab, draft_vocab, dtype, seed=vocab), rule)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_given_probabilities(mode, rule, dtype):
    batch = Batch(10, 4, 200, 150, seed=3)
    p, q = (law.probs().to(dtype) for law in batch.laws())
    p[5, 0, 7], p[6, 1, 3], q[7, 0, 2] = torch.nan, torch.inf, -1.0
    p[8] = 0
    call = partial(verify, num_draft_tokens=batch.number, rule=rule)
    for draft in (q, None):
        with machine(mode) as m:
            on = None if draft is None else m.put(draft)
            number, u = m.put(batch.number), m.put(batch.u)
            ours = on_triton(m.put(batch.tokens), m.put(p), on, num_draft_tokens=number, rule=rule, uniforms=u)
        near = [call(batch.tokens, p, draft, uniforms=(batch.u + by).clamp(0, 1 - 1e-9)) for by in (-1e-6, 1e-6)]
        assert_same(ours, call(batch.tokens, p, draft, uniforms=batch.u), near)


@pytest.mark.parametrize("mode", MODES)
def test_logits_beside_given_probabilities(mode):
    batch = Batch(10, 4, 200, 150, seed=12)
    p, q = batch.laws()
    with machine(mode) as m:
        on_p, on_q = batch.laws(m, backend="triton")
        tokens, u = m.put(batch.tokens), m.put(batch.u)
        given_q = verify(tokens, on_p, on_q.probs(), uniforms=u)
        given_p = verify(tokens, on_p.probs(), on_q, uniforms=u)
    assert_same(given_q, verify(batch.tokens, p, q.probs(), uniforms=batch.u))
    assert_same(given_p, verify(batch.tokens, p.probs(), q, uniforms=batch.u))


def test_a_backend_that_is_not_the_laws_own_is_refused():
    f = filter_logits(torch.zeros(1, 2, 4))
    with pytest.raises(ValueError, match="target was filtered by backend 'reference'"):
        verify(torch.zeros(1, 1, dtype=torch.int64), f, backend="triton")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_drafts_that_one_of_the_two_laws_does_not_hold(mode, rule):
    """q = 0 accepts what the target holds, p = 0 rejects whatever the uniform; both 0 rejects."""
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]]).repeat(3, 1, 1)
    q = torch.tensor([0.0, 0.5, 0.0, 0.5]).repeat(3, 1, 1)
    u = torch.tensor([[1 - 2.0**-53, 0.6], [0.0, 0.6], [0.0, 0.6]], dtype=torch.float64)
    drafts = torch.tensor([[0], [3], [2]])
    with machine(mode) as m:
        laws = [filter_logits(m.put(x.log()), backend="triton") for x in (p, q)]
        for target, draft in (laws, (m.put(p), m.put(q))):
            r = on_triton(m.put(drafts), target, draft, rule=rule, uniforms=m.put(u))
            # The residual is all on token 0, since q takes all of token 1.
            assert r.tokens.tolist() == [[0, 2], [0, -1], [0, -1]]
            assert r.num_accepted.tolist() == [1, 0, 0]
            assert torch.isfinite(r.log_probs).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", RULES)
def test_what_lies_behind_is_not_looked_at(mode, rule):
    batch = Batch(18, 5, 300, seed=4)
    with machine(mode) as m:
        p, q = batch.laws(m, backend="triton")
        args = (m.put(batch.tokens), m.put(batch.number))
        keys = {"seeds": m.put(batch.seeds), "positions": m.put(batch.at)}
        clean = verify(args[0], p, q, num_draft_tokens=args[1], rule=rule, **keys)
        # Rows behind the first rejection (under "block" behind the last usable draft) hold garbage.
        usable = torch.cat([(batch.tokens >= 0) & (batch.tokens < 300), torch.zeros(18, 1, dtype=torch.bool)], 1)
        usable = torch.minimum(usable.int().cumprod(1).sum(1), batch.number)
        last = usable if rule == "block" else clean.num_accepted.cpu()
        behind = torch.arange(6) > last[:, None]
        batch.p[behind] = torch.nan
        batch.q[behind[:, :5]] = torch.inf
        p, q = batch.laws(m, backend="triton")
        again = verify(args[0], p, q, num_draft_tokens=args[1], rule=rule, **keys)
    for name, a, b in zip(clean._fields, clean, again, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", RULES)
def test_a_round_knows_nothing_of_its_batch(mode, rule):
    batch = Batch(9, 4, 304, seed=5)
    with machine(mode, check=mode == "interpreter") as m:
        p, q = batch.laws(m, backend="triton")
        tokens, number, seeds, at = (m.put(t) for t in (batch.tokens, batch.number, batch.seeds, batch.at))
        whole = verify(tokens, p, q, num_draft_tokens=number, rule=rule, seeds=seeds, positions=at)
        for i in range(0, 9, 3):
            one = slice(i, i + 1)
            own_p = filter_logits(
                p.logits[one], **{k: m.put(v[one]) for k, v in batch.p_options.items()}, backend="triton"
            )
            own_q = filter_logits(
                q.logits[one], **{k: m.put(v[one]) for k, v in batch.q_options.items()}, backend="triton"
            )
            alone = verify(
                tokens[one], own_p, own_q, num_draft_tokens=number[one], rule=rule, seeds=seeds[one], positions=at[one]
            )
            for name, a, b in zip(whole._fields, whole, alone, strict=True):
                assert torch.equal(a[one], b), name


# Exact laws of compiled code.


# Uniforms of the measured laws are multiples of 2^-26: far finer than the tolerance of 1e-6.
BITS = 26
ROWS = 80


def measured(m, target, draft, rule):
    """run(draft[n], uniforms[n, 2]) of a round with one draft; target [ROWS, 2, V] and draft [ROWS, 1, V] filtered."""

    def run(tokens, uniforms):
        n = len(tokens)
        assert n <= ROWS
        drafts, u = torch.zeros(ROWS, 1, dtype=torch.int64), torch.zeros(ROWS, 2, dtype=torch.float64)
        drafts[:n, 0], u[:n] = torch.from_numpy(tokens), torch.from_numpy(uniforms)
        r = verify(m.put(drafts), target, draft, rule=rule, uniforms=m.put(u))
        return r.tokens[:n, 0].cpu().numpy(), r.num_accepted[:n].cpu().numpy() == 1

    return run


@pytest.mark.parametrize("mode", COMPILED_MODES)
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("name", PAIRS)
def test_exact_law_of_one_round(mode, rule, name):
    p, q = (np.asarray(x, np.float32).astype(float) for x in PAIRS[name])
    p, q = p / p.sum(), q / q.sum()
    with machine(mode, check=False) as m:
        target, draft = (m.put(torch.tensor(x, dtype=torch.float64).log().float()) for x in (p, q))
        target = filter_logits(target.expand(ROWS, 2, -1), backend="triton")
        draft = filter_logits(draft.expand(ROWS, 1, -1), backend="triton")
        law = round_law(measured(m, target, draft, rule), q, bits=BITS, probes=16)
    assert total_variation(law.tokens, p) < 1e-6
    # Accepted is what min(p, q) says, one by one.
    drafted = q > 0
    assert law.acceptance[drafted] == pytest.approx(np.minimum(p / np.where(drafted, q, 1), 1)[drafted], abs=1e-6)
    if name == "random":
        # The controls, by their formulas: what a faulty kernel would have given is far outside of the tolerance.
        left = np.maximum(p - q, 0)
        kept = np.minimum(p, q)
        faults = (
            kept * 0.998 + (1 - kept.sum() * 0.998) * left / left.sum(),
            kept + (1 - kept.sum()) * p,
            kept + left * 0.999,
        )
        for fault in faults:
            assert total_variation(law.tokens, fault) > 1e-5


@pytest.mark.parametrize("mode", ALL_MODES[1:])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_exact_law_with_filters_on_both_sides(mode, rule):
    x, y = torch.randn(2, 10, generator=torch.Generator().manual_seed(4)) * 2
    with machine(mode, check=False) as m:
        target = filter_logits(m.put(x).expand(ROWS, 2, -1), 0.8, top_k=6, top_p=0.95, backend="triton")
        draft = filter_logits(m.put(y).expand(ROWS, 1, -1), 1.3, min_p=0.05, backend="triton")
        p = filter_logits(x[None], 0.8, top_k=6, top_p=0.95).probs()[0].double().numpy()
        q = filter_logits(y[None], 1.3, min_p=0.05).probs()[0].double().numpy()
        law = round_law(measured(m, target, draft, rule), q / q.sum(), bits=BITS, probes=16)
    assert total_variation(law.tokens, p / p.sum()) < 1e-6


@pytest.mark.parametrize("mode", COMPILED_MODES)
def test_a_deterministic_draft_has_a_one_hot_q(mode):
    p = np.array([0.5, 0.3, 0.2])

    def call(tokens, target, draft, **options):
        put = {k: m.put(v) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        r = on_triton(m.put(tokens), m.put(target), draft, **put)
        return type(r)(*(t.cpu() for t in r))

    with machine(mode, check=False) as m:
        law = round_law(one_round(p, None, call=call), [0, 1, 0], bits=BITS, probes=16)
    assert total_variation(law.tokens, p) < 1e-6


@pytest.mark.parametrize("mode", COMPILED_MODES)
def test_exact_law_of_two_drafts_and_the_accepted_of_the_block_rule(mode):
    known = {}

    def filtered(law):
        key = law[:1].numpy().tobytes()
        if key not in known:
            many = m.put(law[:1].log()).expand(ROWS, -1, -1)
            known[key] = filter_logits(many, backend="triton")
        return known[key]

    def call(tokens, target, draft, rule, uniforms):
        n = len(tokens)
        assert n <= ROWS
        drafts, u = torch.zeros(ROWS, 2, dtype=torch.int64), torch.zeros(ROWS, 3, dtype=torch.float64)
        drafts[:n], u[:n] = tokens, uniforms
        r = verify(m.put(drafts), filtered(target), filtered(draft), rule=rule, uniforms=m.put(u))
        return type(r)(*(t[:n].cpu() for t in r))

    random = np.random.default_rng(5)
    first, q1, bonus = (random.dirichlet(np.ones(2)).astype(np.float32).astype(float) for _ in range(3))
    second, q2 = (random.dirichlet(np.ones(2), 2).astype(np.float32).astype(float) for _ in range(2))
    p, q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
    with machine(mode, check=False) as m:
        for rule, expected in (("rejection", 10 / 9), ("block", 11 / 9)):
            law, _ = chain_law(rule, first, second, q1, q2, bonus, call=call, bits=24)
            assert total_variation(law, first[:, None] * second) < 1e-6
            two = np.stack([p, p]), np.stack([q, q])
            _, accepted = chain_law(rule, p, two[0], q, two[1], p, call=call, bits=24, draws=False)
            assert accepted == pytest.approx(expected, abs=1e-5)


# Trees.


def plain(m, logits, seeds, positions, options):
    """What plain Gumbel sampling gives after each node, if it stood at each depth: int64 [B, N, depths]."""
    count, size, _ = logits.shape
    f = filter_logits(m.put(logits), **to(m, options), backend="triton")
    out = []
    for depth in range(size):
        at = (positions + depth)[:, None].expand(count, size)
        out.append(sample(f, seeds=m.put(seeds), positions=m.put(at.contiguous()), method="gumbel").cpu())
    return torch.stack(out, -1)


@pytest.mark.parametrize("mode", MODES)
def test_a_tree_follows_plain_sampling(mode):
    g = torch.Generator().manual_seed(6)
    count, size, vocab = 8, 7, 60
    logits = torch.randn(count, size, vocab, generator=g) * 3
    parents = torch.tensor([-1, 0, 0, 1, 1, 3, -1]).repeat(count, 1)
    seeds, positions = torch.arange(count), torch.arange(count) * 7
    options = {"temperature": torch.tensor([1.0, 0.5, 0.0, 1.0] * 2), "top_p": 0.9}
    with machine(mode, check=mode == "interpreter") as m:
        after = plain(m, logits, seeds, positions, options)
        tokens = torch.full((count, size), 3)
        # Rows 0 to 3: a whole path holds what sampling gives; 4: equal children; 5 and 6: half a path; 7: nothing.
        tokens[:7, 1] = after[:7, 0, 0]
        tokens[:5, 3] = after[:5, 1, 1]
        tokens[:4, 5] = after[:4, 3, 2]
        tokens[4, 2], tokens[4, 4] = tokens[4, 1], tokens[4, 3]
        tokens[7, 1:] = vocab + 1
        f = filter_logits(m.put(logits), **to(m, options), backend="triton")
        put = [m.put(t) for t in (tokens, parents)]
        ours = verify_tree(*put, f, seeds=m.put(seeds), positions=m.put(positions))
        ours = type(ours)(*(t.cpu() for t in ours))
        if m.device:
            assert [x.name for x in m.device.launches][-1] == "_tree_kernel"
    assert ours.nodes[0].tolist()[:3] == [1, 3, 5]
    assert ours.nodes[4].tolist()[:2] == [1, 3]
    assert int(ours.num_accepted[7]) == 0
    for b in range(count):
        path = [0, *ours.nodes[b, : int(ours.num_accepted[b])].tolist()]
        assert ours.tokens[b, : len(path)].tolist() == [int(after[b, n, d]) for d, n in enumerate(path)]
    reference = verify_tree(tokens, parents, filter_logits(logits, **options), seeds=seeds, positions=positions)
    for name in ("tokens", "nodes", "num_accepted", "num_emitted", "status"):
        assert torch.equal(getattr(ours, name), getattr(reference, name)), name
    torch.testing.assert_close(ours.log_probs, reference.log_probs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_a_chain_is_a_tree_and_hostile_trees_end(mode):
    batch = Batch(6, 4, 300, seed=8)
    batch.tokens[:] = batch.tokens.clamp(0, 299)
    chain = torch.arange(-1, 4).repeat(6, 1)
    tree = torch.cat([torch.zeros(6, 1, dtype=torch.int64), batch.tokens], 1)
    circle = torch.tensor([-1, 1, 1, 4, 2**40]).repeat(6, 1)
    with machine(mode) as m:
        p, _ = batch.laws(m, backend="triton")
        keys = {"seeds": m.put(batch.seeds), "positions": m.put(batch.at)}
        flat = verify(m.put(batch.tokens), p, rule="coupled", **keys)
        ours = verify_tree(m.put(tree), m.put(chain), p, **keys)
        from triton_specdec.kernels import verify_tree as unchecked

        lost = unchecked(m.put(tree), m.put(circle), p, keys["seeds"], keys["positions"])
    assert torch.equal(flat.tokens, ours.tokens)
    assert torch.equal(flat.num_accepted, ours.num_accepted)
    assert lost.num_emitted.tolist() == [1] * 6


@pytest.mark.parametrize("backend", ["reference"])
def test_trees_by_hand_and_their_errors(backend):
    f = filter_logits(torch.tensor([[[0.0, 9, 0], [0, 0, 9], [9, 0, 0]]]), temperature=0.0, backend=backend)
    tree, parents = torch.tensor([[0, 1, 2]]), torch.tensor([[-1, 0, 1]])
    r = verify_tree(tree, parents, f)
    assert r.tokens.tolist() == [[1, 2, 0]]
    assert r.nodes.tolist() == [[1, 2]]
    assert (r.num_accepted.tolist(), r.num_emitted.tolist()) == ([2], [3])
    assert verify_tree(
        tree[:, :1], parents[:, :1], filter_logits(f.logits[:, :1], temperature=0.0)
    ).tokens.tolist() == [[1]]
    for wrong in ([[-1, 1, 0]], [[0, 0, 1]], [[-1, 0, -2]]):
        with pytest.raises(ValueError, match="parents"):
            verify_tree(tree, torch.tensor(wrong), f)
    with pytest.raises(TypeError, match="target"):
        verify_tree(tree, parents, f.logits)
    with pytest.raises(ValueError, match="tree_tokens"):
        verify_tree(tree[:, :0], parents[:, :0], f)
    with pytest.raises(ValueError, match="target"):
        verify_tree(tree[:, :2], parents[:, :2], f)


# What it costs.


@needs_compiler
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_bytes_and_launches_from_raw_logits(rule):
    """Target logits once, and one row of each model again for each request that rejects; no [rows, V] tensor."""
    count, drafts, vocab = 2, 3, 128256
    batch = Batch(count, drafts, vocab, dtype=torch.bfloat16, seed=9)
    # Another model's drafts, which the target hardly holds: the first is rejected.
    batch.q = rows("wide", count * drafts, vocab, torch.bfloat16, seed=9).view(count, drafts, vocab)
    with machine("sm_90", check=False) as m:
        draft = filter_logits(batch.q, backend="triton")
        before = len(m.device.launches)
        target = filter_logits(batch.p, backend="triton")
        tokens = batch.q.float().argmax(-1)
        u = torch.full((count, drafts + 1), 0.9999, dtype=torch.float64)
        r = verify(tokens, target, draft, rule=rule, uniforms=u)
        launches = m.device.launches[before:]
    assert len(launches) == 4
    assert r.num_accepted.tolist() == [0, 0]
    row = vocab * 2
    read = [x.counts.traffic["target[0]" if i > 1 else "logits_ptr"].load_bytes for i, x in enumerate(launches)]
    rejecting = drafts if rule == "block" else 1
    assert sum(read[:2]) <= 1.01 * batch.p.nbytes
    assert read[2] <= 1.01 * count * rejecting * row
    assert read[3] <= 0.02 * count * row
    assert launches[2].counts.traffic["draft[0]"].load_bytes <= 1.01 * count * rejecting * row
    written = sum(t.store_bytes for x in launches for t in x.counts.traffic.values())
    assert written <= 0.045 * batch.p.nbytes


@needs_compiler
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_spills(target):
    batch = Batch(2, 3, 4096, dtype=torch.bfloat16)
    with machine("sm_90", check=False) as m:
        p, q = batch.laws(m, backend="triton")
        tree = torch.zeros(2, 4, dtype=torch.int64), torch.tensor([[-1, 0, 1, 2]] * 2)
        start = len(m.device.launches)
        verify(batch.tokens, p, q, seeds=batch.seeds, positions=batch.at, rule="block")
        verify(batch.tokens, p, q, seeds=batch.seeds, positions=batch.at)
        verify_tree(*tree, p, seeds=batch.seeds, positions=batch.at)
        launches = m.device.launches[start:]
    for launch in launches:
        code = report(compile_for(launch, target))
        assert (code.spills, code.stack_bytes) == (0, 0), launch.name


@pytest.mark.parametrize("mode", MODES)
def test_numbers_of_drafts_that_do_not_fit_32_bits(mode):
    count = torch.tensor([0, -(2**32) + 5, -(2**63) + 5, -1, 2**32 + 1])
    u = torch.full((5, 3), 0.3, dtype=torch.float64)
    p = torch.full((5, 3, 70), 1 / 70)
    for drafts in (0, 2):
        tokens = torch.full((5, drafts), 7)
        want = verify(tokens, p[:, : drafts + 1], None, num_draft_tokens=count, uniforms=u[:, : drafts + 1])
        with machine(mode) as m:
            args = m.put(tokens), m.put(p[:, : drafts + 1].contiguous()), None
            options = {"num_draft_tokens": m.put(count), "uniforms": m.put(u[:, : drafts + 1].contiguous())}
            got = verify(*args, **options, backend="triton")
        assert torch.equal(got.tokens.cpu(), want.tokens)
        assert torch.equal(got.num_accepted.cpu(), want.num_accepted)


@pytest.mark.parametrize("mode", MODES)
def test_given_probabilities_of_any_size(mode):
    """Sums of 1e-60 or 1e300 are no float32; their rows are not empty, and nothing of mass 0 is drawn."""
    sizes = torch.tensor([1e-300, 1e-60, 1e-46, 1e-40, 1.0, 1e38, 1e39, 1e300], dtype=torch.float64)
    p = torch.zeros(8, 2, 200, dtype=torch.float64)
    p[:, :, 150], p[:, :, 199] = sizes[:, None], 3 * sizes[:, None]
    drafts, u = torch.zeros(8, 1, dtype=torch.int64), torch.tensor([[0.5, 0.1]] * 8, dtype=torch.float64)
    # Against a draft that holds something else, and one whose law lies beside the target's.
    q = torch.zeros(8, 1, 200, dtype=torch.float64)
    q[:, 0, 0], q[:, 0, 150] = sizes, sizes / 2
    for draft in (None, q):
        want = verify(drafts, p, draft, uniforms=u)
        assert set(want.tokens[:, 0].tolist()) <= {150, 199}
        with machine(mode) as m:
            law = None if draft is None else m.put(draft)
            got = verify(m.put(drafts), m.put(p), law, uniforms=m.put(u), backend="triton")
        assert torch.equal(got.tokens.cpu(), want.tokens)
        assert torch.equal(got.status.cpu(), want.status)
