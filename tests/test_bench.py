"""The benchmark judges before it times: every provider that is here passes, planted faults do not and leave no time."""

import dataclasses
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import peer_stand_ins
import pytest
import torch
from kernel_modes import machine, needs_compiler

from triton_specdec import filter_logits
from triton_specdec.bench import cases, check, counts, law, measure, plain, plot, run, tables, traffic, warm
from triton_specdec.bench.call import Call, copied, in_place, in_place_logits
from triton_specdec.bench.cases import Case
from triton_specdec.bench.inputs import Params, build
from triton_specdec.bench.providers import PROVIDERS, TORCH, Provider, by_name
from triton_specdec.bench.rows import COUNTED, FIELDS, SOURCE, Row, append, read
from triton_specdec.bench.state import State
from triton_specdec.bench.timing import Timing, TookTooLongError, interleaved, limit
from triton_specdec.cli import main as cli

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
TINY = [
    *(Case(stage, 700, 7, 0, "fp32", "normal 3", name) for stage in ("filter", "sample") for name in cases.FILTERS),
    *(Case(stage, 700, 7, 0, dtype, "tied", "mixed") for stage in ("filter", "sample") for dtype in cases.DTYPES),
    *(Case("verify", 300, 7, 3, "bf16", "gumbel", name, "model") for name in ("none", "k=20 p=.95", "p=.9", "mixed")),
    Case("verify", 300, 1, 2, "fp32", "peaked", "k=50", "model"),
    *(Case("verify", 300, 7, 3, "fp16", "normal 1", name, "one-hot") for name in ("min-p=.05", "k=20 p=.95")),
    *(Case("kv", 0, 2, 4, logits=operation) for operation in cases.KV_OPERATIONS),
    *(Case("penalties", 500, 3, 2, dtype) for dtype in cases.DTYPES),
]


@pytest.fixture
def few_rows(monkeypatch):
    """Laws over so few rows that the interpreter and loops of Python are quick."""
    monkeypatch.setattr(law, "ROWS", 240)
    monkeypatch.setattr(law, "ROWS_OF", {})
    law._checked.cache_clear()
    yield
    law._checked.cache_clear()


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("stage", cases.STAGES)
def test_points_are_valid_and_each_stands_once(stage, quick):
    found = cases.points(stage, quick)
    assert len(found) == len(set(found)) > 0
    assert all(case.stage == stage and case.batch in range(1, 513) for case in found)
    if stage in ("filter", "verify") and not quick:
        assert {case.vocab for case in found} >= set(cases.VOCABS)
        assert {case.batch for case in found} >= set(cases.BATCHES)


def test_cases_that_mean_nothing_are_refused():
    for wrong in ({"logits": "zeros"}, {"filter": "k=3"}, {"stage": "x"}, {"draft": "model"}, {"logits": "real"}):
        with pytest.raises(ValueError, match=r"\w"):
            Case(**{"stage": "filter", **wrong})


@pytest.mark.parametrize("kind", cases.LOGITS)
def test_logits_are_never_zeros_and_follow_the_seed(kind):
    vocab = cases.REAL_VOCAB if kind == "real" else 999
    a, b, c = (cases.make_logits(kind, 3, vocab, torch.bfloat16, CPU, seed) for seed in (4, 4, 5))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert a.shape == (3, vocab)
    assert (a != 0).float().mean() > 0.5


def wrong(provider, case, device=CPU):
    """The verdict on a provider at a point."""
    given = build(case, device)
    return check.what_is_wrong(provider, case, given, provider.make(case.stage, copied(given)), device)


@pytest.mark.parametrize("provider", [p for p in PROVIDERS if not p.missing(CPU)], ids=lambda p: p.name)
def test_every_provider_that_is_here_is_right(provider, few_rows):
    tried = 0
    for case in TINY:
        if case.stage in provider.stages and not provider.unsupported(case):
            assert wrong(provider, case) is None, case
            tried += 1
    assert tried > 5


@pytest.mark.parametrize("stage", cases.STAGES)
def test_the_kernels_are_right_in_the_interpreter(stage, few_rows, monkeypatch):
    monkeypatch.setattr(law, "ROWS", 36)
    chosen = [case for case in TINY if case.stage == stage and case.filter in ("none", "p=.9", "mixed")]
    with machine("interpreter", check=False):
        for case in chosen[:: 2 if stage in ("filter", "sample") else 3]:
            assert wrong(by_name("triton"), case) is None, case


