"""Models: the protocol the decode loop needs, a compact Llama-style model, the embedded pair, Transformers models."""

from .convert import to_transformers
from .embedded import load_embedded_pair
from .gguf import load_gguf
from .llama import LlamaConfig, LlamaModel
from .protocol import KVCache, Model
from .smollm2 import load_smollm2
from .transformers import TransformersModel, from_transformers

__all__ = [
    "KVCache",
    "LlamaConfig",
    "LlamaModel",
    "Model",
    "TransformersModel",
    "from_transformers",
    "load_embedded_pair",
    "load_gguf",
    "load_smollm2",
    "to_transformers",
]
