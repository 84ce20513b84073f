"""Small kernels on which the harness is tested: correct ones, and ones with a planted fault."""

import triton
import triton.language as tl

from . import sample_rules

is_between = triton.jit(sample_rules.is_between)


# Correct kernels.


@triton.jit
def log_sum_exp(x_ptr, out_ptr, V, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    maximum = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        offset = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + offset, mask=offset < V, other=float("-inf"))
        x = x.to(tl.float32)
        larger = tl.maximum(maximum, x)
        base = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(maximum - base) + tl.exp(x - base)
        maximum = larger
    highest = tl.max(maximum, 0)
    total = tl.sum(total * tl.exp(maximum - highest), 0)
    tl.store(out_ptr + row, highest + tl.log(total))


@triton.jit
def sort_row(x_ptr, out_ptr, N: tl.constexpr, DESCENDING: tl.constexpr):
    offset = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out_ptr + offset, tl.sort(tl.load(x_ptr + offset), descending=DESCENDING))


@triton.jit
def top_k_row(x_ptr, out_ptr, N: tl.constexpr, K: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.store(out_ptr + tl.arange(0, K), tl.topk(x, K))


@triton.jit
def cumulative_sum(x_ptr, out_ptr, N: tl.constexpr, REVERSE: tl.constexpr):
    offset = tl.arange(0, N)
    x = tl.load(x_ptr + offset).to(tl.float32)
    tl.store(out_ptr + offset, tl.cumsum(x, 0, reverse=REVERSE))


@triton.jit
def first_maximum(x_ptr, value_ptr, index_ptr, V, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offset = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * V + offset, mask=offset < V, other=float("-inf")).to(tl.float32)
    value, index = tl.max(x, 0, return_indices=True)
    tl.store(value_ptr + row, value)
    tl.store(index_ptr + row, index)


@triton.jit
def philox_words(out_ptr, seed, N: tl.constexpr):
    lane = tl.arange(0, N)
    zero = lane * 0
    a, b, c, d = tl.philox(seed, lane, zero, zero, zero)
    tl.store(out_ptr + 0 * N + lane, a.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 1 * N + lane, b.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 2 * N + lane, c.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 3 * N + lane, d.to(tl.int32, bitcast=True))


@triton.jit
def float64_arithmetic(a_ptr, b_ptr, c_ptr, out_ptr, less_ptr, narrow_ptr, N: tl.constexpr):
    lane = tl.arange(0, N)
    a = tl.load(a_ptr + lane)
    b = tl.load(b_ptr + lane)
    c = tl.load(c_ptr + lane)
    tl.store(out_ptr + 0 * N + lane, a + b)
    tl.store(out_ptr + 1 * N + lane, a * b)
    tl.store(out_ptr + 2 * N + lane, tl.fma(a, b, c))
    tl.store(out_ptr + 3 * N + lane, a / b)
    tl.store(out_ptr + 4 * N + lane, tl.maximum(a, b))
    tl.store(out_ptr + 5 * N + lane, tl.cumsum(a, 0))
    tl.store(out_ptr + 6 * N + lane, a.to(tl.float32).to(tl.float64))
    tl.store(less_ptr + lane, (a < b).to(tl.int32))
    tl.store(narrow_ptr + lane, a.to(tl.float32))


@triton.jit
def wide_integers(a_ptr, b_ptr, out_ptr, float_ptr, N: tl.constexpr):
    lane = tl.arange(0, N)
    a = tl.load(a_ptr + lane)
    b = tl.load(b_ptr + lane)
    unsigned = a.to(tl.uint64, bitcast=True)
    tl.store(out_ptr + 0 * N + lane, a * b)
    tl.store(out_ptr + 1 * N + lane, tl.minimum(a, b))
    tl.store(out_ptr + 2 * N + lane, tl.maximum(a, b))
    tl.store(out_ptr + 3 * N + lane, a >> 7)
    tl.store(out_ptr + 4 * N + lane, (unsigned >> 11).to(tl.int64, bitcast=True))
    tl.store(out_ptr + 5 * N + lane, a << 3)
    tl.store(out_ptr + 6 * N + lane, (a < b).to(tl.int64))
    product = tl.umulhi(unsigned, b.to(tl.uint64, bitcast=True))
    tl.store(out_ptr + 7 * N + lane, product.to(tl.int64, bitcast=True))
    narrow = a.to(tl.int32)
    tl.store(out_ptr + 8 * N + lane, narrow.to(tl.int64) * b.to(tl.int32).to(tl.int64))
    word = narrow.to(tl.uint32, bitcast=True)
    tl.store(out_ptr + 9 * N + lane, tl.umulhi(word, b.to(tl.uint32)).to(tl.int64))
    tl.store(out_ptr + 10 * N + lane, a // 1000003)
    tl.store(out_ptr + 11 * N + lane, a % 1000003)
    tl.store(float_ptr + 0 * N + lane, a.to(tl.float64))
    tl.store(float_ptr + 1 * N + lane, (unsigned >> 11).to(tl.float64) * 1.1102230246251565e-16)
    tl.store(out_ptr + 12 * N + lane, (a.to(tl.float64) * 0.37).to(tl.int64))
    tl.store(out_ptr + 13 * N + lane, tl.max(a, 0) - tl.min(b, 0))


@triton.jit
def reduce_block(x_ptr, rows_ptr, columns_ptr, turned_ptr, R: tl.constexpr, C: tl.constexpr):
    row = tl.arange(0, R)
    column = tl.arange(0, C)
    x = tl.load(x_ptr + row[:, None] * C + column[None, :]).to(tl.float32)
    tl.store(rows_ptr + row, tl.sum(x, 1))
    tl.store(columns_ptr + column, tl.max(x, 0))
    tl.store(turned_ptr + column[:, None] * R + row[None, :], tl.trans(x))


@triton.jit
def narrow_arithmetic(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    lane = tl.arange(0, N)
    x = tl.load(x_ptr + lane)
    y = tl.load(y_ptr + lane)
    tl.store(out_ptr + 0 * N + lane, x + y)
    tl.store(out_ptr + 1 * N + lane, x * y)
    tl.store(out_ptr + 2 * N + lane, tl.maximum(x, y))
    tl.store(out_ptr + 3 * N + lane, (x.to(tl.float32) * 1.7).to(x.dtype))
    # sm_100 has one instruction for narrow factors and a float32 sum.
    tl.store(out_ptr + 4 * N + lane, (x.to(tl.float32) * y.to(tl.float32) + 1.0).to(x.dtype))


@triton.jit
def sum_or_leave(x_ptr, length_ptr, out_ptr, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    length = tl.load(length_ptr + row)
    if length == 0:
        return
    total = 0.0
    for start in range(0, length, BLOCK):
        offset = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(x_ptr + row * stride + offset, mask=offset < length, other=0.0))
    tl.store(out_ptr + row, total)


@triton.jit
def gather_block(x_ptr, index_ptr, out_ptr, N: tl.constexpr):
    lane = tl.arange(0, N)
    x = tl.load(x_ptr + lane)
    tl.store(out_ptr + lane, tl.gather(x, tl.load(index_ptr + lane), 0))


@triton.jit
def histogram(x_ptr, out_ptr, N: tl.constexpr, BINS: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.store(out_ptr + tl.arange(0, BINS), tl.histogram(x, BINS))


@triton.jit
def count_by_value(x_ptr, counts_ptr, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < n
    value = tl.load(x_ptr + offset, mask=inside, other=0)
    tl.atomic_add(counts_ptr + value, 1, mask=inside)


@triton.jit
def collatz_steps(x_ptr, out_ptr):
    row = tl.program_id(0)
    x = tl.load(x_ptr + row)
    steps = 0
    while x != 1:
        x = tl.where(x % 2 == 0, x // 2, 3 * x + 1)
        steps += 1
    tl.store(out_ptr + row, steps)


@triton.jit
def _affine(a_left, b_left, a_right, b_right):
    return a_left * a_right, b_left * a_right + b_right


@triton.jit
def linear_recurrence(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    lane = tl.arange(0, N)
    pair = (tl.load(a_ptr + lane), tl.load(b_ptr + lane))
    _, out = tl.associative_scan(pair, 0, _affine)
    tl.store(out_ptr + lane, out)


@triton.jit
def _larger_key(key_left, id_left, key_right, id_right):
    right = (key_right > key_left) | ((key_right == key_left) & (id_right < id_left))
    return tl.where(right, key_right, key_left), tl.where(right, id_right, id_left)


@triton.jit
def best_pair(key_ptr, out_ptr, N: tl.constexpr):
    lane = tl.arange(0, N)
    key, best = tl.reduce((tl.load(key_ptr + lane), lane), 0, _larger_key)
    tl.store(out_ptr, key)
    tl.store(out_ptr + 1, best.to(tl.int64))


@triton.jit
def count_between(x_ptr, out_ptr, V, low, high, BLOCK: tl.constexpr):
    offset = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offset, mask=offset < V, other=float("-inf"))
    tl.store(out_ptr, tl.sum(is_between(x, low, high).to(tl.int32), 0))


@triton.jit
def last_block(x_ptr, part_ptr, arrived_ptr, out_ptr, V, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    part = tl.program_id(0)
    offset = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offset, mask=offset < V, other=0.0)
    tl.store(part_ptr + part, tl.sum(x, 0))
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr, 1) == PARTS - 1:
        tl.store(out_ptr, tl.sum(tl.load(part_ptr + tl.arange(0, PARTS)), 0))


@triton.jit
def draw(p_ptr, u_ptr, out_ptr, V, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    token = tl.arange(0, BLOCK)
    p = tl.load(p_ptr + token, mask=token < V, other=0.0)
    u = tl.load(u_ptr + row)
    below = (tl.cumsum(p, 0) <= u) & (token < V - 1)
    tl.store(out_ptr + row, tl.sum(below.to(tl.int32), 0))


@triton.jit
def accept_or_recover(p_ptr, q_ptr, draft_ptr, u_ptr, out_ptr, accepted_ptr, V, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    token = tl.arange(0, BLOCK)
    p = tl.load(p_ptr + token, mask=token < V, other=0.0)
    q = tl.load(q_ptr + token, mask=token < V, other=0.0)
    draft = tl.load(draft_ptr + row)
    accepted = tl.load(u_ptr + 2 * row) * tl.load(q_ptr + draft) < tl.load(p_ptr + draft)
    weight = tl.cumsum(tl.maximum(p - q, 0.0), 0)
    goal = tl.load(u_ptr + 2 * row + 1) * tl.max(weight, 0)
    recovered = tl.sum(((weight <= goal) & (token < V - 1)).to(tl.int32), 0)
    tl.store(out_ptr + row, tl.where(accepted, draft, recovered))
    tl.store(accepted_ptr + row, accepted.to(tl.int32))


# Planted faults.


@triton.jit
def reads_beyond_the_row(x_ptr, out_ptr, V, stride, BLOCK: tl.constexpr):
    # Fault: the mask uses the rounded length.
    row = tl.program_id(0)
    best = float("-inf")
    for start in range(0, V, BLOCK):
        offset = start + tl.arange(0, BLOCK)
        inside = offset < tl.cdiv(V, BLOCK) * BLOCK
        x = tl.load(x_ptr + row * stride + offset, mask=inside, other=float("-inf"))
        best = tl.maximum(best, tl.max(x, 0))
    tl.store(out_ptr + row, best)


@triton.jit
def stores_to_one_element(x_ptr, out_ptr, BLOCK: tl.constexpr):
    # Fault: every program stores out[0].
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + offset), 0))


@triton.jit
def adds_without_atomics(x_ptr, out_ptr, BLOCK: tl.constexpr):
    # Fault: read, add, write by every program.
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr, tl.load(out_ptr) + tl.sum(tl.load(x_ptr + offset), 0))


@triton.jit
def reads_back_without_barrier(x_ptr, work_ptr, out_ptr, BLOCK: tl.constexpr, BARRIER: tl.constexpr):
    # Fault, unless BARRIER: other threads' stores are read back at once.
    lane = tl.arange(0, BLOCK)
    tl.store(work_ptr + lane, tl.load(x_ptr + lane))
    if BARRIER:
        tl.debug_barrier()
    tl.store(out_ptr + lane, tl.load(work_ptr + (BLOCK - 1 - lane)))


@triton.jit
def sums_masked_lanes(x_ptr, out_ptr, V, BLOCK: tl.constexpr):
    # Fault: no `other`, and every lane is summed.
    lane = tl.arange(0, BLOCK)
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + lane, mask=lane < V), 0))


