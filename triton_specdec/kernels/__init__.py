"""The fused Triton kernels: the only part of the package that imports triton."""

from __future__ import annotations

import torch
import triton

from .filter import filter_logits, filter_sample, stack_source
from .kv import compact_kv_, truncate_kv_
from .pages import truncate_paged_kv_
from .penalties import apply_penalties_
from .probs import keep_mask, log_prob, probs
from .sample import sample
from .tree import verify_tree
from .verify import verify


def check_runs_on(device: torch.device) -> None:
    """Raises RuntimeError where Triton cannot run kernels on tensors of a device."""
    if triton.knobs.runtime.interpret:
        return
    try:
        active = triton.runtime.driver.active.get_active_torch_device().type
    except RuntimeError:
        active = "no device"
    if active != device.type:
        hint = "set TRITON_INTERPRET=1 before Python starts to interpret them, or " if device.type == "cpu" else ""
        raise RuntimeError(
            f"backend='triton' cannot run on tensors on {device} (Triton runs on {active} here): {hint}"
            "ask for backend='reference'"
        )


__all__ = [
    "apply_penalties_",
    "check_runs_on",
    "compact_kv_",
    "filter_logits",
    "filter_sample",
    "keep_mask",
    "log_prob",
    "probs",
    "sample",
    "stack_source",
    "truncate_kv_",
    "truncate_paged_kv_",
    "verify",
    "verify_tree",
]
