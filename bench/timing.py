"""How long calls take, all of a point side by side: each repeat runs every provider once, on the next of the buffers.

On a GPU: CUDA events around the call, the L2 cache flushed before it; eager, and captured in a CUDA graph. On a CPU:
the wall clock.
"""

from __future__ import annotations

import signal
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

import torch

from .call import Call

FEWEST_REPEATS, MOST_REPEATS = 7, 60
COPY_BYTES = 1 << 30


class Timing(NamedTuple):
    """Microseconds of one call: the median, and the 20 and 80 per cent quantiles."""

    median: float
    p20: float
    p80: float
    repeats: int

    @classmethod
    def of(cls, microseconds: list[float]) -> Timing:
        """From single measurements."""
        fifths = statistics.quantiles(microseconds, n=5, method="inclusive")
        return cls(statistics.median(microseconds), fifths[0], fifths[3], len(microseconds))


class TookTooLongError(Exception):
    """A provider exceeded its limit."""


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raises `TookTooLongError` in what takes longer, even where it waits for a compiler; in the main thread only."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TookTooLongError(f"took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interleaved(calls: dict[str, list[Call]], device: torch.device, seconds: float) -> dict[str, Timing]:
    """Time calls that have run before: provider -> one call a buffer."""
    once = _GpuClock(device) if device.type == "cuda" else _wall
    found: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    for repeat in range(MOST_REPEATS):
        if repeat >= FEWEST_REPEATS and time.perf_counter() > end:
            break
        for name, buffers in calls.items():
            found[name].append(once(buffers[repeat % len(buffers)]))
    return {name: Timing.of(each) for name, each in found.items()}


def _wall(call: Call) -> float:
    if call.reset:
        call.reset()
    start = time.perf_counter_ns()
    call.run()
    return (time.perf_counter_ns() - start) / 1e3


class _GpuClock:
    """Microseconds between two events around a call, behind a flush of the L2 cache."""

    def __init__(self, device: torch.device) -> None:
        l2: int = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20)
        self.flushed = torch.empty(max(4 * l2, 1 << 27), dtype=torch.uint8, device=device)
        self.start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def __call__(self, call: Call) -> float:
        if call.reset:
            call.reset()
        # The host is ahead of the device while it flushes, so what is timed is the device's work, gaps included.
        self.flushed.fill_(1)
        self.start.record()
        call.run()
        self.end.record()
        self.end.synchronize()
        return float(self.start.elapsed_time(self.end)) * 1e3


def captured(call: Call) -> Call:
    """The same work as a CUDA graph; raises where a call cannot be captured, because the host looks at a result."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            if call.reset:
                call.reset()
            call.run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run()
    return Call(graph.replay, call.reset)


def copy_bandwidth(device: torch.device, repeats: int = 20) -> float:
    """Bytes a second, read and written, that a plain copy of a gibibyte reaches."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    clock = _GpuClock(device)
    call = Call(lambda: target.copy_(source))
    call.run()
    microseconds = statistics.median(clock(call) for _ in range(repeats))
    return 2 * COPY_BYTES / (microseconds * 1e-6)
