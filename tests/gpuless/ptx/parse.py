"""PTX text to a `Program`: instructions, labels, parameters, registers, source lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

REGISTER_BITS = {
    "pred": 1,
    "b8": 8,
    "b16": 16,
    "u16": 16,
    "s16": 16,
    "f16": 16,
    "b32": 32,
    "u32": 32,
    "s32": 32,
    "f32": 32,
    "b64": 64,
    "u64": 64,
    "s64": 64,
    "f64": 64,
}

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)\{", re.S)
_LABEL = re.compile(r"([$\w]+):(?!:)")
_LINE_DIRECTIVE = re.compile(r"\.(loc|file|section)\b[^\n]*")
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
_REGISTER_DECLARATION = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.S)
_NUMBERED = re.compile(r"(%[A-Za-z_]+)(\d+)$")
_WORD = re.compile(r"[%$\w]+")
_PREDICATE = re.compile(r"@(!?)([%\w#$]+)\s+")


class PtxError(AssertionError):
    """A fault that the emulator found in a kernel, or an instruction that it does not know."""


@dataclass(slots=True)
class Instruction:
    """One PTX instruction, split into its parts."""

    opcode: str
    modifiers: list[str]
    operands: list[str]
    predicate: str | None
    negated: bool
    where: str
    text: str


@dataclass
class Program:
    """One kernel's PTX.

    Attributes
    ----------
    parameters : names and types of the entry's parameters, in order
    threads : threads of one CTA
    constants : names and initial bytes of module-level arrays
    registers : index of every register name that occurs
    register_bits : width of every register, by index
    """

    name: str
    parameters: list[tuple[str, str]]
    threads: int
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    constants: dict[str, bytes] = field(default_factory=dict)
    registers: dict[str, int] = field(default_factory=dict)
    register_bits: list[int] = field(default_factory=list)
    declared_bits: dict[str, int] = field(default_factory=dict)

    def register(self, name: str) -> int | None:
        """Index of a register, or None when the name is not a declared register."""
        index = self.registers.get(name)
        if index is not None:
            return index
        bits = self.declared_bits.get(name)
        if bits is None:
            numbered = _NUMBERED.match(name)
            bits = self.declared_bits.get(numbered[1] + "<") if numbered else None
        if bits is None:
            return None
        index = self.registers[name] = len(self.register_bits)
        self.register_bits.append(bits)
        return index


def split_operands(text: str) -> list[str]:
    """Split at the commas outside braces and brackets."""
    parts = []
    depth = 0
    start = 0
    for position, character in enumerate(text):
        if character in "{[(":
            depth += 1
        elif character in "}])":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]


def parse(ptx: str) -> Program:
    """Parse the PTX of one Triton kernel."""
    files = {int(n): name for n, name in re.findall(r'\.file\s+(\d+)\s+"([^"]+)"', ptx)}
    ptx = _COMMENT.sub("", ptx)
    entry = _ENTRY.search(ptx)
    if entry is None:
        raise PtxError("no .entry in this PTX")
    threads = re.search(r"\.reqntid\s+(\d+)", entry[3])
    program = Program(
        name=entry[1],
        parameters=[_parameter(text) for text in split_operands(entry[2])],
        threads=int(threads[1]) if threads else 128,
        constants=_constants(ptx[: entry.start()]),
    )
    _parse_body(program, ptx, entry.end(), files)
    return program


def _parameter(text: str) -> tuple[str, str]:
    return text.split()[-1], re.search(r"\.([busf]\d+)\b", text)[1]


def _constants(header: str) -> dict[str, bytes]:
    pattern = re.compile(r"\.(?:global|const)[^;={]*\.[busf](\d+)\s+([\w$]+)\[\d*\]\s*=\s*\{(.*?)\}", re.S)
    constants = {}
    for bits, name, values in pattern.findall(header):
        size = int(bits) // 8
        numbers = [int(value.strip(), 0) % (1 << 8 * size) for value in values.split(",")]
        constants[name] = b"".join(number.to_bytes(size, "little") for number in numbers)
    return constants


def _statements(ptx: str, position: int) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) up to the brace that closes the kernel's body."""
    depth = 1
    while True:
        while ptx[position].isspace():
            position += 1
        if ptx[position] == "{":
            depth += 1
            position += 1
            yield "open", ""
            continue
        if ptx[position] == "}":
            depth -= 1
            position += 1
            if depth == 0:
                return
            yield "close", ""
            continue
        match = _LINE_DIRECTIVE.match(ptx, position)
        if match:
            position = match.end()
            if match[1] == "loc":
                yield "loc", match[0]
            continue
        match = _LABEL.match(ptx, position)
        if match:
            position = match.end()
            yield "label", match[1]
            continue
        end = ptx.index(";", position)
        text = " ".join(ptx[position:end].split())
        position = end + 1
        if text.startswith(".reg"):
            yield "reg", text
        elif text and not text.startswith("."):
            yield "instruction", text


def _parse_body(program: Program, ptx: str, position: int, files: dict[int, str]) -> None:
    # Inline assembly may declare registers of its own between braces: those get a name of
    # their own.
    scopes: list[dict[str, str]] = [{}]
    serial = 0
    where = "unknown line"
    for kind, text in _statements(ptx, position):
        if kind == "open":
            scopes.append(dict(scopes[-1]))
        elif kind == "close":
            scopes.pop()
        elif kind == "label":
            program.labels[text] = len(program.instructions)
        elif kind == "loc":
            file, line = _LOC.match(text).groups()
            where = f"{files.get(int(file), '?')}:{line}"
        elif kind == "reg":
            bits_name, names = _REGISTER_DECLARATION.match(text).groups()
            for name in names.split(","):
                serial += 1
                _declare(program, scopes, name.strip(), REGISTER_BITS.get(bits_name, 128), serial)
        else:
            local = scopes[-1]
            if local:
                text = _WORD.sub(lambda match, local=local: local.get(match[0], match[0]), text)
            program.instructions.append(_instruction(text, where))


def _declare(program: Program, scopes: list[dict[str, str]], name: str, bits: int, serial: int) -> None:
    if "<" in name:
        program.declared_bits[name.partition("<")[0] + "<"] = bits
        return
    unique = name if len(scopes) == 1 else f"{name}#{serial}"
    if unique != name:
        scopes[-1][name] = unique
    program.declared_bits[unique] = bits


def _instruction(text: str, where: str) -> Instruction:
    original = text
    predicate = None
    negated = False
    match = _PREDICATE.match(text)
    if match:
        predicate = match[2]
        negated = match[1] == "!"
        text = text[match.end() :]
    name, _, rest = text.partition(" ")
    opcode, *modifiers = name.split(".")
    return Instruction(opcode, modifiers, split_operands(rest), predicate, negated, where, original)
