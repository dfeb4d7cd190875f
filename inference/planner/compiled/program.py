"""What a compiled program asks of its device and of the host, counted in XLA's own text of it: how
many operations run one after another, by part of the model, where the host waits, what leaves.

The text is `jax.stages.Compiled.as_text()`; the device need not be there, nor jax be loaded.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping

PARTS = ("embed", "norm", "qkv", "attend", "out", "ffn", "head", "sample")  # scopes in op_name
OTHER = "other"  # what carries none of these names

# Neither computes nor moves anything, or (a start and its done) beside what runs meanwhile.
_NO_WORK = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "opt-barrier", "optimization-barrier",
}  # fmt: skip
_NO_WORK_TARGETS = {
    "AllocateBuffer", "ConcatBitcast", "PrepareAsyncCallStart", "PrepareAsyncCallDone",
}  # fmt: skip
_CALLS = {"call": "to_apply", "while": "body|condition", "conditional": r"\w+_computations?"}
_COLLECTIVES = (
    "all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute",
    "ragged-all-to-all", "collective-broadcast",
)  # fmt: skip
_SCATTERS = "calls=%all-reduce-scatter"  # a TPU's fusion that sums, and keeps a part
_ARRAY = r"([a-z]+)(\d*)[a-z\d]*\[([\d,]*)\]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction that the device runs, outside of fusions and kernels."""

    name: str
    opcode: str  # 'fusion', 'custom-call', 'copy-start', ...
    shape: str  # of its result, as XLA writes it; '((operands), results)' of a fused exchange
    op_name: str  # path of JAX's scopes and of the primitive; '' where XLA wrote none
    text: str  # the whole line

    @property
    def collective(self) -> str | None:
        """The kind of collective, 'all-reduce' and so on; None for other instructions and for the
        end of an asynchronous one.
        """
        kind = self.opcode.removesuffix("-start")
        return kind if kind in _COLLECTIVES else None

    @property
    def collective_bytes(self) -> int:
        """Bytes of what chips exchange together, on one of them: of the operand or of the result,
        whichever is larger. 0 for other instructions.
        """
        if not self.collective:
            return 0
        arrays = [match[0] for match in re.finditer(_ARRAY, self.shape)]
        begins = self.opcode.endswith("-start") and self.collective != "all-reduce"
        if begins or self.shape.startswith("(("):  # newer XLAs', and fused ones
            arrays = [array for array in arrays if "[]" not in array]  # numbers of the exchange
            sizes = [num_bytes(array) for array in arrays]
            half = len(sizes) // 2  # operands, results
            return max(sum(sizes[:half]), sum(sizes[half:]))
        sizes = [num_bytes(array) for array in arrays]
        scattered = self.collective == "reduce-scatter"
        return sum(sizes) * (self._group_size if scattered else 1)

    @property
    def _group_size(self) -> int:
        """Chips that exchange with each other."""
        if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", self.text):
            return listed[1].count(",") + 1
        if match := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", self.text):
            sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
            return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", match[2]))
        counted = re.search(r"replica_groups=\[\d+,(\d+)\]", self.text)
        return int(counted[1]) if counted else 1

    @property
    def estimated_cycles(self) -> int:
        """Cycles, as far as the compiler wrote them: TPUs' does, but for kernels."""
        match = re.search(r'"estimated_cycles":"(\d+)"', self.text)
        return int(match[1]) if match else 0

    @property
    def part(self) -> str:
        """The innermost of `PARTS` in its name, else `OTHER`."""
        scopes = reversed(self.op_name.split("/"))
        return next((scope for scope in scopes if scope in PARTS), OTHER)

    @property
    def is_launch(self) -> bool:
        """Whether the device takes it up as a piece of work of its own: a kernel on a GPU, an
        operation of the core's program on a TPU. Collectives are no launches, and asynchronous
        copies run beside others.
        """
        if self.opcode in _NO_WORK or self.opcode in _CALLS or self.collective:
            return False
        if self.opcode.endswith(("-start", "-done", "-update")):
            return self.opcode == "call-start"
        if re.search(r"\w\[(?:\d+,)*0(?:,\d+)*\]", self.shape.split(")")[0]):
            return False  # without elements
        target = re.search(r'custom_call_target="([^"]*)"', self.text)
        return target is None or target[1] not in _NO_WORK_TARGETS


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """Counts of one executable.

    Attributes:
        launches: by part, each of a branch and of a loop's body once.
        collectives: instructions by kind. What brings home the rows that a scatter of padded parts
            leaves with a neighbour belongs to the scatter.
        collective_bytes: of them, a chip's, by kind (`Instruction.collective_bytes`).
        num_hidden: of the collectives, those between whose start and end other work is launched.
        argument_bytes: a chip's, by the names that the function gives its arguments; without what
            the device pads them with.
        estimated_cycles: as far as the compiler wrote them; a loop's body once.
        num_conditionals: at each of which a GPU's host waits until the device has reached it.
        num_loops: outside of kernels, whatever their trip counts.
        num_outputs: arrays that the caller gets and that are not those that it donated: so many
            copies take them to the host.
    """

    launches: Mapping[str, int]
    collectives: Mapping[str, int]
    collective_bytes: Mapping[str, int]
    num_hidden: int
    argument_bytes: Mapping[str, int]
    estimated_cycles: int
    num_conditionals: int
    num_loops: int
    num_outputs: int


