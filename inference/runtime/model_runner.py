"""Device state and the executables that advance it: one compiled program a `StepShape`, never one
more after warm-up.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from configs.engine import Config
from configs.errors import InputError
from inference.runtime import batch as batches
from inference.runtime import step
from inference.runtime.batch import Admissions, Inputs
from inference.runtime.swap import HostTier
from inference.scheduling.step_schedule import Plan
from inference.scheduling.step_shapes import StepShape
from layers import decoder, kv_cache
from layers.kernels.attention import api
from layers.kernels.device import target_device
from layers.mixer import Mixer
from layers.params import Params


def for_this_device(config: Config) -> Config:
    """The configuration with what the device decides; what it cannot do is said before weights are
    read.

    Raises:
        InputError: `engine.deterministic` on a device where it has not been measured, or
            `engine.attention` names what cannot run.
    """
    if config.engine.deterministic and jax.default_backend() != "cpu":
        raise InputError(
            "engine.deterministic holds on XLA's cpu backend, it is not measured on "
            f"{jax.default_backend()}"
        )
    config = config.on(target_device().platform)
    api.choose(config)
    return config


class Executor:
    """Owns parameters, cache and slots of one engine."""

    def __init__(
        self, config: Config, params: Params, mixers: Mapping[str, Mixer] = decoder.MIXERS
    ):
        """Params and cache live on JAX's default device.

        Raises:
            InputError: as `for_this_device`.
        """
        self.config = config = for_this_device(config)
        self.params = params
        self._mixers = mixers
        self._compiled: dict[StepShape | None, Any] = {}
        self._is_warm = self._sealed = False
        self.num_late_compiles = 0
        self.reset()
        self._host = HostTier(config, self.cache)

    def reset(self) -> None:
        """Empty cache and slots: at the start, and after a failed step has lost them."""
        config, engine = self.config, self.config.engine
        num_pages = tuple(n * config.device_pages for n in config.num_pages)
        self.cache = kv_cache.init(
            config.model, num_pages, config.device_page_tokens, engine.max_seqs, engine.num_drafts,
            api.implementation(api.choose(config)).layout,
        )  # fmt: skip
        self.slots = step.init_slots(config)

    @property
    def cache_bytes(self) -> int:
        """Bytes of pages and states."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.cache))

    def compiled(self, shape: StepShape) -> Any:
        """The executable of a shape, compiled at first use.

        Raises:
            RuntimeError: warm-up sealed the executor and the shape is not among those it compiled.
        """
        if shape not in self._compiled:
            if self._sealed:
                raise RuntimeError(f"{shape} was not compiled at warm-up")
            self._compiled[shape] = self._compile_step(shape)
            self.num_late_compiles += self._is_warm
        return self._compiled[shape]

    def is_ready(self, plan: Plan) -> bool:
        """Whether nothing has to be compiled for a plan."""
        is_admitting = None in self._compiled or not plan.admissions
        return plan.shape in self._compiled and is_admitting and self._host.is_ready(plan.transfers)

    def prepare(self, plan: Plan) -> None:
        """Compiles what a plan needs."""
        self.compiled(plan.shape)
        if plan.admissions:
            self._compiled_admit()
        self._host.prepare(self.cache, plan.transfers)

    def warm_up(
        self,
        shapes: Iterable[StepShape],
        progress: Callable[[], None] = lambda: None,
        seals: bool = True,
    ) -> None:
        """Compiles these shapes, two at a time, what a first request needs first, and runs each
        once, on rows of padding: XLA's CPU backend plans a product when it first runs. Afterwards
        a compilation is refused, or (`seals` is False) counted in `num_late_compiles`.
        """

        def compile_one(shape: StepShape) -> Plan:
            self.compiled(shape)
            return Plan(shape)

        with ThreadPoolExecutor(2) as pool:
            admit = pool.submit(self._compiled_admit)
            for plan in pool.map(compile_one, sorted(shapes, key=_first_needed)):
                self.wait(self.launch(plan, batches.build(plan, self.config)))
                progress()
            admit.result()
        self._host.warm_up(self.cache)
        self._is_warm, self._sealed = True, seals

    def admit(self, admissions: tuple[Admissions, ...]) -> None:
        """Writes the slot rows of sequences that start, fork or resume."""
        for arrays in admissions:
            self.cache, self.slots = self._compiled_admit()(self.cache, self.slots, arrays)

    def launch(self, plan: Plan, inputs: Inputs) -> step.Output:
        """Starts a plan on the device, behind those that were started before; its output is not
        there yet.
        """
        self.cache = self._host.carry(self.cache, plan.transfers)
        self.admit(inputs.admissions)
        executable, batch = self.compiled(plan.shape), inputs.batch
        self.cache, self.slots, output = executable(self.params, self.cache, self.slots, batch)
        return output

    def is_done(self, output: step.Output) -> bool:
        """Whether the device has finished a step."""
        return all(leaf.is_ready() for leaf in jax.tree.leaves(output))

    def wait(self, output: step.Output) -> step.Output:
        """What the host must know of a step, as numpy arrays."""
        return jax.tree.map(np.asarray, output)

    def _compile_step(self, shape: StepShape) -> Any:
        batch = batches.build_batch(Plan(shape), self.config)
        program = functools.partial(step.step, config=self.config, shape=shape, mixers=self._mixers)
        arguments = jax.tree.map(_abstract, (self.params, self.cache, self.slots, batch))
        return jax.jit(program, donate_argnums=(1, 2)).lower(*arguments).compile()

    def _compiled_admit(self) -> Any:
        if None not in self._compiled:
            arrays = batches.build_admissions((), self.config)
            program = functools.partial(step.admit, config=self.config)
            arguments = jax.tree.map(_abstract, (self.cache, self.slots, arrays))
            self._compiled[None] = (
                jax.jit(program, donate_argnums=(0, 1)).lower(*arguments).compile()
            )
        return self._compiled[None]


def _first_needed(shape: StepShape) -> tuple[bool, bool, bool, int]:
    """Sorts shapes: a prompt's, steady decoding's, those of many requests at once, scoring's."""
    has_both = bool(shape.decode[0] and shape.prefill[0])
    return shape.scored, has_both, bool(shape.decode[0]), shape.num_tokens


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