@pytest.mark.parametrize("name", ["flashinfer", "vllm", "sglang"])
def test_calls_of_peers_fit_their_documentation(name, few_rows, monkeypatch):
    for module, stand_in in getattr(peer_stand_ins, name)().items():
        monkeypatch.setitem(sys.modules, module, stand_in)
    provider = by_name(name)
    assert "GPU" in provider.missing(CPU)
    checked = [case for case in TINY if case.stage in provider.stages and not provider.unsupported(case)]
    assert {case.stage for case in checked} == set(provider.stages)
    for case in checked:
        assert wrong(provider, case) is None, case


def test_what_is_not_there_is_said():
    for provider in PROVIDERS:
        reason = provider.missing(CPU)
        assert reason is None or len(reason) > 5
    assert "not importable" in by_name("sglang").missing(CPU)


# Planted faults.


def cuts_one_more(given):
    """The last token of the nucleus is lost."""
    probs = plain.filtered(given.logits, given.params)
    least = torch.where(probs > 0, probs, 2).argmin(-1, keepdim=True)
    probs = probs.scatter(-1, least, 0)
    return probs / probs.sum(-1, keepdim=True)


def recovers_from_p(given):
    """A rejected draft is replaced from the target instead of the residual."""
    q, every = plain.filtered(given.draft.flatten(0, 1), given.params.repeated(given.num_drafts)), given.params
    every = every.repeated(given.num_drafts + 1)
    tokens = plain.verified(given, every, q.view(given.draft.shape))
    number = (tokens >= 0).sum(-1, keepdim=True) - 1
    p = plain.filtered(given.target.flatten(0, 1), every).view(given.target.shape)
    last = p.gather(1, number[..., None].expand(-1, -1, p.shape[-1]))[:, 0]
    return tokens.scatter(-1, number, plain.draw(last)[:, None])


def rejects_always(given):
    """The right law, and no draft ever stands."""
    p = plain.filtered(given.target[:, 0].contiguous(), given.params)
    out = torch.full((len(p), given.num_drafts + 1), -1)
    out[:, 0] = plain.draw(p)
    return out


def forgets_presence(given):
    plain.penalised(dataclasses.replace(given, presence=0.0))


def forgets_a_slot(given):
    plain.truncated(given)
    given.lengths.clamp_(min=int(given.lengths.min()) + 1)


def warm_tokens(given):
    params = Params(tuple(dataclasses.replace(f, temperature=1.2 * f.temperature) for f in given.params.filters), CPU)
    return plain.sampled(dataclasses.replace(given, params=params))


def as_provider(stage, compute, **fields):
    """A provider of one stage under a name that is measured."""

    def make(given):
        if stage == "kv":
            return in_place(given, lambda: compute(given))
        if stage == "penalties":
            return in_place_logits(given, lambda: compute(given))
        return Call(lambda: compute(given))

    return Provider("planted", {stage: make}, **fields)


PLANTED = [
    ("filter", cuts_one_more, Case("filter", 700, 4, 0, "fp32", "normal 3", "p=.9"), "lost"),
    ("filter", lambda g: g.logits.float().softmax(-1), Case("filter", 700, 4, 0, "fp32", filter="k=50"), "are kept"),
    ("filter", lambda g: plain.filtered(g.logits, g.params) * 0.9, Case("filter", 700, 4, 0, "fp32"), "sum to 1"),
    ("sample", warm_tokens, Case("sample", 700, 4, 0, "fp32"), "law"),
    ("sample", lambda g: g.logits.argmax(-1), Case("sample", 700, 4, 0, "fp32"), "law"),
    ("verify", recovers_from_p, Case("verify", 300, 4, 2, "fp32", draft="model"), "follow the target"),
    ("verify", rejects_always, Case("verify", 300, 4, 2, "fp32", draft="model"), "first drafts stand"),
    ("penalties", forgets_presence, Case("penalties", 500, 2, 2, "fp32"), "off by"),
    ("kv", forgets_a_slot, Case("kv", 0, 3, 4, logits="truncate"), "differs"),
]


@pytest.mark.parametrize(("stage", "compute", "case", "words"), PLANTED)
def test_planted_faults_are_seen(stage, compute, case, words):
    assert words in wrong(as_provider(stage, compute), case)


