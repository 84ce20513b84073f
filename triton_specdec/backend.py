"""Picks the layer that computes a stage: NumPy reference or Triton kernels."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

from . import checks

BACKENDS = ("reference", "triton")


def resolve(backend: str | None, device: torch.device) -> str:
    """The backend that was asked for, or the one that fits the device.

    Parameters
    ----------
    backend : "reference", "triton" or None
        None: the reference for CPU tensors, the kernels for CUDA tensors. One that was asked for never falls back.

    Raises
    ------
    NotImplementedError
        The kernels are not part of this version.
    """
    if backend is not None:
        checks.choice("backend", backend, BACKENDS)
    chosen = backend or ("reference" if device.type == "cpu" else "triton")
    if chosen == "triton" and find_spec("triton_specdec.kernels") is None:
        raise NotImplementedError(
            f"this version has no Triton kernels yet (tensors on {device}): move the tensors to the CPU, "
            "or ask for backend='reference', which copies them there"
        )
    return chosen


def layer(backend: str) -> ModuleType:
    """The module with the stage functions of a backend."""
    return import_module("triton_specdec.on_numpy" if backend == "reference" else "triton_specdec.kernels")
