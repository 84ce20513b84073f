"""`triton-specdec demo`: real text from the embedded pair, and what it cost."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

import torch

from .decode import GenerateOutput, SpecDecoder, TokenSource
from .models.embedded import EmbeddedPair, decode, encode, load_embedded_pair
from .params import SamplingParams
from .stats import GenerateStats, sum_rounds

PROMPTS = (
    "MIRANDA:\nO, wonder!\nHow many goodly creatures are there here!\n",
    "KING HENRY V:\nOnce more unto the breach, dear friends, once more;\n",
    "HAMLET:\nTo be, or not to be: that is the question:\n",
    "ROSALIND:\nAll the world's a stage,\nAnd all the men and women merely players:\n",
)

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


class Progress:
    """One line on stderr that says what runs and how far it is; on a terminal it is written over."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.live = stream, stream.isatty()
        self.shown = 0.0
        self.width = 0

    def step(self, text: str) -> None:
        """A new piece of work begins."""
        self._write(text) if self.live else print(text, file=self.stream, flush=True)
        self.shown = time.perf_counter()

    def tokens(self, text: str, done: int, total: int) -> None:
        """How far the piece is; at most ten times a second, and not at all where lines cannot be written over."""
        now = time.perf_counter()
        if self.live and now - self.shown > 0.1:
            self.shown = now
            self._write(f"{text} {done}/{total} tokens")

    def close(self) -> None:
        """Take the line away."""
        if self.live:
            self._write("")

    def _write(self, text: str) -> None:
        self.stream.write("\r" + text.ljust(self.width) + ("\r" if not text else ""))
        self.stream.flush()
        self.width = len(text)


def run(args: argparse.Namespace) -> int:
    """Run the demo; returns 1 if the coupled rule's text is not that of plain sampling."""
    # More threads gain nothing on models this small, and lose much where something else wants the cores.
    torch.set_num_threads(args.threads)
    SamplingParams(args.temperature, args.top_k, args.top_p, seed=args.seed)
    progress = Progress(sys.stderr)
    progress.step("loading the embedded pair")
    pair = load_embedded_pair()
    texts = [args.prompt if args.prompt is not None else PROMPTS[b % len(PROMPTS)] for b in range(args.batch)]
    result = measure(pair, texts, args, progress)
    progress.close()
    print(json.dumps(_plain(result), indent=2) if args.json else _report(result, args, sys.stdout))
    return 0 if result["coupled_identical"] else 1


