"""What Mosaic compiled a Hopper kernel to: its machine code, its launch, and what it reads early.

`MOSAIC_GPU_DUMP_TO` names a folder for what a compilation passes through. Of each kernel this reads
`.sass_ctrl` (nvdisasm), `.ptxas`, `.ptx` and two modules of `.mlir-passes.log`. Mosaic compiles a
kernel once in a process and dumps nothing of it the second time.
"""

import bisect
import collections
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

MULTIPROCESSORS = 132  # of an H100 and an H200
_REGISTERS, _SHARED_BYTES, _THREADS, _BLOCKS = 1 << 16, 228 << 10, 2048, 32  # of a multiprocessor
_RESERVED_BYTES = 1 << 10  # of shared memory, by each block


class Loop(NamedTuple):
    """The instructions of the smallest loop that has a wgmma; of the whole kernel without one."""

    instructions: list[str]

    @property
    def counts(self) -> collections.Counter[str]:
        """Instructions by opcode, such as "LDS.U16"."""
        opcodes = (re.sub(r"^@!?U?P\w+\s+", "", text) for text in self.instructions)
        return collections.Counter(text.split(" ")[0] for text in opcodes)

    @property
    def products(self) -> int:
        """wgmma instructions: 64 x 16 elements of the operand with 64 rows each."""
        return sum(opcode.startswith("HGMMA") for opcode in self.counts.elements())

    @property
    def shared_load_bits(self) -> int | None:
        """Bits of the narrowest shared load of a thread; None without one. LDSM loads matrices."""
        widths = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128}
        loads = [opcode.split(".")[1:] for opcode in self.counts if re.match(r"LDS(\.|$)", opcode)]
        return min((widths.get(parts[0], 32) if parts else 32 for parts in loads), default=None)


class Kernel(NamedTuple):
    """A compiled kernel.

    Attributes:
        registers: of a thread.
        stack_bytes, spilled_bytes: of a thread, in local memory.
        blocks, threads: of the grid, and of a block.
        shared_bytes: dynamic, of a block.
        filled_bytes: of these, what TMA copies of a loop fill, all stages; of all copies where no
            loop has one.
        operand_shapes: as "32x128", None of what is not read; outputs come last.
        early: operands that some path reads or writes before `griddepcontrol.wait`; None where
            nothing waits.
    """

    name: str
    loop: Loop
    registers: int
    stack_bytes: int
    spilled_bytes: int
    blocks: int
    threads: int
    shared_bytes: int
    filled_bytes: int
    operand_shapes: tuple[str | None, ...]
    early: frozenset[int] | None

    @property
    def resident_blocks(self) -> int:
        """Blocks that a multiprocessor has room for at once."""
        registers = -(-self.registers // 8) * 8 * self.threads
        return min(
            _REGISTERS // registers, _THREADS // self.threads, _BLOCKS,
            _SHARED_BYTES // (self.shared_bytes + _RESERVED_BYTES),
        )  # fmt: skip

    @property
    def busy_share(self) -> float:
        """Share of a device's places for blocks that the waves of the grid occupy."""
        places = MULTIPROCESSORS * self.resident_blocks
        return self.blocks / (math.ceil(self.blocks / places) * places)

    @property
    def bytes_in_flight(self) -> int:
        """Of a full multiprocessor, at most."""
        return self.resident_blocks * self.filled_bytes

    def takes(self, shapes: Sequence[str]) -> bool:
        """Whether its operands have these shapes, the outputs aside."""
        pairs = zip(self.operand_shapes, shapes, strict=False)
        return all(expected in (None, shape) for expected, shape in pairs)

    def __str__(self) -> str:
        loop = self.loop
        early = f"operands {sorted(self.early)} before" if self.early is not None else "without"
        return (
            f"{self.name}: {len(loop.instructions)} instructions and {loop.products} wgmma a loop, "
            f"narrowest shared load {loop.shared_load_bits} bits; {self.registers} registers, "
            f"{self.stack_bytes} bytes of stack, {self.spilled_bytes} spilled; {self.blocks} blocks"
            f" of {self.threads} threads, {self.resident_blocks} resident, {self.busy_share:.0%} "
            f"of places busy, {self.bytes_in_flight >> 10} KiB in flight; {early} a wait"
        )


def kernels(folder: Path) -> list[Kernel]:
    """What was dumped, by name."""
    return [_kernel(path) for path in sorted(folder.glob("*.sass_ctrl"))]


def _kernel(path: Path) -> Kernel:
    report = path.with_suffix(".ptxas").read_text()
    stack, stored, loaded = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report
    ).groups()
    whole, outlined = _modules(path.with_suffix(".mlir-passes.log"))
    launch_at, launch = next(
        (at, match) for at, line in enumerate(outlined.lines) if (match := re.search(
            r"gpu\.launch_func .*blocks in \((.*?)\) threads in \((.*?)\)"
            r"\s+dynamic_shared_memory_size (\S+) args\((.*?)\)", line,
        ))
    )  # fmt: skip
    blocks, threads = (
        math.prod(outlined.constant(size, launch_at) for size in sizes.split(", "))
        for sizes in launch.groups()[:2]
    )
    shapes = {}
    for line in whole.lines:
        if match := re.search(r"to memref<([\dx]*)x\w+[,>].*from_kernel_arg_idx = (\d+)", line):
            shapes[int(match[2])] = match[1]
    parameters = _operands(outlined, re.findall(r"(%[\w.-]+) : (\S+)", launch[4]), launch_at)
    return Kernel(
        re.sub(r"_\d+$", "", path.stem), _loop(path.read_text()),
        int(re.search(r"Used (\d+) registers", report)[1]), int(stack), int(stored) + int(loaded),
        blocks, threads, outlined.constant(launch[3], launch_at), _filled_bytes(whole),
        tuple(shapes.get(index) for index in range(max(shapes) + 1)),
        _early(path.with_suffix(".ptx").read_text(), parameters),
    )  # fmt: skip


