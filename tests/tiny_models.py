"""Tiny random Transformers checkpoints, made on the spot, and what each family needs to be one."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs Transformers")

VOCAB = 101
_LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 320,
}
_NO_GROUPS = {name: value for name, value in _LLAMA.items() if name != "num_key_value_heads"}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 320}
_WIDE_HEAD = {**_LLAMA, "head_dim": 16}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

# The four that every test of the adapter runs on, and more that must work.
MAIN = {
    "Llama": _LLAMA,
    "Qwen2": _LLAMA,
    "GPT2": _GPT2,
    "Mistral": {**_LLAMA, "sliding_window": None},
}
MORE = {
    "CodeGen": {**_GPT2, "rotary_dim": 4},
    "Cohere": _LLAMA,
    "DeepseekV3": {
        **_LLAMA,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "Ernie4_5": _LLAMA,
    "Falcon": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "alibi": False,
    },
    "GPTBigCode": _GPT2,
    "GPTJ": {**_GPT2, "rotary_dim": 4},
    "GPTNeoX": _NO_GROUPS,
    "Gemma": _WIDE_HEAD,
    "Glm": {**_WIDE_HEAD, "pad_token_id": 0},
    "Granite": _LLAMA,
    "Mixtral": {**_LLAMA, "num_local_experts": 4, "sliding_window": None},
    "Nemotron": _LLAMA,
    "OPT": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 320,
        "word_embed_proj_dim": 32,
    },
    "Olmo": _LLAMA,
    "Olmo2": _LLAMA,
    "Persimmon": _NO_GROUPS,
    "Phi": _LLAMA,
    "Phi3": {**_LLAMA, "pad_token_id": 0, "sliding_window": None},
    "Qwen3": _WIDE_HEAD,
    "Qwen3Moe": {**_WIDE_HEAD, **_EXPERTS},
    "SmolLM3": {**_LLAMA, "pad_token_id": 0},
    "StableLm": _LLAMA,
    "Starcoder2": {**_LLAMA, "sliding_window": None},
}
# Families that are refused, and a word of the reason.
REFUSED = {
    "Bloom": ({"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "position_ids"),
    "GPTNeo": (
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 320,
        },
        "local",
    ),
    "Doge": ({**_LLAMA, "keep_window_size": 16}, "keep_window_size of 16"),
    "Gemma2": ({**_WIDE_HEAD, "sliding_window": 16}, "sliding_window of 16"),
    "Jamba": ({**_LLAMA, "pad_token_id": 0, "use_mamba_kernels": False}, "mamba|linear_attention"),
    "Lfm2": ({**_LLAMA, "layer_types": ["conv", "full_attention"]}, "conv"),
    "Mamba": ({"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}, "recurrent|linear_attention"),
    "Mistral": ({**_LLAMA, "sliding_window": 64}, "sliding_window of 64"),
    "Mpt": ({"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}, "position_ids"),
    "Qwen3Next": (_WIDE_HEAD, "linear_attention"),
    "RecurrentGemma": (_LLAMA, "recurrent|linear_attention"),
    "Rwkv": ({"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}, "recurrent"),
}


def exists(name):
    """Whether this release of Transformers has a family."""
    return hasattr(transformers, f"{name}Config")


def tiny(name, options=None, seed=0, **more):
    """A model of a family in evaluation mode, with weights large enough for positions and masks to matter."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**(options or {**MAIN, **MORE}[name]), **more)
    config.eos_token_id = None
    model = getattr(transformers, name + ("LMHeadModel" if name == "GPT2" else "ForCausalLM"))(config).eval()
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for part, weight in model.named_parameters():
            if weight.dim() == 2 and not any(word in part for word in ("emb", "head", "wte", "wpe")):
                weight.mul_(8)
    return model


def near(model, noise=0.1, seed=1):
    """A copy that agrees with the model most of the time: its draft."""
    generator = torch.Generator().manual_seed(seed)
    copy = type(model)(model.config).eval()
    copy.generation_config.eos_token_id = None
    weights = model.state_dict()
    copy.load_state_dict(
        {n: w + noise * w.std() * torch.randn(w.shape, generator=generator) for n, w in weights.items()}
    )
    return copy


def generated(model, prompt, count, **options):
    """New tokens of one prompt by the model's own greedy `generate`."""
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
