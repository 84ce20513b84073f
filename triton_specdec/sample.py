"""Support -> token, or logits -> token: one draw a row."""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import backend as backends
from . import checks
from .filter import FilteredLogits, checked
from .params import RowParams, random_seeds
from .reference import rules

METHODS = ("inverse_cdf", "gumbel")
STREAMS = {"sample": rules.STREAM_SAMPLE, "draft": rules.STREAM_DRAFT}


def sample(
    filtered: FilteredLogits,
    *,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    steps: torch.Tensor | None = None,
    uniforms: torch.Tensor | None = None,
    method: str = "inverse_cdf",
    stream: str = "sample",
) -> torch.Tensor:
    """Draw one token a row.

    Parameters
    ----------
    filtered : FilteredLogits
        Rows R: [N] or [B, K + 1].
    seeds : int64 [N] (or [B], repeated over K + 1), optional
        One a row. None: from torch's generator.
    positions : ints [N] or [B, K + 1], optional
        Absolute position of the token to be drawn; 0 where not given. The same seed and position draw the same.
    steps : ints, shape of positions, optional
        Which of the numbers at a position; 0 where not given. Drafts for `verify` with rule "block" are drawn with the
        round's first position and their step 0 .. K - 1.
    uniforms : float64 [N] or [B, K + 1] in [0, 1), optional
        Instead of seeds, for method "inverse_cdf".
    method : "inverse_cdf" or "gumbel"
        The first token in id order whose cumulative probability exceeds u; or the argmax of log p plus noise keyed by
        (seed, position, token id), the draw of the coupled rule.
    stream : "sample" or "draft"
        Which random numbers: proposals draw from "draft", so that verification never meets their noise again. Gumbel
        noise is shared on purpose and knows one stream only.

    Returns
    -------
    int64 [*R]

    Examples
    --------
    >>> import torch
    >>> from triton_specdec import filter_logits
    >>> logits = torch.tensor([0.25, 0.0, 0.75]).log()[None]
    >>> sample(filter_logits(logits), uniforms=torch.tensor([0.25], dtype=torch.float64)).tolist()
    [2]
    """
    if not isinstance(filtered, FilteredLogits):
        raise TypeError(f"filtered must be a FilteredLogits (see filter_logits), got {type(filtered).__name__}")
    noise = (seeds, positions, steps, uniforms)
    drawing = checked_drawing(filtered.shape, filtered.logits.device, noise, method, stream)
    out: torch.Tensor = backends.layer(filtered.backend).sample(filtered, drawing)
    return out


class SampledLogits(NamedTuple):
    """What `sample_logits` returns.

    Attributes
    ----------
    tokens : int64 [*R]
        One token a row.
    filtered : FilteredLogits
        What they were drawn from: the `draft` (or `target`) of `verify`.
    """

    tokens: torch.Tensor
    filtered: FilteredLogits


def sample_logits(
    logits: torch.Tensor,
    temperature: float | torch.Tensor = 1.0,
    top_k: int | torch.Tensor | None = None,
    top_p: float | torch.Tensor | None = None,
    min_p: float | torch.Tensor | None = None,
    *,
    min_tokens_to_keep: int | torch.Tensor = 1,
    order: str = "top_k_first",
    token_mask: torch.Tensor | None = None,
    vocab_size: int | None = None,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    steps: torch.Tensor | None = None,
    uniforms: torch.Tensor | None = None,
    method: str = "inverse_cdf",
    stream: str = "sample",
    backend: str | None = None,
) -> SampledLogits:
    """Filter rows of logits and draw one token a row: `filter_logits` and `sample` in one, with the same results.

    On a GPU both are two launches, which is what `filter_logits` alone takes.

    Parameters
    ----------
    logits, temperature, top_k, top_p, min_p, min_tokens_to_keep, order, token_mask, vocab_size, backend
        As in `filter_logits`.
    seeds, positions, steps, uniforms, method, stream
        As in `sample`.

    Returns
    -------
    SampledLogits

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `filter_logits` and `sample`.

    Examples
    --------
    >>> import torch
    >>> out = sample_logits(torch.tensor([[1.0, 3.0, 2.0]]), temperature=0.0)
    >>> out.tokens.tolist(), out.filtered.support_size.tolist()
    ([1], [1])
    """
    values = (temperature, top_k, top_p, min_p, min_tokens_to_keep)
    params, token_mask = checked(logits, values, order, token_mask, vocab_size)
    noise = (seeds, positions, steps, uniforms)
    drawing = checked_drawing(logits.shape[:-1], logits.device, noise, method, stream)
    layer = backends.layer(backends.resolve(backend, logits.device))
    filtered, tokens = layer.filter_sample(logits, params, order, token_mask, vocab_size, drawing)
    return SampledLogits(tokens, filtered)


