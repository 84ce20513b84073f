"""Global and shared memory of the emulator, with the checks and counts of every access."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .arithmetic import U8, UNSIGNED, Array
from .parse import Instruction, PtxError

if TYPE_CHECKING:
    from .machine import Lanes

SECTOR_BYTES = 32
WARP = 32
# Parameters lie one after the other, whatever their type.
PARAMETER_BYTES = 8
NOBODY = -1
SEVERAL = -2


@dataclass
class Traffic:
    """What one launch did to one argument: bytes by lane, sectors and requests by warp."""

    load_bytes: int = 0
    load_sectors: int = 0
    load_requests: int = 0
    store_bytes: int = 0
    store_sectors: int = 0
    store_requests: int = 0
    atomic_operations: int = 0

    @property
    def sector_bytes(self) -> int:
        """Bytes of all sectors that were read or written."""
        return SECTOR_BYTES * (self.load_sectors + self.store_sectors)


def fail(kind: str, message: str, instruction: Instruction) -> None:
    raise PtxError(f"{kind}: {message} at {instruction.where}  [{instruction.text}]")


def count_sectors(addresses: Array, warps: Array) -> tuple[int, int]:
    """Sectors and warps of one access; every lane stays inside one sector."""
    sectors = addresses >> 5
    count = addresses.size
    first_of_warp = np.empty(count, bool)
    first_of_warp[0] = True
    np.not_equal(warps[1:], warps[:-1], out=first_of_warp[1:])
    requests = int(np.count_nonzero(first_of_warp))
    steps = sectors[1:].astype(np.int64) - sectors[:-1].astype(np.int64)
    same_warp = ~first_of_warp[1:]
    if not ((steps < 0) & same_warp).any():
        return requests + int(np.count_nonzero((steps != 0) & same_warp)), requests
    keys = (warps.astype(np.uint64) << np.uint64(48)) | sectors.astype(np.uint64)
    return int(np.unique(keys).size), requests


class Buffer:
    """One tensor's storage. Races are tracked per element of the tensor that brought it."""

    def __init__(self, name: str, base: int, size: int, element_bytes: int):
        self.name = name
        self.base = base
        self.size = size
        self.granule = element_bytes
        self.bytes = np.frombuffer((ctypes.c_uint8 * size).from_address(base), U8)
        self.traffic = Traffic()
        self.valid: Array | None = None
        self._views: dict[tuple[int, int], Array] = {}
        self._pending_reads: list[tuple[Array, Array]] = []
        self._writers: Array | None = None

    def view(self, element_bytes: int, width: int) -> Array:
        """The storage as rows of `width` unsigned integers."""
        key = (element_bytes, width)
        if key not in self._views:
            step = element_bytes * width
            whole = self.bytes[: self.size // step * step].view(UNSIGNED[element_bytes])
            self._views[key] = whole.reshape(-1, width) if width > 1 else whole
        return self._views[key]

    def granules(self, offsets: Array, size: int) -> Array:
        """Indices of the elements that an access of `size` bytes touches, one row a lane."""
        first = offsets // self.granule
        if size <= self.granule:
            return first[:, None]
        return first[:, None] + np.arange(size // self.granule)

    def note_read(self, granules: Array, lanes: Lanes) -> tuple[str, str] | None:
        """Record a read; return the kind and the place of what is wrong with it."""
        if self._writers is None:
            # Most buffers are never written: keep the reads, look at them when a store comes.
            self._pending_reads.append((granules.astype(np.int32), lanes.cta))
            return None
        writer = self._writer_cta[granules]
        cta = lanes.cta[:, None]
        other = (writer != NOBODY) & (writer != cta)
        if other.any():
            return (
                "RACE BETWEEN CTAS",
                f"element {granules[other][0]}, stored by CTA {writer[other][0]}",
            )
        hazard = (writer == cta) & (self._writer_epoch[granules] == lanes.epoch[:, None])
        hazard &= self._writers[granules] != lanes.thread[:, None]
        if hazard.any():
            thread = self._writers[granules][hazard][0]
            return (
                "HAZARD IN THE CTA",
                f"element {granules[hazard][0]}, stored by thread {thread}, no barrier between",
            )
        self._merge_readers(granules, lanes.cta)
        return None

    def note_write(self, granules: Array, lanes: Lanes) -> str | None:
        """Record a store; return what is wrong with it."""
        if self._writers is None:
            self._start_tracking()
        cta = lanes.cta[:, None]
        writer = self._writer_cta[granules]
        other = (writer != NOBODY) & (writer != cta)
        if other.any():
            return f"element {granules[other][0]}, stored by CTA {writer[other][0]} too"
        reader = self._reader_cta[granules]
        other = (reader != NOBODY) & (reader != cta)
        if other.any():
            return f"element {granules[other][0]}, read by another CTA"
        self._writer_cta[granules] = cta
        self._writers[granules] = lanes.thread[:, None]
        self._writer_epoch[granules] = lanes.epoch[:, None]
        # CTAs of one batch run side by side: who lost the element to another CTA of this
        # very store?
        lost = self._writer_cta[granules] != cta
        if lost.any():
            return f"element {granules[lost][0]}, stored by two CTAs"
        return None

    def _start_tracking(self) -> None:
        count = self.size // self.granule + 1
        self._writers = np.full(count, NOBODY, np.int32)
        self._writer_cta = np.full(count, NOBODY, np.int32)
        self._writer_epoch = np.full(count, NOBODY, np.int32)
        self._reader_cta = np.full(count, NOBODY, np.int32)
        for granules, cta in self._pending_reads:
            self._merge_readers(granules, cta)
        self._pending_reads.clear()

    def _merge_readers(self, granules: Array, cta: Array) -> None:
        cta = np.broadcast_to(cta[:, None], granules.shape)
        known = self._reader_cta[granules]
        self._reader_cta[granules] = np.where((known == NOBODY) | (known == cta), cta, SEVERAL)
        # Two CTAs that read one element in one instruction: the last one won, so say that
        # there were several.
        lost = self._reader_cta[granules] != cta
        self._reader_cta[granules[lost]] = SEVERAL


class GlobalMemory:
    """The buffers of one launch."""

    def __init__(self, buffers: list[Buffer], synchronised: frozenset[str] = frozenset(), check: bool = True):
        self.buffers = sorted(buffers, key=lambda buffer: buffer.base)
        self.bases = [buffer.base for buffer in self.buffers]
        self.synchronised = synchronised
        self.check = check

    def locate(self, addresses: Array, size: int, lanes: Lanes, instruction: Instruction) -> Iterator[tuple]:
        """Yield (buffer, byte offsets, positions among the lanes or None for all), checked."""
        low = int(addresses.min())
        high = int(addresses.max())
        at = bisect_right(self.bases, low) - 1
        if at >= 0 and high + size <= self.bases[at] + self.buffers[at].size:
            yield self._checked(self.buffers[at], addresses, size, None, lanes, instruction)
            return
        which = np.searchsorted(np.array(self.bases, np.uint64), addresses, side="right") - 1
        for at in np.unique(which):
            chosen = np.flatnonzero(which == at)
            if at < 0:
                fail(
                    "OUT OF BOUNDS",
                    f"address {int(addresses[chosen[0]]):#x}, below every tensor",
                    instruction,
                )
            yield self._checked(self.buffers[at], addresses[chosen], size, chosen, lanes, instruction)

    def _checked(
        self,
        buffer: Buffer,
        addresses: Array,
        size: int,
        chosen: Array | None,
        lanes: Lanes,
        instruction,
    ):
        offsets = (addresses - np.uint64(buffer.base)).view(np.int64)
        beyond = offsets + size > buffer.size
        if beyond.any():
            first = int(np.flatnonzero(beyond)[0])
            lane = first if chosen is None else int(chosen[first])
            where = f"'{buffer.name}' byte {int(offsets[first])} of {buffer.size}"
            who = f"thread {int(lanes.thread[lane])} of CTA {int(lanes.cta[lane])}"
            fail("OUT OF BOUNDS", f"{where}, {who}", instruction)
        if int(np.bitwise_or.reduce(addresses)) & (size - 1):
            fail("MISALIGNED", f"'{buffer.name}', an access of {size} bytes", instruction)
        if buffer.valid is not None and self.check:
            granules = buffer.granules(offsets, size)
            padding = ~buffer.valid[granules]
            if padding.any():
                element = int(granules[padding][0])
                fail(
                    "OUT OF BOUNDS",
                    f"padding of a view of '{buffer.name}', element {element}",
                    instruction,
                )
        return buffer, offsets, chosen

    def load(self, addresses: Array, element_bytes: int, width: int, lanes: Lanes, instruction) -> list[Array]:
        """`width` unsigned integers for every lane."""
        size = element_bytes * width
        found = None
        for buffer, offsets, chosen in self.locate(addresses, size, lanes, instruction):
            part = lanes if chosen is None else lanes.take(chosen)
            traffic = buffer.traffic
            sectors, requests = count_sectors(addresses if chosen is None else addresses[chosen], part.warp)
            traffic.load_bytes += size * offsets.size
            traffic.load_sectors += sectors
            traffic.load_requests += requests
            if self.check and buffer.name not in self.synchronised:
                problem = buffer.note_read(buffer.granules(offsets, size), part)
                if problem:
                    fail(problem[0], f"load of '{buffer.name}' {problem[1]}", instruction)
            values = buffer.view(element_bytes, width)[offsets // size]
            if chosen is None:
                found = values
            else:
                if found is None:
                    found = np.zeros((addresses.size,) + values.shape[1:], values.dtype)
                found[chosen] = values
        return list(np.ascontiguousarray(found.T)) if width > 1 else [found]

    def store(self, addresses: Array, values: list[Array], lanes: Lanes, instruction: Instruction) -> None:
        """Write one unsigned integer of each array for every lane."""
        element_bytes = values[0].dtype.itemsize
        width = len(values)
        size = element_bytes * width
        data = np.stack(values, axis=1) if width > 1 else values[0]
        for buffer, offsets, chosen in self.locate(addresses, size, lanes, instruction):
            part = lanes if chosen is None else lanes.take(chosen)
            rows = data if chosen is None else data[chosen]
            sectors, requests = count_sectors(addresses if chosen is None else addresses[chosen], part.warp)
            traffic = buffer.traffic
            traffic.store_bytes += size * offsets.size
            traffic.store_sectors += sectors
            traffic.store_requests += requests
            checked = self.check and buffer.name not in self.synchronised
            if checked:
                problem = buffer.note_write(buffer.granules(offsets, size), part)
                if problem:
                    fail("RACE BETWEEN CTAS", f"store to '{buffer.name}' {problem}", instruction)
            view = buffer.view(element_bytes, width)
            view[offsets // size] = rows
            if checked and (view[offsets // size] != rows).any():
                fail(
                    "RACE IN THE CTA",
                    f"two threads store different values to '{buffer.name}'",
                    instruction,
                )


class SharedMemory:
    """Shared memory of the CTAs that run side by side, with races between the warps of a CTA."""

    def __init__(self, slots: int, size: int, granule: int, check: bool = True):
        self.size = size
        self.stride = (size + 15) // 16 * 16 + 16
        self.granule = granule
        self.check = check
        # A pattern that is neither 0 nor a plausible value: shared memory is not initialised.
        self.bytes = np.full(slots * self.stride, 0xAB, U8)
        count = self.bytes.size // granule
        self._writer = np.full(count, NOBODY, np.int32)
        self._written = np.full(count, NOBODY, np.int32)
        self._reader = np.full(count, NOBODY, np.int32)
        self._read = np.full(count, NOBODY, np.int32)

    def _offsets(self, addresses: Array, size: int, lanes: Lanes, instruction: Instruction) -> Array:
        offsets = addresses.view(np.int64)
        if int(offsets.min()) < 0 or int(offsets.max()) + size > self.size:
            fail(
                "SHARED OUT OF BOUNDS",
                f"byte {int(offsets.max())} + {size} of {self.size}",
                instruction,
            )
        if int(np.bitwise_or.reduce(offsets)) & (size - 1):
            fail("MISALIGNED", f"shared memory, an access of {size} bytes", instruction)
        return offsets + lanes.slot * self.stride

    def _granules(self, offsets: Array, size: int) -> Array:
        first = offsets // self.granule
        return first[:, None] + np.arange(max(1, size // self.granule))

    def load(self, addresses: Array, element_bytes: int, width: int, lanes: Lanes, instruction) -> list[Array]:
        size = element_bytes * width
        offsets = self._offsets(addresses, size, lanes, instruction)
        if self.check:
            granules = self._granules(offsets, size)
            warp = lanes.warp[:, None]
            epoch = lanes.epoch[:, None]
            bad = (self._written[granules] == epoch) & (self._writer[granules] != warp)
            if bad.any():
                byte = int(granules[bad][0]) * self.granule % self.stride
                message = f"a load of byte {byte} by another warp than"
                fail("SHARED RACE", f"{message} stored it, with no barrier between", instruction)
            known = (self._read[granules] == epoch) & (self._reader[granules] != warp)
            self._reader[granules] = np.where(known, SEVERAL, warp)
            self._read[granules] = epoch
        values = self._view(element_bytes, width)[offsets // size]
        return list(np.ascontiguousarray(values.T)) if width > 1 else [values]

    def store(self, addresses: Array, values: list[Array], lanes: Lanes, instruction: Instruction) -> None:
        element_bytes = values[0].dtype.itemsize
        width = len(values)
        size = element_bytes * width
        offsets = self._offsets(addresses, size, lanes, instruction)
        if self.check:
            granules = self._granules(offsets, size)
            warp = lanes.warp[:, None]
            epoch = lanes.epoch[:, None]
            bad = (self._written[granules] == epoch) & (self._writer[granules] != warp)
            bad |= (self._read[granules] == epoch) & (self._reader[granules] != warp)
            if bad.any():
                byte = int(granules[bad][0]) * self.granule % self.stride
                message = f"a store to byte {byte} that another warp"
                fail("SHARED RACE", f"{message} read or stored, with no barrier between", instruction)
            self._writer[granules] = warp
            self._written[granules] = epoch
        self._view(element_bytes, width)[offsets // size] = np.stack(values, axis=1) if width > 1 else values[0]

    def atomic_view(self, addresses: Array, element_bytes: int, lanes: Lanes, instruction) -> tuple[Array, Array]:
        offsets = self._offsets(addresses, element_bytes, lanes, instruction)
        return self._view(element_bytes, 1), offsets // element_bytes

    def _view(self, element_bytes: int, width: int) -> Array:
        step = element_bytes * width
        whole = self.bytes[: self.bytes.size // step * step].view(UNSIGNED[element_bytes])
        return whole.reshape(-1, width) if width > 1 else whole
