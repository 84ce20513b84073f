"""The fused draws against the reference, in every mode: random bits, tokens, exact laws, launches.

The law is measured by bisection in the uniform (exact_law.py): no chance, and a wrong variant fails.
"""

import numpy as np
import pytest
import torch
from exact_law import sampler_law, total_variation
from filter_cases import filters, mixed, rows
from kernel_modes import ALL_MODES, COMPILED_MODES, MODES, machine

triton = pytest.importorskip("triton", reason="kernels need triton")

import triton.language as tl  # noqa: E402

from triton_specdec import FilteredLogits, Status, filter_logits, sample, sample_logits  # noqa: E402
from triton_specdec.kernels import rng as kernel_rng  # noqa: E402
from triton_specdec.reference import rng, rules  # noqa: E402

FIELDS = ("maximum", "inverse_temperature", "cut_value", "cut_id", "log_normalizer", "support_size", "argmax", "status")


@triton.jit
def _noise_kernel(seed_ptr, position_ptr, token_ptr, uniform_ptr, gumbel_ptr, stream, N: tl.constexpr):
    at = tl.arange(0, N)
    seed = tl.load(seed_ptr + at)
    position = tl.load(position_ptr + at)
    token = tl.load(token_ptr + at)
    tl.store(uniform_ptr + at, kernel_rng.uniforms(seed, position, stream, token))
    tl.store(gumbel_ptr + at, kernel_rng.gumbel(seed, position, token))


@pytest.mark.parametrize("mode", ALL_MODES)
def test_random_bits_are_the_reference_s(mode):
    g = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (512,), generator=g)
    positions = torch.randint(0, 2**40, (512,), generator=g)
    tokens = torch.randint(0, 2**32, (512,), generator=g)
    seeds[:4], positions[:4], tokens[:4] = 0, 0, torch.arange(4)
    u, noise = torch.empty(512, dtype=torch.float64), torch.empty(512)
    with machine(mode) as m:
        out = [m.put(t) for t in (seeds, positions, tokens, u, noise)]
        _noise_kernel[(1,)](*out, rules.STREAM_DRAFT, N=512)
    expected = rng.uniforms(seeds, positions, rules.STREAM_DRAFT, tokens)
    assert np.array_equal(out[3].cpu().numpy(), expected)
    np.testing.assert_allclose(out[4].cpu().numpy(), rng.gumbel(seeds, positions, tokens), rtol=0, atol=3e-6)


def draws(count, seed=0):
    """Seeds and positions of rows, and the uniforms of their "sample" stream."""
    g = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(2**63), 2**63 - 1, (count,), generator=g)
    positions = torch.randint(0, 2**33, (count,), generator=g)
    u = torch.from_numpy(rng.uniforms(seeds, positions, rules.STREAM_SAMPLE))
    return seeds, positions, u


def assert_same_tokens(tokens, reference, u):
    """Equal, but where a millionth of the uniform decides between two tokens."""
    near = [sample(reference, uniforms=(u + by).clamp(0, 1 - 2.0**-53)) for by in (-1e-6, 0, 1e-6)]
    assert (sum((tokens == t).int() for t in near) > 0).all()
    assert (tokens == near[1]).float().mean() > 0.95


@pytest.mark.parametrize(("vocab", "dtype"), [(1, torch.float32), (111, torch.float16), (5000, torch.bfloat16)])
def test_tokens_in_the_interpreter(vocab, dtype):
    check_tokens("interpreter", vocab, dtype)


@pytest.mark.parametrize("mode", COMPILED_MODES)
@pytest.mark.parametrize(
    ("vocab", "dtype"), [(2, torch.float32), (32000, torch.float16), (50257, torch.float32), (151936, torch.bfloat16)]
)
def test_tokens_of_real_sizes(mode, vocab, dtype):
    check_tokens(mode, vocab, dtype)


def check_tokens(mode, vocab, dtype):
    x = mixed(vocab, dtype, seed=vocab)
    options = filters(len(x), first=vocab)
    reference = filter_logits(x, **options)
    seeds, positions, u = draws(len(x), vocab)
    with machine(mode, check=mode == "interpreter") as m:
        put = {k: m.put(v) for k, v in options.items()}
        on, s, at = m.put(x), m.put(seeds), m.put(positions)
        f = filter_logits(on, **put, backend="triton")
        tokens = sample(f, seeds=s, positions=at)
        by_uniform = sample(f, uniforms=m.put(u))
        coupled = sample(f, seeds=s, positions=at, method="gumbel")
        fused = sample_logits(on, **put, seeds=s, positions=at, backend="triton")
        fused_coupled = sample_logits(on, **put, seeds=s, positions=at, method="gumbel", backend="triton")
        if m.device:
            names = [launch.name for launch in m.device.launches]
            assert names == ["_scan_kernel", "_resolve_kernel"] + 3 * ["_sample_kernel"] + 2 * [
                "_scan_kernel",
                "_resolve_kernel",
            ]
    assert_same_tokens(tokens.cpu(), reference, u)
    assert torch.equal(tokens, by_uniform)
    assert torch.equal(fused.tokens, tokens)
    assert torch.equal(fused_coupled.tokens, coupled)
    for name in FIELDS:
        assert torch.equal(getattr(fused.filtered, name), getattr(f, name)), name
    expected = sample(reference, seeds=seeds, positions=positions, method="gumbel")
    other = (coupled.cpu() != expected).nonzero()[:, 0]
    assert len(other) <= 1
    for row in other.tolist():
        # Two scores within the rounding of float32.
        noise = rng.gumbel(seeds[row], positions[row], np.array([int(coupled[row]), int(expected[row])]))
        score = reference.log_prob(torch.stack([coupled.cpu(), expected], 1))[row].double().numpy() + noise
        assert abs(score[0] - score[1]) < 1e-5


