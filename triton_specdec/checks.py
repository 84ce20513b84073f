"""Errors at the boundary: what a user got wrong, what was wanted, what came."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, NoReturn

import torch

LOGIT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INT_DTYPES = (torch.int32, torch.int64)


def unknown_option(function: str, options: dict[str, Any], ours: dict[str, str]) -> None:
    """Raise TypeError for the first option that is not ours, naming the one that is meant."""
    for name in options:
        hint = f": use {ours[name]}" if name in ours else ""
        raise TypeError(f"{function}() got an unexpected option {name!r}{hint}")


def choice(name: str, value: object, choices: Sequence[str]) -> None:
    """`value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def tensor(name: str, value: object, dtypes: Sequence[torch.dtype], shape: Sequence[int | None]) -> torch.Tensor:
    """`value` is a tensor of one of the dtypes and of a shape in which None stands for any size."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in dtypes:
        raise TypeError(f"{name} must be one of {_names(dtypes)}, got {value.dtype}")
    wanted = tuple(shape)
    same = len(wanted) == value.dim() and all(w is None or w == s for w, s in zip(wanted, value.shape, strict=True))
    if not same:
        sizes = ", ".join("any" if w is None else str(w) for w in wanted)
        raise ValueError(f"{name} must have shape [{sizes}], got {list(value.shape)}")
    return value


def is_same_device(first: torch.device, second: torch.device) -> bool:
    """Whether two devices are one; "cuda" is the one of "cuda:0" where nothing else is said."""
    return first.type == second.type and (first.index or 0) == (second.index or 0)


def same_device(name: str, value: torch.Tensor, other: str, device: torch.device) -> None:
    """Two arguments are on one device."""
    if not is_same_device(value.device, device):
        raise ValueError(f"{name} is on {value.device}, but {other} is on {device}")


def logits(value: object, name: str = "logits") -> torch.Tensor:
    """Floats [N, V] or [B, K + 1, V] with V >= 1."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in LOGIT_DTYPES:
        raise TypeError(f"{name} must be one of {_names(LOGIT_DTYPES)}, got {value.dtype}")
    if value.dim() not in (2, 3) or value.shape[-1] < 1:
        raise ValueError(f"{name} must have shape [N, V] or [B, K + 1, V] with V >= 1, got {list(value.shape)}")
    return value


def number(name: str, value: object, low: float | None, high: float | None) -> float:
    """A real number in [low, high]; NaN is none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        x = float(value)
    except OverflowError:
        raise ValueError(f"{name} is too large for a float") from None
    if math.isnan(x) or (low is not None and x < low) or (high is not None and x > high):
        bad_range(name, low, high, value)
    return x


def integer(name: str, value: object, low: int | None = None) -> int:
    """An int, at least `low`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if low is not None and value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")
    return int(value)


def finite(name: str, value: float) -> None:
    """`value` is not infinite."""
    if math.isinf(value):
        raise ValueError(f"{name} must be finite, got {value}")


def bad_range(name: str, low: float | None, high: float | None, value: object) -> NoReturn:
    """Raise ValueError: a value is out of its range."""
    if low is None and high is None:
        raise ValueError(f"{name} must be a number, got {value}")
    wanted = f"at least {low:g}" if high is None else f"in [{low:g}, {high:g}]"
    raise ValueError(f"{name} must be {wanted}, got {value}")


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)
