"""The compact model: the cached forward is the uncached one, rows are on their own, files come back."""

import pytest
import torch

from triton_specdec import truncate_kv_
from triton_specdec.models import KVCache, LlamaConfig, LlamaModel, Model, load_embedded_pair
from triton_specdec.models.embedded import decode, encode


@pytest.fixture(scope="module")
def pair():
    return load_embedded_pair()


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(vocab=31, layers=2, d=32, heads=4, kv=2, ff=40, ctx=64),
        LlamaConfig(vocab=31, layers=1, d=32, heads=4, kv=4, ff=40, ctx=64, tie=False),
        LlamaConfig(vocab=31, layers=2, d=32, heads=4, kv=1, ff=40, ctx=64, window=5),
    ],
)
@torch.inference_mode()
def test_cached_is_uncached(config):
    torch.manual_seed(0)
    model = LlamaModel(config).eval()
    tokens = torch.randint(0, 31, (3, 24))
    want = model(tokens)
    cache = model.new_cache(3, 30)
    got = torch.cat([model(tokens[:, a:b], cache) for a, b in ((0, 7), (7, 8), (8, 20), (20, 24))], 1)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert cache.lengths.tolist() == [24] * 3


@torch.inference_mode()
def test_rows_of_different_lengths(pair):
    texts = [b"To be", b"The quality of mercy is not strained", b"O"]
    longest = max(map(len, texts))
    tokens = torch.tensor([[*t, *[0] * (longest - len(t))] for t in texts])
    n = torch.tensor([len(t) for t in texts])
    for model in pair:
        cache = model.new_cache(3, longest + 8)
        first = model(tokens, cache, last=n - 1)
        truncate_kv_(cache.lengths, n)
        after = model(torch.tensor([[32, 97]] * 3), cache)
        for i, text in enumerate(texts):
            want = model(torch.tensor([[*text, 32, 97]]))[0]
            torch.testing.assert_close(first[i, 0], want[len(text) - 1], rtol=1e-4, atol=1e-3)
            torch.testing.assert_close(after[i], want[-2:], rtol=1e-4, atol=1e-3)


@torch.inference_mode()
def test_a_window_sees_only_itself():
    torch.manual_seed(0)
    model = LlamaModel(LlamaConfig(vocab=31, layers=1, d=32, heads=2, kv=2, ff=40, ctx=64, window=4)).eval()
    a = torch.randint(0, 31, (1, 12))
    b = a.clone()
    b[0, 7] = (b[0, 7] + 1) % 31
    same = (model(a) - model(b)).abs().amax(-1)[0] < 1e-6
    assert same.tolist() == [True] * 7 + [False] * 4 + [True]


def test_save_and_load(tmp_path):
    model = LlamaModel(LlamaConfig(vocab=31, layers=1, d=32, heads=4, kv=2, ff=40, ctx=64, window=9))
    model.save(tmp_path / "m.safetensors", note="x")
    again = LlamaModel.load(tmp_path / "m.safetensors")
    assert again.config == model.config
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value.half().float())


def test_a_foreign_file_is_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="config"):
        LlamaModel.load(tmp_path / "x.safetensors")


def test_the_pair_offers_the_protocol(pair):
    for model in pair:
        assert isinstance(model, Model)
        assert isinstance(model.new_cache(1, 4), KVCache)
        assert (model.vocab_size, model.max_length) == (256, 1024)


def test_bytes_are_the_tokens():
    text = "naïve — “quoted”"
    assert decode(encode(text)) == text
    assert decode([0xC3]) == "\ufffd"


@torch.inference_mode()
def test_the_pair_knows_its_text_at_any_length(pair):
    """Lines of The Tempest, which was held out of the training. Beyond the windows both models stay as good."""
    text = (
        "Be not afeard; the isle is full of noises,\nSounds and sweet airs, that give delight and hurt not.\n"
        "Sometimes a thousand twangling instruments\nWill hum about mine ears, and sometime voices\n"
        "That, if I then had waked after long sleep,\nWill make me sleep again: and then, in dreaming,\n"
        "The clouds methought would open and show riches\nReady to drop upon me that, when I waked,\n"
        "I cried to dream again.\n\n"
        "Our revels now are ended. These our actors,\nAs I foretold you, were all spirits and\n"
        "Are melted into air, into thin air:\nAnd, like the baseless fabric of this vision,\n"
        "The cloud-capp'd towers, the gorgeous palaces,\nThe solemn temples, the great globe itself,\n"
        "Yea, all which it inherit, shall dissolve\nAnd, like this insubstantial pageant faded,\n"
        "Leave not a rack behind. We are such stuff\nAs dreams are made on, and our little life\n"
        "Is rounded with a sleep.\n"
    )
    ids = torch.tensor([encode(text)])
    p, q = (model(ids).softmax(-1)[0] for model in pair)
    bits = -p[:-1].gather(1, ids[0, 1:, None]).log2()[:, 0]
    assert float(bits[400:].mean()) < 2.7
    assert float(torch.minimum(p, q).sum(-1)[400:].mean()) > 0.72
