"""What `pytest bench/` times: provider and point, with the check before the clock."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .call import copied
from .cases import Case, points
from .check import what_is_wrong
from .inputs import build
from .providers import PROVIDERS, Provider
from .timing import captured

POINTS = 3


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pairs(stage: str) -> list[Any]:
    """Parameters of a stage's test: the providers that run here, at the first few points."""
    device = _device()
    cases = points(stage, quick=device.type == "cpu")[:POINTS]
    found = []
    for provider in PROVIDERS:
        for case in cases if stage in provider.stages and not provider.missing(device) else ():
            if not provider.unsupported(case):
                name = f"{provider.name}-B{case.batch}-{case.logits}-{case.filter}".replace(" ", "_")
                found.append(pytest.param(provider, case, id=name))
    return found


def benched(benchmark: Any, provider: Provider, case: Case) -> None:
    """Check, then time: on a GPU the replay of a CUDA graph up to its end."""
    device = _device()
    given = build(case, device)
    call = provider.make(case.stage, copied(given))
    reason = what_is_wrong(provider, case, given, call, device)
    assert reason is None, f"{provider.name} is wrong and is not timed: {reason}"
    benchmark.extra_info.update(V=case.vocab, K=case.drafts, dtype=case.dtype)
    if device.type == "cpu":
        torch.set_num_threads(1)
        benchmark.pedantic(call.run, setup=call.reset, rounds=7, warmup_rounds=1)
        return
    replay = captured(call)

    def run() -> None:
        replay.run()
        torch.cuda.synchronize()

    benchmark.pedantic(run, setup=replay.reset, rounds=20, warmup_rounds=2)
