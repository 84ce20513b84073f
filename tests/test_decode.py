"""The loop: same text as the reference's loop, as plain sampling, alone and in batches; stops, lengths, statistics."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from toy import ToyModel

from triton_specdec import SamplingParams, SpecDecoder, TokenSource
from triton_specdec.draft import PromptLookupDraft, Proposal
from triton_specdec.models import load_embedded_pair
from triton_specdec.reference.decode import decode

TARGET = ToyModel(13, 0)
DRAFT = ToyModel(13, 1, near=TARGET, noise=0.5)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [12, 0]]


def texts(out):
    return [row[:n].tolist() for row, n in zip(out.sequences, out.lengths, strict=True)]


def seeded(count=4, **options):
    return [SamplingParams(seed=100 + i, **options) for i in range(count)]


@pytest.fixture(scope="module")
def pair():
    return load_embedded_pair()


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7, "top_k": 6, "top_p": 0.9}, {"temperature": 0.0}, {"min_p": 0.1}]
)
def test_tokens_are_those_of_the_reference_loop(rule, k, options):
    out = SpecDecoder(TARGET, DRAFT, num_speculative_tokens=k, rule=rule).generate(
        PROMPTS, seeded(**options), max_new_tokens=30
    )
    for i, prompt in enumerate(PROMPTS):
        want = decode(TARGET, DRAFT, prompt, 30, num_speculative_tokens=k, rule=rule, seed=100 + i, **options)
        assert texts(out)[i] == want


@pytest.mark.parametrize("draft", [DRAFT, ToyModel(13, 9), ToyModel(7, 3), TARGET, "prompt_lookup"])
def test_coupled_is_plain_sampling_for_any_draft_and_k(draft):
    plain = texts(SpecDecoder(TARGET).generate(PROMPTS, seeded(top_p=0.95), max_new_tokens=40))
    for k in range(1, 9):
        decoder = SpecDecoder(TARGET, draft, num_speculative_tokens=k, rule="coupled")
        assert texts(decoder.generate(PROMPTS, seeded(top_p=0.95), max_new_tokens=40)) == plain


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
@pytest.mark.parametrize("draft", [DRAFT, "prompt_lookup", None])
def test_a_row_is_the_same_alone_in_a_batch_and_in_any_order(rule, draft):
    decoder = SpecDecoder(TARGET, draft, rule=rule)
    each = [SamplingParams(seed=i, temperature=t) for i, t in enumerate([1.0, 0.0, 0.5, 2.0])]
    together = decoder.generate(PROMPTS, each, max_new_tokens=25)
    backwards = decoder.generate(PROMPTS[::-1], each[::-1], max_new_tokens=25)
    assert texts(backwards)[::-1] == texts(together)
    for i in range(4):
        alone = decoder.generate([PROMPTS[i]], each[i], max_new_tokens=25)
        assert texts(alone)[0] == texts(together)[i]
        assert torch.equal(alone.sources[0], together.sources[i])
        torch.testing.assert_close(alone.log_probs[0], together.log_probs[i])


def test_both_caches_hold_the_committed_text_and_nothing_else():
    target, draft = ToyModel(13, 0), ToyModel(13, 1, near=TARGET, noise=0.5)
    out = SpecDecoder(target, draft).generate(PROMPTS, seeded(), max_new_tokens=25)
    cache, own = target.caches[-1], draft.caches[-1]
    for i, prompt in enumerate(PROMPTS):
        text = prompt + texts(out)[i]
        # All but the last committed token; rounds may have gone on behind the cut at max_new_tokens.
        known = min(int(cache.lengths[i]), len(text) - 1)
        assert known == len(text) - 1
        assert cache.slots[i, :known].tolist() == text[:known]
        # Behind its kept length the draft's cache holds what it proposed last.
        kept = min(len(text) - 2, int(own.lengths[i]))
        assert own.slots[i, : kept - 4].tolist() == text[: kept - 4]


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_draft_equal_to_target_accepts_everything_for_250_tokens(pair, rule):
    prompts = [list(b"ARIEL:\n"), list(b"Full fathom five thy father lies;\n")]
    out = SpecDecoder(pair.target, pair.target, rule=rule).generate(prompts, seeded(2), max_new_tokens=250)
    assert out.stats.acceptance_rate == 1
    assert out.stats.accepted_histogram[:4] == [0] * 4
    assert out.stats.rounds == math.ceil(249 / 5)


def test_one_cached_token_off_does_not(pair, monkeypatch):
    from triton_specdec.reference import rules

    monkeypatch.setattr(rules, "draft_kept_length", lambda committed: committed - 3)
    out = SpecDecoder(pair.target, pair.target).generate([list(b"ARIEL:\n")], seeded(1), max_new_tokens=100)
    assert out.stats.acceptance_rate < 1


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_law_of_the_loop_by_chi_square(rule):
    """Tokens 2 to 4 after the prompt over 20000 seeds, against the chain of the target; the draft's chain must fail."""
    target, draft = ToyModel(4, 5), ToyModel(4, 6)
    n = 20_000
    decoder = SpecDecoder(target, draft, num_speculative_tokens=2, rule=rule)
    out = decoder.generate([[2]] * n, [SamplingParams(seed=i) for i in range(n)], max_new_tokens=4)
    seen = np.bincount((out.sequences @ torch.tensor([64, 16, 4, 1])).numpy(), minlength=256)

    def chain(model):
        law = np.zeros((4,) * 4)
        for ids in np.ndindex(law.shape):
            p = np.exp(model([2, *ids[:3]]).astype(float))
            p /= p.sum(-1, keepdims=True)
            law[ids] = np.prod(p[np.arange(4), ids])
        return law.reshape(-1)

    expected = chain(target)
    few = expected * n < 5  # cells too rare for a chi-square stand together
    cells = np.append(seen[~few], seen[few].sum()), np.append(expected[~few], expected[few].sum())
    assert stats.chisquare(cells[0], n * cells[1]).pvalue > 1e-4
    wrong = 0.97 * expected + 0.03 * chain(draft)
    cells = np.append(seen[~few], seen[few].sum()), np.append(wrong[~few], wrong[few].sum())
    assert stats.chisquare(cells[0], n * cells[1]).pvalue < 1e-6


