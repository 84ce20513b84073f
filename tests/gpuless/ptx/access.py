"""Loads, stores, atomics, matrix moves through shared memory, and what needs no work here."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .arithmetic import DTYPES, U16, U32, UNSIGNED, Array, from_bf16, to_bf16
from .decode import Binder, Step, opcodes
from .memory import PARAMETER_BYTES, fail
from .parse import Instruction, split_operands

_PARAMETER = re.compile(r"\[\s*([\w$]+)\s*(?:\+\s*(\d+))?\s*\]$")


def _space(instruction: Instruction) -> str:
    for part in instruction.modifiers:
        name = part.partition("::")[0]
        if name in ("shared", "global", "param", "local", "const"):
            return name
    return "global"


def _width(instruction: Instruction) -> int:
    return next((int(part[1:]) for part in instruction.modifiers if part in ("v1", "v2", "v4", "v8")), 1)


def _names(text: str) -> list[str]:
    """The registers of a brace list, or the one register."""
    return split_operands(text[1:-1]) if text.startswith("{") else [text]


class _Access:
    """The memory that an instruction goes to, for its active lanes."""

    def __init__(self, binder: Binder):
        self.machine = binder.machine
        self.instruction = binder.instruction
        self.is_shared = _space(binder.instruction) == "shared"

    def lanes(self):
        """(chosen lanes or None for all, their description)."""
        mask = self.machine.mask
        if mask is None:
            return None, self.machine.lanes
        chosen = np.flatnonzero(mask)
        return chosen, self.machine.lanes.take(chosen)

    def load(self, addresses: Array, element_bytes: int, width: int) -> list[Array]:
        machine = self.machine
        chosen, lanes = self.lanes()
        memory = machine.shared if self.is_shared else machine.memory
        if chosen is None:
            return memory.load(addresses, element_bytes, width, lanes, self.instruction)
        parts = memory.load(addresses[chosen], element_bytes, width, lanes, self.instruction)
        wholes = []
        for part in parts:
            whole = np.zeros(machine.lane_count, part.dtype)
            whole[chosen] = part
            wholes.append(whole)
        return wholes

    def store(self, addresses: Array, values: list[Array]) -> None:
        machine = self.machine
        chosen, lanes = self.lanes()
        memory = machine.shared if self.is_shared else machine.memory
        values = [machine.spread(value) for value in values]
        if chosen is not None:
            addresses = addresses[chosen]
            values = [value[chosen] for value in values]
        memory.store(addresses, values, lanes, self.instruction)


@opcodes("ld", "ldu")
def ld(binder: Binder, instruction: Instruction) -> Step:
    type_name = binder.type
    if _space(instruction) == "param":
        return _load_parameter(binder, instruction, type_name)
    if _space(instruction) == "local":
        return lambda: fail("UNSUPPORTED", "local memory", instruction)
    access = _Access(binder)
    dtype = DTYPES[type_name]
    width = _width(instruction)
    address = binder.address(instruction.operands[1])
    writes = binder.writers(instruction.operands[0], type_name)
    if width == 1:
        (write,) = writes
        return lambda: write(access.load(address(), dtype.itemsize, 1)[0].view(dtype))

    def step() -> None:
        values = access.load(address(), dtype.itemsize, width)
        for write, value in zip(writes, values, strict=True):
            write(value.view(dtype))

    return step


def _load_parameter(binder: Binder, instruction: Instruction, type_name: str) -> Step:
    match = _PARAMETER.match(instruction.operands[1])
    if match is None:
        return _load_chosen_parameter(binder, instruction, type_name)
    name, offset = match[1], int(match[2] or 0)
    dtype = DTYPES[type_name]
    write = binder.writer(instruction.operands[0], type_name)
    machine = binder.machine

    def step() -> None:
        data = machine.parameters.get(name, bytes(8))[offset:].ljust(dtype.itemsize, b"\0")
        write(np.frombuffer(data[: dtype.itemsize], dtype))

    return step


def _load_chosen_parameter(binder: Binder, instruction: Instruction, type_name: str) -> Step:
    """A choice between pointers becomes one between the addresses of the parameters that hold them."""
    machine = binder.machine
    dtype = DTYPES[type_name]
    address = binder.address(instruction.operands[1])
    write = binder.writer(instruction.operands[0], type_name)

    def step() -> None:
        words = machine.parameter_words[address() // np.uint64(PARAMETER_BYTES)]
        write(words.astype(UNSIGNED[dtype.itemsize]).view(dtype))

    return step


@opcodes("st")
def st(binder: Binder, instruction: Instruction) -> Step:
    if _space(instruction) == "param":
        return _skip
    if _space(instruction) == "local":
        return lambda: fail("UNSUPPORTED", "local memory", instruction)
    access = _Access(binder)
    bits = f"b{DTYPES[binder.type].itemsize * 8}"
    target, source = instruction.operands[:2]
    address = binder.address(target)
    fetches = [binder.fetch(name, bits) for name in _names(source)]
    return lambda: access.store(address(), [fetch() for fetch in fetches])


def _skip() -> None:
    pass


@opcodes(
    "membar",
    "fence",
    "griddepcontrol",
    "nanosleep",
    "prefetch",
    "pmevent",
    "discard",
    "applypriority",
    "barrier",
    "bar",
    "setmaxnreg",
)
def nothing_to_do(binder: Binder, instruction: Instruction) -> Step:
    return _skip


@opcodes("createpolicy")
def createpolicy(binder: Binder, instruction: Instruction) -> Step:
    return binder.assign(lambda: np.zeros(1, np.uint64), [], "b64")


@opcodes("trap")
def trap(binder: Binder, instruction: Instruction) -> Step:
    return lambda: fail("TRAP", "the kernel stopped itself", instruction)


@opcodes("call")
def call(binder: Binder, instruction: Instruction) -> Step:
    if "__assertfail" in instruction.text:
        return lambda: fail("DEVICE ASSERT", "a device_assert did not hold", instruction)
    if "vprintf" in instruction.text:
        return _skip
    return lambda: fail("UNSUPPORTED", "a call", instruction)


@opcodes("cp")
def cp(binder: Binder, instruction: Instruction) -> Step:
    """cp.async, done at once."""
    modifiers = instruction.modifiers
    if {"commit_group", "wait_group", "wait_all"} & set(modifiers):
        return _skip
    if modifiers[0] != "async" or "bulk" in modifiers:
        return lambda: fail("UNSUPPORTED", "this copy", instruction)
    source_access = _Access(binder)
    source_access.is_shared = False
    target_access = _Access(binder)
    target_access.is_shared = True
    target, source, size, *rest = instruction.operands
    count = int(size, 0)
    element_bytes = min(count, 4)
    target_address = binder.address(target)
    source_address = binder.address(source)
    kept = binder.fetch(rest[0], "u32") if rest else None

    def step() -> None:
        machine = binder.machine
        outer = machine.mask
        values = None
        if kept is not None:
            # Bytes beyond the source size are zero and are not read.
            read = machine.spread(kept()) > 0
            machine.mask = read if outer is None else read & outer
            if not machine.mask.any():
                values = [np.zeros(1, UNSIGNED[element_bytes])] * (count // element_bytes)
        if values is None:
            values = source_access.load(source_address(), element_bytes, count // element_bytes)
        machine.mask = outer
        target_access.store(target_address(), values)

    return step


@opcodes("ldmatrix", "stmatrix")
def matrix_move(binder: Binder, instruction: Instruction) -> Step:
    """8 x 8 matrices of 16-bit elements: layout conversions move them through shared memory."""
    machine = binder.machine
    is_store = instruction.opcode == "stmatrix"
    memory_text, register_text = instruction.operands if is_store else instruction.operands[::-1]
    if "b16" not in instruction.modifiers:
        return lambda: fail("UNSUPPORTED", "this matrix element", instruction)
    names = _names(register_text)
    address = binder.address(memory_text)
    access = _Access(binder)
    access.is_shared = True
    transposed = "trans" in instruction.modifiers
    fetches = [binder.fetch(name, "b32") for name in names] if is_store else []
    writes = [] if is_store else [binder.writer(name, "b32") for name in names]

    def elements(matrix: int) -> tuple[Array, Array]:
        """Addresses of the two elements that every lane holds of one matrix."""
        rows = address()
        lane = machine.lane_in_warp
        # Lane 8 i + r gives the address of row r of matrix i.
        base = machine.warp_base + 8 * matrix
        if transposed:
            first = rows[base + 2 * (lane % 4)] + (2 * (lane // 4)).astype(np.uint64)
            second = rows[base + 2 * (lane % 4) + 1] + (2 * (lane // 4)).astype(np.uint64)
            return first, second
        first = rows[base + lane // 4] + (4 * (lane % 4)).astype(np.uint64)
        return first, first + np.uint64(2)

    def load() -> None:
        for matrix, write in enumerate(writes):
            low, high = (access.load(where, 2, 1)[0].astype(U32) for where in elements(matrix))
            write(low | (high << 16))

    def store() -> None:
        for matrix, fetch in enumerate(fetches):
            value = machine.spread(fetch())
            first, second = elements(matrix)
            access.store(first, [value.astype(U16)])
            access.store(second, [(value >> 16).astype(U16)])

    return store if is_store else load


_ATOMIC: dict[str, Callable] = {
    "add": lambda old, value: old + value,
    "min": min,
    "max": max,
    "and": lambda old, value: old & value,
    "or": lambda old, value: old | value,
    "xor": lambda old, value: old ^ value,
    "exch": lambda old, value: value,
    "inc": lambda old, value: old * 0 if old >= value else old + 1,
}
_ATOMIC_ARRAYS: dict[str, Callable] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": lambda old, value: value,
}


@opcodes("atom", "red")
def atomic(binder: Binder, instruction: Instruction) -> Step:
    machine = binder.machine
    type_name = binder.type
    if type_name.endswith("x2"):
        fail("UNSUPPORTED", "a packed atomic", instruction)
    width = _width(instruction)
    operands = instruction.operands
    if instruction.opcode == "red":
        operands = ["{" + ", ".join("_" * width) + "}", *operands]
    operation = next(part for part in instruction.modifiers if part in _ATOMIC or part == "cas")
    address = binder.address(operands[1])
    writes = binder.writers(operands[0], type_name)
    sources = [_names(text) for text in operands[2:]]
    fetches = [[binder.fetch(names[element], type_name) for names in sources] for element in range(width)]
    access = _Access(binder)

    def step() -> None:
        chosen, lanes = access.lanes()
        every = np.arange(machine.lane_count) if chosen is None else chosen
        first = address()[every]
        # A vector atomic is one atomic per element.
        for element, write in enumerate(writes):
            values = [machine.spread(fetch())[every] for fetch in fetches[element]]
            dtype = values[0].dtype
            old = np.zeros(machine.lane_count, dtype)
            addresses = first + np.uint64(element * dtype.itemsize)
            for array, index, part in _places(access, addresses, dtype, lanes):
                inputs = [value[part] for value in values]
                old[every[part]] = _update(array, index, inputs, operation, type_name)
            write(old)

    return step


def _places(access: _Access, addresses: Array, dtype: np.dtype, lanes):
    """Yield (array, indices, which of the lanes) for every piece of memory an atomic touches."""
    if access.is_shared:
        array, index = access.machine.shared.atomic_view(addresses, dtype.itemsize, lanes, access.instruction)
        yield array.view(dtype), index, slice(None)
        return
    for buffer, offsets, chosen in access.machine.memory.locate(addresses, dtype.itemsize, lanes, access.instruction):
        buffer.traffic.atomic_operations += offsets.size
        array = buffer.view(dtype.itemsize, 1).view(dtype)
        yield array, offsets // dtype.itemsize, slice(None) if chosen is None else chosen


def _update(array: Array, index: Array, values: list[Array], operation: str, type_name: str) -> Array:
    """Apply an atomic lane by lane, or at once when no two lanes meet; return what was there."""
    is_bf16 = type_name == "bf16"
    if not is_bf16 and operation in _ATOMIC_ARRAYS and np.unique(index).size == index.size:
        old = array[index]
        array[index] = _ATOMIC_ARRAYS[operation](old, values[0])
        return old
    old = np.empty(index.size, array.dtype)
    for lane, place in enumerate(index):
        current = array[place]
        old[lane] = current
        if operation == "cas":
            array[place] = values[1][lane] if current == values[0][lane] else current
        elif is_bf16:
            pair = from_bf16(np.array([current, values[0][lane]], U16))
            array[place] = to_bf16(np.array([_ATOMIC[operation](*pair)], np.float32))[0]
        else:
            array[place] = _ATOMIC[operation](current, values[0][lane])
    return old