class Drawing(NamedTuple):
    """Checked arguments of a draw, of the rows' shape: uniforms, or seeds and positions."""

    method: str
    seeds: torch.Tensor | None = None  # int64
    positions: torch.Tensor | None = None  # int64
    steps: torch.Tensor | None = None  # int64
    uniforms: torch.Tensor | None = None  # float64
    stream: int = rules.STREAM_SAMPLE


def checked_drawing(
    rows: torch.Size,
    device: torch.device,
    noise: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    method: str,
    stream: str,
) -> Drawing:
    """The arguments of `sample`, checked; `noise` is seeds, positions, steps, uniforms."""
    seeds, positions, steps, uniforms = noise
    checks.choice("method", method, METHODS)
    checks.choice("stream", stream, tuple(STREAMS))
    if uniforms is not None:
        if seeds is not None or positions is not None or steps is not None:
            raise ValueError("uniforms are given instead of seeds, positions and steps: pass one or the other")
        if method == "gumbel":
            raise ValueError("method='gumbel' needs noise for every token: pass seeds, not uniforms")
        return Drawing(method, uniforms=unit_interval("uniforms", uniforms, rows, device))
    if method == "gumbel" and stream != "sample":
        raise ValueError("method='gumbel' shares its noise between draft and target: it has no stream 'draft'")
    if method == "gumbel" and steps is not None:
        raise ValueError("method='gumbel' takes its noise from the position alone: it has no steps")
    row_seeds = seed_rows(seeds, rows, device)
    at = position_rows("positions", positions, rows, device)
    number = None if steps is None else position_rows("steps", steps, rows, device)
    if number is not None and device.type == "cpu" and not ((number >= 0) & (number < 2**32)).all():
        raise ValueError("steps must be in [0, 2^32)")
    return Drawing(method, row_seeds, at, number, stream=STREAMS[stream])


def sample_rows(
    logits: torch.Tensor, params: RowParams, drawing: Drawing, vocab_size: int | None = None
) -> tuple[FilteredLogits, torch.Tensor]:
    """`sample_logits` for arguments that were checked: one parameter a row, as the decode loop holds them."""
    layer = backends.layer(backends.resolve(None, logits.device))
    out: tuple[FilteredLogits, torch.Tensor] = layer.filter_sample(
        logits, params, "top_k_first", None, vocab_size, drawing
    )
    return out


def unit_interval(name: str, value: torch.Tensor, shape: torch.Size, device: torch.device) -> torch.Tensor:
    """Uniforms of the shape (or flat), checked; values are looked at on the CPU only."""
    flat = isinstance(value, torch.Tensor) and value.dim() == 1 and len(shape) == 2
    checks.tensor(name, value, (torch.float64,), (shape.numel(),) if flat else shape)
    checks.same_device(name, value, "logits", device)
    if device.type == "cpu" and not ((value >= 0) & (value < 1)).all():
        raise ValueError(f"{name} must be in [0, 1)")
    return value.reshape(shape)


def seed_rows(seeds: torch.Tensor | None, rows: torch.Size, device: torch.device) -> torch.Tensor:
    """Seeds int64 of the rows' shape; one a request is repeated over the rows of that request."""
    if seeds is None:
        return random_seeds(rows.numel(), device).reshape(rows)
    if not isinstance(seeds, torch.Tensor) or seeds.dtype not in checks.INT_DTYPES:
        raise TypeError(
            "seeds must be a tensor of int64 with one seed a row: a shared seed would draw alike in all rows"
        )
    checks.same_device("seeds", seeds, "logits", device)
    if seeds.shape in (rows, torch.Size([rows.numel()])):
        return seeds.long().reshape(rows)
    if len(rows) == 2 and seeds.shape == rows[:1]:
        return seeds.long()[:, None].expand(rows)
    raise ValueError(f"seeds must have one value for each of {list(rows)}, got {list(seeds.shape)}")


def position_rows(name: str, value: torch.Tensor | None, rows: torch.Size, device: torch.device) -> torch.Tensor:
    """Positions or steps: int64 of the rows' shape, 0 where not given."""
    if value is None:
        return torch.zeros(rows, dtype=torch.int64, device=device)
    flat = isinstance(value, torch.Tensor) and value.dim() == 1
    checks.tensor(name, value, checks.INT_DTYPES, (rows.numel(),) if flat else rows)
    checks.same_device(name, value, "logits", device)
    return value.long().reshape(rows)
