"""What a compiled decode step owes its recurrent states: those of a layer are read and written by
one launch, where they lie, and nothing is a copy of those of all rows.
"""

import dataclasses
import math
import re
from typing import Any, NamedTuple

import jax
import pytest

from configs import presets
from configs.engine import Config, EngineConfig
from configs.hardware import targets
from configs.kinds.kind import Mixer
from configs.kinds.recurrent.delta_net import DeltaNet
from inference.planner.compiled import program
from inference.planner.compiled.report import AbsentEngine
from inference.scheduling.step_shapes import StepShape
from layers.kernels.recurrence import api
from layers.ragged import Rectangle
from tests.aot import programs

DELTA_NET = DeltaNet(num_heads=32, num_key_heads=16, key_width=128, value_width=128)
_ROWS = 16
_SAME = "parameter", "bitcast", "get-tuple-element", "tuple"  # compute and move nothing


def check_step(target_name: str, num_drafts: int, mixer: Mixer | None = None) -> None:
    """A decode step of Mamba-2 2.7B with two layers, and its mixer or a given one: nothing else is
    as large as the states of its rows, in float32, no loop gathers them, and no GPU copies weights.
    """
    target = targets.parse(target_name)
    model = dataclasses.replace(presets.get("mamba2-2.7b").config, num_layers=2, vocab_size=32_000)
    if mixer is not None:
        pattern = tuple(dataclasses.replace(layer, mixer=mixer) for layer in model.pattern)
        model = dataclasses.replace(model, pattern=pattern)
    engine = EngineConfig.of(
        max_seqs=_ROWS, max_context=1024, cache_bytes=1024 * programs.MEGABYTE,
        num_drafts=num_drafts, proposer="ngram" if num_drafts else None,
    )  # fmt: skip
    absent = AbsentEngine(Config(model, engine).for_platform(target.platform), target)
    executable = absent.compiled(StepShape((_ROWS, 1 + num_drafts), (0, 64), greedy=True))
    instructions = list(program.instructions(executable.as_text()))
    of_rows = _ROWS * math.prod(model.layers[0].mixer.cache(model).states[1])
    kernels = set()
    for layer in range(model.num_layers):
        (states,) = (item for item in instructions if item.op_name == f"cache[{layer}].states[1]")
        users = _users(instructions, states)
        assert len(users) == 1, f"a layer's states have {len(users)} users: {users}"
        assert "recurrent_update" in users[0].op_name
        kernels.add(users[0].name)
    moved = [item.text[:200] for item in instructions if _largest(item.shape) >= of_rows
             and item.opcode not in _SAME and item.name not in kernels]  # fmt: skip
    assert not moved, moved
    copied = [item.text[:200] for item in instructions if item.opcode not in _SAME
              and _largest(item.shape, "bf16") >= model.width**2]  # fmt: skip
    assert not copied or target.platform == "tpu", copied  # which brings weights into VMEM
    step, memory = program.read(executable.as_text()), executable.memory_analysis()
    print(f"{target_name}: {step.launches}, {memory.temp_size_in_bytes} bytes of temporaries")
    programs.check_the_host_never_waits(step)


def check_it_is_found_out(target_name: str) -> None:
    """A step without a kernel fails `check_step`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "choose", lambda *_: None)
        jax.clear_caches()  # of what was traced with a kernel
        with pytest.raises(AssertionError, match="a layer's states have [2-9] users"):
            check_step(target_name, 0)
    jax.clear_caches()


def _users(
    instructions: list[program.Instruction], states: program.Instruction
) -> list[program.Instruction]:
    """What runs on a layer's states, or on an array as large that it made of them."""
    arrays, users = {states.name}, []
    for item in instructions:
        operands = re.findall(r"%([\w.-]+)", item.text.partition(" = ")[2])
        if arrays.intersection(operands):
            if _largest(item.shape) >= _largest(states.shape):
                arrays.add(item.name)
            if item.opcode not in _SAME:
                users.append(item)
    return users


def _largest(shape: str, dtype: str = "f32") -> int:
    """Elements of the largest array of a dtype among an instruction's results."""
    sizes = re.findall(rf"\b{dtype}\[([\d,]+)\]", shape)
    return max((math.prod(map(int, size.split(","))) for size in sizes), default=0)


class Case(NamedTuple):
    """Rows of one layer; not as many as `check_step` has: Mosaic compiles a kernel only once in a
    process, and reports nothing of it the second time.
    """

    rows: int
    width: int
    heads: tuple[int, int]  # N, K
    state: tuple[int, int]  # M, H
    has_beta: bool


CASES = {
    "mamba2-2.7b": Case(32, 1, (80, 1), (128, 64), False),
    "mamba2-2.7b, alone": Case(1, 1, (80, 1), (128, 64), False),
    "nemotron-h, drafts": Case(32, 4, (128, 8), (128, 64), False),
    "falcon-h1": Case(32, 1, (24, 1), (256, 64), False),
    "qwen3-next": Case(32, 1, (32, 32), (128, 128), True),
    "qwen3-next, drafts": Case(32, 3, (32, 32), (128, 128), True),
    "odd heads": Case(8, 2, (5, 5), (128, 64), True),
}


def check_kernel(device: Any, case: Case) -> None:
    """The kernel alone: states stay where they are, and beside them there is what tokens need."""
    rows, width, (N, K), (M, H), has_beta = case

    def tensor(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    rectangle = Rectangle(
        tensor(rows, dtype="int32"), tensor(rows, width, dtype="int32"),
        tensor(rows, width, dtype="bool"), (),
    )  # fmt: skip
    maps, of_heads = tensor(rows, width, K, M), tensor(rows, width, N)
    states = tensor(rows + 1, width, N, M, H)
    arguments = (
        maps, maps, tensor(rows, width, N, H), of_heads, of_heads if has_beta else None, states,
        rectangle,
    )  # fmt: skip
    values = 2 * rows * width * N * -(-H // 128) * 128 * 4  # and outputs, in whole lanes
    executable = programs.compiled(api.update, device, arguments, (5,))
    assert "recurrent_update" in executable.as_text()
    memory = executable.memory_analysis()
    owned = programs.num_bytes(states)
    assert owned <= memory.alias_size_in_bytes < 1.01 * owned
    assert memory.temp_size_in_bytes < values + 2 * programs.num_bytes(maps) + programs.MEGABYTE
    assert not programs.copies(executable, states)