def test_ours_must_give_the_reference_s_tokens_under_the_same_seeds():
    case = Case("sample", 700, 6, 0, "fp32", filter="p=.9")
    assert "not the reference's" in wrong(as_provider("sample", plain.sampled, exact=True), case)
    case = Case("verify", 300, 6, 3, "fp32", draft="model")
    assert "not the reference's" in wrong(as_provider("verify", recovers_from_p, exact=True), case)


def measured(providers, path, stage="filter", *more):
    """One point of a stage; the exit status and the rows."""
    code = run.main(["--stage", stage, "--points", "1", "--device", "cpu", "--out", str(path), *more], providers)
    return code, read(path)


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_wrong_provider_is_refused_and_not_timed(tmp_path, capsys, is_ours):
    planted = as_provider("filter", lambda g: g.logits.float().softmax(-1), is_ours=is_ours)
    code, rows = measured([planted, by_name(TORCH)], tmp_path / "rows.csv")
    assert code == int(is_ours)
    of = [row for row in rows if row.provider == "planted"]
    assert [(row.status, row.value) for row in of] == [("wrong", None)]
    assert "are kept" in of[0].note
    assert [row.what for row in rows if row.provider == TORCH and row.value] == ["time"]
    assert ("WRONG: planted" in capsys.readouterr().err) == is_ours


def test_a_provider_that_raises_or_hangs_stops_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "SETUP_LIMIT", 0.5)

    def fails(given):
        raise RuntimeError("no kernel image")

    hangs = dataclasses.replace(as_provider("filter", lambda given: time.sleep(30)), name="hangs")
    started = time.monotonic()
    code, rows = measured([as_provider("filter", fails), hangs, by_name(TORCH)], tmp_path / "rows.csv")
    assert time.monotonic() - started < 15
    assert code == 0
    status = {row.provider: (row.status, row.note) for row in rows}
    assert status["planted"] == ("failed", "RuntimeError: no kernel image")
    assert status["hangs"][0] == "failed"
    assert "longer than" in status["hangs"][1]
    assert status[TORCH][0] == "ok"


# The run.


def test_a_quick_run_ends_with_a_table_and_leaves_rows(tmp_path, capsys):
    code, rows = measured(PROVIDERS, tmp_path / "rows.csv", "sample", "--quick")
    assert code == 0
    out = capsys.readouterr().out
    assert "sample wall V=151936 B=1 fp32 normal 3 k=50" in out.split("microseconds")[1]
    timed = [row for row in rows if row.what == "time" and row.value]
    assert {row.provider for row in timed} >= {TORCH, "reference"}
    assert {row.status for row in rows if not row.value} == {"absent"}
    for row in timed:
        assert row.p20 <= row.value <= row.p80
        assert row.ratio > 0
        assert row.origin == "wall clock, CPU"
        assert row.command == "python -m bench.run --quick --stage sample"
    assert next(row for row in timed if row.provider == TORCH).ratio == 1


def test_time_that_is_up_is_said(tmp_path):
    code, rows = measured([by_name(TORCH)], tmp_path / "rows.csv", "filter", "--points", "5", "--seconds", "0.5")
    assert code == 0
    assert [row.status for row in rows] == ["left out"] * 5


def test_what_a_gpu_leaves(monkeypatch):
    """The branch of a GPU, with stand-ins for its clock and its graphs: eager, graph, share of a copy, no capture."""
    case, gpu = Case("filter", 700, 4), SimpleNamespace(type="cuda")
    state = State(gpu, (), False, None, {}, 1, time.monotonic() + 60)
    stage = measure.Stage("filter", 60.0, bandwidth=1e12)

    def captured(call):
        if call.run() == "host":
            raise RuntimeError("operation not permitted when stream is capturing")
        return call

    def clocked(calls, device, seconds):
        return {name: Timing(2.0 if name == TORCH else 1.0, 1.0, 3.0, 9) for name in calls}

    monkeypatch.setattr(measure, "captured", captured)
    monkeypatch.setattr(measure, "interleaved", clocked)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls = {TORCH: [Call(lambda: None)], "triton": [Call(lambda: None)], "vllm": [Call(lambda: "host")]}
    measure._time(state, stage, case, calls)
    found = {(row.provider, row.what, row.metric): row for row in state.rows}
    assert found["triton", "time", "eager"].ratio == found["triton", "time", "graph"].ratio == 2
    assert found["triton", "bandwidth", "graph"].value == pytest.approx(100 * 4 * 700 * 2 / 1e-6 / 1e12)
    assert found["vllm", "time", "eager"].value == 1
    assert (found["vllm", "time", "graph"].status, found["vllm", "time", "graph"].value) == ("failed", None)
    assert "capturing" in found["vllm", "time", "graph"].note
    assert {row.origin for row in state.rows if row.value} == {"CUDA events"}
    assert len(warm.distinct(cases.STAGES)) < 50


