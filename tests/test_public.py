"""The public surface: names, examples, what an import does, who imports whom."""

import ast
import doctest
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import triton_specdec
import triton_specdec.reference

ROOT = Path(__file__).parent.parent
MODULES = sorted(
    {m.name for m in pkgutil.walk_packages(triton_specdec.__path__, "triton_specdec.")}
    | {m.name for m in pkgutil.walk_packages(triton_specdec.reference.__path__, "triton_specdec.reference.")}
    - {"triton_specdec.__main__"}
)
CONTRACT = {
    "FilteredLogits",
    "SamplingParams",
    "SpecDecoder",
    "apply_penalties_",
    "compact_kv_",
    "filter_logits",
    "sample",
    "truncate_kv_",
    "truncate_paged_kv_",
    "verify",
}


def test_all_is_the_public_api():
    public = {n for n, v in vars(triton_specdec).items() if not n.startswith("_") and not isinstance(v, type(sys))}
    assert set(triton_specdec.__all__) == public
    assert public >= CONTRACT
    for name in public:
        assert getattr(triton_specdec, name).__doc__


@pytest.mark.parametrize("name", [m for m in MODULES if m != "triton_specdec.__main__"])
def test_examples_in_docstrings(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_import_needs_no_triton_and_reads_no_environment():
    script = (
        "import os, sys\n"
        "sys.modules['triton'] = None\n"
        "import torch, numpy, safetensors.torch\n"
        "before = dict(os.environ)\n"
        "import triton_specdec as ts, triton_specdec.cli\n"
        "assert dict(os.environ) == before\n"
        "assert ts.filter_logits(torch.zeros(1, 4)).support_size.item() == 4\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (a.name.split(".")[0] for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0]


def test_the_reference_is_numpy_only_and_the_rules_import_nothing():
    for path in (ROOT / "reference").glob("*.py"):
        assert set(imports(path)) <= {"numpy", "__future__", "typing", "dataclasses", "collections"}, path
    assert list(imports(ROOT / "reference" / "rules.py")) == []


def test_only_backend_fetch_and_the_demo_read_the_environment():
    package = ROOT / "triton_specdec"
    readers = {str(p.relative_to(package)) for p in package.rglob("*.py") if "os.environ" in p.read_text()}
    assert readers <= {"backend.py", "fetch.py", "demo/report.py"}


def test_versions_agree():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == triton_specdec.__version__
    assert f"## {triton_specdec.__version__}" in (ROOT / "CHANGELOG.md").read_text()