def read(text: str) -> CompiledProgram:
    """Counts the instructions of an executable's text."""
    listed = list(instructions(text))
    launches = Counter(instruction.part for instruction in listed if instruction.is_launch)
    opcodes = Counter(instruction.opcode for instruction in listed)
    kinds = Counter(instruction.collective for instruction in listed if instruction.collective)
    exchanged = dict.fromkeys(kinds, 0)
    for instruction in listed:
        if instruction.collective:
            exchanged[instruction.collective] += instruction.collective_bytes
    return CompiledProgram(
        {part: launches[part] for part in (*PARTS, OTHER) if launches[part]},
        dict(kinds),
        exchanged,
        _num_hidden(listed),
        _argument_bytes(text),
        sum(instruction.estimated_cycles for instruction in listed),
        opcodes["conditional"],
        opcodes["while"],
        _num_outputs(text),
    )


def _num_hidden(listed: list[Instruction]) -> int:
    """Collectives behind which something else runs."""
    begun: dict[str, bool] = {}  # whether anything was launched since, by name
    for instruction in listed:
        if instruction.is_launch:
            begun = dict.fromkeys(begun, True)
        elif instruction.collective and instruction.opcode.endswith("-start"):
            begun[instruction.name] = False
        elif instruction.opcode.endswith("-done"):
            (operand,) = re.findall(r"-done\([^%]*%([\w.-]+)", instruction.text)[:1] or ("",)
            if operand in begun and not begun[operand]:
                del begun[operand]
    return sum(begun.values())


def instructions(text: str) -> Iterator[Instruction]:
    """Those of the entry computation, and in their place those of loops, branches and calls."""
    yield from _reached(_entry(text), dict(_computations(text)))