def test_both_names_of_the_command(tmp_path, capsys):
    words = ["--stage", "kv", "--points", "1", "--device", "cpu"]
    assert cli(["bench", *words, "--out", str(tmp_path / "a.csv")]) == 0
    command = [sys.executable, "-m", "bench.run", *words, "--out", str(tmp_path / "b.csv")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    a, b = ([(row.stage, row.provider, row.what, row.status) for row in read(tmp_path / f"{n}.csv")] for n in "ab")
    assert a == b
    assert run.main(["--provider", "nobody"]) == 2
    assert "nobody" in capsys.readouterr().err


def test_timings_are_interleaved_over_the_buffers():
    seen = []
    calls = {name: [Call(lambda n=name, i=i: seen.append((n, i))) for i in range(2)] for name in "ab"}
    found = interleaved(calls, CPU, 0.0)
    assert seen[:5] == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 0)]
    assert found["a"].repeats == 7
    assert Timing.of([5.0, 1.0, 2.0, 4.0, 3.0, 6.0])[:3] == (3.5, 2.0, 5.0)
    with pytest.raises(TookTooLongError), limit(0.05):
        time.sleep(5)


def test_chi_square_knows_a_law():
    p = torch.tensor([0.5, 0.3, 0.2, 0.0])
    assert law.chi_square_p(torch.tensor([500, 300, 200, 0]), p) == pytest.approx(1)
    assert law.chi_square_p(torch.tensor([530, 290, 180, 0]), p) == pytest.approx(0.138, abs=0.02)
    assert law.chi_square_p(torch.tensor([500, 300, 199, 1]), p) == 0


# Counts.


@needs_compiler
def test_the_traffic_table_says_what_was_counted():
    pytest.importorskip("triton", reason="kernels need triton")
    case = dataclasses.replace(traffic.POINTS["sample"], batch=1)
    counted = counts.count(case)
    rows = {(row.provider, row.metric): row for row in traffic.rows_of(case, counted)}
    assert [launch.name for launch in counted.launches] == ["_scan_kernel", "_resolve_kernel"]
    assert rows["triton", "launches"].value == 2
    assert rows["triton", "[rows, V] tensors"].value == 0
    read = sum(launch.counts.traffic["logits_ptr"].load_bytes for launch in counted.launches)
    assert counted.logits_read == read
    assert read / case.logits_bytes <= rows["triton", "bytes"].value <= 1.5 * read / case.logits_bytes
    metrics = {row.metric: row for row in counts.rows_of(case, counted)}
    assert metrics["moved"].value == rows["triton", "bytes"].value
    assert metrics["launches"].value == 2
    assert metrics["bound H200"].origin.startswith("model")
    assert {row.origin for row in rows.values()} == {COUNTED, SOURCE}
    scrub = counts.count(Case("kv", 0, 1, 4, logits="scrub"))
    assert ([launch.name for launch in scrub.launches], scrub.others) == (["_scrub_kernel"], 1)


def test_pipelines_add_up():
    of = {(p.project, p.stage): p for p in traffic.PIPELINES}
    chain = of["flashinfer", "verify"]
    # Two bytes in, and 4 + 8 + 8 + 8 of every row's, two rows of the five read again.
    assert chain.bytes_per_logits_byte(4, 2) == pytest.approx((5 * (2 + 4 + 8 + 8) + 8) / 10)
    assert (chain.launches(4), chain.tensors()) == (4, 3)
    assert of["transformers", "verify"].launches(4) - of["transformers", "verify"].launches(0) == 40
    assert all(pipeline.source for pipeline in traffic.PIPELINES)


def test_outside_of_a_checkout_counts_say_so(monkeypatch, tmp_path):
    monkeypatch.setattr(counts, "checkout", lambda: None)
    code, rows = measured(PROVIDERS, tmp_path / "rows.csv", "counts")
    assert code == 0
    assert [(row.status, "checkout" in row.note) for row in rows] == [("absent", True)]


