"""Which Transformers models the adapter serves: by what they take, and by what they answer."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch

from .. import checks

if TYPE_CHECKING:
    from .transformers import TransformersModel

# What the cache is called in a model's forward: now, and in releases before.
_CACHE_NAMES = ("cache", "past_key_values")
_ATTENTION = ("sdpa", "eager")


def check_is_model(model: Any, name: str) -> None:
    """A decoder of the installed Transformers."""
    try:
        from transformers import PreTrainedModel
    except ModuleNotFoundError as error:
        raise RuntimeError(
            "from_transformers needs Transformers: pip install 'triton_specdec[transformers]'"
        ) from error
    if not isinstance(model, PreTrainedModel):
        inner = "model._orig_mod" if hasattr(model, "_orig_mod") else None
        inner = "model.merge_and_unload() or model.get_base_model()" if hasattr(model, "get_base_model") else inner
        hint = f": pass {inner}" if inner else ""
        raise TypeError(f"model must be a transformers.PreTrainedModel, got {name}{hint}")
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder: only decoder-only models are served")


def check_is_served(model: Any, name: str) -> None:
    """What the adapter itself needs."""
    if model.get_output_embeddings() is None:
        raise ValueError(f"{name} has no output head: load it with AutoModelForCausalLM")
    check_mode(model, name)
    if model.dtype not in checks.LOGIT_DTYPES:
        raise ValueError(f"{name} is in {model.dtype}: take float32, bfloat16 or float16")
    devices = {p.device for p in model.parameters()}
    if len(devices) > 1:
        raise ValueError(f"{name} is spread over {sorted(map(str, devices))}: put it on one device")
    takes = parameters(model)
    if "position_ids" not in takes or "attention_mask" not in takes or not cache_name(takes):
        raise ValueError(f"{name} takes no position_ids, mask or cache: its rows cannot have lengths of their own")


def check_mode(model: Any, name: str) -> None:
    """What can change after a model has been wrapped."""
    if model.training:
        raise ValueError(f"{name} is in training mode, where dropout draws: call model.eval() first")
    attention = getattr(model.config, "_attn_implementation", None)
    if attention not in _ATTENTION:
        raise ValueError(
            f"{name} runs attention {attention!r}, which takes no mask per row: load it with attn_implementation='sdpa'"
        )


def parameters(model: Any) -> Collection[str]:
    """Names that a model's forward takes; a subclass that passes everything on takes what its base takes."""
    names: set[str] = set()
    for owner in type(model).__mro__:
        if "forward" not in vars(owner):
            continue
        found = inspect.signature(vars(owner)["forward"]).parameters
        names |= set(found)
        if all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in found.values()) or cache_name(names):
            break
    return names


def cache_name(takes: Collection[str]) -> str:
    """What a signature calls the cache; "" where it takes none."""
    return next((name for name in _CACHE_NAMES if name in takes), "")


@torch.inference_mode()
def check_rows(wrapped: TransformersModel, name: str) -> None:
    """Two rows as the loop feeds them, against each row alone without a cache."""
    if wrapped.max_length < 5:
        raise ValueError(f"{name} takes texts of {wrapped.max_length} tokens: too short to check it (or check=False)")
    try:
        error, floor = _ragged_error(wrapped)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as cause:
        raise ValueError(
            f"{name} cannot run with a cache of rows of their own lengths: {type(cause).__name__} {cause}"
        ) from cause
    # A wrong mask or position moves logits by a good part of their spread; rounding by what it does anyway.
    if not error <= 4 * floor + torch.finfo(wrapped.model.dtype).eps + 2e-3:
        raise ValueError(
            f"{name} gives other logits in a ragged batch than alone (they differ by {error:.2g} of their spread): its "
            "attention does not go by the mask, the position ids and the cache it is given"
        )


def _ragged_error(wrapped: TransformersModel) -> tuple[float, float]:
    """How far logits in a ragged batch are from those alone; and how far other shapes alone move them: rounding."""
    ids = torch.arange(14, device=wrapped.device).mul(97).add(7).remainder(wrapped.vocab_size).view(2, 7)
    prompts, rejected, more = ids[:, :3], ids[:, 3:5], ids[:, 5:]
    kept = torch.tensor([1, 3], dtype=torch.int32, device=wrapped.device)
    cache = wrapped.new_cache(2, 8)
    first = wrapped.forward(prompts, cache, last=kept.long() - 1)
    for tokens in (rejected, more):
        cache.lengths.copy_(kept)
        cache.bound = 3
        after = wrapped.forward(tokens, cache)
    ours = torch.cat([first, after], 1)

    def alone(text: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = wrapped.model(input_ids=text, use_cache=False, return_dict=True).logits
        return out

    errors, floors = [], []
    for row, count in enumerate(kept.tolist()):
        text = torch.cat([prompts[row, :count], more[row]])
        whole = alone(text[None])[0]
        errors.append(_distance(ours[row], whole[count - 1 :]))
        floors += [_distance(alone(text[None, :-1])[0], whole[:-1]), _distance(alone(text.expand(2, -1))[0], whole)]
    return max(errors), max(floors)


def _distance(logits: torch.Tensor, like: torch.Tensor) -> float:
    """Root mean square difference over the spread, of logits that are not masked by the model."""
    a, b = logits.double(), like.double()
    seen = (b > torch.finfo(like.dtype).min / 2) & b.isfinite()
    spread = b[seen].std()
    if not (spread > 0 and spread.isfinite()):
        raise ArithmeticError("its logits are all alike, or not finite")
    return float((a - b)[seen].square().mean().sqrt() / spread)
