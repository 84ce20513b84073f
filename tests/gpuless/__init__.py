"""Judges Triton kernels without a GPU.

``device(mode)`` is a context manager: inside it any ``kernel[grid](...)`` works on CPU tensors.
The modes, and what each finds that the others do not:

``interpreter``
    Triton's interpreter, made several times faster. Wrong formulas, with Python's debugger at hand.
``interpreter`` with `Shadow`
    The same with shadow memory. Reads per element; lanes out of bounds, the padding of a view
    included; races between programs; a missing barrier; masked lanes that are used; uninitialised
    reads.
``jit``
    Specialises and compiles for sm_90, then interprets. What the interpreter accepts and the
    compiler does not.
``sm_80``, ``sm_90``, ``sm_100``
    Compiles and runs the PTX, so layouts, vector loads, shuffles and shared memory are the
    compiler's. Misaligned vectors; races in shared memory, in a CTA and between CTAs; hazards
    between threads. Counts instructions, sectors and requests of every launch.
``compile:sm_90``, ``compile:gfx942``, ...
    Compiles only. `report` reads spills, registers, occupancy, access widths and the cost of inner
    loops from the result.

Two more tools need no mode. `find_steps` and its kin find the exact law of a sampler by bisection
in its uniforms; no chance is involved. `lower_bound` bounds the time of a launch from its counts: a
model, not a measurement.

What none of it sees: time, memory ordering between CTAs, tensor cores, TMA, clusters. Approximate
instructions such as ``ex2.approx`` are computed to full precision. In a process with
TRITON_INTERPRET set only the ``interpreter`` mode exists.

Examples
--------
>>> with device("sm_90") as gpu:  # doctest: +SKIP
...     kernel[(rows,)](logits, out, vocab_size, BLOCK=2048)
>>> assert gpu.last.counts.traffic["logits"].load_bytes == logits.nbytes  # doctest: +SKIP
>>> assert report(compile_for(gpu.last, "gfx942")).spills == 0  # doctest: +SKIP
"""

from exact_law import RoundLaw, Steps, find_steps, round_law, sampler_law, total_variation

from .cubin import KernelReport, KernelSignature, Loop, Occupancy, compile_for, occupancy, report
from .driver import Device, Launch, device, is_interpreter_process
from .fast_interpreter import fast_interpreter
from .ptx import Counts, PtxError, Traffic
from .roofline import LowerBound, lower_bound
from .shadow import Shadow, ShadowError
from .shadow_record import ShadowArgument, ShadowLaunch

__all__ = [
    "Counts",
    "Device",
    "KernelReport",
    "KernelSignature",
    "Launch",
    "Loop",
    "LowerBound",
    "Occupancy",
    "PtxError",
    "RoundLaw",
    "Shadow",
    "ShadowArgument",
    "ShadowError",
    "ShadowLaunch",
    "Steps",
    "Traffic",
    "compile_for",
    "device",
    "fast_interpreter",
    "find_steps",
    "is_interpreter_process",
    "lower_bound",
    "occupancy",
    "report",
    "round_law",
    "sampler_law",
    "total_variation",
]
