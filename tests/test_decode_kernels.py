"""The whole loop on the kernels: the text and statistics of the loop on the reference, nothing left to NumPy."""

import pytest
import torch
from kernel_modes import compiled, machine, on_gpu
from toy import ToyModel

pytest.importorskip("triton", reason="kernels need triton")

from triton_specdec import SamplingParams, SpecDecoder, backend, on_numpy  # noqa: E402
from triton_specdec.models import load_embedded_pair  # noqa: E402

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]
EACH = [
    SamplingParams(seed=1, top_p=0.9, temperature=0.8),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(seed=3, top_k=6, min_p=0.01, frequency_penalty=0.5, presence_penalty=0.25, min_tokens=5),
]


@pytest.fixture
def kernels_only(monkeypatch):
    """CPU tensors go to the kernels, too, and the reference is out of reach."""
    monkeypatch.setattr(backend, "resolve", lambda name, device: "triton")
    for name in ("filter_logits", "filter_sample", "sample", "verify", "truncate_kv_", "apply_penalties_", "log_prob"):
        monkeypatch.setattr(on_numpy, name, None)


def emitted(decoder, count):
    out = decoder.generate(PROMPTS, EACH, max_new_tokens=count, stop_token_ids=[3, 9])
    return [row[:n].tolist() for row, n in zip(out.sequences, out.lengths.tolist(), strict=True)], out


@pytest.mark.parametrize(
    ("mode", "rule", "draft", "count"),
    [
        ("interpreter", "rejection", "model", 7),
        ("interpreter", "block", "model", 7),
        ("interpreter", "coupled", "prompt_lookup", 7),
        compiled("sm_90", "rejection", "model", 4),
    ],
)
def test_the_loop_on_the_kernels_is_the_loop_on_the_reference(mode, rule, draft, count, request):
    target = ToyModel(13, 0)
    proposes = ToyModel(13, 1, near=target, noise=0.5) if draft == "model" else draft
    decoder = SpecDecoder(target, proposes, rule=rule, num_speculative_tokens=2)
    want, reference = emitted(decoder, count)
    request.getfixturevalue("kernels_only")
    with machine(mode, check=False):
        got, out = emitted(decoder, count)
    assert got == want
    assert out.stats.accepted_histogram == reference.stats.accepted_histogram
    assert out.status.tolist() == reference.status.tolist()
    torch.testing.assert_close(out.log_probs, reference.log_probs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("mode", [on_gpu()])
def test_the_embedded_pair_on_a_gpu(mode):
    pair = load_embedded_pair()
    target, draft = pair.target.to("cuda"), pair.draft.to("cuda")
    prompts = [list(b"ARIEL:\n"), list(b"Full fathom five thy father lies;\n")]
    each = [SamplingParams(seed=1), SamplingParams(seed=2, temperature=0.8, top_p=0.95)]
    plain = SpecDecoder(target).generate(prompts, each, max_new_tokens=60)
    for k in (1, 4):
        decoder = SpecDecoder(target, draft, rule="coupled", num_speculative_tokens=k)
        out = decoder.generate(prompts, each, max_new_tokens=60)
        assert (out.sequences == plain.sequences).float().mean() > 0.99
    out = SpecDecoder(target, draft).generate(prompts, each, max_new_tokens=200)
    assert out.stats.acceptance_rate > 0.6
    assert int(out.status.max()) == 0
