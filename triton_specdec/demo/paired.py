"""Plain and speculative decoding of the same prompts in turn, so that whatever else the machine does meets both."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..decode import GenerateOutput, SpecDecoder, TokenSource
from ..models import Model
from ..params import SamplingParams
from ..stats import sum_rounds
from .progress import Progress


class Setup(NamedTuple):
    """What generates: models, the way from tokens to text, and the tokens that end a text."""

    target: Model
    draft: Model | str
    decode: Callable[[list[int]], str]
    stop_ids: Sequence[int] = ()


def measure(
    setup: Setup, prompts: list[list[int]], args: argparse.Namespace, progress: Progress, label: str = ""
) -> dict[str, Any]:
    """Paired runs, each with seeds of its own, then the coupled rule against plain sampling with the first seeds."""
    plain, speculative = (_decoder(setup, rule, args) for rule in (None, args.rule))

    def timed(what: str, decoder: SpecDecoder, run: int, tokens: int = args.max_new_tokens) -> GenerateOutput:
        what = label + what
        progress.step(what)
        first, done, total = args.seed + run * len(prompts), 0, tokens * len(prompts)
        seeds = range(first, first + len(prompts))
        each = [SamplingParams(args.temperature, args.top_k, args.top_p, seed=seed) for seed in seeds]

        def on_token(row: int, token: int, accepted: bool) -> None:
            nonlocal done
            done += 1
            progress.tokens(what, done, total)

        stops = setup.stop_ids
        return decoder.generate(prompts, each, max_new_tokens=tokens, stop_token_ids=stops, on_token=on_token)

    # The first calls of a process pay for what later ones find ready; they are not timed.
    for decoder in (plain, speculative):
        timed("warming up", decoder, 0, min(8, args.max_new_tokens))
    slow, fast = [], []
    for run in range(args.repeats):
        slow.append(timed(f"plain decoding, run {run + 1} of {args.repeats}", plain, run))
        fast.append(timed(f"speculative decoding, run {run + 1} of {args.repeats}", speculative, run))
    coupled = fast[0] if args.rule == "coupled" else timed("coupled rule", _decoder(setup, "coupled", args), 0)
    return _result(setup, slow, fast, coupled)


def _decoder(setup: Setup, rule: str | None, args: argparse.Namespace) -> SpecDecoder:
    if rule is None:
        return SpecDecoder(setup.target)
    return SpecDecoder(setup.target, setup.draft, rule=rule, num_speculative_tokens=args.num_speculative_tokens)


def _result(
    setup: Setup, slow: list[GenerateOutput], fast: list[GenerateOutput], coupled: GenerateOutput
) -> dict[str, Any]:
    texts, expected = rows(fast[0]), rows(slow[0])
    speeds = [[run.stats.emitted / run.stats.total_seconds for run in runs] for runs in (slow, fast)]
    speedups = [f / s for s, f in zip(*speeds, strict=True)]
    total = sum_rounds([f.stats for f in fast])
    same = sum(_common(a, b) for a, b in zip(rows(coupled), expected, strict=True))
    return {
        "texts": [setup.decode(row) for row in texts],
        "tokens": texts,
        "sources": [[TokenSource(s).name.lower() for s in row] for row in rows(fast[0], fast[0].sources)],
        "finish_reason": fast[0].finish_reason,
        "stats": fast[0].stats.as_dict(),
        "total": total,
        "plain_tokens_per_second": statistics.median(speeds[0]),
        "tokens_per_second": statistics.median(speeds[1]),
        "speedup": statistics.median(speedups),
        "speedups": speedups,
        "acceptance_rate": total.acceptance_rate,
        "tokens_per_round": total.tokens_per_round,
        "coupled_identical": rows(coupled) == expected,
        "coupled_tokens": [same, sum(map(len, expected))],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def rows(output: GenerateOutput, values: torch.Tensor | None = None) -> list[list[int]]:
    """Each row's tokens, or other values of them, without the padding."""
    padded = output.sequences if values is None else values
    return [row[:length] for row, length in zip(padded.tolist(), output.lengths.tolist(), strict=True)]


def _common(a: list[int], b: list[int]) -> int:
    """How many tokens two texts begin with in common: what agrees behind the first difference does so by chance."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