def num_bytes(array: str) -> int:
    """Bytes of an array as XLA writes it ('bf16[8,128]'), without padding."""
    match = re.fullmatch(_ARRAY, array)
    assert match is not None, array
    elements = math.prod(int(size) for size in match[3].split(",") if size)
    return -(-elements * (8 if match[1] == "pred" else int(match[2] or 0)) // 8)


def _argument_bytes(text: str) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for line in dict(_computations(text))[_entry(text)]:
        instruction = _parsed(line)
        if instruction.opcode == "parameter":
            shape = instruction.shape.split("{")[0]
            sizes[re.split(r"[^a-z_]", instruction.op_name)[0]] += num_bytes(shape)
    return dict(sizes)


def _entry(text: str) -> str:
    (entry,) = re.findall(r"^ENTRY %?([\w.-]+)", text, re.MULTILINE)
    return str(entry)


def _reached(name: str, computations: Mapping[str, list[str]]) -> Iterator[Instruction]:
    padded: set[str] = set()  # fused scatters, and slices of them
    for line in computations[name]:
        instruction = _parsed(line)
        if instruction.opcode == "call-start":  # of a core beside: a 7x exchanges there
            inner = [
                nested
                for callee in _called(line, "to_apply")
                for nested in _reached(callee, computations)
            ]
            if any(nested.collective for nested in inner):
                yield from inner
                continue
        if instruction.opcode == "fusion":
            for callee in _called(line, "calls"):
                instruction = _fused_exchange(instruction, computations[callee]) or instruction
        if _SCATTERS in line:
            padded.add(instruction.name)
        elif padded and padded.intersection(re.findall(r"%([\w.-]+)", line)):
            if instruction.opcode == "slice":
                padded.add(instruction.name)
            elif instruction.opcode == "collective-permute-start":
                continue
        yield instruction
        if attribute := _CALLS.get(instruction.opcode):
            for callee in _called(line, attribute):
                yield from _reached(callee, computations)


def _fused_exchange(fusion: Instruction, lines: list[str]) -> Instruction | None:
    """The collective that a fusion stands for, None where it is none or has work beside it. A TPU's
    fusion can keep a part of sums; or begin what others with work of their own carry on and another
    ends, each of which shows the whole collective, under the number of their chain.
    """
    inside = {instruction.name: instruction for instruction in map(_parsed, lines)}
    inner = next((instruction for instruction in inside.values() if instruction.collective), None)
    if inner is None:
        return None
    name, opcode, result = fusion.name, inner.opcode, inner.shape
    (operand,) = re.findall(rf" {opcode}\(%([\w.-]+)", inner.text)
    if chain := re.search(r'chain_id="(\d+)"', inner.text):
        limit = re.search(r"AsyncCollective(Start|Done)", "".join(lines))
        if limit is None:
            return None
        name, opcode = f"chain.{chain[1]}", f"{opcode}-{limit[1].lower()}"
    elif _SCATTERS in fusion.text:  # its operand is padded first
        opcode, operand, result = "reduce-scatter", next(iter(inside)), fusion.shape
    shape = f"(({inside[operand].shape}), {result})"
    return Instruction(name, opcode, shape, inner.op_name, f"%{fusion.name} = {opcode}(%{name})")


def _called(line: str, attribute: str) -> Iterator[str]:
    """Names of the computations that an instruction runs."""
    for called in re.findall(rf"\b(?:{attribute})=(\{{[^}}]*\}}|%[\w.-]+)", line):
        yield from re.findall(r"%([\w.-]+)", called)


def _computations(text: str) -> Iterator[tuple[str, list[str]]]:
    """Names of all computations, and the lines of their instructions."""
    heads = r"^(?:ENTRY )?%?([\w.-]+) \([^\n]*\{\n(.*?)\n\}"
    for head in re.finditer(heads, text, re.MULTILINE | re.DOTALL):
        yield head[1], [line.strip() for line in head[2].splitlines() if " = " in line]


def _parsed(line: str) -> Instruction:
    name, value = line.removeprefix("ROOT ").split(" = ", 1)
    length = _balanced(value) if value.startswith("(") else value.index(" ")
    opcode = value[length:].strip().split("(", 1)[0]
    op_name = re.search(r'op_name="([^"]*)"', line)
    return Instruction(
        name.lstrip("%"), opcode, value[:length], op_name[1] if op_name else "", line
    )


def _balanced(value: str) -> int:
    """Length of the parenthesis that a line begins with."""
    depth = 0
    for at, character in enumerate(value):
        depth += (character == "(") - (character == ")")
        if not depth:
            return at + 1
    raise ValueError(f"no instruction: {value}")


def _num_outputs(text: str) -> int:
    """Results of the entry computation that alias no parameter."""
    header = text.split("\n", 1)[0]
    aliased = len(re.findall(r"\{\d*\}: \(\d+, ", header))
    layout = header.split("entry_computation_layout={", 1)[1]
    result = layout[_balanced(layout) :].removeprefix("->")
    if not result.startswith("("):
        return 1 - aliased
    return len(re.findall(r"\w+\[[\d,]*\]", result[: _balanced(result)])) - aliased