def test_real_text_coupled_and_alone(pair):
    prompts = [list(b"PROSPERO:\nNow my charms"), list(b"MIRANDA:\n")]
    plain = SpecDecoder(pair.target).generate(prompts, seeded(2, temperature=0.8), max_new_tokens=60)
    for k in (1, 4, 8):
        decoder = SpecDecoder(pair.target, pair.draft, num_speculative_tokens=k, rule="coupled")
        assert texts(decoder.generate(prompts, seeded(2, temperature=0.8), max_new_tokens=60)) == texts(plain)
    decoder = SpecDecoder(pair.target, pair.draft)
    together = decoder.generate(prompts, seeded(2, temperature=0.8), max_new_tokens=60)
    for i in range(2):
        alone = decoder.generate(prompts[i : i + 1], seeded(2, temperature=0.8)[i], max_new_tokens=60)
        assert texts(alone)[0] == texts(together)[i]
    assert together.stats.acceptance_rate > 0.6


class Scripted:
    """Proposes what it is told, round by round; one row."""

    def __init__(self, *rounds, width=4):
        self.rounds, self.width = list(rounds), width

    def propose(self, state, num_tokens):
        given = self.rounds.pop(0) if self.rounds else []
        tokens = torch.full((1, num_tokens), -1)
        tokens[0, : len(given)] = torch.tensor(given, dtype=torch.int64)
        return tokens, None, torch.tensor([len(given)])


def greedy_text(prompt, count):
    out = SpecDecoder(TARGET).generate([prompt], SamplingParams(temperature=0), max_new_tokens=count)
    return texts(out)[0]


def test_a_stop_inside_an_accepted_run_ends_the_row_without_bonus():
    text = greedy_text([1, 2, 3], 12)
    drafts = text[1:5]
    stop = next(t for t in drafts[1:] if t not in text[: text.index(t)])
    end = text.index(stop)
    calls = []
    out = SpecDecoder(TARGET, Scripted(drafts)).generate(
        [[1, 2, 3]],
        SamplingParams(temperature=0),
        max_new_tokens=12,
        eos_token_id=stop,
        on_token=lambda *call: calls.append(call),
    )
    assert texts(out) == [text[: end + 1]]
    assert out.finish_reason == ["stop"]
    assert calls == [(0, t, i > 0) for i, t in enumerate(text[: end + 1])]
    assert out.sources[0].tolist() == [TokenSource.ANCHOR] + [TokenSource.ACCEPTED] * end


