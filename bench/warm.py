"""Compile the kernels of all points before anything is timed, in several processes: one after the other takes minutes.

`python -m bench.warm PART PARTS STAGE...` compiles one part.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from .cases import Case, points
from .inputs import build
from .providers import by_name

MOST_PROCESSES = 12


def distinct(stages: Sequence[str]) -> list[Case]:
    """Cases of all kinds that a kernel may be compiled for anew, with a batch of two."""
    found: dict[tuple[object, ...], Case] = {}
    for stage in stages:
        for case in points(stage, quick=False):
            kind = (stage, case.vocab, case.dtype, case.draft, case.logits if stage == "kv" else "")
            found.setdefault(kind, dataclasses.replace(case, batch=2))
    return list(found.values())


def warm(stages: Sequence[str], seconds: float) -> None:
    """Compile for the stages into Triton's cache; what is not done in time is compiled when it is needed."""
    parts = max(1, min(MOST_PROCESSES, (os.cpu_count() or 2) - 2))
    words = [sys.executable, "-m", f"{__package__}.warm"]
    started = time.monotonic()
    running = [
        subprocess.Popen([*words, str(part), str(parts), *stages], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for part in range(parts)
    ]
    for process in running:
        try:
            process.wait(max(0.1, seconds - (time.monotonic() - started)))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    print(f"kernels compiled by {parts} processes in {time.monotonic() - started:.0f} s", flush=True)


def main(part: int, parts: int, stages: Sequence[str]) -> None:
    """Compile one part."""
    provider, device = by_name("triton"), torch.device("cuda")
    for case in distinct(stages)[part::parts]:
        # What cannot be compiled fails, with its reason in a row, where it is measured.
        with contextlib.suppress(Exception):
            provider.make(case.stage, build(case, device)).result()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
