"""Is a provider right at a point? Asked before it is timed; the answer is what differed, or None.

Ours must give the reference's supports and, under the same seeds, its tokens. Others must keep the right tokens with
the right proportions; they may treat ties at the cut as they like, and round a nucleus to a thousandth of its mass.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

import torch

from triton_specdec import FilteredLogits, filter_logits, sample, verify
from triton_specdec.reference import rng, rules
from triton_specdec.reference.verify import draw_uniforms

from .call import Call, copied
from .cases import Case
from .inputs import Inputs, Params, Round, Rows, build
from .law import wrong_law
from .providers import PROVIDERS, Provider

ROWS = 6
OUR_MARGIN, MARGIN = 2e-6, 1e-3
# Of each dtype, to one rounding of float32 arithmetic and one of the result.
ROUNDED = {"bf16": 1e-2, "fp16": 2e-3, "fp32": 1e-5}


def what_is_wrong(provider: Provider, case: Case, given: Inputs, call: Call, device: torch.device) -> str | None:
    """None where the provider's result is right at this point."""
    if not isinstance(given, Rows | Round):
        return _in_place(provider, case, device)
    torch.manual_seed(1)
    out = call.read(call.run())
    if isinstance(given, Round):
        reason = _round(out, given, provider.exact)
    elif case.stage == "sample":
        reason = _tokens(out, given, provider.exact)
    else:
        reason = _supports(out, given, provider.exact)
    if reason is None and case.stage in ("sample", "verify"):
        reason = wrong_law(provider, case.stage, case.filter, case.draft, device)
    return reason


def some(count: int) -> list[int]:
    """Row numbers spread over a batch, the first and the last among them."""
    return sorted({round(i * (count - 1) / max(min(count, ROWS) - 1, 1)) for i in range(min(count, ROWS))})


class Bounds:
    """What the rows of a batch must keep and may keep, by the reference."""

    def __init__(self, logits: torch.Tensor, params: Params, margin: float) -> None:
        self.logits, self.params = logits, params
        self.exact = self._moved(0.0)
        narrow, wide = self._moved(-margin), self._moved(margin)
        x = logits.float()
        at_cut = x == narrow.cut_value[..., None]
        tied = at_cut.sum(-1, keepdim=True) > 1
        self.must = narrow.keep_mask() & ~(at_cut & tied)
        self.may = wide.keep_mask() | (x == wide.cut_value[..., None])
        same = (narrow.cut_value == wide.cut_value) & (narrow.cut_id == wide.cut_id)
        self.decided = same & (narrow.support_size == wide.support_size)

    def _moved(self, by: float) -> FilteredLogits:
        """The filter with a nucleus that is larger, and a min-p that is smaller, by a fraction."""
        options = self.params.options()
        p, m = options["top_p"], options["min_p"]
        on = (p < 1) & (p > 0)
        options["top_p"] = torch.where(on, (p * (1 + by)).clamp(max=1 - 1e-12), p)
        options["min_p"] = (m * (1 - by)).clamp(max=1.0)
        return filter_logits(self.logits, **options, backend="reference")


@lru_cache(maxsize=2)
def bounds_of(given: Rows | Round, margin: float) -> Bounds:
    """The bounds of the rows that are looked at, once for all providers of a point (see `forget`)."""
    if isinstance(given, Rows):
        rows = some(len(given.logits))
        return Bounds(given.logits[rows].cpu(), given.params.take(rows), margin)
    rows = some(len(given.tokens))
    return Bounds(given.target[rows].cpu(), given.params.take(rows).repeated(given.num_drafts + 1), margin)


def forget() -> None:
    """Let go of a point's inputs."""
    bounds_of.cache_clear()


def _supports(out: Any, given: Rows, exact: bool) -> str | None:
    rows = some(len(given.logits))
    if exact:
        bounds = bounds_of(given, OUR_MARGIN)
        for name in ("maximum", "argmax", "status", "cut_value", "cut_id", "support_size"):
            ours, theirs = getattr(out, name)[rows].cpu(), getattr(bounds.exact, name)
            looked = bounds.decided if name.startswith(("cut", "support")) else slice(None)
            if not torch.equal(ours[looked], theirs[looked]):
                return f"{name} of rows {rows}: {ours.tolist()}, the reference's are {theirs.tolist()}"
        off = (out.log_normalizer[rows].cpu() - bounds.exact.log_normalizer).abs()[bounds.decided]
        return f"log normaliser is off by {float(off.max()):.1e}" if len(off) and off.max() > 1e-6 else None
    return wrong_probs(out[rows].cpu().double(), bounds_of(given, MARGIN))


def wrong_probs(probs: torch.Tensor, bounds: Bounds) -> str | None:
    """What is wrong with dense probabilities, ties at the cut and rounding at the boundary aside."""
    if not torch.isfinite(probs).all():
        return "probabilities are not finite"
    total = (probs.sum(-1) - 1).abs().max()
    if total > 1e-3:
        return f"probabilities do not sum to 1, but to {float(probs.sum(-1).min()):.4f}"
    f = bounds.exact
    weight = ((bounds.logits.double() - f.maximum.double()[:, None]) * f.inverse_temperature[:, None]).exp()
    kept = probs > 0
    lost = int((bounds.must & ~kept & (weight > 1e-30)).sum())
    added = int((kept & ~bounds.may).sum())
    if lost or added:
        return f"{lost} tokens of the supports are lost, {added} others are kept"
    share = probs / probs.amax(-1, keepdim=True)
    off = ((share - weight).abs() / weight.clamp(min=1e-7))[kept].max()
    return f"probabilities are off by a factor of up to {float(off):.1e}" if off > 5e-3 else None


