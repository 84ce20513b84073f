"""What PTX computes where NumPy has no operation of its own. Pure functions of arrays."""

from __future__ import annotations

import numpy as np

Array = np.ndarray

U8, U16, U32, U64 = (np.dtype(name) for name in ("u1", "u2", "u4", "u8"))
S8, S16, S32, S64 = (np.dtype(name) for name in ("i1", "i2", "i4", "i8"))
F16, F32, F64 = (np.dtype(name) for name in ("f2", "f4", "f8"))
PREDICATE = np.dtype(bool)

# bf16 has no NumPy type: it travels as its bits.
DTYPES = {
    "pred": PREDICATE,
    "b8": U8,
    "u8": U8,
    "s8": S8,
    "b16": U16,
    "u16": U16,
    "s16": S16,
    "f16": F16,
    "bf16": U16,
    "b32": U32,
    "u32": U32,
    "s32": S32,
    "f32": F32,
    "f16x2": U32,
    "bf16x2": U32,
    "b64": U64,
    "u64": U64,
    "s64": S64,
    "f64": F64,
    "f32x2": U64,
}
FLOATS = {"f16", "bf16", "f32", "f64"}
UNSIGNED = {1: U8, 2: U16, 4: U32, 8: U64}
SIGNED = {1: S8, 2: S16, 4: S32, 8: S64}

_SPLITTER = 2.0**27 + 1
_F32_TIE_MASK = np.uint64((1 << 29) - 1)
_F32_TIE = np.uint64(1 << 28)


def from_bf16(bits: Array) -> Array:
    """bf16 bits to float32, exact."""
    return (bits.astype(U32) << 16).view(F32)


