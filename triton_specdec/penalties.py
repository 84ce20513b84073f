"""Penalties on raw logits, before any filter."""

from __future__ import annotations

import torch

from . import backend as backends
from . import checks
from .params import per_row


def apply_penalties_(
    logits: torch.Tensor,
    counts: torch.Tensor,
    *,
    repetition: float | torch.Tensor | None = None,
    frequency: float | torch.Tensor | None = None,
    presence: float | torch.Tensor | None = None,
    prompt_mask: torch.Tensor | None = None,
    draft_tokens: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Apply repetition, then frequency, then presence penalty to logits, in place.

    A penalty that cannot be applied raises on the CPU. On a device, which the host does not ask, it is off for its
    request: a repetition that is not greater than 0, and any value that is infinite or NaN.

    Parameters
    ----------
    logits : float32 / float16 / bfloat16 [B, V] or [B, K + 1, V]
        Written.
    counts : int32 or int64 [B, V]
        How often each token stands in the output of each request.
    repetition : number or tensor [B], > 0, optional
        Divides positive and multiplies other logits of tokens in the prompt or the output (Keskar et al. 2019).
    frequency, presence : number or tensor [B], optional
        Subtracted per occurrence in the output, and once for having occurred.
    prompt_mask : bool [B, V], optional
        Tokens of the prompt, for the repetition penalty.
    draft_tokens : ints [B, K], optional
        With logits [B, K + 1, V]: row i also counts the first i drafts. Ids outside [0, V) count nothing.

    Returns
    -------
    logits

    Examples
    --------
    >>> import torch
    >>> x = torch.ones(1, 3, 2)
    >>> counts, drafts = torch.zeros(1, 2, dtype=torch.int32), torch.tensor([[1, 1]])
    >>> _ = apply_penalties_(x, counts, frequency=2.0, draft_tokens=drafts)
    >>> x[0].tolist()
    [[1.0, 1.0], [1.0, -1.0], [1.0, -3.0]]
    """
    checks.logits(logits)
    if logits.requires_grad:
        raise ValueError("logits require a gradient, and are written in place: pass logits.detach()")
    batch, vocab, device = logits.shape[0], logits.shape[-1], logits.device
    checks.tensor("counts", counts, checks.INT_DTYPES, (batch, vocab))
    checks.same_device("counts", counts, "logits", device)
    steps = logits.shape[1] if logits.dim() == 3 else 1
    if draft_tokens is not None:
        checks.tensor("draft_tokens", draft_tokens, checks.INT_DTYPES, (batch, steps - 1))
        checks.same_device("draft_tokens", draft_tokens, "logits", device)
    if prompt_mask is not None:
        checks.tensor("prompt_mask", prompt_mask, (torch.bool,), (batch, vocab))
        checks.same_device("prompt_mask", prompt_mask, "logits", device)
    rows = torch.Size([batch])
    off = {"repetition": 1.0, "frequency": 0.0, "presence": 0.0}
    given = {"repetition": repetition, "frequency": frequency, "presence": presence}
    values = []
    for name, value in given.items():
        values.append(per_row(name, off[name] if value is None else value, rows, device, torch.float64))
    if device.type == "cpu" and not (values[0] > 0).all():
        raise ValueError("repetition must be greater than 0")
    each = logits if logits.dim() == 3 else logits[:, None]
    drafts = None if draft_tokens is None else draft_tokens.long()
    chosen = backends.resolve(backend, device)
    backends.layer(chosen).apply_penalties_(each, counts, *values, prompt_mask, drafts)
    return logits
