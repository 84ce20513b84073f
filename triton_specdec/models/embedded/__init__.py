"""The embedded pair: a byte-level target (12 layers, 3.27 M parameters) and draft (1 layer, 0.22 M).

Trained on 37 plays of Shakespeare (public domain); `python -m triton_specdec.models.embedded.train` trains them again.
Tokens are bytes, so the tokenizer is `encode` and `decode`.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ..llama import LlamaModel

_HERE = Path(__file__).parent


class EmbeddedPair(NamedTuple):
    """Two models over the same vocabulary of 256 bytes."""

    target: LlamaModel
    draft: LlamaModel


def load_embedded_pair() -> EmbeddedPair:
    """Load the pair on the CPU in float32.

    Examples
    --------
    >>> load_embedded_pair().target.vocab_size
    256
    """
    return EmbeddedPair(LlamaModel.load(_HERE / "target.safetensors"), LlamaModel.load(_HERE / "draft.safetensors"))


def encode(text: str) -> list[int]:
    """Token ids of a text: its UTF-8 bytes."""
    return list(text.encode())


def decode(tokens: list[int]) -> str:
    """Text of token ids; bytes that are no UTF-8 become U+FFFD."""
    return bytes(tokens).decode(errors="replace")