def to_bf16(value: Array) -> Array:
    """float32 to bf16 bits, round to nearest even, NaN to the canonical NaN."""
    bits = np.ascontiguousarray(value, F32).view(U32)
    rounded = (bits + (U32.type(0x7FFF) + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(value), U16.type(0x7FFF), rounded.astype(U16))


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _two_product(a: Array, b: Array) -> tuple[Array, Array]:
    product = a * b
    scaled = _SPLITTER * a
    a_high = scaled - (scaled - a)
    a_low = a - a_high
    scaled = _SPLITTER * b
    b_high = scaled - (scaled - b)
    b_low = b - b_high
    error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    return product, error


def _round_to_odd(total: Array, error: Array) -> Array:
    """The neighbour of total + error whose last bit is odd, unless the sum is exact."""
    bits = total.view(S64)
    step = np.where((error > 0) == (total > 0), 1, -1)
    inexact_and_even = (error != 0) & ((bits & 1) == 0)
    return np.where(inexact_and_even, bits + step, bits).view(F64)


def fma_f64(a: Array, b: Array, c: Array) -> Array:
    """Correctly rounded a * b + c (Boldo and Melquiond 2008), plain where a splitting overflows."""
    a, b, c = np.broadcast_arrays(a, b, c)
    product, product_error = _two_product(a, b)
    high, low = _two_sum(c, product_error)
    upper, lower = _two_sum(product, high)
    result = upper + _round_to_odd(*_two_sum(lower, low))
    return np.where(np.isfinite(result) & np.isfinite(product_error), result, a * b + c)


def fma_f32(a: Array, b: Array, c: Array) -> Array:
    """Correctly rounded a * b + c. The product is exact in float64."""
    product = np.multiply(a, b, dtype=F64)
    addend = c.astype(F64)
    total = product + addend
    # Rounding twice goes wrong only when the first rounding lands on a tie of the second.
    if ((total.view(U64) & _F32_TIE_MASK) == _F32_TIE).any():
        total, error = _two_sum(product, addend)
        total = np.where(np.isfinite(error), _round_to_odd(total, error), total)
    return total.astype(F32)


def fma_narrow(a: Array, b: Array, c: Array) -> Array:
    """Compute a * b + c of values that came from 16 bits, in float64: the caller rounds."""
    return np.multiply(a, b, dtype=F64) + c


def multiply_high(a: Array, b: Array) -> Array:
    """Upper half of the product of two integers of 16, 32 or 64 bits."""
    size = a.dtype.itemsize
    if size < 8:
        wide = DTYPES[("s" if a.dtype.kind == "i" else "u") + str(16 * size)]
        return ((a.astype(wide) * b.astype(wide)) >> wide.type(8 * size)).astype(a.dtype)
    x = a.view(U64)
    y = b.view(U64)
    mask = U64.type(0xFFFFFFFF)
    x_low, x_high = x & mask, x >> 32
    y_low, y_high = y & mask, y >> 32
    middle = x_high * y_low + ((x_low * y_low) >> 32)
    carry = x_low * y_high + (middle & mask)
    high = x_high * y_high + (middle >> 32) + (carry >> 32)
    if a.dtype.kind == "i":
        high = high - np.where(a < 0, y, 0).astype(U64) - np.where(b < 0, x, 0).astype(U64)
    return high.view(a.dtype)


def divide(a: Array, b: Array) -> Array:
    """Integer quotient, rounded towards zero; all ones when the divisor is zero."""
    divisor = np.where(b == 0, b.dtype.type(1), b)
    quotient = (a - np.fmod(a, divisor)) // divisor
    return np.where(b == 0, ~np.zeros(1, a.dtype), quotient)


def remainder(a: Array, b: Array) -> Array:
    """Integer remainder with the sign of the dividend; the dividend when the divisor is zero."""
    return np.where(b == 0, a, np.fmod(a, np.where(b == 0, b.dtype.type(1), b)))


def shift_left(value: Array, count: Array) -> Array:
    bits = value.dtype.itemsize * 8
    shifted = value << np.minimum(count, bits - 1).astype(value.dtype)
    return np.where(count >= bits, value.dtype.type(0), shifted)


def shift_right(value: Array, count: Array) -> Array:
    bits = value.dtype.itemsize * 8
    shifted = value >> np.minimum(count, bits - 1).astype(value.dtype)
    if value.dtype.kind == "i":
        return shifted
    return np.where(count >= bits, value.dtype.type(0), shifted)


def funnel_left(low: Array, high: Array, count: Array) -> Array:
    return ((_join(low, high) << count.astype(U64)) >> 32).astype(U32)


def funnel_right(low: Array, high: Array, count: Array) -> Array:
    return (_join(low, high) >> count.astype(U64)).astype(U32)


def _join(low: Array, high: Array) -> Array:
    return (high.astype(U64) << 32) | low.astype(U64)


def _low_bits(count: Array) -> Array:
    """A uint64 with the lowest `count` bits set."""
    return np.where(count >= 64, ~U64.type(0), (U64.type(1) << np.minimum(count, 63).astype(U64)) - U64.type(1))


def extract_bits(value: Array, start: Array, length: Array) -> Array:
    """bfe: `length` bits from bit `start`, sign-extended for signed types."""
    bits = value.dtype.itemsize * 8
    start = start & 255
    length = length & 255
    wide = value.astype(S64).view(U64) if value.dtype.kind == "i" else value.astype(U64)
    field = np.where(start >= 64, U64.type(0), wide >> np.minimum(start, 63).astype(U64)) & _low_bits(length)
    if value.dtype.kind == "i":
        sign = (field >> np.maximum(length.astype(S64) - 1, 0).astype(U64)) & 1
        field = np.where((sign == 1) & (length > 0) & (length < bits), field | ~_low_bits(length), field)
    return field.astype(UNSIGNED[bits // 8]).view(value.dtype)


def insert_bits(source: Array, target: Array, start: Array, length: Array) -> Array:
    """bfi: replace `length` bits of the target from bit `start`."""
    start = np.minimum(start & 255, 64)
    mask = np.where(start >= 64, U64.type(0), _low_bits(length & 255) << np.minimum(start, 63).astype(U64))
    moved = source.astype(U64) << np.minimum(start, 63).astype(U64)
    return ((target.astype(U64) & ~mask) | (moved & mask)).astype(target.dtype)


def bit_length(value: Array) -> Array:
    """Position of the highest set bit plus one, 0 for zero."""
    wide = value.astype(U64)
    high = np.frexp((wide >> 32).astype(F64))[1]
    low = np.frexp((wide & U64.type(0xFFFFFFFF)).astype(F64))[1]
    return np.where(high > 0, high + 32, low).astype(U32)


def count_leading_zeros(value: Array) -> Array:
    return U32.type(value.dtype.itemsize * 8) - bit_length(value)


def find_highest_bit(value: Array) -> Array:
    """bfind: index of the highest bit that differs from the sign, 0xffffffff when there is none."""
    if value.dtype.kind == "i":
        value = np.where(value < 0, ~value, value).view(UNSIGNED[value.dtype.itemsize])
    return bit_length(value) - U32.type(1)


def reverse_bits(value: Array) -> Array:
    data = np.ascontiguousarray(value)
    size = data.dtype.itemsize
    bits = np.unpackbits(data.view(U8).reshape(-1, size), axis=1)
    # Bytes are little endian, bits within a byte big endian: reversing the bytes' order
    # aligns the two.
    flipped = np.packbits(bits.reshape(-1, size, 8)[:, ::-1, ::-1].reshape(-1, size * 8), axis=1)
    return np.ascontiguousarray(flipped).view(data.dtype).reshape(-1)


def permute_bytes(low: Array, high: Array, selector: Array) -> Array:
    """Permute bytes: prmt in its default mode."""
    pool = _join(low, high)
    result = np.zeros(np.broadcast(low, high, selector).shape, U32)
    for position in range(4):
        choice = (selector >> (4 * position)) & 15
        byte = (pool >> ((choice & 7).astype(U64) * 8)) & 255
        sign = np.where(byte & 128, U64.type(255), U64.type(0))
        byte = np.where(choice & 8, sign, byte)
        result |= byte.astype(U32) << (8 * position)
    return result


def lookup_logic(a: Array, b: Array, c: Array, table: int) -> Array:
    """lop3: any bitwise function of three words, given by its truth table."""
    result = np.zeros(np.broadcast(a, b, c).shape, U32)
    for row in range(8):
        if table >> row & 1:
            term = a if row & 4 else ~a
            term = term & (b if row & 2 else ~b)
            result |= term & (c if row & 1 else ~c)
    return result
