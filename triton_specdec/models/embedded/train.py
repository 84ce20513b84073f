"""Train the embedded pair again: `python -m triton_specdec.models.embedded.train`.

The target learns the next byte of the corpus; the draft then learns the target's probabilities (KL divergence), half
on the corpus and half on text sampled from the target at temperature 1, the text it will meet in decoding. The pair
as written is then evaluated on the whole held-out play. The gate: at most 2.1 bits a byte, and a sum of min(p, q) of
at least 0.75. A pair that misses it, just trained or given with `--eval-only`, makes the exit status 1.

Matrices of the blocks are trained with Muon (Jordan et al. 2024), the rest with AdamW. A step sees 2,048 bytes: 8
windows of 256, and 2 of `ctx` = 1,024 while the learning rate decays. Full attention that saw short windows only falls
apart behind their length; the long ones, and the sliding window of the attention, keep the text good up to `ctx`.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ... import __version__
from ...fetch import cache_folder
from ..llama import LlamaConfig, LlamaModel
from .corpus import load_corpus

TARGET = LlamaConfig(vocab=256, layers=12, d=160, heads=5, kv=1, ff=432, ctx=1024, window=256)
DRAFT = LlamaConfig(vocab=256, layers=1, d=128, heads=4, kv=2, ff=352, ctx=1024, window=96)
FILES = ("target.safetensors", "draft.safetensors")
SHIPPED = Path(__file__).parent

STEP_BYTES = 2048
SHORT_WINDOW_BYTES = 256
WARMUP_STEPS = 60
DECAY_PART = 0.4
# Apart from the seeds one would choose: the draft must not be judged on the very text it was trained on.
ACCEPTANCE_SEED = 20_000_003


class Gate(NamedTuple):
    """What a pair must reach on the held-out play."""

    max_bits_per_byte: float = 2.1
    min_overlap: float = 0.75


GATE = Gate()


class Scores(NamedTuple):
    """Figures of a pair on a text it was not trained on."""

    bits_per_byte: float
    overlap: float
    greedy_agreement: float

    @property
    def passed(self) -> bool:
        """Whether the pair reaches `GATE`; False for NaN."""
        return self.bits_per_byte <= GATE.max_bits_per_byte and self.overlap >= GATE.min_overlap


# A loss of one step: how many windows of how many bytes to draw, and from which generator.
LossOf = Callable[[int, int, torch.Generator], torch.Tensor]


class Schedule(NamedTuple):
    """How long one model is trained, and with what.

    Examples
    --------
    >>> schedule = Schedule(steps=1000, seed=0)
    >>> [round(schedule.learning_rate(step), 6) for step in (0, 59, 599, 800, 999)]
    [5e-05, 0.003, 0.003, 0.0015, 8e-06]
    >>> [schedule.window_bytes(step, 1024) for step in (0, 599, 600)]
    [256, 256, 1024]
    """

    steps: int
    seed: int
    peak_lr: float = 0.003
    long_only: bool = False

    def learning_rate(self, step: int) -> float:
        """Linear warm-up over 60 steps, constant, linear decay to 0 over the last 40% of the steps."""
        warmup = (step + 1) / WARMUP_STEPS
        decay = (self.steps - step) / (DECAY_PART * self.steps)
        return self.peak_lr * min(1.0, warmup, decay)

    def window_bytes(self, step: int, longest: int) -> int:
        """Length of a training window: 256, and `longest` during the decay, or always with `long_only`."""
        decays = step >= (1 - DECAY_PART) * self.steps
        return longest if decays or self.long_only else min(SHORT_WINDOW_BYTES, longest)


def draw_windows(text: torch.Tensor, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Draw windows at random places.

    Parameters
    ----------
    text : torch.Tensor, uint8 [rows, n]
        Texts of one length, n > length.
    count, length : int
        How many windows, and how many tokens a model reads of each.
    generator : torch.Generator
        Where the places come from; equal generators give equal windows.

    Returns
    -------
    torch.Tensor, int64 [count, length + 1]
        The last token is only predicted.

    Raises
    ------
    ValueError
        When the texts are too short.
    """
    rows, available = text.shape
    if available <= length:
        raise ValueError(f"text must have more than {length} bytes in a row, got {available}")
    row = torch.randint(rows, (count, 1), generator=generator)
    start = torch.randint(available - length, (count, 1), generator=generator)
    return text[row, start + torch.arange(length + 1)].long()


