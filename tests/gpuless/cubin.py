"""What the compiler made of a kernel: registers, spills, occupancy, access widths, loops.

NVIDIA cubins are read with the tools in the triton wheel, AMD code from its assembly text and
metadata.
"""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.compiler import ASTSource

from .driver import Launch, device, is_interpreter_process, target_of

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_SASS = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P[T0-9]+ )?\s*([A-Z][A-Z0-9_]*)([.A-Za-z0-9_]*)\s*([^;]*);")
_SASS_WIDTH = re.compile(r"\.[US]?(8|16|64|128|256)(?:\.|$)")
_AMD_INSTRUCTION = re.compile(r"^\s+([a-z][a-z0-9_]+)\s*([^;]*)")
_AMD_LABEL = re.compile(r"^(\.L\w+):")
_AMD_ACCESS = re.compile(r"(?:global|buffer|flat)_(load|store)_(\w+)")
_AMD_BITS = {
    "dword": 32,
    "dwordx2": 64,
    "dwordx3": 96,
    "dwordx4": 128,
    "b32": 32,
    "b64": 64,
    "b96": 96,
    "b128": 128,
}


@dataclass(frozen=True)
class SmLimits:
    """What one streaming multiprocessor holds at once."""

    warps: int
    blocks: int
    shared_bytes: int
    registers: int = 65536


SM_LIMITS = {
    80: SmLimits(64, 32, 167936),
    86: SmLimits(48, 16, 102400),
    89: SmLimits(48, 24, 102400),
    90: SmLimits(64, 32, 233472),
    100: SmLimits(64, 32, 233472),
    103: SmLimits(64, 32, 233472),
    120: SmLimits(48, 24, 102400),
}


@dataclass(frozen=True)
class Occupancy:
    """Blocks and warps of a kernel that fit onto one multiprocessor, and what limits them."""

    blocks: int
    warps: int
    fraction: float
    limiter: str


@dataclass(frozen=True)
class KernelSignature:
    """A kernel to compile without a launch.

    Attributes
    ----------
    types : Triton's type by parameter name, such as ``*bf16`` or ``i32``; constexprs are left out
    constants : constexpr values by parameter name
    divisible : parameters whose value or address is a multiple of 16
    """

    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Loop:
    """An innermost loop: its instructions and the bytes one thread moves per turn."""

    instructions: int
    opcodes: Counter[str]
    load_bytes: int
    store_bytes: int

    def instructions_per_element(self, element_bytes: int) -> float:
        """Instructions a loaded element costs; infinite for a loop that loads nothing."""
        return self.instructions * element_bytes / self.load_bytes if self.load_bytes else math.inf


@dataclass(frozen=True)
class KernelReport:
    """Static facts about one compiled kernel.

    Attributes
    ----------
    registers : a thread (VGPRs on AMD)
    spills : 4-byte words spilled to memory, or vector registers on AMD; 0 is the only good value
    stack_bytes : a thread; the private segment on AMD
    load_bits, store_bits : instructions that access global memory, by width
    """

    name: str
    target: str
    num_warps: int
    registers: int
    spills: int
    stack_bytes: int
    shared_bytes: int
    instructions: int
    opcodes: Counter[str]
    load_bits: Counter[int]
    store_bits: Counter[int]
    loops: list[Loop]
    scalar_registers: int | None = None
    occupancy: Occupancy | None = None

    @property
    def loading_loop(self) -> Loop | None:
        """The innermost loop that loads most bytes a turn."""
        return max(self.loops, key=lambda loop: loop.load_bytes, default=None)


def compile_for(what: Launch | KernelSignature, target: str) -> Any:
    """Compile a recorded launch, or a signature, for a target.

    Parameters
    ----------
    what : Launch or KernelSignature
        A launch is specialised anew from its arguments, as a launch on the target would be.
    target : str
        ``sm_90``, ``gfx942`` and the like.

    Returns
    -------
    CompiledKernel
    """
    if is_interpreter_process():
        raise RuntimeError("compile_for needs the compiler: unset TRITON_INTERPRET for this process")
    if isinstance(what, Launch):
        with device(f"compile:{target}"):
            return what.kernel.run(*what.arguments, grid=what.grid, warmup=True, **what.keywords)
    kernel = what.kernel
    signature = {name: what.types.get(name, "constexpr") for name in kernel.arg_names}
    constants = {(kernel.arg_names.index(name),): value for name, value in what.constants.items()}
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in what.divisible}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    with device(f"compile:{target}"):
        return triton.compile(source, target=target_of(target), options=dict(what.options))


