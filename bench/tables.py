"""The README's tables, made of the committed rows: each stands between two marks that name it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from .cases import STAGES
from .rows import EVENTS, Row

NAMES = {
    "triton": "this package",
    "reference": "reference",
    "torch": "PyTorch",
    "torch.compile": "PyTorch, compiled",
    "transformers": "Transformers",
    "flashinfer": "FlashInfer",
    "vllm": "vLLM",
    "sglang": "SGLang",
}
Point = tuple[object, ...]


def latest(rows: Iterable[Row]) -> list[Row]:
    """The last row of every point, provider and metric: a later run replaces an earlier one."""
    found: dict[Point, Row] = {}
    for row in rows:
        found[(row.provider, row.what, row.metric, row.device, point(row))] = row
    return list(found.values())


def point(row: Row) -> Point:
    """What was measured, whoever did it."""
    return (row.stage, row.V, row.B, row.K, row.dtype, row.logits, row.filter, row.draft)


def label(row: Row) -> str:
    """A point in words."""
    shape = ", ".join(f"{name} = {n}" for name, n in (("V", row.V), ("B", row.B), ("K", row.K)) if n)
    words = [row.logits if row.stage == "kv" else f"{row.logits} logits", row.dtype]
    words += [row.filter] if row.filter and row.filter != "none" else []
    words += ["one-hot draft"] if row.draft == "one-hot" else []
    return f"{row.stage}: {shape}; " + ", ".join(words)


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    every = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in every)


def caption(rows: Sequence[Row]) -> str:
    """Where and when the rows of a table came to be."""
    command, last = rows[-1].command, rows[-1]
    ran = f"torch {last.torch}, triton {last.triton}, Python {last.python}"
    return f"`{command}`, {last.date}, commit {last.commit}; {last.machine}; {ran}."


def _chosen(rows: Sequence[Row], **fields: str) -> list[Row]:
    wanted = [row for row in rows if row.value is not None and row.status == "ok"]
    return [row for row in wanted if all(getattr(row, name) == value for name, value in fields.items())]


def _cells(rows: Sequence[Row], shown: Callable[[Row], str]) -> tuple[list[str], list[list[str]]]:
    """One line a point, one column a provider."""
    providers = [name for name in NAMES if any(row.provider == name for row in rows)]
    lines = []
    for key in dict.fromkeys(point(row) for row in rows):
        at = {row.provider: row for row in rows if point(row) == key}
        lines.append([label(next(iter(at.values()))), *(shown(at[n]) if n in at else "" for n in providers)])
    return ["", *(NAMES[name] for name in providers)], lines


def traffic(rows: Sequence[Row]) -> str:
    """What a stage moves: ours counted, others' from their sources."""
    found = _chosen(rows, what="traffic")
    if not found:
        return "No traffic has been counted yet."
    metrics = ("bytes", "launches", "[rows, V] tensors")
    heads = {"sample": "filter and draw", "verify": "verify, K = 4"}
    stages = [stage for stage in heads if any(row.stage == stage for row in found)]
    lines = []
    for name in (n for n in NAMES if any(row.provider == n for row in found)):
        at = {(row.stage, row.metric): row for row in found if row.provider == name}
        cells = [f"{at[s, m].value:.3g}" if (s, m) in at else "-" for s in stages for m in metrics]
        origin = "counted, PTX sm_90 on a CPU" if name == "triton" else "from the source, not measured; at least"
        lines.append([NAMES[name], *cells, origin])
    head = ["", *(f"{heads[stage]}: {metric}" for stage in stages for metric in metrics), "origin"]
    one = found[0]
    text = (
        f"Bytes read and written for each byte of (the target's) logits; V = {one.V}, {one.dtype}, {one.filter}; the "
        "draft's law is at hand. Steps and sources: [`bench/traffic.py`](bench/traffic.py)."
    )
    return "\n\n".join([table(head, lines), text, caption(found)])