@pytest.mark.parametrize("count", [1, 2, 5, 6, 7])
def test_max_new_tokens_is_exact(count):
    out = SpecDecoder(TARGET, TARGET).generate(PROMPTS, seeded(), max_new_tokens=count, pad_token_id=0)
    assert out.lengths.tolist() == [count] * 4
    assert out.sequences.shape == (4, count)
    assert out.finish_reason == ["length"] * 4
    long = SpecDecoder(TARGET, TARGET).generate(PROMPTS, seeded(), max_new_tokens=20)
    assert torch.equal(out.sequences, long.sequences[:, :count])


def test_rows_that_finish_early_are_padded_and_do_not_hold_the_others():
    out = SpecDecoder(TARGET, DRAFT).generate(
        PROMPTS, seeded(), max_new_tokens=40, stop_token_ids=[3, 5], pad_token_id=99
    )
    free = SpecDecoder(TARGET, DRAFT).generate(PROMPTS, seeded(), max_new_tokens=40)
    assert len(set(out.lengths.tolist())) > 1
    for i, n in enumerate(out.lengths.tolist()):
        assert out.sequences[i, :n].tolist() == free.sequences[i, :n].tolist()
        assert (out.sequences[i, n:] == 99).all()
        assert (out.sources[i, n:] == -1).all()
        stopped = out.sequences[i, n - 1].item() in (3, 5)
        assert out.finish_reason[i] == ("stop" if stopped else "length")
        assert not set(out.sequences[i, : n - 1].tolist()) & {3, 5}


def test_a_stop_as_the_first_token():
    first = greedy_text([4], 1)[0]
    out = SpecDecoder(TARGET, DRAFT).generate([[4]], SamplingParams(temperature=0), eos_token_id=[first])
    assert texts(out) == [[first]]
    assert out.stats.rounds == 0


def test_statistics_by_hand():
    text = greedy_text([1, 2, 3], 12)
    wrong = (text[4] + 1) % 13
    # Round 1: two stand, the third does not. Round 2: both of two stand. Round 3: nothing is proposed.
    draft = Scripted([text[1], text[2], (text[3] + 1) % 13, 0], [text[4], text[5]], [])
    assert wrong != text[4]
    out = SpecDecoder(TARGET, draft).generate([[1, 2, 3]], SamplingParams(temperature=0), max_new_tokens=8)
    assert texts(out) == [text[:8]]
    s = out.stats
    assert (s.rounds, s.row_rounds, s.drafted, s.accepted, s.examined, s.emitted) == (3, 3, 6, 4, 5, 8)
    assert s.accepted_histogram == [1, 0, 2, 0, 0]
    assert s.accepted_per_position == [2, 2, 0, 0]
    assert s.acceptance_rate == 0.8
    assert s.tokens_per_round == 7 / 3
    assert s.forwards == {"target": 4, "draft": 0}
    assert s.host_reads == 4
    a = TokenSource
    assert out.sources[0].tolist() == [
        a.ANCHOR,
        a.ACCEPTED,
        a.ACCEPTED,
        a.RECOVERED,
        a.ACCEPTED,
        a.ACCEPTED,
        a.BONUS,
        a.BONUS,
    ]


def test_statistics_are_of_one_call_and_count_forwards():
    decoder = SpecDecoder(TARGET, DRAFT, num_speculative_tokens=3)
    first = decoder.generate(PROMPTS, seeded(), max_new_tokens=20).stats
    again = decoder.generate(PROMPTS, seeded(), max_new_tokens=20).stats
    assert (again.rounds, again.accepted, again.emitted) == (first.rounds, first.accepted, first.emitted)
    assert again.forwards == {"target": again.rounds + 1, "draft": 3 * again.rounds}
    assert again.host_reads == again.rounds + 1
    assert sum(again.accepted_histogram) == again.row_rounds
    assert again.emitted == 80
    assert again.total_seconds >= again.draft_seconds + again.target_seconds + again.verify_seconds > 0
    assert again.as_dict()["acceptance_rate"] == again.acceptance_rate


