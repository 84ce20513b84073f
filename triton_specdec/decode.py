"""The loop: prefill, then rounds of propose, check, verify, truncate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from . import checks
from .draft import Draft, ModelDraft, PromptLookupDraft, Proposal
from .filter import filter_rows
from .kv import truncate_kv_
from .models.protocol import KVCache, Model, model_logits, valid_ids
from .models.vocabulary import check_same_ids
from .params import SamplingParams
from .reference import rules
from .request import Prompts, Request, check_request
from .sample import Drawing, sample_rows
from .state import DecodeState
from .stats import GenerateStats, Stopwatch
from .verify import RULES, VerifyResult, verify

OnToken = Callable[[int, int, bool], None]

_WRAP = " (models.from_transformers makes one of a Transformers model)"
_INIT_NAMES = dict.fromkeys(
    ("num_assistant_tokens", "gamma", "K", "k", "num_draft_tokens", "lookahead"), "num_speculative_tokens"
) | dict.fromkeys(("assistant_model", "draft_model"), "draft")
_GENERATE_NAMES = (
    dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "repetition_penalty"), "sampling=SamplingParams(...)")
    | dict.fromkeys(("seed", "do_sample", "sampling_params", "generation_config"), "sampling=SamplingParams(...)")
    | dict.fromkeys(("max_tokens", "max_length"), "max_new_tokens")
    | dict.fromkeys(("num_assistant_tokens", "gamma", "K", "k", "num_speculative_tokens"), "SpecDecoder(...)")
    | {"assistant_model": "SpecDecoder(target, draft)", "streamer": "on_token"}
)


class TokenSource(IntEnum):
    """Where an emitted token came from."""

    ANCHOR = 0  # the target, after the prefill
    ACCEPTED = 1  # the draft, accepted by the target
    RECOVERED = 2  # the target's residual, after a rejection
    BONUS = 3  # the target, after all drafts were accepted; every later token of plain decoding


@dataclass(frozen=True, eq=False)
class GenerateOutput:
    """Result of `SpecDecoder.generate`.

    Attributes
    ----------
    sequences : int64 [B, longest]
        New tokens only, padded with pad_token_id (or -1).
    lengths : int64 [B]
    finish_reason : list of "length" | "stop"
    stats : GenerateStats
    log_probs : float32 [B, longest]
        Log-probability of each token under the (filtered) target; 0 in the padding.
    sources : int8 [B, longest]
        `TokenSource` of each token; -1 in the padding.
    status : int32 [B]
        Bits of `Status` that any round set.
    """

    sequences: torch.Tensor
    lengths: torch.Tensor
    finish_reason: list[str]
    stats: GenerateStats
    log_probs: torch.Tensor
    sources: torch.Tensor
    status: torch.Tensor


class SpecDecoder:
    """Speculative decoding of batches with prompts of different lengths, by the target's law exactly.

    Parameters
    ----------
    target : Model
    draft : Model, "prompt_lookup", object with propose(state, num_tokens), or None
        None decodes plainly: one token a target forward, drawn by Gumbel noise of (seed, position).
    num_speculative_tokens : int, >= 1
        K, drafted tokens a round.
    rule : "rejection", "block" or "coupled"
        See `verify`. Under "coupled" a row's text is that of plain decoding with its seed, for any draft and K.

    Notes
    -----
    A row draws by (its seed, absolute position), so its text does not depend on the batch around it. The models' own
    arithmetic may: a matrix product can round differently for another batch size.
    """

    def __init__(
        self,
        target: Model,
        draft: Model | Draft | str | None = None,
        *,
        num_speculative_tokens: int = 4,
        rule: str = "rejection",
        **unknown: Any,
    ) -> None:
        checks.unknown_option("SpecDecoder", unknown, _INIT_NAMES)
        checks.choice("rule", rule, RULES)
        if isinstance(target, type) or not isinstance(target, Model):
            raise TypeError(f"target must be a Model{_WRAP}, got {type(target).__name__}")
        self.target = target
        self.num_speculative_tokens = checks.integer("num_speculative_tokens", num_speculative_tokens, 1)
        self.rule = rule
        self.draft = self._as_draft(draft)

    def _as_draft(self, draft: Model | Draft | str | None) -> Draft | None:
        if isinstance(draft, type):
            raise TypeError(f"draft must be an object, got the class {draft.__name__}: write {draft.__name__}()")
        if isinstance(draft, str):
            checks.choice("draft", draft, ("prompt_lookup",))
            return PromptLookupDraft()
        if draft is None or isinstance(draft, Draft):
            return draft
        if not isinstance(draft, Model):
            raise TypeError(
                f"draft must be a Model{_WRAP}, 'prompt_lookup', an object with propose(state, num_tokens), or None; "
                f"got {type(draft).__name__}"
            )
        check_same_ids(self.target, draft)
        if not checks.is_same_device(draft.device, self.target.device):
            raise ValueError(f"the draft is on {draft.device}, but the target is on {self.target.device}")
        return ModelDraft(draft, self.target.vocab_size)

    def generate(
        self,
        input_ids: Prompts,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        max_new_tokens: int = 64,
        eos_token_id: int | Sequence[int] | None = None,
        stop_token_ids: Sequence[int] = (),
        pad_token_id: int | None = None,
        on_token: OnToken | None = None,
        **unknown: Any,
    ) -> GenerateOutput:
        """Generate up to `max_new_tokens` tokens after each prompt.

        Parameters
        ----------
        input_ids : list of id lists, or ints [B, T]
            With a tensor, `attention_mask` tells the padding (left or right); without one, every id is text.
        sampling : SamplingParams, or one a prompt
            Default: SamplingParams().
        attention_mask : [B, T], optional
        max_new_tokens : int, >= 1
        eos_token_id, stop_token_ids : ids that end a row
            The stop token itself is the row's last token. eos_token_id is the target's own where it has one (a
            Transformers model: its generation config's) and none is given; () means none.
        pad_token_id : int, optional
            Fills `sequences` behind a row's end; -1 where not given.
        on_token : callable (row, token, accepted), optional
            Called for every emitted token, in order within a row, after stops have been cut; `accepted` says whether
            the draft proposed it.

        Returns
        -------
        GenerateOutput

        Raises
        ------
        TypeError, ValueError
            Before any work: empty prompt, id outside the vocabulary, more tokens than the models take, wrong shapes,
            unknown options.

        Examples
        --------
        >>> from triton_specdec import SamplingParams, SpecDecoder
        >>> from triton_specdec.models import load_embedded_pair
        >>> target, draft = load_embedded_pair()
        >>> out = SpecDecoder(target, draft).generate([list(b"To be")], SamplingParams(seed=1), max_new_tokens=8)
        >>> out.lengths.tolist(), out.finish_reason
        ([8], ['length'])
        """
        checks.unknown_option("generate", unknown, _GENERATE_NAMES)
        if on_token is not None and not callable(on_token):
            raise TypeError(f"on_token must be callable, got {type(on_token).__name__}")
        models = [m for m in (self.target, getattr(self.draft, "model", None)) if isinstance(m, Model)]
        request = check_request(
            input_ids,
            SamplingParams() if sampling is None else sampling,
            attention_mask,
            max_new_tokens,
            getattr(self.target, "eos_token_id", None) if eos_token_id is None else eos_token_id,
            stop_token_ids,
            pad_token_id,
            self.target.vocab_size,
            min(m.max_length for m in models),
        )
        return _Generation(self, request, on_token).run()


class _Generation:
    """One call of generate: the rounds, and what the host keeps of them."""

    def __init__(self, decoder: SpecDecoder, request: Request, on_token: OnToken | None) -> None:
        self.target, self.draft, self.request, self.on_token = decoder.target, decoder.draft, request, on_token
        self.num_drafts = decoder.num_speculative_tokens if decoder.draft is not None else 0
        # Plain decoding is the coupled rule with no drafts: the Gumbel draw of the target at every position.
        self.rule = decoder.rule if decoder.draft is not None else "coupled"
        self.stats = GenerateStats(
            accepted_per_position=[0] * self.num_drafts, accepted_histogram=[0] * (self.num_drafts + 1)
        )
        self.watch = Stopwatch(decoder.target.device)
        rows = len(request.prompts)
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.log_probs: list[list[float]] = [[] for _ in range(rows)]
        self.sources: list[list[TokenSource]] = [[] for _ in range(rows)]
        self.finish: list[str | None] = [None] * rows
        self.status = [0] * rows
        self.committed = [len(prompt) for prompt in request.prompts]

    def run(self) -> GenerateOutput:
        """Prefill, rounds until every row is finished, result."""
        if self.tokens:
            with self.watch.time("total"), torch.inference_mode():
                state, cache = self.prefill()
                while any(reason is None for reason in self.finish):
                    self.round(state, cache)
            self.stats.forwards["draft"] = state.session.get("draft_forwards", 0)
        for part in ("draft", "target", "verify", "total"):
            setattr(self.stats, f"{part}_seconds", self.watch.seconds(part))
        return self.output()

    def prefill(self) -> tuple[DecodeState, KVCache]:
        """Feed the prompts and draw the anchors."""
        state = self.request.state(self.target, self.num_drafts, self.rule)
        cache = self.target.new_cache(len(self.tokens), state.capacity)
        none = state.tokens[:, :0]
        with self.watch.time("target"):
            # Padded on the right: a token never attends to what comes after it, and the padding is then truncated.
            last = state.lengths.long() - 1
            logits = model_logits(self.target, "target", state.tokens[:, : state.bound].clamp(min=0), cache, last)
            truncate_kv_(cache.lengths, state.lengths)
        self.stats.forwards["target"] += 1
        state.logits_width = logits.shape[-1]
        row = state.adjusted(logits, none)[:, 0]
        method = "gumbel" if self.rule == "coupled" else "inverse_cdf"
        drawing = Drawing(method, state.seeds, state.lengths.long(), stream=rules.STREAM_SAMPLE)
        law, drawn = sample_rows(row, state.params, drawing, self.valid_ids(row))
        anchors, ones = drawn[:, None], torch.ones_like(state.lengths)
        first = VerifyResult(anchors, torch.zeros_like(ones), ones, law.log_prob(anchors), law.status)
        self.commit(state, cache, first, torch.zeros_like(ones), TokenSource.ANCHOR)
        return state, cache

    def round(self, state: DecodeState, cache: KVCache) -> None:
        """Propose, check K + 1 positions in one forward, verify, truncate."""
        with self.watch.time("draft"):
            proposal = self.propose(state)
        with self.watch.time("target"):
            fed = torch.cat([state.anchors(), proposal.tokens.clamp(0, self.target.vocab_size - 1)], 1)
            logits = model_logits(self.target, "target", fed, cache)
        self.stats.forwards["target"] += 1
        self.stats.rounds += 1
        with self.watch.time("verify"):
            result = verify(
                proposal.tokens,
                filter_rows(
                    state.adjusted(logits, proposal.tokens),
                    state.round_params(logits.shape[1]),
                    vocab_size=self.valid_ids(logits),
                ),
                proposal.q,
                num_draft_tokens=proposal.num_valid,
                rule=self.rule,
                seeds=state.seeds,
                positions=state.lengths,
            )
        step = torch.arange(proposal.tokens.shape[1], device=logits.device)
        count, vocab = proposal.num_valid[:, None], self.target.vocab_size
        usable = rules.is_usable_draft(proposal.tokens, step, count, vocab).int().cumprod(1).sum(1)
        self.commit(state, cache, result, usable, None)

    def valid_ids(self, logits: torch.Tensor) -> int | None:
        """How many of the target's logits count."""
        return valid_ids(self.target.vocab_size, logits)

    def propose(self, state: DecodeState) -> Proposal:
        """The draft's tokens, checked for their shape; none in plain decoding."""
        batch = len(self.tokens)
        if self.draft is None:
            return Proposal(state.tokens[:, :0], None, torch.zeros_like(state.lengths))
        given = self.draft.propose(state, self.num_drafts)
        if not isinstance(given, tuple) or len(given) != 3:
            raise TypeError(f"propose must return (tokens, q, num_valid), got {type(given).__name__}")
        tokens, q, num_valid = given
        checks.tensor("proposed tokens", tokens, checks.INT_DTYPES, (batch, None))
        if tokens.shape[1] > self.num_drafts:
            raise ValueError(f"propose must return at most {self.num_drafts} tokens a row, got {tokens.shape[1]}")
        checks.tensor("num_valid", num_valid, checks.INT_DTYPES, (batch,))
        for name, value in (("proposed tokens", tokens), ("num_valid", num_valid)):
            checks.same_device(name, value, "the target", state.tokens.device)
        # The coupled rule compares tokens and asks for no q.
        q = None if self.rule == "coupled" else q
        num_valid = num_valid.clamp(0, tokens.shape[1])
        if q is None and tokens.device.type == "cpu":
            # What nobody proposed need not be checked. On a GPU the host would have to wait to know.
            tokens = tokens[:, : int(num_valid.max())]
        return Proposal(tokens.long(), q, num_valid)

    def commit(
        self,
        state: DecodeState,
        cache: KVCache,
        result: VerifyResult,
        usable: torch.Tensor,
        source: TokenSource | None,
    ) -> None:
        """Append the emitted tokens, truncate the cache to them, and tell the host: its one read of a round."""
        # Before the round the cache held all but the last committed token. A finished row commits nothing: -1.
        accepted = torch.where(state.active, result.num_accepted, -1)
        truncate_kv_(cache.lengths, rules.kept_length(state.lengths - 1, accepted))
        taken = state.commit_(result)
        counts = torch.stack([taken, usable.to(taken.dtype), result.status], 1)
        # Integers below 2^53 and float32 log-probabilities both fit float64 exactly: one transfer carries all.
        host = torch.cat([result.tokens.double(), counts.double(), result.log_probs.double()], 1).cpu()
        self.stats.host_reads += 1
        width = result.tokens.shape[1]
        finished_before = sum(reason is not None for reason in self.finish)
        for row, values in enumerate(host.tolist()):
            count, drafted, status = (int(v) for v in values[width : width + 3])
            self.committed[row] += count
            if self.finish[row] is None:
                self.status[row] |= status
                ids = [int(v) for v in values[:count]]
                self.append(row, ids, drafted, values[width + 3 : width + 3 + count], source)
        state.bound = max(self.committed)
        cache.bound = state.bound - 1
        if sum(reason is not None for reason in self.finish) != finished_before:
            active = [reason is None for reason in self.finish]
            state.active.copy_(torch.tensor(active), non_blocking=True)

    def append(
        self, row: int, ids: list[int], drafted: int, log_probs: list[float], source: TokenSource | None
    ) -> None:
        """Take a row's emitted tokens, cut at a stop token or at max_new_tokens."""
        accepted = len(ids) - 1
        if source is None:
            self.stats.count_row(accepted, drafted)
        last = TokenSource.RECOVERED if accepted < drafted else TokenSource.BONUS
        for i, (token, log_prob) in enumerate(zip(ids, log_probs, strict=True)):
            kind = TokenSource.ACCEPTED if i < accepted else last if source is None else source
            self.tokens[row].append(token)
            self.log_probs[row].append(log_prob)
            self.sources[row].append(kind)
            self.stats.emitted += 1
            if token in self.request.stop_ids:
                self.finish[row] = "stop"
            elif len(self.tokens[row]) == self.request.max_new_tokens:
                self.finish[row] = "length"
            if self.on_token is not None:
                with torch.inference_mode(False):
                    self.on_token(row, token, kind is TokenSource.ACCEPTED)
            if self.finish[row] is not None:
                return

    def output(self) -> GenerateOutput:
        """Lists of different lengths to padded tensors."""

        def padded(rows: list[Any], fill: float, dtype: torch.dtype) -> torch.Tensor:
            width = max(map(len, rows), default=0)
            return torch.tensor([[*r, *[fill] * (width - len(r))] for r in rows], dtype=dtype).reshape(len(rows), width)

        return GenerateOutput(
            padded(self.tokens, self.request.pad_token_id, torch.int64),
            torch.tensor([len(t) for t in self.tokens], dtype=torch.int64),
            [reason or "length" for reason in self.finish],
            self.stats,
            padded(self.log_probs, 0.0, torch.float32),
            padded(self.sources, -1, torch.int8),
            torch.tensor(self.status, dtype=torch.int32),
        )
