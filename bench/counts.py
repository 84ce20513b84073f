"""What the kernels do, counted without a GPU: the PTX that Triton compiles for sm_90 runs on the CPU (tests/gpuless).

Bytes of each argument, 32-byte sectors, launches, instructions; and a lower bound of the time out of these, which is a
model. Rows are independent, so the counts of a few rows are those of many, a row each.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .cases import REAL_VOCAB, Case, checkout
from .inputs import build
from .providers import by_name
from .rows import COUNTED, MODEL, Row

TARGET = "sm_90"
# Batches that the bounds are given for.
BOUND_BATCH = 64
SECTOR = 32
BOUND_GPUS = ("H100", "H200")


def missing() -> str | None:
    """Why nothing can be counted here, None where it can."""
    if checkout() is None:
        return "counts need tests/gpuless: run from a checkout of the repository"
    try:
        module = gpuless()
    except ImportError as error:
        return f"counts need triton: {error}"
    return "TRITON_INTERPRET is set: nothing is compiled" if module.is_interpreter_process() else None


def gpuless() -> ModuleType:
    """The test harness that runs PTX."""
    root = checkout()
    if root is None:
        raise ImportError("tests/gpuless is not here")
    path = str(root / "tests")
    if path not in sys.path:
        sys.path.append(path)
    return import_module("gpuless")


class _OtherLaunches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts PyTorch's own operations in the kernels' launchers; views and allocations launch nothing."""

    FREE = frozenset(
        (
            *("empty", "empty_like", "empty_strided", "new_empty", "view", "_unsafe_view", "_reshape_alias", "expand"),
            *("as_strided", "slice", "select", "unsqueeze", "squeeze", "transpose", "permute", "detach", "alias"),
            *("unbind", "split"),
        )
    )

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count it where it would be a launch on a GPU."""
        frame: FrameType | None = sys._getframe(1)
        # The public functions look at values on the CPU only; what runs the PTX is no part of the package.
        while frame is not None and not {"triton_specdec", "gpuless"} & set(Path(frame.f_code.co_filename).parts):
            frame = frame.f_back
        parts = Path(frame.f_code.co_filename).parts if frame is not None else ()
        if "kernels" in parts and func.overloadpacket.__name__ not in self.FREE:
            self.number += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Counted:
    """What one call of a stage did."""

    launches: list[Any]
    others: int
    rows: int
    logits_bytes: int

    def total(self, name: str) -> int:
        """Sum of a field of all arguments' traffic."""
        return sum(getattr(t, name) for launch in self.launches for t in launch.counts.traffic.values())

    @property
    def moved(self) -> int:
        """Bytes read and written; a value that a whole warp reads at once counts as its sector, not 32 times."""
        each = [t for launch in self.launches for t in launch.counts.traffic.values()]
        return sum(min(t.load_bytes, SECTOR * t.load_sectors) + t.store_bytes for t in each)

    def dense_tensors(self, rows: int, vocab: int) -> int:
        """Arguments of which at least a byte for each of [rows, V] was written."""
        each = [t for launch in self.launches for t in launch.counts.traffic.values()]
        return sum(t.store_bytes >= rows * vocab for t in each)

    @property
    def logits_read(self) -> int:
        """Bytes read of the target's logits, and of the draft's in the launches that look at both."""
        logits = 0
        for launch in self.launches:
            for name, traffic in launch.counts.traffic.items():
                if name.startswith(("logits_ptr", "target[0]", "draft[0]")):
                    logits += traffic.load_bytes
        return logits

    @property
    def instructions(self) -> int:
        """Instructions of all threads."""
        return 32 * sum(launch.counts.warp_instructions for launch in self.launches)


def count(case: Case) -> Counted:
    """Run a case's kernels as PTX."""
    module = gpuless()
    given = build(case, torch.device("cpu"))
    with module.device(TARGET, check=False) as gpu, warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        call = by_name("triton").make(case.stage, given)
        # What drawing the drafts has launched is not the stage's.
        before = len(gpu.launches)
        with _OtherLaunches() as others:
            call.run()
    return Counted(gpu.launches[before:], others.number, case.rows, case.logits_bytes)


