"""One run: what is asked of it, how much time is left, and the rows it leaves."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .providers import Provider
from .rows import Row, append


@dataclass
class State:
    """What a run has at hand.

    Attributes
    ----------
    providers : those that are measured
    quick : few small points
    path : the file that rows are added to, None for no file
    stamp : what every row says of where it ran
    most_points : of a stage, at most
    deadline : by `time.monotonic`
    wrong : what failed of ours
    told : which absences have been said
    """

    device: torch.device
    providers: Sequence[Provider]
    quick: bool
    path: Path | None
    stamp: dict[str, Any]
    most_points: int
    deadline: float
    rows: list[Row] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    told: set[tuple[str, str]] = field(default_factory=set)

    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()

    def leave(self, rows: Iterable[Row]) -> list[Row]:
        """Keep rows and write them at once."""
        stamped = [replace(row, **self.stamp) for row in rows]
        self.rows += stamped
        if self.path is not None:
            append(self.path, stamped)
        return stamped

    def say(self, text: str) -> None:
        """One line of progress."""
        print(text, flush=True)
