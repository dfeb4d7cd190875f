"""The machine code of Hopper's kernels and how a step launches them, compiled without a device."""

import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from configs import presets
from configs.engine import Config, EngineConfig
from configs.hardware import targets
from inference.planner.compiled import program
from inference.planner.compiled.report import AbsentEngine
from inference.scheduling.step_shapes import StepShape
from layers import params
from layers.backends import backends
from tests.aot import low_bit, machine_code, programs, recurrence

pytestmark = pytest.mark.aot
# A kernel is dumped once in a process, so rows here are none of another test.


@pytest.fixture
def dumped(tmp_path, monkeypatch):
    """The kernels that were compiled since."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))

    def kernels() -> list[machine_code.Kernel]:
        compiled = machine_code.kernels(tmp_path)
        assert compiled, "nothing was compiled, or the kernel was compiled before in this process"
        print(*compiled, sep="\n")
        return compiled

    return kernels


class Budget(NamedTuple):
    """What a kernel may take.

    Attributes:
        compile: on a device.
        instructions: of the loop around its products, for so many `products`; of the whole kernel
            without any. Of a product: a step of 64 x 256 weights has 16.
        shared_load_bits: of the narrowest shared load in the loop.
        registers: of a thread.
        bytes_in_flight: of a full multiprocessor, at least.
    """

    compile: Callable[[Any], object]
    instructions: int
    products: int
    shared_load_bits: int
    registers: int
    bytes_in_flight: int = 32 << 10


def _product(format: str, rows: int) -> Callable[[Any], object]:
    shape = low_bit.MATRICES["gate_up"]
    return lambda device: low_bit.check_product(device, format, rows, shape)


def _attention(**changes: Any) -> Callable[[Any], object]:
    case = programs.Attention(48, 1, (32, 8), 128, 64)._replace(**changes)
    return lambda device: programs.compiled_attention(device, "pallas_gpu", case)


def _latents(num_heads: int) -> Callable[[Any], object]:
    case = programs.Latents(48, 1, num_heads, 512, 64, 64)
    return lambda device: programs.compiled_latents(device, "pallas_gpu", case)


def _states(name: str) -> Callable[[Any], object]:
    case = recurrence.CASES[name]._replace(rows=48)
    return lambda device: recurrence.check_kernel(device, case)


_BUDGETS = {
    "int4, 2 rows": Budget(_product("int4", 2), 360, 16, 32, 168),
    "int4, 24 rows": Budget(_product("int4", 24), 360, 16, 32, 192),
    "int8, 24 rows": Budget(_product("int8", 24), 475, 16, 16, 136),
    "fp8, 24 rows": Budget(_product("fp8", 24), 540, 16, 16, 128),
    "mxfp4, 24 rows": Budget(_product("mxfp4", 24), 660, 16, 8, 160),
    "bfloat16, 24 rows": Budget(_product("bfloat16", 24), 290, 16, 128, 64),
    "int3, 24 rows": Budget(_product("int3", 24), 475, 16, 32, 240),
    "nvfp4, 24 rows": Budget(_product("nvfp4", 24), 1000, 16, 8, 208),
    "fp8_block, 24 rows": Budget(_product("fp8_block", 24), 620, 16, 16, 144),
    "decode": Budget(_attention(), 475, 12, 32, 152),
    "decode, alone": Budget(_attention(rows=2), 475, 12, 32, 152),
    "decode, fp8 pages": Budget(_attention(cache="fp8"), 645, 16, 16, 120),
    "decode, int8 pages": Budget(_attention(cache="int8"), 645, 16, 16, 120),
    "prefill": Budget(_attention(rows=6, width=64), 660, 16, 32, 168),
    "latents, 128 heads": Budget(_latents(128), 585, 40, 32, 168),
    "latents, 16 heads": Budget(_latents(16), 590, 40, 32, 168),
    "states of Mamba-2": Budget(_states("mamba2-2.7b"), 910, 0, 32, 160),
    "states of the delta rule": Budget(_states("qwen3-next"), 1200, 0, 32, 168),
}


@pytest.mark.parametrize("case", _BUDGETS)
def test_a_kernel_stays_within_its_budget(case, dumped):
    """Blocks and places for them are printed: the last wave of a grid leaves some idle."""
    budget = _BUDGETS[case]
    budget.compile(programs.device("h200"))
    for kernel in dumped():
        loop = kernel.loop
        assert kernel.stack_bytes == kernel.spilled_bytes == 0
        assert kernel.registers <= budget.registers
        assert len(loop.instructions) * budget.products <= budget.instructions * loop.products
        assert loop.products or len(loop.instructions) <= budget.instructions
        assert (loop.shared_load_bits or 128) >= budget.shared_load_bits
        assert kernel.bytes_in_flight >= budget.bytes_in_flight


def step_of(
    name: str, rows: int, format: str | None = None, cache: str | None = None
) -> tuple[AbsentEngine, StepShape]:
    """A greedy decode step of a preset with two layers, with matrices and pages in formats."""
    model = dataclasses.replace(presets.get(name).config, num_layers=2, cache_format=cache)
    if format is not None:
        matrices = [path for path, info in params.flatten(model.parameters()).items()
                    if info.is_matrix and path.startswith("layers/")]  # fmt: skip
        model = dataclasses.replace(model, formats=tuple((path, (format,)) for path in matrices))
    target = targets.parse("h200")
    engine = EngineConfig.of(
        max_seqs=rows, max_context=1088, cache_bytes=512 * programs.MEGABYTE, decode_rows=(rows,)
    )
    absent = AbsentEngine(Config(model, engine).for_platform(target.platform), target)
    return absent, StepShape((rows, 1), (0, 64), greedy=True)


_STEPS = {
    "llama3-8b": ("llama3-8b", 40),
    "llama3-8b, int4": ("llama3-8b", 44, "int4"),
    "llama3-8b, fp8 pages": ("llama3-8b", 38, None, "fp8"),
    "mamba2-2.7b": ("mamba2-2.7b", 40),
    "deepseek-v2-lite": ("deepseek-v2-lite", 40),
    "qwen3-30b-a3b": ("qwen3-30b-a3b", 36),
}


@pytest.mark.parametrize("case", _STEPS)
def test_a_step_is_one_command_buffer_whose_kernels_wait(case, dumped, tmp_path, monkeypatch):
    """The host launches one graph. A kernel that starts before its predecessor ends reads nothing
    but parameters until that one has ended; one without a wait would end all overlap.
    """
    backend_of = backends.of
    options = ("xla_dump_to", str(tmp_path)), ("xla_dump_hlo_pass_re", "none")
    monkeypatch.setattr(backends, "of", lambda *arguments: dataclasses.replace(
        backend := backend_of(*arguments), compiler_options=(*backend.compiler_options, *options)
    ))  # fmt: skip
    absent, shape = step_of(*_STEPS[case])
    executable = absent.compiled(shape)
    (path,) = tmp_path.glob("*jit_step*thunk_sequence_after_thunk_passes.txt")
    thunks = re.findall(r"^\d+: (\w+)", path.read_text(), re.MULTILINE)
    print(thunks, path.read_text().count("\n"))
    assert thunks == ["kCommandBuffer"]
    kernels = dumped()
    assert all(kernel.early is not None for kernel in kernels)
    _check_waits(executable.as_text(), kernels)


_CHOOSING = {
    "deepseek-v3.2": (programs.INDEXED, 64, 12),
    "quest": (programs.QUEST, 64, 11),
    "deepseek-v4, chosen entries": (programs.SPARSE, 128, 10),
    "deepseek-v4, all entries": (programs.HEAVY, 128, 9),
}


@pytest.mark.parametrize("case", _CHOOSING)
def test_kernels_of_a_step_whose_queries_choose_wait(case, dumped):
    mixer, page_tokens, rows = _CHOOSING[case]
    shape = StepShape((rows, 1), (0, 64), greedy=True)
    device = programs.device("h200")
    executable, _, _ = programs.compiled_step(device, shape, page_tokens, "pallas_gpu", 1, mixer)
    _check_waits(executable.as_text(), dumped())


def _check_waits(text: str, kernels: list[machine_code.Kernel]) -> None:
    """What kernels access before they wait is never written: arguments that are not donated, and
    constants.
    """
    instructions = {instruction.name: instruction for instruction in program.instructions(text)}
    donated = set(re.findall(r"\{\d*\}: \((\d+), \{\}", text.partition("\n")[0]))
    calls = [call for call in instructions.values() if '_target="mosaic_gpu' in call.text]
    assert calls
    for call in calls:
        names = programs.operands(call.text)
        layouts = re.search(r"operand_layout_constraints=\{(.*?\})\}", call.text)[1]
        shapes = [sizes.replace(",", "x") for sizes in re.findall(r"\[([\d,]*)\]", layouts)]
        alike = [kernel for kernel in kernels if kernel.takes(shapes)]
        assert alike, f"no kernel has operands of {shapes}"
        for index in set().union(*(kernel.early or () for kernel in alike)):
            assert index < len(names), f"{call.op_name} writes before it waits"
            origin = instructions[names[index]]
            while origin.opcode == "bitcast":
                origin = instructions[programs.operands(origin.text)[0]]
            number = (re.search(r" parameter\((\d+)\)", origin.text) or ["", ""])[1]
            is_constant = origin.opcode == "constant" or (number and number not in donated)
            assert is_constant, f"{call.op_name} reads {origin.name} before it waits"


def _doubled(x_RW: jax.Array, w_RW: jax.Array, first: str) -> jax.Array:
    """Twice x plus w, by a kernel that reads one of them, waits, and reads the other."""

    def kernel(x_ref, w_ref, out_ref, *, x_smem, w_smem, x_arrived, w_arrived):
        copies = {"x": (x_ref, x_smem, x_arrived), "w": (w_ref, w_smem, w_arrived)}
        plgpu.copy_gmem_to_smem(*copies.pop(first))
        plgpu.griddepcontrol_wait()
        plgpu.griddepcontrol_launch_dependents()
        for copy in copies.values():
            plgpu.copy_gmem_to_smem(*copy)
        plgpu.barrier_wait(x_arrived)
        plgpu.barrier_wait(w_arrived)
        x_smem[...] += w_smem[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(x_smem, out_ref)
        plgpu.wait_smem_to_gmem(0)

    doubled_RW = 2 * x_RW
    return plgpu.kernel(
        kernel, out_type=x_RW, kernel_name=f"reads_{first}_first",
        scratch_types=dict(
            x_smem=plgpu.SMEM(x_RW.shape, x_RW.dtype), w_smem=plgpu.SMEM(x_RW.shape, x_RW.dtype),
            x_arrived=plgpu.Barrier(), w_arrived=plgpu.Barrier(),
        ),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(doubled_RW, w_RW)  # fmt: skip


@pytest.mark.parametrize("first, donated", [("w", ()), ("x", ()), ("w", (1,))])
def test_a_kernel_that_reads_too_early_is_found_out(first, donated, dumped):
    """Of what an earlier kernel wrote, or of an argument that another kernel may write."""
    array = jax.ShapeDtypeStruct((64, 64 + len(donated) * 64), jnp.float32)

    def program(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _doubled(x, w, first), w + 1

    executable = programs.compiled(program, programs.device("h200"), (array, array), donated)
    (kernel,) = kernels = dumped()
    assert kernel.early == {"xw".index(first)}
    if first == "w" and not donated:
        _check_waits(executable.as_text(), kernels)
    else:
        with pytest.raises(AssertionError, match="reads .* before it waits"):
            _check_waits(executable.as_text(), kernels)


_LOADING = """
import logging, pathlib, sys
from layers.kernels import autotune
from tests.aot import test_cuda_kernels
logging.basicConfig(format="%(message)s", stream=sys.stdout)
autotune.FOLDER = pathlib.Path(sys.argv[1])
for rows in (72, 80):
    engine, shape = test_cuda_kernels.step_of("llama3-8b", rows)
    print("gemm_fusion" in engine.compiled(shape).as_text())
"""


@pytest.mark.parametrize("text, reason", [
    ("version: 3\n", None),  # as XLA writes it where nothing was measured
    ("version: 2\n", "Version mismatch in autotune results. Expected 3 but was 2"),
    ("damaged {", "Failed to parse autotune results string."),
])  # fmt: skip
def test_a_step_is_compiled_with_measured_choices(text, reason, tmp_path):
    """XLA reads such a file once in a process; without a valid one it chooses anew."""
    path = tmp_path / f"nvidia-h200-jax-{jax.__version__}.txt"
    path.write_text(text)
    command = sys.executable, "-c", _LOADING, str(tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    line = f"{path} is not used, the compiler chooses anew: {reason}"
    assert done.stdout.splitlines() == [*([line] if reason else []), "True", "True"]
