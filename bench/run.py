"""`python -m bench.run`: check every provider, time those that are right, leave a row for every point.

Exit status: 0; 1 where something of ours is wrong; 2 for wrong arguments or what is missing.
"""

from __future__ import annotations

import argparse
import faulthandler
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch

from .cases import STAGES, checkout
from .measure import measure
from .providers import PROVIDERS, Provider, by_name
from .rows import Row, versions
from .state import State
from .tables import decode
from .warm import warm

# Seconds of each stage; what one leaves over the next may use.
SECONDS = {
    ("cuda", False): {"filter": 140, "verify": 140, "sample": 110, "kv": 40, "penalties": 30, "decode": 50},
    ("cuda", True): {"filter": 25, "verify": 25, "sample": 20, "kv": 10, "penalties": 10, "decode": 15},
    ("cpu", False): {"counts": 300, "filter": 40, "verify": 25, "sample": 40, "kv": 20, "penalties": 5, "decode": 90},
    ("cpu", True): {"counts": 52, "filter": 9, "verify": 7, "sample": 8, "kv": 9, "penalties": 3, "decode": 6},
}
GRACE_SECONDS = 45


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of a run."""
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="few small points, a minute on two CPU cores (default)")
    size.add_argument("--full", action="store_true", help="all points that fit into nine minutes of a GPU")
    stages = (*STAGES, "counts", "decode")
    parser.add_argument("--stage", action="append", choices=stages, help="this stage only; may be repeated (all)")
    parser.add_argument("--provider", action="append", help="this provider only; may be repeated (all)")
    parser.add_argument(
        "--out", type=Path, metavar="CSV", help="add the rows to this file (bench/results/local-DEVICE.csv)"
    )
    parser.add_argument("--points", type=int, default=10**6, metavar="N", help="of a stage, at most")
    parser.add_argument("--seconds", type=float, metavar="S", help="for all stages together")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="where to measure (a GPU if there is one)")


def main(
    argv: Sequence[str] | None = None, providers: Sequence[Provider] = PROVIDERS, prog: str = "python -m bench.run"
) -> int:
    """Run the benchmark; returns the exit status."""
    words = "Checks every provider, times those that are right side by side, and leaves a row for every point."
    parser = argparse.ArgumentParser(prog=prog, description=words)
    add_options(parser)
    try:
        return run(parser.parse_args(argv), providers)
    except (ValueError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace, providers: Sequence[Provider] = PROVIDERS) -> int:
    """Run with parsed options."""
    kind = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: there is no GPU here")
    if args.provider:
        known = {provider.name for provider in providers}
        providers = [p for p in providers if p.name in args.provider] + [
            by_name(name) for name in args.provider if name not in known
        ]
    if kind == "cpu":
        # One thread each: the reference is NumPy, which takes no more.
        torch.set_num_threads(1)
    budget = {s: t for s, t in SECONDS[kind, not args.full].items() if not args.stage or s in args.stage}
    budget |= {s: 60 for s in args.stage or () if s not in budget}
    total = args.seconds or sum(budget.values())
    device = torch.device(kind)
    path = args.out or default_path(device)
    stamp = versions(device, command_of(args))
    started = time.monotonic()
    state = State(device, providers, not args.full, path, stamp, args.points, started + total)
    try:
        if kind == "cuda":
            # Should a GPU hang, the process ends, and the rows so far are in the file.
            faulthandler.dump_traceback_later(total + GRACE_SECONDS, exit=True, file=sys.__stderr__ or sys.stderr)
            warm([stage for stage in budget if stage in STAGES], min(90.0, total / 4))
        for number, (name, seconds) in enumerate(budget.items()):
            later = sum(list(budget.values())[number + 1 :])
            scale = total / sum(budget.values())
            measure(state, name, max(seconds * scale, state.left() - later * scale))
    finally:
        faulthandler.cancel_dump_traceback_later()
    print(table(state.rows))
    print(f"{len(state.rows)} rows in {time.monotonic() - started:.0f} s, {date.today()}: {path}")
    for text in state.wrong:
        print(f"WRONG: {text}", file=sys.stderr)
    return 1 if state.wrong else 0


def default_path(device: torch.device) -> Path:
    """Where rows go that nobody has asked for elsewhere: no file that is committed, and none of an install."""
    root = checkout()
    name = f"{device_name(device)}.csv"
    return Path.cwd() / f"bench-{name}" if root is None else root / "bench" / "results" / f"local-{name}"


def device_name(device: torch.device) -> str:
    """A name for a file: cpu, h200, ..."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    words = [word for word in name.lower().split() if word not in ("nvidia", "amd")]
    return "-".join(words) or "gpu"


def command_of(args: argparse.Namespace) -> str:
    """What to type for the same run; where the rows go is no part of it."""
    words = ["python -m bench.run", "--full" if args.full else "--quick"]
    words += [f"--stage {stage}" for stage in args.stage or ()]
    words += [f"--provider {shlex.quote(name)}" for name in args.provider or ()]
    return " ".join(words)


def table(rows: Sequence[Row]) -> str:
    """The measured times, one line a point, and how many rows of each other kind there are."""
    timed = [row for row in rows if row.what == "time" and row.value is not None and row.stage != "decode"]
    names = list(dict.fromkeys(row.provider for row in timed))
    lines = [f"{'microseconds (x: plain PyTorch over this)':56}" + "".join(f"{name:>24}" for name in names)]
    for key in dict.fromkeys(_key(row) for row in timed):
        cells = {row.provider: row for row in timed if _key(row) == key}
        lines.append(f"{key:56}" + "".join(f"{_cell(cells.get(name)):>24}" for name in names))
    others: dict[str, int] = {}
    for row in rows:
        name = row.status if row.status != "ok" else row.what
        others[name] = others.get(name, 0) + 1
    loop = [row for row in rows if row.stage == "decode" and row.status == "ok"]
    parts = [*(lines if timed else []), *([decode(loop).split("\n\n")[0]] if loop else [])]
    return "\n".join([*parts, ", ".join(f"{name}: {n}" for name, n in others.items())])


def _key(row: Row) -> str:
    parts = (row.stage, row.metric, f"V={row.V}" if row.V else "", f"B={row.B}", f"K={row.K}" if row.K else "")
    return " ".join(part for part in (*parts, row.dtype, row.logits, row.filter, row.draft) if part)


def _cell(row: Row | None) -> str:
    if row is None or row.value is None:
        return ""
    return f"{row.value:.0f}" + (f" ({row.ratio:.2f}x)" if row.ratio else "")


if __name__ == "__main__":
    sys.exit(main())
