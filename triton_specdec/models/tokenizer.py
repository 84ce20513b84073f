"""The tokenizer in a GGUF file: byte-level byte-pair encoding, by the package `tokenizers`."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

from .gguf import GGUFFile, require

# tokenizer.ggml.pre -> whether digits are split from their neighbours, and from each other, before anything else.
_SPLITS_DIGITS = {"gpt-2": False, "smollm": True}
_CONTROL, _USER_DEFINED = 3, 4


class Tokenizer:
    """Text to token ids and back.

    Attributes
    ----------
    eos_id : int
        The token that ends an answer.
    chat_template : str or None
        The file's Jinja template of a conversation, as text: it is never run.
    """

    def __init__(self, backend: Any, eos_id: int, chat_template: str | None) -> None:
        self._backend = backend
        self.eos_id, self.chat_template = eos_id, chat_template

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        size: int = self._backend.get_vocab_size()
        return size

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; special tokens written out in it become themselves, and none is added."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids, special tokens written out; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._backend.decode(list(tokens), skip_special_tokens=False)
        return text


def load_gguf_tokenizer(path: str | PathLike[str] | GGUFFile) -> Tokenizer:
    """Read the tokenizer of a GGUF file, given by its path or opened.

    Raises
    ------
    ImportError
        When the package `gguf` or `tokenizers` is not installed.
    ValueError
        When the file is none, or its tokenizer is not byte-level BPE of a kind known here.

    Examples
    --------
    >>> load_gguf_tokenizer("SmolLM2-135M-Instruct.Q4_1.gguf").encode("a 12")  # doctest: +SKIP
    [81, 216, 33, 34]
    """
    file = path if isinstance(path, GGUFFile) else GGUFFile(path)
    field = {
        name: file.field(f"tokenizer.ggml.{name}")
        for name in ("model", "pre", "tokens", "merges", "token_type", "eos_token_id")
    }
    if field["model"] != "gpt2" or field["pre"] not in _SPLITS_DIGITS:
        known = ", ".join(f"gpt2/{pre}" for pre in _SPLITS_DIGITS)
        raise ValueError(f"{file.path} has a tokenizer {field['model']}/{field['pre']}, expected one of {known}")
    for added in ("add_bos_token", "add_space_prefix"):
        if file.field(f"tokenizer.ggml.{added}", False):
            raise ValueError(f"{file.path}: tokenizer.ggml.{added} must be false")
    return Tokenizer(_backend(field), field["eos_token_id"], file.field("tokenizer.chat_template", None))


def _backend(field: dict[str, Any]) -> Any:
    tokenizers = require("tokenizers")
    vocabulary = {token: i for i, token in enumerate(field["tokens"])}
    # No token holds a blank: byte-level BPE writes it as a letter.
    merges = [tuple(merge.split(" ")) for merge in field["merges"]]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    split = tokenizers.pre_tokenizers
    steps = [split.ByteLevel(add_prefix_space=False, use_regex=True)]
    if _SPLITS_DIGITS[field["pre"]]:
        steps.insert(0, split.Digits(individual_digits=True))
    backend.pre_tokenizer = split.Sequence(steps)
    backend.decoder = tokenizers.decoders.ByteLevel()
    for token, kind in zip(field["tokens"], field["token_type"], strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            backend.add_tokens([tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False)])
    return backend
