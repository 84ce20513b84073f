"""The demo's result as text: tokens marked by where they came from, and the figures."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any, TextIO

from ..decode import TokenSource
from ..stats import GenerateStats

Show = Callable[[str, TokenSource], str]

# How a token looks: on a terminal by colour, elsewhere by the signs around it.
_COLOURS = {
    TokenSource.ANCHOR: "35",
    TokenSource.ACCEPTED: "32",
    TokenSource.RECOVERED: "1;31",
    TokenSource.BONUS: "1;36",
}
_SIGNS = {
    TokenSource.ANCHOR: "<>",
    TokenSource.ACCEPTED: ("", ""),
    TokenSource.RECOVERED: "[]",
    TokenSource.BONUS: "{}",
}
_WORDS = {
    TokenSource.ANCHOR: "first token",
    TokenSource.ACCEPTED: "accepted draft",
    TokenSource.RECOVERED: "recovered",
    TokenSource.BONUS: "bonus",
}


def marks(stream: TextIO) -> Show:
    """How tokens are marked on a stream."""
    return _coloured if stream.isatty() and "NO_COLOR" not in os.environ else _signed


def legend(show: Show) -> str:
    """What the marks mean."""
    return "tokens: " + "  ".join(show(word, source) for source, word in _WORDS.items())


def marked(result: dict[str, Any], decode: Callable[[list[int]], str], show: Show) -> list[str]:
    """The text of each row; neighbours that were accepted are marked together."""
    texts = []
    for tokens, names in zip(result["tokens"], result["sources"], strict=True):
        sources = [TokenSource[name.upper()] for name in names]
        out, start = [], 0
        for i in range(1, len(tokens) + 1):
            if i == len(tokens) or sources[i] != sources[start] or sources[i] != TokenSource.ACCEPTED:
                out.append(show(decode(tokens[start:i]), sources[start]))
                start = i
        texts.append("".join(out))
    return texts


def figures(result: dict[str, Any], args: argparse.Namespace, *, exact: bool) -> list[str]:
    """The figures of one measurement; `exact`: the models' arithmetic is exact enough for the texts to agree."""
    total: GenerateStats = result["total"]
    low, high = min(result["speedups"]), max(result["speedups"])
    drafts = f"K = {args.num_speculative_tokens}, rule {args.rule}, T = {args.temperature:g}"
    differs = "NOT IDENTICAL" if exact else f"then {args.dtype} rounds another way in a batch of another shape"
    return [
        f"{drafts}, batch {args.batch}, {args.repeats} runs, {total.emitted} tokens (the first run is shown)",
        f"acceptance rate    {total.acceptance_rate:.3f}   ({total.accepted} accepted of {total.examined} examined)",
        f"tokens per round   {total.tokens_per_round:.2f}    ({total.row_rounds} rounds of a row)",
        "accepted a round",
        *_histogram(total.accepted_histogram),
        f"speculative        {result['tokens_per_second']:.0f} tokens/s",
        f"plain              {result['plain_tokens_per_second']:.0f} tokens/s",
        f"speed-up           {result['speedup']:.2f} x   (median of {args.repeats} paired runs on this machine, "
        f"{low:.2f} to {high:.2f}, threads: {result['threads']})",
        "coupled rule       {} of {} tokens are those of plain sampling: {}".format(
            *result["coupled_tokens"], "identical" if result["coupled_identical"] else differs
        ),
    ]


def plain(result: dict[str, Any]) -> dict[str, Any]:
    """A result without what JSON does not hold."""
    return {key: value for key, value in result.items() if key != "total"}


def _coloured(text: str, source: TokenSource) -> str:
    return f"\x1b[{_COLOURS[source]}m{text}\x1b[0m"


def _signed(text: str, source: TokenSource) -> str:
    before, after = _SIGNS[source]
    return f"{before}{text}{after}"


def _histogram(counts: list[int]) -> list[str]:
    total = max(sum(counts), 1)
    return [f"  {i:3d}  {n:5d}  {'#' * round(40 * n / total)}" for i, n in enumerate(counts)]
