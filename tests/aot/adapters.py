"""What a compiled step with adapters launches and moves, and which launches read their stacks."""

import dataclasses
import re
from typing import NamedTuple

from configs import presets
from configs.engine import Config, EngineConfig
from configs.hardware import targets
from configs.mesh import Mesh
from inference.planner.compiled import program
from inference.planner.compiled.report import AbsentEngine
from inference.scheduling.step_shapes import StepShape
from tests.aot import programs

_ARRAY = re.compile(r"\w+\[[\d,]*\]")
SLOTS, RANK = 8, 16


class Counts(NamedTuple):
    """Of a program.

    Attributes:
        launches: how many.
        num_bytes: of all launches' operands and results, each once a launch, and so the most that
            they move: a lookup counts its whole table, and a stack all slots.
        readers: names of the kernels that take a stack as it is; "" for an operation of XLA's.
    """

    launches: int
    num_bytes: int
    readers: set[str]


def counts(
    target_name: str, shape: StepShape, slots: int = SLOTS, mesh: Mesh | None = None
) -> Counts:
    """Of a step with one layer of Llama 3 8B, and so many adapters."""
    target = targets.parse(target_name)
    model = dataclasses.replace(presets.get("llama3-8b").config, num_layers=1)
    rows, _ = shape.decode
    room = {"slots": slots, "rank": RANK} if slots else {}
    engine = EngineConfig.of(
        max_seqs=rows, max_context=1088, cache_bytes=64 * programs.MEGABYTE, decode_rows=(rows,),
        **room,
    )  # fmt: skip
    absent = AbsentEngine(
        Config(model, engine, mesh or Mesh()).for_platform(target.platform), target
    )
    return _counted(absent.compiled(shape).as_text())


def _counted(text: str) -> Counts:
    listed = list(program.instructions(text))
    shapes = {instruction.name: instruction.shape for instruction in listed}
    stacks = {instruction.name for instruction in listed if _is_stack(instruction)}
    launches, num_bytes, readers = 0, 0, set()
    for instruction in listed:
        operands = _operands(instruction)
        if instruction.opcode == "bitcast" and stacks.intersection(operands):
            stacks.add(instruction.name)
        if not instruction.is_launch:
            continue
        launches += 1
        arrays = [instruction.shape, *(shapes[name] for name in operands if name in shapes)]
        num_bytes += sum(
            program.num_bytes(array) for shape in arrays for array in _ARRAY.findall(shape)
        )
        if stacks.intersection(operands):
            kernel = re.search(r"(\w+)/mpmd_map$", instruction.op_name)
            readers.add(kernel[1] if kernel else "")
    return Counts(launches, num_bytes, readers)


def _operands(instruction: program.Instruction) -> list[str]:
    match = re.search(r" [\w-]+\((%.*?)\)(?:,|$)", instruction.text)
    return re.findall(r"%([\w.-]+)", match[1]) if match else []


def _is_stack(instruction: program.Instruction) -> bool:
    """A, or B, of a matrix: of three axes, where the ranks of slots have one."""
    is_adapters = "adapters" in instruction.op_name and instruction.opcode == "parameter"
    return is_adapters and instruction.shape.partition("]")[0].count(",") == 2
