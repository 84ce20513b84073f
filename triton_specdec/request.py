"""A call of `SpecDecoder.generate`, checked as a whole before any work is done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from . import checks
from .models.protocol import Model
from .params import RowParams, SamplingParams, clamped, random_seeds
from .reference import rules
from .state import DecodeState, Penalties

Prompts = Sequence[Sequence[int] | torch.Tensor] | torch.Tensor


@dataclass(frozen=True)
class Request:
    """Prompts as id lists, their parameters, and when to stop."""

    prompts: list[list[int]]
    sampling: list[SamplingParams]
    max_new_tokens: int
    stop_ids: frozenset[int]
    pad_token_id: int

    def state(self, target: Model, num_drafts: int, rule: str) -> DecodeState:
        """Committed tokens and parameters on the target's device."""
        device, batch = target.device, len(self.prompts)
        lengths = [len(p) for p in self.prompts]
        # A finished row may hold K tokens behind its cut, and is fed K + 1 more while others go on.
        capacity = max(lengths) + self.max_new_tokens + 2 * num_drafts + 1
        tokens = torch.full((batch, capacity + 1), rules.PAD_TOKEN, dtype=torch.int64)
        for row, prompt in zip(tokens, self.prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        tokens = tokens.to(device)

        def column(name: str, dtype: torch.dtype, off: float = 0) -> torch.Tensor:
            values = [off if value is None else value for value in (getattr(s, name) for s in self.sampling)]
            if name in ("top_k", "min_tokens_to_keep", "min_tokens"):
                values = [clamped(int(value)) for value in values]
            return torch.tensor(values, dtype=dtype, device=device)

        params = RowParams(
            column("temperature", torch.float64),
            column("top_k", torch.int64),
            column("top_p", torch.float64, 1.0),
            column("min_p", torch.float64),
            column("min_tokens_to_keep", torch.int64),
        )
        given = [s.seed is not None for s in self.sampling]
        seeds = column("seed", torch.int64)
        if not all(given):
            seeds = torch.where(torch.tensor(given, device=device), seeds, random_seeds(batch, device))
        penalties = None
        if any(s.has_penalties for s in self.sampling):
            mask = torch.zeros(batch, target.vocab_size + 1, dtype=torch.bool, device=device)
            mask.scatter_(1, tokens.where(tokens >= 0, target.vocab_size), True)
            counts = torch.zeros(batch, target.vocab_size, dtype=torch.int32, device=device)
            penalties = Penalties(
                repetition=column("repetition_penalty", torch.float64),
                frequency=column("frequency_penalty", torch.float64),
                presence=column("presence_penalty", torch.float64),
                counts=counts,
                prompt_mask=mask[:, :-1],
            )
        late = any(s.min_tokens for s in self.sampling) and self.stop_ids
        return DecodeState(
            tokens,
            torch.tensor(lengths, dtype=torch.int32, device=device),
            max(lengths),
            capacity,
            seeds,
            params,
            rule,
            torch.ones(batch, dtype=torch.bool, device=device),
            torch.tensor(lengths, dtype=torch.int32, device=device),
            column("min_tokens", torch.int64) if late else None,
            sorted(self.stop_ids),
            penalties,
        )


def check_request(
    input_ids: Prompts,
    sampling: SamplingParams | Sequence[SamplingParams],
    attention_mask: torch.Tensor | None,
    max_new_tokens: int,
    eos_token_id: int | Sequence[int] | None,
    stop_token_ids: Sequence[int],
    pad_token_id: int | None,
    vocab_size: int,
    max_length: int,
) -> Request:
    """Check every argument; raises TypeError or ValueError by its name."""
    prompts = _prompts(input_ids, attention_mask)
    max_new_tokens = checks.integer("max_new_tokens", max_new_tokens, 1)
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"input_ids[{i}] is empty: a prompt needs at least one token")
        for token in prompt:
            if not 0 <= token < vocab_size:
                raise ValueError(f"input_ids[{i}] holds id {token}, outside [0, {vocab_size})")
        if len(prompt) + max_new_tokens > max_length:
            raise ValueError(
                f"input_ids[{i}] has {len(prompt)} tokens: with max_new_tokens={max_new_tokens} "
                f"that is more than the models' {max_length}"
            )
    if not isinstance(sampling, SamplingParams | Sequence):
        raise TypeError(f"sampling must be a SamplingParams, or one for each prompt, got {type(sampling).__name__}")
    each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
    if any(not isinstance(s, SamplingParams) for s in each):
        raise TypeError("sampling must be a SamplingParams, or one for each prompt")
    if len(each) != len(prompts):
        raise ValueError(f"sampling must be one for all or one a prompt: got {len(each)} for {len(prompts)} prompts")
    stops = _stop_ids("eos_token_id", eos_token_id, vocab_size) | _stop_ids(
        "stop_token_ids", stop_token_ids, vocab_size
    )
    if any(s.min_tokens for s in each) and len(stops) == vocab_size:
        raise ValueError("min_tokens cannot hold: every id is a stop token")
    pad = rules.PAD_TOKEN if pad_token_id is None else checks.integer("pad_token_id", pad_token_id)
    return Request(prompts, each, max_new_tokens, frozenset(stops), pad)


