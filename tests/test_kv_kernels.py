"""The KV kernels: the reference's bytes in every mode, neighbours untouched, nothing hostile gets out of bounds, costs.

Caches are compared by the bytes of their whole storage, so that a write beside a view is seen.
"""

import numpy as np
import pytest
import torch
from kernel_modes import MODES, machine, needs_compiler

triton = pytest.importorskip("triton", reason="kernels need triton")

from gpuless import compile_for, device, report  # noqa: E402

from triton_specdec import (  # noqa: E402
    compact_kv_,
    filter_logits,
    kernels,
    on_numpy,
    truncate_kv_,
    truncate_paged_kv_,
    verify,
    verify_tree,
)
from triton_specdec.kernels import caches as kernel_caches  # noqa: E402
from triton_specdec.reference import rules  # noqa: E402

TARGETS = ["sm_80", "sm_90", "sm_100", "gfx942"]
FP8 = torch.float8_e4m3fn
# Layout, what the caches are, element type, D: words of 16, 8, 4, 2 and 1 bytes.
CASES = [
    ("bhsd", "separate", torch.bfloat16, 64),
    ("bshd", "separate", torch.float16, 20),
    ("bhsd", "stacked", FP8, 64),
    ("bshd", "stacked", FP8, 20),
    ("bhsd", "views", torch.float16, 24),
    ("bshd", "views", torch.bfloat16, 32),
    ("bhsd", "views", torch.int8, 5),
    ("bshd", "views", torch.uint8, 18),
    ("bshd", "stacked", torch.int64, 3),
    ("bhsd", "separate", torch.float32, 1),
]


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def storage(layout, kind, dtype, width, batch=4, heads=3, slots=24, seed=0):
    """Tensors of random bytes, around which the caches of a case are views; and how to see the caches in them."""
    random = np.random.default_rng(seed)
    inner = (heads, slots) if layout == "bhsd" else (slots, heads)
    shape = (batch, *inner, width)
    if kind == "stacked":
        shape = (3, *shape)
    if kind == "views":
        # A static cache for more requests and more slots, and rows with a gap behind them.
        shape = (batch + 2, heads, slots + 3, width * 2) if layout == "bhsd" else (batch + 2, slots + 3, heads, width)
    size = torch.empty((), dtype=dtype).element_size()
    data = random.integers(0, 256, (2 if kind == "stacked" else 5, *shape[:-1], shape[-1] * size), np.uint8)
    bases = [torch.from_numpy(part.copy()).view(dtype) for part in data]

    def caches(of):
        if kind != "views":
            return of
        if layout == "bhsd":
            return [base[1:-1, :, 2:-1, :width] for base in of]
        return [base[1:-1, 2:-1] for base in of]

    return bases, caches


def same_bytes(ours, theirs):
    return all(torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8)) for a, b in zip(ours, theirs, strict=True))


def on_both(m, bases):
    """Two copies: one on the machine, one for the reference."""
    return [m.put(base.clone()) for base in bases], [base.clone() for base in bases]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("layout", "kind", "dtype", "width"), CASES, ids=str)
