"""What a compiled product with weights of few bits owes them: each byte is read once, by one launch
(or one a plane of bits), and the matrix is nowhere expanded.
"""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp

from configs import presets
from configs.engine import Config, EngineConfig
from configs.hardware import targets
from configs.precision import FORMATS
from inference.planner.compiled import program
from inference.planner.compiled.report import AbsentEngine, CompiledStep
from inference.scheduling.step_shapes import StepShape
from layers import params
from layers.backends import backends
from layers.kernels.device import target_device
from layers.kernels.linear import low_bit
from layers.linear import grouped_linear, linear
from sharding import topologies
from tests.aot.programs import MEGABYTE, compiled

# Of Llama 3 8B: F, D.
MATRICES = {
    "qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336),
    "head": (128256, 4096),
}  # fmt: skip
# What shows an array as it is, or moves it nearer to who reads it; a TPU's do that in parts.
_SAME = "bitcast", "get-tuple-element", "copy-start", "copy-done", "slice-start", "slice-done"


def check_product(device: Any, format: str, rows: int, shape: tuple[int, int]) -> None:
    """A product of rows of bfloat16 with a matrix."""
    w = _abstract(device, shape, format)
    x_TD = jax.ShapeDtypeStruct((rows, shape[1]), jnp.bfloat16)
    executable = compiled(linear, device, (x_TD, w), ())
    instructions = list(program.instructions(executable.as_text()))
    name = "w_FD" if format == "bfloat16" else "w_FD.data"
    (data,) = (instruction.name for instruction in instructions if _is_argument(instruction, name))
    planes = low_bit.planes(format) if device.platform == "tpu" else (None,)
    readers = _check_read_once(instructions, data, format, math.prod(shape), len(planes))
    if device.platform == "gpu" and FORMATS[format].activations is None:
        assert (
            sum(instruction.is_launch for instruction in instructions) == 1
        )  # no pad, no sum of parts, no transpose
    memory, num_bytes = executable.memory_analysis(), FORMATS[format].bytes_for(*_row(shape))
    arguments = num_bytes + rows * shape[1] * 2
    print(f"{format} {shape}: {readers}, {memory.temp_size_in_bytes} bytes of temporaries")
    # A TPU pads a few rows of scales; a GPU adds the sums of parts of a row.
    assert arguments <= memory.argument_size_in_bytes < arguments + 0.05 * num_bytes + MEGABYTE
    assert memory.temp_size_in_bytes <= 8 * rows * shape[0] * 4 + MEGABYTE


def check_weights_are_arguments(step: Any) -> int:
    """Products on Hopper read weights while the launches before them run, so each reads what the
    step is given and no launch of it writes; how many products there are.
    """
    instructions = {
        instruction.name: instruction for instruction in program.instructions(step.as_text())
    }
    count = 0
    for instruction in instructions.values():
        if "skinny_product" not in instruction.op_name or instruction.opcode != "custom-call":
            continue
        count += 1
        operands = instruction.text.partition("custom-call(")[2].partition(")")[0]
        _, *weights = re.findall(r"%([\w.-]+)", operands)
        for name in weights:
            while instructions[name].opcode in _SAME:
                (name,) = re.findall(r"%([\w.-]+)", instructions[name].text.partition(" = ")[2])
            assert instructions[name].opcode == "parameter", (
                f"{instruction.op_name} reads {instructions[name].text[:200]}"
            )
    return count


def check_prefill(device: Any, format: str, most_matrices: float) -> None:
    """A product of many rows: what is written beside its sums is little more than the matrix in
    bfloat16, or so many of them.
    """
    rows, (F, D) = 512, MATRICES["gate_up"]
    arguments = (
        jax.ShapeDtypeStruct((rows, D), jnp.bfloat16),
        _abstract(device, (F, D), format),
    )
    executable = compiled(linear, device, arguments, ())
    temporary = executable.memory_analysis().temp_size_in_bytes
    print(f"{format}: {temporary} bytes of temporaries")
    assert temporary < most_matrices * F * D * 2


