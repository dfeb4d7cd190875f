"""Compiling for chips that are not there, and what every compiled program owes its cache."""

import dataclasses
import functools
import math
import re
import runpy
from typing import Any, NamedTuple

import jax
from jax.sharding import SingleDeviceSharding

from configs import presets
from configs.cache import keys_values, latent
from configs.engine import Config, EngineConfig
from configs.hardware import targets
from configs.heads import DFlash
from configs.kinds import params
from configs.kinds.compressed import Compressed
from configs.kinds.kind import Mixer
from configs.kinds.latent import Indexer, Latent
from configs.mesh import Mesh
from configs.model import ModelConfig
from configs.recipes import heads, run
from configs.recipes.run import Run
from configs.settings.cache import LANES
from inference.planner.compiled import program
from inference.planner.compiled.prediction import exchanged, predict
from inference.planner.compiled.report import AbsentEngine, CompiledStep
from inference.runtime import batch, step
from inference.scheduling.step_schedule import ShardSchedule
from inference.scheduling.step_shapes import StepShape, enumerate_shapes
from layers import decoder, kv_cache, page_rows
from layers.kernels.attention import api
from layers.kernels.linear import api as linear
from layers.kv_cache import Paged
from layers.mixers import attention
from layers.ragged import Ragged, Rectangle
from layers.registry import StepContext
from sharding import topologies

MEGABYTE = 1 << 20
DECODE = StepShape((16, 1), (0, 64), greedy=True)
SAMPLED = StepShape((16, 1), (0, 64))
MIXED = StepShape((16, 1), (2, 64))
# Of DeepSeek-V4-Flash.
SPARSE = Compressed(
    64, 512, 1024, 64, groups=8, group_rank=1024, window=128, stride=4, overlaps=True,
    indexer=Indexer(64, 128, 512),
)  # fmt: skip
# Of DeepSeek-V3.2, and Quest's pages of Llama 3 8B.
INDEXED = Latent(128, 512, 64, 128, 128, query_rank=1536, indexer=Indexer(64, 128, 2048))
QUEST = dataclasses.replace(presets.get("llama3-8b").config.layers[0].mixer, token_budget=1024)
HEAVY = dataclasses.replace(SPARSE, stride=128, overlaps=False, indexer=None)


def device(target: str) -> Any:
    """The first of a target's devices, as its compiler knows it."""
    return topologies.devices(targets.parse(target))[0]


def compiled(program: Any, device: Any, arguments: Any, donated: tuple[int, ...]) -> Any:
    """The executable of a program over abstract arguments, traced as if the device were there."""
    sharding = SingleDeviceSharding(device)
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
    )
    with topologies.traced_for(device):
        jitted = jax.jit(program, donate_argnums=donated, keep_unused=True)
        return jitted.lower(*arguments).compile()


@functools.cache
def compiled_step(
    device: Any,
    shape: StepShape,
    page_tokens: int,
    attention: str = "reference",
    num_layers: int = 1,
    mixer: Mixer | None = None,
) -> tuple[Any, Any, Any]:
    """A layer or more of Llama 3 8B as a step, with its mixer or a given one: the executable, its
    cache and its slots.
    """
    model = dataclasses.replace(presets.get("llama3-8b").config, num_layers=num_layers)
    if mixer is not None:
        pattern = tuple(dataclasses.replace(layer, mixer=mixer) for layer in model.pattern)
        model = dataclasses.replace(model, pattern=pattern)
    engine = EngineConfig.of(
        max_seqs=16, max_context=4096, cache_bytes=256 * MEGABYTE, page_tokens=page_tokens,
        attention=attention,
    )  # fmt: skip
    config = Config(model, engine)
    layout = api.layout(attention, LANES if device.platform == "tpu" else 1)
    cache = kv_cache.abstract(model, config.num_pages, page_tokens, engine.max_seqs, 0, layout)
    slots = jax.eval_shape(lambda: step.init_slots(config))
    with topologies.traced_for(device):
        weights = linear.abstract(config, decoder.param_infos(model))
    program = functools.partial(step.step, config=config, shape=shape, attention=attention)
    arguments = weights, cache, slots, batch.build_batch(shape, ShardSchedule(), config)
    return compiled(program, device, arguments, (1, 2)), cache, slots


