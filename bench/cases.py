"""The points of the benchmark: what is filtered, sampled, verified, truncated and penalised, most important first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

VOCABS = (32000, 50257, 128256, 151936, 201088, 262144)
BATCHES = (1, 8, 64, 256, 512)
DRAFTS = (1, 3, 5, 8)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LOGITS = ("real", "normal 1", "normal 3", "normal 5", "gumbel", "peaked", "flat", "tied")
REAL_VOCAB = 49152
STAGES = ("filter", "sample", "verify", "kv", "penalties")
KV_OPERATIONS = ("truncate", "scrub", "pages", "compact")


@dataclass(frozen=True)
class Filter:
    """What a row of logits is filtered by; the values that are off keep everything."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


FILTERS = {
    "none": Filter(),
    "greedy": Filter(temperature=0.0),
    "k=50": Filter(top_k=50),
    "p=.9": Filter(top_p=0.9),
    "k=20 p=.95": Filter(top_k=20, top_p=0.95),
    "min-p=.05": Filter(min_p=0.05),
}
# Rows of one batch go round these: what a server meets. Without min-p, which few of the others combine.
MIXED = (FILTERS["none"], FILTERS["greedy"], FILTERS["k=50"], FILTERS["p=.9"], FILTERS["k=20 p=.95"], Filter(0.7))


@dataclass(frozen=True)
class Case:
    """One point.

    Attributes
    ----------
    stage : one of STAGES
    vocab, batch, drafts : V, B, K
        Rows are B under filter and sample, B * (K + 1) under verify and penalties. Under kv, V is 0.
    dtype : one of DTYPES
    logits : one of LOGITS; under kv one of KV_OPERATIONS
    filter : one of FILTERS, or "mixed"
    draft : "model", or "one-hot" for a deterministic draft; verify only
    """

    stage: str
    vocab: int = 151936
    batch: int = 64
    drafts: int = 0
    dtype: str = "bf16"
    logits: str = "normal 3"
    filter: str = "none"
    draft: str = ""

    def __post_init__(self) -> None:
        known = KV_OPERATIONS if self.stage == "kv" else LOGITS
        for value, allowed in ((self.stage, STAGES), (self.dtype, DTYPES), (self.logits, known)):
            if value not in allowed:
                raise ValueError(f"{value!r} is none of {list(allowed)}")
        if self.filter not in FILTERS and self.filter != "mixed":
            raise ValueError(f"filter must be 'mixed' or one of {list(FILTERS)}, got {self.filter!r}")
        if self.logits == "real" and self.vocab != REAL_VOCAB:
            raise ValueError(f"real logits have V = {REAL_VOCAB}, got {self.vocab}")
        if (self.draft != "") != (self.stage == "verify") or self.draft not in ("", "model", "one-hot"):
            raise ValueError(f"draft must be 'model' or 'one-hot' for verify, '' for others; got {self.draft!r}")

    @property
    def rows(self) -> int:
        """Rows of logits."""
        return self.batch * (self.drafts + 1)

    @property
    def logits_bytes(self) -> int:
        """Bytes of the (target's) logits: what every provider must at least read."""
        return self.rows * self.vocab * DTYPES[self.dtype].itemsize

    def row_filters(self, rows: int) -> list[Filter]:
        """The filter of each of some rows or requests."""
        if self.filter != "mixed":
            return [FILTERS[self.filter]] * rows
        return [MIXED[i % len(MIXED)] for i in range(rows)]


def checkout() -> Path | None:
    """The root of the repository that this runs in, None outside of one."""
    for root in (Path(__file__).resolve().parent.parent, Path.cwd()):
        if (root / "tests" / "gpuless" / "__init__.py").exists():
            return root
    return None


