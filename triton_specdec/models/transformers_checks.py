"""Which Transformers models the adapter serves: by what they take, and by what they answer."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .transformers import TransformersModel

# What the cache is called in a model's forward: now, and in releases before.
CACHE_NAMES = ("cache", "past_key_values")
_ATTENTION = ("sdpa", "eager")


def check_is_model(model: Any, name: str) -> None:
    try:
        from transformers import PreTrainedModel
    except ModuleNotFoundError as error:
        raise RuntimeError(
            "from_transformers needs Transformers: pip install 'triton_specdec[transformers]'"
        ) from error
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers.PreTrainedModel, got {name}")
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder: only decoder-only models are served")


def check_is_served(model: Any, name: str) -> None:
    """What the adapter itself needs."""
    if model.get_output_embeddings() is None:
        raise ValueError(f"{name} has no output head: load it with AutoModelForCausalLM")
    if model.training:
        raise ValueError(f"{name} is in training mode, where dropout draws: call model.eval() first")
    attention = getattr(model.config, "_attn_implementation", None)
    if attention not in _ATTENTION:
        raise ValueError(
            f"{name} runs attention {attention!r}, which takes no mask per row: load it with attn_implementation='sdpa'"
        )
    devices = {p.device for p in model.parameters()}
    if len(devices) > 1:
        raise ValueError(f"{name} is spread over {sorted(map(str, devices))}: put it on one device")
    takes = inspect.signature(model.forward).parameters
    if "position_ids" not in takes or "attention_mask" not in takes or not named(takes, *CACHE_NAMES):
        raise ValueError(f"{name} takes no position_ids, mask or cache: its rows cannot have lengths of their own")


def named(takes: Any, *names: str) -> str:
    """The first of the names that a signature has."""
    return next((name for name in names if name in takes), "")


@torch.inference_mode()
def check_rows(wrapped: TransformersModel, name: str) -> None:
    """Two rows as the loop feeds them, against each row alone without a cache."""
    if wrapped.max_length < 5:
        raise ValueError(f"{name} takes texts of {wrapped.max_length} tokens: too short to check it (or check=False)")
    ids = torch.arange(14, device=wrapped.device).mul(97).add(7).remainder(wrapped.vocab_size).view(2, 7)
    prompts, rejected, more = ids[:, :3], ids[:, 3:5], ids[:, 5:]
    kept = torch.tensor([1, 3], dtype=torch.int32, device=wrapped.device)
    try:
        cache = wrapped.new_cache(2, 8)
        got = [wrapped.forward(prompts, cache, last=kept.long() - 1)]
        for tokens in (rejected, more):
            cache.lengths.copy_(kept)
            cache.bound = 3
            got.append(wrapped.forward(tokens, cache))
        ours = torch.cat([got[0], got[2]], 1).float()
        for row, count in enumerate(kept.tolist()):
            text = torch.cat([prompts[row, :count], more[row]])[None]
            alone = wrapped.model(input_ids=text, use_cache=False, return_dict=True).logits[0].float()
            error = float((ours[row] - alone[count - 1 :]).square().mean().sqrt() / alone.std())
            if not error < _error_limit(wrapped.model.dtype):
                raise ValueError(
                    f"{name} gives other logits in a ragged batch than alone (they differ by {error:.2g} of their "
                    "spread): its attention does not go by the mask, the position ids and the cache it is given"
                )
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError) as error:
        raise ValueError(f"{name} cannot run with a cache of rows of their own lengths: {error}") from error


def _error_limit(dtype: torch.dtype) -> float:
    """Rounding moves logits by a few units of the dtype; a wrong mask or position by a good part of their spread."""
    return max(12 * torch.finfo(dtype).eps, 2e-3)