def report(compiled: Any) -> KernelReport:
    """Read a compiled kernel, for an NVIDIA or an AMD target."""
    if compiled.metadata.target.backend == "hip":
        return _amd_report(compiled)
    return _nvidia_report(compiled)


def occupancy(arch: int, registers: int, shared_bytes: int, num_warps: int) -> Occupancy:
    """Blocks of a kernel that fit onto one multiprocessor."""
    limits = SM_LIMITS[arch]
    registers_per_warp = math.ceil(max(registers, 1) * 32 / 256) * 256
    # Four partitions share the register file; the warps of a block are spread over them.
    warps_by_registers = limits.registers // 4 // registers_per_warp * 4
    # CUDA keeps 1 KiB a block to itself.
    shared_per_block = math.ceil((shared_bytes + 1024) / 128) * 128
    blocks, limiter = min(
        (warps_by_registers // num_warps, "registers"),
        (limits.shared_bytes // shared_per_block, "shared memory"),
        (limits.warps // num_warps, "warps"),
        (limits.blocks, "blocks"),
    )
    warps = blocks * num_warps
    return Occupancy(blocks, warps, warps / limits.warps, limiter)


# -- NVIDIA


def _nvidia_report(compiled: Any) -> KernelReport:
    arch = compiled.metadata.target.arch
    num_warps = compiled.metadata.num_warps
    usage = _ptxas_usage(compiled.asm["ptx"], arch)
    code = _sass(compiled.asm["cubin"])
    return KernelReport(
        name=compiled.metadata.name,
        target=f"sm_{arch}",
        num_warps=num_warps,
        registers=usage["registers"],
        spills=(usage["spill_stores"] + usage["spill_loads"]) // 4,
        stack_bytes=usage["stack"],
        shared_bytes=compiled.metadata.shared,
        instructions=len(code),
        opcodes=Counter(opcode.partition(".")[0] for _, opcode, _ in code),
        load_bits=_sass_widths(code, ("LDG", "LDGSTS")),
        store_bits=_sass_widths(code, ("STG",)),
        loops=_sass_loops(code),
        occupancy=occupancy(arch, usage["registers"], compiled.metadata.shared, num_warps)
        if arch in SM_LIMITS
        else None,
    )


def _ptxas_usage(ptx: str, arch: int) -> dict[str, int]:
    """Registers, stack and spill bytes: the cubin itself does not tell spills from arrays."""
    from triton.backends.nvidia.compiler import get_ptxas

    name = re.search(r"\.target (sm_\w+)", ptx)[1]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [
            get_ptxas(arch).path,
            "-v",
            f"--gpu-name={name}",
            str(source),
            "-o",
            str(source.with_suffix(".o")),
        ]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    stack, spill_stores, spill_loads = (int(number) for number in frame.groups())
    registers = int(re.search(r"Used (\d+) registers", log)[1])
    return {
        "registers": registers,
        "stack": stack,
        "spill_stores": spill_stores,
        "spill_loads": spill_loads,
    }


def _sass(cubin: bytes) -> list[tuple[int, str, str]]:
    """(address, opcode with its suffixes, operands) of every instruction."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(_TOOLS / "cuobjdump"), "-sass", str(path)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [(int(at, 16), opcode + suffix, rest.strip()) for at, opcode, suffix, rest in _SASS.findall(text)]


def _sass_bits(opcode: str) -> int:
    match = _SASS_WIDTH.search(opcode)
    return int(match[1]) if match else 32


def _sass_widths(code: list[tuple[int, str, str]], names: tuple[str, ...]) -> Counter[int]:
    return Counter(_sass_bits(opcode) for _, opcode, _ in code if opcode.partition(".")[0] in names)


def _sass_loops(code: list[tuple[int, str, str]]) -> list[Loop]:
    index_of = {address: index for index, (address, _, _) in enumerate(code)}
    spans = []
    for index, (address, opcode, rest) in enumerate(code):
        targets = re.findall(r"0x([0-9a-f]+)", rest)
        if opcode.partition(".")[0] == "BRA" and targets:
            target = int(targets[-1], 16)
            # A branch to itself is the padding behind the kernel.
            if target < address and target in index_of:
                spans.append((index_of[target], index))
    loops = []
    for first, last in _innermost(spans):
        body = code[first : last + 1]
        loops.append(
            Loop(
                instructions=len(body),
                opcodes=Counter(opcode.partition(".")[0] for _, opcode, _ in body),
                load_bytes=_total_bytes(_sass_widths(body, ("LDG", "LDGSTS"))),
                store_bytes=_total_bytes(_sass_widths(body, ("STG",))),
            )
        )
    return loops


def _innermost(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    # Several branches back to one place are one loop: it ends with the last of them.
    ends: dict[int, int] = {}
    for first, last in spans:
        ends[first] = max(last, ends.get(first, last))
    spans = list(ends.items())
    return [
        span
        for span in spans
        if not any(other != span and span[0] <= other[0] and other[1] <= span[1] for other in spans)
    ]


def _total_bytes(widths: Counter[int]) -> int:
    return sum(bits * count for bits, count in widths.items()) // 8


# -- AMD


def _amd_report(compiled: Any) -> KernelReport:
    text = compiled.asm["amdgcn"]
    code, labels = _amd_code(text)
    return KernelReport(
        name=compiled.metadata.name,
        target=compiled.metadata.target.arch,
        num_warps=compiled.metadata.num_warps,
        registers=_amd_number(text, "vgpr_count"),
        scalar_registers=_amd_number(text, "sgpr_count"),
        # Scalar registers spill to lanes of vector registers, which is no memory traffic.
        spills=_amd_number(text, "vgpr_spill_count"),
        stack_bytes=_amd_number(text, "private_segment_fixed_size"),
        shared_bytes=compiled.metadata.shared,
        instructions=len(code),
        opcodes=Counter(opcode for opcode, _ in code),
        load_bits=_amd_widths(code, "load"),
        store_bits=_amd_widths(code, "store"),
        loops=_amd_loops(code, labels),
    )


def _amd_number(text: str, name: str) -> int:
    """A number from the kernel's metadata, which follows the code."""
    return int(re.findall(rf"^\s*-?\s*\.{name}:\s*(\d+)", text, re.M)[-1])


def _amd_code(text: str) -> tuple[list[tuple[str, str]], dict[str, int]]:
    code = []
    labels = {}
    for line in text.partition(".section\t.rodata")[0].splitlines():
        label = _AMD_LABEL.match(line)
        if label:
            labels[label[1]] = len(code)
            continue
        match = _AMD_INSTRUCTION.match(line)
        if match:
            code.append((match[1], match[2].strip()))
    return code, labels


def _amd_widths(code: list[tuple[str, str]], kind: str) -> Counter[int]:
    widths: Counter[int] = Counter()
    for opcode, _ in code:
        match = _AMD_ACCESS.match(opcode)
        if match and match[1] == kind:
            name = match[2].removeprefix("lds_")
            small = 8 if name.endswith(("byte", "u8", "i8")) or "byte" in name else 16
            widths[_AMD_BITS.get(name, small)] += 1
    return widths


def _amd_loops(code: list[tuple[str, str]], labels: dict[str, int]) -> list[Loop]:
    spans = []
    for index, (opcode, operands) in enumerate(code):
        if opcode.startswith(("s_branch", "s_cbranch")) and labels.get(operands, index + 1) <= index:
            spans.append((labels[operands], index))
    loops = []
    for first, last in _innermost(spans):
        body = code[first : last + 1]
        loops.append(
            Loop(
                instructions=len(body),
                opcodes=Counter(opcode for opcode, _ in body),
                load_bytes=_total_bytes(_amd_widths(body, "load")),
                store_bytes=_total_bytes(_amd_widths(body, "store")),
            )
        )
    return loops
