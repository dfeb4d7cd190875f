"""Compiling for chips that are not there, and what every compiled program owes its cache."""

import dataclasses
import functools
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

from configs import presets
from configs.cache import keys_values
from configs.engine import Config, EngineConfig
from inference.runtime import batch, step
from inference.scheduling.step_schedule import StepSchedule
from inference.scheduling.step_shapes import StepShape
from layers import attention, decoder, kv_cache, params
from layers.kernels.attention import api
from layers.ragged import Ragged, Rectangle
from layers.registry import StepContext

MEGABYTE = 1 << 20
DECODE = StepShape((16, 1), (0, 64), greedy=True)
SAMPLED = StepShape((16, 1), (0, 64))
MIXED = StepShape((16, 1), (2, 64))
_H200_CORES = 132


@functools.cache
def h200() -> Any:
    """The device as XLA's compiler knows it."""
    description = Path(__file__).with_name("h200.txtpb").read_text(encoding="utf-8")
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=description, topology="1x1x1"
    )
    return topology.devices[0]


@functools.cache
def tpu(topology_name: str) -> Any:
    """One chip of a topology."""
    return topologies.get_topology_desc(platform="tpu", topology_name=topology_name).devices[0]


def compiled(program: Any, device: Any, arguments: Any, donated: tuple[int, ...]) -> Any:
    """The executable of a program over abstract arguments, traced as if the device were there."""
    is_gpu = device.platform == "gpu"
    described = AbstractDevice(
        device.device_kind, _H200_CORES if is_gpu else 1, "cuda" if is_gpu else device.platform
    )
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=described)
    sharding = SingleDeviceSharding(device)
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
    )
    with jax.sharding.use_abstract_mesh(mesh):
        jitted = jax.jit(program, donate_argnums=donated, keep_unused=True)
        return jitted.lower(*arguments).compile()


@functools.cache
def compiled_step(
    device: Any,
    shape: StepShape,
    page_tokens: int,
    attention: str = "reference",
    num_layers: int = 1,
) -> tuple[Any, Any, Any]:
    """A layer or more of Llama 3 8B as a step: the executable, its cache and its slots."""
    model = dataclasses.replace(presets.get("llama3-8b").config, num_layers=num_layers)
    engine = EngineConfig(
        max_seqs=16, max_context=4096, cache_bytes=256 * MEGABYTE, page_tokens=page_tokens,
        attention=attention,
    )  # fmt: skip
    config = Config(model, engine)
    layout = api.implementation(attention).layout
    cache = kv_cache.abstract(model, config.num_pages, page_tokens, engine.max_seqs, 0, layout)
    slots = jax.eval_shape(lambda: step.init_slots(config))
    weights = params.abstract(decoder.param_infos(model))
    program = functools.partial(step.step, config=config, shape=shape, attention=attention)
    arguments = weights, cache, slots, batch.build_batch(StepSchedule(shape), config)
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
    has_trees: bool = False  # and sinks


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
    spec = keys_values(K, H, case.window)
    page_format = spec.page_format(case.dtype)
    pages = api.implementation(name).layout(1025, page_tokens, page_format)
    q, kv = (tensor(rows * width, heads, H, dtype=case.dtype) for heads in (N, K))
    sinks_N = tensor(N, dtype="float32") if case.has_trees else None

    def attend(q: Any, k: Any, v: Any, pages: Any, ragged: Any, sinks_N: Any) -> Any:
        context = StepContext(ragged, None, spec, 0, True, False, name, page_format)
        return attention.attend(q, k, v, pages, context, case.cap, sinks_N)

    return compiled(attend, device, (q, kv, kv, pages, ragged, sinks_N), (3,)), pages


def num_bytes(tree: Any) -> int:
    """Bytes of a pytree of shapes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def launches(executable: Any, scope: str) -> list[str]:
    """Instructions of the program's top level that run a kernel, within a part of their names."""
    entry = executable.as_text().split("\nENTRY ")[1]
    kernels = re.finditer(r"%(\S+) = [^=]* (?:fusion|custom-call)\(.*op_name=\"([^\"]*)\"", entry)
    return [m[1] for m in kernels if re.search(scope, m[2])]


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


def copies(executable: Any, leaf: Any) -> list[str]:
    """Instructions that write a leaf's elements anew, under whatever shape."""
    found = re.finditer(
        r"= \w+\[([\d,]+)\]\S* (?:copy|copy-start|transpose)\(", executable.as_text()
    )
    return [m[0] for m in found if math.prod(map(int, m[1].split(","))) == math.prod(leaf.shape)]
