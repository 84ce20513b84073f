"""One CSV row for every measured point, and for every point that was not measured, with the reason."""

from __future__ import annotations

import csv
import dataclasses
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from .cases import Case

# Where a value comes from. Nothing but the first two is a time.
EVENTS = "CUDA events"
WALL = "wall clock, CPU"
WALL_GPU = "wall clock, host and GPU"
CALLS = "counted calls of the models; host reads: operations a GPU's host waits for"
COUNTED = "counted, PTX sm_90 on a CPU"
MODEL = "model, lower bound from counts; not a time"
SOURCE = "from the source, not measured"


@dataclass(frozen=True)
class Row:
    """A point. `what` is time, count, bound, traffic or bandwidth; `status` is ok, or why there is no value.

    Under kv `logits` is the operation. `ratio` is the time of plain PyTorch at the same point over this time.
    """

    stage: str
    provider: str
    V: int = 0
    B: int = 0
    K: int = 0
    dtype: str = ""
    logits: str = ""
    filter: str = ""
    draft: str = ""
    what: str = "time"
    metric: str = ""
    value: float | None = None
    unit: str = ""
    p20: float | None = None
    p80: float | None = None
    ratio: float | None = None
    status: str = "ok"
    note: str = ""
    origin: str = ""
    device: str = ""
    torch: str = ""
    triton: str = ""
    python: str = ""
    commit: str = ""
    date: str = ""
    machine: str = ""
    command: str = ""

    @classmethod
    def of(cls, case: Case, provider: str, **fields: Any) -> Row:
        """A row of a case."""
        point: dict[str, Any] = {
            "V": case.vocab,
            "B": case.batch,
            "K": case.drafts,
            "dtype": case.dtype,
            "logits": case.logits,
            "filter": "" if case.stage in ("kv", "penalties") else case.filter,
            "draft": case.draft,
        }
        return cls(case.stage, provider, **{**point, **fields})


FIELDS = tuple(field.name for field in dataclasses.fields(Row))
_WHOLE = ("V", "B", "K")
_NUMBERS = ("value", "p20", "p80", "ratio")


def _git(*arguments: str) -> str | None:
    root = Path(__file__).resolve().parent
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit() -> str:
    """The commit that runs, with a plus where files of it have been changed; "unknown" outside of git."""
    # Left by gpu.sh, which runs a copy outside of the repository.
    left = Path(__file__).resolve().parent / "COMMIT"
    if left.exists():
        return left.read_text().strip()
    head = _git("rev-parse", "--short=10", "HEAD")
    if not head:
        return "unknown"
    return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")


def processor() -> str:
    """Name of the CPU, and how many cores this process may use."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.machine()
    return f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} thread(s)"


def versions(device: torch.device, command: str) -> dict[str, Any]:
    """What every row of a run says of where it ran."""
    try:
        from triton import __version__ as triton_version
    except ImportError:
        triton_version = "none"
    is_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_gpu else "cpu",
        "torch": torch.__version__,
        "triton": triton_version,
        "python": platform.python_version(),
        "commit": commit(),
        "date": date.today().isoformat(),
        "machine": f"{torch.cuda.get_device_name(device)}; {processor()}" if is_gpu else processor(),
        "command": command,
    }


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def append(path: Path, rows: Iterable[Row]) -> None:
    """Add rows to a file, with the head where it is new; what has been written stays whatever comes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    if not is_new and path.read_text().partition("\n")[0] != ",".join(FIELDS):
        raise ValueError(f"{path.name} has other columns than this version writes: choose another file")
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(FIELDS)
        for row in rows:
            writer.writerow([_text(getattr(row, name)) for name in FIELDS])


def read(path: Path) -> list[Row]:
    """The rows of a file."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != FIELDS:
            raise ValueError(f"{path.name}: columns must be {', '.join(FIELDS)}")
        return [_parsed(line) for line in reader]


def _parsed(line: dict[str, str]) -> Row:
    fields: dict[str, Any] = dict(line)
    for name in _WHOLE:
        fields[name] = int(line[name])
    for name in _NUMBERS:
        fields[name] = float(line[name]) if line[name] else None
    return Row(**fields)
