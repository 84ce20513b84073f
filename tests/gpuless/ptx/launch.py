"""Runs a kernel that Triton compiled for an NVIDIA target on CPU tensors."""

from __future__ import annotations

import ctypes
import struct
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from .arithmetic import to_bf16
from .machine import MAX_LANES, Counts, Machine
from .memory import Buffer, GlobalMemory
from .parse import PtxError, parse

_MACHINES: OrderedDict[str, Machine] = OrderedDict()
_MACHINES_KEPT = 64
_FLOAT_FORMATS = {"fp16": "<e", "fp32": "<f", "fp64": "<d"}


def machine_of(ptx: str) -> Machine:
    """The decoded kernel; the most recent ones are kept."""
    machine = _MACHINES.pop(ptx, None) or Machine(parse(ptx))
    _MACHINES[ptx] = machine
    while len(_MACHINES) > _MACHINES_KEPT:
        _MACHINES.popitem(last=False)
    return machine


def launch(
    compiled: Any,
    grid: tuple[int, int, int],
    arguments: dict[str, Any],
    synchronised: frozenset[str] = frozenset(),
    check: bool = True,
    max_lanes: int = MAX_LANES,
) -> Counts:
    """Run a compiled kernel.

    Parameters
    ----------
    compiled : CompiledKernel
        What Triton's compiler returned.
    grid : three ints
    arguments : values by parameter name, constexprs included
    synchronised : names of arguments whose accesses the kernel orders by itself (atomics): no
    race checks there check : whether to look for races, hazards and view padding max_lanes :
    how many threads run side by side, in whole CTAs
    """
    machine = machine_of(compiled.asm["ptx"])
    signature = compiled.src.signature
    flat = [item for name, type_name in signature.items() for item in _flatten(name, type_name, arguments[name])]
    buffers = list(_buffers(flat, check))
    parameters = [_encode(type_name, value) for _, type_name, value in flat]
    scratch = []
    for size in (compiled.metadata.global_scratch_size, compiled.metadata.profile_scratch_size):
        scratch.append(np.zeros(max(size * grid[0] * grid[1] * grid[2], 1), np.uint8))
    for number, array in enumerate(scratch):
        buffers.append(Buffer(f"scratch{number}", array.ctypes.data, array.size, 1))
        parameters.append(struct.pack("<Q", array.ctypes.data if array.size > 1 else 0))
    kept = [ctypes.create_string_buffer(data) for data in machine.program.constants.values()]
    for name, data in zip(machine.program.constants, kept, strict=True):
        machine.symbols[name] = ctypes.addressof(data)
        buffers.append(Buffer(name, ctypes.addressof(data), len(data), 1))
    memory = GlobalMemory(buffers, frozenset(synchronised), check)
    counts = machine.run(grid, parameters, memory, compiled.metadata.shared, max_lanes)
    names = {name for name, _, _ in flat}
    counts.traffic = {name: traffic for name, traffic in counts.traffic.items() if set(name.split("|")) & names}
    return counts


def _flatten(name: str, type_name: Any, value: Any) -> Iterator[tuple[str, str, Any]]:
    if isinstance(type_name, (tuple, list)):
        for index, (inner_type, inner) in enumerate(zip(type_name, value, strict=True)):
            yield from _flatten(f"{name}[{index}]", inner_type, inner)
    elif type_name.startswith("tensordesc"):
        raise PtxError(f"UNSUPPORTED: '{name}' is a tensor descriptor")
    elif type_name != "constexpr":
        yield name, type_name, value


def _tensor_of(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value
    base = getattr(value, "base", None)
    return base if isinstance(base, torch.Tensor) else None


def _buffers(flat: list[tuple[str, str, Any]], check: bool) -> Iterator[Buffer]:
    """One buffer a storage, named after all arguments that share it."""
    found: dict[int, Buffer] = {}
    for name, _, value in flat:
        tensor = _tensor_of(value)
        if tensor is None or tensor.untyped_storage().nbytes() == 0:
            continue
        base = tensor.untyped_storage().data_ptr()
        size = tensor.untyped_storage().nbytes()
        if base in found:
            found[base].name += "|" + name
            found[base].granule = min(found[base].granule, tensor.element_size())
        else:
            found[base] = Buffer(name, base, size, tensor.element_size())
    for buffer in found.values():
        if check:
            buffer.valid = _valid_elements(buffer, flat)
        yield buffer


def _valid_elements(buffer: Buffer, flat: list[tuple[str, str, Any]]) -> np.ndarray | None:
    """Which granules of a storage belong to a view of it, or None when all do."""
    valid = np.zeros(buffer.size // buffer.granule, bool)
    for _, _, value in flat:
        tensor = _tensor_of(value)
        if tensor is None or tensor.untyped_storage().data_ptr() != buffer.base:
            continue
        if tensor.element_size() != buffer.granule:
            return None
        flags = torch.zeros(valid.size, dtype=torch.bool)
        torch.as_strided(flags, tensor.size(), tensor.stride(), tensor.storage_offset()).fill_(True)
        valid |= flags.numpy()
    return None if valid.all() else valid


def _encode(type_name: str, value: Any) -> bytes:
    if type_name.startswith("*"):
        return struct.pack("<Q", value.data_ptr() if hasattr(value, "data_ptr") else int(value or 0))
    if type_name in _FLOAT_FORMATS:
        return struct.pack(_FLOAT_FORMATS[type_name], float(value))
    if type_name == "bf16":
        return to_bf16(np.array([value], np.float32)).tobytes()
    return struct.pack("<Q", int(value) % (1 << 64))
