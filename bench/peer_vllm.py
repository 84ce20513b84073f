"""vLLM as calls, after vllm/v1/sample/{rejection_sampler,ops/topk_topp_sampler}.py.

Written after the source, not run where it was written: a call that does not fit a version is reported as failed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace

import torch

from .call import Call, dense_draft, importable_on_gpu
from .cases import Case
from .inputs import Params, Round, Rows


def missing(device: torch.device) -> str | None:
    """Triton kernels."""
    return importable_on_gpu("vllm.v1.sample.rejection_sampler", device)


def unsupported(case: Case) -> str | None:
    """min-p is another logits processor there; a law of greedy rows is an argmax elsewhere."""
    if case.filter == "min-p=.05":
        return "min-p is a processor of its own"
    return "has no law of greedy rows" if case.filter in ("greedy", "mixed") and case.stage == "filter" else None


def _vllm_logits(logits: torch.Tensor, params: Params) -> Callable[[], torch.Tensor]:
    """float32 logits, scaled and masked, as `apply_sampling_constraints` makes them."""
    ops = import_module("vllm.v1.sample.ops.topk_topp_sampler")
    vocab = logits.shape[-1]
    hot = params.temperature > 0
    temperature = torch.where(hot, params.temperature, 1.0).float()[:, None]
    k = torch.where(params.top_k > 0, params.top_k, vocab).int() if any(f.top_k for f in params.filters) else None
    p = params.top_p.float() if any(f.top_p < 1 for f in params.filters) else None
    return lambda: ops.apply_top_k_top_p(logits.to(torch.float32, copy=True).div_(temperature), k, p)


def filtered(given: Rows) -> Call:
    """apply_top_k_top_p and a softmax."""
    masked = _vllm_logits(given.logits, given.params)
    return Call(lambda: masked().softmax(-1, dtype=torch.float32))


def sampled(given: Rows) -> Call:
    """The same, then random_sample; greedy rows are an argmax that is chosen where they stand."""
    ops = import_module("vllm.v1.sample.ops.topk_topp_sampler")
    masked = _vllm_logits(given.logits, given.params)
    has_greedy = any(f.temperature == 0 for f in given.params.filters)
    greedy = given.params.temperature == 0

    def run() -> torch.Tensor:
        if has_greedy and given.params.one is not None:
            return given.logits.argmax(-1)
        drawn: torch.Tensor = ops.random_sample(masked().softmax(-1, dtype=torch.float32), {})
        return torch.where(greedy, given.logits.argmax(-1), drawn) if has_greedy else drawn

    return Call(run)


def verified(given: Round) -> Call:
    """rejection_sample over the K drafted rows, with a bonus token drawn from the last row."""
    module = import_module("vllm.v1.sample.rejection_sampler")
    batch, drafts = given.tokens.shape
    vocab = given.target.shape[-1]
    sentinel = getattr(module, "GREEDY_TEMPERATURE", 0)
    hot = given.params.temperature > 0
    all_greedy = all(f.temperature == 0 for f in given.params.filters)
    every = given.params.temperature.float()
    metadata = SimpleNamespace(
        all_greedy=all_greedy,
        all_random=all(f.temperature > 0 for f in given.params.filters),
        temperature=torch.where(hot, every, float(getattr(sentinel, "value", sentinel))),
        generators={},
    )
    takes_logits = "target_logits" in inspect.signature(module.rejection_sample).parameters
    q = dense_draft(given)
    q = None if q is None else q.flatten(0, 1)
    numbers, flat = [drafts] * batch, given.tokens.flatten()
    ends = torch.arange(1, batch + 1, device=flat.device, dtype=torch.int32) * drafts
    last = Rows(given.target[:, -1], given.params, given.seeds, given.positions)
    bonus, rows = sampled(last), given.target[:, :-1].reshape(-1, vocab)
    masked = _vllm_logits(rows, given.params.repeated(drafts))

    def run() -> torch.Tensor:
        law = masked() if takes_logits or all_greedy else masked().softmax(-1, dtype=torch.float32)
        ids = bonus.run()[:, None].int()
        out: torch.Tensor = module.rejection_sample(flat, numbers, drafts, ends, q, law, ids, metadata)
        return out

    return Call(run, read=lambda out: out.long())
