"""Transformers as calls, after src/transformers/generation/{logits_process,utils}.py."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import torch

from .call import Call, importable, shared
from .cases import Case
from .inputs import Params, Round, Rows


def missing(device: torch.device) -> str | None:
    """Runs everywhere."""
    return importable("transformers.generation.logits_process")


def unsupported(case: Case) -> str | None:
    """One filter for all rows, one request a verification."""
    if case.filter == "mixed":
        return "one filter for all rows of a batch"
    if case.stage == "verify":
        if case.batch > 1:
            return "verifies one request a call"
        return "takes logits of a draft" if case.draft == "one-hot" else None
    return "has no law of greedy rows" if case.filter == "greedy" and case.stage == "filter" else None


def _hf_warped(logits: torch.Tensor, params: Params) -> torch.Tensor:
    process = import_module("transformers.generation.logits_process")
    one, x = shared(params), logits.to(torch.float32, copy=True)
    none: Any = None
    if one.temperature not in (0, 1):
        x = process.TemperatureLogitsWarper(one.temperature)(none, x)
    if one.top_k:
        x = process.TopKLogitsWarper(one.top_k)(none, x)
    if one.top_p < 1:
        x = process.TopPLogitsWarper(one.top_p)(none, x)
    if one.min_p:
        x = process.MinPLogitsWarper(one.min_p)(none, x)
    return x


def filtered(given: Rows) -> Call:
    """The warpers and a softmax."""
    return Call(lambda: _hf_warped(given.logits, given.params).softmax(-1))


def sampled(given: Rows) -> Call:
    """The warpers, a softmax, `multinomial`; or an argmax."""
    if shared(given.params).temperature == 0:
        return Call(lambda: given.logits.to(torch.float32, copy=True).argmax(-1))
    return Call(lambda: torch.multinomial(_hf_warped(given.logits, given.params).softmax(-1), 1)[:, 0])


def verified(given: Round) -> Call:
    """The warpers over each position, then `_speculative_sampling`, as `_assisted_decoding` does it."""
    utils = import_module("transformers.generation.utils")
    # Older versions ask whether the candidate has ended.
    known = inspect.signature(utils._speculative_sampling).parameters
    options = {"is_done_candidate": False} if "is_done_candidate" in known else {}
    assert given.draft is not None
    batch, drafts = given.tokens.shape
    scores = _hf_warped(given.draft.flatten(0, 1), given.params.repeated(drafts)).view(batch, drafts, -1)
    ids = torch.nn.functional.pad(given.tokens, (1, 0))
    one = given.params.take([0])

    def request(b: int) -> torch.Tensor:
        rows = [_hf_warped(given.target[b, i][None], one) for i in range(drafts + 1)]
        law = torch.stack(rows, 1)
        tokens: torch.Tensor = utils._speculative_sampling(ids[b : b + 1], scores[b : b + 1], drafts, law, **options)[0]
        return torch.nn.functional.pad(tokens[0], (0, drafts + 1 - tokens.shape[1]), value=-1)

    return Call(lambda: torch.stack([request(b) for b in range(batch)]))