def make_logits(kind: str, rows: int, vocab: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    """Logits [rows, V] of a kind, never zeros; the same for the same seed and device."""
    if kind == "real":
        root = checkout()
        if root is None:
            raise RuntimeError("real logits need tests/data/real_logits.npz: run from a checkout of the repository")
        real = torch.from_numpy(np.load(root / "tests" / "data" / "real_logits.npz")["logits"])
        return real[(torch.arange(rows) + 7 * seed) % len(real)].to(device=device, dtype=dtype)
    g = torch.Generator(device).manual_seed(seed)
    x = torch.empty(rows, vocab, device=device)
    if kind == "gumbel":
        return x.exponential_(generator=g).clamp_(min=1e-9).log_().neg_().to(dtype)
    x.normal_(generator=g)
    if kind.startswith("normal"):
        x *= float(kind.split()[1])
    elif kind == "peaked":
        at = torch.randint(vocab, (rows,), generator=g, device=device)
        x[torch.arange(rows, device=device), at] += 12
    elif kind == "flat":
        x *= 0.01
    elif kind == "tied":
        x = (x * 2).round_()
    return x.to(dtype)


def points(stage: str, quick: bool) -> list[Case]:
    """The cases of a stage, the most important first, each once."""
    making = {"filter": _rows, "sample": _rows, "verify": _verify, "kv": _kv, "penalties": _penalties}[stage]
    return list(dict.fromkeys(_quick(stage) if quick else making(stage)))


def _quick(stage: str) -> Iterator[Case]:
    """Few points, small enough for a CPU."""
    if stage == "kv":
        yield from (Case("kv", 0, 8, 4, logits=operation) for operation in KV_OPERATIONS)
    elif stage == "penalties":
        yield Case(stage, 32000, 2, 3)
    elif stage == "verify":
        for batch, name, draft in ((1, "k=50", "model"), (4, "k=50", "model"), (4, "none", "one-hot")):
            yield Case(stage, 151936, batch, 4, "fp32", "normal 3", name, draft)
    else:
        for batch in (1, 8):
            for name in ("k=50", "k=20 p=.95", "p=.9"):
                yield Case(stage, 151936, batch, dtype="fp32", filter=name)
        yield from (Case(stage, REAL_VOCAB, 8, 0, "fp32", "real", name) for name in ("p=.9", "min-p=.05", "mixed"))


def _rows(stage: str) -> Iterator[Case]:
    """Filter and sample: filters over B first, then V, kinds of logits and dtypes."""
    for name in ("k=20 p=.95", "none", "p=.9", "mixed"):
        yield from (Case(stage, batch=batch, filter=name) for batch in (64, *BATCHES))
    yield from (Case(stage, filter=name) for name in ("k=50", "min-p=.05", "greedy"))
    yield from (Case(stage, REAL_VOCAB, logits="real", filter=name) for name in ("p=.9", "k=20 p=.95"))
    yield from (Case(stage, vocab, filter="k=20 p=.95") for vocab in VOCABS)
    yield from (Case(stage, logits=kind, filter="p=.9") for kind in LOGITS if kind != "real")
    yield from (Case(stage, dtype=dtype, filter="k=20 p=.95") for dtype in DTYPES)


def _verify(stage: str) -> Iterator[Case]:
    for draft in ("model", "one-hot"):
        for name in ("k=20 p=.95", "none"):
            # 512 requests of 5 rows in float32 copies are what a peer's pipeline still holds at ease.
            yield from (Case(stage, batch=batch, drafts=4, filter=name, draft=draft) for batch in (64, *BATCHES))
    yield from (Case(stage, drafts=k, filter="k=20 p=.95", draft="model") for k in DRAFTS)
    yield from (Case(stage, drafts=4, filter=name, draft="model") for name in ("p=.9", "mixed", "greedy"))
    yield from (Case(stage, vocab, drafts=4, filter="k=20 p=.95", draft="model") for vocab in VOCABS)
    yield Case(stage, REAL_VOCAB, drafts=4, logits="real", filter="p=.9", draft="model")


def _kv(stage: str) -> Iterator[Case]:
    for batch in (64, 1, 8, 256):
        yield from (Case(stage, 0, batch, 4, logits=operation) for operation in KV_OPERATIONS)


def _penalties(stage: str) -> Iterator[Case]:
    yield from (Case(stage, batch=batch, drafts=4) for batch in (64, 1, 8, 256))
    yield from (Case(stage, vocab, 64, 4) for vocab in (32000, 262144))