def points(quick: bool) -> list[Case]:
    """What is counted, the most important first: few rows, of the size of a real vocabulary."""
    cases = [Case("filter", batch=2, filter=name) for name in ("k=20 p=.95", "none", "p=.9", "k=50")]
    cases += [Case("sample", batch=2, filter=name) for name in ("k=20 p=.95", "none")]
    cases += [Case("verify", batch=2, drafts=4, filter=name, draft="model") for name in ("k=20 p=.95", "none")]
    cases += [Case("kv", 0, 2, 4, logits=name) for name in ("truncate", "pages")]
    if quick:
        return cases
    cases += [Case("filter", REAL_VOCAB, 24, logits="real", filter=n) for n in ("none", "k=50", "k=20 p=.95", "p=.9")]
    cases += [Case("filter", batch=6, filter="mixed"), Case("filter", batch=2, filter="min-p=.05")]
    cases += [Case("filter", batch=2, filter="p=.9", logits=name) for name in ("normal 1", "gumbel", "flat", "tied")]
    cases += [Case("filter", vocab, 2, filter="k=20 p=.95") for vocab in (32000, 50257, 128256, 262144)]
    cases += [Case("filter", batch=2, dtype=dtype, filter="k=20 p=.95") for dtype in ("fp16", "fp32")]
    cases += [Case("verify", batch=2, drafts=k, filter="k=20 p=.95", draft="model") for k in (1, 3, 8)]
    cases += [Case("verify", batch=2, drafts=4, filter="k=20 p=.95", draft="one-hot")]
    cases += [Case("penalties", batch=1, drafts=4), Case("kv", 0, 2, 4, logits="compact")]
    return [*cases, Case("kv", 0, 1, 4, logits="scrub")]


def rows_of(case: Case, counted: Counted) -> Iterator[Row]:
    """The rows of one counted case."""

    def row(metric: str, value: float, unit: str, **more: object) -> Row:
        fields: dict[str, object] = {"what": "count", "origin": COUNTED, **more}
        return Row.of(case, "triton", metric=metric, value=float(value), unit=unit, **fields)

    note = f"{len(counted.launches)} kernels, {counted.others} operations of PyTorch"
    yield row("launches", len(counted.launches) + counted.others, "launches", note=note)
    loads, stores = counted.total("load_bytes"), counted.total("store_bytes")
    if counted.logits_bytes:
        yield row("logits read", counted.logits_read / counted.logits_bytes, "bytes per byte of logits")
        yield row("moved", counted.moved / counted.logits_bytes, "bytes per byte of logits")
        yield row("written", stores / counted.logits_bytes, "bytes per byte of logits")
        yield row("instructions", counted.instructions / (case.rows * case.vocab), "instructions per logit")
    else:
        yield row("read", loads / case.batch, "bytes per request")
        yield row("written", stores / case.batch, "bytes per request")
    for name, (read, written) in _arguments(counted).items():
        yield row(
            f"bytes of {name}", (read + written) / case.rows, "bytes per row", note=f"{read} read, {written} written"
        )
    for gpu in BOUND_GPUS:
        many = max(BOUND_BATCH, case.batch)
        at = replace(case, batch=many)
        bound = sum(_bound(launch, many / case.batch, gpu) for launch in counted.launches)
        text = f"counted at B = {case.batch}, a row each"
        fields = {"what": "bound", "unit": "us", "origin": MODEL, "note": text}
        yield Row.of(at, "triton", metric=f"bound {gpu}", value=bound, **fields)


def _arguments(counted: Counted) -> dict[str, tuple[int, int]]:
    """Bytes read and written of each argument that moves at least a hundredth of all."""
    found: dict[str, tuple[int, int]] = {}
    for launch in counted.launches:
        for name, traffic in launch.counts.traffic.items():
            key = f"{launch.name.strip('_')} {name.split('|')[0]}"
            read, written = found.get(key, (0, 0))
            found[key] = read + traffic.load_bytes, written + traffic.store_bytes
    least = sum(map(sum, found.values())) / 100
    return {name: both for name, both in found.items() if sum(both) >= max(least, 1)}


def _bound(launch: Any, times: float, gpu: str) -> float:
    """Microseconds that a launch with so many times the rows needs at least."""
    counts = launch.counts
    traffic = {name: _scaled(t, times) for name, t in counts.traffic.items()}
    opcodes = type(counts.instructions)({name: round(n * times) for name, n in counts.instructions.items()})
    grid = (round(launch.grid[0] * times), *launch.grid[1:])
    many = replace(launch, grid=grid, counts=replace(counts, instructions=opcodes, traffic=traffic))
    return float(gpuless().lower_bound(many, gpu).us)


def _scaled(traffic: Any, times: float) -> Any:
    return type(traffic)(**{name: round(value * times) for name, value in vars(traffic).items()})
