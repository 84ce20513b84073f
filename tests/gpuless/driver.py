"""Launches without a GPU: `device(mode)` decides what `kernel[grid](...)` does with CPU tensors."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from . import ptx
from .fast_interpreter import fast_interpreter, interpreted
from .patches import Patches
from .shadow import Shadow
from .shadow_record import ShadowLaunch

_original_run = JITFunction.run
_original_interpreted_run = interpreter.InterpretedFunction.run

# Largest dynamic shared memory of one block, bytes.
SHARED_BYTES = {
    80: 166912,
    86: 101376,
    89: 101376,
    90: 232448,
    100: 232448,
    103: 232448,
    120: 101376,
}
AMD_SHARED_BYTES = 65536
DEFAULT_TARGET = "sm_90"


@dataclass
class TensorStub:
    """What Triton's specialisation looks at in a tensor, without its data."""

    dtype: torch.dtype
    address: int
    size_bytes: int

    def data_ptr(self) -> int:
        return self.address

    def untyped_storage(self) -> TensorStub:
        return self

    def size(self) -> int:
        return self.size_bytes


@dataclass
class Launch:
    """One recorded launch.

    Attributes
    ----------
    compiled : Triton's CompiledKernel, None where the mode compiles nothing
    counts : instructions and traffic, in the modes that run PTX
    shadow : what a `Shadow` that was active saw of it
    """

    name: str
    kernel: Any
    grid: tuple[int, ...]
    num_warps: int
    compiled: Any = None
    counts: ptx.Counts | None = None
    shadow: ShadowLaunch | None = None
    arguments: tuple = ()
    keywords: dict[str, Any] = field(default_factory=dict)


@dataclass
class Device:
    """What `device` yields: the mode and every launch since."""

    mode: str
    target: GPUTarget
    launches: list[Launch] = field(default_factory=list)

    @property
    def last(self) -> Launch:
        return self.launches[-1]

    def named(self, name: str) -> list[Launch]:
        """The launches of one kernel."""
        return [launch for launch in self.launches if launch.name == name]


def target_of(name: str) -> GPUTarget:
    """``sm_90`` or ``gfx942`` as Triton's target."""
    if re.fullmatch(r"sm_\d+", name):
        return GPUTarget("cuda", int(name[3:]), 32)
    if re.fullmatch(r"gfx\w+", name):
        return GPUTarget("hip", name, 64 if name.startswith("gfx9") else 32)
    raise ValueError(f"target: expected sm_<number> or gfx<name>, got {name!r}")


def shared_limit(target: GPUTarget) -> int:
    if target.backend == "hip":
        return AMD_SHARED_BYTES
    return SHARED_BYTES.get(target.arch, 101376)


class _Utils:
    def __init__(self, target: GPUTarget):
        self.target = target

    def get_device_properties(self, device: Any) -> dict[str, int]:
        return {
            "max_shared_mem": shared_limit(self.target),
            "multiprocessor_count": 132,
            "max_num_regs": 65536,
            "warpSize": self.target.warp_size,
            "sm_clock_rate": 1755000,
            "mem_clock_rate": 2619000,
            "mem_bus_width": 5120,
        }


class _CpuDriver(DriverBase):
    """Lets Triton's launch path believe that it has a device of the target's kind."""

    def __init__(self, target: GPUTarget, fp_fusion: bool):
        self.target = target
        self.fp_fusion = fp_fusion
        self.utils = _Utils(target)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_device(self) -> str:
        # Compiled kernels are cached per device, whatever the environment said when they were
        # compiled: so one device for each target and setting.
        fusion = "fused" if self.fp_fusion else "unfused"
        return f"gpuless:{self.target.backend}:{self.target.arch}:{fusion}"

    def set_current_device(self, device: Any) -> None:
        pass

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Callable[..., list[float]]:
        def run_once(call: Callable, quantiles: Any = None, **options: Any) -> list[float]:
            call()
            return [1.0, 1.0, 1.0]

        return run_once

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(1)

    def clear_cache(self, cache: Any) -> None:
        pass


def is_interpreter_process() -> bool:
    """Whether TRITON_INTERPRET was set when triton.language was imported."""
    return not isinstance(tl.sum, JITFunction)