def reachable(targets: dict[int, int], ends: set[int], stops: set[int]) -> set[int]:
    """Instructions that run before any of `stops`, on some path from the first.

    Args:
        targets: of branches.
        ends: instructions that the next one does not follow.
    """
    visited: set[int] = set()
    waiting = [0]
    while waiting:
        at = waiting.pop()
        if at not in visited and at not in stops:
            visited.add(at)
            waiting += [targets[at]] if at in targets else []
            waiting += [] if at in ends else [at + 1]
    return visited


# --- machine code ---------------------------------------------------------------------------------


def _loop(text: str) -> Loop:
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if match := re.match(r"\s*(\.L_\w+):", line):
            labels[match[1]] = len(instructions)
        elif match := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*\S)", line):
            instructions.append(match[1])
    targets = {
        at: labels[match[1]]
        for at, text in enumerate(instructions)
        if (match := re.search(r"\bBRA\b.*`\((\.L_\w+)\)", text))
    }
    ends = {at for at, text in enumerate(instructions) if re.match(r"(EXIT|BRA)\b", text)}
    bodies = [
        instructions[start : at + 1]
        for at, start in targets.items()
        # Where a barrier is tested again, a jump goes back into a loop that it is no part of.
        if start < at and at not in reachable(targets, ends, {start, len(instructions)})
    ]
    with_products = [body for body in bodies if any("HGMMA" in text for text in body)]
    return Loop(min(with_products or [instructions], key=len))


# --- MLIR -----------------------------------------------------------------------------------------


class _Module:
    """A module's lines and its values. Regions beside each other use the same names."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        self._defined_at: dict[str, list[int]] = collections.defaultdict(list)
        for at, line in enumerate(lines):
            if match := re.match(r"\s*(%[\w.-]+)(?::\d+)? = ", line):
                self._defined_at[match[1]].append(at)

    def constant(self, name: str, at: int) -> int:
        definition = self.lines[self._definition(name, at)]
        return int(re.search(r"constant(?:\((?=\d)| )(-?\d+)", definition)[1])

    def origins(self, name: str, at: int, pattern: str) -> set[int]:
        """Lines that match a pattern and that a value, used in line `at`, is computed from."""
        matches, visited, uses = set(), set(), [(name, at)]
        while uses:
            at = self._definition(*uses.pop())
            if at in visited or at < 0:
                continue
            visited.add(at)
            if re.search(pattern, self.lines[at]):
                matches.add(at)
            else:
                right = self.lines[at].partition(" = ")[2].partition(" : ")[0]
                uses += [(name, at) for name in re.findall(r"%[\w.-]+", right)]
        return matches

    def is_in_loop(self, at: int) -> bool:
        """Whether a line is within a loop, by the lines that are indented less."""
        indent = len(self.lines[at])
        for line in reversed(self.lines[: at + 1]):
            if 0 < (spaces := len(line) - len(line.lstrip())) < indent:
                indent = spaces
                if re.search(r"scf\.(for|while)|\} do \{", line):
                    return True
        return False

    def _definition(self, name: str, at: int) -> int:
        """The line that defines what line `at` calls by a name; -1 for an argument."""
        places = self._defined_at[name]
        index = bisect.bisect_left(places, at)
        return places[index - 1] if index else -1


def _modules(path: Path) -> tuple[_Module, _Module]:
    """Before any pass, and where the kernel has become a function."""
    with path.open() as lines:
        dumps = _dumps(lines)
        whole = next(dumps)
        outlined = next(dump for dump in dumps if any("gpu.launch_func " in line for line in dump))
    return _Module(whole), _Module(outlined)


def _dumps(lines: Iterable[str]) -> Iterator[list[str]]:
    """The module before each pass."""
    dump: list[str] = []
    for line in lines:
        if line.startswith("// -----// IR Dump") and dump:
            yield dump
            dump = []
        dump.append(line.rstrip("\n"))


def _filled_bytes(module: _Module) -> int:
    """Bytes of the arrays in shared memory that TMA copies write: views of it at an offset."""
    views: dict[bool, dict[int, int]] = {True: {}, False: {}}
    for at, line in enumerate(module.lines):
        if not (copy := re.search(r"cp\.async\.bulk\.tensor\.shared\S* (%[\w.-]+),", line)):
            continue
        for view in module.origins(copy[1], at, r"= memref\.view "):
            offset, shape = re.search(
                r"\[(%[\w.-]+)\]\[\].* to memref<(\S+),", module.lines[view]
            ).groups()
            *sizes, dtype = shape.split("x")
            num_bytes = math.prod(map(int, sizes)) * int(re.search(r"\d+", dtype)[0]) // 8
            views[module.is_in_loop(at)][module.constant(offset, view)] = num_bytes
    return sum((views[True] or views[False]).values())


def _operands(
    module: _Module, arguments: list[tuple[str, str]], launch_at: int
) -> dict[tuple[int, int], int]:
    """Operands by parameter of the kernel's function and offset in it: parameters are operands'
    addresses, and one has what TMA must know of arrays.
    """
    operands = {}
    for parameter, (name, dtype) in enumerate(arguments):
        if dtype == "!llvm.ptr":
            operands[parameter, 0] = _operand(module, name, launch_at)
            continue
        for at, line in enumerate(module.lines):
            if call := re.search(r"call @mosaic_gpu_init_tma_desc\((%[\w.-]+), (%[\w.-]+),", line):
                places = module.origins(call[1], at, r"getelementptr .*, i8\b")
                offset = re.search(r"\[(\d+)\]", module.lines[places.pop()]) if places else None
                operands[parameter, int(offset[1]) if offset else 0] = _operand(module, call[2], at)
    return operands


def _operand(module: _Module, name: str, at: int) -> int:
    """Of the addresses that the host's function has as its second argument."""
    function = next(line for line in module.lines if re.match(r"\s*func\.func @", line))
    addresses = re.escape(re.findall(r"(%[\w.-]+): !llvm\.ptr", function)[1])
    pattern = rf"getelementptr {addresses}\[(\d+)\]|load {addresses} "
    (origin,) = module.origins(name, at, pattern)
    return int(re.search(pattern, module.lines[origin])[1] or 0)


