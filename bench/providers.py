"""Who is measured: one table for the benchmark and its tests. What is not checked is not timed.

A provider turns inputs into a `Call`: `run` is timed, `reset` restores before each run what a run writes, and `read`
gives results that can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch

from . import ours, peer_flashinfer, peer_sglang, peer_transformers, peer_vllm, plain
from .call import Call, dense_draft, in_place, in_place_logits
from .cases import Case
from .inputs import Cache, Inputs, Occurred, Round, Rows


@dataclass(frozen=True, eq=False)
class Provider:
    """One way to compute the stages.

    Attributes
    ----------
    stages : dict
        Stage -> what makes a `Call` of its inputs.
    missing : callable
        Why it cannot run on a device here, None where it can.
    unsupported : callable
        Why it cannot compute a case, None where it can.
    is_ours : bool
        A wrong result of it fails the run.
    exact : bool
        Draws by our seeds: tokens must be the reference's.
    """

    name: str
    stages: dict[str, Callable[[Any], Call]]
    missing: Callable[[torch.device], str | None] = lambda device: None
    unsupported: Callable[[Case], str | None] = lambda case: None
    is_ours: bool = False
    exact: bool = False

    def make(self, stage: str, inputs: Inputs) -> Call:
        """The call on some inputs; what is not the stage's work (such as the draft's own law) is done here."""
        return self.stages[stage](inputs)


def _plain_filter(given: Rows) -> Call:
    return Call(lambda: plain.filtered(given.logits, given.params))


def _plain_sample(given: Rows) -> Call:
    return Call(lambda: plain.sampled(given))


def _plain_verify(given: Round) -> Call:
    draft, every = dense_draft(given), given.params.repeated(given.num_drafts + 1)
    return Call(lambda: plain.verified(given, every, draft))


def _plain_kv(given: Cache) -> Call:
    return in_place(given, lambda: plain.truncated(given))


def _plain_penalties(given: Occurred) -> Call:
    return in_place_logits(given, lambda: plain.penalised(given))


@cache
def _compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(call, dynamic=False)


def _compiled_filter(given: Rows) -> Call:
    run = _compiled(plain.filtered)
    return Call(lambda: run(given.logits, given.params))


def _compiled_sample(given: Rows) -> Call:
    run = _compiled(plain.sampled)
    return Call(lambda: run(given))


def _compiled_verify(given: Round) -> Call:
    draft, every = dense_draft(given), given.params.repeated(given.num_drafts + 1)
    run = _compiled(plain.verified)
    return Call(lambda: run(given, every, draft))


def _compiled_penalties(given: Occurred) -> Call:
    run = _compiled(plain.penalised)
    return in_place_logits(given, lambda: run(given))


def _compiled_unsupported(case: Case) -> str | None:
    """A compilation takes up to a minute: two filters at one size, and no sweep."""
    usual = case.batch == 64 and case.vocab == 151936 and case.dtype == "bf16" and case.logits == "normal 3"
    return None if usual and case.filter in ("k=20 p=.95", "none") else "compiled for two filters at one size only"


def _needs_gpu(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "for GPUs only"


def _peer(name: str, module: ModuleType) -> Provider:
    how = {"filter": "filtered", "sample": "sampled", "verify": "verified"}
    stages = {stage: getattr(module, function) for stage, function in how.items() if hasattr(module, function)}
    return Provider(name, stages, module.missing, module.unsupported)


TORCH = "torch"
PEERS = {
    "transformers": peer_transformers,
    "flashinfer": peer_flashinfer,
    "vllm": peer_vllm,
    "sglang": peer_sglang,
}
PROVIDERS = (
    Provider("triton", ours.stages("triton"), ours.missing_triton, is_ours=True, exact=True),
    Provider("reference", ours.stages("reference"), ours.missing_reference, is_ours=True, exact=True),
    Provider(
        TORCH,
        {
            "filter": _plain_filter,
            "sample": _plain_sample,
            "verify": _plain_verify,
            "kv": _plain_kv,
            "penalties": _plain_penalties,
        },
    ),
    Provider(
        "torch.compile",
        {
            "filter": _compiled_filter,
            "sample": _compiled_sample,
            "verify": _compiled_verify,
            "penalties": _compiled_penalties,
        },
        _needs_gpu,
        _compiled_unsupported,
    ),
    *(_peer(name, module) for name, module in PEERS.items()),
)


def by_name(name: str) -> Provider:
    """A provider of the table."""
    for provider in PROVIDERS:
        if provider.name == name:
            return provider
    raise ValueError(f"provider must be one of {[p.name for p in PROVIDERS]}, got {name!r}")
