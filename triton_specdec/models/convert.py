"""Our model as one of Transformers, with the same weights."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from .llama import LlamaModel


def to_transformers(model: LlamaModel) -> Any:
    """A `transformers.LlamaForCausalLM` that computes what a `LlamaModel` does.

    Parameters
    ----------
    model : LlamaModel
        Without a window (`config.window` = 0): Transformers' Llama attends to everything.

    Returns
    -------
    transformers.LlamaForCausalLM
        In the dtype and on the device of `model`, whose memory its weights share; without special tokens.

    Raises
    ------
    ImportError
        When the package `transformers` is not installed.
    ValueError
        When the model has a window.

    Examples
    --------
    >>> from triton_specdec.models import LlamaConfig, LlamaModel
    >>> model = LlamaModel(LlamaConfig(vocab=16, layers=1, d=8, heads=2, kv=1, ff=12, ctx=32))
    >>> to_transformers(model).config.num_attention_heads  # doctest: +SKIP
    2
    """
    c = model.config
    if c.window:
        raise ValueError(f"to_transformers takes a model without a window, got window = {c.window}")
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        wanted = "pip install 'triton_specdec[transformers]'"
        raise ImportError(f"to_transformers needs the package transformers: {wanted} ({error})") from error
    config = transformers.LlamaConfig(
        vocab_size=c.vocab,
        hidden_size=c.d,
        intermediate_size=c.ff,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv,
        head_dim=c.head_dim,
        max_position_embeddings=c.ctx,
        rms_norm_eps=c.eps,
        rope_theta=c.theta,
        tie_word_embeddings=c.tie,
        bos_token_id=None,
        eos_token_id=None,
    )
    theirs = transformers.LlamaForCausalLM(config).to(model.device)
    # Assigned, not copied: the weights keep their dtype, and exist once.
    theirs.load_state_dict(_weights(model), assign=True)
    theirs.tie_weights()
    return theirs.eval().requires_grad_(False)


def _weights(model: LlamaModel) -> dict[str, torch.Tensor]:
    """Our weights by their names; queries, keys and values, and gate and up, are apart there."""
    c, ours = model.config, model.state_dict()
    sizes = [c.heads * c.head_dim, c.kv * c.head_dim, c.kv * c.head_dim]
    theirs = {"model.embed_tokens.weight": ours["emb.weight"], "model.norm.weight": ours["nf.weight"]}
    theirs["lm_head.weight"] = ours["emb.weight" if c.tie else "head.weight"]
    for i in range(c.layers):
        layer = {name: ours[f"blocks.{i}.{name}.weight"] for name in ("n1", "qkv", "o", "n2", "gu", "dn")}
        q, k, v = layer["qkv"].split(sizes)
        gate, up = layer["gu"].chunk(2)
        names = {
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer["o"],
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer["dn"],
            "input_layernorm": layer["n1"],
            "post_attention_layernorm": layer["n2"],
        }
        theirs |= {f"model.layers.{i}.{name}.weight": value for name, value in names.items()}
    return theirs