# --- PTX ------------------------------------------------------------------------------------------


def _early(ptx: str, operands: dict[tuple[int, int], int]) -> frozenset[int] | None:
    """`Kernel.early`."""
    statements, labels = _statements(ptx)
    waits = {at for at, text in enumerate(statements) if text == "griddepcontrol.wait"}
    if not waits:
        return None
    branches = ((at, re.search(r"\bbra\S* (\$L\w+)", text)) for at, text in enumerate(statements))
    targets = {at: labels[match[1]] for at, match in branches if match}
    ends = {at for at, text in enumerate(statements) if re.match(r"bra\S* \$L|ret\b|exit\b", text)}
    early = set()
    for at in reachable(targets, ends, waits | {len(statements)}):
        opcode = re.sub(r"^@!?%p\d+ ", "", statements[at]).split(" ")[0]
        is_access = re.match(r"(ld|st|red|atom|cp)\.", opcode) and "[" in statements[at]
        if is_access and (".global" in opcode or not re.search(r"\.(shared|param|local)", opcode)):
            addresses = " ".join(re.findall(r"\[(.*?)[,\]]", statements[at]))
            parameters = _parameters(statements, re.findall(r"%rd\d+", addresses))
            assert parameters, f"nothing tells whose memory is accessed: {statements[at]}"
            early |= {operands[n, at if (n, at) in operands else 0] for n, at in parameters}
    return frozenset(early)


def _statements(ptx: str) -> tuple[list[str], dict[str, int]]:
    """A function's statements and where its labels are; loops of inline assembly have others."""
    body = re.sub(r"//.*|^\s*\.(loc|file)\b.*|[{}](?=\s*$)", "", ptx, flags=re.MULTILINE)
    body = body[body.index(".reg") :]
    statements: list[str] = []
    labels = {}
    for text in re.split(r";|(?<=:)\s", body):
        text = " ".join(text.split()).strip("{} ")
        if match := re.fullmatch(r"(\$L\w+):", text):
            labels[match[1]] = len(statements)
        elif text:
            statements.append(text)
    return statements, labels


def _parameters(statements: list[str], registers: list[str]) -> set[tuple[int, int]]:
    """Parameters, and offsets in them, that addresses are computed from."""
    parameters, visited = set(), set()
    uses = [(register, 0) for register in registers]
    while uses:
        register, offset = uses.pop()
        if register in visited:
            continue
        visited.add(register)
        for text in statements:
            if not (match := re.match(rf"(?:@!?%p\d+ )?(\S+) {register}, (.*)", text)):
                continue
            opcode, right = match.groups()
            if parameter := re.search(r"_param_(\d+)(?:\+(\d+))?", right):
                parameters.add((int(parameter[1]), offset + int(parameter[2] or 0)))
            elif not opcode.startswith("ld."):
                constant = re.search(r", (\d+)$", right) if opcode.startswith("add") else None
                step = int(constant[1]) if constant else 0
                uses += [(name, offset + step) for name in re.findall(r"%rd\d+", right)]
    return parameters
