"""Truncate, give back and compact KV caches per row: what was rejected is as if it had never been there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import backend as backends
from . import checks
from .reference import rules

# The order of heads and slots in a cache: "bhsd" is [B, H, S, D], "bshd" is [B, S, H, D].
LAYOUTS = ("bhsd", "bshd")


def truncate_kv_(
    lengths: torch.Tensor,
    keep: torch.Tensor,
    caches: Sequence[torch.Tensor] | None = None,
    *,
    scrub: bool = False,
    layout: str = "bhsd",
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
        Written only with scrub. Of any type, and views; for the kernels the last stride must be 1.
    scrub : bool
        Zero the slots that were dropped, in all caches.
    layout : "bhsd" or "bshd"
        "bshd": caches are [B, S, H, D] or [L, B, S, H, D].

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
    checked = _caches([] if caches is None else caches, batch, "lengths", lengths.device, layout)
    if scrub and not checked:
        raise ValueError("scrub=True needs caches: a list of tensors [B, H, S, D] or [L, B, H, S, D]")
    if scrub and lengths.device.type == "cpu" and batch:
        slots = min(cache.shape[-2] for cache in checked)
        if int(lengths.max()) > slots:
            raise ValueError(
                f"lengths go up to {int(lengths.max())}, but caches have {slots} slots (layout={layout!r})"
            )
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

    No page is lost: what is freed, kept and free before is freed, kept and free after. On a device, which the host does
    not ask, pages that the free list has no room for stay in the table, and with num_free outside [0, F] all do; the
    next call gives them back.

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
    layout: str = "bhsd",
    backend: str | None = None,
) -> None:
    """Move slots of each row to the end of its prefix, in place: the accepted path of a draft tree.

    Parameters
    ----------
    caches : tensors [B, H, S, D] or [L, B, H, S, D]
        Written. Of any type, and views that do not overlap; a cache that layers share may stand here several times.
        For the kernels the last stride must be 1.
    source : int32 or int64 [B, M]
        Slots to move, in order. They may overlap their destination: all loads come first. Kernels take M <= 4096.
    start, count : int32 or int64 [B]
        Slots source[b, :count[b]] go to start[b] .. start[b] + count[b] - 1.
    layout : "bhsd" or "bshd"
        "bshd": caches are [B, S, H, D] or [L, B, S, H, D].

    Raises
    ------
    ValueError
        Also for slots outside the caches, on the CPU. On a device, which the host does not ask, a row that names a
        slot outside a cache (or a count outside [0, M]) stays as it is in that cache.

    Examples
    --------
    >>> import torch
    >>> cache = torch.arange(6.0).view(1, 1, 6, 1)
    >>> compact_kv_([cache], torch.tensor([[2, 5]]), torch.tensor([1]), torch.tensor([2]))
    >>> cache.flatten().tolist()
    [0.0, 2.0, 5.0, 3.0, 4.0, 5.0]
    """
    checks.tensor("source", source, checks.INT_DTYPES, (None, None))
    batch, most = source.shape
    checks.tensor("start", start, checks.INT_DTYPES, (batch,))
    checks.tensor("count", count, checks.INT_DTYPES, (batch,))
    for name, value in (("start", start), ("count", count)):
        checks.same_device(name, value, "source", source.device)
    checked = _caches(caches, batch, "source", source.device, layout)
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


def _caches(caches: object, batch: int, other: str, device: torch.device, layout: str) -> list[torch.Tensor]:
    """Caches as [B, H, S, D] or [L, B, H, S, D], whatever their layout; one that layers share is listed once."""
    checks.choice("layout", layout, LAYOUTS)
    if isinstance(caches, torch.Tensor) or not isinstance(caches, Sequence):
        raise TypeError(f"caches must be a list of tensors, got {type(caches).__name__}")
    checked = {}
    for i, cache in enumerate(caches):
        _cache(f"caches[{i}]", cache, batch, layout)
        checks.same_device(f"caches[{i}]", cache, other, device)
        place = cache.data_ptr(), cache.dtype, cache.shape, cache.stride()
        checked[place] = cache if layout == "bhsd" else cache.transpose(-3, -2)
    return list(checked.values())


def _cache(name: str, cache: object, batch: int, layout: str) -> None:
    if not isinstance(cache, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(cache).__name__}")
    if cache.dim() not in (4, 5) or cache.shape[-4] != batch:
        inner = ", ".join(layout[1:].upper())
        raise ValueError(f"{name} must have shape [{batch}, {inner}] or [L, {batch}, {inner}], got {list(cache.shape)}")
    if cache.element_size() > 8:
        raise TypeError(f"{name} must hold elements of at most 8 bytes, got {cache.dtype}")
