"""What a decode step launches for a layer on an H200, counted in compiled programs: each launch
that one layer more adds takes a microsecond or two, whatever the number of rows.
"""

import pytest

from tests.aot import launches

pytestmark = pytest.mark.aot


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
    two, three = (launches.of_step("h200", name, format, rows, layers) for layers in (2, 3))
    for launch in three:
        if "layer_2/" in launch.op_name:
            print(launch.name, launch.opcode, launch.shape, launch.op_name)
    print(f"{name}, {format}, {rows} rows: {len(three) - len(two)} launches a layer")
    assert len(three) - len(two) <= most
