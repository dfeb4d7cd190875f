"""What a decode step launches for a layer, counted in compiled programs."""

import dataclasses

from configs import presets
from configs.engine import Config, EngineConfig
from configs.hardware import targets
from inference.planner.compiled import program
from inference.planner.compiled.program import Instruction
from inference.planner.compiled.report import AbsentEngine
from inference.scheduling.step_shapes import StepShape
from layers import params
from tests.aot import programs

_MATRICES = "qkv", "out", "gate_up", "down"


def of_step(
    target_name: str, name: str, format: str, rows: int, num_layers: int
) -> list[Instruction]:
    """Those of a greedy decode step with so many layers, in order."""
    model = dataclasses.replace(presets.get(name).config, num_layers=num_layers)
    if format != model.dtype:
        infos = params.flatten(model.parameters())
        paths = (path for path in infos if path.rsplit("/", 1)[-1] in _MATRICES)
        model = dataclasses.replace(model, formats=tuple((path, (format,)) for path in paths))
    engine = EngineConfig.of(
        max_seqs=rows, max_context=1088, cache_bytes=512 * programs.MEGABYTE, decode_rows=(rows,)
    )
    target = targets.parse(target_name)
    absent = AbsentEngine(Config(model, engine).for_platform(target.platform), target)
    text = absent.compiled(StepShape((rows, 1), (0, 64), greedy=True)).as_text()
    return [instruction for instruction in program.instructions(text) if instruction.is_launch]
