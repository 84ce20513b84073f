"""Logits -> support: temperature, top-k, top-p, min-p on rows of logits, without a [rows, V] result."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from . import backend as backends
from . import checks
from .params import ORDERS, RowParams, row_params
from .reference.filter import ROW_FIELDS


@dataclass(frozen=True, eq=False)
class FilteredLogits:
    """Filtered distributions, described by a few numbers a row. R stands for the rows: [N] or [B, K + 1].

    Attributes
    ----------
    logits : floats [*R, V]
        Borrowed: they must not change while this is in use.
    maximum : float32 [*R]
        The largest logit.
    inverse_temperature : float64 [*R]
        1 / T; 0 where the row is one-hot (T = 0, or nothing finite).
    cut_value : float32 [*R]
        Logit of the last kept token; -inf where no filter cut.
    cut_id : int32 [*R]
        Last kept id at the cut value; -1 where no filter cut.
    log_normalizer : float64 [*R]
        log of the kept sum of exp((x - maximum) / T).
    support_size : int32 [*R]
        Number of kept tokens.
    argmax : int64 [*R]
        First maximum.
    status : int32 [*R]
        Bits of `Status`, 0 where all is well.
    token_mask : int32 [*R, ceil(V / 32)] or None
    vocab_size : int or None
    backend : "reference" or "triton"
    source : object
        What the backend keeps for its own later stages; nothing to rely on.
    """

    logits: torch.Tensor
    maximum: torch.Tensor
    inverse_temperature: torch.Tensor
    cut_value: torch.Tensor
    cut_id: torch.Tensor
    log_normalizer: torch.Tensor
    support_size: torch.Tensor
    argmax: torch.Tensor
    status: torch.Tensor
    token_mask: torch.Tensor | None
    vocab_size: int | None
    backend: str
    source: object = field(default=None, repr=False, compare=False)

    @property
    def shape(self) -> torch.Size:
        """Shape of the rows: [N] or [B, K + 1]."""
        return self.logits.shape[:-1]

    def probs(self) -> torch.Tensor:
        """Filtered and renormalised probabilities, float32 [*R, V]."""
        out: torch.Tensor = backends.layer(self.backend).probs(self)
        return out

    def keep_mask(self) -> torch.Tensor:
        """Whether a token is in the support, bool [*R, V]."""
        out: torch.Tensor = backends.layer(self.backend).keep_mask(self)
        return out

    def log_prob(self, tokens: torch.Tensor) -> torch.Tensor:
        """Log-probability of tokens, float32; -inf outside the support and for ids outside [0, V).

        Parameters
        ----------
        tokens : ints [*R] or [*R, M]

        Returns
        -------
        float32, shape of tokens
        """
        if not isinstance(tokens, torch.Tensor) or tokens.dtype not in checks.INT_DTYPES:
            raise TypeError("tokens must be a tensor of int32 or int64")
        if tokens.shape[: len(self.shape)] != self.shape or tokens.dim() > len(self.shape) + 1:
            raise ValueError(f"tokens must have shape {list(self.shape)} or one axis more, got {list(tokens.shape)}")
        checks.same_device("tokens", tokens, "logits", self.logits.device)
        out: torch.Tensor = backends.layer(self.backend).log_prob(self, tokens)
        return out

    @classmethod
    def stack(cls, parts: Iterable[FilteredLogits], logits: torch.Tensor | None = None) -> FilteredLogits:
        """Join K results of rows [B] to one of rows [B, K].

        Parameters
        ----------
        parts : K results of one vocabulary and backend
        logits : [B, K, V], optional
            Where the parts' logits already lie side by side; without it they are copied together.
        """
        parts = list(parts)
        if not parts or any(not isinstance(p, FilteredLogits) or len(p.shape) != 1 for p in parts):
            raise ValueError("parts must be at least one FilteredLogits, each of logits [B, V]")
        for name in ("backend", "vocab_size"):
            if len({getattr(p, name) for p in parts}) > 1:
                raise ValueError(f"parts differ in {name}")
        if len({p.logits.shape for p in parts}) > 1:
            raise ValueError(f"parts differ in shape: {[list(p.logits.shape) for p in parts]}")
        batch, vocab = parts[0].logits.shape
        if logits is not None and logits.shape != (batch, len(parts), vocab):
            raise ValueError(f"logits must have shape {[batch, len(parts), vocab]}, got {list(logits.shape)}")
        fields: dict[str, Any] = {n: torch.stack([getattr(p, n) for p in parts], 1) for n in ROW_FIELDS}
        joined = torch.stack([p.logits for p in parts], 1) if logits is None else logits
        masks = [p.token_mask for p in parts if p.token_mask is not None]
        if masks and len(masks) != len(parts):
            raise ValueError("either all parts have a token_mask, or none")
        mask = torch.stack(masks, 1) if masks else None
        first = parts[0]
        source = backends.layer(first.backend).stack_source(parts)
        return cls(joined, **fields, token_mask=mask, vocab_size=first.vocab_size, backend=first.backend, source=source)


def filter_logits(
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
    backend: str | None = None,
) -> FilteredLogits:
    """Filter rows of logits, in the order token mask, temperature, top-k, top-p, min-p, renormalise.

    Tokens are ranked by (logit descending, id ascending) and every filter keeps a prefix of that order.

    Parameters
    ----------
    logits : float32 / float16 / bfloat16 [N, V] or [B, K + 1, V]
        Any row stride. NaN counts as -inf and +inf as the largest finite value; both set a bit in `status`. A row
        with nothing finite is one-hot on token 0.
    temperature : number or tensor [N] (or [B], repeated over K + 1), >= 0
        0 keeps the first maximum only.
    top_k : int or tensor, optional
        None, <= 0 or >= V: off.
    top_p : number or tensor, optional
        Keeps a token while the mass ranked before it is < top_p (Holtzman et al. 2020). None, >= 1: off; <= 0: the
        first token only. Give tensors as float64: 0.6 in float32 is more than 0.6, and keeps 7 of 10 equal tokens.
    min_p : number or tensor in [0, 1], optional
        Keeps p_i >= min_p * max p (Nguyen et al. 2024).
    min_tokens_to_keep : int or tensor, >= 1
        Every filter leaves at least this many.
    order : "top_k_first" or "joint"
        Whether top-p looks at the mass that top-k left, or at all of it.
    token_mask : int32 [N, ceil(V / 32)] or [B, K + 1, ceil(V / 32)], optional
        Bit 1 = allowed.
    vocab_size : int, optional
        The valid ids when the logits are padded.
    backend : "reference" or "triton", optional
        By default what fits the device.

    Returns
    -------
    FilteredLogits

    Raises
    ------
    TypeError, ValueError
        For a wrong type, dtype, shape or device, and for a number (or a value of a CPU tensor) out of its range.

    Examples
    --------
    >>> import torch
    >>> filter_logits(torch.tensor([[1.0, 1.0, 1.0, 0.0]]), top_k=2).keep_mask().tolist()
    [[True, True, False, False]]
    """
    values = (temperature, top_k, top_p, min_p, min_tokens_to_keep)
    params, token_mask = checked(logits, values, order, token_mask, vocab_size)
    return filter_rows(logits, params, order=order, token_mask=token_mask, vocab_size=vocab_size, backend=backend)


def checked(
    logits: torch.Tensor,
    values: tuple[object, object, object, object, object],
    order: str,
    token_mask: torch.Tensor | None,
    vocab_size: int | None,
) -> tuple[RowParams, torch.Tensor | None]:
    """The arguments of `filter_logits`: one parameter a row, and the mask in the rows' shape."""
    checks.logits(logits)
    checks.choice("order", order, ORDERS)
    rows, vocab, device = logits.shape[:-1], logits.shape[-1], logits.device
    params = row_params(*values, rows, device)
    if vocab_size is not None and not 1 <= checks.integer("vocab_size", vocab_size) <= vocab:
        raise ValueError(f"vocab_size must be in [1, {vocab}] for logits {list(logits.shape)}, got {vocab_size}")
    if token_mask is not None:
        words = (vocab + 31) // 32
        flat = isinstance(token_mask, torch.Tensor) and token_mask.dim() == 2
        shape = (rows.numel(), words) if flat else (*rows, words)
        token_mask = checks.tensor("token_mask", token_mask, (torch.int32,), shape).reshape(*rows, words)
        checks.same_device("token_mask", token_mask, "logits", device)
    return params, token_mask


def filter_rows(
    logits: torch.Tensor,
    params: RowParams,
    *,
    order: str = "top_k_first",
    token_mask: torch.Tensor | None = None,
    vocab_size: int | None = None,
    backend: str | None = None,
) -> FilteredLogits:
    """`filter_logits` for arguments that were checked: one parameter a row, as the decode loop holds them."""
    chosen = backends.resolve(backend, logits.device)
    out: FilteredLogits = backends.layer(chosen).filter_logits(logits, params, order, token_mask, vocab_size)
    return out
