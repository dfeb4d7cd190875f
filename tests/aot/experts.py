"""What a compiled mixture of few tokens owes its experts: few launches, each matrix with one reader
among them, and no copy of one.
"""

import dataclasses
import re

from configs import presets
from configs.engine import Config, EngineConfig
from configs.hardware import targets
from inference.planner.compiled import program
from inference.planner.compiled.report import AbsentEngine
from inference.scheduling.step_shapes import StepShape
from tests.aot import programs
from tests.aot.programs import MEGABYTE


def check_mixture(target_name: str, name: str, rows: int, most_launches: int) -> None:
    """A decode step of a preset's mixtures, with so many launches a layer in the feed-forward."""
    one_layer, two_layers = (_text(target_name, name, rows, layers) for layers in (1, 2))
    added = programs.launches_a_layer(program.read(one_layer), program.read(two_layers))
    print(f"{name}, {rows} rows: {added}")
    assert added["ffn"] <= most_launches
    instructions = list(program.instructions(one_layer))
    for stack in ("gate_up", "down"):
        (matrices,) = (
            instruction.name for instruction in instructions if _is_stack(instruction, stack)
        )
        (reader,) = _readers(instructions, matrices)
        assert reader.opcode == "custom-call" and "skinny_product" in reader.op_name


def _text(target_name: str, name: str, rows: int, num_layers: int) -> str:
    target = targets.parse(target_name)
    model = dataclasses.replace(presets.get(name).config, num_layers=num_layers)
    engine = EngineConfig.of(
        max_seqs=rows, max_context=1088, cache_bytes=64 * MEGABYTE, decode_rows=(rows,)
    )
    absent = AbsentEngine(Config(model, engine).for_platform(target.platform), target)
    return absent.compiled(StepShape((rows, 1), (0, 64), greedy=True)).as_text()


def _is_stack(instruction: program.Instruction, name: str) -> bool:
    path = re.sub(r"[^\w.]+", "/", instruction.op_name)
    return instruction.opcode == "parameter" and path.endswith(f"/experts/{name}/")


def _readers(instructions: list[program.Instruction], name: str) -> list[program.Instruction]:
    """What reads an array, itself or seen otherwise."""
    names, readers = {name}, []
    for instruction in instructions:
        operands = re.findall(r"%([\w.-]+)", instruction.text.partition(" = ")[2])
        if names.intersection(operands):
            if instruction.opcode == "bitcast":
                names.add(instruction.name)
            else:
                readers.append(instruction)
    return readers
