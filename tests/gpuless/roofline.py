"""A lower bound of the time of one launch, from what ran. A model, not a measurement.

It knows memory bandwidth, instruction issue and the special function units, and that a grid smaller
than the GPU leaves part of it idle. It knows nothing of latency, caches or how ptxas schedules, so
real launches take longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .driver import Launch

WARP = 32
SCHEDULERS_PER_SM = 4
SPECIAL_LANES_PER_CLOCK = 16
SPECIAL_OPCODES = ("ex2", "lg2", "rcp", "sqrt", "rsqrt", "sin", "cos", "tanh")


@dataclass(frozen=True)
class Gpu:
    """Peak rates of a GPU."""

    sms: int
    clock_hz: float
    memory_bytes_per_s: float
    l2_bytes_per_clock_per_sm: int = 64


GPUS = {
    "A100": Gpu(108, 1.41e9, 2.04e12),
    "H100": Gpu(132, 1.755e9, 3.35e12),
    "H200": Gpu(132, 1.755e9, 4.8e12),
    "B200": Gpu(148, 1.85e9, 8.0e12),
}


@dataclass(frozen=True)
class LowerBound:
    """Microseconds that each resource needs at least; `us` is the largest."""

    memory_us: float
    sm_bandwidth_us: float
    issue_us: float
    special_us: float

    @property
    def us(self) -> float:
        return max(self.memory_us, self.sm_bandwidth_us, self.issue_us, self.special_us)

    @property
    def memory_fraction(self) -> float:
        """Share of the peak memory bandwidth that the bound leaves possible."""
        return self.memory_us / self.us if self.us else 0.0


def lower_bound(launch: Launch, gpu: str = "H100") -> LowerBound:
    """Bound a launch that ran in one of the PTX modes."""
    if launch.counts is None:
        raise ValueError("launch: expected one of a mode that runs PTX, such as sm_90")
    rates = GPUS[gpu]
    used_sms = max(1, min(math.prod(launch.grid), rates.sms))
    sector_bytes = launch.counts.sector_bytes
    special = sum(launch.counts.instructions[opcode] for opcode in SPECIAL_OPCODES)
    clocks = used_sms * rates.clock_hz
    return LowerBound(
        memory_us=1e6 * sector_bytes / rates.memory_bytes_per_s,
        sm_bandwidth_us=1e6 * sector_bytes / (clocks * rates.l2_bytes_per_clock_per_sm),
        issue_us=1e6 * launch.counts.warp_instructions / (clocks * SCHEDULERS_PER_SM),
        special_us=1e6 * special * WARP / SPECIAL_LANES_PER_CLOCK / clocks,
    )
