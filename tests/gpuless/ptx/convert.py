"""Moves, conversions, comparisons and selections."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .arithmetic import DTYPES, F64, FLOATS, U16, U32, UNSIGNED, Array, from_bf16, to_bf16
from .decode import Binder, Step, opcodes, rounding
from .memory import fail
from .parse import Instruction, split_operands

_ROUND_TO_INTEGER = {
    "rzi": np.trunc,
    "rni": np.rint,
    "rmi": np.floor,
    "rpi": np.ceil,
}


@opcodes("mov")
def mov(binder: Binder, instruction: Instruction) -> Step:
    target, source = instruction.operands
    type_name = binder.type
    if source.startswith("{"):
        return _pack(binder, target, split_operands(source[1:-1]), type_name)
    if target.startswith("{"):
        return _unpack(binder, split_operands(target[1:-1]), source, type_name)
    return binder.assign(lambda value: value, [binder.fetch(source, type_name)], type_name)


def _pack(binder: Binder, target: str, sources: list[str], type_name: str) -> Step:
    whole = UNSIGNED[DTYPES[type_name].itemsize]
    bits = whole.itemsize * 8 // len(sources)
    fetches = [binder.fetch(text, f"b{bits}") for text in sources]
    write = binder.writer(target, type_name)

    def step() -> None:
        value = fetches[0]().astype(whole)
        for position, fetch in enumerate(fetches[1:], 1):
            value = value | (fetch().astype(whole) << whole.type(bits * position))
        write(value)

    return step


def _unpack(binder: Binder, targets: list[str], source: str, type_name: str) -> Step:
    whole = UNSIGNED[DTYPES[type_name].itemsize]
    bits = whole.itemsize * 8 // len(targets)
    part = UNSIGNED[bits // 8]
    fetch = binder.fetch(source, f"b{whole.itemsize * 8}")
    writes = [(whole.type(bits * position), binder.writer(name, f"b{bits}")) for position, name in enumerate(targets)]

    def step() -> None:
        value = fetch()
        for shift, write in writes:
            write((value >> shift).astype(part) if shift else value.astype(part))

    return step


@opcodes("cvta")
def cvta(binder: Binder, instruction: Instruction) -> Step:
    """Every address space is the generic one here."""
    return binder.assign(lambda value: value, [binder.fetch(instruction.operands[1], "u64")], "u64")


@opcodes("cvt")
def cvt(binder: Binder, instruction: Instruction) -> Step:
    modifiers = set(instruction.modifiers)
    if len(binder.types) < 2 or "relu" in modifiers:
        return lambda: fail("UNSUPPORTED", "this conversion", instruction)
    target, source = binder.types[0], binder.types[1]
    if target in ("bf16x2", "f16x2"):
        return _pack_two(binder, target)
    fetch = binder.fetch_value(instruction.operands[1], source)
    to_integer = next((part for part in instruction.modifiers if part in _ROUND_TO_INTEGER), None)
    if source in FLOATS and target not in FLOATS:
        return binder.assign(_float_to_integer(_ROUND_TO_INTEGER[to_integer], DTYPES[target]), [fetch], target)
    if target not in FLOATS:
        return binder.assign(_integer_to_integer(DTYPES[target], "sat" in modifiers), [fetch], target)
    if {"rz", "rm", "rp"} & modifiers:
        return _directed(binder, target, source, modifiers, fetch)
    function = _ROUND_TO_INTEGER[to_integer] if to_integer else _same
    if "sat" in modifiers:
        unbounded = function
        function = lambda x: np.nan_to_num(np.clip(unbounded(x), 0, 1), nan=0.0)  # noqa: E731
    return binder.assign(rounding(function, target), [fetch], target)


def _same(value: Array) -> Array:
    return value


def _directed(binder: Binder, target: str, source: str, modifiers: set[str], fetch) -> Step:
    """A float32 or float64 result rounded towards zero, down or up."""
    dtype = DTYPES[target]
    if target not in ("f32", "f64") or source in ("f16", "bf16"):
        return lambda: fail("UNSUPPORTED", "this directed rounding", binder.instruction)

    def convert(value: Array) -> Array:
        nearest = value.astype(dtype)
        if value.dtype.kind == "f":
            above, below = nearest > value, nearest < value
        else:
            # Integers of 64 bits do not fit into a float64: compare in extended precision.
            above = nearest.astype(np.longdouble) > value.astype(np.longdouble)
            below = nearest.astype(np.longdouble) < value.astype(np.longdouble)
        down = above & ("rm" in modifiers or ("rz" in modifiers) & (nearest > 0))
        up = below & ("rp" in modifiers or ("rz" in modifiers) & (nearest < 0))
        nearest = np.where(down, np.nextafter(nearest, dtype.type(-np.inf)), nearest)
        return np.where(up, np.nextafter(nearest, dtype.type(np.inf)), nearest)

    return binder.assign(convert, [fetch], target)


def _pack_two(binder: Binder, target: str) -> Step:
    _, high, low = binder.instruction.operands
    narrow = to_bf16 if target == "bf16x2" else lambda x: x.astype(np.float16).view(U16)
    sources = [binder.fetch(high, "f32"), binder.fetch(low, "f32")]
    return binder.assign(lambda h, lo: (narrow(h).astype(U32) << 16) | narrow(lo).astype(U32), sources, "b32")


def _float_to_integer(round_to_integer: Callable[[Array], Array], dtype: np.dtype) -> Callable[[Array], Array]:
    """Rounded, then clamped to the type's range; NaN gives 0."""
    limits = np.iinfo(dtype)

    def convert(value: Array) -> Array:
        value = round_to_integer(value.astype(F64))
        too_high = value >= float(limits.max)
        too_low = value <= float(limits.min)
        inside = ~(too_high | too_low | np.isnan(value))
        result = np.where(inside, value, 0).astype(dtype)
        result = np.where(too_high, dtype.type(limits.max), result)
        return np.where(too_low, dtype.type(limits.min), result)

    return convert