# Rows, tables, plots.

ROW = Row.of(
    Case("sample", 32000, 8, filter="p=.9"), TORCH, metric="wall", value=1234.5, unit="us", ratio=1.0, date="d"
)


def test_rows_come_back_from_a_file(tmp_path):
    path = tmp_path / "new" / "rows.csv"
    other = dataclasses.replace(ROW, value=None, ratio=None, status="wrong", note='a "note", with commas\nand lines')
    append(path, [ROW])
    append(path, [other])
    assert read(path) == [ROW, other]
    assert path.read_text().startswith(",".join(FIELDS))
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="columns must be"):
        read(path)
    with pytest.raises(ValueError, match="other columns"):
        append(path, [ROW])


def test_tables_are_made_of_the_last_rows(tmp_path, capsys):
    later = dataclasses.replace(ROW, value=2000.0)
    text = "x\n<!-- bench:begin wall -->\nold\n<!-- bench:end wall -->\ny\n"
    made = tables.filled(text, [ROW, later])
    assert "2.00 ms (1.00x)" in made
    assert "1.23 ms" not in made
    assert made.startswith("x\n")
    assert made.endswith("y\n")
    assert tables.filled(made, [ROW, later]) == made
    for broken in ("<!-- bench:begin wall -->\n", text.replace("wall", "walls")):
        with pytest.raises(ValueError, match="marks"):
            tables.filled(broken, [ROW])
    readme, rows = tmp_path / "README.md", tmp_path / "rows.csv"
    readme.write_text(text)
    append(rows, [ROW])
    arguments = [str(rows), "--readme-file", str(readme)]
    assert plot.main([*arguments, "--check"]) == 1
    assert "--readme" in capsys.readouterr().err
    assert plot.main([*arguments, "--readme"]) == 0
    assert plot.main([*arguments, "--check"]) == 0
    assert plot.main([str(tmp_path / "none.csv"), "--check"]) == 2


def test_the_readme_says_what_the_committed_rows_say():
    assert "bench:begin" in (ROOT / "README.md").read_text()
    assert plot.main(["--check", "--readme-file", str(ROOT / "README.md")]) == 0


def test_plots_of_what_there_is(tmp_path):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    assert plot.plots([], tmp_path) == []
    many = [dataclasses.replace(ROW, B=b, p20=1e3, p80=2e3) for b in (1, 8)]
    of_gpu = {
        "metric": "graph",
        "origin": "CUDA events",
        "device": "a GPU",
        "note": "9 repeats; 1 GB/s, 61.5% of a copy",
    }
    many.append(dataclasses.replace(ROW, B=4, what="traffic", metric="bytes", origin=SOURCE, provider="vllm"))
    assert [p.name for p in plot.plots(many, tmp_path)] == ["latency.png", "ratio.png", "bytes.png"]
    many += [dataclasses.replace(row, **of_gpu) for row in many[:2]]
    many.append(dataclasses.replace(many[-1], what="bandwidth", value=61.5))
    assert [p.name for p in plot.plots(many, tmp_path)] == ["latency.png", "ratio.png", "bandwidth.png", "bytes.png"]
    assert "a GPU" not in tables.gpu([ROW])


def test_bounds_leave_ties_and_rounding_to_others():
    x = torch.tensor([[3.0, 2, 2, 2, 1]])
    bounds = check.Bounds(x, Params((cases.Filter(top_k=2),), CPU), check.MARGIN)
    for kept in ([0, 1], [0, 3], [0, 1, 2, 3]):
        probs = torch.zeros(1, 5)
        probs[0, kept] = x[0, kept].softmax(-1)
        assert check.wrong_probs(probs.double(), bounds) is None
    assert "1 others" in check.wrong_probs(x.softmax(-1).double(), bounds)
    assert bounds.exact.keep_mask().tolist() == filter_logits(x, top_k=2).keep_mask().tolist()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_the_script_for_a_gpu_says_when_there_is_none():
    done = subprocess.run(["bash", ROOT / "bench" / "gpu.sh"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "no GPU here" in done.stderr
    done = subprocess.run(["bash", ROOT / "bench" / "gpu.sh", "everything"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "got everything" in done.stderr) == (2, True)