def counts(rows: Sequence[Row]) -> str:
    """What the kernels read, write and execute."""
    found = [row for row in _chosen(rows, what="count") if row.stage in STAGES[:3] and row.K in (0, 4)]
    # The kinds of logits and sizes that say most; all others stand in the file.
    usual = {("normal 3", 151936), ("tied", 151936), ("real", 49152)}
    found = [row for row in found if row.dtype == "bf16" and (row.logits, row.V) in usual]
    if not found:
        return "Nothing has been counted yet."
    metrics = ("launches", "logits read", "moved", "written", "instructions")
    lines = []
    for key in dict.fromkeys(point(row) for row in found if row.metric == "logits read"):
        at = {row.metric: row for row in found if point(row) == key}
        cells = [f"{at[m].value:.0f}" if m == "launches" else f"{at[m].value:.3g}" for m in metrics]
        lines.append([label(at["launches"]), *cells])
    text = (
        "Counted in the PTX for sm_90 that Triton compiles, run on a CPU; no times. Read, moved (read and written, of "
        "all tensors) and written: bytes for each byte of logits. Instructions: of all threads, for each logit. "
        "More points: the CSV."
    )
    return "\n\n".join([table(["", *metrics], lines), text, caption(found)])


def wall(rows: Sequence[Row]) -> str:
    """The reference on a CPU beside plain PyTorch and Transformers."""
    found = _chosen(rows, what="time", metric="wall")
    found = [row for row in found if row.stage in ("sample", "verify") and row.B > 1]
    if not found:
        return "Nothing has been timed on a CPU yet."
    head, lines = _cells(found, lambda row: f"{(row.value or 0) / 1000:.2f} ms ({row.ratio or 0:.2f}x)")
    text = "In brackets: times as fast as plain PyTorch, side by side in one run, one thread each."
    return "\n\n".join([table(head, lines), text, caption(found)])


def decode(rows: Sequence[Row]) -> str:
    """The loop beside Transformers' own generation."""
    found = [row for row in rows if row.stage == "decode" and row.value is not None]
    if not found:
        return "The loop has not been measured yet."
    heads = ("target forwards", "draft forwards", "target tokens fed", "draft tokens fed", "host reads")
    lines = []
    for provider, at, device in dict.fromkeys((row.provider, row.filter, row.device) for row in found):
        own = {r.metric: r for r in found if (r.provider, r.filter, r.device) == (provider, at, device)}
        time = own["generate"]
        cells = [f"{own[name].value:.0f}" for name in heads]
        lines.append([at, provider, *cells, f"{time.value:.0f}", f"{time.ratio:.2f}"])
    head = ["", "", *heads, "tokens/s", "ratio to plain generate"]
    text = found[0].note[0].upper() + found[0].note[1:] + "; K = 4, float32."
    return "\n\n".join([table(head, lines), text, caption(found)])


def gpu(rows: Sequence[Row]) -> str:
    """Times on GPUs, if there are any."""
    found = [row for row in _chosen(rows, what="time", origin=EVENTS) if row.metric == "graph"]
    if not found:
        return "No GPU has run the benchmark yet: there are no times of one."
    parts = []
    for device in dict.fromkeys(row.device for row in found):
        of_device = sorted((r for r in found if r.device == device), key=lambda r: STAGES.index(r.stage))
        head, lines = _cells(of_device, lambda row: f"{row.value:.0f} ({row.ratio or 0:.2f}x)")
        text = "Microseconds in a CUDA graph, L2 flushed, median; in brackets: times as fast as plain PyTorch."
        parts += [table(head, lines), text, caption(of_device)]
    return "\n\n".join(parts)


BLOCKS: dict[str, Callable[[Sequence[Row]], str]] = {
    "traffic": traffic,
    "counts": counts,
    "wall": wall,
    "decode": decode,
    "gpu": gpu,
}
MARKS = re.compile(r"(<!-- bench:begin (\w+) -->\n)(.*?)(<!-- bench:end \2 -->)", re.S)


def filled(text: str, rows: Iterable[Row]) -> str:
    """A text with every marked block made anew.

    Raises
    ------
    ValueError
        A mark that names no table, or one that does not end.
    """
    last = latest(rows)
    begun = re.findall(r"<!-- bench:begin (\w+) -->", text)
    ended = [match[1] for match in MARKS.findall(text)]
    if begun != ended or not set(begun) <= set(BLOCKS):
        raise ValueError(f"marks must be pairs that name one of {list(BLOCKS)}; begun are {begun}, ended {ended}")
    return MARKS.sub(lambda match: f"{match[1]}{BLOCKS[match[2]](last)}\n{match[4]}", text)
