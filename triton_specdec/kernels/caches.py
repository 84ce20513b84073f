"""KV caches as the kernels take them: words of up to 8 bytes, and all tensors that lie alike in one launch.

Moving and zeroing need no type, so every cache becomes integers of the widest word that its addresses and strides
allow. A table of pointers on the device would have to be copied there, which waits for the host and cannot be captured
in a CUDA graph; so the tensors are kernel arguments, and a program selects its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl

# A kernel takes 4 KiB of arguments, and a grid has 65535 programs in its second dimension.
MOST_TENSORS = 256
MOST_ITEMS = 65535
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class Form(NamedTuple):
    """What caches of one launch have in common: [L, B, H, S, W] words, strides in units."""

    word: torch.dtype
    unit: int  # words of a unit: 2, which is 16 bytes, where everything lies at multiples of them
    layers: int
    heads: int
    slots: int
    width: int  # words of a head
    strides: tuple[int, ...]  # of a layer, a row, a head and a slot

    @property
    def columns(self) -> int:
        """Words of a slot."""
        return self.heads * self.width


class Placed(NamedTuple):
    """`Form` as kernel arguments: sizes and strides that are known at run time."""

    layers: int | tl.tensor
    heads: int | tl.tensor
    slots: int | tl.tensor
    layer: int | tl.tensor
    row: int | tl.tensor
    head: int | tl.tensor
    slot: int | tl.tensor


def form_of(cache: torch.Tensor) -> Form:
    """How a cache [B, H, S, D] or [L, B, H, S, D] lies.

    Raises
    ------
    ValueError
        The last stride is not 1.
    """
    layers, _, heads, slots, width = (1, *cache.shape)[-5:]
    if width > 1 and cache.stride(-1) != 1:
        raise ValueError(f"caches must have a last stride of 1 for backend='triton', got strides {cache.stride()}")
    size = cache.element_size()
    strides = [0, *used_strides(cache)[:-1]][-4:]
    align = math.gcd(16, width * size, cache.data_ptr(), *(s * size for s in strides))
    word, unit = WORDS[align], align // min(align, 8)
    return Form(
        word, unit, layers, heads, slots, width * size // min(align, 8), tuple(s * size // align for s in strides)
    )


def used_strides(cache: torch.Tensor) -> list[int]:
    """Strides that say how a cache lies: that of a dimension of 1 is never used, and may be anything."""
    each = [stride if size > 1 else 0 for size, stride in zip(cache.shape, cache.stride(), strict=True)]
    return [*each[:-1], 1]


def in_words(cache: torch.Tensor, word: torch.dtype) -> torch.Tensor:
    """A cache as words."""
    return (cache.as_strided(cache.shape, used_strides(cache)) if 1 in cache.shape else cache).view(word)


def launches(caches: list[torch.Tensor]) -> Iterator[tuple[Form, Placed, tuple[torch.Tensor, ...]]]:
    """Caches that lie alike, as many as one launch takes."""
    forms: dict[tuple, Form] = {}
    alike: dict[Form, list[torch.Tensor]] = {}
    for cache in caches:
        key = cache.dtype, cache.shape, cache.stride(), cache.data_ptr() % 16
        if key not in forms:
            forms[key] = form_of(cache)
        if cache.numel():
            alike.setdefault(forms[key], []).append(in_words(cache, forms[key].word))
    for form, tensors in alike.items():
        placed = Placed(form.layers, form.heads, form.slots, *form.strides)
        most = max(1, min(MOST_TENSORS, MOST_ITEMS // form.layers))
        for first in range(0, len(tensors), most):
            yield form, placed, tuple(tensors[first : first + most])


@triton.jit
def pick(caches, which):
    """One of several pointers: arguments cannot be indexed, and a select between them costs two instructions."""
    chosen = caches[0]
    for i in tl.static_range(1, len(caches)):
        chosen = tl.where(which == i, caches[i], chosen)
    return chosen


@triton.jit
def slot_words(caches, placed, b, item, column, WIDTH: tl.constexpr, UNIT: tl.constexpr):
    """Pointers to words `column` of slot 0 of row `b`; `item` counts the layers of all tensors."""
    layer = (item % placed.layers).to(tl.int64)
    row = pick(caches, item // placed.layers) + (layer * placed.layer + b * placed.row) * UNIT
    return row + (column // WIDTH).to(tl.int64) * placed.head * UNIT + column % WIDTH
