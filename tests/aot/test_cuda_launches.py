"""What a decode step launches for a layer on an H200, counted in compiled programs: each launch
that one layer more adds takes a microsecond or two, whatever the number of rows.
"""

import dataclasses

import pytest

from configs import presets
from configs.engine import Config, EngineConfig
from configs.hardware import targets
from inference.planner.compiled import program
from inference.planner.compiled.report import AbsentEngine
from inference.scheduling.step_shapes import StepShape
from layers import params
from tests.aot import programs

pytestmark = pytest.mark.aot

_MATRICES = "qkv", "out", "gate_up", "down"


def _launches(name: str, format: str, rows: int, num_layers: int) -> list[program.Instruction]:
    """Those of a greedy decode step with so many layers."""
    model = dataclasses.replace(presets.get(name).config, num_layers=num_layers)
    if format != model.dtype:
        infos = params.flatten(model.parameters())
        paths = (path for path in infos if path.rsplit("/", 1)[-1] in _MATRICES)
        model = dataclasses.replace(model, formats=tuple((path, (format,)) for path in paths))
    engine = EngineConfig.of(
        max_seqs=rows, max_context=1088, cache_bytes=512 * programs.MEGABYTE, decode_rows=(rows,)
    )
    target = targets.parse("h200")
    absent = AbsentEngine(Config(model, engine).for_platform(target.platform), target)
    text = absent.compiled(StepShape((rows, 1), (0, 64), greedy=True)).as_text()
    return [instruction for instruction in program.instructions(text) if instruction.is_launch]


def _long(*case: object) -> object:
    return pytest.param(*case, marks=pytest.mark.long)


@pytest.mark.parametrize("name, format, rows, most", [
    ("llama3-8b", "bfloat16", 1, 9), _long("llama3-8b", "bfloat16", 2, 9),
    _long("llama3-8b", "bfloat16", 8, 9), ("llama3-8b", "bfloat16", 16, 9),
    _long("llama3-8b", "bfloat16", 64, 9), ("llama3-8b", "int4", 1, 9),
    _long("llama3-8b", "int4", 16, 9), _long("llama3-8b", "int8", 1, 9),
    _long("llama3-8b", "int8", 16, 9), _long("llama3-8b", "fp8", 1, 9),
    _long("llama3-8b", "fp8", 16, 9), ("mamba2-2.7b", "bfloat16", 1, 10),
    ("mamba2-2.7b", "bfloat16", 16, 10), _long("mamba2-2.7b", "bfloat16", 64, 10),
    _long("qwen3-30b-a3b", "bfloat16", 1, 13), ("qwen3-30b-a3b", "bfloat16", 8, 13),
    _long("qwen3-30b-a3b", "bfloat16", 16, 13),
])  # fmt: skip
def test_a_layer_has_few_launches(name, format, rows, most):
    """Of steps with two and three layers, as what all layers share may move for the second."""
    two, three = (_launches(name, format, rows, num_layers) for num_layers in (2, 3))
    for launch in three:
        if "layer_2/" in launch.op_name:
            print(launch.name, launch.opcode, launch.shape, launch.op_name)
    print(f"{name}, {format}, {rows} rows: {len(three) - len(two)} launches a layer")
    assert len(three) - len(two) <= most
