"""The demo of the embedded pair: lines of a play go on, byte by byte."""

from __future__ import annotations

import argparse
import json
import sys

from ..models.embedded import decode, encode, load_embedded_pair
from . import report
from .paired import Setup, measure
from .progress import Progress

PROMPTS = (
    "MIRANDA:\nO, wonder!\nHow many goodly creatures are there here!\n",
    "KING HENRY V:\nOnce more unto the breach, dear friends, once more;\n",
    "HAMLET:\nTo be, or not to be: that is the question:\n",
    "ROSALIND:\nAll the world's a stage,\nAnd all the men and women merely players:\n",
)


def run(args: argparse.Namespace, progress: Progress) -> tuple[str, bool]:
    """What to print, and whether the coupled rule's text is that of plain sampling."""
    progress.step("loading the embedded pair")
    pair = load_embedded_pair()
    prompts = [args.prompt if args.prompt is not None else PROMPTS[b % len(PROMPTS)] for b in range(args.batch)]
    result = measure(Setup(pair.target, pair.draft, decode), [encode(text) for text in prompts], args, progress)
    passed = result["coupled_identical"]
    if args.json:
        return json.dumps({"model": args.model, "prompts": prompts, **report.plain(result)}, indent=2), passed
    show = report.marks(sys.stdout)
    lines = []
    for prompt, text in zip(prompts, report.marked(result, decode, show), strict=True):
        lines += [prompt + text, ""]
    return "\n".join([*lines, report.legend(show), "", *report.figures(result, args, exact=True)]), passed
