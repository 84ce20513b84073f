"""A PTX emulator for what Triton emits: no tensor cores, no TMA, no clusters.

parse.py       PTX text to instructions
arithmetic.py  what PTX computes, as functions of arrays
memory.py      global and shared memory with their checks and counts
machine.py     lanes, registers, control flow
decode.py      an instruction to a closure; alu, convert, warp and access hold the instructions
launch.py      a compiled kernel and its arguments to a run
"""

from .launch import launch
from .machine import MAX_LANES, Counts
from .memory import Traffic
from .parse import PtxError

__all__ = ["MAX_LANES", "Counts", "PtxError", "Traffic", "launch"]
