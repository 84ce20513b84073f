"""`python -m bench.plot`: plots of the rows (PNG), and the README's tables.

Exit status: 0; 1 where `--check` finds a README that does not say what the rows say; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from .rows import Row, read
from .tables import NAMES, filled, label, latest, point

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"


def main(argv: Sequence[str] | None = None) -> int:
    """Draw, write or check; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.plot", description="Plots and tables of the rows.")
    parser.add_argument("csv", nargs="*", type=Path, help="files of rows (those of bench/results but local ones)")
    parser.add_argument("--out", type=Path, default=RESULTS / "plots", help="folder of the plots (bench/results/plots)")
    parser.add_argument("--readme", action="store_true", help="write the tables between the README's marks")
    parser.add_argument("--check", action="store_true", help="fail if the README's tables are not those of the rows")
    parser.add_argument("--readme-file", type=Path, default=HERE.parent / "README.md", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    try:
        rows = [row for path in args.csv or committed() for row in read(path)]
        if args.readme or args.check:
            return tables(args.readme_file, rows, write=args.readme)
        for path in plots(latest(rows), args.out):
            print(path)
    except (ValueError, OSError, ImportError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    return 0


def committed() -> list[Path]:
    """The files of rows that the README is made of."""
    return sorted(path for path in RESULTS.glob("*.csv") if not path.name.startswith("local-"))


def tables(path: Path, rows: Iterable[Row], write: bool) -> int:
    """Write the tables into a README, or say whether it has them."""
    before = path.read_text()
    after = filled(before, rows)
    if write:
        path.write_text(after)
        return 0
    if before != after:
        print(f"{path.name} does not say what the rows say: run python -m bench.plot --readme", file=sys.stderr)
    return int(before != after)


def plots(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Every plot that the rows have values for."""
    figures = import_module("matplotlib.figure")
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, draw in (("latency", _latency), ("ratio", _ratio), ("bandwidth", _bandwidth), ("bytes", _bytes)):
        figure = figures.Figure(figsize=(11, 6), layout="constrained")
        if draw(figure, [row for row in rows if row.value is not None]):
            drawn.append(folder / f"{name}.png")
            figure.savefig(drawn[-1], dpi=120)
    return drawn


def _times(rows: Sequence[Row]) -> list[Row]:
    """Times on a GPU in a graph; where there are none, on a CPU."""
    timed = [row for row in rows if row.what == "time"]
    return [row for row in timed if row.metric == "graph"] or [row for row in timed if row.metric == "wall"]


def _curves(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Points that differ in B alone, by what they share."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        found.setdefault((row.device, *point(row)[:2], *point(row)[3:]), []).append(row)
    return {_title(same[0]): same for same in found.values() if len({row.B for row in same}) > 1}


def _title(row: Row) -> str:
    return label(row).replace(f"B = {row.B}, ", "").replace(f", B = {row.B}", "") + f" ({row.metric}, {row.device})"


def _latency(figure: Any, rows: Sequence[Row]) -> bool:
    """Microseconds over B, with the quantiles."""
    curves = list(_curves(_times(rows)).items())[:6]
    for number, (title, same) in enumerate(curves):
        axes = figure.add_subplot(2, 3, number + 1)
        for name in dict.fromkeys(row.provider for row in same):
            line = sorted((row for row in same if row.provider == name), key=lambda row: row.B)
            at = [row.B for row in line]
            axes.plot(at, [row.value for row in line], marker="o", label=NAMES[name])
            axes.fill_between(at, [row.p20 for row in line], [row.p80 for row in line], alpha=0.2)
        batches = sorted({row.B for row in same})
        axes.set(xscale="log", yscale="log", xlabel="B", ylabel="us")
        axes.set_xticks(batches, [str(b) for b in batches])
        axes.minorticks_off()
        axes.set_title(title.replace("; ", ";\n"), fontsize=8)
        axes.legend(fontsize=6)
    return bool(curves)


def _bars(figure: Any, lines: dict[str, dict[str, float]], words: str, mark: float | None = None) -> bool:
    """Horizontal bars: line -> provider -> value."""
    if not lines:
        return False
    names = list(dict.fromkeys(name for values in lines.values() for name in values))
    figure.set_size_inches(11, 1 + 0.18 * len(lines) * (len(names) + 1))
    axes, height = figure.add_subplot(), 0.8 / len(names)
    for number, name in enumerate(names):
        at = [i + number * height for i, values in enumerate(lines.values()) if name in values]
        axes.barh(at, [values[name] for values in lines.values() if name in values], height, label=NAMES[name])
    axes.set_yticks([i + 0.4 - height / 2 for i in range(len(lines))], list(lines), fontsize=7)
    axes.set_ylim(len(lines), -0.5)
    axes.set_xlabel(words)
    if mark is not None:
        axes.axvline(mark, color="black", linewidth=0.8)
    axes.legend(fontsize=8)
    return True


def _lines(rows: Iterable[tuple[Row, float]]) -> dict[str, dict[str, float]]:
    lines: dict[str, dict[str, float]] = {}
    for row, value in rows:
        lines.setdefault(label(row), {})[row.provider] = value
    return lines


def _ratio(figure: Any, rows: Sequence[Row]) -> bool:
    times = _times(rows)
    words = f"times as fast as plain PyTorch ({', '.join(dict.fromkeys(row.device for row in times))})"
    return _bars(figure, _lines((row, row.ratio) for row in times if row.ratio), words, 1.0)


def _bandwidth(figure: Any, rows: Sequence[Row]) -> bool:
    """Per cent of a copy's bandwidth over the fewest bytes, on GPUs."""
    found = [row for row in rows if row.what == "bandwidth" and row.metric == "graph"]
    words = "per cent of the bandwidth of a copy, over the logits once"
    return _bars(figure, _lines((row, row.value or 0.0) for row in found), words, 70.0)


def _bytes(figure: Any, rows: Sequence[Row]) -> bool:
    """Bytes moved for each byte of logits: ours counted, others' from their sources."""
    found = [row for row in rows if row.what == "traffic" and row.metric == "bytes"]
    words = "bytes for each byte of logits: ours counted (PTX sm_90 on a CPU), others' from their sources, at least"
    return _bars(figure, _lines((row, row.value or 0.0) for row in found), words)


if __name__ == "__main__":
    sys.exit(main())
