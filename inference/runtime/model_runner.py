"""Device state and the executables that advance it: one a `StepShape`, and none is compiled after
warm-up.
"""

import itertools
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from configs.engine import Config
from configs.errors import InputError
from inference.runtime import (
    adapter_stacks,
    compilation_cache,
    cpu_kernels,
    implementations,
    packed_output,
    step,
    swap,
)
from inference.runtime import batch as batches
from inference.runtime.adapter_stacks import AdapterStacks
from inference.runtime.adapter_weights import AdapterWeights
from inference.runtime.batch import Admissions, Inputs
from inference.runtime.executables import Executable, Executables
from inference.runtime.packed_output import PackedOutput
from inference.runtime.prompt_observer import PromptObserver
from inference.runtime.serialization.files import ExecutableFiles
from inference.runtime.swap import HostPages, PageCopies, PageSwapper, StateSnapshots
from inference.scheduling import step_shapes
from inference.scheduling.sequence import Sequence
from inference.scheduling.step_output import StepOutput
from inference.scheduling.step_schedule import ShardSchedule, StepSchedule
from inference.scheduling.step_shapes import StepShape
from layers import decoder, kv_cache
from layers.backends import backends
from layers.kernels.attention import api
from layers.kernels.device import target_device
from layers.kernels.linear import api as linear
from layers.kv_cache import Cache
from layers.params import Params
from sharding import host_memory
from sharding import mesh as meshes
from sharding.mesh import EACH_GROUP


def for_this_device(config: Config) -> tuple[Config, str]:
    """Returns the configuration with the device's defaults, and the implementation of attention.

    Raises:
        InputError: `engine.deterministic` on a device where it was not measured, or a field of
            `engine.kernels` names an implementation that cannot run.
    """
    device = target_device()
    backend = backends.of(device)
    if config.engine.deterministic and not backend.is_deterministic:
        raise InputError(
            "engine.deterministic holds on XLA's cpu backend, it is not measured on "
            f"{device.platform}"
        )
    config = config.for_platform(device.platform)
    kernels = config.engine.kernels
    if backend.has_native_kernels and {kernels.linear, kernels.attention} != {"reference"}:
        cpu_kernels.load()
    config = config.with_engine(linear=linear.choose(config))
    attention = api.choose(config)
    pads_bytes = api.implementation(attention.name).pads_bytes
    config = config.with_engine(row_multiple=None).for_platform(device.platform, pads_bytes)
    if config.engine.shapes.free_padding is None:
        is_native = attention.name == "ffi_cpu" and not config.prefill.chips
        drafting = config.draft or config.model
        is_free = is_native and step_shapes.leaves_padding_out(config, drafting)
        config = config.with_engine(free_padding=is_free)
    implementations.log(config, attention, device)
    return config, attention.name


# Of weights, and of pages with slots where they are kept, as `host_memory.offload` makes them.
Copies = tuple[Params, tuple[Cache, step.SlotState | None] | None]


def cache_arguments(config: Config, attention: str) -> kv_cache.Arguments:
    """What `kv_cache.abstract` and `kv_cache.init` take of an engine's cache."""
    num_pages = tuple(n * config.device_pages for n in config.num_pages)
    layout = api.layout(attention, config.engine.cache.row_multiple or 1)
    return (
        config.cached_model, num_pages, config.device_page_tokens, config.engine.max_seqs,
        config.engine.drafts.num_drafts, layout, config.num_snapshots,
    )  # fmt: skip


_DRAFT = "draft"
_BESIDE = _DRAFT, adapter_stacks.NAME  # the target's parameters


def abstract_params(config: Config, mesh: jax.sharding.Mesh | None = None) -> Params:
    """Shapes of parameters as an engine's products read them, over the chips of a mesh."""
    target = linear.abstract(config, decoder.param_infos(config.model), mesh)
    if stacks := adapter_stacks.abstract(config, mesh):
        target |= {adapter_stacks.NAME: stacks}
    if config.draft is None:
        return target
    infos = decoder.param_infos(config.draft)
    return target | {_DRAFT: linear.abstract(config.for_draft(), infos)}


