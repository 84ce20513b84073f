"""Sampling and speculative decoding between two forward passes: filter, sample, verify, truncate the KV cache."""

from .decode import GenerateOutput, SpecDecoder, TokenSource
from .filter import FilteredLogits, filter_logits
from .kv import compact_kv_, truncate_kv_, truncate_paged_kv_
from .params import SamplingParams, Status
from .penalties import apply_penalties_
from .sample import SampledLogits, sample, sample_logits
from .stats import GenerateStats
from .verify import VerifyResult, VerifyTreeResult, verify, verify_tree

__version__ = "0.1.0"

__all__ = [
    "FilteredLogits",
    "GenerateOutput",
    "GenerateStats",
    "SampledLogits",
    "SamplingParams",
    "SpecDecoder",
    "Status",
    "TokenSource",
    "VerifyResult",
    "VerifyTreeResult",
    "apply_penalties_",
    "compact_kv_",
    "filter_logits",
    "sample",
    "sample_logits",
    "truncate_kv_",
    "truncate_paged_kv_",
    "verify",
    "verify_tree",
]
