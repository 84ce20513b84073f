"""What a point works on: tensors of a case, made anew for every buffer of a measurement."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from .cases import DTYPES, Case, Filter, make_logits

KV_LAYERS, KV_HEADS, KV_SLOTS, KV_WIDTH, PAGE = 16, 8, 512, 128, 16


@dataclass(frozen=True, eq=False)
class Params:
    """One filter a row, as tensors; and as numbers where all rows share it."""

    filters: tuple[Filter, ...]
    device: torch.device

    def __post_init__(self) -> None:
        # Everything is there before a call is timed, or compiled.
        self.options()
        _ = self.one

    @cached_property
    def one(self) -> Filter | None:
        """The filter of all rows, None where they differ."""
        return self.filters[0] if len(set(self.filters)) == 1 else None

    def _each(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(f, name) for f in self.filters], dtype=dtype, device=self.device)

    @cached_property
    def temperature(self) -> torch.Tensor:
        """float64 [N]."""
        return self._each("temperature", torch.float64)

    @cached_property
    def top_k(self) -> torch.Tensor:
        """int64 [N], 0 where it is off."""
        return self._each("top_k", torch.int64)

    @cached_property
    def top_p(self) -> torch.Tensor:
        """float64 [N]."""
        return self._each("top_p", torch.float64)

    @cached_property
    def min_p(self) -> torch.Tensor:
        """float64 [N]."""
        return self._each("min_p", torch.float64)

    @cached_property
    def min_tokens_to_keep(self) -> torch.Tensor:
        """int64 [N], all 1."""
        return torch.ones(len(self.filters), dtype=torch.int64, device=self.device)

    def options(self) -> dict[str, Any]:
        """The arguments of `triton_specdec.filter_logits`: tensors of the right type, which cost it no launch."""
        names = ("temperature", "top_k", "top_p", "min_p", "min_tokens_to_keep")
        return {name: getattr(self, name) for name in names}

    def repeated(self, count: int) -> Params:
        """The same for `count` rows of each request."""
        return Params(tuple(f for f in self.filters for _ in range(count)), self.device)

    def take(self, rows: list[int]) -> Params:
        """The parameters of some rows, on the CPU."""
        return Params(tuple(self.filters[i] for i in rows), torch.device("cpu"))


@dataclass(frozen=True, eq=False)
class Rows:
    """Filter and sample: rows of logits."""

    logits: torch.Tensor  # [N, V]
    params: Params
    seeds: torch.Tensor  # int64 [N]
    positions: torch.Tensor  # int64 [N]


@dataclass(frozen=True, eq=False)
class Round:
    """Verify: the logits of both models and the drafted tokens."""

    target: torch.Tensor  # [B, K + 1, V]
    draft: torch.Tensor | None  # [B, K, V], None for a deterministic draft
    tokens: torch.Tensor  # int64 [B, K]
    params: Params  # of the requests
    seeds: torch.Tensor  # int64 [B]
    positions: torch.Tensor  # int64 [B]

    @property
    def num_drafts(self) -> int:
        """K."""
        return self.tokens.shape[1]


@dataclass(frozen=True, eq=False)
class Cache:
    """kv: lengths, caches of all layers, pages. What is written is restored before every call (see `copy`)."""

    operation: str
    lengths: torch.Tensor  # int32 [B]
    keep: torch.Tensor  # int32 [B]
    caches: list[torch.Tensor]  # [B, H, S, D] each
    table: torch.Tensor  # int32 [B, P]
    free: torch.Tensor  # int32 [F]
    num_free: torch.Tensor  # int32 [1]
    source: torch.Tensor  # int32 [B, M]
    start: torch.Tensor  # int32 [B]
    count: torch.Tensor  # int32 [B]

    def written(self) -> list[torch.Tensor]:
        """The small tensors that a call writes."""
        return [self.lengths, self.table, self.free, self.num_free]


@dataclass(frozen=True, eq=False)
class Occurred:
    """Penalties: logits, and how often each token has occurred."""

    logits: torch.Tensor  # [B, K + 1, V], written
    counts: torch.Tensor  # int32 [B, V]
    prompt_mask: torch.Tensor  # bool [B, V]
    tokens: torch.Tensor  # int64 [B, K]
    repetition: float = 1.1
    frequency: float = 0.2
    presence: float = 0.1


Inputs = Rows | Round | Cache | Occurred


def size_of(given: Inputs) -> int:
    """Bytes of all tensors."""
    size = 0
    for value in vars(given).values():
        for tensor in value if isinstance(value, list) else [value]:
            size += tensor.nbytes if isinstance(tensor, torch.Tensor) else 0
    return size


def build(case: Case, device: torch.device, seed: int = 0) -> Inputs:
    """The inputs of a case; the same for the same seed and device."""
    if case.stage == "kv":
        return _cache(case, device, seed)
    g = torch.Generator(device).manual_seed(10_000 + seed)
    dtype = DTYPES[case.dtype]
    params = Params(tuple(case.row_filters(case.batch)), device)
    logits = make_logits(case.logits, case.rows, case.vocab, dtype, device, seed)
    seeds = torch.randint(0, 2**62, (case.batch,), generator=g, device=device)
    positions = torch.randint(0, 2**20, (case.batch,), generator=g, device=device)
    if case.stage in ("filter", "sample"):
        return Rows(logits, params, seeds, positions)
    logits = logits.view(case.batch, case.drafts + 1, case.vocab)
    if case.stage == "penalties":
        return _occurred(logits, g)
    return _round(case, logits, params, seeds, positions, g)


def _round(
    case: Case, target: torch.Tensor, params: Params, seeds: torch.Tensor, positions: torch.Tensor, g: torch.Generator
) -> Round:
    """Drafts of a model near the target, or its maxima: its logits and as much noise as ends some rounds early."""
    # Plain PyTorch takes these inputs, so it is imported when they are made.
    from .plain import draw, filtered

    near = target[:, :-1].float()
    near = near + torch.empty_like(near).normal_(generator=g) * 0.5
    draft = near.to(target.dtype)
    if case.draft == "one-hot":
        return Round(target, None, draft.argmax(-1), params, seeds, positions)
    flat = draft.reshape(-1, draft.shape[-1])
    tokens = draw(filtered(flat, params.repeated(case.drafts)), g).view(case.batch, case.drafts)
    return Round(target, draft, tokens, params, seeds, positions)


def _cache(case: Case, device: torch.device, seed: int) -> Cache:
    g = torch.Generator(device).manual_seed(seed)
    b, moves = case.batch, case.drafts + 1
    shape = (b, KV_HEADS, KV_SLOTS, KV_WIDTH)
    scrubs = case.logits in ("scrub", "compact")
    caches = []
    for _ in range(2 * KV_LAYERS if scrubs else 0):
        caches.append(torch.empty(shape, dtype=DTYPES[case.dtype], device=device).normal_(generator=g))
    lengths = torch.randint(KV_SLOTS // 2, KV_SLOTS, (b,), generator=g, device=device, dtype=torch.int32)
    rejected = torch.randint(0, moves + 1, (b,), generator=g, device=device, dtype=torch.int32)
    blocks = KV_SLOTS // PAGE
    table = torch.arange(b * blocks, dtype=torch.int32, device=device).view(b, blocks)
    start = lengths - moves
    count = torch.randint(1, moves + 1, (b,), generator=g, device=device, dtype=torch.int32)
    # The accepted path of a tree of twice as many nodes, in order.
    order = torch.rand(b, 2 * moves, generator=g, device=device).argsort(-1)[:, :moves].sort(-1).values
    source = (start[:, None] - moves + order).to(torch.int32)
    free = torch.full((b * blocks,), -1, dtype=torch.int32, device=device)
    num_free = torch.zeros(1, dtype=torch.int32, device=device)
    keep = lengths - rejected * (PAGE if case.logits == "pages" else 1)
    return Cache(case.logits, lengths, keep, caches, table, free, num_free, source, start - moves, count)


def _occurred(logits: torch.Tensor, g: torch.Generator) -> Occurred:
    """A prompt of 512 and an output of 256 tokens, some of them often."""
    batch, columns, vocab = logits.shape
    device = logits.device
    counts = torch.zeros(batch, vocab, dtype=torch.int32, device=device)
    output = torch.randint(vocab, (batch, 256), generator=g, device=device)
    counts.scatter_add_(1, output, torch.ones_like(output, dtype=torch.int32))
    prompt = torch.zeros(batch, vocab, dtype=torch.bool, device=device)
    prompt.scatter_(1, torch.randint(vocab, (batch, 512), generator=g, device=device), True)
    tokens = torch.randint(vocab, (batch, columns - 1), generator=g, device=device)
    return Occurred(logits, counts, prompt, tokens)
