"""What is compiled for an engine, from shapes alone: its parameters need not be there yet."""

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.stages import Compiled, Lowered

from configs.engine import Config
from inference.runtime import adapter_stacks, compilation_cache, step
from inference.runtime import batch as batches
from inference.runtime.packed_output import PackedOutput
from inference.runtime.serialization.files import ExecutableFiles
from inference.runtime.serialization.loaded import LoadedExecutable
from inference.scheduling.step_schedule import ShardSchedule
from inference.scheduling.step_shapes import StepShape
from layers import kv_cache
from layers.backends import backends
from layers.backends.backend import Backend
from layers.kernels import autotune
from layers.kernels.device import target_device
from layers.kernels.linear import api as linear
from layers.kernels.linear import packed
from layers.kv_cache import Cache
from layers.params import Params
from sharding import mesh as meshes
from sharding.mesh import ALIKE, EACH_GROUP, GROUPS

_WORKERS = 2

T = TypeVar("T")
Executable = Compiled | LoadedExecutable
Outputs = tuple[Cache, step.SlotState, PackedOutput]  # of a step


class Executables:
    """Compiles each `StepShape` and `step.admit` once, or loads it, for the first thread to ask."""

    def __init__(
        self,
        config: Config,
        attention: str,
        backend: Backend,
        params: Params,
        cache: Cache,
        slots: step.SlotState,
        mesh: Mesh | None = None,
        files: ExecutableFiles | None = None,
    ):
        """Takes trees of arrays, or of their shapes and dtypes with devices; `step.step` says which
        are donated. On a mesh cache and slots are a chip's own. `files` saves compilations.
        """
        self._config, self._attention, self._mesh = config, attention, mesh
        # Weights are arguments of what is compiled here, and nothing of it writes them.
        self._backend = dataclasses.replace(backend, prefetches_weights=True)
        self._device = target_device()
        self._cache_specs: object = None
        if mesh is not None:
            self._cache_specs = kv_cache.specs(config.model, config.chip_model)
        state_specs = self._cache_specs, EACH_GROUP
        state = meshes.spread(mesh, abstract((cache, slots)), state_specs)
        self._arguments = abstract(params), *state
        self._files = files
        self._compilations: dict[StepShape | None, Future[Executable]] = {}  # None: what admits
        self._tracing = threading.Lock()

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        return tuple(shape for shape in list(self._compilations) if shape and self.has(shape))

    @property
    def num_requested(self) -> int:
        return sum(shape is not None for shape in list(self._compilations))

    def has(self, shape: StepShape | None) -> bool:
        """Whether a shape (None: what admits) is compiled."""
        compilation = self._compilations.get(shape)
        return compilation is not None and compilation.done()

    @property
    def is_compiling(self) -> bool:
        """Whether one is being compiled; any thread may ask."""
        return any(not compilation.done() for compilation in list(self._compilations.values()))

    def step(self, shape: StepShape) -> Executable:
        return self._once(shape, functools.partial(self._lower_step, shape))

    def admit(self) -> Executable:
        return self._once(None, self._lower_admit)

    def write(self, shape: StepShape | None, files: ExecutableFiles) -> Path:
        """Writes a shape's (None: `admit`'s) executable, compiled if need be; returns its path.

        Raises:
            InputError: it cannot be written.
        """
        executable = self.admit() if shape is None else self.step(shape)
        assert isinstance(executable, Compiled)
        return files.write(_name(shape), self._arguments_of(shape), executable)

    def prepare(self, shapes: Iterable[StepShape]) -> None:
        """Compiles these shapes, and `admit`, in the background; failures are raised on request."""
        pool = ThreadPoolExecutor(_WORKERS)
        for index, shape in enumerate(shapes):
            pool.submit(self.step, shape)
            if index == 0:
                pool.submit(self.admit)
        pool.shutdown(wait=False)

    def _once(self, key: StepShape | None, lower: Callable[[], Lowered]) -> Executable:
        compiling: Future[Executable] = Future()
        try:  # an interrupt may come at any line, and no thread may wait for ever
            future = self._compilations.setdefault(key, compiling)  # one thread alone finds its own
            if future is compiling:
                executable: Executable | None = self._load(key)
                if executable is None:
                    with self._tracing:  # Python's work: two at a time only delay the first
                        lowered = lower()
                    executable = self._compile(key, lowered)
                compiling.set_result(executable)
        except BaseException as error:
            if self._compilations.get(key) is compiling and not compiling.done():
                del self._compilations[key]
                compiling.set_exception(error)
            raise
        return future.result()

    def _compile(self, shape: StepShape | None, lowered: Lowered) -> Compiled:
        if self._files is None or not self._files.is_cache:
            return self._compiled(lowered)
        with compilation_cache.disabled():
            compiled = self._compiled(lowered)
        self._files.keep(_name(shape), self._arguments_of(shape), compiled)
        return compiled

    def _compiled(self, lowered: Lowered) -> Compiled:
        """With what was measured on such a device, if the compiler can read it."""
        options = autotune.compiler_options(self._device) if self._backend.autotunes else {}
        if options:
            try:
                return lowered.compile(compiler_options=options)
            except jax.errors.JaxRuntimeError as error:
                if not autotune.reject(self._device, error):
                    raise
        return lowered.compile()

    def _load(self, shape: StepShape | None) -> LoadedExecutable | None:
        if self._files is None:
            return None
        return self._files.load(_name(shape), self._arguments_of(shape))

    def _arguments_of(self, shape: StepShape | None) -> tuple[object, ...]:
        """Shapes of a program's arguments, on a mesh those of all chips."""
        batch: batches.Batch | batches.Admissions
        if shape is None:
            batch = batches.build_admissions((), self._config)
        else:
            batch = batches.build_batch(shape, ShardSchedule(), self._config)
        arguments = self._arguments[1:] if shape is None else self._arguments
        return *arguments, meshes.spread(self._mesh, abstract(batch), EACH_GROUP)

    def _lower_step(self, shape: StepShape) -> Lowered:
        function: Callable[..., Outputs] = functools.partial(
            step.step, config=self._config, shape=shape, attention=self._attention
        )
        weights = None
        if self._mesh is not None:
            weights = linear.specs(self._config) | adapter_stacks.specs(self._config)
        in_specs, output = (weights, self._cache_specs, EACH_GROUP, EACH_GROUP), EACH_GROUP
        if self._mesh and self._mesh.is_multi_process and self._config.mesh.num_groups > 1:
            function, output = _with_all_outputs(function), ALIKE
        out_specs = self._cache_specs, EACH_GROUP, output
        return self._lower(function, self._arguments_of(shape), in_specs, out_specs)

    def _lower_admit(self) -> Lowered:
        function = functools.partial(step.admit, config=self._config)
        in_specs = self._cache_specs, EACH_GROUP, EACH_GROUP
        return self._lower(function, self._arguments_of(None), in_specs, in_specs[:2])

    def _lower(
        self,
        function: Callable[..., object],
        arguments: tuple[object, ...],
        in_specs: tuple[object, ...],
        out_specs: tuple[object, ...],
    ) -> Lowered:
        """Lowers a function of the engine's arrays, cache and slots last and donated, and a batch.
        It takes unread arguments too: a loader need not know which these are.
        """
        donated = len(arguments) - 3, len(arguments) - 2
        kernels = self._config.engine.kernels
        with backends.use(self._backend), packed.exact(kernels.activations == "exact"):
            jitted = meshes.jitted(
                self._mesh, function, in_specs, out_specs, donate_argnums=donated,
                keep_unused=True, compiler_options=dict(self._backend.compiler_options),
            )  # fmt: skip
            return jitted.lower(*arguments)