def _tokens(out: torch.Tensor, given: Rows, exact: bool) -> str | None:
    rows = some(len(given.logits))
    bounds = bounds_of(given, OUR_MARGIN if exact else MARGIN)
    tokens = out[rows].cpu()
    if not exact:
        outside = ~bounds.may.gather(-1, tokens[:, None])[:, 0]
        return f"tokens outside the support in rows {torch.tensor(rows)[outside].tolist()}" if outside.any() else None
    u = rng.uniforms(given.seeds[rows].cpu().numpy(), given.positions[rows].cpu().numpy(), rules.STREAM_SAMPLE)
    same = ~bounds.decided
    for by in (0.0, -1e-6, 1e-6):
        moved = (torch.from_numpy(u) + by).clamp(0, 1 - 2.0**-53)
        same |= sample(bounds.exact, uniforms=moved) == tokens
    return None if same.all() else f"tokens of rows {torch.tensor(rows)[~same].tolist()} are not the reference's"


def _round(out: torch.Tensor, given: Round, exact: bool) -> str | None:
    rows = some(len(given.tokens))
    drafts = given.tokens[rows].cpu()
    tokens, columns = out[rows].cpu(), given.num_drafts + 1
    accepted = (tokens >= 0).sum(-1) - 1
    column = torch.arange(columns)
    if (accepted < 0).any() or not ((tokens >= 0) == (column <= accepted[:, None])).all():
        return "a round does not emit 1 to K + 1 tokens, then -1"
    stands = column[:-1] < accepted[:, None]
    if not (tokens[:, :-1] == drafts)[stands].all():
        return "what stands before the last token are not the drafts"
    p = bounds_of(given, OUR_MARGIN if exact else MARGIN)
    if not exact:
        outside = (tokens >= 0) & ~p.may.gather(-1, tokens.clamp(min=0)[..., None])[..., 0]
        return "tokens outside the support" if outside.any() else None
    return _same_round(tokens, accepted, drafts, given, rows, p)


def _same_round(
    tokens: torch.Tensor,
    accepted: torch.Tensor,
    drafts: torch.Tensor,
    given: Round,
    rows: list[int],
    p: Bounds,
) -> str | None:
    """Under the same seeds the tokens are the reference's, but for uniforms within a millionth of a step."""
    same = ~p.decided.all(-1)
    q = None
    if given.draft is not None:
        of_draft = Bounds(given.draft[rows].cpu(), given.params.take(rows).repeated(given.num_drafts), OUR_MARGIN)
        q, same = of_draft.exact, same | ~of_draft.decided.all(-1)
    keys = given.seeds[rows].cpu().numpy(), given.positions[rows].cpu().numpy()
    tests, draws = (torch.from_numpy(u.copy()) for u in draw_uniforms(*keys, given.num_drafts, "rejection"))
    u = torch.cat([tests, draws.gather(-1, accepted[:, None])], -1)
    for by in (0.0, -1e-6, 1e-6):
        moved = (u + by).clamp(0, 1 - 2.0**-53)
        same |= (verify(drafts, p.exact, q, uniforms=moved).tokens == tokens).all(-1)
    return None if same.all() else f"tokens of requests {torch.tensor(rows)[~same].tolist()} are not the reference's"


def _in_place(provider: Provider, case: Case, device: torch.device) -> str | None:
    """What is written must be what the reference writes, on fresh inputs of a small batch."""
    tiny = dataclasses.replace(case, batch=min(case.batch, 3))
    given = build(tiny, torch.device("cpu"), seed=99)
    reference = next(p for p in PROVIDERS if p.name == "reference")
    expected = reference.make(case.stage, copied(given)).result()
    out = provider.make(case.stage, to_device(copied(given), device)).result()
    pairs = zip(out, expected, strict=True) if isinstance(out, list) else [(out, expected)]
    for number, (a, b) in enumerate(pairs):
        a = a.cpu()
        if case.stage == "kv" or provider.exact:
            if not torch.equal(a, b):
                return f"result {number} differs from the reference's in {int((a != b).sum())} of {b.numel()} values"
        elif not torch.allclose(a.float(), b.float(), rtol=ROUNDED[case.dtype], atol=ROUNDED[case.dtype] / 10):
            return f"logits are off by up to {float((a.float() - b.float()).abs().max()):.1e}"
    return None


def to_device(given: Any, device: torch.device) -> Any:
    """Inputs on another device."""
    fields = {f.name: getattr(given, f.name) for f in dataclasses.fields(given)}
    for name, value in fields.items():
        if isinstance(value, torch.Tensor):
            fields[name] = value.to(device)
        elif isinstance(value, list):
            fields[name] = [tensor.to(device) for tensor in value]
    return type(given)(**fields)