def test_log_probs_are_under_the_target_with_its_filters():
    out = SpecDecoder(TARGET, DRAFT).generate(
        [[1, 2]], SamplingParams(temperature=0.7, top_k=5, seed=3), max_new_tokens=15
    )
    text = [1, 2, *texts(out)[0]]
    logits = TARGET(text[:-1])[1:].astype(float) / 0.7
    for i, token in enumerate(text[2:]):
        kept = np.sort(logits[i])[-5:]
        want = logits[i, token] - np.log(np.exp(kept).sum())
        assert out.log_probs[0, i].item() == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("draft", [None, DRAFT, "prompt_lookup"])
def test_penalties_see_every_emitted_token(draft):
    options = {"temperature": 0.0, "frequency_penalty": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.3}
    out = SpecDecoder(TARGET, draft).generate(PROMPTS, SamplingParams(**options), max_new_tokens=25)
    for prompt, text in zip(PROMPTS, texts(out), strict=True):
        for i, token in enumerate(text):
            x = TARGET(prompt + text[:i])[-1].astype(float)
            count = np.bincount(text[:i], minlength=13)
            seen = (count > 0) | np.isin(np.arange(13), prompt)
            x = np.where(seen, np.where(x > 0, x / 1.3, x * 1.3), x) - 1.0 * count - 0.5 * (count > 0)
            assert token == int(x.astype(np.float32).argmax())


def test_one_row_with_penalties_leaves_the_others_alone():
    plain = texts(SpecDecoder(TARGET, DRAFT).generate(PROMPTS, seeded(), max_new_tokens=20))
    each = seeded()
    each[1] = SamplingParams(seed=101, frequency_penalty=2.0)
    mixed = texts(SpecDecoder(TARGET, DRAFT).generate(PROMPTS, each, max_new_tokens=20))
    assert [mixed[i] == plain[i] for i in range(4)] == [True, False, True, True]


@pytest.mark.parametrize("draft", [None, DRAFT])
def test_min_tokens_holds_stops_back(draft):
    stops = list(range(6))
    each = [SamplingParams(seed=i, min_tokens=m) for i, m in enumerate([0, 5, 9, 3])]
    out = SpecDecoder(TARGET, draft).generate(PROMPTS, each, max_new_tokens=30, stop_token_ids=stops)
    for text, sampling in zip(texts(out), each, strict=True):
        assert len(text) > sampling.min_tokens or text[-1] not in stops
        assert not set(text[: sampling.min_tokens]) & set(stops)


def test_prompt_lookup_copies_what_followed():
    from triton_specdec.draft import PromptLookupDraft
    from triton_specdec.request import check_request

    prompts = [[1, 2, 3, 4, 5, 9, 1, 2, 3], [7, 7, 7], [1, 2, 3]]
    request = check_request(prompts, SamplingParams(), None, 8, None, (), None, 13, 100)
    state = request.state(TARGET, 4, "rejection")
    proposal = PromptLookupDraft().propose(state, 4)
    assert proposal.q is None
    assert proposal.num_valid.tolist() == [4, 1, 0]
    assert proposal.tokens.tolist() == [[4, 5, 9, 1], [7, -1, -1, -1], [-1, -1, -1, -1]]


def test_padded_tensors_are_as_lists():
    want = texts(SpecDecoder(TARGET, DRAFT).generate(PROMPTS, seeded(), max_new_tokens=12))
    longest = max(map(len, PROMPTS))
    for left in (True, False):
        ids, mask = torch.zeros(4, longest, dtype=torch.int64), torch.zeros(4, longest, dtype=torch.int64)
        for i, prompt in enumerate(PROMPTS):
            at = slice(longest - len(prompt), None) if left else slice(len(prompt))
            ids[i, at], mask[i, at] = torch.tensor(prompt), 1
        out = SpecDecoder(TARGET, DRAFT).generate(ids, seeded(), attention_mask=mask, max_new_tokens=12)
        assert texts(out) == want


