"""The decode loop under pytest-benchmark: every way to decode the embedded pair's prompts."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from .decoding import PLAIN, Decoded, Pair, embedded_pair, ways

NAMES = (
    "triton_specdec, batch",
    "triton_specdec, one by one",
    "triton_specdec, plain, batch",
    "transformers assisted, one by one",
    PLAIN,
)


@lru_cache(maxsize=1)
def _pair() -> Pair:
    return embedded_pair(16, "cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", NAMES)
def test_decode(benchmark: Any, name: str, temperature: float) -> None:
    torch.set_num_threads(1)
    every = ways(_pair(), 4, temperature)
    out: Decoded = benchmark.pedantic(every[name], rounds=3, warmup_rounds=1)
    assert [len(text) for text in out.texts] == [16] * 4
    if temperature == 0:
        assert out.texts == every[PLAIN]().texts
