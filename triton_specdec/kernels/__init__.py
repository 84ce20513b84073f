"""The fused Triton kernels: the only part of the package that imports triton.

A stage that has no kernels yet raises and says what to do.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import triton

from .filter import filter_logits, filter_sample, stack_source
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


def _no_kernel(*args: Any, **options: Any) -> NoReturn:
    raise NotImplementedError(
        "this stage has no Triton kernel in this version: move the tensors to the CPU, or ask for backend='reference', "
        "which copies them there"
    )


truncate_kv_ = truncate_paged_kv_ = compact_kv_ = apply_penalties_ = _no_kernel

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
