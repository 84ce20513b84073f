"""The harness finds every planted fault, and its modes agree with each other and with PyTorch."""

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the harness runs kernels on CPU tensors")
pytest.importorskip("triton", reason="the harness judges Triton kernels")

import gpuless  # noqa: E402
from gpuless import PtxError, Shadow, ShadowError, device, ptx  # noqa: E402
from gpuless import sample_kernels as kernels  # noqa: E402
from gpuless.ptx import arithmetic  # noqa: E402

HAS_COMPILER = not gpuless.is_interpreter_process()
needs_compiler = pytest.mark.skipif(
    not HAS_COMPILER, reason="TRITON_INTERPRET is set: nothing is compiled in this process"
)


def _mode(name):
    return name if name == "interpreter" else pytest.param(name, marks=needs_compiler)


ALL_MODES = [_mode(name) for name in ("interpreter", "jit", "sm_80", "sm_90", "sm_100")]
MODES = [_mode(name) for name in ("interpreter", "jit", "sm_90")]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def _random(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def _random_int64(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**62), 2**62, (count,), generator=generator)


# The modes agree.


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", [1000, 4096])
def test_log_sum_exp(mode, dtype, size):
    x = _random(3, size, dtype=dtype)
    out = torch.full((3,), float("nan"))
    with device(mode) as gpu:
        kernels.log_sum_exp[(3,)](x, out, size, size, BLOCK=1024, num_warps=4)
    torch.testing.assert_close(out, x.float().logsumexp(1), atol=1e-5, rtol=1e-5)
    assert gpu.last.name == "log_sum_exp"
    assert gpu.last.grid == (3,)
    if gpu.last.counts:
        traffic = gpu.last.counts.traffic
        assert traffic["x_ptr"].load_bytes == x.nbytes
        assert traffic["out_ptr"].store_bytes == out.nbytes


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("descending", [False, True])
def test_sort(mode, descending):
    x = _random(2, 256)
    out = torch.empty_like(x)
    with device(mode):
        kernels.sort_row[(2,)](x, out, N=256, DESCENDING=descending)
    assert torch.equal(out, x.sort(1, descending=descending)[0])


@pytest.mark.parametrize("mode", MODES)
def test_sort_of_int64_keys(mode):
    x = _random_int64(512)
    out = torch.empty_like(x)
    with device(mode):
        kernels.sort_row[(2,)](x, out, N=256, DESCENDING=True)
    assert torch.equal(out.view(2, 256), x.view(2, 256).sort(1, descending=True)[0])


@pytest.mark.parametrize("mode", MODES)
def test_top_k(mode):
    if not hasattr(kernels.tl, "topk"):
        pytest.skip("this triton has no tl.topk")
    x = _random(256)
    out = torch.empty(16)
    with device(mode):
        kernels.top_k_row[(1,)](x, out, N=256, K=16)
    assert torch.equal(out, x.topk(16)[0])


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("reverse", [False, True])
def test_cumulative_sum(mode, reverse):
    # Integers: every order of the additions gives the same sums.
    x = _random(1024).mul(100).round().to(torch.float32)
    out = torch.empty_like(x)
    with device(mode):
        kernels.cumulative_sum[(1,)](x, out, N=1024, REVERSE=reverse)
    expected = x.flip(0).cumsum(0).flip(0) if reverse else x.cumsum(0)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_first_maximum(mode, dtype):
    # Rounded, so that there are ties: the first maximum wins.
    x = _random(4, 1000).round().to(dtype)
    value = torch.empty(4)
    index = torch.empty(4, dtype=torch.int32)
    with device(mode):
        kernels.first_maximum[(4,)](x, value, index, 1000, BLOCK=1024)
    assert torch.equal(value, x.float().max(1)[0])
    assert index.tolist() == x.float().numpy().argmax(1).tolist()


@pytest.mark.parametrize("mode", ALL_MODES)
def test_philox(mode):
    out = torch.empty(4, 128, dtype=torch.int32)
    with device(mode):
        kernels.philox_words[(1,)](out, 0, N=128)
    # Known answer of Philox4x32-10 for a zero counter and a zero key.
    words = [word % 2**32 for word in out[:, 0].tolist()]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    again = torch.empty_like(out)
    with device("interpreter"):
        kernels.philox_words[(1,)](again, 0, N=128)
    assert torch.equal(out, again)


