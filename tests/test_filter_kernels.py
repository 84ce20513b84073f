"""The fused filter against the reference, in every mode: supports, hostile rows, batch invariance, traffic, code.

The reference is judged in test_filter.py, by hand and by a full sort; here it is the oracle.
"""

import pytest
import torch
from filter_cases import assert_same_supports, decided, filters, mixed, real_rows, rows
from kernel_modes import ALL_MODES, COMPILED_MODES, MODES, compiled, machine, needs_compiler, on_gpu
from test_filter import BY_HAND

triton = pytest.importorskip("triton", reason="kernels need triton")

from gpuless import compile_for, device, report  # noqa: E402

from triton_specdec import FilteredLogits, Status, filter_logits  # noqa: E402

FIELDS = ("maximum", "inverse_temperature", "cut_value", "cut_id", "log_normalizer", "support_size", "argmax", "status")


def version(text):
    """Major and minor version."""
    return tuple(int(part) for part in text.split(".")[:2])


def run(mode, logits, check=None, **options):
    """`filter_logits` by the kernels; the result on the CPU, and the machine."""
    check = mode == "interpreter" if check is None else check
    with machine(mode, check) as m:
        put = {name: m.put(value) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
        return filter_logits(m.put(logits), **put, backend="triton"), m


def compare(mode, logits, order="top_k_first", check=None, first=0):
    """All filters of the list on the rows, in one launch, against the reference."""
    options = filters(len(logits), first)
    ours, m = run(mode, logits, check, **options, order=order)
    reference = filter_logits(logits, **options, order=order)
    # Equal logits have masses without rounding: their cuts on a boundary are exact.
    exact = (logits == logits[:, :1]).all(-1)
    sure = decided(logits, options, order) | exact
    assert sure.float().mean() > 0.8
    assert_same_supports(ours, reference, sure)
    return ours, reference, m


@pytest.mark.parametrize("mode", ALL_MODES)
def test_supports_by_hand(mode):
    for logits, options, ids in BY_HAND:
        f, _ = run(mode, torch.tensor([logits], dtype=torch.float32), **options)
        assert int(f.support_size) == len(ids), (logits, options)
        x = torch.tensor(logits) + 0.0
        key = list(zip((-x).tolist(), range(len(logits)), strict=True))
        cut = (-float(f.cut_value), int(f.cut_id))
        allowed = options.get("vocab_size", len(logits))
        assert [i for i in range(allowed) if key[i] <= cut or int(f.cut_id) == -1] == ids, (logits, options)


@pytest.mark.parametrize("vocab", [1, 2, 111, 5000])
@pytest.mark.parametrize("order", ["top_k_first", "joint"])
def test_supports_in_the_interpreter(vocab, order):
    compare("interpreter", mixed(vocab, each=4, seed=vocab), order)


@pytest.mark.parametrize("mode", COMPILED_MODES)
@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [
        (1, torch.float32),
        (2, torch.bfloat16),
        (111, torch.float32),
        (32000, torch.bfloat16),
        (50257, torch.float32),
        (128256, torch.bfloat16),
        (151936, torch.float16),
        (262144, torch.bfloat16),
        (300000, torch.bfloat16),
    ],
)
def test_supports_of_real_sizes(mode, vocab, dtype):
    for first in (0, 7):
        compare(mode, mixed(vocab, dtype, seed=vocab + first), check=vocab < 1000 or None, first=first)


@pytest.mark.parametrize("mode", COMPILED_MODES)
@pytest.mark.parametrize("order", ["top_k_first", "joint"])
def test_supports_of_real_logits(mode, order):
    for first in (0, 9):
        compare(mode, real_rows(), order, first=first)


