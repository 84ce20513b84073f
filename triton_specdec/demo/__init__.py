"""`triton-specdec demo`: real text from a model, and what it cost; plain and speculative decoding beside each other."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

from ..params import SamplingParams
from . import embedded, smollm2
from .progress import Progress

MODELS = {"embedded": embedded.run, "smollm2": smollm2.run}

# What a model's options are where none is given; an option that stands here for other models only is refused.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "embedded": {
        "num_speculative_tokens": 4,
        "temperature": 0.8,
        "max_new_tokens": 192,
        "repeats": 5,
        # More threads gain nothing on models this small, and lose much where something else wants the cores.
        "threads": 1,
    },
    "smollm2": {
        "num_speculative_tokens": 10,
        "temperature": 0.0,
        "max_new_tokens": 128,
        "repeats": 3,
        # Two are 1.4 times as fast where nothing else runs, and up to ten times as slow where something does.
        "threads": 1,
        "draft": "prompt_lookup",
        "dtype": "bfloat16",
        "through": "own",
        "model_file": None,
    },
}


def run(args: argparse.Namespace) -> int:
    """Run the demo; returns 1 if, in float32, the coupled rule's text is not that of plain sampling."""
    complete(args)
    torch.set_num_threads(args.threads)
    SamplingParams(args.temperature, args.top_k, args.top_p, seed=args.seed)
    progress = Progress(sys.stderr)
    try:
        output, passed = MODELS[args.model](args, progress)
    finally:
        progress.close()
    print(output)
    return 0 if passed else 1


def complete(args: argparse.Namespace) -> None:
    """Fill in the model's own defaults; ValueError for an option that the model has not."""
    ours = _DEFAULTS[args.model]
    for name in {name: None for options in _DEFAULTS.values() for name in options}:
        if getattr(args, name) is None:
            setattr(args, name, ours.get(name))
        elif name not in ours:
            raise ValueError(f"--{name.replace('_', '-')} is not an option of --model {args.model}")
