"""The decode loop beside Transformers' own generation on the same weights: forwards, tokens fed, host reads, seconds.

Transformers' assisted generation takes one prompt a call; its plain generation takes a padded batch.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from triton_specdec import SamplingParams, SpecDecoder
from triton_specdec.demo.embedded import PROMPTS
from triton_specdec.demo.paired import rows as rows_of
from triton_specdec.models import from_transformers, load_embedded_pair, to_transformers
from triton_specdec.models.embedded import encode
from triton_specdec.models.llama import LlamaConfig, LlamaModel

from .call import importable
from .rows import CALLS, WALL, WALL_GPU, Row
from .state import State

PLAIN = "transformers plain, batch"
COUNTS = ("target_forwards", "draft_forwards", "target_tokens_fed", "draft_tokens_fed", "host_reads")
# Operations whose result the host needs before it can go on: on a GPU each waits for the device.
_HOST_READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_dim")


class Decoded(NamedTuple):
    """New tokens of each prompt, and the host reads a library counts itself."""

    texts: list[list[int]]
    host_reads: int


@dataclasses.dataclass
class Counted:
    """What one way of decoding took for a set of prompts."""

    name: str
    target_forwards: int = 0
    draft_forwards: int = 0
    target_tokens_fed: int = 0
    draft_tokens_fed: int = 0
    host_reads: int = 0
    texts: list[list[int]] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    on_cpu: bool = True

    @property
    def new_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(map(len, self.texts))

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows over the median time."""
        return self.new_tokens / statistics.median(self.seconds)


class HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that a GPU's host would wait for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, and go on."""
        self.count += func.overloadpacket.__name__ in _HOST_READS
        return func(*args, **(kwargs or {}))


@dataclasses.dataclass(frozen=True)
class Pair:
    """One pair of models, seen by both libraries."""

    target: Any
    draft: Any
    prompts: list[list[int]]
    max_new_tokens: int


def embedded_pair(max_new_tokens: int = 128, device: torch.device | str = "cpu") -> Pair:
    """The embedded pair without its windows, as Transformers models; texts stay near the length it was trained on."""
    models = [to_transformers(_without_window(model)).to(device) for model in load_embedded_pair()]
    for model in models:
        model.generation_config.pad_token_id = 0
    return Pair(models[0], models[1], [encode(text) for text in PROMPTS], max_new_tokens)


def _without_window(model: LlamaModel) -> LlamaModel:
    plain = LlamaModel(LlamaConfig(**{**dataclasses.asdict(model.config), "window": 0}))
    plain.load_state_dict(model.state_dict())
    return plain.eval().requires_grad_(False)


def ways(pair: Pair, num_drafts: int, temperature: float) -> dict[str, Callable[[], Decoded]]:
    """Every way to decode the prompts."""
    target, draft = from_transformers(pair.target), from_transformers(pair.draft)
    each = [SamplingParams(temperature, seed=i) for i in range(len(pair.prompts))]
    options: dict[str, Any] = {"max_new_tokens": pair.max_new_tokens}

    def ours(*draft: Any, batched: bool = True) -> Decoded:
        decoder = SpecDecoder(target, *draft, num_speculative_tokens=num_drafts)
        groups = [slice(None)] if batched else [slice(i, i + 1) for i in range(len(each))]
        outs = [decoder.generate(pair.prompts[g], each[g], **options) for g in groups]
        return Decoded([text for out in outs for text in rows_of(out)], sum(out.stats.host_reads for out in outs))

    sampled: dict[str, Any] = {"do_sample": False, **options}
    if temperature > 0:
        sampled = {"do_sample": True, "temperature": temperature, "top_k": 0, **options}

    def theirs(prompts: Sequence[list[int]], **more: Any) -> Decoded:
        longest = max(map(len, prompts))
        device = pair.target.device
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
        out = pair.target.generate(ids, attention_mask=mask, **sampled, **more)
        return Decoded(out[:, longest:].tolist(), 0)

    def assisted() -> Decoded:
        rows = [theirs([prompt], assistant_model=pair.draft) for prompt in pair.prompts]
        return Decoded([text for row in rows for text in row.texts], 0)

    assistant = pair.draft.generation_config
    assistant.num_assistant_tokens, assistant.num_assistant_tokens_schedule = num_drafts, "constant"
    assistant.assistant_confidence_threshold = 0.0
    return {
        "triton_specdec, batch": lambda: ours(draft),
        "triton_specdec, one by one": lambda: ours(draft, batched=False),
        "triton_specdec, plain, batch": lambda: ours(),
        "transformers assisted, one by one": assisted,
        PLAIN: lambda: theirs(pair.prompts),
    }


