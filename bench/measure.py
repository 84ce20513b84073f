"""One stage: every provider checked at every point, those that are right timed side by side, until its time is up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from . import counts, decoding, traffic
from .call import Call, copied
from .cases import Case, points
from .check import forget, what_is_wrong
from .inputs import Inputs, build, size_of
from .providers import TORCH, Provider
from .rows import EVENTS, WALL, Row
from .state import State
from .timing import Timing, captured, copy_bandwidth, interleaved, limit

# Seconds that making, compiling and checking may take a provider at one point, and one point's timing.
SETUP_LIMIT, TIMING_LIMIT = 75.0, 60.0
POINT_SECONDS = {("cuda", True): 0.6, ("cuda", False): 1.2, ("cpu", True): 0.9, ("cpu", False): 3.0}
# Bytes of logits or caches that the buffers of a point may hold together.
BUFFER_BYTES = 6 << 30
BUFFERS = 3


@dataclass
class Stage:
    """What a stage has learnt: who is out, and why; the copy bandwidth."""

    name: str
    seconds: float
    out: dict[str, str] = field(default_factory=dict)
    bandwidth: float | None = None
    started: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Seconds."""
        return self.seconds - (time.monotonic() - self.started)


def measure(state: State, name: str, seconds: float) -> None:
    """Measure a stage within so many seconds."""
    stage = Stage(name, min(seconds, state.left()))
    if name == "counts":
        return _counts(state, stage)
    if name == "decode":
        return decoding.measure(state, stage.seconds)
    state.say(f"{name}: {stage.seconds:.0f} s at most")
    if state.device.type == "cuda":
        stage.bandwidth = copy_bandwidth(state.device)
        fields: dict[str, Any] = {"metric": "copy", "value": stage.bandwidth / 1e9, "unit": "GB/s", "origin": EVENTS}
        state.leave([Row(name, TORCH, what="bandwidth", note="a gibibyte, read and written", **fields)])
    for provider in state.providers:
        reason = provider.missing(state.device)
        if name not in provider.stages:
            reason = reason or "has no such stage"
        if reason:
            stage.out[provider.name] = reason
            state.leave([Row(name, provider.name, status="absent", note=reason)])
            if (provider.name, reason) not in state.told:
                state.say(f"  {provider.name}: absent, {reason}")
            state.told.add((provider.name, reason))
    # A CPU takes the small points, for longer where there is time.
    cases = points(name, state.quick or state.device.type == "cpu")
    for number, case in enumerate(cases[: state.most_points]):
        if stage.left() < POINT_SECONDS[state.device.type, state.quick]:
            return _left_out(state, cases[number : state.most_points], "triton", "time is up")
        _point(state, stage, case)
    return None


def _left_out(state: State, cases: list[Case], provider: str, why: str) -> None:
    state.leave(Row.of(case, provider, status="left out", note=why) for case in cases)
    state.say(f"  left out ({why}): {len(cases)} points, from {_label(cases[0])} on")


def _label(case: Case) -> str:
    return " ".join(str(v) for v in (case.stage, f"V={case.vocab}", f"B={case.batch}", case.logits, case.filter) if v)


