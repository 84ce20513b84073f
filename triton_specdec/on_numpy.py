"""The reference as a backend: tensors to NumPy arrays (without a copy on the CPU), a stage, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .filter import FilteredLogits
from .params import RowParams
from .reference import filter as reference_filter
from .reference import kv, penalties, rng
from .reference import sample as reference_sample
from .reference import verify as reference_verify
from .reference.filter import ROW_FIELDS, Probabilities, Support
from .sample import Drawing
from .verify import VerifyResult, VerifyTreeResult


def filter_logits(
    logits: torch.Tensor, params: RowParams, order: str, token_mask: torch.Tensor | None, vocab_size: int | None
) -> FilteredLogits:
    """See `triton_specdec.filter_logits`."""
    rows = logits.shape[:-1]
    mask = None if token_mask is None else _rows(token_mask)
    values = [_array(p) for p in params]
    s = reference_filter.filter_logits(_rows(logits), *values, order=order, token_mask=mask, vocab_size=vocab_size)
    fields: dict[str, Any] = {n: _tensor(getattr(s, n).reshape(rows), logits.device) for n in ROW_FIELDS}
    # On the CPU the arrays are the tensors' own memory: later stages need not wrap them again.
    source = s if logits.device.type == "cpu" and logits.dtype != torch.bfloat16 else None
    return FilteredLogits(
        logits, **fields, token_mask=token_mask, vocab_size=vocab_size, backend="reference", source=source
    )


def probs(f: FilteredLogits) -> torch.Tensor:
    """See `FilteredLogits.probs`."""
    return _tensor(_support(f).probs().astype(np.float32), f.logits.device).reshape(f.logits.shape)


def keep_mask(f: FilteredLogits) -> torch.Tensor:
    """See `FilteredLogits.keep_mask`."""
    return _tensor(_support(f).keep_mask(), f.logits.device).reshape(f.logits.shape)


def log_prob(f: FilteredLogits, tokens: torch.Tensor) -> torch.Tensor:
    """See `FilteredLogits.log_prob`."""
    width = 1 if tokens.dim() == len(f.shape) else tokens.shape[-1]
    ids = _array(tokens.long()).reshape(f.shape.numel(), width)
    return _tensor(_support(f).log_prob(ids).astype(np.float32), f.logits.device).reshape(tokens.shape)


def sample(f: FilteredLogits, drawing: Drawing) -> torch.Tensor:
    """See `triton_specdec.sample`."""
    support = _support(f)
    if drawing.uniforms is not None:
        token = reference_sample.sample(support, _flat(drawing.uniforms))
    else:
        assert drawing.seeds is not None
        assert drawing.positions is not None
        seeds, positions = _flat(drawing.seeds), _flat(drawing.positions)
        if drawing.method == "gumbel":
            token = reference_sample.gumbel_argmax(support, seeds, positions)
        else:
            steps = 0 if drawing.steps is None else _flat(drawing.steps)
            token = reference_sample.sample(support, rng.uniforms(seeds, positions, drawing.stream, steps))
    return _tensor(token, f.logits.device).reshape(f.shape)


def filter_sample(
    logits: torch.Tensor,
    params: RowParams,
    order: str,
    token_mask: torch.Tensor | None,
    vocab_size: int | None,
    drawing: Drawing,
) -> tuple[FilteredLogits, torch.Tensor]:
    """See `triton_specdec.sample_logits`."""
    f = filter_logits(logits, params, order, token_mask, vocab_size)
    return f, sample(f, drawing)


def stack_source(parts: list[FilteredLogits]) -> None:
    """Joined rows are wrapped anew."""


def verify(
    draft_tokens: torch.Tensor,
    target: FilteredLogits | torch.Tensor,
    draft: FilteredLogits | torch.Tensor | None,
    num_draft_tokens: torch.Tensor,
    rule: str,
    seeds: torch.Tensor | None,
    positions: torch.Tensor | None,
    uniforms: torch.Tensor | None,
) -> VerifyResult:
    """See `triton_specdec.verify`; either seeds and positions, or uniforms."""
    tokens, count = _array(draft_tokens), _array(num_draft_tokens)
    if rule == "coupled":
        assert isinstance(target, FilteredLogits)
        assert seeds is not None
        assert positions is not None
        out = reference_verify.verify_coupled(tokens, _support(target), count, _array(seeds), _array(positions))
        return _verified(out, draft_tokens.device)
    if uniforms is None:
        assert seeds is not None
        assert positions is not None
        accept, draw = reference_verify.draw_uniforms(_array(seeds), _array(positions), tokens.shape[-1], rule)
    else:
        u = _array(uniforms)
        accept, draw = u[:, :-1], np.broadcast_to(u[:, -1:], u.shape)
    q = None if draft is None else _law(draft)
    out = reference_verify.verify(tokens, _law(target), q, count, rule=rule, accept_uniforms=accept, draw_uniforms=draw)
    return _verified(out, draft_tokens.device)


def verify_tree(
    tree_tokens: torch.Tensor,
    parents: torch.Tensor,
    target: FilteredLogits,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> VerifyTreeResult:
    """See `triton_specdec.verify_tree`."""
    keys = _array(seeds), _array(positions)
    out = reference_verify.verify_tree(_array(tree_tokens), _array(parents), _support(target), *keys)
    fields = out._replace(log_probs=out.log_probs.astype(np.float32))
    return VerifyTreeResult(*(_tensor(field, tree_tokens.device) for field in fields))


def truncate_kv_(lengths: torch.Tensor, keep: torch.Tensor, caches: list[torch.Tensor]) -> None:
    """Truncate the lengths and zero the dropped slots of the caches."""
    before = _array(lengths).copy()
    with _Written(lengths) as (array,):
        kv.truncate_lengths_(array, _array(keep))
        after = array.copy()
    for cache in caches:
        with _Written(_words(cache)) as (array,):
            kv.scrub_(array, after, before)


def truncate_paged_kv_(
    lengths: torch.Tensor,
    keep: torch.Tensor,
    block_table: torch.Tensor,
    page_size: int,
    free_pages: torch.Tensor,
    num_free: torch.Tensor,
) -> None:
    """See `triton_specdec.truncate_paged_kv_`."""
    with _Written(lengths, block_table, free_pages, num_free) as (n, table, pages, free):
        kv.truncate_pages_(n, _array(keep.long()), table, page_size, pages, free)


def compact_kv_(caches: list[torch.Tensor], source: torch.Tensor, start: torch.Tensor, count: torch.Tensor) -> None:
    """See `triton_specdec.compact_kv_`."""
    for cache in caches:
        with _Written(_words(cache)) as (array,):
            kv.compact_(array, _array(source.long()), _array(start.long()), _array(count.long()))


def apply_penalties_(
    logits: torch.Tensor,
    counts: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    prompt_mask: torch.Tensor | None,
    draft_tokens: torch.Tensor | None,
) -> None:
    """See `triton_specdec.apply_penalties_`; logits [B, K + 1, V]."""
    mask = None if prompt_mask is None else _array(prompt_mask)
    drafts = None if draft_tokens is None else _array(draft_tokens)
    array = _array(logits).copy()
    values = (_array(repetition), _array(frequency), _array(presence))
    penalties.apply_penalties_(array, _array(counts), *values, mask, drafts)
    logits.copy_(torch.from_numpy(array))


class _Written:
    """Arrays over tensors that a stage writes: the tensors' own memory on the CPU, copied back from elsewhere."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def __enter__(self) -> list[np.ndarray]:
        self.arrays = [_array(t) for t in self.tensors]
        return self.arrays

    def __exit__(self, *error: object) -> None:
        for tensor, array in zip(self.tensors, self.arrays, strict=True):
            if tensor.device.type != "cpu":
                tensor.copy_(torch.from_numpy(array))


