"""Transformers models in ragged batches: text and committed KV as alone, as `generate`, refused by name where not."""

import numpy as np
import pytest
import torch
from scipy import stats as scipy_stats
from tiny_models import MAIN, MORE, REFUSED, VOCAB, exists, generated, near, tiny

from triton_specdec import SamplingParams, SpecDecoder, truncate_kv_
from triton_specdec.models import KVCache, Model, TransformersModel, from_transformers
from triton_specdec.models.transformers_checks import check_rows

PROMPTS = [[3, 4, 5], [9], [10, 11, 12, 13, 14, 15, 16], [50, 51, 3, 4, 5, 3, 4]]


def texts(out):
    return [row[:n].tolist() for row, n in zip(out.sequences, out.lengths, strict=True)]


def seeded(count=4, **options):
    return [SamplingParams(seed=100 + i, **options) for i in range(count)]


class Watched(TransformersModel):
    """Remembers its caches and counts what it is fed."""

    def __init__(self, model):
        super().__init__(model, None, VOCAB, 320)
        self.caches, self.fed = [], 0

    def new_cache(self, batch_size, capacity):
        self.caches.append(super().new_cache(batch_size, capacity))
        return self.caches[-1]

    def forward(self, tokens, cache, *, last=None):
        self.fed += tokens.numel()
        return super().forward(tokens, cache, last=last)


class Told:
    """Drafts each row's given continuation; a row may propose fewer, or what is wrong."""

    def __init__(self, texts, wrong=(), counts=None):
        self.texts, self.wrong, self.counts = texts, wrong, counts

    def propose(self, state, num_tokens):
        lengths, starts = state.lengths.tolist(), state.prompt_lengths.tolist()
        tokens = torch.zeros(len(lengths), num_tokens, dtype=torch.int64)
        for b, text in enumerate(self.texts):
            rest = text[lengths[b] - starts[b] :][:num_tokens]
            tokens[b, : len(rest)] = torch.tensor(rest, dtype=torch.int64)
            if b in self.wrong:
                tokens[b] = (tokens[b] + 1) % VOCAB
        counts = [num_tokens] * len(lengths) if self.counts is None else self.counts
        return tokens, None, torch.tensor(counts)


@pytest.fixture(params=MAIN)
def family(request):
    return request.param


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_greedy_is_generate(family, attention):
    model = tiny(family, attn_implementation=attention)
    want = [generated(model, prompt, 30) for prompt in PROMPTS]
    target = from_transformers(model)
    for draft in (None, "prompt_lookup", from_transformers(near(model))):
        out = SpecDecoder(target, draft).generate(PROMPTS, SamplingParams(temperature=0), max_new_tokens=30)
        assert texts(out) == want
    assert 0.2 < out.stats.acceptance_rate < 1


@pytest.mark.parametrize("name", MORE)
def test_more_families(name):
    if not exists(name):
        pytest.skip(f"this Transformers has no {name}")
    model = tiny(name)
    out = SpecDecoder(from_transformers(model), "prompt_lookup").generate(
        PROMPTS, SamplingParams(temperature=0), max_new_tokens=16
    )
    assert texts(out) == [generated(model, prompt, 16) for prompt in PROMPTS]


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_text_and_committed_kv_are_those_of_each_row_alone(family, rule):
    model = tiny(family)
    target, draft = Watched(model), Watched(near(model))
    each = [SamplingParams(seed=i, temperature=t) for i, t in enumerate([1.0, 0.0, 0.6, 0.8])]
    decoder = SpecDecoder(target, draft, rule=rule)
    options = {"max_new_tokens": 24, "stop_token_ids": list(range(20, 30))}
    together = decoder.generate(PROMPTS, each, **options)
    caches = target.caches[-1], draft.caches[-1]
    assert len(set(together.lengths.tolist())) > 1
    for b, prompt in enumerate(PROMPTS):
        alone = decoder.generate([prompt], each[b], **options)
        assert texts(alone)[0] == texts(together)[b]
        assert torch.equal(alone.sources[0], together.sources[b, : alone.sources.shape[1]])
        torch.testing.assert_close(alone.log_probs[0], together.log_probs[b, : alone.log_probs.shape[1]])
        committed = len(prompt) + int(together.lengths[b])
        # A row that stops at its first token makes no draft.
        own = [target.caches[-1], draft.caches[-1]][: 2 if alone.stats.rounds else 1]
        # The target holds all but the last token; the draft's tail is what it proposed last, and truncated before it
        # is fed again.
        for cache, mine, behind in zip(caches, own, (1, 6), strict=False):
            kept = max(0, min(committed - behind, int(cache.lengths[b]), int(mine.lengths[0])))
            assert kept >= committed - behind - 1
            for ours, theirs in zip(cache.keys + cache.values, mine.keys + mine.values, strict=True):
                torch.testing.assert_close(ours[b, :, :kept], theirs[0, :, :kept], rtol=1e-4, atol=1e-5)