class ModelRunner:
    """Owns the parameters, cache and slots of one engine, and runs its steps. It calls
    `before_admit` after a step's transfers, which may still read pages that its admissions write.
    """

    def __init__(
        self,
        config: Config,
        params: Params | Callable[[], Params],
        expected: Iterable[StepShape] = (),
        mesh: Mesh | None = None,
        executables: Path | None = None,
    ):
        """Params and cache live on JAX's default device, or on the chips of `config.mesh`.

        Args:
            params: values as the declaration says, or a function that reads them, which may lay
                them out for this engine's products (`new_weights.reader`).
            expected: the steps that come first, compiled while parameters are read.
            mesh: the chips; None: JAX's first.
            executables: from `scripts.compile --serialize`; these are not compiled.

        Raises:
            InputError: as `for_this_device` and `sharding.mesh.of`, or executables are to be loaded
                on several hosts.
        """
        if executables is not None and jax.process_count() > 1:
            raise InputError("executables are loaded on one host only: leave --executables out")
        self.config, self._attention = for_this_device(config)
        self._backend = backends.of(target_device(), self.config.engine.kernels.linear)
        self._mesh = mesh or meshes.of(self.config.mesh)
        self._adapters = AdapterStacks(self.config, self._mesh)
        values = abstract_params(self.config, self._mesh) if callable(params) else self.pack(params)
        slots = step.init_slots(self.config)
        cache = kv_cache.abstract(*cache_arguments(self.config, self._attention))
        files = self._executable_files(executables)
        self.executables = Executables(
            self.config, self._attention, self._backend, values, cache, slots, self._mesh, files
        )
        self.executables.prepare(expected)
        self._observer = PromptObserver(self.config, self._attention, self._backend)
        self._is_warm = self._sealed = False
        self.before_admit: Callable[[StepSchedule], None] = lambda schedule: None
        self.num_late_compiles = 0
        self._swapper = PageSwapper(self.config, cache, self._mesh)
        self.params: Params = {}
        self.reset()
        self._snapshots = StateSnapshots(self.config, cache, self._mesh)
        self.params = self.pack(params(), were_read=True) if callable(params) else values

    def _executable_files(self, folder: Path | None) -> ExecutableFiles | None:
        """Those of a folder, or a CPU's cached ones: JAX's cache would need a traced step."""
        chips = jax.devices()[:1] if self._mesh is None else [*self._mesh.devices.flat]
        is_cache = folder is None and self._mesh is None and self._backend.keeps_executables
        folder = compilation_cache.directory() if is_cache else folder
        if folder is None:
            return None
        return ExecutableFiles(folder, self.config, self._attention, chips, self._mesh, is_cache)

    def pack(self, params: Params, were_read: bool = False) -> Params:
        """Packs parameters for this engine's products, unless they `were_read` for these; under
        'draft' those of a drafting model.
        """
        infos = decoder.param_infos(self.config.model)
        target = {name: part for name, part in params.items() if name not in _BESIDE}
        target = linear.pack_params(self.config, target, infos, self._mesh, were_read)
        if self.config.engine.adapters.slots:
            target |= {adapter_stacks.NAME: self._adapters.empty()}
        if self.config.draft is None:
            return target
        infos = decoder.param_infos(self.config.draft)
        drafting = self.config.for_draft()
        return target | {_DRAFT: linear.pack_params(drafting, params[_DRAFT], infos)}

    def export_params(self) -> Params:
        """As `linear.export_params`, of the target model."""
        return linear.export_params(self.config, self.params, self._mesh)

    def reset(self) -> None:
        """Empties cache and slots, and those of adapters: at the start, and after a failed step has
        lost them.
        """
        self._swapper.forget_reads()
        if adapter_stacks.NAME in self.params:
            self.params |= {adapter_stacks.NAME: ()}  # frees what there is: two may not fit
            self.params |= {adapter_stacks.NAME: self._adapters.empty()}
        self.cache: Cache = ()  # frees what there is: two may not fit
        arguments = cache_arguments(self.config, self._attention)
        with backends.use(self._backend):
            if self._mesh is None:
                self.cache = kv_cache.init(*arguments)
                self.slots: step.SlotState | None = step.init_slots(self.config)
                return
            specs = kv_cache.specs(self.config.model, self.config.chip_model)
            self.cache = meshes.put(
                self._mesh, specs, lambda group, chip: kv_cache.init(*arguments)
            )
            self.slots = meshes.put(
                self._mesh, meshes.EACH_GROUP, lambda group, chip: step.init_slots(self.config)
            )

    def expert_visits(self) -> np.ndarray:
        """Tokens that visited each expert of each mixture since the slots were made, modulo 2^32:
        u32[L, E], summed over chips. Raises InputError without experts, or where hosts have only
        parts of the sums.
        """
        if jax.process_count() > 1:
            raise InputError("the visits of experts are counted on one host only")
        if self.config.model.mixtures is None:
            raise InputError(f"{self.config.model.name} has no experts")
        assert self.slots is not None
        visits = np.asarray(self.slots.expert_visits)
        groups = self.config.mesh.num_groups
        total: np.ndarray = visits.reshape(groups, -1, visits.shape[1]).sum(0, dtype=np.uint32)
        return total

    def copies(self, keeps_weights: bool, keeps_pages: bool) -> Copies:
        """Host copies for `restore`: weights (a drafter's always), and pages with slots or None."""
        self._swapper.store()
        beside = {name: part for name, part in self.params.items() if name in _BESIDE}
        weights, state = self.params if keeps_weights else beside, (self.cache, self.slots)
        return host_memory.offload((weights, state if keeps_pages else None))

    def free(self) -> None:
        """Frees the device's memory, all but what is compiled; until `restore` nothing runs."""
        self.params, self.cache, self.slots = {}, (), None
        self._swapper.free()

    def restore(self, copied: Copies, params: Params | None = None) -> None:
        """Ends `free` with packed `params`, or copied ones, and copied pages, or empty ones."""
        weights, state = copied
        if params is not None:
            weights = {name: part for name, part in weights.items() if name in _BESIDE}
        self.params = host_memory.restore(weights) | (params or {})
        if state is None:
            self.reset()
        else:
            self.cache, self.slots = host_memory.restore(state)

    @property
    def implementations(self) -> str:
        """Of products and of attention, and formats of weights: what its steps' times hold for."""
        engine, layer_formats = self.config.engine, dict(self.config.model.formats).values()
        weights = engine.weights or "+".join(
            sorted({name for formats in layer_formats for name in formats})
        )
        return ", ".join(filter(None, (engine.kernels.linear, self._attention, weights)))

    @property
    def cache_bytes(self) -> int:
        """Of all chips."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.cache))

    def compiled(self, shape: StepShape) -> Executable:
        """The executable of a shape, compiled at first use; raises RuntimeError if warm-up sealed
        it out.
        """
        is_new = not self.executables.has(shape)
        if is_new and self._sealed:
            raise RuntimeError(f"{shape} was not compiled at warm-up")
        executable = self.executables.step(shape)
        self.num_late_compiles += is_new and self._is_warm
        return executable

    def is_ready(self, schedule: StepSchedule) -> bool:
        has = self.executables.has
        can_run = has(schedule.shape) and (has(None) or not schedule.has_admissions)
        can_run &= self._snapshots.is_ready or not any(schedule.snapshots)
        can_run &= self._adapters.is_ready or not schedule.adapter_loads
        return can_run and self._swapper.is_ready(schedule.transfers)

    def prepare(self, schedule: StepSchedule) -> None:
        self.compiled(schedule.shape)
        if schedule.has_admissions:
            self.executables.admit()
        self._swapper.prepare(schedule.transfers)
        if any(schedule.snapshots):
            self._snapshots.prepare()
        if schedule.adapter_loads:
            self._adapters.prepare(self.params[adapter_stacks.NAME])

    def warm_up(
        self,
        shapes: Iterable[StepShape],
        progress: Callable[[], None] = lambda: None,
        seals: bool = True,
    ) -> None:
        """Compiles these shapes, two at a time, in the order that requests need them, and runs each
        once on rows of padding, since an executable's first run on a CPU is slow. Afterwards a
        compilation is an error, or (`seals` is False) counted in `num_late_compiles`.
        """

        def compile_one(shape: StepShape) -> StepSchedule:
            self.compiled(shape)
            return StepSchedule(shape, (ShardSchedule(),) * self.config.mesh.num_groups)

        with ThreadPoolExecutor(2) as pool:
            admit = pool.submit(self.executables.admit)
            for schedule in pool.map(compile_one, sorted(shapes, key=_first_needed)):
                self.wait(self.launch(schedule, batches.build(schedule, self.config)))
                progress()
            admit.result()
        if self.config.engine.requests.prompt_budgets:
            self.prepare_observer()
        if self.config.engine.adapters.slots:
            self._adapters.prepare(self.params[adapter_stacks.NAME])
        self._swapper.warm_up()
        self._snapshots.prepare()
        self._is_warm, self._sealed = True, seals

    def admit(self, admissions: tuple[Admissions, ...]) -> None:
        for arrays in admissions:
            self.cache, self.slots = self.executables.admit()(
                self.cache, self.slots, meshes.to_global(self._mesh, EACH_GROUP, arrays)
            )

    def compile_page_copies(self) -> None:
        self._swapper.compile_copies(range(len(self.config.num_host_pages)))

    def receive(
        self, sender: "ModelRunner", pages: Iterable[tuple[int, int, int]], shard: int
    ) -> None:
        """Queues copies of another runner's pages, (group, from, to) each, into those of a data
        shard, from device to device, after the steps that both have launched. The sender has the
        same model and page size, on as many chips as divide the model here.
        """
        for group, same in itertools.groupby(sorted(pages), lambda page: page[0]):
            remaining = list(same)
            while remaining:
                some, remaining = remaining[: swap.PAGES], remaining[swap.PAGES :]
                data = sender._swapper.read(sender.cache, group, [source for _, source, _ in some])
                targets = [target for *_, target in some]
                self.cache = self._swapper.receive(self.cache, group, targets, data, shard)

    def read_pages(self, group: int, pages: Items[int]) -> PageCopies:
        """Queues a copy of at most `swap.PAGES` pages of a group, to be taken by `host_pages`."""
        data = self._swapper.read(self.cache, group, pages)
        for array in jax.tree.leaves(data):
            array.copy_to_host_async()
        return data

    def host_pages(self, group: int, num_pages: int, data: PageCopies | None = None) -> HostPages:
        """As `PageSwapper.host_pages`; any thread may call it."""
        return self._swapper.host_pages(group, num_pages, data)

    def write_pages(
        self, group: int, pages: Items[int], data: Items[HostPages], shard: int
    ) -> None:
        """Queues copies of `data`, a page each, into pages of a data shard, as `receive` does."""
        for first in range(0, len(pages), swap.PAGES):
            some = slice(first, first + swap.PAGES)
            self.cache = self._swapper.receive_host(
                self.cache, group, pages[some], data[some], shard
            )

    def prepare_observer(self) -> None:
        self._observer.compile(self.params, self.cache)

    def observe(self, sequence: Sequence) -> np.ndarray:
        """Waits for launched steps; returns a prompt's attention as `PromptObserver` has it."""
        tokens = sequence.tokens[: sequence.num_computed_tokens]
        return self._observer(self.params, self.cache, tokens, sequence.pages)

    def launch(self, schedule: StepSchedule, inputs: Inputs) -> PackedOutput:
        """Queues a step on the device, after those launched before, and the copy of its output to
        the host; returns that output, not ready yet. Masks of grammars are written into the inputs.

        Raises:
            SequenceFault: a grammar has failed; nothing was queued.
        """
        if inputs.batch.mask_QX is not None:
            batches.fill_masks(np.asarray(inputs.batch.mask_QX), schedule)
        self.cache = self._swapper.transfer(self.cache, schedule.transfers)
        self.before_admit(schedule)
        for slot, adapter in schedule.adapter_loads:
            assert isinstance(adapter, AdapterWeights)
            stacks = self._adapters.load(self.params[adapter_stacks.NAME], slot, adapter)
            self.params |= {adapter_stacks.NAME: stacks}
        self.admit(inputs.admissions)
        executable = self.compiled(schedule.shape)
        batch = meshes.to_global(self._mesh, EACH_GROUP, inputs.batch)
        self.cache, self.slots, output = executable(self.params, self.cache, self.slots, batch)
        self.cache = self._snapshots.keep(self.cache, schedule.snapshots)
        output.words_X.copy_to_host_async()
        return output

    def is_done(self, output: PackedOutput) -> bool:
        return bool(output.words_X.is_ready())

    def wait(self, output: PackedOutput) -> StepOutput[np.ndarray]:
        """Waits for a step; its output as numpy arrays."""
        return packed_output.unpack(output)


def _first_needed(shape: StepShape) -> tuple[bool, bool, bool, int]:
    """Sort key of shapes: prefill alone, decoding alone, both, then scoring."""
    has_both = bool(shape.decode[0] and shape.prefill[0])
    return shape.scored, has_both, bool(shape.decode[0]), shape.num_tokens