def _stop_ids(name: str, given: object, vocab_size: int) -> set[int]:
    values = given.reshape(-1).tolist() if isinstance(given, torch.Tensor) else given
    if values is None:
        return set()
    if not isinstance(values, Iterable) or isinstance(values, str):
        values = [values]
    stops = {checks.integer(name, value) for value in values}
    for stop in stops:
        if not 0 <= stop < vocab_size:
            raise ValueError(f"{name} holds {stop}, outside [0, {vocab_size})")
    return stops


def _prompts(input_ids: Prompts, attention_mask: torch.Tensor | None) -> list[list[int]]:
    if isinstance(input_ids, torch.Tensor):
        if input_ids.dim() == 1:
            raise ValueError("input_ids must be a tensor [B, T]: write ids[None] for one prompt")
        checks.tensor("input_ids", input_ids, checks.INT_DTYPES, (None, None))
        if attention_mask is None:
            return [row.tolist() for row in input_ids]
        if not isinstance(attention_mask, torch.Tensor) or attention_mask.shape != input_ids.shape:
            raise ValueError(f"attention_mask must be a tensor of shape {list(input_ids.shape)}")
        keep = attention_mask.bool()
        # What is added to scores, 0 and -inf, would say the opposite.
        if (keep != attention_mask).any():
            raise ValueError("attention_mask must hold 1 for tokens and 0 for padding alone")
        # Padding on the left or on the right; a hole would shift the positions behind it.
        if ((keep[:, 1:] != keep[:, :-1]).sum(1) > 1).any():
            raise ValueError("attention_mask must pad each row on the left or on the right alone")
        return [row[kept].tolist() for row, kept in zip(input_ids, keep, strict=True)]
    if attention_mask is not None:
        raise ValueError("attention_mask goes with input_ids as a tensor; a list of id lists needs none")
    if isinstance(input_ids, Mapping):
        raise TypeError(
            "input_ids got what a tokenizer returns: pass **encoded, or input_ids= and attention_mask= of it"
        )
    if isinstance(input_ids, str | bytes) or not isinstance(input_ids, Sequence):
        raise TypeError(f"input_ids must be a list of id lists or a tensor [B, T], got {type(input_ids).__name__}")
    prompts = []
    for i, prompt in enumerate(input_ids):
        if isinstance(prompt, str | bytes | bytearray):
            raise TypeError(f"input_ids[{i}] must hold token ids, got text: encode it first")
        values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        if not isinstance(values, Sequence):
            what = "an int: write [[ids]] for one prompt" if isinstance(values, int) else type(prompt).__name__
            raise TypeError(f"input_ids must be a list of id lists, one a prompt: input_ids[{i}] is {what}")
        if any(isinstance(value, list) for value in values):
            raise ValueError(f"input_ids[{i}] must be one list of ids, or a tensor of one dimension")
        prompts.append([checks.integer(f"input_ids[{i}]", value) for value in values])
    return prompts
