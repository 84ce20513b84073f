"""Where the kernels' tests run: the interpreter under shadow memory, compiled PTX on the CPU, a GPU if there is one.

One test body serves all modes; only the compiled ones see layouts, types and barriers as they will be on a device.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from gpuless import Device, Shadow, device, is_interpreter_process

GPU = "gpu"
has_gpu = torch.cuda.is_available()
needs_compiler = pytest.mark.skipif(is_interpreter_process(), reason="TRITON_INTERPRET is set: nothing is compiled")
needs_gpu = pytest.mark.skipif(not has_gpu, reason="no GPU here")


def compiled(name: str, *more: object) -> object:
    """A mode that needs the compiler, and further parameters."""
    return pytest.param(name, *more, marks=needs_compiler)


def on_gpu(*more: object) -> object:
    """The mode of a real GPU, and further parameters."""
    return pytest.param(GPU, *more, marks=needs_gpu)


MODES = ["interpreter", compiled("sm_90"), on_gpu()]
ALL_MODES = ["interpreter", compiled("sm_80"), compiled("sm_90"), compiled("sm_100"), on_gpu()]
# A large vocabulary takes too long in the interpreter.
COMPILED_MODES = [compiled("sm_90"), on_gpu()]


@dataclass
class Machine:
    """Where tensors of a test go, and what was launched."""

    place: str
    device: Device | None
    shadow: Shadow | None

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the machine's device; views stay views on the CPU."""
        return tensor if self.place == "cpu" else tensor.to(self.place)


@contextmanager
def quiet() -> Iterator[None]:
    """NaN and inf - inf are how the scan notices what it must repair: NumPy warns of them, a GPU does not."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


@contextmanager
def machine(mode: str, check: bool = True) -> Iterator[Machine]:
    """Kernels run in a mode inside the block, with ``backend="triton"``."""
    if mode == GPU:
        yield Machine("cuda", None, None)
    elif mode == "interpreter" and check:
        with device(mode) as record, Shadow() as shadow, quiet():
            yield Machine("cpu", record, shadow)
    else:
        with device(mode, check=check) as record, quiet():
            yield Machine("cpu", record, None)