def test_no_prompts_and_torch_seeds():
    out = SpecDecoder(TARGET, DRAFT).generate([], max_new_tokens=5)
    assert out.sequences.shape == (0, 0)
    torch.manual_seed(1)
    a = texts(SpecDecoder(TARGET, DRAFT).generate(PROMPTS, max_new_tokens=20))
    b = texts(SpecDecoder(TARGET, DRAFT).generate(PROMPTS, max_new_tokens=20))
    torch.manual_seed(1)
    assert texts(SpecDecoder(TARGET, DRAFT).generate(PROMPTS, max_new_tokens=20)) == a
    assert a != b


def test_a_model_with_hostile_logits_still_emits_ids_and_says_so():
    broken = ToyModel(13, 0)
    broken.first = broken.first.clone()
    broken.first[5] = torch.nan
    out = SpecDecoder(broken, DRAFT).generate([[5, 5], [1, 2]], seeded(2), max_new_tokens=20)
    assert int(out.sequences.min()) >= 0
    assert int(out.sequences.max()) < 13
    assert out.status[0] != 0


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"num_speculative_tokens": 0}, ValueError, "num_speculative_tokens"),
        ({"num_speculative_tokens": 2.0}, TypeError, "num_speculative_tokens"),
        ({"rule": "typical"}, ValueError, "rule"),
        ({"gamma": 3}, TypeError, "use num_speculative_tokens"),
        ({"num_assistant_tokens": 3}, TypeError, "use num_speculative_tokens"),
        ({"K": 3}, TypeError, "use num_speculative_tokens"),
        ({"assistant_model": None}, TypeError, "use draft"),
        ({"nonsense": 3}, TypeError, "unexpected option 'nonsense'"),
        ({"draft": "ngram"}, ValueError, "'prompt_lookup'"),
        ({"draft": 3}, TypeError, "draft"),
        ({"draft": PromptLookupDraft}, TypeError, r"write PromptLookupDraft\(\)"),
        ({"draft": ToyModel(14, 0)}, ValueError, "vocabulary"),
    ],
)
def test_constructor_errors(options, error, words):
    with pytest.raises(error, match=words):
        SpecDecoder(TARGET, **options)


@pytest.mark.parametrize(
    ("ids", "options", "error", "words"),
    [
        ([[]], {}, ValueError, r"input_ids\[0\] is empty"),
        ([[1], [2, 13]], {}, ValueError, r"input_ids\[1\] holds id 13"),
        ([[-1]], {}, ValueError, "holds id -1"),
        ([[1.5]], {}, TypeError, "input_ids"),
        ([1, 2], {}, TypeError, "list of id lists"),
        ("text", {}, TypeError, "input_ids"),
        (["text"], {}, TypeError, "encode it first"),
        (torch.tensor([1, 2]), {}, ValueError, r"ids\[None\]"),
        ({"input_ids": [[1]]}, {}, TypeError, "what a tokenizer returns"),
        ([torch.tensor([[1, 2]])], {}, ValueError, r"input_ids\[0\] must be one list"),
        (torch.tensor([[1, 2]]), {"attention_mask": torch.tensor([[-math.inf, 0.0]])}, ValueError, "1 for tokens"),
        (torch.tensor([[1, 2]]), {"attention_mask": torch.tensor([[2, 1]])}, ValueError, "1 for tokens"),
        (torch.tensor([[1.0]]), {}, TypeError, "input_ids"),
        (torch.tensor([[1, 2, 3]]), {"attention_mask": torch.tensor([[1, 0, 1]])}, ValueError, "left or on the right"),
        (torch.tensor([[1, 2]]), {"attention_mask": torch.tensor([[0, 0]])}, ValueError, "empty"),
        (torch.tensor([[1, 2]]), {"attention_mask": torch.tensor([[1]])}, ValueError, "attention_mask"),
        ([[1]], {"attention_mask": torch.tensor([[1]])}, ValueError, "attention_mask"),
        ([[1]], {"max_new_tokens": 0}, ValueError, "max_new_tokens"),
        ([[1]], {"max_new_tokens": 10_000}, ValueError, "more than the models' 10000"),
        ([[1]], {"eos_token_id": 13}, ValueError, "outside"),
        ([[1]], {"stop_token_ids": [-1]}, ValueError, "outside"),
        ([[1]], {"sampling": [SamplingParams()] * 2}, ValueError, "one a prompt"),
        ([[1]], {"sampling": {"temperature": 1}}, TypeError, "SamplingParams"),
        ([[1]], {"temperature": 0.5}, TypeError, "SamplingParams"),
        ([[1]], {"do_sample": True}, TypeError, "SamplingParams"),
        ([[1]], {"max_length": 5}, TypeError, "max_new_tokens"),
        ([None], {}, TypeError, r"input_ids\[0\]"),
        ([torch.tensor(5)], {}, TypeError, r"input_ids\[0\]"),
        ([bytearray(b"a")], {}, TypeError, "encode it first"),
        ([[True]], {}, TypeError, r"input_ids\[0\]"),
        (torch.tensor([[1, 2, 3]]), {"attention_mask": torch.tensor([[0, 1, 0]])}, ValueError, "left or on the right"),
        ([[1]], {"stop_token_ids": ["a"]}, TypeError, "stop_token_ids"),
        ([[1]], {"eos_token_id": torch.tensor([13])}, ValueError, "eos_token_id"),
        ([[1]], {"sampling": 5}, TypeError, "sampling"),
        ([[1]], {"on_token": 5}, TypeError, "on_token"),
    ],
)
def test_requests_are_checked_before_any_work(ids, options, error, words):
    model = ToyModel(13, 0)
    with pytest.raises(error, match=words):
        SpecDecoder(model, DRAFT).generate(ids, **options)
    assert model.caches == []


