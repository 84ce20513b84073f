"""Transformers models in ragged batches: each row with a mask, positions and a cache length of its own.

A model is called with a mask [B, 1, n, S], position ids [B, n] and a cache that writes each row at its own position,
so nothing of the model's code is changed. What a model's attention does not take from outside, it is refused for.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import checks
from .cache import Reach
from .roll_back import check_rolls_back, longest_text, most_slots
from .transformers_cache import cache_class
from .transformers_checks import cache_name, check_is_model, check_is_served, check_mode, check_rows, parameters

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
        config = model.config.get_text_config()
        self.eos_token_id = _eos(model, vocab_size, _width(model, config))
        self.max_slots = most_slots(model, config, _NO_LIMIT)
        takes = parameters(model)
        self._cache_name = cache_name(takes)
        self._can_keep_few = "logits_to_keep" in takes

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.model.device
        return device

    def new_cache(self, batch_size: int, capacity: int) -> Any:
        """An empty cache with `capacity` slots a row; memory is taken when the first tokens are fed.

        Raises
        ------
        ValueError
            More slots than the model's own masks have, or a model that has been changed since it was wrapped: set to
            training, or to attention that takes no mask.
        """
        name = type(self.model).__name__
        check_mode(self.model, name)
        if capacity > self.max_slots:
            raise ValueError(
                f"{name} masks by the longest row of a batch, up to {self.max_slots} slots: prompt, answer and drafts "
                f"(2 K + 1 beyond the end) take {capacity}"
            )
        return cache_class()(batch_size, capacity, self.device)

    def forward(self, tokens: torch.Tensor, cache: Any, *, last: torch.Tensor | None = None) -> torch.Tensor:
        """Feed tokens int64 [B, n]; see `Model.forward`."""
        batch, count = tokens.shape
        reach = cache.current = cache.reach(count)
        options: dict[str, Any] = {self._cache_name: cache}
        few = last is not None and self._can_keep_few and batch < count
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
        if self.model.config._attn_implementation != "eager":
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
    tokenizer : object with get_vocab(), optional
        With it the ids are those of the tokenizer (a model's logits may be wider), and `SpecDecoder` refuses a draft
        of another tokenizer.
    vocab_size : int, optional
        The valid ids: up to the tokenizer's last, or the width of the logits, where not given.
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
        Not a Transformers model, or not a tokenizer.
    ValueError
        A model this cannot serve, by name: recurrent or convolutional layers, sliding windows shorter than
        `max_length`, encoder-decoders, no position ids, other attention kernels, several devices; one in training
        mode; or one whose logits differ from those of single rows.

    Notes
    -----
    Of the model's generation config only `eos_token_id` is used: temperature, penalties and the like are given to
    `SpecDecoder.generate` as SamplingParams.

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
    check_is_model(model, name)
    config = model.config.get_text_config()
    longest = longest_text(config, _NO_LIMIT)
    if max_length is not None and checks.integer("max_length", max_length, 2) > longest:
        raise ValueError(f"max_length must be at most the {longest} tokens that {name} was made for, got {max_length}")
    longest = longest if max_length is None else int(max_length)
    check_rolls_back(model, config, longest)
    check_is_served(model, name)
    wrapped = TransformersModel(model, tokenizer, _vocab_size(model, config, tokenizer, vocab_size), longest)
    if check:
        check_rows(wrapped, name)
    return wrapped


def _eos(model: Any, vocab_size: int, width: int) -> list[int]:
    """The ids of the generation config that end a text; those beyond the model's head never come."""
    ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    never = [i for i in ids if vocab_size <= i < width]
    if never:
        raise ValueError(f"eos_token_id {never[0]} is no id below vocab_size={vocab_size}: no text would end there")
    return [int(i) for i in ids if 0 <= i < vocab_size]


def _width(model: Any, config: Any) -> int:
    """Ids that can be fed and drawn: rows of the embedding and of the head, where they tell (they may be quantised)."""
    ends = (getattr(end, "weight", None) for end in (model.get_input_embeddings(), model.get_output_embeddings()))
    return min([int(w.shape[0]) for w in ends if isinstance(w, torch.Tensor)] or [int(config.vocab_size)])


def _vocab_size(model: Any, config: Any, tokenizer: Any, vocab_size: int | None) -> int:
    width = _width(model, config)
    if tokenizer is not None and not callable(getattr(tokenizer, "get_vocab", None)):
        raise TypeError(f"tokenizer must have a get_vocab(), got {type(tokenizer).__name__}: load it first")
    if vocab_size is None:
        # Ids may have holes, so their number is not the last of them.
        return width if tokenizer is None else min(width, 1 + max(tokenizer.get_vocab().values()))
    if not 1 <= checks.integer("vocab_size", vocab_size) <= width:
        raise ValueError(f"vocab_size must be in [1, {width}], the width of the model's head, got {vocab_size}")
    return int(vocab_size)