def new_model(config: LlamaConfig, seed: int) -> LlamaModel:
    """Random weights: a small embedding, matrices that keep a vector's length, blocks that start as the identity."""
    generator = torch.Generator().manual_seed(seed)
    model = LlamaModel(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o.weight", "dn.weight")):
                weight.zero_()
            elif weight.ndim == 2:
                deviation = 0.02 if name == "emb.weight" else weight.shape[1] ** -0.5
                weight.normal_(0.0, deviation, generator=generator)
    return model


def new_optimizers(model: LlamaModel) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for the embedding and the norms."""
    if not hasattr(torch.optim, "Muon"):
        raise RuntimeError(f"training needs torch.optim.Muon, from torch 2.9 on; this is torch {torch.__version__}")
    matrices = [weight for weight in model.blocks.parameters() if weight.ndim == 2]
    others = [weight for name, weight in model.named_parameters() if weight.ndim == 1 or not name.startswith("blocks.")]
    return [
        # Steps of the size of AdamW's, so that one learning rate serves both.
        torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def fit(name: str, model: LlamaModel, loss_of: LossOf, schedule: Schedule) -> float:
    """Train a model in place; returns the mean loss of the last twentieth of the steps, in nats a byte."""
    generator = torch.Generator().manual_seed(schedule.seed)
    optimizers = new_optimizers(model)
    model.train().requires_grad_(True)
    losses: list[float] = []
    start = time.perf_counter()
    for step in range(schedule.steps):
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = schedule.learning_rate(step)
        length = schedule.window_bytes(step, model.config.ctx)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(max(2, STEP_BYTES // length), length, generator)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        show_progress(name, losses, schedule.steps, time.perf_counter() - start)
    model.eval().requires_grad_(False)
    return mean_of_last(losses, max(1, schedule.steps // 20))


def show_progress(name: str, losses: list[float], steps: int, seconds: float) -> None:
    """Rewrite the progress line on a terminal; elsewhere print one line for each hundredth of the way."""
    done = len(losses)
    terminal = sys.stdout.isatty()
    if terminal or done % max(1, steps // 100) == 0 or done == steps:
        eta = seconds / done * (steps - done)
        line = f"{name}: step {done}/{steps}, loss {mean_of_last(losses, 20):.3f}, {seconds:.0f} s, ETA {eta:.0f} s"
        # The blanks wipe what a longer line left behind.
        start, end = ("\r", "   \n" if done == steps else "   ") if terminal else ("", "\n")
        print(f"{start}{line}", end=end, flush=True)


def mean_of_last(values: list[float], count: int) -> float:
    """Mean of the last `count` values, or of all when there are fewer."""
    last = values[-count:]
    return sum(last) / len(last) if last else math.nan


def train_target(target: LlamaModel, text: bytes, schedule: Schedule) -> float:
    """Train on the next byte of `text`, in place; returns the last losses' mean, in nats a byte."""
    rows = as_rows(text)

    def loss_of(count: int, length: int, generator: torch.Generator) -> torch.Tensor:
        tokens = draw_windows(rows, count, length, generator)
        return F.cross_entropy(target(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())

    return fit("target", target, loss_of, schedule)


def distil_draft(
    draft: LlamaModel, target: LlamaModel, text: bytes, sampled: torch.Tensor, schedule: Schedule
) -> float:
    """Train on KL(target || draft), half on `text` and half on `sampled` (uint8 [rows, n]), in place."""
    rows = as_rows(text)

    def loss_of(count: int, length: int, generator: torch.Generator) -> torch.Tensor:
        half = count // 2
        drawn = (draw_windows(source, half, length, generator) for source in (rows, sampled))
        tokens = torch.cat(list(drawn))[:, :-1]
        with torch.no_grad():
            wanted = target(tokens).float().log_softmax(-1)
        got = draft(tokens).float().log_softmax(-1)
        return F.kl_div(got.flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean", log_target=True)

    return fit("draft", draft, loss_of, schedule)


@torch.inference_mode()
def sample_text(model: LlamaModel, first: torch.Tensor, length: int, seed: int) -> torch.Tensor:
    """Continue every first byte by the model's own text at temperature 1.

    Parameters
    ----------
    model : LlamaModel
        The target.
    first : torch.Tensor, uint8 [rows]
        The byte that each row starts with.
    length : int
        Bytes to sample for each row, at most `ctx`.
    seed : int
        Of the sampling.

    Returns
    -------
    torch.Tensor, uint8 [rows, length + 1]
    """
    generator = torch.Generator().manual_seed(seed)
    cache = model.new_cache(len(first), length)
    tokens = [first.long()[:, None]]
    for _ in range(length):
        p = model(tokens[-1], cache)[:, -1].softmax(-1)
        tokens.append(torch.multinomial(p, 1, generator=generator))
    return torch.cat(tokens, 1).byte()


@torch.inference_mode()
def evaluate(target: LlamaModel, draft: LlamaModel, text: bytes, window: int = 1024) -> Scores:
    """Score a pair on a text, with sliding windows.

    Windows of `window` bytes start every `window / 2` bytes; each window but the first scores its second half only.
    So every byte is scored once, with at least `window / 2` bytes of context, except those of the first window, which
    have what there is. The first byte of the text has no context at all and is not scored.

    Parameters
    ----------
    target, draft : LlamaModel
        The pair.
    text : bytes
        At least 2 bytes that neither was trained on.
    window : int
        The longest context, even and at most `ctx`.

    Returns
    -------
    Scores
        Means over the scored bytes: the target's surprise in bits; the sum over the vocabulary of min(p, q), which is
        the probability that a draft token is accepted at temperature 1 (Leviathan et al. 2023, section 3.2); and how
        often both models have the same most probable byte, which is that probability at temperature 0.

    Raises
    ------
    ValueError
        When the text is too short or the window odd or too long.

    Examples
    --------
    >>> model = new_model(DRAFT, seed=0).requires_grad_(False)
    >>> scores = evaluate(model, model, b"Now is the winter of our discontent", window=16)
    >>> round(scores.overlap, 4), scores.greedy_agreement
    (1.0, 1.0)
    """
    longest = min(target.max_length, draft.max_length)
    if window % 2 or not 2 <= window <= longest:
        raise ValueError(f"window must be even and in [2, {longest}], got {window}")
    if len(text) < 2:
        raise ValueError(f"text must have at least 2 bytes, got {len(text)}")
    tokens = as_rows(text).long()
    surprise = overlap = agreement = 0.0
    scored = 0
    for start in range(0, max(1, len(text) - 1 - window // 2), window // 2):
        piece = tokens[:, start : start + window + 1]
        new = slice(window // 2 if start else 0, None)
        log_p = target(piece[:, :-1])[0, new].float().log_softmax(-1)  # [n, V]
        log_q = draft(piece[:, :-1])[0, new].float().log_softmax(-1)
        surprise -= log_p.gather(-1, piece[0, 1:][new, None]).sum(dtype=torch.float64).item()
        overlap += torch.minimum(log_p, log_q).exp().sum(dtype=torch.float64).item()
        agreement += (log_p.argmax(-1) == log_q.argmax(-1)).sum().item()
        scored += len(log_p)
    return Scores(surprise / scored / math.log(2), overlap / scored, agreement / scored)


def as_rows(text: bytes) -> torch.Tensor:
    """One row of bytes, uint8 [1, n]."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)[None]


def train_pair(options: argparse.Namespace, text: bytes) -> dict[str, Any]:
    """Train what the options ask for and write the pair to `options.output`; returns the report's training part."""
    started = time.perf_counter()
    train_loss = None
    schedule = Schedule(options.steps, options.seed, options.lr, long_only=bool(options.init))
    if options.target:
        target = LlamaModel.load(options.target)
    else:
        target = LlamaModel.load(options.init / FILES[0]) if options.init else new_model(TARGET, options.seed)
        train_loss = train_target(target, text, schedule)
    options.output.mkdir(parents=True, exist_ok=True)
    target.save(options.output / FILES[0])
    # The draft learns from the weights as written, which are rounded to half precision.
    target = LlamaModel.load(options.output / FILES[0])
    trained = time.perf_counter()
    print(f"sampling {options.sample_bytes} bytes from the target", flush=True)
    rows = math.ceil(options.sample_bytes / TARGET.ctx)
    first = draw_windows(as_rows(text), rows, 1, torch.Generator().manual_seed(options.seed))[:, 0]
    # Parts of 64 rows keep the cache at 200 MB.
    parts = [sample_text(target, part, TARGET.ctx, options.seed + n) for n, part in enumerate(torch.split(first, 64))]
    sampled = torch.cat(parts)
    after_sampling = time.perf_counter()
    draft = LlamaModel.load(options.init / FILES[1]) if options.init else new_model(DRAFT, options.seed)
    draft_loss = distil_draft(draft, target, text, sampled, schedule._replace(steps=options.draft_steps))
    draft.save(options.output / FILES[1])
    return {
        "steps": 0 if options.target else options.steps,
        "draft_steps": options.draft_steps,
        "train_loss_nats_per_byte": train_loss,
        "draft_kl_nats_per_byte": draft_loss,
        "target_seconds": trained - started,
        "sampling_seconds": after_sampling - trained,
        "draft_seconds": time.perf_counter() - after_sampling,
    }


def acceptance_per_token(target: LlamaModel, draft: LlamaModel, prompts: bytes, window: int, rows: int = 8) -> float:
    """Acceptance rate of a draft token in decoding at temperature 1: the overlap on the target's own text.

    The text is `rows` times `window` bytes, each row begun by one byte of `prompts`.
    """
    generator = torch.Generator().manual_seed(ACCEPTANCE_SEED)
    first = draw_windows(as_rows(prompts), rows, 1, generator)[:, 0]
    texts = sample_text(target, first, window, ACCEPTANCE_SEED).tolist()
    return sum(evaluate(target, draft, bytes(text), window).overlap for text in texts) / rows


def evaluate_files(folder: Path, held_out: bytes, window: int) -> tuple[Scores, dict[str, Any]]:
    """Score the pair of a folder on the held-out play; returns the report's evaluation part too."""
    started = time.perf_counter()
    target, draft = (LlamaModel.load(folder / name) for name in FILES)
    scores = evaluate(target, draft, held_out, window)
    return scores, {
        **scores._asdict(),
        "acceptance_per_token": acceptance_per_token(target, draft, held_out, window),
        "window_bytes": window,
        "held_out_bytes": len(held_out),
        "evaluation_seconds": time.perf_counter() - started,
        "gate": GATE._asdict(),
        "passed": scores.passed,
    }


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options of the command line; bad ones, and a pair that would be overwritten unasked, end the program here."""
    parser = argparse.ArgumentParser(
        prog="python -m triton_specdec.models.embedded.train",
        description="Train the embedded pair: the target on 37 plays, the draft on the target's probabilities.",
    )
    parser.add_argument("--steps", type=int, default=4570, help="steps of the target, 2,048 bytes each (%(default)s)")
    parser.add_argument("--draft-steps", type=int, default=2400, help="steps of the draft (%(default)s)")
    parser.add_argument(
        "--sample-bytes", type=int, default=262144, help="bytes sampled from the target for the draft (%(default)s)"
    )
    parser.add_argument("--lr", type=float, default=0.003, help="the highest learning rate (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch (%(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the weights, the order of the data and the sampling (%(default)s)"
    )
    parser.add_argument("--output", type=Path, help="folder to write, over files in it (a new embedded_pair)")
    parser.add_argument("--report", type=Path, help="JSON file to write the figures to")
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="corpus folder (%(default)s)")
    parser.add_argument(
        "--window", type=int, default=TARGET.ctx, help="bytes of context in the evaluation (%(default)s)"
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--target", type=Path, help="only distil the draft, from this target")
    source.add_argument("--init", type=Path, help="go on with the pair in this folder, on long windows only")
    source.add_argument(
        "--eval-only", type=Path, nargs="?", const=SHIPPED, help="train nothing, evaluate this folder (or the shipped)"
    )
    options = parser.parse_args(arguments)
    for name in ("steps", "draft_steps", "sample_bytes", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    # What would only show after the training is refused before it.
    if options.window % 2 or not 2 <= options.window <= TARGET.ctx:
        parser.error(f"--window must be even and in [2, {TARGET.ctx}], got {options.window}")
    needed = [options.target] if options.target else [options.init / name for name in FILES] if options.init else []
    for path in needed:
        if not path.is_file():
            parser.error(f"{path} does not exist")
    if options.report and not options.report.absolute().parent.is_dir():
        parser.error(f"--report: the folder {options.report.absolute().parent} does not exist")
    if options.output is None:
        options.output = Path("embedded_pair")
        if options.eval_only is None and options.output.exists():
            parser.error(f"{options.output} exists; name it with --output to write over it")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Train and evaluate, or evaluate only; returns 1 when the gate is missed."""
    options = parse_options(arguments)
    torch.set_num_threads(options.threads)
    corpus = load_corpus(options.cache)
    trained = {} if options.eval_only else train_pair(options, corpus.train)
    folder = options.eval_only or options.output
    print(f"evaluating {folder} on {len(corpus.held_out)} held-out bytes", flush=True)
    scores, evaluation = evaluate_files(folder, corpus.held_out, options.window)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "triton_specdec": __version__}
    report = {**trained, **evaluation, "threads": options.threads, "seed": options.seed, "versions": versions}
    if options.report:
        options.report.write_text(json.dumps(report, indent=2) + "\n")
    print(
        f"target {scores.bits_per_byte:.3f} bits/byte (at most {GATE.max_bits_per_byte}), "
        f"sum of min(p, q) {scores.overlap:.3f} (at least {GATE.min_overlap}), "
        f"same most probable byte {scores.greedy_agreement:.3f}: gate {'passed' if scores.passed else 'MISSED'}"
    )
    return 0 if scores.passed else 1


if __name__ == "__main__":
    sys.exit(main())