def test_a_draft_that_breaks_its_promise_is_named():
    class Other:
        def __init__(self, rows, width):
            self.rows, self.width = rows, width

        def propose(self, state, num_tokens):
            q = None if self.width is None else torch.full((1, self.width, 13), 1 / 13)
            return Proposal(torch.zeros(self.rows, 2, dtype=torch.int64), q, torch.tensor([2]))

    with pytest.raises(ValueError, match="proposed tokens"):
        SpecDecoder(TARGET, Other(2, None)).generate([[1]])
    with pytest.raises(ValueError, match="draft must have shape"):
        SpecDecoder(TARGET, Other(1, 4)).generate([[1]])


def test_one_decoder_serves_several_threads():
    from concurrent.futures import ThreadPoolExecutor

    decoder = SpecDecoder(TARGET, DRAFT)
    want = [decoder.generate([prompt], SamplingParams(seed=1), max_new_tokens=40) for prompt in PROMPTS]
    with ThreadPoolExecutor(4) as pool:
        call = lambda prompt: decoder.generate([prompt], SamplingParams(seed=1), max_new_tokens=40)  # noqa: E731
        for _ in range(5):
            for got, one in zip(pool.map(call, PROMPTS), want, strict=True):
                assert texts(got) == texts(one)
                assert got.stats.forwards == one.stats.forwards


def test_a_call_inside_on_token_disturbs_nothing():
    decoder = SpecDecoder(TARGET, DRAFT)
    want = decoder.generate([[1, 2]], SamplingParams(seed=4), max_new_tokens=12)
    inner = []

    def again(row, token, accepted):
        inner.append(texts(decoder.generate([[3]], SamplingParams(seed=5), max_new_tokens=4)))

    got = decoder.generate([[1, 2]], SamplingParams(seed=4), max_new_tokens=12, on_token=again)
    assert texts(got) == texts(want)
    assert got.stats.forwards == want.stats.forwards
    assert inner == [inner[0]] * 12


class Wide(ToyModel):
    """A head padded behind the vocabulary, as models often have, in a tensor that is the model's own."""

    def forward(self, tokens, cache, *, last=None):
        logits = super().forward(tokens, cache, last=last)
        self.given = torch.cat([logits, torch.full_like(logits[..., :5], 50.0)], -1)
        self.before = self.given.clone()
        return self.given


@pytest.mark.parametrize("options", [{}, {"frequency_penalty": 0.5, "min_tokens": 20}])
def test_a_padded_head_is_never_drawn_and_never_written(options):
    wide, narrow = Wide(13, 0), ToyModel(13, 0)
    each = seeded(**options)
    a = SpecDecoder(wide, Wide(13, 1)).generate(PROMPTS, each, max_new_tokens=20, eos_token_id=3)
    b = SpecDecoder(narrow, ToyModel(13, 1)).generate(PROMPTS, each, max_new_tokens=20, eos_token_id=3)
    assert texts(a) == texts(b)
    assert torch.equal(wide.given, wide.before)