@contextmanager
def device(
    mode: str,
    synchronised: Iterable[str] = (),
    check: bool = True,
    fp_fusion: bool = True,
    max_lanes: int = ptx.MAX_LANES,
) -> Iterator[Device]:
    """Run or compile every launch inside the block in one mode.

    Parameters
    ----------
    mode : str
        ``interpreter``: interpret. ``jit`` or ``jit:sm_80``: specialise and compile for the
        target, then interpret. ``sm_80``, ``sm_90``, ``sm_100``: compile and run the PTX.
        ``compile:sm_90``, ``compile:gfx942``: compile only.
    synchronised : names of arguments without race checks in the PTX modes
    check : whether the PTX modes look for races, hazards and padding
    fp_fusion : whether the compiler may fuse multiplications and additions
    max_lanes : threads that the PTX modes run side by side

    Yields
    ------
    Device
        With the list of launches.

    Raises
    ------
    RuntimeError
        A mode other than ``interpreter`` in a process with TRITON_INTERPRET set.
    """
    action, target = _parse_mode(mode)
    if action != "interpret" and is_interpreter_process():
        raise RuntimeError(f"device({mode!r}) needs the compiler: unset TRITON_INTERPRET for this process")
    record = Device(mode, target)
    with ExitStack() as stack:
        stack.enter_context(fast_interpreter())
        stack.enter_context(_environment("TRITON_DEFAULT_FP_FUSION", "1" if fp_fusion else "0"))
        patches = Patches()
        stack.callback(patches.restore)
        patches.set(triton.runtime.driver, "_active", _CpuDriver(target, fp_fusion))
        run = _runner(record, action, frozenset(synchronised), check, max_lanes)
        patches.set(JITFunction, "run", run)
        patches.set(interpreter.InterpretedFunction, "run", _recording_run(record))
        yield record


def _parse_mode(mode: str) -> tuple[str, GPUTarget]:
    action, _, name = mode.partition(":")
    if mode == "interpreter":
        return "interpret", target_of(DEFAULT_TARGET)
    if action == "jit":
        return "jit", target_of(name or DEFAULT_TARGET)
    if action == "compile" and name:
        return "compile", target_of(name)
    if re.fullmatch(r"sm_\d+", mode):
        return "ptx", target_of(mode)
    raise ValueError(f"mode: expected interpreter, jit, sm_<number> or compile:<target>, got {mode!r}")


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def _recording_run(record: Device) -> Callable:
    """`InterpretedFunction.run`, for kernels that were decorated with TRITON_INTERPRET set."""

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> Any:
        if not isinstance(kernel, interpreter.InterpretedFunction) or _is_inner(kernel):
            return _original_interpreted_run(kernel, *arguments, grid=grid, warmup=warmup, **keywords)
        if not warmup:
            bound = _bind(kernel.fn, arguments, keywords)
            launch = Launch(kernel.__name__, kernel, _size(grid, bound), keywords.get("num_warps", 4))
            record.launches.append(launch)
            _original_interpreted_run(kernel, *arguments, grid=launch.grid, warmup=False, **keywords)
            launch.shadow = _shadow_of_last()
        return None

    return run


def _is_inner(kernel: Any) -> bool:
    """Whether this was made from a `JITFunction`, which has recorded the launch itself."""
    return type(kernel) is not interpreter.InterpretedFunction


def _shadow_of_last() -> ShadowLaunch | None:
    shadow = Shadow.current()
    return shadow.last if shadow is not None and shadow.launches else None


def _bind(function: Callable, arguments: tuple, keywords: dict[str, Any]) -> dict[str, Any]:
    signature = inspect.signature(function)
    named = {name: value for name, value in keywords.items() if name in signature.parameters}
    bound = signature.bind(*arguments, **named)
    bound.apply_defaults()
    return dict(bound.arguments)


def _size(grid: Any, bound: dict[str, Any]) -> tuple[int, ...]:
    size = grid(bound) if callable(grid) else grid
    return tuple(int(extent) for extent in (size if isinstance(size, (tuple, list)) else (size,)))


def _stub(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorStub(value.dtype, value.data_ptr() % 4096 or 4096, value.untyped_storage().nbytes())
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(_stub(item) for item in value)
    return value


def _runner(record: Device, action: str, synchronised: frozenset[str], check: bool, max_lanes: int) -> Callable:
    """`JITFunction.run` for one mode."""

    def run(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> Any:
        compiled = None
        if action == "interpret":
            for hook in kernel.pre_run_hooks:
                hook(*arguments, **keywords)
        else:
            compiled = _original_run(kernel, *arguments, grid=grid, warmup=True, **keywords)
        if warmup:
            return compiled
        bound = _bind(kernel.fn, arguments, keywords)
        num_warps = keywords.get("num_warps", 4) if compiled is None else compiled.metadata.num_warps
        launch = Launch(kernel.__name__, kernel, _size(grid, bound), num_warps, compiled)
        launch.arguments = tuple(_stub(value) for value in arguments)
        launch.keywords = {name: _stub(value) for name, value in keywords.items()}
        record.launches.append(launch)
        if compiled is not None and compiled.metadata.shared > shared_limit(record.target):
            raise OutOfResources(compiled.metadata.shared, shared_limit(record.target), "shared memory")
        if action in ("interpret", "jit"):
            interpreted(kernel)[launch.grid](**bound)
            launch.shadow = _shadow_of_last()
        elif action == "ptx":
            full_grid = (*launch.grid, 1, 1)[:3]
            launch.counts = ptx.launch(compiled, full_grid, bound, synchronised, check, max_lanes)
        return compiled

    return run
