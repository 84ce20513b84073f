"""Models: the protocol the decode loop needs, a compact Llama-style model, and the embedded pair."""

from .embedded import load_embedded_pair
from .llama import LlamaConfig, LlamaModel
from .protocol import KVCache, Model

__all__ = ["KVCache", "LlamaConfig", "LlamaModel", "Model", "load_embedded_pair"]