def test_a_model_with_too_few_logits_is_named():
    class Narrow(ToyModel):
        def forward(self, tokens, cache, *, last=None):
            return super().forward(tokens, cache, last=last)[..., :9]

    with pytest.raises(ValueError, match="the target gave 9 logits"):
        SpecDecoder(Narrow(13, 0)).generate([[1]])


def test_results_are_ordinary_tensors():
    out = SpecDecoder(TARGET, DRAFT).generate(PROMPTS, seeded(), max_new_tokens=6)
    out.sequences[out.sequences < 0] = 0
    weight = torch.ones(4, 6, requires_grad=True)
    (weight * out.log_probs).sum().backward()
    assert not any(t.is_inference() for t in (out.sequences, out.lengths, out.log_probs, out.sources, out.status))


def test_pads_are_no_drafts_in_the_statistics():
    out = SpecDecoder(TARGET, Scripted([-1, 3], [-1])).generate([[1, 2, 3]], SamplingParams(seed=0), max_new_tokens=4)
    assert (out.stats.drafted, out.stats.examined, out.stats.acceptance_rate) == (0, 0, 0)
    assert set(out.sources[0, 1:].tolist()) == {TokenSource.BONUS}


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_rounds_are_no_longer_than_what_is_proposed(rule):
    class Counting(ToyModel):
        fed = ()

        def forward(self, tokens, cache, *, last=None):
            self.fed += (tokens.shape[1],)
            return super().forward(tokens, cache, last=last)

    class Narrow:
        """Proposes 0, 1, 2, 3, 0, ... tokens a round, in as many columns or in all of them."""

        def __init__(self, padded):
            self.padded, self.rounds = padded, 0

        def propose(self, state, num_tokens):
            n, self.rounds = self.rounds % 4, self.rounds + 1
            tokens = torch.full((len(state.lengths), num_tokens if self.padded else n), 5)
            return tokens, None, torch.full_like(state.lengths, n)

    outs = []
    for padded in (True, False):
        target = Counting(13, 0)
        decoder = SpecDecoder(target, Narrow(padded), rule=rule, num_speculative_tokens=6)
        outs.append(decoder.generate(PROMPTS, seeded(), max_new_tokens=20))
        assert set(target.fed[1:5]) == {1, 2, 3, 4}
        assert len(outs[-1].stats.accepted_histogram) == 7
    assert texts(outs[0]) == texts(outs[1])
    assert outs[0].stats.accepted_histogram == outs[1].stats.accepted_histogram


def test_more_tokens_than_asked_for_are_refused():
    class Wide:
        def propose(self, state, num_tokens):
            return torch.zeros(1, num_tokens + 1, dtype=torch.int64), None, torch.tensor([1])

    with pytest.raises(ValueError, match="at most 4 tokens a row, got 5"):
        SpecDecoder(TARGET, Wide()).generate([[1]])


def test_numpy_and_tensor_ids_are_ids():
    want = texts(
        SpecDecoder(TARGET, DRAFT).generate([[1, 2]], SamplingParams(seed=1), max_new_tokens=9, eos_token_id=3)
    )
    for prompt in (np.array([1, 2]), torch.tensor([1, 2]), (1, 2)):
        for stop in (np.int64(3), torch.tensor(3), torch.tensor([3]), [3], 3):
            decoder = SpecDecoder(TARGET, DRAFT, num_speculative_tokens=np.int64(4))
            sampling = SamplingParams(seed=np.int64(1), top_k=10**30)
            assert texts(decoder.generate([prompt], sampling, max_new_tokens=np.int64(9), eos_token_id=stop)) == want


@pytest.mark.parametrize("given", [None, (1, 2), [torch.zeros(1, 4), None, torch.tensor([0])]])
def test_a_proposal_of_another_form_is_named(given):
    class Odd:
        def propose(self, state, num_tokens):
            return given

    with pytest.raises(TypeError, match="propose must return"):
        SpecDecoder(TARGET, Odd()).generate([[1]])
