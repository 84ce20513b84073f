"""What a stage moves: ours counted in the PTX, others' added up from their sources, step by step, as the least.

A letter is one value of each [row, V]: L a logit as it came, F a float32, I an int64, B a bool. Every step must at
least read and write what its formula names; caches, repeated passes and small tensors are left out, to the others'
advantage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .cases import DTYPES, Case
from .counts import Counted
from .rows import COUNTED, SOURCE, Row

BYTES = {"F": 4, "I": 8, "B": 1}


@dataclass(frozen=True)
class Step:
    """One kernel at least, over all rows of a request ("all"), those of its drafts ("drafts"), or one ("one")."""

    does: str
    reads: str = ""
    writes: str = ""
    over: str = "all"
    # Kernels; a loop of the host over the rows launches them for each.
    launches: int = 1
    each_row: bool = False


@dataclass(frozen=True)
class Pipeline:
    """The steps of one project for one stage, filtered by top-k and top-p, and where they are written down."""

    project: str
    stage: str
    source: str
    steps: tuple[Step, ...]

    def bytes_per_logits_byte(self, drafts: int, logit_bytes: int) -> float:
        """Bytes read and written for each byte of (the target's) logits."""
        rows = drafts + 1
        of = {"all": rows, "drafts": drafts, "one": 1}
        width = {"L": logit_bytes, **BYTES}
        moved = sum(of[s.over] * sum(width[letter] for letter in s.reads + s.writes) for s in self.steps)
        return moved / (rows * logit_bytes)

    def launches(self, drafts: int) -> int:
        """Kernels at least."""
        return sum(s.launches * (drafts + 1 if s.each_row else 1) for s in self.steps)

    def tensors(self) -> int:
        """Tensors [rows, V] that are written."""
        return sum(len(s.writes) for s in self.steps)


_HF_TOP_K = (
    Step("topk", "F", each_row=True),
    Step("compare with the k-th", "F", "B", each_row=True),
    Step("masked_fill", "FB", "F", each_row=True),
)
_HF_TOP_P = (
    Step("sort", "F", "FI", each_row=True),
    Step("softmax", "F", "F", each_row=True),
    Step("cumsum", "F", "F", each_row=True),
    Step("compare with 1 - p", "F", "B", each_row=True),
    Step("scatter", "IB", "B", each_row=True),
    Step("masked_fill", "FB", "F", each_row=True),
)
_VLLM_SAMPLE = (
    Step("to(float32)", "L", "F", "one"),
    Step("div_ by the temperature", "F", "F", "one"),
    Step("apply_top_k_top_p", "F", "F", "one"),
    Step("softmax", "F", "F", "one"),
    Step("exponential_", "", "F", "one"),
    Step("div_", "FF", "F", "one"),
    Step("argmax", "F", "", "one"),
)
PIPELINES = (
    Pipeline(
        "flashinfer",
        "sample",
        "FlashInfer, flashinfer/sampling.py: top_k_top_p_sampling_from_logits, one k and p a row",
        (
            Step("float()", "L", "F"),
            Step("top_k_mask_logits", "F", "F"),
            Step("softmax", "F", "F"),
            Step("top_p_sampling_from_probs", "F"),
        ),
    ),
    Pipeline(
        "flashinfer",
        "verify",
        "FlashInfer, flashinfer/sampling.py: top_k_renorm_probs, top_p_renorm_probs, chain_speculative_sampling",
        (
            Step("softmax", "L", "F"),
            Step("top_k_renorm_probs", "F", "F"),
            Step("top_p_renorm_probs", "F", "F"),
            Step("chain_speculative_sampling: the residual", "FF", "", "one"),
        ),
    ),
    Pipeline(
        "vllm",
        "sample",
        "vLLM, vllm/v1/sample/ops/topk_topp_sampler.py: forward_native with the Triton mask",
        _VLLM_SAMPLE,
    ),
    Pipeline(
        "vllm",
        "verify",
        "vLLM, vllm/v1/sample/rejection_sampler.py: RejectionSampler.forward",
        (
            Step("logits[target_logits_indices]", "L", "L", "drafts"),
            Step("to(float32)", "L", "F", "drafts"),
            Step("div_ by the temperature", "F", "F", "drafts"),
            Step("apply_top_k_top_p", "F", "F", "drafts"),
            Step("softmax", "F", "F", "drafts"),
            Step("exponential_", "", "F", "one"),
            Step("reciprocal", "F", "F", "one"),
            Step("sample_recovered_tokens_kernel", "FFF", "", "drafts"),
            Step("rand"),
            Step("rejection_random_sample_kernel"),
            Step("logits[bonus_logits_indices]", "L", "L", "one"),
            *_VLLM_SAMPLE,
        ),
    ),
    Pipeline(
        "sglang",
        "verify",
        "SGLang, python/sglang/srt/speculative/eagle_info_v2.py; does not look at the draft's law",
        (
            Step("logits / temperature", "L", "F"),
            Step("softmax", "F", "F"),
            Step("top_k_renorm_prob", "F", "F"),
            Step("top_p_renorm_prob", "F", "F"),
            Step("zeros_like", "", "F"),
            Step("rand", launches=2),
            Step("tree_speculative_sampling_target_only", "FF", "", "one"),
        ),
    ),
    Pipeline(
        "transformers",
        "sample",
        "Transformers, src/transformers/generation/{utils,logits_process}.py: _sample",
        (
            Step("to(float32)", "L", "F"),
            *_HF_TOP_K,
            *_HF_TOP_P,
            Step("softmax", "F", "F"),
            Step("multinomial", "F"),
        ),
    ),
    Pipeline(
        "transformers",
        "verify",
        "Transformers, src/transformers/generation/utils.py: _assisted_decoding, _speculative_sampling; one request",
        (
            Step("to(float32)", "L", "F"),
            *_HF_TOP_K,
            *_HF_TOP_P,
            Step("copy into the logits", "F", "F", each_row=True),
            Step("softmax of the target", "F", "F"),
            Step("softmax of the draft", "F", "F", "drafts"),
            Step("p - q", "FF", "F", "one"),
            Step("clamp", "F", "F", "one"),
            Step("sum and division", "FF", "F", "one", 2),
            Step("multinomial", "F", "", "one"),
        ),
    ),
)
# The points that everybody is compared at, filtered by top-k and top-p; two requests are counted.
POINTS = {
    "sample": Case("sample", batch=2, filter="k=20 p=.95"),
    "verify": Case("verify", batch=2, drafts=4, filter="k=20 p=.95", draft="model"),
}


def ours(case: Case, counted: Counted) -> dict[str, float]:
    """What was counted, in the units of the others."""
    return {
        "bytes": counted.moved / counted.logits_bytes,
        "launches": float(len(counted.launches) + counted.others),
        "[rows, V] tensors": float(counted.dense_tensors(case.rows, case.vocab)),
    }


def rows_of(case: Case, counted: Counted) -> Iterator[Row]:
    """Ours and everybody's at a point; the ratio is to ours."""
    own = ours(case, counted)
    units = {"bytes": "bytes per byte of logits", "launches": "launches", "[rows, V] tensors": "tensors"}
    for metric, value in own.items():
        fields = {"metric": metric, "value": value, "unit": units[metric], "origin": COUNTED}
        yield Row.of(case, "triton", what="traffic", note="launches and bytes of the compiled kernels", **fields)
    for pipeline in PIPELINES:
        if pipeline.stage != case.stage:
            continue
        theirs = {
            "bytes": pipeline.bytes_per_logits_byte(case.drafts, DTYPES[case.dtype].itemsize),
            "launches": float(pipeline.launches(case.drafts)),
            "[rows, V] tensors": float(pipeline.tensors()),
        }
        for metric, value in theirs.items():
            fields = {"metric": metric, "value": value, "unit": units[metric], "origin": SOURCE}
            yield Row.of(case, pipeline.project, what="traffic", note=f"at least; {pipeline.source}", **fields)
