"""GGUF files: the model in one, its tokenizer, and what is refused.

The files are written on the spot. Whether the writer permutes the rows as llama.cpp does was checked once against
SmolLM2's own file: weights equal to those of Transformers' converter, logits within 6e-5 of its Llama.
"""

import sys
from dataclasses import replace

import gguf_files as files
import numpy as np
import pytest
import torch
from gguf_files import CONFIG, gguf, random_model, write

from triton_specdec.models import LlamaModel, load_gguf, to_transformers
from triton_specdec.models.tokenizer import load_gguf_tokenizer

F32, F16, Q8 = (getattr(gguf.GGMLQuantizationType, name) for name in ("F32", "F16", "Q8_0"))
IDS = torch.tensor([[5, 200, 31, 31, 7, 9, 100, 2, 0, 64]])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tiny.gguf"


@pytest.fixture
def tokenizer(path):
    return load_gguf_tokenizer(write(path, random_model()))


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("kind", [F32, F16, Q8], ids=lambda kind: kind.name)
def test_the_model_is_the_one_that_was_written(path, kind, tie):
    model = files.stored(random_model(replace(CONFIG, tie=tie)), kind)
    read = load_gguf(write(path, model, kind), torch.float32)
    assert replace(read.config, eps=CONFIG.eps) == model.config
    assert read.config.eps == pytest.approx(CONFIG.eps)
    torch.testing.assert_close(read(IDS), model(IDS), rtol=0, atol=1e-6)
    cache = read.new_cache(1, IDS.shape[1])
    torch.testing.assert_close(read.forward(IDS, cache), model(IDS), rtol=0, atol=1e-5)
    assert not any(weight.requires_grad for weight in read.parameters())


def test_weights_are_bfloat16_by_default_and_are_saved_with_their_eps(path, tmp_path):
    model = random_model()
    read = load_gguf(write(path, model))
    for name, weight in read.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name].bfloat16())
    read.save(tmp_path / "again.safetensors")
    again = LlamaModel.load(tmp_path / "again.safetensors")
    assert again.config == read.config
    torch.testing.assert_close(again(IDS), read.float()(IDS), rtol=0, atol=1e-2)


def test_queries_and_keys_in_our_order_would_be_another_model(path):
    model = random_model()
    ours = {"blk.0.attn_q.weight": model.blocks[0].qkv.weight[: CONFIG.d].numpy()}
    read = load_gguf(write(path, model, weights=ours), torch.float32)
    assert (read(IDS) - model(IDS)).abs().max() > 0.1


def test_fields_that_may_be_missing(path):
    model = random_model(replace(CONFIG, kv=CONFIG.heads, theta=10000.0))
    names = ("attention.head_count_kv", "rope.freq_base", "rope.dimension_count")
    read = load_gguf(write(path, model, change={f"llama.{name}": None for name in names}), torch.float32)
    torch.testing.assert_close(read(IDS), model(IDS), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"architecture": "qwen2"}, "architecture 'qwen2', expected 'llama'"),
        ({"change": {"llama.block_count": None}}, "has no field 'llama.block_count'"),
        ({"change": {"llama.rope.scaling.type": "linear"}}, "llama.rope.scaling.type must be none, got linear"),
        ({"change": {"llama.attention.key_length": 16}}, "llama.attention.key_length must be 8, got 16"),
        ({"change": {"llama.expert_count": 4}}, "llama.expert_count must be 0, got 4"),
        ({"change": {"llama.feed_forward_length": 32}}, r"gu.weight has shape \[128, 32\], expected \[64, 32\]"),
        ({"change": {"llama.block_count": 1}}, "tensors that LlamaModel has not: blk.1."),
        ({"weights": {"rope_freqs.weight": np.ones(4, np.float32)}}, "has not: rope_freqs.weight"),
        ({"weights": {"output_norm.weight": None}}, "has no tensor 'output_norm.weight'"),
        ({"weights": {"token_embd.weight": None}}, "has no tensor 'token_embd.weight'"),
    ],
)
def test_a_model_that_is_not_ours_is_refused(path, options, words):
    with pytest.raises(ValueError, match=words):
        load_gguf(write(path, random_model(), **options))


