"""What a call of `SpecDecoder.generate` did."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch


@dataclass
class GenerateStats:
    """Counts and seconds of one call. A row-round is one round of one row that was not finished.

    Attributes
    ----------
    rounds : int
        Rounds of the batch: one target forward each.
    row_rounds : int
    drafted, accepted, examined : int
        Drafted tokens; those accepted; those looked at (up to and with the first rejection). What verification
        decided, before stops and max_new_tokens cut a row's last round; so are the lists below.
    emitted : int
        Tokens that came out, the first token of each row (drawn after the prefill) included.
    acceptance_rate : float
        accepted / examined, 0 where nothing was drafted.
    tokens_per_round : float
        Tokens a row-round gave: 1 for plain decoding.
    accepted_per_position : list of int, [K]
        How often the draft at each position stood.
    accepted_histogram : list of int, [K + 1]
        How many row-rounds accepted 0 .. K drafts.
    draft_seconds, target_seconds, verify_seconds, total_seconds : float
        total_seconds holds the prefill and the host's work, too.
    forwards : dict
        Forwards of "target" and "draft", prefill included.
    host_reads : int
        Times the host waited for the device: one for the first tokens, then one a round.
    """

    rounds: int = 0
    row_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    examined: int = 0
    emitted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    accepted_histogram: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    verify_seconds: float = 0.0
    total_seconds: float = 0.0
    forwards: dict[str, int] = field(default_factory=lambda: {"target": 0, "draft": 0})
    host_reads: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over examined drafts."""
        return self.accepted / self.examined if self.examined else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Tokens a row-round gave."""
        return (self.accepted + self.row_rounds) / self.row_rounds if self.row_rounds else 0.0

    def count_row(self, accepted: int, drafted: int) -> None:
        """Count one row-round."""
        self.row_rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.examined += accepted + (accepted < drafted)
        self.accepted_histogram[accepted] += 1
        for i in range(accepted):
            self.accepted_per_position[i] += 1

    def as_dict(self) -> dict[str, Any]:
        """Everything, the ratios too, as plain values."""
        return {**asdict(self), "acceptance_rate": self.acceptance_rate, "tokens_per_round": self.tokens_per_round}


def sum_rounds(calls: Sequence[GenerateStats]) -> GenerateStats:
    """Counts of the rounds of several calls with one K together; seconds and forwards stay with each call."""
    columns = ("rounds", "row_rounds", "drafted", "accepted", "examined", "emitted")
    lists = ("accepted_per_position", "accepted_histogram")
    sums: dict[str, Any] = {name: sum(getattr(call, name) for call in calls) for name in columns}
    for name in lists:
        sums[name] = [sum(counts) for counts in zip(*(getattr(call, name) for call in calls), strict=True)]
    return GenerateStats(**sums)


class Stopwatch:
    """Seconds by part of the loop: the clock on a CPU, events on a GPU (read once, at the end)."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        """Add the time of a block to a part."""
        if self._cuda:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            first.record()
            yield
            last.record()
            self._events.append((part, first, last))
        else:
            start = time.perf_counter()
            yield
            self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - start

    def seconds(self, part: str) -> float:
        """Seconds of a part so far."""
        total = self._seconds.get(part, 0.0)
        for name, first, last in self._events:
            if name == part:
                last.synchronize()
                total += first.elapsed_time(last) / 1e3
        return total
