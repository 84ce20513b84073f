"""Arithmetic and logic instructions."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import numpy as np

from . import arithmetic as pa
from .arithmetic import DTYPES, F32, U32, Array
from .decode import Binder, Step, is_float, opcodes, packed
from .memory import fail
from .parse import Instruction

_DIRECTED_ROUNDINGS = {"rz", "rm", "rp"}


def _elementwise(binder: Binder, function: Callable[..., Array], type_name: str) -> Step:
    """An operation on integers, floats, or packed floats."""
    modifiers = set(binder.instruction.modifiers)
    if "relu" in modifiers and type_name == "s32":
        unclamped = function

        def function(*values: Array) -> Array:
            return np.maximum(unclamped(*values), 0)

    elif {"sat", "relu"} & modifiers:
        fail("UNSUPPORTED", "a clamped result", binder.instruction)
    if is_float(type_name) and _DIRECTED_ROUNDINGS & set(binder.instruction.modifiers):
        return lambda: fail("UNSUPPORTED", "a directed rounding", binder.instruction)
    if type_name.endswith("x2"):
        return binder.assign(packed(function, type_name), binder.fetch_sources(type_name), type_name)
    return binder.assign_value(function, binder.fetch_sources(type_name), type_name)


def _mixed(binder: Binder, function: Callable[..., Array]) -> Step:
    """Narrow factors, a float32 sum: ``fma.rn.f32.bf16``, ``add.f32.f16``."""
    wide, narrow = binder.types
    texts = binder.instruction.operands[1:]
    narrow_sources = [binder.fetch_value(text, narrow) for text in texts[:-1]]
    sum_source = binder.fetch(texts[-1], wide)

    def widened(*values: Array) -> Array:
        return function(*(value.astype(F32) for value in values))

    return binder.assign(widened, [*narrow_sources, sum_source], wide)


@opcodes("add", "sub")
def add(binder: Binder, instruction: Instruction) -> Step:
    if "cc" in instruction.modifiers:
        return lambda: fail("UNSUPPORTED", "a carry flag", instruction)
    function = np.add if instruction.opcode == "add" else np.subtract
    if len(binder.types) == 2:
        return _mixed(binder, function)
    return _elementwise(binder, function, binder.type)


@opcodes("mul", "mul24")
def mul(binder: Binder, instruction: Instruction) -> Step:
    type_name = binder.type
    sources = binder.fetch_sources(type_name)
    if "wide" in instruction.modifiers:
        wide = _wide(type_name)
        dtype = DTYPES[wide]
        return binder.assign(lambda a, b: a.astype(dtype) * b.astype(dtype), sources, wide)
    if "hi" in instruction.modifiers:
        return binder.assign(pa.multiply_high, sources, type_name)
    return _elementwise(binder, np.multiply, type_name)


def _wide(type_name: str) -> str:
    return type_name[0] + str(2 * int(type_name[1:]))


@opcodes("fma", "mad")
def fma(binder: Binder, instruction: Instruction) -> Step:
    if len(binder.types) == 2:
        return _mixed(binder, pa.fma_f32)
    type_name = binder.type
    if is_float(type_name):
        function = {"f32": pa.fma_f32, "f64": pa.fma_f64, "f32x2": pa.fma_f32}.get(type_name, pa.fma_narrow)
        return _elementwise(binder, function, type_name)
    operands = instruction.operands
    if "wide" in instruction.modifiers:
        wide = _wide(type_name)
        dtype = DTYPES[wide]
        sources = [binder.fetch(text, type_name) for text in operands[1:3]] + [binder.fetch(operands[3], wide)]
        return binder.assign(lambda a, b, c: a.astype(dtype) * b.astype(dtype) + c, sources, wide)
    sources = binder.fetch_sources(type_name)
    if "hi" in instruction.modifiers:
        return binder.assign(lambda a, b, c: pa.multiply_high(a, b) + c, sources, type_name)
    return binder.assign(lambda a, b, c: a * b + c, sources, type_name)


@opcodes("min", "max")
def minimum_or_maximum(binder: Binder, instruction: Instruction) -> Step:
    """Two operands, or three on sm_100."""
    is_min = instruction.opcode == "min"
    pair = np.minimum if is_min else np.maximum
    if is_float(binder.type) and "NaN" not in instruction.modifiers:
        pair = np.fmin if is_min else np.fmax
    if "xorsign" in instruction.modifiers:
        return _elementwise(binder, lambda a, b: _with_product_sign(pair, a, b), binder.type)
    if "abs" in instruction.modifiers:
        return _elementwise(binder, lambda *values: reduce(pair, [np.abs(value) for value in values]), binder.type)
    if len(instruction.operands) == 3:
        return _elementwise(binder, pair, binder.type)
    return _elementwise(binder, lambda *values: reduce(pair, values), binder.type)


def _with_product_sign(pair: Callable[[Array, Array], Array], a: Array, b: Array) -> Array:
    magnitude = pair(np.abs(a), np.abs(b))
    return np.where(np.signbit(a) ^ np.signbit(b), -magnitude, magnitude)


@opcodes("div", "rem")
def div(binder: Binder, instruction: Instruction) -> Step:
    if is_float(binder.type):
        return _elementwise(binder, np.divide, binder.type)
    function = pa.divide if instruction.opcode == "div" else pa.remainder
    return binder.assign(function, binder.fetch_sources(binder.type), binder.type)


_UNARY: dict[str, Callable[[Array], Array]] = {
    "neg": np.negative,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "rcp": lambda x: 1 / x,
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


@opcodes(*_UNARY)
def unary(binder: Binder, instruction: Instruction) -> Step:
    return _elementwise(binder, _UNARY[instruction.opcode], binder.type)


@opcodes("copysign")
def copysign(binder: Binder, instruction: Instruction) -> Step:
    return _elementwise(binder, lambda sign, magnitude: np.copysign(magnitude, sign), binder.type)


@opcodes("testp")
def testp(binder: Binder, instruction: Instruction) -> Step:
    tests = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "notanumber": np.isnan,
        "number": lambda x: ~np.isnan(x),
    }
    test = tests.get(instruction.modifiers[0])
    if test is None:
        return lambda: fail("UNSUPPORTED", "this testp", instruction)
    return binder.assign(test, binder.fetch_sources(binder.type), "pred")


_LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}


@opcodes(*_LOGIC)
def logic(binder: Binder, instruction: Instruction) -> Step:
    return binder.assign(_LOGIC[instruction.opcode], binder.fetch_sources(binder.type), binder.type)


@opcodes("cnot")
def cnot(binder: Binder, instruction: Instruction) -> Step:
    return binder.assign(lambda x: (x == 0).astype(x.dtype), binder.fetch_sources(binder.type), binder.type)


@opcodes("shl", "shr")
def shift(binder: Binder, instruction: Instruction) -> Step:
    type_name = binder.type
    _, value, count = instruction.operands
    sources = [binder.fetch(value, type_name), binder.fetch(count, "u32")]
    bits = DTYPES[type_name].itemsize * 8
    if count.isdigit() and int(count) < bits:
        amount = DTYPES[type_name].type(int(count))
        if instruction.opcode == "shl":
            return binder.assign(lambda x: x << amount, sources[:1], type_name)
        return binder.assign(lambda x: x >> amount, sources[:1], type_name)
    return binder.assign(pa.shift_left if instruction.opcode == "shl" else pa.shift_right, sources, type_name)


@opcodes("shf")
def funnel_shift(binder: Binder, instruction: Instruction) -> Step:
    function = pa.funnel_left if "l" in instruction.modifiers else pa.funnel_right
    if "wrap" in instruction.modifiers:
        return binder.assign(lambda a, b, c: function(a, b, c & 31), binder.fetch_sources("u32"), "u32")
    return binder.assign(lambda a, b, c: function(a, b, np.minimum(c, 32)), binder.fetch_sources("u32"), "u32")


@opcodes("bfe")
def bit_field_extract(binder: Binder, instruction: Instruction) -> Step:
    _, value, start, length = instruction.operands
    sources = [
        binder.fetch(value, binder.type),
        binder.fetch(start, "u32"),
        binder.fetch(length, "u32"),
    ]
    return binder.assign(pa.extract_bits, sources, binder.type)


@opcodes("bfi")
def bit_field_insert(binder: Binder, instruction: Instruction) -> Step:
    _, source, target, start, length = instruction.operands
    sources = [binder.fetch(text, binder.type) for text in (source, target)]
    sources += [binder.fetch(text, "u32") for text in (start, length)]
    return binder.assign(pa.insert_bits, sources, binder.type)


@opcodes("popc", "clz", "bfind")
def bit_count(binder: Binder, instruction: Instruction) -> Step:
    functions = {
        "popc": lambda x: np.bitwise_count(x).astype(U32),
        "clz": pa.count_leading_zeros,
        "bfind": pa.find_highest_bit,
    }
    if "shiftamt" in instruction.modifiers:
        return lambda: fail("UNSUPPORTED", "shiftamt", instruction)
    return binder.assign(functions[instruction.opcode], binder.fetch_sources(binder.type), "u32")


@opcodes("brev")
def bit_reverse(binder: Binder, instruction: Instruction) -> Step:
    return binder.assign(pa.reverse_bits, binder.fetch_sources(binder.type), binder.type)


@opcodes("prmt")
def byte_permute(binder: Binder, instruction: Instruction) -> Step:
    if len(instruction.modifiers) > 1:
        return lambda: fail("UNSUPPORTED", "a prmt mode", instruction)
    return binder.assign(pa.permute_bytes, binder.fetch_sources("u32"), "u32")


@opcodes("lop3")
def logic_of_three(binder: Binder, instruction: Instruction) -> Step:
    table = int(instruction.operands[4], 0)
    sources = [binder.fetch(text, "u32") for text in instruction.operands[1:4]]
    return binder.assign(lambda a, b, c: pa.lookup_logic(a, b, c, table), sources, "u32")


@opcodes("sad")
def sum_of_absolute_difference(binder: Binder, instruction: Instruction) -> Step:
    sources = binder.fetch_sources(binder.type)
    return binder.assign(lambda a, b, c: np.where(a > b, a - b, b - a) + c, sources, binder.type)