def _integer_to_integer(dtype: np.dtype, saturate: bool) -> Callable[[Array], Array]:
    if not saturate:
        return lambda value: value.astype(dtype)
    limits = np.iinfo(dtype)

    def convert(value: Array) -> Array:
        own = np.iinfo(value.dtype)
        return np.clip(value, max(limits.min, own.min), min(limits.max, own.max)).astype(dtype)

    return convert


_COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
_COMBINATIONS = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _comparison(name: str, is_float: bool) -> Callable[[Array, Array], Array]:
    if name == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    if name == "num":
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    if name == "ne" and is_float:
        # Ordered: false when an operand is NaN.
        return lambda a, b: (a < b) | (a > b)
    if name in _COMPARISONS:
        return _COMPARISONS[name]
    if name == "neu":
        return np.not_equal
    ordered = _COMPARISONS[name[:-1]]
    return lambda a, b: ordered(a, b) | np.isnan(a) | np.isnan(b)


@opcodes("setp")
def setp(binder: Binder, instruction: Instruction) -> Step:
    type_name = binder.type
    if type_name.endswith("x2"):
        return _packed_setp(binder, instruction, type_name)
    compare = _comparison(instruction.modifiers[0], type_name in FLOATS)
    left, right = (binder.fetch_value(text, type_name) for text in instruction.operands[1:3])
    targets = instruction.operands[0].split("|")
    combine = next((_COMBINATIONS[part] for part in instruction.modifiers[1:] if part in _COMBINATIONS), None)
    write = binder.writer(targets[0], "pred")
    if combine is None and len(targets) == 1:
        return lambda: write(compare(left(), right()))
    other = binder.fetch(instruction.operands[3], "pred") if combine else None
    write_other = binder.writer(targets[1], "pred") if len(targets) > 1 else None

    def step() -> None:
        result = compare(left(), right())
        opposite = ~result
        if combine is not None:
            extra = other()
            result, opposite = combine(result, extra), combine(opposite, extra)
        write(result)
        if write_other is not None:
            write_other(opposite)

    return step


def _packed_setp(binder: Binder, instruction: Instruction, type_name: str) -> Step:
    """Both halves at once: the first predicate is that of the low half, the second that of the high half."""
    targets = instruction.operands[0].split("|")
    if type_name == "f32x2" or len(instruction.modifiers) > 2 or len(targets) != 2:
        return lambda: fail("UNSUPPORTED", "a packed comparison of this form", instruction)
    widen = from_bf16 if type_name == "bf16x2" else lambda half: half.view(np.float16)
    compare = _comparison(instruction.modifiers[0], True)
    left, right = (binder.fetch(text, type_name) for text in instruction.operands[1:3])
    low, high = (binder.writer(target, "pred") for target in targets)

    def half(bits: Array, shift: int) -> Array:
        return widen(((bits >> shift) & U32.type(0xFFFF)).astype(U16))

    def step() -> None:
        a, b = left(), right()
        low(compare(half(a, 0), half(b, 0)))
        high(compare(half(a, 16), half(b, 16)))

    return step


@opcodes("selp")
def selp(binder: Binder, instruction: Instruction) -> Step:
    type_name = binder.type
    _, if_true, if_false, condition = instruction.operands
    sources = [
        binder.fetch(condition, "pred"),
        binder.fetch(if_true, type_name),
        binder.fetch(if_false, type_name),
    ]
    return binder.assign(np.where, sources, type_name)


@opcodes("slct")
def slct(binder: Binder, instruction: Instruction) -> Step:
    value_type, sign_type = binder.types
    _, if_positive, if_negative, sign = instruction.operands
    sources = [
        binder.fetch(sign, sign_type),
        binder.fetch(if_positive, value_type),
        binder.fetch(if_negative, value_type),
    ]
    return binder.assign(lambda s, a, b: np.where(s >= 0, a, b), sources, value_type)
