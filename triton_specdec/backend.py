"""Picks the layer that computes a stage: NumPy reference or Triton kernels."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch

from . import checks

BACKENDS = ("reference", "triton")


def resolve(backend: str | None, device: torch.device) -> str:
    """The backend that was asked for, or the one that fits the device.

    Parameters
    ----------
    backend : "reference", "triton" or None
        None: the reference for CPU tensors, the kernels for all others. One that was asked for never falls back.

    Raises
    ------
    ValueError
        An unknown backend.
    RuntimeError
        Triton is not installed, or cannot run on tensors of this device. On CPU tensors it can in a process that
        started with TRITON_INTERPRET=1.
    """
    if backend is not None:
        checks.choice("backend", backend, BACKENDS)
    chosen = backend or ("reference" if device.type == "cpu" else "triton")
    if chosen == "triton":
        layer(chosen).check_runs_on(device)
    return chosen


def layer(backend: str) -> ModuleType:
    """The module with the stage functions of a backend."""
    if backend == "reference":
        return import_module("triton_specdec.on_numpy")
    try:
        return import_module("triton_specdec.kernels")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise RuntimeError(
            "backend='triton' needs the package triton: pip install triton, or ask for backend='reference'"
        ) from error