def test_one_row_accepts_all_beside_one_that_accepts_none_and_ones_that_propose_less(family):
    target = Watched(tiny(family))
    greedy = SamplingParams(temperature=0)
    plain = texts(SpecDecoder(target).generate(PROMPTS, greedy, max_new_tokens=40))
    decoder = SpecDecoder(target, Told(plain, wrong=(1,), counts=[4, 4, 2, 0]))
    out = decoder.generate(PROMPTS, greedy, max_new_tokens=21)
    assert texts(out) == [text[:21] for text in plain]
    cache = target.caches[-1]
    # The slowest rows set the rounds: row 0 is long done, and its neighbours' rejected drafts left nothing behind.
    assert out.stats.rounds == 20
    for b, prompt in enumerate(PROMPTS):
        text = (prompt + plain[b])[: int(cache.lengths[b])]
        assert len(text) >= len(prompt) + 20
        clean = target.new_cache(1, 320)
        with torch.inference_mode():
            target.forward(torch.tensor([text]), clean)
        for ours, theirs in zip(cache.keys + cache.values, clean.keys + clean.values, strict=True):
            n = len(prompt) + 20
            torch.testing.assert_close(ours[b, :, :n], theirs[0, :, :n], rtol=1e-3, atol=1e-4)


@torch.inference_mode()
def test_attention_over_a_truncated_cache_is_that_of_one_that_never_held_the_rejected(family):
    model = from_transformers(tiny(family))
    prompt, rejected, after = torch.tensor([[7, 8, 9], [1, 2, 3]]), torch.full((2, 4), 33), torch.tensor([[5, 6]] * 2)
    clean, dirty, zeroed = (model.new_cache(2, 32) for _ in range(3))
    for cache in (clean, dirty, zeroed):
        model.forward(prompt, cache)
    want = model.forward(after, clean)
    for cache in (dirty, zeroed):
        model.forward(rejected, cache)
    truncate_kv_(dirty.lengths, torch.tensor([3, 3], dtype=torch.int32))
    torch.testing.assert_close(model.forward(after, dirty), want, rtol=1e-4, atol=1e-5)
    # Zeroing instead of truncating, in the place where the tokens would stand: a zeroed key still takes attention.
    for tensor in zeroed.keys + zeroed.values:
        tensor[:, :, 3:7] = 0
    assert (model.forward(after, zeroed) - want).abs().max() > 0.01


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_draft_equal_to_target_accepts_everything_for_250_tokens_at_batch_4(family, rule):
    model = from_transformers(tiny(family))
    out = SpecDecoder(model, model, rule=rule).generate(PROMPTS, seeded(), max_new_tokens=250)
    assert out.stats.acceptance_rate == 1
    assert out.stats.rounds == 50
    assert out.lengths.tolist() == [250] * 4


def test_coupled_is_plain_sampling(family):
    model = tiny(family)
    target, draft = from_transformers(model), from_transformers(near(model))
    plain = texts(SpecDecoder(target).generate(PROMPTS, seeded(top_p=0.9), max_new_tokens=30))
    for k in (1, 4, 7):
        decoder = SpecDecoder(target, draft, num_speculative_tokens=k, rule="coupled")
        assert texts(decoder.generate(PROMPTS, seeded(top_p=0.9), max_new_tokens=30)) == plain