@pytest.mark.parametrize("mode", MODES)
def test_dense_results_and_log_probs(mode):
    x = rows("wide", 18, 700, torch.bfloat16)
    options = filters(18)
    reference = filter_logits(x, **options)
    ids = torch.randint(-3, 705, (18, 20), generator=torch.Generator().manual_seed(0))
    with machine(mode) as m:
        f = filter_logits(m.put(x), **{k: m.put(v) for k, v in options.items()}, backend="triton")
        probs, keep, logs = f.probs().cpu(), f.keep_mask().cpu(), f.log_prob(m.put(ids)).cpu()
        one = f.log_prob(m.put(ids[:, 0])).cpu()
    assert torch.equal(keep, reference.keep_mask())
    torch.testing.assert_close(probs, reference.probs(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(logs, reference.log_prob(ids), rtol=0, atol=1e-5)
    assert torch.equal(one, logs[:, 0])
    assert (probs.dtype, keep.dtype, logs.dtype) == (torch.float32, torch.bool, torch.float32)


@pytest.mark.parametrize("mode", MODES)
def test_hostile_rows_among_good_ones(mode):
    good = rows("normal", 4, 5000)
    bad = good[:1].repeat(4, 1)
    bad[0, [7, 4999]] = torch.nan
    bad[1, [9, 20]] = torch.inf
    bad[2] = -torch.inf
    bad[3] = torch.nan
    x = torch.cat([good[:2], bad, good[2:]])
    for options in ({}, {"top_p": 0.9}, {"top_k": 5}, {"temperature": 0.0}):
        f, _ = run(mode, x, **options)
        reference = filter_logits(x, **options)
        assert_same_supports(f, reference, torch.ones(8, dtype=torch.bool))
        alone, _ = run(mode, good, **options)
        for name in FIELDS:
            assert torch.equal(getattr(f, name)[[0, 1, 6, 7]], getattr(alone, name)), name
    assert f.status.tolist() == [0, 0, Status.NAN, Status.INF, Status.EMPTY, Status.NAN | Status.EMPTY, 0, 0]


@pytest.mark.parametrize("mode", MODES)
def test_parameters_that_only_the_device_sees(mode):
    # On a GPU the host never reads them: a row out of range is greedy and says so.
    from triton_specdec import backend
    from triton_specdec.params import RowParams

    x = rows("equal", 6, 3000)
    nan = float("nan")
    values = ([nan, 1, 1, -1, 1, 1], [0] * 6, [1, nan, 1, 1, 1, 1], [0, 0, nan, 0, 1.5, 0], [1, 1, 1, 1, 1, 0])
    dtypes = (torch.float64, torch.int64, torch.float64, torch.float64, torch.int64)
    params = [torch.tensor(v, dtype=d) for v, d in zip(values, dtypes, strict=True)]
    with machine(mode) as m:
        given = RowParams(*(m.put(p) for p in params))
        f = backend.layer("triton").filter_logits(m.put(x), given, "top_k_first", None, None)
    reference = backend.layer("reference").filter_logits(x, RowParams(*params), "top_k_first", None, None)
    assert_same_supports(f, reference, torch.ones(6, dtype=torch.bool))
    assert f.status.tolist() == [Status.PARAMETER] * 6
    assert f.support_size.tolist() == [1] * 6


@pytest.mark.parametrize("mode", COMPILED_MODES)
def test_masses_of_many_equal_tokens_do_not_drift(mode):
    """Sums of thousands of equal float32 weights, one after another, err to one side by more than a token."""
    x = torch.full((1, 262144), -3.0)
    x[:, 1::2] = -1.4372857619206403
    x[:, 0] = 0
    w = x.double().exp()
    p = (w[0, 0] + w[0, 1::2].sum() + w[0, 2::2].sum() / 2) / w.sum()
    f, _ = run(mode, x, top_p=float(p))
    low, high = (int(filter_logits(x, top_p=float(p) * by).support_size) for by in (1 - 2e-6, 1 + 2e-6))
    assert low <= int(f.support_size) <= high


@pytest.mark.parametrize("mode", MODES)
def test_the_smallest_temperature_over_the_smallest_differences(mode):
    x = torch.tensor([[0, -3e-39, -3e-39]])
    f, _ = run(mode, x, temperature=1e-45)
    assert f.log_normalizer.item() == pytest.approx(filter_logits(x, 1e-45).log_normalizer.item(), abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_token_masks_and_padded_vocabularies(mode):
    x = rows("wide", 18, 5000)
    g = torch.Generator().manual_seed(3)
    mask = torch.randint(-(2**31), 2**31 - 1, (18, 157), dtype=torch.int64, generator=g).int()
    mask[3] = 0
    for options in ({"token_mask": mask}, {"vocab_size": 4321}, {"token_mask": mask, "vocab_size": 4090}):
        each = {**filters(18), **options}
        f, _ = run(mode, x, **each)
        assert_same_supports(f, filter_logits(x, **each), torch.ones(18, dtype=torch.bool))
    assert int(f.status[3]) == Status.EMPTY
    f, _ = run(mode, x.masked_fill(torch.arange(5000) >= 4321, torch.nan), vocab_size=4321)
    assert f.status.tolist() == [0] * 18


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [("interpreter", d) for d in (torch.float32, torch.bfloat16, torch.float16)]
    + [compiled("sm_90", torch.bfloat16), on_gpu(torch.bfloat16)],
)
def test_views_are_as_their_copies_and_stay_unwritten(mode, dtype):
    big = rows("normal", 12, 2400, dtype)
    before = big.clone()
    three = big.view(3, 4, 2400)[:, 1:, 3:1203]
    views = (big[:, :1111], big[:, 1:1112], big[::2, :1184], three, big[:, 1::2])
    for view in views:
        a, _ = run(mode, view, top_k=9, top_p=0.9)
        b, _ = run(mode, view.contiguous(), top_k=9, top_p=0.9)
        for name in FIELDS:
            assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert torch.equal(big, before)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("vocab", [4999, 5008])
def test_a_row_knows_nothing_of_its_batch(mode, vocab):
    """Bit for bit, alone, at any place and address, beside rows of NaN, and in rows [B, K + 1]."""
    x = mixed(vocab)
    options = filters(18)
    together, _ = run(mode, x, **options)
    order = torch.randperm(18, generator=torch.Generator().manual_seed(1))
    shuffled, _ = run(mode, x[order], **{k: v[order] for k, v in options.items()})
    poisoned = torch.full((36, vocab), torch.nan)
    poisoned[1::2] = x
    beside, _ = run(mode, poisoned, **{k: v.repeat_interleave(2) for k, v in options.items()})
    three, _ = run(mode, x.view(6, 3, vocab), **options)
    for name in FIELDS:
        own = getattr(together, name)
        assert torch.equal(getattr(shuffled, name), own[order]), name
        assert torch.equal(getattr(beside, name)[1::2], own), name
        assert torch.equal(getattr(three, name).flatten(), own), name
    for i in range(0, 18, 5):
        alone, _ = run(mode, x[i : i + 1], **{k: v[i : i + 1] for k, v in options.items()})
        for name in FIELDS:
            assert torch.equal(getattr(alone, name), getattr(together, name)[i : i + 1]), name


@pytest.mark.parametrize("mode", MODES)
def test_empty_batches_launch_nothing(mode):
    with machine(mode) as m:
        f = filter_logits(m.put(torch.empty(0, 7)), top_k=3, backend="triton")
        assert f.probs().shape == (0, 7)
        assert f.log_prob(m.put(torch.empty(0, 2, dtype=torch.int64))).shape == (0, 2)
        assert filter_logits(m.put(torch.empty(0, 3, 7)), backend="triton").status.shape == (0, 3)
        assert m.device is None or not m.device.launches


@pytest.mark.parametrize("mode", MODES)
def test_stacked_rows(mode):
    x = rows("normal", 6, 300).view(2, 3, 300)
    with machine(mode) as m:
        parts = [filter_logits(m.put(x[:, i]), top_k=3, backend="triton") for i in range(3)]
        joined = FilteredLogits.stack(parts, m.put(x)).probs()
        whole = filter_logits(m.put(x), top_k=3, backend="triton").probs()
    assert torch.equal(joined, whole)


def test_rows_behind_two_to_the_31st_element():
    """Row 2 of a storage of more than 2^31 elements is read where it is."""
    stride = 2**30 + 8
    big = torch.empty(1, dtype=torch.bfloat16).expand(1)
    try:
        big = torch.zeros(2 * stride + 64, dtype=torch.bfloat16)
    except RuntimeError:
        pytest.skip("not enough memory")
    x = rows("normal", 3, 64, torch.bfloat16)
    far = big.as_strided((3, 64), (stride, 1))
    far.copy_(x)
    f, _ = run("interpreter", far, check=False, top_p=0.7)
    assert torch.equal(f.cut_id, filter_logits(x, top_p=0.7).cut_id)


# What it costs: golden values, of compiled code that runs on the CPU.


def reads(logits, dtype=None, **options):
    """Bytes of logits read per byte of logits, for each row."""
    out = []
    for row in logits:
        f, m = run("sm_90", row[None], check=False, **options)
        launches = m.device.launches
        assert [launch.name for launch in launches] == ["_scan_kernel", "_resolve_kernel"]
        out.append(sum(x.counts.traffic["logits_ptr"].load_bytes for x in launches) / row.numel() / row.element_size())
    return torch.tensor(out)


@needs_compiler
def test_bytes_of_logits_that_are_read():
    x = real_rows()
    few = x[::4]
    assert reads(few[:2]).max() <= 1.01
    assert reads(few[:2], temperature=0.0).max() <= 1.01
    assert reads(few, top_k=50).max() <= 1.08
    assert reads(few, top_k=50, top_p=0.9).max() <= 1.08
    assert reads(few, top_k=20, top_p=0.95).max() <= 1.04
    assert reads(few, temperature=0.6, top_p=0.9).max() <= 1.04
    assert reads(few, min_p=0.05).max() <= 1.05
    nucleus = reads(x, top_p=0.95)
    assert nucleus.mean() <= 1.3
    assert nucleus.max() <= 2.7


@needs_compiler
@pytest.mark.parametrize("kind", ["normal", "wide", "ties", "equal", "peaked", "flat", "gumbel", "two values"])
def test_long_supports_are_read_three_times(kind):
    x = rows(kind, 1, 151936, torch.bfloat16)
    for options in ({"top_p": 0.9}, {"top_p": 0.95}, {"top_p": 0.5}, {"top_k": 3000}):
        assert reads(x, **options).max() <= 3.1, options
    assert reads(x, min_p=1e-4).max() <= 2.01
    # A nucleus of a long top-k is two searches.
    assert reads(x, top_k=3000, top_p=0.7).max() <= 5
    # Ties may all be candidates.
    assert reads(x, top_k=50).max() <= (2.1 if kind in ("ties", "equal", "two values") else 1.06)


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "seeds"),
    [
        # The cut falls between two groups of ties, or beside the group that a sample of the row names.
        ("ties", (2, 4, 7)),
        # A sample that errs by more than the pivots are apart costs one more reading.
        ("normal", (3, 11)),
        ("flat", (5, 9)),
    ],
)
def test_no_row_is_read_more_than_four_times(kind, seeds):
    x = torch.cat([rows(kind, 1, 151936, torch.bfloat16, seed=seed) for seed in seeds])
    for options in ({"top_p": 0.9}, {"top_p": 0.5}):
        many = reads(x, **options)
        assert many.max() <= (3.1 if kind == "ties" else 4.1), options
        assert many.mean() <= 3.6


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_scan_reads_once_and_writes_little(dtype):
    x = rows("normal", 2, 151936, dtype)
    f, m = run("sm_90", x, check=False)
    scan, resolve = m.device.launches
    traffic = scan.counts.traffic
    assert traffic["logits_ptr"].load_bytes == x.nbytes
    assert traffic["logits_ptr"].sector_bytes == x.nbytes
    written = sum(t.store_bytes for launch in (scan, resolve) for t in launch.counts.traffic.values())
    # A maximum and a sum for 128 ids, and some numbers a row: no [rows, V] tensor.
    assert written <= 0.018 * 4 * x.numel()
    per_element = scan.counts.warp_instructions * 32 / x.numel()
    assert per_element <= (13.5 if dtype.itemsize == 2 else 16)
    for target in ("sm_80", "sm_90", "sm_100", "gfx942"):
        code = report(compile_for(scan, target))
        assert (code.spills, code.stack_bytes) == (0, 0), target
        assert max(code.load_bits) == 128, target


