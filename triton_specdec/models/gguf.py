"""Models in GGUF files of the "llama" architecture, read with the package `gguf`; quantised weights are dequantised."""

from __future__ import annotations

import importlib
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from .llama import LlamaConfig, LlamaModel

_REQUIRED = object()

# Our name of a layer's weight -> the tensors of the file whose rows it holds, one below the other.
_LAYER = {
    "n1.weight": ("attn_norm",),
    "qkv.weight": ("attn_q", "attn_k", "attn_v"),
    "o.weight": ("attn_output",),
    "n2.weight": ("ffn_norm",),
    "gu.weight": ("ffn_gate", "ffn_up"),
    "dn.weight": ("ffn_down",),
}


def load_gguf(path: str | PathLike[str] | GGUFFile, dtype: torch.dtype = torch.bfloat16) -> LlamaModel:
    """Read a model from a GGUF file.

    Parameters
    ----------
    path : path of a GGUF file, or the opened file
        Architecture "llama", without biases, experts or scaled rotary embeddings.
    dtype : torch.dtype
        What the weights become, whatever their type in the file.

    Returns
    -------
    LlamaModel
        On the CPU, without gradients.

    Raises
    ------
    ImportError
        When the package `gguf` is not installed.
    ValueError
        When the file is none, is damaged, or holds a model that `LlamaModel` is not.

    Examples
    --------
    >>> load_gguf("SmolLM2-135M-Instruct.Q4_1.gguf").max_length  # doctest: +SKIP
    8192
    """
    file = path if isinstance(path, GGUFFile) else GGUFFile(path)
    config = _config(file)
    # On the meta device nothing is allocated, or drawn at random, only to be written over.
    with torch.device("meta"):
        model = LlamaModel(config)
    weights: dict[str, torch.Tensor] = {}
    for name, like in model.state_dict().items():
        parts = [_weight(file, part, config) for part in _sources(name)]
        weights[name] = torch.cat(parts).to(dtype)
        if weights[name].shape != like.shape:
            found, wanted = list(weights[name].shape), list(like.shape)
            raise ValueError(f"{file.path}: {name} has shape {found}, expected {wanted}")
    if file.tensors:
        raise ValueError(f"{file.path} holds tensors that LlamaModel has not: {', '.join(sorted(file.tensors)[:4])}")
    model.load_state_dict(weights, assign=True)
    return model.eval().requires_grad_(False)


class GGUFFile:
    """Fields and tensors of a GGUF file; a tensor can be taken once."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self._gguf = require("gguf")
        with self.path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{path} is not a GGUF file")
        try:
            self._reader = self._gguf.GGUFReader(self.path)
        except (ValueError, IndexError, KeyError) as error:
            raise ValueError(f"{path} cannot be read as a GGUF file: {error}") from error
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def field(self, name: str, default: Any = _REQUIRED) -> Any:
        """Value of a field; without a default it must be there."""
        field = self._reader.get_field(name)
        if field is not None:
            return field.contents()
        if default is _REQUIRED:
            raise ValueError(f"{self.path} has no field {name!r}")
        return default

    def take(self, name: str) -> torch.Tensor:
        """A tensor as float32."""
        if name not in self.tensors:
            raise ValueError(f"{self.path} has no tensor {name!r}")
        tensor = self.tensors.pop(name)
        try:
            values = self._gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise ValueError(f"{self.path}: {name} has type {kind}, which gguf cannot dequantise") from error
        # A copy: unquantised values would go on living in the file. Its shapes are written from the last axis on.
        return torch.tensor(values, dtype=torch.float32).reshape(*reversed(tensor.shape.tolist()))


def _config(file: GGUFFile) -> LlamaConfig:
    architecture = file.field("general.architecture")
    if architecture != "llama":
        raise ValueError(f"{file.path} holds a model of architecture {architecture!r}, expected 'llama'")

    def size(name: str, default: Any = _REQUIRED) -> Any:
        return file.field(f"llama.{name}", default)

    heads = size("attention.head_count")
    config = LlamaConfig(
        vocab=int(file.tensors["token_embd.weight"].shape[1]) if "token_embd.weight" in file.tensors else 0,
        layers=size("block_count"),
        d=size("embedding_length"),
        heads=heads,
        kv=size("attention.head_count_kv", heads),
        ff=size("feed_forward_length"),
        ctx=size("context_length"),
        theta=size("rope.freq_base", 10000.0),
        tie="output.weight" not in file.tensors,
        eps=size("attention.layer_norm_rms_epsilon"),
    )
    dim = config.head_dim
    plain = {
        "rope.dimension_count": dim,
        "attention.key_length": dim,
        "attention.value_length": dim,
        "rope.scaling.type": "none",
        "expert_count": 0,
    }
    for name, wanted in plain.items():
        if size(name, wanted) != wanted:
            raise ValueError(f"{file.path}: llama.{name} must be {wanted}, got {size(name)}")
    return config


def _sources(name: str) -> list[str]:
    """Names in the file of what one of our weights holds."""
    whole = {"emb.weight": "token_embd.weight", "nf.weight": "output_norm.weight", "head.weight": "output.weight"}
    if name in whole:
        return [whole[name]]
    _, layer, rest = name.split(".", 2)
    return [f"blk.{layer}.{part}.weight" for part in _LAYER[rest]]


def _weight(file: GGUFFile, name: str, config: LlamaConfig) -> torch.Tensor:
    weight = file.take(name)
    # llama.cpp rotates neighbours (0, 1), (2, 3), ...; its files hold the rows of queries and keys in that order.
    if name.endswith((".attn_q.weight", ".attn_k.weight")):
        pairs = weight.view(-1, config.head_dim // 2, 2, config.d)
        weight = pairs.transpose(1, 2).reshape(weight.shape)
    return weight


def require(package: str) -> Any:
    """A package that only GGUF files need; ImportError says how to install it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(
            f"GGUF files need the package {package!r}: pip install 'triton_specdec[smollm2]' ({error})"
        ) from error
