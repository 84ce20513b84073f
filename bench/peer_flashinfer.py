"""FlashInfer as calls, after flashinfer/sampling.py.

Written after the source, not run where it was written: a call that does not fit a version is reported as failed.
"""

from __future__ import annotations

from importlib import import_module

import torch

from .call import Call, dense_draft, importable_on_gpu, renormed, shared
from .cases import Case
from .inputs import Params, Round, Rows


def missing(device: torch.device) -> str | None:
    """CUDA kernels, compiled when first called."""
    return importable_on_gpu("flashinfer.sampling", device)


def unsupported(case: Case) -> str | None:
    """No greedy rows; min-p only when it draws."""
    if case.filter in ("mixed", "greedy"):
        return "has no greedy rows"
    if case.filter == "min-p=.05" and case.stage != "sample":
        return "has no renormalisation by min-p"
    return "takes probabilities of a draft" if case.draft == "one-hot" else None


def _flashinfer_probs(logits: torch.Tensor, params: Params) -> torch.Tensor:
    sampling = import_module("flashinfer.sampling")
    return renormed(logits, params, sampling.top_k_renorm_probs, sampling.top_p_renorm_probs)


def filtered(given: Rows) -> Call:
    """softmax, top_k_renorm_probs, top_p_renorm_probs."""
    return Call(lambda: _flashinfer_probs(given.logits, given.params))


def sampled(given: Rows) -> Call:
    """The sampler that fits the filter; these take float32."""
    sampling = import_module("flashinfer.sampling")
    one, x = shared(given.params), given.logits

    def run() -> torch.Tensor:
        out: torch.Tensor
        if one.top_k:
            out = sampling.top_k_top_p_sampling_from_logits(x.float(), one.top_k, one.top_p)
        elif one.top_p < 1:
            out = sampling.top_p_sampling_from_probs(torch.softmax(x, -1, dtype=torch.float32), one.top_p)
        elif one.min_p:
            out = sampling.min_p_sampling_from_probs(torch.softmax(x, -1, dtype=torch.float32), one.min_p)
        else:
            out = sampling.sampling_from_logits(x.float())
        return out

    return Call(run, read=lambda out: out.long())


def verified(given: Round) -> Call:
    """The target's probabilities, then chain_speculative_sampling."""
    sampling = import_module("flashinfer.sampling")
    q, drafts = dense_draft(given), given.tokens.int()
    every = given.params.repeated(given.num_drafts + 1)

    def run() -> torch.Tensor:
        p = _flashinfer_probs(given.target.flatten(0, 1), every).view(given.target.shape)
        out: torch.Tensor = sampling.chain_speculative_sampling(q, drafts, p)[0]
        return out

    return Call(run, read=lambda out: out.long())