def _with_all_outputs(function: Callable[..., Outputs]) -> Callable[..., Outputs]:
    """Gathers all shards' outputs, which every host commits, by a sum, as a TPU's compiler does."""

    @functools.wraps(function)  # arguments keep their names
    def run(*arguments: Params | Cache | step.SlotState | batches.Batch) -> Outputs:
        cache, slots, output = function(*arguments)
        shard_words_X, shards = output.words_X, jax.lax.axis_size(GROUPS)
        words_SX = jnp.zeros((shards, len(shard_words_X)), shard_words_X.dtype)
        words_SX = words_SX.at[jax.lax.axis_index(GROUPS)].set(shard_words_X)
        words_X = jax.lax.psum(words_SX, GROUPS).ravel()
        return cache, slots, dataclasses.replace(output, words_X=words_X)

    return run


def _name(shape: StepShape | None) -> str:
    return "admissions" if shape is None else shape.name


def abstract(tree: T) -> T:
    """Shapes and dtypes of a tree of arrays; what is abstract already stays."""
    return jax.tree.map(_abstract, tree)


def _abstract(leaf: jax.Array | np.ndarray | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    sharding = getattr(leaf, "sharding", None)
    on_mesh = sharding if isinstance(sharding, NamedSharding) else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_mesh)
