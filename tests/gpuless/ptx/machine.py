"""Runs a `Program`: all threads of a batch of CTAs at once, one NumPy operation an instruction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .arithmetic import DTYPES, PREDICATE, U32, U64, UNSIGNED, Array
from .memory import PARAMETER_BYTES, GlobalMemory, SharedMemory, Traffic, fail
from .parse import Instruction, Program, PtxError

WARP = 32
MAX_LANES = 4096
MAX_STEPS = 200_000_000
CONTROL = {"bra", "ret", "exit", "bar", "barrier"}
_POISON = 0x7FC07FC07FC07FC0
_NOT_REACHED = np.iinfo(np.int64).max


@dataclass(slots=True)
class Lanes:
    """Who takes part in an access: one entry a thread."""

    thread: Array
    cta: Array
    slot: Array
    warp: Array
    epoch: Array

    def take(self, chosen: Array) -> Lanes:
        return Lanes(*(getattr(self, name)[chosen] for name in ("thread", "cta", "slot", "warp", "epoch")))


@dataclass
class Counts:
    """What one launch executed and moved.

    Attributes
    ----------
    instructions : warp instructions by opcode (an instruction that one warp executes counts once)
    traffic : per argument
    """

    instructions: Counter[str] = field(default_factory=Counter)
    traffic: dict[str, Traffic] = field(default_factory=dict)

    @property
    def warp_instructions(self) -> int:
        return sum(self.instructions.values())

    @property
    def sector_bytes(self) -> int:
        return sum(traffic.sector_bytes for traffic in self.traffic.values())


class Machine:
    """One compiled kernel, decoded once and run as often as wanted.

    Instructions are closures over `registers`. A register holds an array of one entry per lane,
    or of a single entry when every lane has the same value; arrays in registers are never
    changed in place.
    """

    def __init__(self, program: Program):
        from .decode import decode

        self.program = program
        self.registers: list[Array] = []
        self.mask: Array | None = None
        self.parameters: dict[str, bytes] = {}
        self.parameter_words: Array = np.zeros(0, U64)
        self.symbols: dict[str, int] = {}
        self.steps: list[Callable[[], None]] = []
        for instruction in program.instructions:
            self.steps.append(_nothing if instruction.opcode in CONTROL else decode(self, instruction))
        self._find_straight_runs()
        self.register_count = len(program.register_bits)
        self.shared_granule = self._shared_granule()
        # CTAs that talk to each other must not run in lockstep: a spinning CTA would
        # starve the one it waits for.
        self.talks = any(self._is_communication(instruction) for instruction in program.instructions)

    @staticmethod
    def _is_communication(instruction: Instruction) -> bool:
        if instruction.opcode in ("atom", "red"):
            return not any(part.startswith("shared") for part in instruction.modifiers)
        return instruction.opcode == "ld" and bool({"volatile", "acquire"} & set(instruction.modifiers))

    def _find_straight_runs(self) -> None:
        count = len(self.program.instructions)
        self.run_end = [count] * (count + 1)
        for index in range(count - 1, -1, -1):
            is_control = self.program.instructions[index].opcode in CONTROL
            is_control &= "warp" not in self.program.instructions[index].modifiers
            self.run_end[index] = index if is_control else self.run_end[index + 1]
        self._straight: dict[tuple[int, int], list[Callable[[], None]]] = {}

    def _shared_granule(self) -> int:
        sizes = [4]
        for instruction in self.program.instructions:
            if any(part.startswith("shared") for part in instruction.modifiers):
                sizes += [DTYPES[part].itemsize for part in instruction.modifiers if part in DTYPES]
            if "matrix" in instruction.opcode:
                sizes.append(2)
        return min(sizes)

    def run(
        self,
        grid: tuple[int, int, int],
        parameters: list[bytes],
        memory: GlobalMemory,
        shared_bytes: int,
        max_lanes: int = MAX_LANES,
    ) -> Counts:
        """Run every CTA of the grid; return what was executed and moved."""
        program = self.program
        self.memory = memory
        self.shared_bytes = shared_bytes
        self.parameters = {name: value for (name, _), value in zip(program.parameters, parameters, strict=False)}
        self.parameter_words = np.frombuffer(b"".join(value.ljust(PARAMETER_BYTES, b"\0") for value in parameters), U64)
        self.symbols.update({name: PARAMETER_BYTES * i for i, (name, _) in enumerate(program.parameters)})
        # Difference array over the instructions: warps that executed them.
        self._hits = np.zeros(len(program.instructions) + 2, np.int64)
        self._budget = MAX_STEPS
        total = grid[0] * grid[1] * grid[2]
        batch = 1 if self.talks else max(1, max_lanes // program.threads)
        with np.errstate(all="ignore"):
            for first in range(0, total, batch):
                self._start_batch(grid, np.arange(first, min(first + batch, total)))
                self._run_batch()
        counts = Counts(traffic={buffer.name: buffer.traffic for buffer in memory.buffers})
        for instruction, hits in zip(program.instructions, np.cumsum(self._hits).tolist(), strict=False):
            if hits:
                counts.instructions[instruction.opcode] += hits
        return counts

    # -- lanes

    def _start_batch(self, grid: tuple[int, int, int], ctas: Array) -> None:
        threads = self.program.threads
        self.lane_count = threads * ctas.size
        self.warp_count = self.lane_count // WARP
        cta = np.repeat(ctas, threads).astype(np.int32)
        slot = np.repeat(np.arange(ctas.size), threads)
        thread = np.tile(np.arange(threads), ctas.size)
        warp = np.arange(self.lane_count) // WARP
        self.lanes = Lanes(thread.astype(np.int32), cta, slot, warp, np.zeros(self.lane_count, np.int32))
        self.lane_in_warp = (thread % WARP).astype(np.int64)
        self.warp_base = np.arange(self.lane_count) - self.lane_in_warp
        one = np.ones(1, U32)
        self.special = {
            "%tid.x": thread.astype(U32),
            "%ntid.x": one * threads,
            "%laneid": self.lane_in_warp.astype(U32),
            "%warpid": (thread // WARP).astype(U32),
            "%nwarpid": one * (threads // WARP),
            "%ctaid.x": (cta % grid[0]).astype(U32),
            "%ctaid.y": (cta // grid[0] % grid[1]).astype(U32),
            "%ctaid.z": (cta // (grid[0] * grid[1])).astype(U32),
            "%nctaid.x": one * grid[0],
            "%nctaid.y": one * grid[1],
            "%nctaid.z": one * grid[2],
        }
        # A register that was never written holds a NaN or an improbable integer, so that
        # its use shows.
        poison = {bits: np.full(1, _POISON >> (64 - bits), UNSIGNED[bits // 8]) for bits in (8, 16, 32, 64)}
        poison[1] = np.zeros(1, PREDICATE)
        poison[128] = poison[64]
        self.registers[:] = [poison[bits] for bits in self.program.register_bits]
        self.shared = SharedMemory(ctas.size, self.shared_bytes, self.shared_granule, self.memory.check)

    def spread(self, value: Array) -> Array:
        """A value of one entry per lane."""
        return value if value.shape[0] == self.lane_count else np.broadcast_to(value, (self.lane_count,))

    def active(self) -> Array:
        """Boolean per lane: takes part in the current instruction."""
        return np.ones(self.lane_count, bool) if self.mask is None else self.mask

    def special_register(self, name: str) -> Array:
        value = self.special.get(name)
        if value is not None:
            return value
        if name.startswith(("%tid", "%clock", "%globaltimer", "%smid", "%lanemask_lt")):
            return np.zeros(1, U64 if name.endswith(("64", "timer")) else U32)
        raise PtxError(f"UNSUPPORTED: special register {name}")

    # -- control flow

    def _run_straight(self, start: int, stop: int, warps: int) -> None:
        steps = self._straight.get((start, stop))
        if steps is None:
            steps = self._straight[(start, stop)] = self.steps[start:stop]
        self._hits[start] += warps
        self._hits[stop] -= warps
        self._budget -= stop - start + 1
        if self._budget < 0:
            raise PtxError(f"DID NOT FINISH: {self.program.name} ran more than {MAX_STEPS} instructions")
        for step in steps:
            step()

    def _count_control(self, index: int, warps: int) -> None:
        self._hits[index] += warps
        self._hits[index + 1] -= warps

    def _run_batch(self) -> None:
        at: int | None = 0
        self.alive = np.ones(self.lane_count, bool)
        self.waiting = np.zeros(self.lane_count, bool)
        self.counter = np.zeros(self.lane_count, np.int64)
        while at is not None:
            self.mask = None
            at = self._run_together(at)
            if at is None and self.alive.any():
                at = self._run_apart()

    def _run_together(self, at: int) -> int | None:
        """Run while every lane is at the same instruction; None when lanes part or end."""
        instructions = self.program.instructions
        while True:
            stop = self.run_end[at]
            self._run_straight(at, stop, self.warp_count)
            if stop == len(instructions):
                self.alive[:] = False
                return None
            instruction = instructions[stop]
            self._count_control(stop, self.warp_count)
            taken = self._predicate(instruction)
            hits = self.lane_count if taken is None else int(np.count_nonzero(taken))
            if hits == 0:
                at = stop + 1
            elif instruction.opcode == "bra":
                if hits < self.lane_count:
                    self.counter[:] = np.where(taken, self._target(instruction), stop + 1)
                    return None
                at = self._target(instruction)
            elif instruction.opcode in ("bar", "barrier"):
                self._check_barrier(instruction)
                self.lanes.epoch = self.lanes.epoch + np.int32(1)
                at = stop + 1
            else:
                self.alive &= ~(np.ones(1, bool) if taken is None else taken)
                self.counter[:] = stop + 1
                return None

    def _run_apart(self) -> int | None:
        """Run the lanes furthest behind until all meet again; None when all have ended."""
        while True:
            runnable = self.alive & ~self.waiting
            if not runnable.any():
                if not self.alive.any():
                    return None
                # Everybody who lives has come to a barrier.
                self.waiting[:] = False
                self.lanes.epoch = self.lanes.epoch + np.int32(1)
                runnable = self.alive
            behind = np.where(runnable, self.counter, _NOT_REACHED)
            at = int(behind.min())
            active = behind == at
            if active.all():
                return at
            behind[active] = _NOT_REACHED
            self._run_group(at, active, int(behind.min()))

    def _run_group(self, at: int, active: Array, limit: int) -> None:
        """Run some lanes to the next branch, or to where the next group waits."""
        instructions = self.program.instructions
        warps = int(np.count_nonzero(active.reshape(-1, WARP).any(axis=1)))
        stop = min(self.run_end[at], limit)
        self.mask = active
        self._run_straight(at, stop, warps)
        if stop == len(instructions):
            self.alive &= ~active
            return
        if stop == limit:
            self.counter[active] = stop
            return
        instruction = instructions[stop]
        self._count_control(stop, warps)
        taken = self._predicate(instruction)
        taken = active if taken is None else active & taken
        self.counter[active] = stop + 1
        if instruction.opcode == "bra":
            self.counter[taken] = self._target(instruction)
        elif instruction.opcode in ("bar", "barrier"):
            self._check_barrier(instruction)
            self.waiting |= taken
        else:
            self.alive &= ~taken

    def _predicate(self, instruction: Instruction) -> Array | None:
        if instruction.predicate is None:
            return None
        value = self.spread(self.registers[self.program.register(instruction.predicate)])
        return ~value if instruction.negated else value

    def _target(self, instruction: Instruction) -> int:
        return self.program.labels[instruction.operands[0]]

    def _check_barrier(self, instruction: Instruction) -> None:
        if len(instruction.operands) > 1 and instruction.operands[1] != str(self.program.threads):
            fail("UNSUPPORTED", "a barrier of some of the warps", instruction)


def _nothing() -> None:
    pass