def _array(tensor: torch.Tensor) -> np.ndarray:
    if tensor.requires_grad or tensor.device.type != "cpu":
        tensor = tensor.detach().cpu()
    # NumPy has no bfloat16; float32 holds every value of it.
    array: np.ndarray = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.to(device)


def _rows(tensor: torch.Tensor) -> np.ndarray:
    return _array(tensor).reshape(tensor.shape[:-1].numel(), tensor.shape[-1])


def _flat(tensor: torch.Tensor) -> np.ndarray:
    return _array(tensor).reshape(-1)


def _words(cache: torch.Tensor) -> torch.Tensor:
    """A cache as integers: its values are moved or zeroed, never computed with."""
    return cache.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[cache.element_size()])


def _support(f: FilteredLogits) -> Support:
    if isinstance(f.source, Support):
        return f.source
    fields: dict[str, Any] = {n: _flat(getattr(f, n)) for n in ROW_FIELDS}
    mask = None if f.token_mask is None else _rows(f.token_mask)
    return Support(_rows(f.logits), **fields, token_mask=mask, vocab_size=f.vocab_size)


def _law(law: FilteredLogits | torch.Tensor) -> Support | Probabilities:
    return _support(law) if isinstance(law, FilteredLogits) else Probabilities.checked(_rows(law))


def _verified(v: reference_verify.Verified, device: torch.device) -> VerifyResult:
    log_probs = v.log_probs.astype(np.float32)
    return VerifyResult(*(_tensor(a, device) for a in (v.tokens, v.num_accepted, v.num_emitted, log_probs, v.status)))