@pytest.mark.parametrize("read", [load_gguf, load_gguf_tokenizer])
def test_a_file_that_is_none_is_refused(path, read):
    path.write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match="tiny.gguf is not a GGUF file"):
        read(path)
    for length in (4, 60, 4000, 30000):
        write(path, random_model())
        path.write_bytes(path.read_bytes()[:length])
        with pytest.raises(ValueError, match="cannot be read as a GGUF file"):
            read(path)


@pytest.mark.parametrize("package", ["gguf", "tokenizers"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(path, monkeypatch, package):
    write(path, random_model())
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"need the package '{package}': pip install 'triton_specdec\[smollm2\]'"):
        load_gguf_tokenizer(path)


@pytest.mark.parametrize(
    "text",
    [
        "hell hello  hell12 12",
        " 1  12\n\n3",
        "",
        "na\u00efve \u4f60\u597d \U0001f600 \u0661\u0662 x\u00b2 \u00bd",
        "def f(x):\n\treturn x  # note\r\n",
        "\x00\x7f\u00a0",
        "<|im_start|>user\nhell<|im_end|>\n<|endoftext|>",
        "<|im_start",
    ],
)
def test_the_tokenizer_gives_a_text_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size == len(files.TOKENS) for i in ids)


def test_tokens_are_those_of_the_merges(tokenizer):
    def tokens(text):
        return [files.TOKENS[i] for i in tokenizer.encode(text)]

    assert tokens("hell heh") == ["hell", "\u0120", "he", "h"]
    assert tokens("a hello") == ["a", "\u0120hell", "o"]
    # Digits stand alone, and a blank before one stays with the blanks.
    assert tokens("12   12") == ["1", "2", "\u0120\u0120", "\u0120", "1", "2"]
    assert tokens("<|im_start|>he") == ["<|im_start|>", "he"]
    assert tokenizer.eos_id == files.TOKENS.index("<|im_end|>")


def test_gpt_2_does_not_split_digits(path):
    tokenizer = load_gguf_tokenizer(write(path, random_model(), change={"tokenizer.ggml.pre": "gpt-2"}))
    assert [files.TOKENS[i] for i in tokenizer.encode("12 1")] == ["12", "\u01201"]


def test_bytes_that_are_no_text_are_replaced(tokenizer):
    assert tokenizer.decode(tokenizer.encode("\u00e9")[:1]) == "\ufffd"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer llama/smollm, expected one of gpt2/gpt-2, gpt2/smollm"),
        ({"tokenizer.ggml.pre": "qwen2"}, "tokenizer gpt2/qwen2"),
        ({"tokenizer.ggml.add_bos_token": True}, "add_bos_token must be false"),
        ({"tokenizer.ggml.merges": None}, "has no field 'tokenizer.ggml.merges'"),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused(path, change, words):
    with pytest.raises(ValueError, match=words):
        load_gguf_tokenizer(write(path, random_model(), change=change))


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_computes_the_same(tie, dtype):
    pytest.importorskip("transformers", reason="needs Transformers")
    model = random_model(replace(CONFIG, tie=tie)).to(dtype)
    theirs = to_transformers(model)
    assert theirs.dtype == dtype
    got, wanted = theirs(IDS).logits.float(), model(IDS).float()
    tolerance = 1e-4 if dtype == torch.float32 else 0.05 * float(wanted.abs().max())
    torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance)
    # One set of weights for both.
    model.emb.weight.zero_()
    assert not theirs.get_input_embeddings().weight.any()


def test_transformers_knows_no_window():
    with pytest.raises(ValueError, match="without a window, got window = 9"):
        to_transformers(random_model(replace(CONFIG, window=9)))
