"""Transformers models in ragged batches: each row with a mask, positions and a cache length of its own.

A model is called with a mask [B, 1, n, S], position ids [B, n] and a cache that writes each row at its own position,
so nothing of the model's code is changed. What a model's attention does not take from outside, it is refused for.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch

from .. import checks
from .cache import Reach, RowCache
from .roll_back import check_rolls_back, longest_text

_ATTENTION = ("sdpa", "eager")
# A text of any length, for models that name no limit.
_NO_LIMIT = 2**31 - 1


class TransformersModel:
    """A Transformers model as the decode loop sees it (`Model`); see `from_transformers`.

    Attributes
    ----------
    model : transformers.PreTrainedModel
        The model itself, unchanged.
    vocab_size : int
        Ids that are drawn and fed; the model's logits may be wider.
    max_length : int
    tokenizer : object or None
    eos_token_id : list of int
        What ends a row where `SpecDecoder.generate` is not told: that of the model's generation config.
    """

    def __init__(self, model: Any, tokenizer: Any, vocab_size: int, max_length: int) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.vocab_size, self.max_length = vocab_size, max_length
        self.eos_token_id = _eos(model, vocab_size)
        takes = inspect.signature(model.forward).parameters
        self._cache_name = _named(takes, "cache", "past_key_values")
        self._keep_name = "logits_to_keep" if "logits_to_keep" in takes else None
        self._additive = model.config._attn_implementation == "eager"

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.model.device
        return device

    def new_cache(self, batch_size: int, capacity: int) -> Any:
        """An empty cache with `capacity` slots a row; memory is taken when the first tokens are fed."""
        return _cache_class()(batch_size, capacity, self.device)

    def forward(self, tokens: torch.Tensor, cache: Any, *, last: torch.Tensor | None = None) -> torch.Tensor:
        """Feed tokens int64 [B, n]; see `Model.forward`."""
        batch, count = tokens.shape
        reach = cache.current = cache.reach(count)
        options: dict[str, Any] = {self._cache_name: cache}
        few = last is not None and self._keep_name is not None and batch < count
        if few:
            # Every row's last token, in every row: B * B rows of logits, instead of B * n.
            options["logits_to_keep"] = last
        logits: torch.Tensor = self.model(
            input_ids=tokens,
            attention_mask=self._mask(reach),
            # Drafts behind the end are cut later, but learned positions must exist for them.
            position_ids=reach.slots.clamp(max=self.max_length - 1),
            use_cache=True,
            return_dict=True,
            **options,
        ).logits
        cache.advance(count)
        if last is None:
            return logits
        row = torch.arange(batch, device=logits.device)
        return logits[row, row if few else last][:, None]

    def _mask(self, reach: Reach) -> torch.Tensor:
        """[B, 1, n, S]: what may be attended to as bool, or as what is added to the scores."""
        seen = reach.attended()[:, None]
        if not self._additive:
            return seen
        least = torch.finfo(self.model.dtype).min
        return torch.zeros_like(seen, dtype=self.model.dtype).masked_fill_(~seen, least)


def from_transformers(
    model: Any,
    *,
    tokenizer: Any = None,
    vocab_size: int | None = None,
    max_length: int | None = None,
    check: bool = True,
) -> TransformersModel:
    """Wrap a decoder-only Transformers model as target or draft, for batches of prompts of different lengths.

    The model is used as it is, by its own forward, and may be used elsewhere between calls.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model in evaluation mode, with attention "sdpa" or "eager", on one device.
    tokenizer : optional
        With it the ids are those of the tokenizer (a model's logits may be wider), and `SpecDecoder` refuses a draft
        of another tokenizer.
    vocab_size : int, optional
        The valid ids: `len(tokenizer)`, or the width of the logits, where not given.
    max_length : int, optional
        Most tokens of prompt and answer: what the model's config says, where not given. A model with sliding windows
        serves texts that stay within them: give the window.
    check : bool
        Feed two short rows of different lengths, with rejected drafts in between, and compare the logits with those
        of each row alone without a cache: five forwards of at most five tokens a row.

    Returns
    -------
    TransformersModel

    Raises
    ------
    TypeError
        Not a Transformers model.
    ValueError
        A model this cannot serve, by name: recurrent or convolutional layers, sliding windows shorter than
        `max_length`, encoder-decoders, no position ids, other attention kernels, several devices; one in training
        mode; or one whose logits differ from those of single rows.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    ...                      num_attention_heads=4, max_position_embeddings=128)
    >>> target = from_transformers(LlamaForCausalLM(config).eval())
    >>> target.vocab_size, target.max_length
    (99, 128)
    """
    name = type(model).__name__
    _check_is_model(model, name)
    config = model.config.get_text_config()
    longest = longest_text(config, _NO_LIMIT)
    if max_length is not None and checks.integer("max_length", max_length, 2) > longest:
        raise ValueError(f"max_length must be at most the {longest} tokens that {name} was made for, got {max_length}")
    longest = longest if max_length is None else int(max_length)
    check_rolls_back(model, config, longest)
    _check_is_served(model, name)
    wrapped = TransformersModel(model, tokenizer, _vocab_size(model, tokenizer, vocab_size), longest)
    if check:
        _check_rows(wrapped, name)
    return wrapped


def _check_is_model(model: Any, name: str) -> None:
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


def _check_is_served(model: Any, name: str) -> None:
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
    if "position_ids" not in takes or "attention_mask" not in takes or _named(takes, "cache", "past_key_values") == "":
        raise ValueError(f"{name} takes no position_ids, mask or cache: its rows cannot have lengths of their own")


def _named(takes: Any, *names: str) -> str:
    """The first of the names that a signature has."""
    return next((name for name in names if name in takes), "")


def _eos(model: Any, vocab_size: int) -> list[int]:
    ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = [] if ids is None else [ids] if isinstance(ids, int) else ids
    return [int(i) for i in ids if 0 <= i < vocab_size]


def _vocab_size(model: Any, tokenizer: Any, vocab_size: int | None) -> int:
    width = int(model.get_output_embeddings().weight.shape[0])
    # Ids are fed as well as drawn.
    width = min(width, int(model.get_input_embeddings().weight.shape[0]))
    if vocab_size is None:
        return width if tokenizer is None else min(width, len(tokenizer))
    if not 1 <= checks.integer("vocab_size", vocab_size) <= width:
        raise ValueError(f"vocab_size must be in [1, {width}], the width of the model's head, got {vocab_size}")
    return int(vocab_size)


@lru_cache(maxsize=1)
def _cache_class() -> type:
    """A `RowCache` that is a cache of the installed Transformers.

    Its interface has changed from release to release; what all of them share is that attention calls `update` with the
    new keys and values of a layer, and goes on with what it returns.
    """
    from transformers import Cache

    class TransformersCache(RowCache, Cache):
        """Keys and values [B, heads, capacity, head_dim] of each layer, made when a layer is first fed."""

        is_compileable = False
        is_initialized = True

        def __init__(self, batch_size: int, capacity: int, device: torch.device) -> None:
            if isinstance(self, torch.nn.Module):
                torch.nn.Module.__init__(self)
            RowCache.__init__(self, batch_size, capacity, device)
            self.keys: list[torch.Tensor] = []
            self.values: list[torch.Tensor] = []
            self.layers: list[Any] = []
            self.current: Reach | None = None

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            """Write keys and values [B, heads, n, head_dim] of one layer; returns the layer's, up to the bound."""
            if layer_idx == len(self.keys):
                # Zeros, not garbage: a masked slot still meets a weight of 0, and 0 * NaN is NaN.
                for states, kept in ((key_states, self.keys), (value_states, self.values)):
                    batch, heads, _, width = states.shape
                    kept.append(states.new_zeros(batch, heads, self.capacity, width))
            at = self.current
            assert at is not None
            keys, values = self.keys[layer_idx], self.values[layer_idx]
            keys[at.rows, :, at.slots] = key_states.transpose(1, 2)
            values[at.rows, :, at.slots] = value_states.transpose(1, 2)
            return keys[:, :, : at.stop], values[:, :, : at.stop]

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return self.bound

        def get_query_offset(self, layer_idx: int = 0) -> int:
            return self.bound

        def get_mask_sizes(self, query: Any, layer_idx: int = 0) -> tuple[int, int]:
            # The mask is given; what a model still asks for is its width.
            return (self.bound if self.current is None else self.current.stop), 0

        def get_max_length(self, layer_idx: int | None = None) -> int:
            return self.capacity

        def get_max_cache_shape(self, layer_idx: int = 0) -> int:
            return self.capacity

        def get_usable_length(self, new_seq_length: int, layer_idx: int = 0) -> int:
            return self.bound

        def __len__(self) -> int:
            return len(self.keys)

        def __repr__(self) -> str:
            return f"TransformersCache(rows={len(self.lengths)}, capacity={self.capacity})"

        @property
        def is_sliding(self) -> list[bool]:
            return [False] * len(self.keys)

        is_linear = is_dummy = is_sliding

    return TransformersCache


@torch.inference_mode()
def _check_rows(wrapped: TransformersModel, name: str) -> None:
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