class Attention(NamedTuple):
    """One rectangle of attention over pages."""

    rows: int
    width: int
    heads: tuple[int, int]  # N, K
    head_width: int
    page_tokens: int
    window: int | None = None
    cap: float | None = None
    dtype: str = "bfloat16"
    has_trees: bool = False
    has_sinks: bool = False
    cache: str | None = None  # format of the pages, where it is another
    first_tokens: int = 0


def compiled_attention(device: Any, name: str, case: Attention) -> tuple[Any, Any]:
    """An implementation alone, over sequences of at most 4,096 tokens: the executable and its
    pages.
    """
    rows, width, (N, K), H, page_tokens = case[:5]

    def tensor(*shape: int, dtype: Any = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    ancestors_YW = tensor(rows, width, dtype="uint32") if case.has_trees else None
    ragged = Ragged((Rectangle(
        tensor(rows), tensor(rows, width), tensor(rows, width, dtype="bool"),
        (tensor(rows, 4096 // page_tokens),), ancestors_YW,
    ),))  # fmt: skip
    spec = keys_values(K, H, case.window, first_tokens=case.first_tokens)
    page_format = spec.page_format(case.cache or case.dtype)
    pages = api.implementation(name).layout(1025, page_tokens, page_format)
    q, kv = (tensor(rows * width, heads, H, dtype=case.dtype) for heads in (N, K))
    sinks_N = tensor(N, dtype="float32") if case.has_sinks else None

    def attend(q: Any, k: Any, v: Any, pages: Any, ragged: Any, sinks_N: Any) -> tuple[Any, Any]:
        context = StepContext(ragged, None, spec, 0, True, False, name, page_format)
        out, leaf = attention.attend(q, k, v, Paged(pages), context, case.cap, sinks_N)
        return out, leaf.pages

    return compiled(attend, device, (q, kv, kv, pages, ragged, sinks_N), (3,)), pages


class Latents(NamedTuple):
    """One rectangle of absorbed attention over pages of latents."""

    rows: int
    width: int
    num_heads: int
    rank: int  # C
    rope_width: int  # R
    page_tokens: int
    dtype: str = "bfloat16"
    has_trees: bool = False
    cache: str | None = None


def compiled_latents(device: Any, name: str, case: Latents) -> tuple[Any, Any]:
    """As `compiled_attention`, of latents: what a step writes, and attention over all of them."""
    rows, width, N, C, R, page_tokens = case[:6]

    def tensor(*shape: int, dtype: Any = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    ancestors_YW = tensor(rows, width, dtype="uint32") if case.has_trees else None
    rectangle = Rectangle(
        tensor(rows), tensor(rows, width), tensor(rows, width, dtype="bool"),
        (tensor(rows, 4096 // page_tokens),), ancestors_YW,
    )  # fmt: skip
    page_format = latent(C, R).page_format(case.cache or case.dtype)
    chosen = api.implementation(name)
    pages = chosen.layout(1025, page_tokens, page_format)
    q_YWNH = tensor(rows, width, N, C + R, dtype=case.dtype)
    row_YWX = tensor(rows, width, C + R, dtype=case.dtype)

    def attend(q_YWNH: Any, row_YWX: Any, pages: Any, rectangle: Any) -> Any:
        arguments = rectangle, 0, page_format
        if page_format.is_quantized:
            row_TX = page_rows.quantize(row_YWX.reshape(rows * width, C + R), page_format)
            row_YWX = row_TX.reshape(rows, width, -1)
        if chosen.append_and_attend is not None:
            return chosen.append_and_attend(q_YWNH, row_YWX, pages, *arguments)
        row_TX = row_YWX.reshape(rows * width, -1)
        pages = chosen.write(pages, row_TX, Ragged((rectangle,)), 0)
        return chosen.attend_pages(q_YWNH, pages, *arguments), pages

    return compiled(attend, device, (q_YWNH, row_YWX, pages, rectangle), (2,)), pages


def num_bytes(tree: Any) -> int:
    """Bytes of a pytree of shapes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def launches(executable: Any, scope: str) -> list[str]:
    """Names of what the device runs, within a part of its path of scopes."""
    instructions = program.instructions(executable.as_text())
    return [
        launch.name
        for launch in instructions
        if launch.is_launch and re.search(scope, launch.op_name)
    ]


def counted(
    device: Any,
    shape: StepShape,
    page_tokens: int,
    attention: str,
    num_layers: int,
    mixer: Mixer | None = None,
) -> Any:
    """What a step asks of the device and the host."""
    executable, _, _ = compiled_step(device, shape, page_tokens, attention, num_layers, mixer)
    return program.read(executable.as_text())


def check_the_host_never_waits(step: program.CompiledProgram) -> None:
    """Not before the step's output is there, which is one array."""
    assert (step.num_conditionals, step.num_loops, step.num_outputs) == (0, 0, 1)


def loop_body(executable: Any, num_runs: int) -> dict[str, str]:
    """Instructions of the loop with this trip count by name; the last is "ROOT"."""
    text = executable.as_text()
    trips = re.escape(f'"known_trip_count":{{"n":"{num_runs}"}}')
    (name,) = re.findall(rf" while\(.*body=(%[\w.-]+),.*{trips}", text)
    (body,) = re.findall(rf"^{re.escape(name)} .*?^}}", text, re.MULTILINE | re.DOTALL)
    lines = (line.strip() for line in body.splitlines()[1:-1])
    return {line.split(" ")[0].lstrip("%"): line for line in lines}


def operands(instruction: str) -> list[str]:
    """Names of what an instruction reads, in order."""
    return re.findall(r"%([\w.-]+)", re.search(r" [\w-]+\((%.*?)\)(?:,|$)", instruction)[1])


def check_entries(device: Any, mixer: Mixer, most_temporary: int) -> None:
    """A step over entries of several tokens updates both of a layer's page groups in place."""
    for shape in (DECODE, MIXED):
        executable, cache, slots = compiled_step(device, shape, 128, mixer=mixer)
        memory, owned = executable.memory_analysis(), num_bytes((cache, slots))
        assert owned <= memory.alias_size_in_bytes < owned + MEGABYTE
        assert memory.temp_size_in_bytes < most_temporary * MEGABYTE
        assert not any(copies(executable, pages) for pages in jax.tree.leaves(cache))


def check_no_context_is_gathered(
    device: Any, shape: StepShape, page_tokens: int, attention: str, mixer: Mixer, context: int
) -> None:
    """No launch of XLA's in attention writes as many elements as what its queries read has, the
    cache's own leaves aside.
    """
    executable, cache, _ = compiled_step(device, shape, page_tokens, attention, 2, mixer)
    leaves = {math.prod(leaf.shape) for leaf in jax.tree.leaves(cache)}
    for launch in program.instructions(executable.as_text()):
        is_xla = launch.is_launch and launch.opcode != "custom-call"
        if is_xla and "/attend/" in launch.op_name:
            sizes = {_elements(array) for array in re.findall(r"\w+\[[\d,]+\]", launch.shape)}
            assert max(sizes - leaves, default=0) < context, launch.name


def copies(executable: Any, leaf: Any) -> list[str]:
    """Instructions that write a leaf's elements anew, under whatever shape."""
    matches = re.finditer(
        r"= \w+\[([\d,]+)\]\S* (?:copy|copy-start|transpose)\(", executable.as_text()
    )
    return [m[0] for m in matches if math.prod(map(int, m[1].split(","))) == math.prod(leaf.shape)]


def check_report(
    target_name: str,
    attention: str,
    name: str = "llama3-8b",
    mesh: Mesh | None = None,
    num_layers: int = 1,
    cache: str | None = None,
    weights: str | None = None,
    max_seqs: int = 16,
) -> None:
    """Of a small model with some layers of a preset, over devices of a target (all, unless a mesh
    has fewer): weights and cache as planned, to the byte, temporaries within 1.25 of the
    prediction; it fits, and says so. Devices exchange what the planner says, and no more. A layer's
    pages are read by one kernel.
    """
    target, model = targets.parse(target_name), presets.get(name).config
    model = dataclasses.replace(model, num_layers=num_layers, vocab_size=32_000, cache_format=cache)
    engine = EngineConfig.of(
        max_seqs=max_seqs, max_context=1024, cache_bytes=64 * MEGABYTE, weights=weights
    )
    mesh = mesh or Mesh(model=target.num_devices)
    config = run.stored(Config(model, engine, mesh)).for_platform(target.platform)
    absent = AbsentEngine(config, target)
    assert absent.attention == attention
    shapes = absent.usual_shapes()
    predicted = predict(absent.config, target, shapes)
    padding = MEGABYTE + (_lane_padding(absent.config) if target.platform == "tpu" else 0)
    for report in absent.steps(shapes):
        assert isinstance(report, CompiledStep), report
        argument_bytes = report.program.argument_bytes
        assert argument_bytes["params"] == predicted.weight_bytes
        assert argument_bytes["cache"] == predicted.cache_bytes
        total_bytes = sum(argument_bytes.values())
        assert total_bytes - report.input_bytes == predicted.weight_bytes + predicted.cache_bytes
        assert total_bytes <= report.argument_bytes < total_bytes + padding
        print(f"{report.shape}: {report.temporary_bytes} bytes of temporaries, {report.program}")
        assert report.total_bytes < predicted.memory_bytes and predicted.fits
        assert report.temporary_bytes <= 1.25 * predicted.temporary_bytes
        assert report.program.num_conditionals == 0 and report.program.num_outputs == 1
        assert len(_readers(absent.compiled(report.shape))) == num_layers
        exchanges = {
            kind: (count, report.program.collective_bytes[kind])
            for kind, count in report.program.collectives.items()
        }
        planned = exchanged(absent.config, target, report.shape, absent.several_hosts)
        if target.platform == "tpu" or (report.shape.greedy and mesh.expert == 1):
            assert exchanges == planned
        else:  # independent ones travel together
            assert {kind: num_bytes for kind, (_, num_bytes) in exchanges.items()} == {
                kind: num_bytes for kind, (_, num_bytes) in planned.items()
            }


def _lane_padding(config: Config) -> int:
    """Bytes that matrices take on a TPU beside their own, at most: rows are whole lanes of 128."""
    matrices = (info for _, info in params.leaves(config.chip_model.parameters()) if info.is_matrix)
    return sum(2 * info.elements * (-info.shape[-1] % 128) // info.shape[-1] for info in matrices)


def _readers(executable: Any) -> list[str]:
    """What runs on pages of the cache, of all layers, and is not what writes them: its scopes. No
    page is copied.
    """
    instructions = list(program.instructions(executable.as_text()))
    pages = [
        item for item in instructions
        if item.opcode == "parameter" and item.op_name.startswith("cache[")
    ]  # fmt: skip
    sizes = {_elements(leaf.shape) for leaf in pages}
    names = {item.name for item in instructions if _elements(item.shape) in sizes}
    launches = (item for item in instructions if item.is_launch)
    users = [launch for launch in launches if names.intersection(_named(launch.text))]
    assert not [user for user in users if user.opcode in ("copy", "transpose")]
    written = r"/scatter$|/append/"
    return [user.op_name for user in users if not re.search(written, user.op_name)]


def _named(instruction: str) -> list[str]:
    return re.findall(r"%([\w.-]+)", instruction.partition(" = ")[2])


def _elements(shape: str) -> int:
    """Of one array; 0 of a tuple."""
    match = re.match(r"\w+\[([\d,]+)\]", shape)
    return math.prod(map(int, match[1].split(","))) if match else 0


def _dflash(target: ModelConfig, digest: str, proposed_ids: tuple[int, ...]) -> DFlash:
    fields = {field.name: getattr(target, field.name) for field in dataclasses.fields(ModelConfig)}
    return DFlash(**fields | {"tied": False, "target": digest}, features=(1, 2), block_tokens=4)


def check_drafting(target_name: str, proposer: str, tree: dict[str, Any]) -> Any:
    """A step that drafts waits for nothing either, and copies no pages, its head's among them; its
    executable.
    """
    target = targets.parse(target_name)
    model = dataclasses.replace(presets.get("llama3-8b").config, num_layers=2, vocab_size=32_000)
    make = {"eagle": heads.eagle, "medusa": heads.medusa, "dflash": _dflash}.get(proposer)
    head = make and dataclasses.replace(make(model, "", tuple(range(8192))), dtype="bfloat16")
    engine = EngineConfig.of(
        max_seqs=16, max_context=1024, cache_bytes=64 * MEGABYTE, num_drafts=3,
        proposer=proposer, **tree,
    )  # fmt: skip
    config = Config(model, engine, draft=head)
    absent = AbsentEngine(config.for_platform(target.platform), target)
    shape = StepShape((16, 4), (0, 64), greedy=True)
    (step,) = absent.steps([shape])
    assert isinstance(step, CompiledStep), step
    check_the_host_never_waits(step.program)
    assert step.temporary_bytes < 16 * MEGABYTE  # keys and values of a layer are more
    print(f"{proposer}: {step.program.launches}, {step.temporary_bytes} bytes of temporaries")
    return absent.compiled(shape)


def check_run(name: str, target_name: str) -> None:
    """The greedy decode step of a file of `configs/runs` with two layers of its model: bytes of
    weights and cache, and what chips exchange, as planned.
    """
    run: Run = runpy.run_path(f"configs/runs/{name}.py")["RUN"]
    target = targets.parse(target_name)
    model = dataclasses.replace(presets.get(run.model).config, num_layers=2)
    config = Config(model, run.engine, run.mesh).for_platform(target.platform)
    whole = dataclasses.replace(config, model=presets.get(run.model).config)
    shapes = enumerate_shapes(config.engine)
    assert run.mesh.num_chips == target.num_devices and predict(whole, target, shapes).fits
    _check_greedy_step(config, target)


def check_long_context(target_name: str, name: str, mesh: Mesh, num_tokens: int) -> None:
    """A lone sequence of so many tokens fits; of two layers a chip holds its part, to a page, and
    the greedy step is as planned.
    """
    target = targets.parse(target_name)
    model = dataclasses.replace(presets.get(name).config, max_context=num_tokens)
    engine = EngineConfig.of(max_seqs=1, max_context=num_tokens)
    config = Config(model, engine, mesh).for_platform(target.platform, target.pads_bytes)
    whole = config.with_room(1)
    assert predict(whole, target, enumerate_shapes(whole.engine)).fits
    part = dataclasses.replace(config, model=dataclasses.replace(model, num_layers=2)).with_room(1)
    (page_bytes,) = part._page_bytes
    page_tokens = part.chip_page_tokens
    pages = _check_greedy_step(part, target)["cache"] // page_bytes - 1  # without page 0
    assert 0 <= pages * page_tokens - num_tokens / mesh.context < page_tokens


def _check_greedy_step(config: Config, target: targets.Target) -> dict[str, int]:
    """Bytes of a chip's arguments."""
    absent = AbsentEngine(config, target)
    (step,) = absent.steps(absent.usual_shapes()[:1])
    assert isinstance(step, CompiledStep) and step.shape.greedy, step
    held, predicted = step.program.argument_bytes, predict(absent.config, target, (step.shape,))
    assert (held["params"], held["cache"]) == (predicted.weight_bytes, predicted.cache_bytes)
    kinds = step.program.collectives.items()
    found = {kind: (count, step.program.collective_bytes[kind]) for kind, count in kinds}
    assert found == exchanged(absent.config, target, step.shape, absent.several_hosts)
    print(f"{config.model.name}: {held}, {found}, compiled in {step.compile_s:.1f} s")
    return dict(held)


def launches_a_layer(one_layer, two_layers):
    """Launches by part that the second layer adds: what all layers share is not among them."""
    first, second = one_layer.launches, two_layers.launches
    added = {part: second.get(part, 0) - first.get(part, 0) for part in {**first, **second}}
    return {part: count for part, count in added.items() if count}