@pytest.mark.parametrize("mode", MODES)
def test_streams_and_steps(mode):
    x = rows("normal", 8, 500)
    seeds, positions, _ = draws(8)
    steps = torch.arange(8)
    with machine(mode) as m:
        f = filter_logits(m.put(x), 0.9, backend="triton")
        for options in ({"stream": "draft"}, {"stream": "draft", "steps": steps}, {"steps": steps}):
            on = {k: m.put(v) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
            tokens = sample(f, seeds=m.put(seeds), positions=m.put(positions), **on).cpu()
            expected = sample(filter_logits(x, 0.9), seeds=seeds, positions=positions, **options)
            assert torch.equal(tokens, expected)


@pytest.mark.parametrize("mode", MODES)
def test_no_row_draws_an_id_outside(mode):
    x = rows("normal", 8, 300)
    x[0] = torch.nan
    x[1] = -torch.inf
    x[2, 7] = torch.inf
    x[3, 5] = torch.nan
    largest = torch.full((8,), 1 - 2.0**-53, dtype=torch.float64)
    for options in ({}, {"top_k": 3}, {"top_p": 0.9}, {"temperature": 0.0}, {"vocab_size": 200}):
        with machine(mode) as m:
            out = sample_logits(m.put(x), **options, uniforms=m.put(largest), backend="triton")
            first = sample(out.filtered, uniforms=m.put(0 * largest)).cpu()
            coupled = sample(out.filtered, seeds=m.put(torch.arange(8)), method="gumbel").cpu()
            tokens = out.tokens.cpu()
            kept = [out.filtered.log_prob(m.put(t)).cpu() > -torch.inf for t in (out.tokens.cpu(), first, coupled)]
        assert torch.stack(kept).all()
        assert tokens[:2].tolist() == [0, 0]
        assert ((tokens >= 0) & (tokens < 300)).all()
        assert int(out.filtered.status[0]) == Status.NAN | Status.EMPTY


@pytest.mark.parametrize("mode", MODES)
def test_draws_from_stacked_rows(mode):
    x = rows("normal", 6, 300).view(2, 3, 300)
    u = torch.rand(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with machine(mode) as m:
        parts = [filter_logits(m.put(x[:, i]), top_p=0.8, backend="triton") for i in range(3)]
        joined = sample(FilteredLogits.stack(parts, m.put(x)), uniforms=m.put(u)).cpu()
        whole = sample(filter_logits(m.put(x), top_p=0.8, backend="triton"), uniforms=m.put(u)).cpu()
    assert torch.equal(joined, whole)
    assert torch.equal(joined, sample(filter_logits(x, top_p=0.8), uniforms=u))


@pytest.mark.parametrize("mode", MODES)
def test_what_rounding_leaves_does_not_go_to_a_token_of_no_weight(mode):
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((1, 5000)).astype(np.float32))
    x[0, 0], x[0, -1] = 3.3, -80
    u = 1 - 2.0 ** -torch.arange(20, 54, dtype=torch.float64)
    with machine(mode, check=False) as m:
        f = filter_logits(m.put(x).expand(len(u), -1), min_p=1e-38, backend="triton")
        tokens = sample(f, uniforms=m.put(u)).cpu()
    assert int(f.support_size[0]) == 5000
    assert tokens.max() == 4998


LAWS = [
    ({}, 40),
    ({"temperature": 0.7}, 130),
    ({"top_k": 7}, 40),
    ({"top_p": 0.8, "temperature": 1.3}, 200),
    ({"min_p": 0.2}, 40),
    ({"temperature": 0.0}, 40),
]


def law_of(m, row, fused=False, **options):
    """The exact law of the draws of one row; all uniforms of a bisection are rows of one launch."""
    on = m.put(row)
    f = filter_logits(on[None], **options, backend="triton")

    def run(uniforms):
        u = m.put(torch.from_numpy(uniforms[:, 0].copy()))
        many = on.expand(len(u), -1)
        if fused:
            return sample_logits(many, **options, uniforms=u, backend="triton").tokens.cpu().numpy()
        each = filter_logits(many, **options, backend="triton")
        assert torch.equal(each.cut_id, f.cut_id.expand(len(u)))
        return sample(each, uniforms=u).cpu().numpy()

    return sampler_law(run, row.shape[0], probes=256)


@pytest.mark.parametrize("mode", COMPILED_MODES)
@pytest.mark.parametrize(("options", "vocab"), LAWS)
def test_the_law_of_the_draw_is_exact(mode, options, vocab):
    row = rows("wide" if vocab == 130 else "normal", 1, vocab, seed=5)[0]
    expected = filter_logits(row[None], **options).probs()[0].double().numpy()
    with machine(mode, check=False) as m:
        law = law_of(m, row, fused=True, **options)
        assert total_variation(law, expected) < 1e-6
        # The control: a temperature off by a ten-thousandth is seen.
        if options.get("temperature", 1) > 0 and "top_k" not in options:
            wrong = {**options, "temperature": options.get("temperature", 1.0) * 1.0001}
            off = filter_logits(row[None], **wrong).probs()[0].double().numpy()
            assert total_variation(law, off) > 1e-6


@pytest.mark.parametrize("mode", ALL_MODES[1:])
def test_the_law_on_other_targets(mode):
    row = rows("normal", 1, 40, seed=6)[0]
    expected = filter_logits(row[None], top_p=0.9).probs()[0].double().numpy()
    with machine(mode, check=False) as m:
        assert total_variation(law_of(m, row, top_p=0.9), expected) < 1e-6
