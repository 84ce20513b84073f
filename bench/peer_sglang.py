"""SGLang as calls, after sgl-kernel/python/sgl_kernel/{sampling,speculative}.py and its eagle_info.py.

Written after the source, not run where it was written: a call that does not fit a version is reported as failed.
"""

from __future__ import annotations

import inspect
from importlib import import_module

import torch

from .call import Call, importable_on_gpu, renormed
from .cases import Case
from .inputs import Params, Round, Rows


def missing(device: torch.device) -> str | None:
    """CUDA kernels."""
    return importable_on_gpu("sgl_kernel", device)


def unsupported(case: Case) -> str | None:
    """Verification looks at the target only: the law of a deterministic draft."""
    if case.filter in ("mixed", "greedy", "min-p=.05"):
        return "greedy batches take another path, min-p another kernel"
    return "its verification does not look at the draft's law" if case.draft == "model" else None


def _sglang_probs(logits: torch.Tensor, params: Params) -> torch.Tensor:
    kernels = import_module("sgl_kernel")
    return renormed(logits, params, kernels.top_k_renorm_prob, kernels.top_p_renorm_prob)


def filtered(given: Rows) -> Call:
    """softmax, top_k_renorm_prob, top_p_renorm_prob."""
    return Call(lambda: _sglang_probs(given.logits, given.params))


def _chain(given: Round) -> dict[str, torch.Tensor]:
    """The drafts as a tree without branches: node i + 1 follows node i, and nobody has a sibling."""
    batch, drafts = given.tokens.shape
    columns, device = drafts + 1, given.tokens.device
    after = torch.arange(1, columns + 1, device=device)
    after[-1] = -1
    return {
        "candidates": torch.nn.functional.pad(given.tokens, (1, 0)),
        "retrive_index": torch.arange(batch * columns, device=device).view(batch, columns),
        "retrive_next_token": after.expand(batch, -1).contiguous(),
        "retrive_next_sibling": torch.full((batch, columns), -1, device=device),
    }


def verified(given: Round) -> Call:
    """tree_speculative_sampling_target_only on a chain."""
    verify = import_module("sgl_kernel").tree_speculative_sampling_target_only
    # Newer versions have dropped the scratch tensor that older ones take for the rejected mass.
    with_scratch = "draft_probs" in inspect.signature(verify).parameters
    (batch, columns), device = given.target.shape[:2], given.tokens.device
    chain, every = _chain(given), given.params.repeated(columns)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        p = _sglang_probs(given.target.flatten(0, 1), every).view(given.target.shape)
        predicts = torch.zeros(batch * columns, dtype=torch.int32, device=device)
        number = torch.zeros(batch, dtype=torch.int32, device=device)
        scratch = {"draft_probs": torch.zeros_like(p)} if with_scratch else {}
        verify(
            predicts=predicts,
            accept_index=torch.full((batch, columns), -1, dtype=torch.int32, device=device),
            accept_token_num=number,
            uniform_samples=torch.rand(batch, columns, device=device),
            uniform_samples_for_final_sampling=torch.rand(batch, device=device),
            target_probs=p,
            **chain,
            **scratch,
        )
        return predicts, number

    def read(out: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        predicts, number = out
        # On a chain the accepted nodes are the first ones: slot i holds the token that follows node i.
        emitted = torch.arange(columns, device=device) <= number[:, None]
        return torch.where(emitted, predicts.view(batch, columns).long(), -1)

    return Call(run, read=read)