def _point(state: State, stage: Stage, case: Case) -> None:
    """Check and time everybody at one point."""
    device = state.device
    try:
        with limit(min(SETUP_LIMIT, max(stage.left(), 1))):
            given = [build(case, device)]
            more = min(BUFFERS, BUFFER_BYTES // max(size_of(given[0]), 1))
            given += [build(case, device, seed) for seed in range(1, more)]
    # A point that cannot be built (memory, no real logits here) is reported; the next may do.
    except Exception as error:
        state.leave([Row.of(case, "inputs", status="failed", note=_reason(error))])
        return state.say(f"  {_label(case)}: inputs failed, {_reason(error)}")
    calls: dict[str, list[Call]] = {}
    for provider in state.providers:
        if provider.name not in stage.out:
            made = _checked(state, stage, provider, case, given)
            if made is not None:
                calls[provider.name] = made
    if calls:
        _time(state, stage, case, calls)
    forget()
    if device.type == "cuda":
        del given, calls
        torch.cuda.empty_cache()
    return None


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def _checked(state: State, stage: Stage, provider: Provider, case: Case, given: list[Inputs]) -> list[Call] | None:
    """A provider's calls, None where it is not to be timed; the reason is in a row."""
    status, reason = "unsupported", provider.unsupported(case)
    made: list[Call] | None = None
    if reason is None:
        try:
            with limit(min(SETUP_LIMIT, max(stage.left(), 5))):
                made = [provider.make(stage.name, copied(each, caches=False)) for each in given]
                status, reason = "wrong", what_is_wrong(provider, case, given[0], made[0], state.device)
                for call in made:
                    call.result()
                if state.device.type == "cuda":
                    torch.cuda.synchronize()
        # Whatever another project's code raises is that point's result, and no reason to stop the others.
        except Exception as error:
            status, reason = "failed", _reason(error)
            # One that waits for a compiler that does not come would eat the stage's time at every point.
            if "TookTooLong" in reason:
                stage.out[provider.name] = reason
    if reason is None:
        return made
    state.leave([Row.of(case, provider.name, status=status, note=reason)])
    if status != "unsupported":
        state.say(f"  {_label(case)}: {provider.name} {status}: {reason}")
        if provider.is_ours:
            state.wrong.append(f"{provider.name} {status} at {_label(case)}: {reason}")
    return None


def _time(state: State, stage: Stage, case: Case, calls: dict[str, list[Call]]) -> None:
    seconds = POINT_SECONDS[state.device.type, state.quick]
    if state.device.type == "cpu":
        return _leave_times(state, stage, case, "wall", _timed(state, case, calls, seconds))
    _leave_times(state, stage, case, "eager", _timed(state, case, calls, seconds / 2))
    graphs: dict[str, list[Call]] = {}
    for name, each in calls.items():
        try:
            graphs[name] = [captured(call) for call in each]
        # What looks at a result on the host cannot be captured, which is worth a row.
        except Exception as error:
            fields = {"metric": "graph", "status": "failed", "note": f"no CUDA graph: {_reason(error)}"}
            state.leave([Row.of(case, name, **fields)])
            torch.cuda.synchronize()
    return _leave_times(state, stage, case, "graph", _timed(state, case, graphs, seconds / 2))


def _timed(state: State, case: Case, calls: dict[str, list[Call]], seconds: float) -> dict[str, Timing]:
    if not calls:
        return {}
    try:
        with limit(TIMING_LIMIT):
            return interleaved(calls, state.device, seconds)
    except Exception as error:
        state.leave([Row.of(case, "all", status="failed", note=f"timing: {_reason(error)}")])
        state.say(f"  {_label(case)}: timing failed, {_reason(error)}")
        return {}


def _leave_times(state: State, stage: Stage, case: Case, metric: str, found: dict[str, Timing]) -> None:
    base = found.get(TORCH)
    origin = WALL if metric == "wall" else EVENTS
    for name, timing in found.items():
        ratio = base.median / timing.median if base else None
        fields: dict[str, Any] = {"value": timing.median, "unit": "us", "p20": timing.p20, "p80": timing.p80}
        note = f"{timing.repeats} repeats"
        rows = [Row.of(case, name, metric=metric, ratio=ratio, origin=origin, note=note, **fields)]
        if stage.bandwidth and case.logits_bytes:
            rate = case.logits_bytes / (timing.median * 1e-6)
            fields = {"value": 100 * rate / stage.bandwidth, "unit": "% of a copy", "note": f"{rate / 1e9:.0f} GB/s"}
            # The fewest bytes: the (target's) logits, once.
            rows.append(Row.of(case, name, what="bandwidth", metric=metric, origin=origin, **fields))
        state.leave(rows)
    shown = [f"{n} {t.median:.0f} us" + (f" ({base.median / t.median:.2f}x)" if base else "") for n, t in found.items()]
    if found:
        state.say(f"  {_label(case)} {metric}: " + ", ".join(shown))


def _counts(state: State, stage: Stage) -> None:
    """Counts of the kernels, bounds, and the traffic beside other projects'."""
    reason = counts.missing()
    if reason:
        state.leave([Row("counts", "triton", what="count", status="absent", note=reason)])
        return state.say(f"counts: left out, {reason}")
    state.say(f"counts: {stage.seconds:.0f} s at most; {counts.TARGET} code on a CPU, not times")
    work: list[tuple[Case, Callable[[Case, counts.Counted], Any]]] = []
    work += [(case, traffic.rows_of) for case in traffic.POINTS.values()]
    work += [(case, counts.rows_of) for case in counts.points(state.quick)]
    for number, (case, rows_of) in enumerate(work[: state.most_points]):
        if stage.left() < 1:
            return _left_out(state, [c for c, _ in work[number : state.most_points]], "triton", "time is up")
        try:
            with limit(max(stage.left(), 1) + 30):
                found = list(rows_of(case, counts.count(case)))
        except Exception as error:
            state.leave([Row.of(case, "triton", what="count", status="failed", note=_reason(error))])
            state.wrong.append(f"counts failed at {_label(case)}: {_reason(error)}")
            state.say(f"  {_label(case)}: failed, {_reason(error)}")
            continue
        kept = state.leave(found)
        shown = [
            f"{r.metric} {r.value:.3g}" for r in kept if r.provider == "triton" and not r.metric.startswith("bytes of")
        ]
        state.say(f"  {_label(case)}: " + ", ".join(shown))
    return None
