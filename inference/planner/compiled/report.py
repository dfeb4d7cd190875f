"""The steps of an engine, compiled for a device that need not be there: what each takes of it."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax.sharding import SingleDeviceSharding
from jax.stages import Compiled

from configs.engine import Config
from configs.errors import reason
from configs.hardware.targets import Target
from inference.planner.compiled import program
from inference.planner.compiled.program import CompiledProgram
from inference.runtime import batch, model_runner, step
from inference.runtime.executables import Executables
from inference.runtime.serialization.files import ExecutableFiles
from inference.scheduling.step_schedule import ShardSchedule
from inference.scheduling.step_shapes import StepShape, enumerate_shapes
from layers import kv_cache
from layers.backends import backends
from layers.kernels.device import target_device
from sharding import mesh as meshes
from sharding import topologies

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A step as the compiler made it, its bytes on one device.

    Attributes:
        shape: of the step.
        compile_s: seconds of tracing and compiling.
        argument_bytes: of parameters, cache, slots and inputs, with what the device pads them with.
        input_bytes: of slots and inputs as the engine declares them.
        temporary_bytes, code_bytes: beside them.
        output_bytes: of what is returned and was not donated.
        program: what was counted in it.
    """

    shape: StepShape
    compile_s: float
    argument_bytes: int
    input_bytes: int
    temporary_bytes: int
    code_bytes: int
    output_bytes: int
    program: CompiledProgram

    @property
    def total_bytes(self) -> int:
        """Bytes of memory while the step runs."""
        return self.argument_bytes + self.temporary_bytes + self.code_bytes + self.output_bytes


@dataclasses.dataclass(frozen=True)
class RefusedStep:
    """A step that the compiler found no room for."""

    shape: StepShape
    compile_s: float
    reason: str


class AbsentEngine:
    """What an engine would compile on a target, from shapes alone."""

    def __init__(self, config: Config, target: Target):
        """As `ModelRunner` takes a configuration.

        Raises:
            InputError: as `model_runner.for_this_device`, or there is no such topology.
        """
        self._target = target
        self._devices = topologies.devices(target)
        self._mesh = meshes.of(config.mesh, self._devices)
        with self._traced():
            self.config, self.attention = model_runner.for_this_device(config)
            values = model_runner.abstract_params(self.config, self._mesh)
            cache = kv_cache.abstract(*model_runner.cache_arguments(self.config, self.attention))
            slots = jax.eval_shape(lambda: step.init_slots(self.config))
            self._slot_bytes = _num_bytes(slots)
            if self._mesh is None:
                values, cache, slots = map(self._abstract, (values, cache, slots))
            backend = backends.of(target_device(), self.config.engine.kernels.linear)
            self._executables = Executables(
                self.config, self.attention, backend, values, cache, slots, self._mesh
            )

    @property
    def several_hosts(self) -> bool:
        """Whether the devices belong to several."""
        return self._mesh is not None and self._mesh.is_multi_process

    def usual_shapes(self) -> tuple[StepShape, ...]:
        """The largest steps that decode, a greedy one too where there is one, and that of most
        chunks with the fewest rows beside.
        """
        shapes = [shape for shape in enumerate_shapes(self.config.engine) if not shape.scored]
        decoding = [shape for shape in shapes if not shape.prefill[0]]
        prefilling = max(shapes, key=lambda shape: (shape.prefill[0], -shape.decode[0]))
        greedy = [shape for shape in decoding if shape.greedy]
        return *greedy[-1:], decoding[-1], prefilling

    def compiled(self, shape: StepShape) -> Compiled:
        with self._traced():
            executable = self._executables.step(shape)
        assert isinstance(executable, Compiled)
        return executable

    def write(self, shapes: Iterable[StepShape], folder: Path) -> list[Path]:
        """Writes the executables of shapes, and of what admits, for engines on such devices; their
        paths. They have to be compiled without JAX's cache.

        Raises:
            InputError: they cannot be written.
        """
        devices = self._devices[: self.config.mesh.num_chips]
        files = ExecutableFiles(folder, self.config, self.attention, devices, self._mesh)
        with self._traced():
            return [self._executables.write(shape, files) for shape in (None, *shapes)]

    def steps(self, shapes: Iterable[StepShape]) -> Iterator[CompiledStep | RefusedStep]:
        for shape in shapes:
            start = time.perf_counter()
            try:
                executable = self.compiled(shape)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                yield RefusedStep(shape, time.perf_counter() - start, reason(error))
                continue
            compile_s = time.perf_counter() - start
            inputs = batch.build_batch(shape, ShardSchedule(), self.config)
            yield _measured(shape, compile_s, executable, self._slot_bytes + _num_bytes(inputs))

    def _abstract(self, tree: T) -> T:
        """A tree of shapes, each on the target's only device."""
        sharding = SingleDeviceSharding(self._devices[0])
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
        )

    def _traced(self) -> contextlib.AbstractContextManager[object]:
        if self._target.is_here:
            return contextlib.nullcontext()
        if self._mesh is not None:
            return jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh)
        return topologies.traced_for(self._devices[0])


def _measured(
    shape: StepShape, compile_s: float, executable: Compiled, input_bytes: int
) -> CompiledStep:
    memory: Any = executable.memory_analysis()
    return CompiledStep(
        shape, compile_s, memory.argument_size_in_bytes, input_bytes, memory.temp_size_in_bytes,
        memory.generated_code_size_in_bytes,
        memory.output_size_in_bytes - memory.alias_size_in_bytes,
        program.read(executable.as_text() or ""),
    )  # fmt: skip


def _num_bytes(tree: object) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
