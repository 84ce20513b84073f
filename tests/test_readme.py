"""What the README shows works, and is what CI runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = {lang: re.findall(rf"```{lang}\n(.*?)```", README, re.S) for lang in ("bash", "python")}


def test_ci_runs_the_test_command():
    demo, tests = BLOCKS["bash"]
    assert tests.strip() in (ROOT / ".ci" / "run").read_text()
    assert "triton-specdec demo" in demo
    assert len(demo.strip().splitlines()) == len(tests.strip().splitlines()) == 1


@pytest.mark.parametrize("block", BLOCKS["python"])
def test_examples_run(block, capsys):
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.strip()


def test_files_named_in_the_readme_exist():
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link
    for name in re.findall(r"`(test_\w+\.py)`", README):
        assert (ROOT / "tests" / name).exists(), name


def test_the_table_of_families_is_what_is_tested():
    from tiny_models import MAIN, MORE, REFUSED

    rows = re.search(r"\| \| families \|\n(.*?)\n\n", README, re.S)[1].splitlines()[1:]
    main, more, *refused = rows
    for names, row in ((MAIN, main), (MORE, more)):
        listed = re.sub(r" \(.*?\)", "", row.split("|")[2])
        assert {name.strip() for name in listed.split(",")} == set(names)
    for name in REFUSED:
        assert any(re.search(rf"\b{name}\b", row) for row in refused), name