@needs_compiler
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("vocab", [49152, 151936])
def test_spills(target, vocab):
    from triton_specdec import sample_logits

    x = torch.zeros(1, vocab, dtype=torch.bfloat16)
    ones = torch.ones(1, dtype=torch.int64)
    with device(f"compile:{target}") as gpu:
        if vocab == 49152:
            sample_logits(
                x.float(), seeds=ones, method="gumbel", token_mask=ones.int().expand(1, 1536), backend="triton"
            )
        else:
            sample_logits(x, seeds=ones, backend="triton")
    # Triton 3.6 hoists more out of the search than registers can hold: some words a thread, in the resolve alone.
    limit = 0 if version(triton.__version__) >= (3, 9) else 128
    scan, resolve = gpu.launches
    assert report(scan.compiled).spills == report(scan.compiled).stack_bytes == 0
    assert report(resolve.compiled).spills <= limit
    assert report(resolve.compiled).stack_bytes <= 2 * limit


# Where kernels cannot run.


@needs_compiler
def test_asking_for_kernels_where_they_cannot_run_says_what_to_do():
    with pytest.raises(RuntimeError, match=r"TRITON_INTERPRET=1.*backend='reference'"):
        filter_logits(torch.zeros(1, 4), backend="triton")


def test_the_interpreter_variable_makes_kernels_run_on_cpu_tensors():
    import os
    import subprocess
    import sys

    script = (
        "import torch, triton_specdec as ts\n"
        "x = torch.randn(3, 300)\n"
        "a = ts.filter_logits(x, top_k=5, top_p=.9, backend='triton')\n"
        "b = ts.filter_logits(x, top_k=5, top_p=.9)\n"
        "assert (a.backend, b.backend) == ('triton', 'reference')\n"
        "assert torch.equal(a.keep_mask(), b.keep_mask())\n"
        "u = torch.rand(3, dtype=torch.float64)\n"
        "assert torch.equal(ts.sample(a, uniforms=u), ts.sample(b, uniforms=u))\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "TRITON_INTERPRET": "1"})


def test_without_triton_the_kernels_say_what_is_missing():
    import subprocess
    import sys

    script = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "import torch, triton_specdec as ts\n"
        "try:\n"
        "    ts.filter_logits(torch.zeros(1, 4), backend='triton')\n"
        "except RuntimeError as error:\n"
        "    assert 'pip install triton' in str(error), error\n"
        "else:\n"
        "    raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
