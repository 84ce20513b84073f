"""From an `Instruction` to a closure that executes it: operands and types are bound once."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .arithmetic import (
    DTYPES,
    F16,
    F32,
    F64,
    FLOATS,
    PREDICATE,
    SIGNED,
    U16,
    U64,
    UNSIGNED,
    Array,
    from_bf16,
    to_bf16,
)
from .memory import fail
from .parse import Instruction, PtxError, split_operands

if TYPE_CHECKING:
    from .machine import Machine

Fetch = Callable[[], Array]
Step = Callable[[], None]
Handler = Callable[["Binder", Instruction], Step]

_ADDRESS = re.compile(r"\[\s*([%$\w#]+)\s*(?:([+-])\s*(-?\w+))?\s*\]$")
_HANDLERS: dict[str, Handler] = {}


def opcodes(*names: str) -> Callable[[Handler], Handler]:
    """Register a handler for these opcodes."""

    def register(handler: Handler) -> Handler:
        for name in names:
            _HANDLERS[name] = handler
        return handler

    return register


def decode(machine: Machine, instruction: Instruction) -> Step:
    """The closure that executes one instruction under its predicate."""
    handler = _HANDLERS.get(instruction.opcode)
    if handler is None:
        # Only an instruction that is reached is a problem.
        return lambda: fail("UNSUPPORTED", f"opcode {instruction.opcode}", instruction)
    try:
        step = handler(Binder(machine, instruction), instruction)
    except PtxError as error:
        return _deferred(str(error))
    if instruction.predicate is None:
        return step
    return _predicated(machine, instruction, step)


def _deferred(message: str) -> Step:
    def step() -> None:
        raise PtxError(message)

    return step


def _predicated(machine: Machine, instruction: Instruction, step: Step) -> Step:
    registers = machine.registers
    index = machine.program.register(instruction.predicate)
    negated = instruction.negated

    def run() -> None:
        outer = machine.mask
        active = ~registers[index] if negated else registers[index]
        if active.shape[0] == 1:
            if active[0]:
                step()
            return
        if outer is not None:
            active = active & outer
        hits = np.count_nonzero(active)
        if hits == 0:
            return
        machine.mask = None if hits == active.shape[0] else active
        step()
        machine.mask = outer

    return run


def reinterpret(value: Array, dtype: np.dtype) -> Array:
    """The bits of a register read as another type: cut or zero-extended where the sizes differ."""
    if dtype is PREDICATE or dtype == PREDICATE:
        return value if value.dtype == PREDICATE else value != 0
    size = value.dtype.itemsize
    if value.dtype == PREDICATE:
        value = value.view(UNSIGNED[1])
    if size != dtype.itemsize:
        value = value.view(UNSIGNED[size]).astype(UNSIGNED[dtype.itemsize])
    return value.view(dtype)


class Binder:
    """Binds the operands of one instruction to fetching and writing closures."""

    def __init__(self, machine: Machine, instruction: Instruction):
        self.machine = machine
        self.instruction = instruction
        self.types = [part for part in instruction.modifiers if part in DTYPES]

    @property
    def type(self) -> str:
        """The one type of an instruction that has one."""
        if len(self.types) != 1:
            fail("UNSUPPORTED", "operands of several types, or of none", self.instruction)
        return self.types[0]

    # -- reading

    def fetch(self, text: str, type_name: str) -> Fetch:
        """A closure that returns the operand's bits as `type_name`."""
        dtype = DTYPES[type_name]
        if text.startswith("!"):
            inner = self.fetch(text[1:], type_name)
            return lambda: ~inner()
        index = self.machine.program.register(text)
        if index is not None:
            registers = self.machine.registers

            def fetch_register() -> Array:
                value = registers[index]
                return value if value.dtype is dtype else reinterpret(value, dtype)

            return fetch_register
        if text.startswith("%"):
            return lambda: reinterpret(self.machine.special_register(text), dtype)
        if text[0].isdigit() or text[0] == "-":
            constant = self._immediate(text, dtype)
            return lambda: constant
        return lambda: reinterpret(np.full(1, self.machine.symbols.get(text, 0), U64), dtype)

    def _immediate(self, text: str, dtype: np.dtype) -> Array:
        if text[:2] in ("0f", "0F", "0d", "0D"):
            bits = np.full(1, int(text[2:], 16), UNSIGNED[4 if text[1] in "fF" else 8])
            return reinterpret(bits, dtype)
        if "." in text:
            return np.full(1, float(text), F64).astype(dtype)
        number = int(text.rstrip("U"), 0)
        if dtype.kind == "f":
            return np.full(1, number, dtype)
        if dtype == PREDICATE:
            return np.full(1, number != 0)
        return np.full(1, number % (1 << 8 * dtype.itemsize), UNSIGNED[dtype.itemsize]).view(dtype)

    def fetch_value(self, text: str, type_name: str) -> Fetch:
        """Like `fetch`, with bf16 widened to float32."""
        fetch = self.fetch(text, type_name)
        if type_name != "bf16":
            return fetch
        return lambda: from_bf16(fetch())

    def fetch_sources(self, type_name: str, first: int = 1) -> list[Fetch]:
        return [self.fetch_value(text, type_name) for text in self.instruction.operands[first:]]

    def address(self, text: str) -> Fetch:
        """The address of every lane, uint64."""
        match = _ADDRESS.match(text)
        if match is None:
            fail("UNSUPPORTED", f"address {text}", self.instruction)
        base = self.fetch(match[1], "u64")
        offset = int(match[3] or "0", 0) * (-1 if match[2] == "-" else 1)
        shift = np.full(1, offset % (1 << 64), U64)
        if offset == 0:
            return lambda: self.machine.spread(base())
        return lambda: self.machine.spread(base() + shift)

    # -- writing

    def writer(self, text: str, type_name: str = "b32") -> Callable[[Array], None]:
        """A closure that writes a value into a register, for the active lanes."""
        if text == "_":
            return lambda value: None
        machine = self.machine
        registers = machine.registers
        index = machine.program.register(text)
        if index is None:
            fail("UNSUPPORTED", f"destination {text}", self.instruction)
        bits = machine.program.register_bits[index]
        dtype = DTYPES.get(type_name)
        extend = None
        if dtype is not None and dtype != PREDICATE and bits > dtype.itemsize * 8:
            extend = (SIGNED if dtype.kind == "i" else UNSIGNED)[bits // 8]

        def write(value: Array) -> None:
            if extend is not None:
                if value.dtype.kind == "f":
                    value = value.view(UNSIGNED[value.dtype.itemsize])
                value = value.astype(extend)
            mask = machine.mask
            if mask is not None:
                value = np.where(mask, value, reinterpret(registers[index], value.dtype))
            registers[index] = value

        return write

    def writers(self, text: str, type_name: str) -> list[Callable[[Array], None]]:
        """Writers of a register or of a brace list of registers."""
        names = split_operands(text[1:-1]) if text.startswith("{") else [text]
        return [self.writer(name, type_name) for name in names]

    def assign(self, function: Callable[..., Array], sources: list[Fetch], type_name: str) -> Step:
        """Write function(sources) to the destination; the result has the register's type."""
        write = self.writer(self.instruction.operands[0], type_name)
        if not sources:
            return lambda: write(function())
        if len(sources) == 1:
            (only,) = sources
            return lambda: write(function(only()))
        if len(sources) == 2:
            left, right = sources
            return lambda: write(function(left(), right()))
        if len(sources) == 3:
            first, second, third = sources
            return lambda: write(function(first(), second(), third()))
        return lambda: write(function(*(source() for source in sources)))

    def assign_value(self, function: Callable[..., Array], sources: list[Fetch], type_name: str) -> Step:
        """Like `assign`, with the result rounded to the float type of the instruction."""
        return self.assign(rounding(function, type_name), sources, type_name)


def rounding(function: Callable[..., Array], type_name: str) -> Callable[..., Array]:
    """A function whose result is rounded to a float type; integer types pass through."""
    if type_name == "bf16":
        return lambda *values: to_bf16(function(*values).astype(F32))
    if type_name in ("f16", "f32", "f64"):
        dtype = DTYPES[type_name]
        return lambda *values: function(*values).astype(dtype, copy=False)
    return function


def packed(function: Callable[..., Array], type_name: str) -> Callable[..., Array]:
    """Apply a function of floats to both halves of packed registers (f16x2, bf16x2, f32x2)."""
    half_bits = 32 if type_name == "f32x2" else 16
    whole = UNSIGNED[half_bits // 4]
    half = UNSIGNED[half_bits // 8]
    element = {"f16x2": F16, "bf16x2": U16, "f32x2": F32}[type_name]

    def unpack(value: Array) -> Array:
        value = value.astype(half).view(element)
        return from_bf16(value) if type_name == "bf16x2" else value

    def pack(value: Array) -> Array:
        value = to_bf16(value.astype(F32)) if type_name == "bf16x2" else value.astype(element)
        return value.view(half).astype(whole)

    def both(*values: Array) -> Array:
        low = function(*(unpack(value) for value in values))
        high = function(*(unpack(value >> half_bits) for value in values))
        return pack(low) | (pack(high) << half_bits)

    return both


def is_float(type_name: str) -> bool:
    return type_name in FLOATS or type_name.endswith("x2")


# The handlers register themselves.
from . import access, alu, convert, warp  # noqa: E402, F401
