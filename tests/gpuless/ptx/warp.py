"""Instructions by which the lanes of a warp exchange values."""

from __future__ import annotations

import numpy as np

from .arithmetic import U32, U64, Array
from .decode import Binder, Step, opcodes
from .memory import WARP, fail
from .parse import Instruction

_BIT_OF_LANE = np.uint64(1) << np.arange(WARP, dtype=U64)


def _ballot(votes: Array) -> Array:
    """Per lane, the bits of its warp's votes."""
    words = (votes.reshape(-1, WARP) * _BIT_OF_LANE).sum(axis=1).astype(U32)
    return np.repeat(words, WARP)


@opcodes("shfl")
def shfl(binder: Binder, instruction: Instruction) -> Step:
    machine = binder.machine
    targets = instruction.operands[0].split("|")
    mode = next(part for part in instruction.modifiers if part in ("up", "down", "bfly", "idx"))
    value, operand, clamp = (binder.fetch(text, "u32") for text in instruction.operands[1:4])
    write = binder.writer(targets[0], "b32")
    write_valid = binder.writer(targets[1], "pred") if len(targets) > 1 else None
    # Triton's offsets are constants: the source lanes are the same every time.
    is_fixed = all(text.lstrip("-")[0].isdigit() for text in instruction.operands[2:4])
    cache: dict[int, tuple[Array, Array]] = {}

    def sources() -> tuple[Array, Array]:
        if is_fixed and machine.lane_count in cache:
            return cache[machine.lane_count]
        lane = machine.lane_in_warp
        offset = operand().astype(np.int64)
        limits = clamp().astype(np.int64)
        segment = (limits >> 8) & 31
        bound = limits & 31
        highest = (lane & segment) | (bound & ~segment)
        lowest = lane & segment
        candidate = {
            "up": lane - offset,
            "down": lane + offset,
            "bfly": lane ^ offset,
            "idx": lowest | (offset & ~segment),
        }[mode]
        valid = candidate >= highest if mode == "up" else candidate <= highest
        found = machine.warp_base + np.where(valid, candidate, lane), machine.spread(valid)
        cache[machine.lane_count] = found
        return found

    def step() -> None:
        source, valid = sources()
        mask = machine.mask
        if mask is not None and not mask[source[mask]].all():
            fail("SHUFFLE FROM AN INACTIVE LANE", "the value is undefined", instruction)
        data = value()
        write(data if data.shape[0] == 1 else data[source])
        if write_valid is not None:
            write_valid(valid)

    return step


@opcodes("redux")
def redux(binder: Binder, instruction: Instruction) -> Step:
    machine = binder.machine
    type_name = binder.type
    propagate = "NaN" in instruction.modifiers or type_name[0] != "f"
    functions = {
        "add": np.add,
        "min": np.minimum if propagate else np.fmin,
        "max": np.maximum if propagate else np.fmax,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }
    function = next(functions[part] for part in instruction.modifiers if part in functions)

    def reduce_warps(value: Array) -> Array:
        if machine.mask is not None and not _whole_warps(machine.mask):
            fail("UNSUPPORTED", "a reduction over part of a warp", instruction)
        rows = machine.spread(value).reshape(-1, WARP)
        return np.repeat(function.reduce(rows, axis=1).astype(value.dtype), WARP)

    return binder.assign(reduce_warps, [binder.fetch(instruction.operands[1], type_name)], type_name)


def _whole_warps(mask: Array) -> bool:
    rows = mask.reshape(-1, WARP)
    return bool((rows.any(axis=1) == rows.all(axis=1)).all())


@opcodes("vote")
def vote(binder: Binder, instruction: Instruction) -> Step:
    machine = binder.machine
    mode = next(part for part in instruction.modifiers if part in ("ballot", "any", "all", "uni"))
    if mode == "uni":
        return lambda: fail("UNSUPPORTED", "vote.uni", instruction)

    def count(value: Array) -> Array:
        active = machine.active()
        votes = machine.spread(value) & active
        if mode == "ballot":
            return _ballot(votes)
        rows = votes.reshape(-1, WARP)
        if mode == "all":
            return np.repeat((rows | ~active.reshape(-1, WARP)).all(axis=1), WARP)
        return np.repeat(rows.any(axis=1), WARP)

    fetch = binder.fetch(instruction.operands[1], "pred")
    return binder.assign(count, [fetch], "b32" if mode == "ballot" else "pred")


@opcodes("activemask")
def activemask(binder: Binder, instruction: Instruction) -> Step:
    return binder.assign(lambda: _ballot(binder.machine.active()), [], "b32")


@opcodes("match")
def match(binder: Binder, instruction: Instruction) -> Step:
    """match.any: the lanes of the warp that hold the same value."""
    machine = binder.machine
    if "any" not in instruction.modifiers:
        return lambda: fail("UNSUPPORTED", "match.all", instruction)

    def compare(value: Array) -> Array:
        rows = machine.spread(value).reshape(-1, WARP)
        active = machine.active().reshape(-1, 1, WARP)
        same = (rows[:, :, None] == rows[:, None, :]) & active
        return (same * _BIT_OF_LANE).sum(axis=2).astype(U32).reshape(-1)

    return binder.assign(compare, [binder.fetch(instruction.operands[1], binder.type)], "b32")


@opcodes("elect")
def elect(binder: Binder, instruction: Instruction) -> Step:
    """The first active lane of every warp."""
    machine = binder.machine
    targets = instruction.operands[0].split("|")
    write = binder.writer(targets[0], "b32")
    write_elected = binder.writer(targets[1], "pred")

    def step() -> None:
        leader = np.repeat(machine.active().reshape(-1, WARP).argmax(axis=1), WARP)
        write(leader.astype(U32))
        write_elected(machine.lane_in_warp == leader)

    return step
