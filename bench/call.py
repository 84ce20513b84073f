"""What is timed: a call, and the small parts that providers share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from . import plain
from .cases import Filter
from .inputs import Cache, Occurred, Params, Round


@dataclass(frozen=True)
class Call:
    """What is timed, what restores its inputs, and how its result is read."""

    run: Callable[[], Any]
    reset: Callable[[], None] | None = None
    read: Callable[[Any], Any] = lambda result: result

    def result(self) -> Any:
        """The result of one run on restored inputs."""
        if self.reset:
            self.reset()
        return self.read(self.run())


def in_place(given: Cache, run: Callable[[], Any]) -> Call:
    """A call whose small inputs are restored; slots of caches need not be, the work on them is the same again."""
    kept = [tensor.clone() for tensor in given.written()]

    def reset() -> None:
        for tensor, before in zip(given.written(), kept, strict=True):
            tensor.copy_(before)

    return Call(run, reset, lambda _: [*given.written(), *given.caches])


def in_place_logits(given: Occurred, run: Callable[[], Any]) -> Call:
    """A call whose logits are restored."""
    before = given.logits.clone()

    def reset() -> None:
        given.logits.copy_(before)

    return Call(run, reset, lambda _: given.logits)


def copied(given: Any, caches: bool = True) -> Any:
    """Inputs that may be written without the others' being touched; caches, which are large, may stay shared."""
    if not isinstance(given, Cache | Occurred):
        return given
    fields = {f.name: getattr(given, f.name) for f in dataclasses.fields(given)}
    for name, value in fields.items():
        if isinstance(value, torch.Tensor):
            fields[name] = value.clone()
        elif isinstance(value, list) and caches:
            fields[name] = [tensor.clone() for tensor in value]
    return type(given)(**fields)


def dense_draft(given: Round) -> torch.Tensor | None:
    """The draft's probabilities float32 [B, K, V], as drawing the drafts has left them with those who keep them."""
    if given.draft is None:
        return None
    flat = given.draft.reshape(-1, given.draft.shape[-1])
    return plain.filtered(flat, given.params.repeated(given.num_drafts)).view(given.draft.shape)


def shared(params: Params) -> Filter:
    """The filter of all rows; a case whose rows differ has been refused before."""
    assert params.one is not None
    return params.one


def renormed(
    logits: torch.Tensor, params: Params, top_k_renorm: Callable[..., Any], top_p_renorm: Callable[..., Any]
) -> torch.Tensor:
    """Dense probabilities by a softmax and the kernels of a library that renormalise them, one k and p for all rows."""
    one = shared(params)
    probs: torch.Tensor = torch.softmax(logits, -1, dtype=torch.float32)
    if one.top_k:
        probs = top_k_renorm(probs, one.top_k)
    return top_p_renorm(probs, one.top_p) if one.top_p < 1 else probs


def importable(name: str) -> str | None:
    """Why a module cannot be imported, None where it can."""
    try:
        import_module(name)
    # A package that is there but does not load (a wrong CUDA library, say) is as absent as one that is not.
    except Exception as error:
        return f"not importable: {type(error).__name__}: {error}"
    return None


def importable_on_gpu(name: str, device: torch.device) -> str | None:
    """The same, for kernels that run on GPUs only."""
    return importable(name) or (None if device.type == "cuda" else "its kernels run on GPUs only")
