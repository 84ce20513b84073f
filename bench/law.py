"""The law of what a provider draws, on small problems with many equal rows: chi-squares with fixed seeds.

Exactly the reference's tokens is what ours must give; everybody, ours too, must draw by the right law.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from triton_specdec import filter_logits

from .cases import FILTERS, MIXED, Filter
from .inputs import Params, Round, Rows
from .plain import draw
from .providers import Provider

VOCAB, DRAFTS = 24, 2
ROWS = 12_000
# One request a call: as many as a second allows.
ROWS_OF = {("transformers", "verify"): 1_800}
# A wrong alarm in a run of a few hundred tests is rarer than one in a thousand runs.
SMALLEST_P = 1e-6
SIGMAS = 5.0


def chi_square_p(counts: torch.Tensor, law: torch.Tensor) -> float:
    """Probability of counts as far from a law as these; 0 where something of probability 0 has come."""
    expected = law.double() * counts.sum()
    if (counts[expected == 0] > 0).any():
        return 0.0
    often = expected >= 5
    observed, wanted = counts[often].double(), expected[often]
    if (~often & (expected > 0)).any():
        observed = torch.cat([observed, counts[~often].sum().double()[None]])
        wanted = torch.cat([wanted, expected[~often].sum()[None]])
    if len(wanted) < 2:
        return 1.0
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def small(chosen: Filter) -> Filter:
    """A filter that cuts as much of a small vocabulary as the given one of a large one."""
    return replace(chosen, top_k={0: 0, 50: 9, 20: 6}[chosen.top_k], min_p=2 * chosen.min_p)


def _filters(name: str) -> tuple[Filter, ...]:
    return tuple(map(small, MIXED)) if name == "mixed" else (small(FILTERS[name]),)


def _laws(logits: torch.Tensor, chosen: Filter) -> torch.Tensor:
    return filter_logits(logits, chosen.temperature, chosen.top_k, chosen.top_p, chosen.min_p).probs()


def wrong_law(provider: Provider, stage: str, filter_name: str, draft: str, device: torch.device) -> str | None:
    """What is wrong with the law of a stage, None where nothing is; asked once for each filter."""
    return _checked(provider, stage, filter_name, draft, str(device))


@cache
def _checked(provider: Provider, stage: str, filter_name: str, draft: str, device: str) -> str | None:
    torch.manual_seed(20)
    rows = ROWS_OF.get((provider.name, stage), ROWS)
    if stage == "sample":
        return sample_law(provider, filter_name, rows, torch.device(device))
    return verify_law(provider, filter_name, draft, rows, torch.device(device))


def sample_law(provider: Provider, filter_name: str, count: int, device: torch.device) -> str | None:
    """Tokens of many equal rows against their law, for each filter that stands in the batch."""
    g = torch.Generator().manual_seed(1)
    row = torch.randn(1, VOCAB, generator=g) * 1.5
    chosen = _filters(filter_name)
    params = Params(tuple(chosen[i % len(chosen)] for i in range(count)), device)
    logits = row.to(device).expand(count, -1).contiguous()
    numbers = torch.arange(count, device=device)
    tokens = provider.make("sample", Rows(logits, params, numbers * 7919 + 5, numbers % 977)).result().cpu()
    for i, one in enumerate(chosen):
        seen = torch.bincount(tokens[i :: len(chosen)], minlength=VOCAB)
        p = chi_square_p(seen, _laws(row, one)[0])
        if p < SMALLEST_P:
            return f"tokens do not follow the law of {one}: chi-square p = {p:.1e} over {int(seen.sum())} rows"
    return None


def verify_law(provider: Provider, filter_name: str, draft: str, count: int, device: torch.device) -> str | None:
    """Each emitted token follows the target given that the drafts before it stand; as many stand as should."""
    g = torch.Generator().manual_seed(2)
    target = torch.randn(DRAFTS + 1, VOCAB, generator=g) * 1.5
    near = target[:-1] + torch.randn(DRAFTS, VOCAB, generator=g)
    chosen = _filters(filter_name)
    params = Params(tuple(chosen[i % len(chosen)] for i in range(count)), device)
    q = torch.stack([_laws(near, one) for one in chosen])
    if draft == "one-hot":
        # Drafts that somebody else has chosen: any, with the same chance.
        q = torch.full_like(q, 1 / VOCAB)
    drafts = draw(q[torch.arange(count) % len(chosen)], g)
    both = [x.to(device).expand(count, -1, -1).contiguous() for x in (target, near)]
    numbers = torch.arange(count, device=device)
    given = Round(both[0], None if draft == "one-hot" else both[1], drafts.to(device), params, numbers, numbers % 977)
    tokens = provider.make("verify", given).result().cpu()
    for i, one in enumerate(chosen):
        reason = _round_law(tokens[i :: len(chosen)], drafts[i :: len(chosen)], _laws(target, one), q[i], draft)
        if reason:
            return f"{reason}, filter {one}"
    return None


def _round_law(tokens: torch.Tensor, drafts: torch.Tensor, p: torch.Tensor, q: torch.Tensor, draft: str) -> str | None:
    for i in range(DRAFTS + 1):
        seen = torch.bincount(tokens[tokens[:, i] >= 0, i], minlength=VOCAB)
        value = chi_square_p(seen, p[i])
        if value < SMALLEST_P:
            return f"token {i} does not follow the target: chi-square p = {value:.1e} over {int(seen.sum())} rows"
    stands = (tokens[:, 1] >= 0).double().mean()
    expected = float(p[0].double()[drafts[:, 0]].mean() if draft == "one-hot" else torch.minimum(p[0], q[0]).sum())
    off = SIGMAS * (max(expected * (1 - expected), 1e-9) / len(tokens)) ** 0.5
    if abs(float(stands) - expected) > off + 1e-6:
        return f"{float(stands):.3f} of the first drafts stand, {expected:.3f} should"
    if not (tokens[:, :-1] == drafts)[tokens[:, 1:] >= 0].all():
        return "what stands before the last token are not the drafts"
    return None