def test_bytes_are_the_reference_s(mode, layout, kind, dtype, width):
    bases, caches = storage(layout, kind, dtype, width)
    before, keep = ints(21, 9, 24, 5), torch.tensor([10, 12, 0, -3])
    # Leftwards and overlapping; a permutation; nothing; slots that stay where they are, and one from the right.
    source = ints(12, 11, 14, 23, 5, 6, 4, 0, 99, -1, 99, 99, 20, 21, 3, 23).view(4, 4)
    start, count = ints(11, 4, 30, 20), ints(4, 3, 0, 4)
    with machine(mode) as m:
        ours, theirs = on_both(m, bases)
        lengths, expected = m.put(before.clone()), before.clone()
        assert truncate_kv_(lengths, m.put(keep), caches(ours), scrub=True, layout=layout, backend="triton") is lengths
        truncate_kv_(expected, keep, caches(theirs), scrub=True, layout=layout)
        assert torch.equal(lengths.cpu(), expected)
        assert same_bytes(ours, theirs)
        assert not same_bytes(ours, bases)
        ours, theirs = on_both(m, bases)
        options = [m.put(t) for t in (source, start, count)]
        compact_kv_(caches(ours), *options, layout=layout, backend="triton")
        compact_kv_(caches(theirs), source, start, count, layout=layout)
        assert same_bytes(ours, theirs)
        assert not same_bytes(ours, bases)
        if m.device:
            assert [x.name for x in m.device.launches] == ["_scrub_kernel", "_compact_kernel"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch", [1, 2500])
def test_lengths_alone(mode, batch):
    g = torch.Generator().manual_seed(batch)
    lengths = torch.randint(0, 2**31 - 1, (batch, 2), generator=g).int()[:, 0]
    keep = torch.randint(-(2**40), 2**40, (batch,), generator=g) >> torch.randint(0, 40, (batch,), generator=g)
    keep[0] = 2**63 - 1
    want = truncate_kv_(lengths.clone(), keep)
    with machine(mode) as m:
        whole = m.put(torch.stack([lengths, lengths], 1))
        truncate_kv_(whole[:, 0], m.put(keep), backend="triton")
        assert m.device is None or [x.name for x in m.device.launches] == ["_truncate_kernel"]
    assert torch.equal(whole[:, 0].cpu(), want)
    assert torch.equal(whole[:, 1].cpu(), lengths)


@pytest.mark.parametrize("mode", MODES)
def test_hostile_values_move_and_scrub_nothing_outside(mode):
    far = 2**62
    source = torch.tensor([[3, 24], [3, -1], [3, far], [3, 4], [3, 4], [3, 4], [3, 4], [7, -far]])
    start = torch.tensor([0, 0, 0, 23, -1, far, 0, 0])
    count = torch.tensor([2, 2, 2, 2, 2, 2, 3, 1])
    bases, caches = storage("bhsd", "views", torch.float16, 24, batch=8)
    with machine(mode) as m:
        ours, theirs = on_both(m, bases)
        kernels.compact_kv_(caches(ours), *(m.put(t) for t in (source, start, count)))
        on_numpy.compact_kv_(caches(theirs), source, start, count)
        assert same_bytes(ours, theirs)
        # Row 7 alone: what stands behind its count is not looked at.
        expected = [base.clone() for base in bases]
        for cache in caches(expected):
            cache[7, :, 0] = cache[7, :, 7]
        assert same_bytes(ours, expected)
        compact_counts = torch.tensor([-1, -far, far, 2**31, 3, 3, 3, 3])
        ours, _ = on_both(m, bases)
        kernels.compact_kv_(caches(ours), *(m.put(t) for t in (source, start, compact_counts)))
        assert same_bytes(ours, bases)
        lengths = ints(-5, 2**31 - 1, 30, 24, 0, -(2**31), 25, 24)
        keep = torch.tensor([-9, 22, far, -far, 7, 3, 24, 23])
        ours, theirs = on_both(m, bases)
        on = m.put(lengths.clone())
        kernels.truncate_kv_(on, m.put(keep), caches(ours))
        on_numpy.truncate_kv_(lengths, keep, caches(theirs))
        assert torch.equal(on.cpu(), lengths)
        assert same_bytes(ours, theirs)


@pytest.mark.parametrize("mode", MODES)
def test_caches_of_several_kinds_and_sizes(mode):
    """Keys wider than values, another number of heads and of slots, empty ones, dimensions of one with odd strides."""
    g = torch.Generator().manual_seed(1)
    shapes = [(2, 2, 9, 8), (2, 2, 9, 6), (2, 1, 12, 8), (2, 2, 9, 8), (2, 0, 9, 8), (0, 2, 2, 9, 8), (2, 2, 9, 0)]
    bases = [torch.randn(shape, generator=g) for shape in shapes]
    bases.append(torch.randn(2 * 9 * 8 + 3, generator=g).as_strided((2, 1, 9, 8), (72, 3, 8, 1), 3))
    bases.append(torch.randn(2, 1, 9, 1, generator=g))
    source, start, count = ints(3, 8, 8, 0).view(2, 2), ints(2, 4), ints(2, 1)
    with machine(mode) as m:
        ours = [m.put(base.clone()) for base in bases[:-2]] + [m.put(base) for base in bases[-2:]]
        theirs = [base.clone() for base in bases]
        compact_kv_(ours, *(m.put(t) for t in (source, start, count)), backend="triton")
        compact_kv_(theirs, source, start, count)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(ours, theirs, strict=True))
        assert m.device is None or len(m.device.launches) == 5
        lengths = ints(8, 9)
        on = m.put(lengths.clone())
        truncate_kv_(on, m.put(ints(3, 0)), ours, scrub=True, backend="triton")
        truncate_kv_(lengths, ints(3, 0), theirs, scrub=True)
        assert torch.equal(on.cpu(), lengths)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_more_caches_than_a_launch_takes(mode, monkeypatch):
    monkeypatch.setattr(kernel_caches, "MOST_TENSORS", 4)
    bases = [torch.randn(2, 1, 6, 8, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    with machine(mode) as m:
        ours, theirs = on_both(m, bases)
        compact_kv_(ours, m.put(ints(4, 5)[:, None]), m.put(ints(0, 1)), m.put(ints(1, 1)), backend="triton")
        compact_kv_(theirs, ints(4, 5)[:, None], ints(0, 1), ints(1, 1))
        assert same_bytes(ours, theirs)
        on = m.put(ints(6, 4))
        truncate_kv_(on, m.put(ints(2, 3)), ours, scrub=True, backend="triton")
        truncate_kv_(ints(6, 4), ints(2, 3), theirs, scrub=True)
        assert same_bytes(ours, theirs)
        assert m.device is None or len(m.device.launches) == 4


@pytest.mark.parametrize("mode", MODES)
def test_a_permutation_of_many_slots(mode):
    g = torch.Generator().manual_seed(2)
    base = torch.randint(0, 2**31, (2, 2, 300, 3), generator=g).int()
    source = torch.stack([torch.randperm(300, generator=g) for _ in range(2)])
    with machine(mode) as m:
        ours = m.put(base.clone())
        zero, count = m.put(torch.zeros(2, dtype=torch.int64)), m.put(torch.tensor([300, 299]))
        compact_kv_([ours], m.put(source), zero, count, backend="triton")
    for b, number in enumerate((300, 299)):
        assert torch.equal(ours.cpu()[b, :, :number], base[b, :, source[b, :number]])
        assert torch.equal(ours.cpu()[b, :, number:], base[b, :, number:])


@pytest.mark.parametrize("mode", MODES)
def test_rounds_end_in_the_cache(mode):
    """`num_accepted` and `nodes` go from the verification to the cache as they are."""
    g = torch.Generator().manual_seed(3)
    drafts, cached = torch.randint(0, 20, (5, 3), generator=g), ints(4, 7, 0, 2, 8)
    logits = torch.randn(5, 4, 20, generator=g) * 0.1
    # Rows accept 0 to 3 drafts.
    for b in range(5):
        for i in range(min(b, 3)):
            logits[b, i, drafts[b, i]] += 50
    base = torch.randn(2, 5, 2, 16, 8, generator=g)
    with machine(mode) as m:
        f = filter_logits(m.put(logits), temperature=0.0, backend="triton")
        cache, lengths = m.put(base.clone()), m.put(cached + 4)
        r = verify(m.put(drafts), f, seeds=m.put(torch.arange(5)))
        truncate_kv_(lengths, rules.kept_length(m.put(cached), r.num_accepted), [cache], scrub=True, backend="triton")
        assert lengths.tolist() == [5, 9, 3, 6, 12]
        for b, (length, old) in enumerate(zip(lengths.tolist(), (cached + 4).tolist(), strict=True)):
            assert not cache[:, b, :, length:old].any()
            assert torch.equal(cache[:, b, :, :length].cpu(), base[:, b, :, :length])
            assert torch.equal(cache[:, b, :, old:].cpu(), base[:, b, :, old:])
        # A comb: the draft of each step is the second child.
        parents = torch.tensor([-1, 0, 0, 2]).repeat(5, 1)
        tree = torch.cat([torch.zeros(5, 1, dtype=torch.int64), logits.argmax(-1)[:, [0, 0, 2]]], 1)
        tree[:, 1] = 99
        t = verify_tree(m.put(tree), m.put(parents), f, seeds=m.put(torch.arange(5)))
        cache, at = m.put(base.clone()), m.put(cached)
        compact_kv_([cache], at[:, None] + t.nodes, at + 1, t.num_accepted, backend="triton")
        nodes, accepted = t.nodes.tolist(), t.num_accepted.tolist()
    expected = base.clone()
    for b, number in enumerate(accepted):
        for i in range(number):
            expected[:, b, :, int(cached[b]) + 1 + i] = base[:, b, :, int(cached[b]) + nodes[b][i]]
    assert max(accepted) == 2
    assert torch.equal(cache.cpu(), expected)


def test_nothing_to_do_launches_nothing():
    none = torch.zeros(0, dtype=torch.int32)
    with machine("interpreter") as m:
        truncate_kv_(none, none, backend="triton")
        truncate_kv_(none, none, [torch.zeros(0, 2, 4, 8)], scrub=True, backend="triton")
        truncate_paged_kv_(none, none, torch.zeros(0, 3, dtype=torch.int32), 16, none, ints(0), backend="triton")
        compact_kv_([torch.zeros(0, 2, 4, 8)], none.view(0, 3), none, none, backend="triton")
        compact_kv_([torch.zeros(1, 2, 4, 8)], none.view(1, 0), ints(0), ints(0), backend="triton")
        assert m.device.launches == []


def test_what_the_kernels_do_not_take_is_an_error():
    cache = torch.zeros(1, 2, 4, 8)
    with machine("interpreter"):
        with pytest.raises(ValueError, match="last stride of 1"):
            compact_kv_([cache.transpose(-1, -2)], ints(0)[None], ints(0), ints(1), backend="triton")
        with pytest.raises(ValueError, match="4096 columns"):
            compact_kv_([cache], torch.zeros(1, 4097, dtype=torch.int32), ints(0), ints(1), backend="triton")


# Pages.


def check_pages(m, lengths, keep, table, page_size, pages, number):
    """One call on the machine and one by the reference; both results."""
    given = (lengths, keep, table, page_size, pages, number)
    ours = [m.put(x.clone()) if isinstance(x, torch.Tensor) else x for x in given]
    theirs = [x.clone() if isinstance(x, torch.Tensor) else x for x in given]
    kernels.truncate_paged_kv_(*ours)
    on_numpy.truncate_paged_kv_(*theirs)
    ours = [x.cpu() if isinstance(x, torch.Tensor) else x for x in ours]
    for name, a, b in zip(("lengths", "keep", "table", "", "pages", "number"), ours, theirs, strict=True):
        assert a is b or a == b if isinstance(a, int) else torch.equal(a, b), name
    return ours


@pytest.mark.parametrize("mode", MODES)
def test_no_page_is_lost_or_doubled(mode):
    random = np.random.default_rng(0)
    batch, blocks, page = 5, 8, 4
    total = batch * blocks
    table = torch.full((batch, blocks), -1, dtype=torch.int32)
    n = torch.zeros(batch, dtype=torch.int32)
    # Half of the pages fit into the free list: the others lie with somebody else until they are asked for.
    pages, count, elsewhere = torch.zeros(total // 2, dtype=torch.int32), ints(0), list(range(total))
    was_full = 0
    with machine(mode) as m:
        for _ in range(25):
            for b in range(batch):
                n[b] = min(int(n[b]) + int(random.integers(0, 17)), blocks * page)
                for i in range(-(-int(n[b]) // page)):
                    if table[b, i] < 0 and int(count):
                        count -= 1
                        table[b, i] = pages[int(count)]
                    elif table[b, i] < 0:
                        table[b, i] = elsewhere.pop()
            keep = torch.from_numpy(random.integers(-3, 34, batch))
            before = n
            n, _, table, _, pages, count = check_pages(m, n, keep, table, page, pages, count)
            assert torch.equal(n, torch.minimum(before, keep.clamp(min=0)))
            held = table[table >= 0].tolist() + pages[: int(count)].tolist() + elsewhere
            assert sorted(held) == list(range(total))
            was_full += int(count) == len(pages)
        assert m.device is None or {x.name for x in m.device.launches} == {"_pages_kernel"}
        assert m.device is None or len(m.device.launches) == 25
    assert was_full > 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("batch", "blocks"), [(9, 1030), (300, 3)])
def test_long_and_many_rows_of_a_table(mode, batch, blocks):
    """More rows than a step takes, more blocks than a step takes; the table is a view, with holes."""
    random = np.random.default_rng(batch)
    base = torch.from_numpy(random.permutation(batch * (blocks + 2)).reshape(batch, blocks + 2).astype(np.int32))
    base[torch.from_numpy(random.random(base.shape) < 0.2)] = -1
    lengths = torch.from_numpy(random.integers(0, blocks * 16, batch).astype(np.int32))
    keep = torch.from_numpy(random.integers(0, blocks * 16, batch).astype(np.int32))
    pages = torch.full((batch * blocks,), -7, dtype=torch.int32)
    with machine(mode) as m:
        ours, table, room = m.put(base.clone()), base.clone(), m.put(pages.clone())
        on, number = m.put(lengths.clone()), m.put(ints(5))
        truncate_paged_kv_(on, m.put(keep), ours[:, 1:-1], 16, room, number, backend="triton")
        expected, taken = lengths.clone(), ints(5)
        truncate_paged_kv_(expected, keep, table[:, 1:-1], 16, pages, taken)
    assert torch.equal(on.cpu(), expected)
    assert torch.equal(ours.cpu(), table)
    assert torch.equal(room.cpu(), pages)
    assert int(number) == int(taken) > 5


@pytest.mark.parametrize("mode", MODES)
def test_a_free_list_without_room_and_a_count_outside_it(mode):
    table = ints(3, 7, 1, 2, -1, 5).view(2, 3)
    lengths, keep, pages = ints(40, 48), torch.tensor([16, -(2**62)]), ints(9, 8, 9, 9)
    with machine(mode) as m:
        # Freed are 7, 1, 2, 5, in this order, while there is room.
        for taken, left in (
            (0, [[3, -1, -1], [-1, -1, -1]]),
            (1, [[3, -1, -1], [-1, -1, 5]]),
            (3, [[3, -1, 1], [2, -1, 5]]),
        ):
            out = check_pages(m, lengths, keep, table, 16, pages, ints(taken))
            assert out[2].tolist() == left
            assert out[4].tolist() == pages.tolist()[:taken] + [7, 1, 2, 5][: 4 - taken]
            assert int(out[5]) == 4
        for taken in (-1, 5, 2**31 - 1, -(2**31), 4):
            out = check_pages(m, lengths, keep, table, 16, pages, ints(taken))
            assert torch.equal(out[2], table)
            assert torch.equal(out[4], pages)
            assert int(out[5]) == taken
            assert out[0].tolist() == [16, 0]
        out = check_pages(m, lengths, torch.tensor([2**63 - 1, 1]), table, 2**40, pages, ints(0))
        assert out[2].tolist() == [[3, 7, 1], [2, -1, -1]]
        check_pages(m, lengths, keep, table, 16, pages[:0], ints(0))
        check_pages(m, lengths, keep, table[:, :0], 16, pages, ints(1))


# What it costs.


@needs_compiler
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_whole_model_is_one_launch_of_wide_moves(layout):
    """64 layers, each with keys and values of their own; and a stack of them."""
    shape = (2, 8, 16, 128) if layout == "bhsd" else (2, 16, 8, 128)
    model = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(128)]
    stack = [torch.zeros(64, *shape, dtype=FP8) for _ in range(2)]
    source = torch.zeros(2, 8, dtype=torch.int32)
    with device("compile:sm_90") as record:
        for caches in (model, stack):
            compact_kv_(caches, source, ints(0, 0), ints(1, 1), layout=layout, backend="triton")
            truncate_kv_(ints(5, 5), ints(3, 3), caches, scrub=True, layout=layout, backend="triton")
    assert [x.name for x in record.launches] == 2 * ["_compact_kernel", "_scrub_kernel"]
    assert [x.grid[1] for x in record.launches] == [128] * 4
    for launch in record.launches:
        for target in TARGETS:
            code = report(compile_for(launch, target))
            assert (code.spills, code.stack_bytes) == (0, 0), (launch.name, target)
            assert code.store_bits[128] >= 1
            assert code.load_bits[128] >= (launch.name == "_compact_kernel")
            # Lengths and sources are int32; the words of a cache are 64 bits, and come in twos.
            assert set(code.load_bits) | set(code.store_bits) <= {32, 128}
            # Threads of a compaction wait for each other between loads and stores: nothing else here sees that.
            assert code.opcodes["BAR"] + code.opcodes["s_barrier"] == (launch.name == "_compact_kernel")


@needs_compiler
def test_bytes_of_a_compaction():
    """Each slot that moves is read and written once; what stays in its place is neither."""
    cache = torch.zeros(3, 2, 4, 32, 64, dtype=torch.bfloat16)
    source = ints(9, 11, 12, 13, 5, 7, 0, 0).view(2, 4)
    with machine("sm_90") as m:
        compact_kv_([cache], source, ints(9, 4), ints(4, 2), backend="triton")
        traffic = m.device.last.counts.traffic["caches[0]"]
    moved = 3 * 4 * (3 + 2) * 64 * 2
    assert (traffic.load_bytes, traffic.store_bytes) == (moved, moved)
    assert traffic.load_sectors == moved // 32


@needs_compiler
@pytest.mark.parametrize("blocks", [16, 2048])
def test_spills_of_the_page_kernel(blocks):
    table = torch.zeros(4, blocks, dtype=torch.int32)
    with device("compile:sm_90") as record:
        for dtype in (torch.int32, torch.int64):
            lengths, keep, pages = ints(1, 1, 1, 1), torch.zeros(4, dtype=dtype), torch.zeros_like(table).view(-1)
            truncate_paged_kv_(lengths, keep, table, 16, pages, ints(0), backend="triton")
    for launch in record.launches:
        for target in TARGETS:
            code = report(compile_for(launch, target))
            assert (code.spills, code.stack_bytes) == (0, 0), target
