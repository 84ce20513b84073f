"""The penalty kernel: the reference's bits in every mode, untouched tokens keep theirs, hostile parameters are off."""

import pytest
import torch
from kernel_modes import MODES, machine, needs_compiler

triton = pytest.importorskip("triton", reason="kernels need triton")

from gpuless import compile_for, device, report  # noqa: E402

from triton_specdec import apply_penalties_, kernels, on_numpy  # noqa: E402
from triton_specdec.reference import rules  # noqa: E402

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def occurred(batch, vocab, g, dtype=torch.int32):
    """Counts of which most are 0."""
    many = torch.randint(1, 50, (batch, vocab), generator=g)
    return (many * (torch.rand(batch, vocab, generator=g) < 0.1)).to(dtype)


def to(m, options):
    return {k: m.put(v) if isinstance(v, torch.Tensor) else v for k, v in options.items()}


def assert_same(ours, theirs):
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "full"), [(1, 1), (37, 64), (2064, 2064), (2100, 3000)])
def test_bits_are_the_reference_s(mode, dtype, vocab, full):
    """Rows of a padded vocabulary, of a prompt and without one, with and without drafts."""
    g = torch.Generator().manual_seed(vocab)
    base = (torch.randn(3, 4, full, generator=g) * 20).to(dtype)
    drafts = torch.randint(0, vocab, (3, 3), generator=g)
    drafts[0], drafts[1, 1] = drafts[0, 0], -1
    drafts[2, 0], drafts[2, 2] = vocab, 2**40
    each = {
        "repetition": torch.tensor([1.3, 0.7, 1.0]),
        "frequency": torch.tensor([0.1, -0.3, 0.0], dtype=torch.float64),
        "presence": 0.77,
    }
    prompt = torch.rand(3, vocab, generator=g) < 0.1
    options = (
        {**each, "prompt_mask": prompt, "draft_tokens": drafts},
        {**each, "draft_tokens": drafts.int()},
        {"frequency": 1.5},
        {"repetition": 1.1, "prompt_mask": prompt},
    )
    for i, option in enumerate(options):
        counts = occurred(3, vocab, g, torch.int64 if i == 1 else torch.int32)
        with machine(mode) as m:
            ours, theirs = m.put(base.clone()), base.clone()
            seen = ours[..., :vocab] if i < 3 else ours[:, 0, :vocab]
            assert apply_penalties_(seen, m.put(counts), **to(m, option), backend="triton") is seen
            assert m.device is None or [x.name for x in m.device.launches] == ["_penalties_kernel"]
        apply_penalties_(theirs[..., :vocab] if i < 3 else theirs[:, 0, :vocab], counts, **option)
        assert_same(ours, theirs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_bit_pattern(mode, dtype):
    """NaN, infinities, denormals and what overflows, each seen and not seen."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).view(1, 1, -1).expand(1, 2, -1)
    draws = torch.Generator().manual_seed(0)
    counts = torch.randint(-1, 3, (1, 2**16), generator=draws).int()
    prompt = torch.rand(1, 2**16, generator=draws) < 0.3
    option = {"repetition": 1.37, "frequency": 0.1, "presence": -0.3, "prompt_mask": prompt}
    with machine(mode, check=False) as m:
        ours, theirs = m.put(x.clone()), x.clone()
        apply_penalties_(ours, m.put(counts), **to(m, option), backend="triton")
    apply_penalties_(theirs, counts, **option)
    assert_same(ours, theirs)
    untouched = (counts == 0) & ~prompt
    bits = ours.cpu().view(torch.int16)[0, 1]
    assert torch.equal(bits[untouched[0]], x[0, 1].view(torch.int16)[untouched[0]])


@pytest.mark.parametrize("mode", MODES)
def test_parameters_that_cannot_be_applied_are_off(mode):
    inf, nan = torch.inf, torch.nan
    repetition = torch.tensor([0.0, -2.0, nan, inf, 2.0, 2.0, 2.0, 1e-320], dtype=torch.float64)
    frequency = torch.tensor([0.5, 0.5, 0.5, 0.5, nan, inf, 0.5, 0.0], dtype=torch.float64)
    presence = torch.tensor([0.25, 0.25, 0.25, 0.25, 0.25, 0.25, -inf, 0.0], dtype=torch.float64)
    x = torch.tensor([4.0, -4.0, 0.0, -inf, 3.0]).expand(8, 1, 5).clone()
    counts = torch.tensor([1, 2, 1, 1, 0], dtype=torch.int32).expand(8, 5).contiguous()
    given = (repetition, frequency, presence, None, None)
    with machine(mode) as m:
        ours = m.put(x.clone())
        kernels.apply_penalties_(ours, m.put(counts), *(None if t is None else m.put(t) for t in given))
        ours = ours.cpu()
    theirs = x.clone()
    on_numpy.apply_penalties_(theirs, counts, *given)
    assert_same(ours, theirs)
    assert not ours.isnan().any()
    assert ours[0, 0].tolist() == ours[3, 0].tolist() == [4 - 0.75, -4 - 1.25, -0.75, -inf, 3]
    assert ours[4, 0].tolist() == [2 - 0.25, -8 - 0.25, -0.25, -inf, 3]
    assert ours[6, 0].tolist() == [2 - 0.5, -8 - 1, -0.5, -inf, 3]


@pytest.mark.parametrize("mode", MODES)
def test_rows_that_are_no_rows(mode):
    """A last stride that is not 1, rows in another order, counts and masks that are views."""
    g = torch.Generator().manual_seed(4)
    base, counts = torch.randn(50, 3, 2, generator=g), occurred(50, 4, g).t()[::2]
    prompt, drafts = torch.rand(2, 100, generator=g)[:, ::2] < 0.5, torch.tensor([[3, 49], [0, 0]])
    option = {"repetition": 1.5, "presence": 1.0, "prompt_mask": prompt, "draft_tokens": drafts}
    with machine(mode) as m:
        for order in ((2, 1, 0), (1, 2, 0)):
            ours, theirs = m.put(base.clone()), base.clone()
            views = [t.permute(order) if order[0] == 2 else t.permute(1, 2, 0)[:2, :2] for t in (ours, theirs)]
            own = option if order[0] == 2 else {**option, "draft_tokens": drafts[:, :1]}
            apply_penalties_(views[0], m.put(counts), **to(m, own), backend="triton")
            apply_penalties_(views[1], counts, **own)
            assert_same(ours, theirs)
        contiguous = torch.randn(3, 2, 50, generator=g)
        ours, theirs = m.put(contiguous.clone()), contiguous.clone()
        apply_penalties_(ours.transpose(0, 1), m.put(counts), **to(m, option), backend="triton")
        apply_penalties_(theirs.transpose(0, 1), counts, **option)
        assert_same(ours, theirs)


def test_no_rows_launch_nothing():
    with machine("interpreter") as m:
        apply_penalties_(torch.zeros(0, 3, 5), torch.zeros(0, 5, dtype=torch.int32), frequency=1.0, backend="triton")
        assert m.device.launches == []


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_counts_are_read_16_bytes_at_a_time_and_logits_where_they_change(dtype):
    """The traffic of a launch, spills on every target."""
    vocab, drafts = 8192, torch.tensor([[5, 7000]])
    counts, prompt = torch.zeros(1, vocab, dtype=torch.int32), torch.zeros(1, vocab, dtype=torch.bool)
    counts[0, 100], prompt[0, 8000] = 2, True
    with machine("sm_90", check=False) as m:
        option = {"repetition": 1.5, "prompt_mask": prompt, "draft_tokens": drafts}
        apply_penalties_(torch.zeros(1, 3, vocab, dtype=dtype), counts, **option, backend="triton")
        launch = m.device.last
    traffic = launch.counts.traffic
    size = torch.empty((), dtype=dtype).element_size()
    assert traffic["logits_ptr"].load_bytes == traffic["logits_ptr"].store_bytes == (2 + 3 + 4) * size
    assert traffic["count_ptr"].load_bytes == 3 * counts.nbytes
    for target in ("sm_80", "sm_90", "sm_100", "gfx942"):
        code = report(compile_for(launch, target))
        assert (code.spills, code.stack_bytes) == (0, 0), target
        assert code.load_bits[128] >= 1


@needs_compiler
def test_batch_and_drafts_are_no_reason_to_compile_anew():
    with device("compile:sm_90") as record:
        for batch, steps in ((2, 3), (5, 4), (16, 16)):
            x, counts = torch.zeros(batch, steps, 64), torch.zeros(batch, 64, dtype=torch.int32)
            drafts = torch.zeros(batch, steps - 1, dtype=torch.int64)
            apply_penalties_(x, counts, frequency=1.0, draft_tokens=drafts, backend="triton")
    assert len({id(x.compiled) for x in record.launches}) == 1


@pytest.mark.parametrize(
    ("value", "repetition", "count"),
    [(1.5, 1, 1), (0.0, 0, 1), (-2.0, 0, 1), (torch.inf, 0, 0), (-torch.inf, 0, 0), (torch.nan, 0, 0), (1e308, 1, 1)],
)
def test_which_penalties_can_be_applied(value, repetition, count):
    assert (rules.is_repetition_on(value), rules.is_count_penalty_on(value)) == (repetition, count)
