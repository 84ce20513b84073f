"""Stage sample under pytest-benchmark: every provider that is here, checked, at a few points."""

from __future__ import annotations

from typing import Any

import pytest

from .cases import Case
from .pairs import benched, pairs
from .providers import Provider


@pytest.mark.parametrize(("provider", "case"), pairs("sample"))
def test_sample(benchmark: Any, provider: Provider, case: Case) -> None:
    benched(benchmark, provider, case)