def measure(pair: EmbeddedPair, texts: list[str], args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Paired runs, each with seeds of its own, then the coupled rule against plain sampling with the first seeds."""
    plain = SpecDecoder(pair.target)
    drafts = {"num_speculative_tokens": args.num_speculative_tokens}
    speculative = SpecDecoder(pair.target, pair.draft, rule=args.rule, **drafts)
    prompts = [encode(text) for text in texts]

    def timed(what: str, decoder: SpecDecoder, run: int, tokens: int = args.max_new_tokens) -> GenerateOutput:
        progress.step(what)
        first, done, total = args.seed + run * len(prompts), 0, tokens * len(prompts)
        seeds = range(first, first + len(prompts))
        each = [SamplingParams(args.temperature, args.top_k, args.top_p, seed=seed) for seed in seeds]

        def on_token(row: int, token: int, accepted: bool) -> None:
            nonlocal done
            done += 1
            progress.tokens(what, done, total)

        return decoder.generate(prompts, each, max_new_tokens=tokens, on_token=on_token)

    # The first calls of a process pay for what later ones find ready; they are not timed.
    for decoder in (plain, speculative):
        timed("warming up", decoder, 0, min(8, args.max_new_tokens))
    slow, fast = [], []
    for run in range(args.repeats):
        slow.append(timed(f"plain decoding, run {run + 1} of {args.repeats}", plain, run))
        fast.append(timed(f"speculative decoding, run {run + 1} of {args.repeats}", speculative, run))
    coupled = fast[0]
    if args.rule != "coupled":
        coupled = timed("coupled rule", SpecDecoder(pair.target, pair.draft, rule="coupled", **drafts), 0)
    same = coupled.sequences == slow[0].sequences
    tokens = fast[0].stats.emitted
    total = sum_rounds([f.stats for f in fast])
    speedups = [s.stats.total_seconds / f.stats.total_seconds for s, f in zip(slow, fast, strict=True)]
    return {
        "prompts": texts,
        "texts": [decode(row.tolist()) for row in fast[0].sequences],
        "output": fast[0],
        "stats": fast[0].stats.as_dict(),
        "total": total,
        "plain_tokens_per_second": statistics.median(tokens / s.stats.total_seconds for s in slow),
        "tokens_per_second": statistics.median(tokens / f.stats.total_seconds for f in fast),
        "speedup": statistics.median(speedups),
        "speedups": speedups,
        "acceptance_rate": total.acceptance_rate,
        "tokens_per_round": total.tokens_per_round,
        "coupled_identical": bool(same.all()),
        "coupled_tokens": [int(same.sum()), same.numel()],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _plain(result: dict[str, Any]) -> dict[str, Any]:
    """The result without what JSON does not hold, and with each token's source."""
    output: GenerateOutput = result["output"]
    sources = [[TokenSource(s).name.lower() for s in row] for row in output.sources.tolist()]
    rest = {key: value for key, value in result.items() if key not in ("output", "total")}
    return {**rest, "tokens": output.sequences.tolist(), "sources": sources}


def _report(result: dict[str, Any], args: argparse.Namespace, stream: TextIO) -> str:
    colour = stream.isatty() and "NO_COLOR" not in os.environ
    show = _coloured if colour else _signed
    output: GenerateOutput = result["output"]
    lines = []
    for text, row, sources in zip(result["prompts"], output.sequences.tolist(), output.sources.tolist(), strict=True):
        lines += [text + _marked(row, sources, show), ""]
    lines += ["tokens: " + "  ".join(show(word, source) for source, word in _WORDS.items()), ""]
    total: GenerateStats = result["total"]
    low, high = min(result["speedups"]), max(result["speedups"])
    drafts = f"K = {args.num_speculative_tokens}, rule {args.rule}, T = {args.temperature:g}"
    lines += [
        f"{drafts}, batch {args.batch}, {args.repeats} runs of {output.stats.emitted} tokens (the first is shown)",
        f"acceptance rate    {total.acceptance_rate:.3f}   ({total.accepted} accepted of {total.examined} examined)",
        f"tokens per round   {total.tokens_per_round:.2f}    ({total.row_rounds} rounds of a row)",
        "accepted a round",
        *_histogram(total.accepted_histogram),
        f"speculative        {result['tokens_per_second']:.0f} tokens/s",
        f"plain              {result['plain_tokens_per_second']:.0f} tokens/s",
        f"speed-up           {result['speedup']:.2f} x   (median of {args.repeats} paired runs on this machine, "
        f"{low:.2f} to {high:.2f}, threads: {result['threads']})",
        "coupled rule       {} of {} tokens are those of plain sampling: {}".format(
            *result["coupled_tokens"], "identical" if result["coupled_identical"] else "NOT IDENTICAL"
        ),
    ]
    return "\n".join(lines)


def _marked(tokens: list[int], sources: list[int], show: Callable[[str, TokenSource], str]) -> str:
    """Text in which neighbours of one source are marked together, at the borders of characters."""
    out = []
    start = 0
    for i in range(1, len(tokens) + 1):
        if i == len(tokens) or sources[i] != sources[start] or sources[i] != TokenSource.ACCEPTED:
            out.append(show(decode(tokens[start:i]), TokenSource(sources[start])))
            start = i
    return "".join(out)


def _coloured(text: str, source: TokenSource) -> str:
    return f"\x1b[{_COLOURS[source]}m{text}\x1b[0m"


def _signed(text: str, source: TokenSource) -> str:
    before, after = _SIGNS[source]
    return f"{before}{text}{after}"


def _histogram(counts: list[int]) -> list[str]:
    total = max(sum(counts), 1)
    return [f"  {i:3d}  {n:5d}  {'#' * round(40 * n / total)}" for i, n in enumerate(counts)]
