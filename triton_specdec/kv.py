"""Truncate, give back and compact KV caches per row: what was rejected is as if it had never been there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import backend as backends
from . import checks
from .reference import rules


def truncate_kv_(
    lengths: torch.Tensor,
    keep: torch.Tensor,
    caches: Sequence[torch.Tensor] | None = None,
    *,
    scrub: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """Truncate each row to its kept prefix, in place: lengths = min(lengths, keep).

    Truncation is a length. A zeroed key still takes attention, so zeroing is hygiene and no replacement for it.

    Parameters
    ----------
    lengths : int32 [B]
        Tokens in the cache. Written.
    keep : int32 or int64 [B]
        Tokens that stay; negative counts as 0, more than the length changes nothing.
    caches : tensors [B, H, S, D] or [L, B, H, S, D], optional
        Written only with scrub.
    scrub : bool
        Zero the slots that were dropped.

    Returns
    -------
    lengths

    Examples
    --------
    >>> import torch
    >>> n = torch.tensor([17, 4], dtype=torch.int32)
    >>> truncate_kv_(n, torch.tensor([15, 9])).tolist()
    [15, 4]
    """
    _lengths(lengths, keep)
    batch = len(lengths)
    checked = _caches([] if caches is None else caches, batch, lengths.device)
    if scrub and not checked:
        raise ValueError("scrub=True needs caches: a list of tensors [B, H, S, D] or [L, B, H, S, D]")
    chosen = backends.resolve(backend, lengths.device)
    backends.layer(chosen).truncate_kv_(lengths, keep, checked if scrub else [])
    return lengths


def truncate_paged_kv_(
    lengths: torch.Tensor,
    keep: torch.Tensor,
    block_table: torch.Tensor,
    page_size: int,
    free_pages: torch.Tensor,
    num_free: torch.Tensor,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """Truncate each row and give its pages past ceil(keep / page_size) back, in place.

    Parameters
    ----------
    lengths : int32 [B]
        Tokens in the cache. Written.
    keep : int32 or int64 [B]
        Tokens that stay.
    block_table : int32 [B, P]
        Page of each block of a row, -1 where there is none. Freed entries become -1.
    page_size : int
        Tokens a page.
    free_pages : int32 [F]
        Freed pages are appended at num_free, in row order.
    num_free : int32 [1]
        Number of free pages. Written.

    Returns
    -------
    lengths

    Raises
    ------
    ValueError
        Also when the free list (on the CPU) has no room for the pages; nothing is changed then.
    """
    _lengths(lengths, keep)
    batch, device = len(lengths), lengths.device
    checks.integer("page_size", page_size, 1)
    checks.tensor("block_table", block_table, (torch.int32,), (batch, None))
    checks.tensor("free_pages", free_pages, (torch.int32,), (None,))
    checks.tensor("num_free", num_free, (torch.int32,), (1,))
    for name, value in (("block_table", block_table), ("free_pages", free_pages), ("num_free", num_free)):
        checks.same_device(name, value, "lengths", device)
    if device.type == "cpu":
        past = torch.arange(block_table.shape[1]) >= rules.kept_pages(keep.long().clamp(min=0), page_size)[:, None]
        freed, room = int((past & (block_table >= 0)).sum()), len(free_pages) - int(num_free)
        if not 0 <= int(num_free) <= len(free_pages) or freed > room:
            raise ValueError(
                f"free_pages has {len(free_pages)} entries and {int(num_free)} are taken: no room for {freed}"
            )
    chosen = backends.resolve(backend, device)
    backends.layer(chosen).truncate_paged_kv_(lengths, keep, block_table, page_size, free_pages, num_free)
    return lengths


def compact_kv_(
    caches: Sequence[torch.Tensor],
    source: torch.Tensor,
    start: torch.Tensor,
    count: torch.Tensor,
    *,
    backend: str | None = None,
) -> None:
    """Move slots of each row to the end of its prefix, in place: the accepted path of a draft tree.

    Parameters
    ----------
    caches : tensors [B, H, S, D] or [L, B, H, S, D]
    source : int32 or int64 [B, M]
        Slots to move, in order. They may overlap their destination: all loads come first.
    start, count : int32 or int64 [B]
        Slots source[b, :count[b]] go to start[b] .. start[b] + count[b] - 1.
    """
    checks.tensor("source", source, checks.INT_DTYPES, (None, None))
    batch, most = source.shape
    checks.tensor("start", start, checks.INT_DTYPES, (batch,))
    checks.tensor("count", count, checks.INT_DTYPES, (batch,))
    for name, value in (("start", start), ("count", count)):
        checks.same_device(name, value, "source", source.device)
    checked = _caches(caches, batch, source.device)
    if not checked:
        raise ValueError("caches must hold at least one tensor [B, H, S, D] or [L, B, H, S, D]")
    if source.device.type == "cpu":
        slots = min(c.shape[-2] for c in checked)
        used = torch.arange(most) < count[:, None]
        if (count < 0).any() or (count > most).any():
            raise ValueError(f"count must be in [0, {most}], got {count.tolist()}")
        if ((source < 0) | (source >= slots))[used].any():
            raise ValueError(f"source must hold slots in [0, {slots}) of the caches")
        moved = count > 0
        if ((start < 0) | (start.long() + count > slots))[moved].any():
            raise ValueError(f"start + count must stay within the {slots} slots of the caches")
    chosen = backends.resolve(backend, source.device)
    backends.layer(chosen).compact_kv_(checked, source, start, count)


def _lengths(lengths: torch.Tensor, keep: torch.Tensor) -> None:
    checks.tensor("lengths", lengths, (torch.int32,), (None,))
    checks.tensor("keep", keep, checks.INT_DTYPES, lengths.shape)
    checks.same_device("keep", keep, "lengths", lengths.device)


def _caches(caches: object, batch: int, device: torch.device) -> list[torch.Tensor]:
    if isinstance(caches, torch.Tensor) or not isinstance(caches, Sequence):
        raise TypeError(f"caches must be a list of tensors, got {type(caches).__name__}")
    return [_cache(f"caches[{i}]", cache, batch, device) for i, cache in enumerate(caches)]


def _cache(name: str, cache: object, batch: int, device: torch.device) -> torch.Tensor:
    if not isinstance(cache, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(cache).__name__}")
    if cache.dim() not in (4, 5) or cache.shape[-4] != batch:
        raise ValueError(f"{name} must have shape [{batch}, H, S, D] or [L, {batch}, H, S, D], got {list(cache.shape)}")
    if cache.element_size() > 8:
        raise TypeError(f"{name} must hold elements of at most 8 bytes, got {cache.dtype}")
    checks.same_device(name, cache, "lengths", device)
    return cache