@triton.jit
def reads_what_nobody_wrote(x_ptr, work_ptr, out_ptr, V, BLOCK: tl.constexpr):
    # Fault: V elements are written, BLOCK are read.
    lane = tl.arange(0, BLOCK)
    tl.store(work_ptr + lane, tl.load(x_ptr + lane), mask=lane < V)
    tl.debug_barrier()
    tl.store(out_ptr, tl.sum(tl.load(work_ptr + lane), 0))


@triton.jit
def promises_alignment(x_ptr, out_ptr, shift, BLOCK: tl.constexpr):
    # Fault, unless shift is a multiple of 16: the hint makes the compiler load 16 bytes at once.
    lane = tl.arange(0, BLOCK)
    offset = tl.max_contiguous(tl.multiple_of(shift + lane, BLOCK), BLOCK)
    tl.store(out_ptr + lane, tl.load(x_ptr + offset))


@triton.jit
def branches_on_a_block(x_ptr, out_ptr, BLOCK: tl.constexpr):
    # Fault: the condition is a block. The interpreter takes the first branch.
    lane = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + lane)
    if x > 0:
        tl.store(out_ptr + lane, x)


@triton.jit
def stores_twice_in_one_program(x_ptr, out_ptr, BLOCK: tl.constexpr):
    # Fault: two lanes store different values to one element.
    lane = tl.arange(0, BLOCK)
    tl.store(out_ptr + lane // 2, tl.load(x_ptr + lane))


@triton.jit
def holds_too_much(x_ptr, out_ptr, stride, N: tl.constexpr):
    # Many values alive at once: spills when the registers are limited.
    lane = tl.arange(0, N)
    x = tl.load(x_ptr + lane)
    y = tl.load(x_ptr + stride + lane)
    total = tl.sum(x * y, 0)
    tl.store(out_ptr + lane, x * total + y)
