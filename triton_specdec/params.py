"""Parameters of sampling: what a user sets, and one value a row, normalised once."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag
from typing import NamedTuple

import torch

from . import checks
from .reference import rules

ORDERS = ("top_k_first", "joint")

# None means off; these values say the same as a number.
_OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
_LOW: dict[str, int] = {"temperature": 0, "min_p": 0, "min_tokens_to_keep": 1}
_HIGH: dict[str, int] = {"min_p": 1}
# An infinite penalty is no "never": inf * 0 is NaN.
FINITE = ("repetition", "frequency", "presence")


class Status(IntFlag):
    """Bits of a row's `status`: what was wrong with its input. 0 where all is well."""

    NAN = rules.STATUS_NAN
    INF = rules.STATUS_INF
    EMPTY = rules.STATUS_EMPTY
    DRAFT_ID = rules.STATUS_DRAFT_ID
    PARAMETER = rules.STATUS_PARAMETER
    NEGATIVE = rules.STATUS_NEGATIVE


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn.

    Parameters
    ----------
    temperature : float, >= 0
        0 is greedy: the first maximum.
    top_k : int, optional
        Keep the k first of the rank order. None, 0 or less, and V or more: off.
    top_p : float, optional
        Keep a token while the mass ranked before it is less than this. None, 1 or more: off. 0: the first token only.
    min_p : float in [0, 1], optional
        Keep tokens with at least this fraction of the largest probability.
    min_tokens_to_keep : int, >= 1
        What every filter leaves at least.
    repetition_penalty : float, > 0
        Divides positive and multiplies other logits of tokens in the prompt or the output. 1: off.
    frequency_penalty, presence_penalty : float
        Subtracted per occurrence in the output, and once for having occurred. 0: off.
    min_tokens : int, >= 0
        No stop token is drawn before this many tokens.
    seed : int, optional
        A request draws by (its seed, absolute position). None: a seed from torch's generator.

    Raises
    ------
    ValueError, TypeError
        For a value out of its range, or of the wrong type.

    Examples
    --------
    >>> SamplingParams(temperature=0.8, top_p=0.95).top_p
    0.95
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    min_tokens_to_keep: int = 1
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_tokens: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if value is not None or name == "temperature":
                checks.number(name, value, _LOW.get(name), _HIGH.get(name))
        if self.top_k is not None:
            checks.integer("top_k", self.top_k)
        checks.integer("min_tokens_to_keep", self.min_tokens_to_keep, 1)
        checks.integer("min_tokens", self.min_tokens, 0)
        if checks.number("repetition_penalty", self.repetition_penalty, 0, None) == 0:
            raise ValueError("repetition_penalty must be greater than 0, got 0")
        for name in FINITE:
            checks.finite(
                f"{name}_penalty", checks.number(f"{name}_penalty", getattr(self, f"{name}_penalty"), None, None)
            )
        if self.seed is not None and not -(2**63) <= checks.integer("seed", self.seed) < 2**63:
            raise ValueError(f"seed must be in [-2^63, 2^63), got {self.seed}")

    @property
    def has_penalties(self) -> bool:
        """Whether a penalty is on."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0


class RowParams(NamedTuple):
    """One value a row, on the device of the logits; what is off holds the value that keeps everything."""

    temperature: torch.Tensor  # float64 [N]
    top_k: torch.Tensor  # int64 [N]
    top_p: torch.Tensor  # float64 [N]
    min_p: torch.Tensor  # float64 [N]
    min_tokens_to_keep: torch.Tensor  # int64 [N]

    def repeated(self, rows: int) -> RowParams:
        """One value for each of `rows` rows of a request: [B] -> [B * rows]."""
        return RowParams(*(value.repeat_interleave(rows) for value in self))


def per_row(name: str, value: object, shape: torch.Size, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """One value a row out of a number, or of a tensor [N], [B] (repeated over the rows of a request) or [B, K + 1].

    Floats are float64, so that top_p = 0.6 means 0.6: in float32 it would keep seven of ten equal tokens.
    """
    rows = shape.numel()
    whole = not dtype.is_floating_point
    value = _OFF.get(name) if value is None else value
    low, high = _LOW.get(name), _HIGH.get(name)
    if not isinstance(value, torch.Tensor):
        one: float = clamped(checks.integer(name, value, low)) if whole else checks.number(name, value, low, high)
        if name in FINITE:
            checks.finite(name, one)
        return torch.full((rows,), one, dtype=dtype, device=device)
    if value.dtype.is_complex or value.dtype == torch.bool or (whole and value.dtype.is_floating_point):
        raise TypeError(f"{name} must hold {'ints' if whole else 'numbers'}, got {value.dtype}")
    checks.same_device(name, value, "logits", device)
    if value.dim() == 0 or value.shape in (shape, torch.Size([rows])):
        each = value.reshape(-1).expand(rows)
    elif value.dim() == 1 and len(shape) == 2 and len(value) == shape[0]:
        each = value.repeat_interleave(shape[1])
    else:
        raise ValueError(
            f"{name} must be a number or have one value for each of {list(shape)}, got {list(value.shape)}"
        )
    each = each.to(dtype).contiguous()
    # Values on a GPU are never read by the host: a row out of range is greedy and says so in its status.
    if device.type == "cpu" and rows:
        bad = ~(each >= low) if low is not None else each.isnan()
        bad |= each > high if high is not None else False
        bad |= each.isinf() if name in FINITE else False
        if bad.any():
            checks.bad_range(name, low, high, each[bad][0].item())
    return each


def clamped(value: int) -> int:
    """An int that fits int64, for values of which any that large mean the same."""
    return min(max(value, -(2**62)), 2**62)


def row_params(
    temperature: object,
    top_k: object,
    top_p: object,
    min_p: object,
    min_tokens_to_keep: object,
    shape: torch.Size,
    device: torch.device,
) -> RowParams:
    """`RowParams` for rows of a shape [N] or [B, K + 1]."""
    if temperature is None:
        raise TypeError("temperature must be a number or a tensor, got None")
    values = (temperature, top_k, top_p, min_p, min_tokens_to_keep)
    whole = ("top_k", "min_tokens_to_keep")
    dtypes = {name: torch.int64 if name in whole else torch.float64 for name in RowParams._fields}
    return RowParams(*(per_row(n, v, shape, device, dtypes[n]) for n, v in zip(dtypes, values, strict=True)))


def random_seeds(rows: int, device: torch.device) -> torch.Tensor:
    """Seeds int64 [rows] from torch's generator, so that torch.manual_seed decides them."""
    return torch.randint(-(2**63), 2**63 - 1, (rows,), dtype=torch.int64, device=device)