@contextmanager
def _counting(pair: Pair, counted: Counted) -> Iterator[HostReads]:
    """Count forwards, tokens fed and host reads."""

    def hook(kind: str) -> Callable[..., None]:
        def count(module: Any, args: Any, kwargs: Any) -> None:
            fed = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            setattr(counted, f"{kind}_forwards", getattr(counted, f"{kind}_forwards") + 1)
            setattr(counted, f"{kind}_tokens_fed", getattr(counted, f"{kind}_tokens_fed") + fed.numel())

        return count

    handles = [
        model.register_forward_pre_hook(hook(kind), with_kwargs=True)
        for kind, model in (("target", pair.target), ("draft", pair.draft))
    ]
    reads = HostReads()  # type: ignore[no-untyped-call]
    try:
        with reads:
            yield reads
    finally:
        for handle in handles:
            handle.remove()


def compare(
    pair: Pair, num_drafts: int = 4, temperature: float = 0.8, repeats: int = 3, seconds: float = 600.0
) -> list[Counted]:
    """All ways in turn: once counted, then up to `repeats` times on the clock, interleaved, within so many seconds."""
    torch.manual_seed(0)
    rows: list[Counted] = []
    end = time.perf_counter() + seconds
    todo = ways(pair, num_drafts, temperature)
    for name, decode in todo.items():
        counted = Counted(name, on_cpu=pair.target.device.type == "cpu")
        with _counting(pair, counted) as reads:
            decoded = decode()
        # What a library waits for inside of torch, and the transfers of our loop, which are none on a CPU.
        counted.texts, counted.host_reads = decoded.texts, reads.count + decoded.host_reads
        rows.append(counted)
    for repeat in range(repeats):
        if repeat and time.perf_counter() > end:
            break
        for counted, decode in zip(rows, todo.values(), strict=True):
            start = time.perf_counter()
            decode()
            counted.seconds.append(time.perf_counter() - start)
    return rows


def what_differs(rows: Sequence[Counted]) -> dict[str, str]:
    """Ways whose greedy text is not that of Transformers' plain generation, and how much of it is."""
    want = next(row.texts for row in rows if row.name == PLAIN)
    wrong = {}
    for row in rows:
        same = [a == b for x, y in zip(row.texts, want, strict=True) for a, b in zip(x, y, strict=True)]
        # On a GPU the logits of one position and of K + 1 round differently, and near ties may fall the other way.
        if sum(same) < (1.0 if row.on_cpu else 0.9) * len(same):
            wrong[row.name] = f"{sum(same)} of {len(same)} greedy tokens are those of {PLAIN}"
    return wrong


def measure(state: State, seconds: float) -> None:
    """The stage of the benchmark: counts and times of every way, greedy first, whose text is checked."""
    state.say(f"decode: {seconds:.0f} s at most")
    why = importable("transformers")
    if why:
        state.leave([Row("decode", "transformers", status="absent", note=why)])
        return
    tokens, repeats = (16, 1) if state.quick else (64, 3) if state.device.type == "cuda" else (128, 3)
    pair = embedded_pair(tokens, state.device)
    started = time.monotonic()
    wrong: dict[str, str] = {}
    for temperature in (0.0, 0.8):
        left = seconds - (time.monotonic() - started)
        if left < 0:
            state.leave([Row("decode", "triton", filter=f"T={temperature}", status="left out", note="time is up")])
            return
        rows = compare(pair, 4, temperature, repeats, left / (2 if temperature == 0 else 1))
        if temperature == 0:
            wrong = what_differs(rows)
            state.wrong += [f"decode: {name}: {text}" for name, text in wrong.items() if name.startswith("triton")]
        plain = next(row for row in rows if row.name == PLAIN)
        for row in rows:
            state.leave(_csv_rows(row, plain, f"T={temperature}", tokens, wrong.get(row.name)))


def _csv_rows(row: Counted, plain: Counted, filter: str, tokens: int, wrong: str | None) -> Iterator[Row]:
    note = f"embedded pair without its windows, {len(row.texts)} prompts, {tokens} new tokens each"
    fixed: dict[str, Any] = {"V": 256, "B": len(row.texts), "K": 4, "dtype": "fp32", "filter": filter, "note": note}
    if wrong:
        yield Row("decode", row.name, **{**fixed, "status": "wrong", "note": wrong})
        return
    for metric in COUNTS:
        value = float(getattr(row, metric))
        yield Row("decode", row.name, **fixed, what="count", metric=metric.replace("_", " "), value=value, origin=CALLS)
    low, high = (row.new_tokens / s for s in (max(row.seconds), min(row.seconds)))
    yield Row(
        "decode",
        row.name,
        **fixed,
        metric="generate",
        value=row.tokens_per_second,
        unit="tokens/s",
        p20=low,
        p80=high,
        ratio=row.tokens_per_second / plain.tokens_per_second,
        origin=WALL if row.on_cpu else WALL_GPU,
    )