def _exact_fma(a, b, c):
    from fractions import Fraction

    triples = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    return [float(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in triples]


@pytest.mark.parametrize("mode", ALL_MODES)
def test_float64(mode):
    a = _random(128, seed=1).double() / 3
    b = _random(128, seed=2).double() / 7
    c = -(a * b) * (1 + 2.0**-50)
    out = torch.empty(7, 128, dtype=torch.float64)
    less = torch.empty(128, dtype=torch.int32)
    narrow = torch.empty(128)
    with device(mode):
        kernels.float64_arithmetic[(1,)](a, b, c, out, less, narrow, N=128)
    assert torch.equal(out[0], a + b)
    assert torch.equal(out[1], a * b)
    if mode in ("interpreter", "jit"):
        # The interpreter rounds the product before it adds.
        torch.testing.assert_close(out[2], a * b + c, rtol=0, atol=1e-15)
    else:
        assert out[2].tolist() == _exact_fma(a, b, c)
    assert torch.equal(out[3], a / b)
    assert torch.equal(out[4], torch.maximum(a, b))
    torch.testing.assert_close(out[5], a.cumsum(0), rtol=0, atol=1e-13)
    assert torch.equal(out[6], a.float().double())
    assert torch.equal(less.bool(), a < b)
    assert torch.equal(narrow, a.float())


@pytest.mark.parametrize("mode", ALL_MODES)
def test_wide_integers(mode):
    a = _random_int64(128, seed=1)
    b = _random_int64(128, seed=2)
    out = torch.empty(14, 128, dtype=torch.int64)
    floats = torch.empty(2, 128, dtype=torch.float64)
    with device(mode):
        kernels.wide_integers[(1,)](a, b, out, floats, N=128)
    unsigned = [value % 2**64 for value in a.tolist()]
    other = [value % 2**64 for value in b.tolist()]
    rows = out.numpy().view(np.uint64).tolist()
    assert torch.equal(out[0], a * b)
    assert torch.equal(out[1], torch.minimum(a, b))
    assert torch.equal(out[2], torch.maximum(a, b))
    assert torch.equal(out[3], a >> 7)
    assert rows[4] == [value >> 11 for value in unsigned]
    assert torch.equal(out[5], a << 3)
    assert torch.equal(out[6], (a < b).long())
    assert rows[7] == [x * y >> 64 for x, y in zip(unsigned, other, strict=True)]
    assert torch.equal(out[8], a.int().long() * b.int().long())
    words = zip(unsigned, other, strict=True)
    assert rows[9] == [(x % 2**32) * (y % 2**32) >> 32 for x, y in words]
    assert torch.equal(out[10], torch.div(a, 1000003, rounding_mode="trunc"))
    assert torch.equal(out[11], torch.fmod(a, 1000003))
    assert torch.equal(floats[0], a.double())
    assert floats[1].tolist() == [(value >> 11) / 2**53 for value in unsigned]
    assert torch.equal(out[12], (a.double() * 0.37).long())
    assert torch.equal(out[13], (a.max() - b.min()).expand(128))


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_block_of_two_dimensions(mode, dtype):
    x = _random(16, 64, dtype=dtype)
    rows = torch.empty(16)
    columns = torch.empty(64)
    turned = torch.empty(64, 16)
    with device(mode):
        kernels.reduce_block[(1,)](x, rows, columns, turned, R=16, C=64)
    torch.testing.assert_close(rows, x.float().sum(1), rtol=1e-5, atol=1e-5)
    assert torch.equal(columns, x.float().max(0)[0])
    assert torch.equal(turned, x.float().T)


@needs_compiler
@pytest.mark.parametrize("mode", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_arithmetic_in_16_bits(mode, dtype):
    # Not in the interpreter: it adds the bits of bf16 values.
    x, y = _random(256, seed=1, dtype=dtype), _random(256, seed=2, dtype=dtype)
    out = torch.empty(5, 256, dtype=dtype)
    with device(mode):
        kernels.narrow_arithmetic[(1,)](x, y, out, N=256)
    fused = (x.double() * y.double() + 1).float().to(dtype)
    expected = [x + y, x * y, torch.maximum(x, y), (x.float() * 1.7).to(dtype), fused]
    assert torch.equal(out, torch.stack(expected))


@pytest.mark.parametrize("mode", ALL_MODES)
def test_programs_that_leave_early(mode):
    x = _random(6, 512)
    length = torch.tensor([0, 5, 512, 300, 0, 129], dtype=torch.int32)
    out = torch.full((6,), -1.0)
    with device(mode):
        kernels.sum_or_leave[(6,)](x, length, out, 512, BLOCK=128)
    lengths = length.tolist()
    sums = [row[:n].sum() if n else torch.tensor(-1.0) for row, n in zip(x, lengths, strict=True)]
    torch.testing.assert_close(out, torch.stack(sums), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_gather(mode):
    x = _random(256)
    index = torch.randperm(256, generator=torch.Generator().manual_seed(0)).int()
    out = torch.empty_like(x)
    with device(mode):
        kernels.gather_block[(1,)](x, index, out, N=256)
    assert torch.equal(out, x[index.long()])


@pytest.mark.parametrize("mode", MODES)
def test_histogram(mode):
    x = torch.randint(0, 32, (512,), generator=torch.Generator().manual_seed(0)).int()
    out = torch.empty(32, dtype=torch.int32)
    with device(mode):
        kernels.histogram[(1,)](x, out, N=512, BINS=32)
    assert torch.equal(out.long(), torch.bincount(x, minlength=32))


@pytest.mark.parametrize("mode", ALL_MODES)
def test_atomic_add(mode):
    x = torch.randint(0, 10, (1000,), generator=torch.Generator().manual_seed(0)).int()
    counts = torch.zeros(10, dtype=torch.int32)
    with device(mode):
        kernels.count_by_value[(4,)](x, counts, 1000, BLOCK=256)
    assert torch.equal(counts.long(), torch.bincount(x, minlength=10))


@pytest.mark.parametrize("mode", MODES)
def test_while_loop_whose_length_differs_between_programs(mode):
    x = torch.tensor([1, 27, 6, 97, 2], dtype=torch.int32)
    out = torch.empty_like(x)
    with device(mode):
        kernels.collatz_steps[(5,)](x, out)
    assert out.tolist() == [0, 111, 8, 118, 1]


@pytest.mark.parametrize("mode", ALL_MODES)
def test_scan_of_a_tuple(mode):
    a = _random(256, seed=1).sigmoid()
    b = _random(256, seed=2)
    out = torch.empty_like(a)
    with device(mode):
        kernels.linear_recurrence[(1,)](a, b, out, N=256)
    state, expected = 0.0, []
    for factor, addend in zip(a.tolist(), b.tolist(), strict=True):
        state = state * factor + addend
        expected.append(state)
    torch.testing.assert_close(out, torch.tensor(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_reduction_of_a_tuple_with_int64_keys(mode):
    key = _random_int64(256) >> 58
    out = torch.empty(2, dtype=torch.int64)
    with device(mode):
        kernels.best_pair[(1,)](key, out, N=256)
    assert out.tolist() == [int(key.max()), int(key.numpy().argmax())]


@pytest.mark.parametrize("mode", ALL_MODES)
def test_rule_from_a_module_without_imports(mode):
    x = _random(300)
    out = torch.empty(1, dtype=torch.int32)
    with device(mode):
        kernels.count_between[(1,)](x, out, 300, -0.5, 0.5, BLOCK=512)
    assert out.item() == int(((x >= -0.5) & (x < 0.5)).sum())
    assert "tl" not in vars(gpuless.sample_kernels.sample_rules) or not HAS_COMPILER


# Planted faults that shadow memory finds.


def _rows(width=1000):
    return _random(4, width)


def test_shadow_counts_and_passes_a_correct_kernel():
    x, out = _rows(), torch.empty(4)
    with device("interpreter") as gpu, Shadow() as shadow:
        kernels.log_sum_exp[(4,)](x, out, 1000, 1000, BLOCK=256)
    seen = shadow.last["x_ptr"]
    assert seen.max_reads_per_element == 1
    assert seen.load_bytes == x.nbytes
    assert shadow.last["out_ptr"].store_bytes == out.nbytes
    assert shadow.last.fewest_bytes == x.nbytes + out.nbytes
    assert gpu.last.shadow is shadow.last


def test_shadow_finds_a_lane_out_of_bounds():
    with device("interpreter"), Shadow(), pytest.raises(ShadowError, match="OUT OF BOUNDS"):
        kernels.reads_beyond_the_row[(4,)](_rows(), torch.empty(4), 1000, 1000, BLOCK=256)


def test_shadow_finds_a_lane_in_the_padding_of_a_view():
    x = _rows(1024)[:, :1000]
    with device("interpreter"), Shadow(), pytest.raises(ShadowError, match="padding of a view"):
        kernels.reads_beyond_the_row[(4,)](x, torch.empty(4), 1000, 1024, BLOCK=256)


@pytest.mark.parametrize("name", ["stores_to_one_element", "adds_without_atomics"])
def test_shadow_finds_a_race(name):
    with device("interpreter"), Shadow(), pytest.raises(ShadowError, match="RACE"):
        getattr(kernels, name)[(4,)](_random(1024), torch.zeros(1), BLOCK=256)


def test_shadow_finds_two_lanes_that_store_to_one_element():
    with device("interpreter"), Shadow(), pytest.raises(ShadowError, match="RACE"):
        kernels.stores_twice_in_one_program[(1,)](_random(256), torch.zeros(128), BLOCK=256)


def test_shadow_finds_a_missing_barrier():
    x, work, out = _random(256), torch.zeros(256), torch.zeros(256)
    with device("interpreter"), Shadow(), pytest.raises(ShadowError, match="HAZARD"):
        kernels.reads_back_without_barrier[(1,)](x, work, out, BLOCK=256, BARRIER=False)
    with device("interpreter"), Shadow():
        kernels.reads_back_without_barrier[(1,)](x, work, out, BLOCK=256, BARRIER=True)
    assert torch.equal(out, x.flip(0))


def test_shadow_poisons_masked_lanes():
    out = torch.zeros(1)
    with device("interpreter"), Shadow():
        kernels.sums_masked_lanes[(1,)](_random(200), out, 200, BLOCK=256)
    assert torch.isnan(out).all()


def test_shadow_finds_an_uninitialised_read():
    x, out = _random(256), torch.zeros(1)
    with device("interpreter"), Shadow() as shadow:
        work = shadow.uninitialised(torch.empty(256))
        with pytest.raises(ShadowError, match="UNINITIALISED"):
            kernels.reads_what_nobody_wrote[(1,)](x, work, out, 100, BLOCK=256)
        kernels.reads_what_nobody_wrote[(1,)](x, work, out, 256, BLOCK=256)


def test_shadow_exempts_what_a_kernel_synchronises_itself():
    def run(shadow):
        arrived = torch.zeros(1, dtype=torch.int32)
        out = torch.zeros(1)
        with device("interpreter"), shadow:
            kernels.last_block[(4,)](x, torch.zeros(4), arrived, out, 1000, PARTS=4, BLOCK=256)
        return out

    x = _random(1000)
    with pytest.raises(ShadowError, match="RACE"):
        run(Shadow())
    torch.testing.assert_close(run(Shadow(synchronised=["part_ptr"], order=3))[0], x.sum())


# Planted faults that the emulator finds.


@needs_compiler
def test_emulator_finds_a_lane_out_of_bounds():
    with device("sm_90"), pytest.raises(PtxError, match="OUT OF BOUNDS"):
        kernels.reads_beyond_the_row[(4,)](_rows(), torch.empty(4), 1000, 1000, BLOCK=256)


@needs_compiler
def test_emulator_finds_a_lane_in_the_padding_of_a_view():
    x = _rows(1024)[:, :1000]
    with device("sm_90"), pytest.raises(PtxError, match="padding of a view"):
        kernels.reads_beyond_the_row[(4,)](x, torch.empty(4), 1000, 1024, BLOCK=256)


@needs_compiler
@pytest.mark.parametrize("name", ["stores_to_one_element", "adds_without_atomics"])
@pytest.mark.parametrize("max_lanes", [ptx.MAX_LANES, 128])
def test_emulator_finds_a_race_between_ctas(name, max_lanes):
    with device("sm_90", max_lanes=max_lanes), pytest.raises(PtxError, match="RACE BETWEEN CTAS"):
        getattr(kernels, name)[(4,)](_random(1024), torch.zeros(1), BLOCK=256)


@needs_compiler
def test_emulator_finds_a_race_in_a_cta():
    with device("sm_90"), pytest.raises(PtxError, match="RACE IN THE CTA"):
        kernels.stores_twice_in_one_program[(1,)](_random(256), torch.zeros(128), BLOCK=256)


@needs_compiler
def test_emulator_finds_a_missing_barrier():
    x, work, out = _random(256), torch.zeros(256), torch.zeros(256)
    with device("sm_90"), pytest.raises(PtxError, match="HAZARD"):
        kernels.reads_back_without_barrier[(1,)](x, work, out, BLOCK=256, BARRIER=False)
    with device("sm_90"):
        kernels.reads_back_without_barrier[(1,)](x, work, out, BLOCK=256, BARRIER=True)
    assert torch.equal(out, x.flip(0))


@needs_compiler
def test_emulator_finds_a_misaligned_vector_access():
    x, out = _random(1024), torch.empty(512)
    with device("sm_90"), pytest.raises(PtxError, match="MISALIGNED"):
        kernels.promises_alignment[(1,)](x, out, 17, BLOCK=512)
    with device("sm_90"):
        kernels.promises_alignment[(1,)](x, out, 32, BLOCK=512)
    assert torch.equal(out, x[32:544])


@needs_compiler
def test_emulator_finds_a_race_in_shared_memory():
    x = _random(256)
    out = torch.empty_like(x)
    index = torch.arange(256, dtype=torch.int32).flip(0)
    with device("sm_90") as gpu:
        kernels.gather_block[(1,)](x, index, out, N=256)
    assert torch.equal(out, x.flip(0))
    compiled = gpu.last.compiled
    text = compiled.asm["ptx"]
    assert "bar.sync" in text
    # The compiler sets the barriers: to plant the fault, take them out again.
    broken = SimpleNamespace(
        asm={"ptx": text.replace("bar.sync", "// bar.sync")},
        src=compiled.src,
        metadata=compiled.metadata,
    )
    arguments = {"x_ptr": x, "index_ptr": index, "out_ptr": out, "N": 256}
    with pytest.raises(PtxError, match="SHARED RACE"):
        ptx.launch(broken, (1, 1, 1), arguments)


@needs_compiler
def test_emulator_lets_a_kernel_synchronise_itself():
    x, out = _random(1000), torch.zeros(1)
    arrived = torch.zeros(1, dtype=torch.int32)
    with device("sm_90", synchronised=["part_ptr"]):
        kernels.last_block[(4,)](x, torch.zeros(4), arrived, out, 1000, PARTS=4, BLOCK=256)
    torch.testing.assert_close(out[0], x.sum())


@needs_compiler
def test_jit_mode_finds_what_only_the_compiler_refuses():
    from triton.compiler.errors import CompilationError

    x, out = _random(256), torch.empty(256)
    with device("interpreter"):
        kernels.branches_on_a_block[(1,)](x, out, BLOCK=256)
    with device("jit"), pytest.raises(CompilationError):
        kernels.branches_on_a_block[(1,)](x, out, BLOCK=256)


# Arithmetic that NumPy does not have.


def test_fused_multiply_add_is_rounded_once():
    generator = np.random.default_rng(0)
    a, b = generator.standard_normal((2, 2000))
    c = -a * b * (1 + generator.integers(-4, 5, 2000) * 2.0**-52)
    expected = _exact_fma(a, b, c)
    assert arithmetic.fma_f64(a, b, c).tolist() == expected
    # A product whose float64 sum is a tie of float32: rounding twice would go down.
    one = np.ones(1, np.float32)
    tie = np.array([1 + 2.0**-12], np.float32)
    small = np.array([2.0**-24 + 2.0**-60], np.float32) * one
    exact = np.longdouble(tie[0]) * np.longdouble(tie[0]) + np.longdouble(small[0])
    assert arithmetic.fma_f32(tie, tie, small)[0] == np.float32(exact)


@pytest.mark.parametrize("name", ["u32", "s32", "u64", "s64"])
def test_multiply_high(name):
    bits = int(name[1:])
    generator = np.random.default_rng(0)
    words = generator.integers(0, 2**64, (2, 500), dtype=np.uint64)
    a, b = words.astype(f"u{bits // 8}").view(arithmetic.DTYPES[name])
    expected = [int(x) * int(y) >> bits for x, y in zip(a, b, strict=True)]
    assert arithmetic.multiply_high(a, b).tolist() == expected


# The driver.


@needs_compiler
def test_modes_nest_and_leave_nothing_behind():
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    before = (JITFunction.run, JITFunction.__call__, driver._active)
    x, out = _random(2, 512), torch.empty(2)
    expected = x.logsumexp(1)
    for _ in range(2):
        with device("sm_90") as outer:
            kernels.log_sum_exp[(2,)](x, out, 512, 512, BLOCK=512)
            with device("interpreter") as inner, Shadow() as shadow:
                kernels.log_sum_exp[lambda meta: (2,)](x, out.zero_(), 512, 512, BLOCK=512)
            torch.testing.assert_close(out, expected)
            kernels.log_sum_exp[(2,)](x, out.zero_(), 512, 512, BLOCK=512)
        torch.testing.assert_close(out, expected)
        assert len(outer.launches) == 2
        assert len(inner.launches) == len(shadow.launches) == 1
    assert (JITFunction.run, JITFunction.__call__, driver._active) == before


@pytest.mark.skipif(HAS_COMPILER, reason="TRITON_INTERPRET is not set")
@pytest.mark.parametrize("mode", ["jit", "sm_90", "compile:gfx942"])
def test_modes_that_compile_need_the_compiler(mode):
    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"), device(mode):
        pass


@pytest.mark.parametrize("mode", ["cpu", "sm90", "compile", "compile:tpu"])
def test_unknown_mode(mode):
    with pytest.raises(ValueError, match="expected"), device(mode):
        pass


@needs_compiler
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_compile_only(target):
    x, out = _random(2, 512), torch.full((2,), -1.0)
    with device(f"compile:{target}") as gpu:
        kernels.log_sum_exp[(2,)](x, out, 512, 512, BLOCK=512)
    assert out.tolist() == [-1.0, -1.0]
    found = gpuless.report(gpu.last.compiled)
    assert found.target == target
    assert found.spills == 0


@needs_compiler
def test_fusion_is_what_was_asked_for():
    lane = torch.zeros(128, dtype=torch.float64)
    out = torch.empty(7, 128, dtype=torch.float64)
    found = []
    for fp_fusion in (True, False):
        with device("sm_90", fp_fusion=fp_fusion) as gpu:
            kernels.linear_recurrence[(1,)](lane, lane, out, N=128)
        found.append(gpu.last.counts.instructions["fma"] > 0)
    assert found == [True, False]


# Static reports.


@needs_compiler
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_report_sees_wide_loads_and_the_loop(target):
    x, out = _random(2, 4096, dtype=torch.bfloat16), torch.empty(2)
    with device("interpreter") as gpu:
        kernels.log_sum_exp[(2,)](x, out, 4096, 4096, BLOCK=2048, num_warps=4)
    found = gpuless.report(gpuless.compile_for(gpu.last, target))
    assert set(found.load_bits) == {128}
    assert found.registers > 0
    loop = found.loading_loop
    assert loop.load_bytes > 0
    assert 5 < loop.instructions_per_element(2) < 60


@needs_compiler
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_report_sees_narrow_loads(target):
    signature = gpuless.KernelSignature(
        kernels.log_sum_exp,
        {"x_ptr": "*bf16", "out_ptr": "*fp32", "V": "i32", "stride": "i32"},
        {"BLOCK": 2048},
    )
    found = gpuless.report(gpuless.compile_for(signature, target))
    assert set(found.load_bits) == {16}


@needs_compiler
def test_report_sees_a_spill():
    x, out = _random(2, 8192), torch.empty(8192)

    def compile_with(**options):
        with device("compile:sm_90") as gpu:
            kernels.holds_too_much[(1,)](x, out, 8192, N=8192, num_warps=4, **options)
        return gpuless.report(gpu.last.compiled)

    free, limited = compile_with(), compile_with(maxnreg=32)
    assert free.spills == 0
    assert limited.spills > 0
    assert limited.registers <= 32
    assert limited.stack_bytes > 0


@needs_compiler
def test_report_sees_a_spill_on_amd():
    x, out = _random(2, 8192), torch.empty(8192)
    with device("compile:gfx942") as gpu:
        # Eight waves share a SIMD's registers: 64 are left to each.
        kernels.holds_too_much[(1,)](x, out, 8192, N=8192, num_warps=1, waves_per_eu=8)
    found = gpuless.report(gpu.last.compiled)
    assert found.spills > 0
    assert found.stack_bytes > 0


def test_occupancy():
    # 128 registers x 128 threads x 4 blocks fill the register file of 65536.
    found = gpuless.occupancy(90, registers=128, shared_bytes=0, num_warps=4)
    assert (found.blocks, found.limiter) == (4, "registers")
    found = gpuless.occupancy(90, registers=16, shared_bytes=100_000, num_warps=4)
    assert (found.blocks, found.limiter) == (2, "shared memory")


@needs_compiler
def test_lower_bound_is_a_memory_bound_for_a_memory_bound_launch():
    x, out = _random(132, 4096), torch.empty(132)
    with device("sm_90", max_lanes=16384) as gpu:
        kernels.log_sum_exp[(132,)](x, out, 4096, 4096, BLOCK=2048, num_warps=4)
    bound = gpuless.lower_bound(gpu.last, "H100")
    assert bound.memory_us == pytest.approx(1e6 * (x.nbytes + 132 * 32) / 3.35e12)
    assert bound.us >= bound.memory_us
    assert 0 < bound.memory_fraction <= 1


# Exact laws.

TARGET = [0.5, 0.125, 0.0, 0.25, 0.0625, 0.0625]
DRAFT = [0.25, 0.25, 0.25, 0.125, 0.125, 0.0]


@pytest.mark.parametrize("bits", [24, 53])
def test_exact_law_of_a_function(bits):
    ends = np.cumsum(TARGET)[:-1]

    def run(uniforms):
        assert uniforms.max() < 1
        return np.searchsorted(ends, uniforms[:, 0], side="right")

    assert gpuless.sampler_law(run, 6, bits=bits).tolist() == TARGET
    # One grid point more or less is seen.
    ends[0] += 2.0**-bits
    assert gpuless.total_variation(gpuless.sampler_law(run, 6, bits=bits), TARGET) == 2.0**-bits


@pytest.mark.parametrize(("bits", "dtype"), [(24, torch.float32), (53, torch.float64)])
def test_exact_law_of_a_sampling_kernel(bits, dtype):
    p = torch.tensor(TARGET, dtype=dtype)

    def run(uniforms):
        u = torch.tensor(uniforms[:, 0], dtype=dtype)
        out = torch.empty(len(u), dtype=torch.int32)
        kernels.draw[(len(u),)](p, u, out, 6, BLOCK=8)
        return out.numpy()

    with device("interpreter"):
        law = gpuless.sampler_law(run, 6, bits=bits, probes=16)
    assert law.tolist() == TARGET


@pytest.mark.parametrize("mode", ["interpreter", _mode("sm_90")])
def test_exact_law_of_a_round(mode):
    p, q = torch.tensor(TARGET), torch.tensor(DRAFT)

    def run(draft, uniforms):
        rows = len(draft)
        out = torch.empty(rows, dtype=torch.int32)
        accepted = torch.empty(rows, dtype=torch.int32)
        d = torch.tensor(draft, dtype=torch.int32)
        u = torch.tensor(uniforms, dtype=torch.float32)
        kernels.accept_or_recover[(rows,)](p, q, d, u, out, accepted, 6, BLOCK=8, num_warps=1)
        return out.numpy(), accepted.numpy().astype(bool)

    with device(mode):
        law = gpuless.round_law(run, DRAFT, bits=24, probes=16)
    assert law.acceptance.tolist() == [1.0, 0.5, 0.0, 1.0, 0.5, 1.0]
    assert gpuless.total_variation(law.tokens, TARGET) < 1e-7
    wrong = gpuless.total_variation(law.tokens, np.roll(TARGET, 1))
    assert wrong > 0.1
