"""The command line as a user calls it."""

import json
import subprocess
import sys

import pytest

from triton_specdec.cli import main

QUICK = ["demo", "--max-new-tokens", "24", "--repeats", "1"]


def run(*args):
    return subprocess.run([sys.executable, "-m", "triton_specdec", *args], capture_output=True, text=True)


def test_the_demo_shows_text_and_figures(capsys):
    assert main([*QUICK, "--prompt", "ARIEL:\n"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("ARIEL:\n<")
    for words in ("acceptance rate", "tokens per round", "speculative", "plain", "speed-up", "accepted a round"):
        assert words in out
    assert "24 of 24 tokens are those of plain sampling: identical" in out
    assert "\x1b" not in out


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_json_holds_what_was_measured(capsys, rule):
    options = ["--rule", rule, "-k", "3", "--temperature", "0.9", "--top-k", "40", "--top-p", "0.95", "--batch", "2"]
    assert main([*QUICK, "--json", "--seed", "7", *options]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["coupled_identical"] is True
    assert len(result["texts"]) == 2
    assert [len(t) for t in result["tokens"]] == [24, 24]
    assert result["stats"]["emitted"] == 48
    assert len(result["stats"]["accepted_histogram"]) == 4
    assert result["speedup"] == result["speedups"][0] > 0
    sources = {s for row in result["sources"] for s in row}
    assert sources <= {"anchor", "accepted", "recovered", "bonus"}


def test_the_demo_fails_where_the_texts_differ(capsys, monkeypatch):
    from triton_specdec.reference import rng

    numbers = iter(range(1000))
    real = rng.gumbel
    monkeypatch.setattr(rng, "gumbel", lambda seeds, positions, token: real(seeds + next(numbers), positions, token))
    assert main(QUICK) == 1
    assert "NOT IDENTICAL" in capsys.readouterr().out


def test_colours_are_for_terminals(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(QUICK) == 0
    assert "\x1b[32m" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(QUICK) == 0
    assert "\x1b[" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["demo", "-k", "0"], "must be at least 1, got 0"),
        (["demo", "-k", "two"], "must be an int"),
        (["demo", "--temperature", "-1"], "temperature must be at least 0"),
        (["demo", "--prompt", ""], "empty"),
        (["demo", "--max-new-tokens", "5000"], "more than the models' 1024"),
        (["demo", "--rule", "magic"], "invalid choice"),
        (["demo", "--gamma", "3"], "unrecognized"),
        (["bench-everything"], "invalid choice"),
        ([], "COMMAND"),
    ],
)
def test_wrong_arguments_end_with_status_two_and_no_traceback(args, words):
    done = run(*args)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_help_and_version():
    assert "demo" in run("--help").stdout
    assert run("--version").stdout.strip().count(".") == 2
