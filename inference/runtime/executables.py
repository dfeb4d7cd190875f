"""What is compiled for an engine, from shapes alone: its parameters need not be there yet."""

import functools
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.stages import Compiled, Lowered

from configs.engine import Config
from inference.runtime import batch as batches
from inference.runtime import step
from inference.scheduling.step_schedule import StepSchedule
from inference.scheduling.step_shapes import StepShape
from layers.kernels.cpu import rows
from layers.kernels.linear import api as linear
from sharding import mesh as meshes
from sharding.mesh import EACH_GROUP, EVERY_CHIP

_WORKERS = 2


class Executables:
    """Compiles each `StepShape` and `step.admit` once, for whichever thread asks first."""

    def __init__(
        self,
        config: Config,
        attention: str,
        params: Any,
        cache: Any,
        slots: Any,
        mesh: Mesh | None = None,
    ):
        """Trees of arrays, or of their shapes and dtypes, which may say on which devices they are
        to be; what is donated is in `step.step`. On a mesh those of cache and slots are a chip's
        own.
        """
        self._config, self._attention, self._mesh = config, attention, mesh
        kept = meshes.spread(mesh, abstract((cache, slots)), (EVERY_CHIP, EACH_GROUP))
        self._arguments = abstract(params), *kept
        self._found: dict[StepShape | None, Future[Compiled]] = {}  # None: what admits
        self._finding, self._tracing = threading.Lock(), threading.Lock()

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        """Those that are compiled."""
        return tuple(shape for shape in list(self._found) if shape and self.has(shape))

    def has(self, shape: StepShape | None) -> bool:
        """Whether a shape (None: what admits) is compiled."""
        found = self._found.get(shape)
        return found is not None and found.done()

    def step(self, shape: StepShape) -> Compiled:
        """The executable of a shape."""
        return self._once(shape, functools.partial(self._lower_step, shape))

    def admit(self) -> Compiled:
        """The executable that admits."""
        return self._once(None, self._lower_admit)

    def prepare(self, shapes: Iterable[StepShape]) -> None:
        """Begins to compile these shapes, and what admits, while the caller goes on. What fails is
        tried again, and raised, where it is asked for.
        """
        pool = ThreadPoolExecutor(_WORKERS)
        for index, shape in enumerate(shapes):
            pool.submit(self.step, shape)
            if index == 0:
                pool.submit(self.admit)
        pool.shutdown(wait=False)

    def _once(self, key: StepShape | None, lower: Callable[[], Lowered]) -> Compiled:
        with self._finding:
            future = self._found.get(key)
            is_first = future is None
            if future is None:
                future = self._found[key] = Future()
        if is_first:
            try:
                with self._tracing:  # Python's own work: two at a time would only delay the first
                    lowered = lower()
                future.set_result(lowered.compile())
            except BaseException as error:
                del self._found[key]
                future.set_exception(error)
        return future.result()

    def _lower_step(self, shape: StepShape) -> Lowered:
        batch = abstract(batches.build_batch(StepSchedule(shape), self._config))
        function = functools.partial(
            step.step, config=self._config, shape=shape, attention=self._attention
        )
        weights = None if self._mesh is None else linear.specs(self._config.model.parameters())
        given = weights, EVERY_CHIP, EACH_GROUP, EACH_GROUP
        return self._lower(function, self._arguments, batch, given, given[1:])

    def _lower_admit(self) -> Lowered:
        arrays = abstract(batches.build_admissions((), self._config))
        function = functools.partial(step.admit, config=self._config)
        given = EVERY_CHIP, EACH_GROUP, EACH_GROUP
        return self._lower(function, self._arguments[1:], arrays, given, given[:2])

    def _lower(
        self,
        function: Callable[..., Any],
        kept: tuple[Any, ...],
        batch: Any,
        given: tuple[Any, ...],
        returned: tuple[Any, ...],
    ) -> Lowered:
        """A function of what the engine keeps, cache and slots last, and of a batch, lowered; these
        two are donated.

        Args:
            function: of a chip's arrays.
            kept, batch: its arguments' shapes.
            given, returned: partition specs of arguments and results.
        """
        function = meshes.over(self._mesh, function, given, returned)
        donated = len(kept) - 2, len(kept) - 1
        spread = meshes.spread(self._mesh, (batch,), (EACH_GROUP,))
        with rows.native(self._config.engine.linear == "ffi_cpu"):
            return jax.jit(function, donate_argnums=donated).lower(*kept, *spread)


def abstract(tree: Any) -> Any:
    """Shapes and dtypes of a tree of arrays; what is abstract already stays."""
    return jax.tree.map(_abstract, tree)


def _abstract(leaf: jax.Array | np.ndarray | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    sharding = getattr(leaf, "sharding", None)
    on_mesh = sharding if isinstance(sharding, NamedSharding) else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_mesh)
