"""The stages of this package as calls, by either backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import triton_specdec as ts

from .call import Call, in_place, in_place_logits
from .inputs import PAGE, Cache, Occurred, Round, Rows


def missing_triton(device: torch.device) -> str | None:
    """The kernels are timed on GPUs only."""
    if device.type != "cuda":
        return "kernels are timed on a GPU; without one they are counted (stage counts)"
    try:
        import triton
    except ImportError as error:
        return f"not importable: {error}"
    return None if triton.__version__ else "no version"


def missing_reference(device: torch.device) -> str | None:
    """The reference is NumPy: a GPU has nothing to do with it."""
    return None if device.type == "cpu" else "runs on a CPU, and is what the others are checked against here"


def stages(backend: str) -> dict[str, Callable[[Any], Call]]:
    """Every stage by a backend."""
    return {
        "filter": partial(_filter, backend=backend),
        "sample": partial(_sample, backend=backend),
        "verify": partial(_verify, backend=backend),
        "kv": partial(_kv, backend=backend),
        "penalties": partial(_penalties, backend=backend),
    }


def _filter(given: Rows, backend: str) -> Call:
    options = given.params.options()
    return Call(lambda: ts.filter_logits(given.logits, **options, backend=backend))


def _sample(given: Rows, backend: str) -> Call:
    # Step 0 of each position, which a call without steps would have to write.
    steps = torch.zeros_like(given.positions)
    options = {**given.params.options(), "seeds": given.seeds, "positions": given.positions, "steps": steps}
    return Call(lambda: ts.sample_logits(given.logits, **options, backend=backend), read=lambda out: out.tokens)


def _verify(given: Round, backend: str) -> Call:
    """From the target's logits; the draft's descriptor is what drawing the drafts has left."""
    batch, drafts = given.tokens.shape
    q = None
    if given.draft is not None:
        q = ts.filter_logits(given.draft, **given.params.repeated(drafts).options(), backend=backend)
    options = given.params.repeated(drafts + 1).options()
    number = torch.full((batch,), drafts, dtype=torch.int64, device=given.tokens.device)
    keys: dict[str, Any] = {"seeds": given.seeds, "positions": given.positions, "num_draft_tokens": number}

    def run() -> ts.VerifyResult:
        p = ts.filter_logits(given.target, **options, backend=backend)
        return ts.verify(given.tokens, p, q, **keys)

    return Call(run, read=lambda out: out.tokens)


def _kv(given: Cache, backend: str) -> Call:
    def run() -> None:
        if given.operation == "compact":
            ts.compact_kv_(given.caches, given.source, given.start, given.count, backend=backend)
        elif given.operation == "pages":
            args = (given.lengths, given.keep, given.table, PAGE, given.free, given.num_free)
            ts.truncate_paged_kv_(*args, backend=backend)
        else:
            scrub = given.operation == "scrub"
            ts.truncate_kv_(given.lengths, given.keep, given.caches or None, scrub=scrub, backend=backend)

    return in_place(given, run)


def _penalties(given: Occurred, backend: str) -> Call:
    options: dict[str, Any] = {name: getattr(given, name) for name in ("repetition", "frequency", "presence")}
    options |= {"prompt_mask": given.prompt_mask, "draft_tokens": given.tokens, "backend": backend}
    return in_place_logits(given, lambda: ts.apply_penalties_(given.logits, given.counts, **options))