def test_sampled_text_follows_the_models_law():
    """Three tokens over 12000 seeds by chi-square against the model's own probabilities; a wrong law must fail."""
    model = tiny("GPT2", {**MAIN["GPT2"], "vocab_size": 5})
    target, draft = from_transformers(model), from_transformers(near(model, 0.5))
    n = 12_000
    options = {"temperature": 0.15, "top_k": 4}
    params = [SamplingParams(seed=i, **options) for i in range(n)]
    # Prompts of two lengths in one batch.
    out = SpecDecoder(target, draft, num_speculative_tokens=2).generate(
        [[2], [4, 1, 2]] * (n // 2), params, max_new_tokens=3
    )
    for start, prompt in enumerate(([2], [4, 1, 2])):
        ids = np.array(list(np.ndindex(5, 5, 5)))
        with torch.inference_mode():
            whole = torch.tensor([[*prompt, *row[:2]] for row in ids.tolist()])
            logits = model(whole).logits[:, len(prompt) - 1 :].double() / options["temperature"]
        logits = logits.masked_fill(logits < logits.topk(4).values[..., -1:], -torch.inf)
        law = logits.softmax(-1).gather(2, torch.from_numpy(ids)[..., None])[..., 0].prod(1).numpy()
        seen = np.bincount((out.sequences[start::2] @ torch.tensor([25, 5, 1])).numpy(), minlength=125)
        assert _fit(seen, law) > 1e-4
        assert _fit(seen, law**0.8 / (law**0.8).sum()) < 1e-6


def _fit(seen, law):
    assert seen[law == 0].sum() == 0
    few = law * seen.sum() < 5
    cells = np.append(seen[~few], seen[few].sum()), np.append(law[~few], law[few].sum()) * seen.sum()
    used = cells[1] > 0
    return scipy_stats.chisquare(cells[0][used], cells[1][used]).pvalue


@pytest.mark.parametrize("draft", [None, "prompt_lookup", "model"])
def test_penalties_stops_min_tokens_streams_and_log_probs_in_a_ragged_batch(family, draft):
    model = tiny(family)
    draft = from_transformers(near(model)) if draft == "model" else draft
    calls = []
    target = from_transformers(model)
    stops = list(range(0, VOCAB, 4))
    params = SamplingParams(temperature=0, repetition_penalty=1.4, min_tokens=5)
    out = SpecDecoder(target, draft).generate(
        PROMPTS, params, max_new_tokens=25, eos_token_id=stops, on_token=lambda *call: calls.append(call)
    )
    want = [
        generated(model, prompt, 25, repetition_penalty=1.4, eos_token_id=stops, min_new_tokens=5) for prompt in PROMPTS
    ]
    assert texts(out) == want
    assert len({len(text) for text in want}) > 1
    for b, text in enumerate(want):
        assert [token for row, token, _ in calls if row == b] == text
        assert out.finish_reason[b] == ("stop" if text[-1] in stops else "length")
        # One-hot under temperature 0: what is drawn has log-probability 0.
        assert out.log_probs[b].abs().max() == 0
    plain = SpecDecoder(target, draft).generate(PROMPTS, seeded(), max_new_tokens=12)
    for b, prompt in enumerate(PROMPTS):
        whole = prompt + texts(plain)[b]
        with torch.inference_mode():
            logs = model(torch.tensor([whole])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        mine = logs.gather(1, torch.tensor(texts(plain)[b])[:, None])[:, 0]
        torch.testing.assert_close(plain.log_probs[b], mine, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_served_are_refused_by_name(name):
    if not exists(name):
        pytest.skip(f"this Transformers has no {name}")
    options, words = REFUSED[name]
    model = tiny(name, options)
    with pytest.raises(ValueError, match=f"^{type(model).__name__} .*({words})"):
        from_transformers(model)


def test_a_window_serves_texts_that_stay_within_it():
    options = {**MAIN["Mistral"], "sliding_window": 64}
    model = tiny("Mistral", options)
    target = from_transformers(model, max_length=64)
    out = SpecDecoder(target, "prompt_lookup").generate(PROMPTS, SamplingParams(temperature=0), max_new_tokens=40)
    assert texts(out) == [generated(model, prompt, 40) for prompt in PROMPTS]
    with pytest.raises(ValueError, match="more than the models' 64"):
        SpecDecoder(target).generate(PROMPTS, max_new_tokens=60)


def test_changing_rotary_embeddings_end_where_they_change():
    scaling = {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 40, "rope_theta": 10000.0}
    name = "rope_scaling" if "rope_scaling" in tiny("Llama").config.to_dict() else "rope_parameters"
    assert from_transformers(tiny("Llama", **{name: scaling})).max_length == 40


def test_changing_rotary_embeddings_of_one_type_of_layer():
    if not exists("Gemma3Text"):
        pytest.skip("this Transformers has no Gemma3")
    from transformers import Gemma3TextConfig

    from triton_specdec.models.roll_back import longest_text

    config = Gemma3TextConfig(max_position_embeddings=320)
    long = {"rope_type": "longrope", "original_max_position_embeddings": 80}
    config.rope_parameters = {"full_attention": long, "sliding_attention": {"rope_type": "default"}}
    assert longest_text(config, 10**9) == 80


def test_models_that_mask_by_the_longest_row_say_how_long_a_text_may_be():
    options = {**REFUSED["GPTNeo"][0], "attention_types": [[["global"], 2]], "max_position_embeddings": 64}
    model = tiny("GPTNeo", options)
    target = from_transformers(model)
    prompts = [[1], list(range(2, 42)), [5, 6]]
    with pytest.raises(ValueError, match="GPTNeoForCausalLM masks by the longest row of a batch, up to 64 slots"):
        SpecDecoder(target, "prompt_lookup").generate(prompts, SamplingParams(temperature=0), max_new_tokens=24)
    out = SpecDecoder(target, "prompt_lookup").generate(prompts, SamplingParams(temperature=0), max_new_tokens=15)
    assert texts(out) == [generated(model, prompt, 15) for prompt in prompts]


def test_queries_scaled_by_the_position_of_the_batch():
    from triton_specdec.models.roll_back import most_slots

    model = tiny("Llama")
    assert most_slots(model, model.config, 10**9) == 10**9
    model.config.attn_temperature_tuning, model.config.floor_scale = True, 16
    assert most_slots(model, model.config, 10**9) == 15


@pytest.mark.parametrize("k", [1, 8])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_learned_positions_up_to_the_last(k, attention):
    model = tiny("GPT2", {**MAIN["GPT2"], "n_positions": 32}, attn_implementation=attention)
    target = from_transformers(model)
    assert target.max_length == 32
    if target.max_slots == 32:
        pytest.skip("this Transformers' GPT2 keeps a mask of its own: another test")
    decoder = SpecDecoder(target, from_transformers(near(model)), num_speculative_tokens=k)
    out = decoder.generate([[1], list(range(20))], SamplingParams(temperature=0), max_new_tokens=12)
    assert texts(out) == [generated(model, [1], 12), generated(model, list(range(20)), 12)]


class Tokenizer:
    """As much of a tokenizer as is looked at."""

    def __init__(self, words, more=None):
        self.words, self.more = words, more or {}

    def get_vocab(self):
        return {word: i for i, word in enumerate(self.words)} | self.more


def test_padded_vocabularies_of_different_width():
    words = Tokenizer([f"w{i}" for i in range(90)])
    model = tiny("Llama")
    wide = tiny("Qwen2", {**MAIN["Qwen2"], "vocab_size": 128}, seed=0)
    for a, b in ((model, wide), (wide, model)):
        target, draft = from_transformers(a, tokenizer=words), from_transformers(b, tokenizer=words)
        assert target.vocab_size == draft.vocab_size == 90
        for rule in ("rejection", "block", "coupled"):
            out = SpecDecoder(target, draft, rule=rule).generate(PROMPTS, seeded(temperature=3.0), max_new_tokens=40)
            assert int(out.sequences.max()) < 90
            assert int(out.status.max()) == 0
        out = SpecDecoder(target, draft).generate(
            PROMPTS, seeded(temperature=3.0, frequency_penalty=1.0), max_new_tokens=40
        )
        assert int(out.sequences.max()) < 90
    # A draft with more ids than the target, of one tokenizer: those are never drafted.
    few = from_transformers(model, vocab_size=60)
    more = from_transformers(wide, tokenizer=words)
    with pytest.raises(ValueError, match="vocabulary"):
        SpecDecoder(few, more)
    few.tokenizer = words
    out = SpecDecoder(few, more).generate(PROMPTS, seeded(temperature=3.0), max_new_tokens=40)
    assert int(out.sequences.max()) < 60


def test_different_tokenizers_are_refused():
    ours = Tokenizer([f"w{i}" for i in range(90)])
    theirs = Tokenizer([f"w{i}" for i in range(80)] + [f"v{i}" for i in range(10)])
    target = from_transformers(tiny("Llama"), tokenizer=ours)
    draft = from_transformers(tiny("Qwen2"), tokenizer=theirs)
    with pytest.raises(ValueError, match=r"different tokenizers: id 80 is 'w80' .* 'v0' .*10 ids differ"):
        SpecDecoder(target, draft)
    # Ids may have holes: the last one counts, not their number.
    assert from_transformers(tiny("Qwen2"), tokenizer=Tokenizer(["a", "b"], {"</s>": 77})).vocab_size == 78
    with pytest.raises(TypeError, match="get_vocab"):
        from_transformers(tiny("Qwen2"), tokenizer="gpt2")
    # Ids that only one of them has are no difference.
    SpecDecoder(target, from_transformers(tiny("Qwen2"), tokenizer=Tokenizer(ours.words[:70])))


def test_the_end_of_text_is_the_models_own():
    model = tiny("Llama")
    text = generated(model, [5, 6], 20)
    stop = text[6]
    end = text.index(stop) + 1
    model.generation_config.eos_token_id = [stop, 50_000]
    target = from_transformers(model)
    greedy = SamplingParams(temperature=0)
    assert texts(SpecDecoder(target).generate([[5, 6]], greedy, max_new_tokens=20)) == [text[:end]]
    assert texts(SpecDecoder(target).generate([[5, 6]], greedy, max_new_tokens=20, eos_token_id=())) == [text]
    model.generation_config.eos_token_id = 100
    with pytest.raises(ValueError, match="eos_token_id 100 is no id below vocab_size=90"):
        from_transformers(model, vocab_size=90)


def test_the_wrapped_model_offers_the_protocol_and_stays_as_it_was():
    model = tiny("Llama")
    before = generated(model, [1, 2, 3], 10)
    target = from_transformers(model)
    assert isinstance(target, Model)
    assert isinstance(target.new_cache(1, 4), KVCache)
    assert repr(target.new_cache(2, 9)) == "TransformersCache(rows=2, capacity=9)"
    SpecDecoder(target, target).generate([[1, 2, 3]], seeded(1), max_new_tokens=9)
    assert target.model is model
    assert generated(model, [1, 2, 3], 10) == before


class Deaf:
    """A model that goes by the longest row of its batch, in one respect."""

    def __init__(self, model, respect):
        self.model, self.respect = model, respect

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, *, position_ids=None, attention_mask=None, **options):
        if position_ids is not None and self.respect == "positions":
            position_ids = position_ids.amax(0, keepdim=True).expand_as(position_ids)
        if attention_mask is not None and self.respect == "mask":
            attention_mask = torch.ones_like(attention_mask)
        cache = options.get("cache", options.get("past_key_values"))
        if cache is not None and self.respect == "slots":
            at = cache.current
            cache.current = at._replace(slots=at.slots.amax(0, keepdim=True).expand_as(at.slots))
        return self.model(position_ids=position_ids, attention_mask=attention_mask, **options)


@pytest.mark.parametrize("respect", ["mask", "positions", "slots"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_ignores_what_it_is_given_is_caught(family, respect, dtype):
    target = from_transformers(tiny(family).to(dtype))
    target.model = Deaf(target.model, "nothing")
    check_rows(target, "Deaf")
    target.model.respect = respect
    with pytest.raises(ValueError, match="Deaf gives other logits in a ragged batch"):
        check_rows(target, "Deaf")


@pytest.mark.parametrize("respect", ["mask", "slots"])
def test_the_check_looks_behind_logits_that_the_model_masks(respect):
    target = from_transformers(tiny("Llama"))

    class Masked(Deaf):
        def __call__(self, **options):
            out = super().__call__(**options)
            out.logits[..., 50:] = torch.finfo(out.logits.dtype).min
            return out

    target.model = Masked(target.model, "nothing")
    check_rows(target, "Masked")
    target.model.respect = respect
    with pytest.raises(ValueError, match="Masked gives other logits"):
        check_rows(target, "Masked")


def test_what_changes_after_wrapping_is_seen():
    model = tiny("Llama")
    want = generated(model, [5, 6], 12)
    target = from_transformers(model)
    greedy = SamplingParams(temperature=0)
    model.config._attn_implementation = "eager"
    assert texts(SpecDecoder(target, target).generate([[5, 6], [7]], greedy, max_new_tokens=12))[0] == want
    model.train()
    with pytest.raises(ValueError, match="training mode"):
        SpecDecoder(target).generate([[5, 6]], greedy)
    model.eval()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attn_implementation='sdpa'"):
        SpecDecoder(target).generate([[5, 6]], greedy)


def test_a_subclass_that_passes_its_arguments_on():
    import transformers

    class Own(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model = tiny("Llama")
    want = generated(model, [5, 6], 12)
    own = Own(model.config).eval()
    own.load_state_dict(model.state_dict())
    out = SpecDecoder(from_transformers(own), "prompt_lookup").generate(
        [[5, 6], [7]], SamplingParams(temperature=0), max_new_tokens=12
    )
    assert texts(out)[0] == want


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda m: m.double(), ValueError, "LlamaForCausalLM is in torch.float64"),
        (lambda m: torch.compile(m), TypeError, "got OptimizedModule: pass model._orig_mod"),
        (lambda m: m.train(), ValueError, "training mode"),
        (lambda m: m.base_model, ValueError, "no output head"),
        (lambda m: torch.nn.Linear(2, 2), TypeError, "PreTrainedModel, got Linear"),
        (lambda m: "gpt2", TypeError, "PreTrainedModel, got str"),
    ],
)
def test_wrong_models(change, error, words):
    with pytest.raises(error, match=words):
        from_transformers(change(tiny("Llama")))


def test_attention_without_a_mask_per_row_is_refused():
    model = tiny("Llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attn_implementation='sdpa'"):
        from_transformers(model)


def test_encoder_decoders_are_refused():
    import transformers

    config = transformers.T5Config(vocab_size=99, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder-decoder"):
        from_transformers(transformers.T5ForConditionalGeneration(config).eval())


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"vocab_size": 102}, ValueError, r"vocab_size must be in \[1, 101\]"),
        ({"vocab_size": 0}, ValueError, "vocab_size"),
        ({"vocab_size": 2.0}, TypeError, "vocab_size"),
        ({"max_length": 321}, ValueError, "max_length must be at most the 320"),
        ({"max_length": 1}, ValueError, "max_length"),
        ({"max_length": 3}, ValueError, "too short to check"),
    ],
)
def test_wrong_options(options, error, words):
    with pytest.raises(error, match=words):
        from_transformers(tiny("Llama"), **options)


def test_a_bare_transformers_model_is_told_what_to_do():
    with pytest.raises(TypeError, match="from_transformers"):
        SpecDecoder(tiny("Llama"))
    with pytest.raises(TypeError, match="from_transformers"):
        SpecDecoder(from_transformers(tiny("Llama")), tiny("Llama"))


def test_a_model_that_fails_in_the_check_is_named():
    options = {**MORE["Falcon"], "alibi": True}
    with pytest.raises(ValueError, match="FalconForCausalLM cannot run with a cache of rows of their own lengths: "):
        from_transformers(tiny("Falcon", options))


def test_a_cache_that_is_too_small_says_so():
    model = from_transformers(tiny("Llama"))
    with pytest.raises(ValueError, match="the cache has 4 slots a row"):
        model.forward(torch.zeros(1, 5, dtype=torch.int64), model.new_cache(1, 4))