def check_experts(device: Any, format: str, rows: int) -> None:
    """Products of few rows with the experts of Mixtral 8x7B, in few bits: one launch reads them,
    and no other holds a quarter of one of them.
    """
    stack = 8, 28672, 4096
    x_XD = jax.ShapeDtypeStruct((rows, stack[2]), jnp.bfloat16)
    arguments = (
        x_XD,
        _abstract(device, stack, format),
        jax.ShapeDtypeStruct((8,), "int32"),
    )
    multiply = functools.partial(grouped_linear, deterministic=False)
    executable = compiled(multiply, device, arguments, ())
    instructions = list(program.instructions(executable.as_text()))
    (data,) = (
        instruction.name for instruction in instructions if _is_argument(instruction, "w_EFD.data")
    )
    _check_read_once(instructions, data, format, math.prod(stack[1:]))
    assert executable.memory_analysis().temp_size_in_bytes < 56 * MEGABYTE


def check_step(target_name: str, format: str = "int4") -> None:
    """A greedy decode step of Llama 3 8B with one layer, its matrices in a format and its tables in
    int8: parameters as planned, no matrix expanded, temporaries bounded.
    """
    model = dataclasses.replace(presets.get("llama3-8b").config, num_layers=1)
    formats = {f"layers/0/{path}": (format,) for path in
               ("mixer/qkv", "mixer/out", "ffn/gate_up", "ffn/down")}  # fmt: skip
    formats |= {"embed/table": ("int8",), "head/table": ("int8",)}
    model = dataclasses.replace(model, formats=tuple(formats.items()))
    target = targets.parse(target_name)
    engine = EngineConfig.of(max_seqs=16, max_context=1024, cache_bytes=64 * MEGABYTE)
    absent = AbsentEngine(Config(model, engine).for_platform(target.platform), target)
    shape = StepShape((16, 1), (0, 64), greedy=True)
    (step,) = absent.steps([shape])
    assert isinstance(step, CompiledStep), step
    infos = params.flatten(model.parameters())
    norms = sum(info.elements for info in infos.values() if not info.is_matrix)
    assert abs(step.program.argument_bytes["params"] - params.num_bytes(model.parameters())) <= (
        2 * norms  # which a TPU keeps in float32
    )
    executable = absent.compiled(shape)
    if target.platform == "gpu":
        assert check_weights_are_arguments(executable) == 5  # a layer's and the head's
    instructions = list(program.instructions(executable.as_text()))
    for path in formats:
        if path == "embed/table":  # some rows
            continue
        (data,) = (
            instruction.name for instruction in instructions if _is_parameter(instruction, path)
        )
        _check_read_once(instructions, data, formats[path][0], infos[path].elements)
    print(f"{target_name}: {step.program.launches}, {step.temporary_bytes} bytes of temporaries")
    assert step.temporary_bytes < 32 * MEGABYTE
    assert (step.program.num_conditionals, step.program.num_loops) == (0, 0)


def _abstract(device: Any, shape: tuple[int, ...], format: str) -> Any:
    """As the device's back end has it."""
    if format == "bfloat16":
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    with topologies.traced_for(device):
        word = backends.of(target_device()).word
    return low_bit.abstract(shape, format, "bfloat16", word)


def _is_argument(instruction: program.Instruction, name: str) -> bool:
    return instruction.opcode == "parameter" and instruction.op_name == name


def _is_parameter(instruction: program.Instruction, path: str) -> bool:
    leaf = re.sub(r"[^\w.]+", "/", instruction.op_name)
    return instruction.opcode == "parameter" and leaf == f"params/{path}/.data"


def _row(shape: tuple[int, int]) -> tuple[int, int]:
    return math.prod(shape), shape[1]


def _check_read_once(
    instructions: list[program.Instruction],
    data: str,
    format: str,
    elements: int,
    num_readers: int = 1,
) -> list[str]:
    """Who reads a matrix's bytes. Nothing else has as many elements as a quarter of it."""
    held, readers = {data}, []
    for instruction in instructions:
        operands = re.findall(r"%([\w.-]+)", instruction.text.partition(" = ")[2])
        if not held.intersection(operands):
            continue
        if instruction.opcode in _SAME or "ConcatBitcast" in instruction.text:
            held.add(instruction.name)
        elif instruction.is_launch:
            readers.append(instruction)
            assert sum(name in held for name in operands) == 1
            sizes = [
                _elements(array) for array in re.findall(r"\w+\[([\d,]+)\]", instruction.shape)
            ]
            assert max(sizes) < elements / 4, f"{format} is expanded: {instruction.text[:200]}"
    assert len(readers) == num_readers, [instruction.name for instruction in readers]
    return [instruction.name for instruction in readers]


def _elements(sizes: str) -> int:
    return functools.reduce(lambda product, size: product * int(size), sizes.split(","), 1)
