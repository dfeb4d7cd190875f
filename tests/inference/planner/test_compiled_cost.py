"""The planner against the compiler: XLA's own account of a compiled step, nothing allocated.

Weights and cache are equal to the byte. The products with weights are counted in the compiled
program, dot by dot; what comes on top are sums over rows, written as products with ones
(`layers/reduce.py`): less than 2 % in layers and head; sampling's own are counted apart.

`cost_analysis` is no help with FLOPs: it adds every exponential and comparison, and takes the
attention loop, whose trips are data, for one trip. So the loop's dots are counted apart: one trip
folds in 128 keys for every query row, masked or not.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax
import pytest

from configs import presets
from configs.cache import BLOCK_TOKENS
from configs.engine import Config, EngineConfig
from configs.kinds.params import leaves
from configs.model import ModelConfig
from inference.planner import cost, weights
from inference.planner.cost import Rows, Work
from inference.runtime import batch, step
from inference.scheduling.step_schedule import ShardSchedule
from inference.scheduling.step_shapes import StepShape, enumerate_shapes
from layers import decoder, kv_cache, params, stacks
from tests import compiling, fakes

DECODE = StepShape((8, 1), (0, 64))
PREFILL = StepShape((0, 1), (4, 64))
_ONES = 8  # columns of the matrix of ones that sums rows
_BLOCK_DIAGONAL_ROWS = 16  # of a sequence: up to here attention multiplies with every head's keys


def one_period(name: str) -> Config:
    """A preset cut to the layers that its pattern repeats, at full widths; where it repeats none,
    as with a dense layer before those with experts, each different layer once.
    """
    model = presets.get(name).config
    if len(model.pattern) == model.num_layers:
        each = list(dict.fromkeys(model.pattern))
        owners = [getattr(layer.mixer, "owner", None) for layer in each]
        pattern = tuple(
            layer if owner is None else dataclasses.replace(
                layer, mixer=dataclasses.replace(layer.mixer, owner=each.index(model.layers[owner]))
            )
            for layer, owner in zip(each, owners, strict=True)
        )  # fmt: skip
        model = dataclasses.replace(model, pattern=pattern, num_layers=len(pattern))
    model = dataclasses.replace(model, num_layers=len(model.pattern))
    return Config(model, EngineConfig.of(max_seqs=8, max_context=1024, cache_bytes=64 << 20))


class Arguments(NamedTuple):
    params: object
    cache: object
    slots: object
    batch: object


def abstract_arguments(config: Config, shape: StepShape) -> Arguments:
    engine, model = config.engine, config.model
    return Arguments(
        params.abstract(decoder.param_infos(model)),
        kv_cache.abstract(
            model,
            config.num_pages,
            config.page_tokens,
            engine.max_seqs,
            engine.drafts.num_drafts,
            num_snapshots=config.num_snapshots,
        ),
        jax.eval_shape(lambda: step.init_slots(config)),
        jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
            batch.build_batch(shape, ShardSchedule(), config),
        ),
    )


def compile_step(config: Config, shape: StepShape, arguments: Arguments):
    program = functools.partial(step.step, config=config, shape=shape, attention="reference")
    jitted = jax.jit(program, donate_argnums=(1, 2), keep_unused=True)
    return jitted.lower(*arguments).compile()


@pytest.mark.long
def test_what_is_compared_does_not_depend_on_the_code():
    """Products and memory are settled before LLVM writes the code: it need not be good code."""
    config = one_period("smollm2-135m")
    arguments = abstract_arguments(config, DECODE)
    optimized = compile_step(config, DECODE, arguments)
    with compiling.quickly():
        plain = compile_step(config, DECODE, arguments)
    assert sorted(dots(optimized.as_text())) == sorted(dots(plain.as_text()))
    sizes, plain_sizes = optimized.memory_analysis(), plain.memory_analysis()
    for name in ("argument", "output", "alias"):
        field = f"{name}_size_in_bytes"
        assert getattr(sizes, field) == getattr(plain_sizes, field) > 0


def num_bytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


# --- dots of a compiled program -------------------------------------------------------------------

_SHAPE = r"[a-z]+\d+\[([\d,]*)\]"
_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_VALUE = re.compile(rf"^\s+(?:ROOT )?%([\w.\-]+) = {_SHAPE}")
_DOT = re.compile(
    rf"= {_SHAPE}\S* dot\(%([\w.\-]+), %[\w.\-]+\).*?lhs_contracting_dims=\{{([\d,]*)\}}"
)
_CALLED = re.compile(r"(?:calls|to_apply|body)=%([\w.\-]+)")


def dims(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def dots(hlo: str) -> Iterator[tuple[str, int]]:
    """(part, FLOPs) of every dot that a run of the program meets, a loop's once: 'loop', 'sample'
    (which is no product with weights) or 'rest'.
    """
    bodies: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in hlo.splitlines():
        if head := _HEAD.match(line):
            lines = bodies[head[1]] = []
            entry = head[1] if line.startswith("ENTRY") else entry
        lines.append(line)

    def walk(name: str, in_loop: bool) -> Iterator[tuple[str, int]]:
        shapes = {m[1]: dims(m[2]) for line in bodies[name] if (m := _VALUE.match(line))}
        for line in bodies[name]:
            if dot := _DOT.search(line):
                contracted = math.prod(shapes[dot[2]][axis] for axis in dims(dot[3]))
                part = "sample" if "/sample/" in line else "rest"
                yield "loop" if in_loop else part, 2 * math.prod(dims(dot[1])) * contracted
            for called in _CALLED.findall(line):
                yield from walk(called, in_loop or " while(" in line)

    return walk(entry, False)


def test_dots_are_found_and_loops_told_apart():
    def program(x, w):
        y = jax.jit(lambda x: x @ w)(x)
        return jax.lax.fori_loop(0, x.shape[0] - jax.numpy.int32(x[0, 0]), lambda _, y: y @ w, y)

    shapes = jax.ShapeDtypeStruct((3, 5), "float32"), jax.ShapeDtypeStruct((5, 5), "float32")
    found = list(dots(jax.jit(program).lower(*shapes).compile().as_text()))
    assert sorted(found) == [("loop", 2 * 3 * 5 * 5), ("rest", 2 * 3 * 5 * 5)]


# --- the comparison -------------------------------------------------------------------------------


def held_bytes(config: Config, arguments: Arguments) -> float:
    """Predicted bytes of weights and cache, which are those of the arrays."""
    model = config.model
    predicted_weights = weights.weight_bytes(model)
    assert predicted_weights == num_bytes(arguments.params)
    assert predicted_weights == params.num_bytes(decoder.param_infos(model))
    assert config.pool_bytes == num_bytes(arguments.cache)
    return predicted_weights + config.pool_bytes


@pytest.mark.parametrize("name", presets.NAMES)
def test_weights_and_cache_are_predicted_to_the_byte(name):
    config = one_period(name)
    assert held_bytes(config, abstract_arguments(config, DECODE)) > 0


def check(name: str, shape: StepShape) -> None:
    config = one_period(name)
    model, arguments = config.model, abstract_arguments(config, shape)
    held = held_bytes(config, arguments)
    compiled = compile_step(config, shape, arguments)
    told = compiled.memory_analysis()
    around = num_bytes(arguments.slots), num_bytes(arguments.batch)
    assert told.argument_size_in_bytes == held + sum(around)
    assert told.alias_size_in_bytes == config.pool_bytes + around[0]  # written in place

    found = list(dots(compiled.as_text()))
    block = tuple(
        Rows(rows, queries, BLOCK_TOKENS) for rows, queries in (shape.decode, shape.prefill) if rows
    )
    logits = max(shape.num_logits, 2)  # a product never has a single row (`layers/weights.py`)
    work = Work(shape.num_tokens, block, logits)
    operations = cost.step_operations(model, work)
    products = sum(
        o.flops * padding(model, shape.num_tokens, o.by_expert)
        for o in operations
        if not o.name.startswith("attend")
    )
    by_part = collections.Counter()
    for part, flops in found:
        by_part[part] += flops
    assert by_part["rest"] == pytest.approx(products, rel=0.02)
    assert by_part["loop"] == attention_trip(config, shape)
    # Masses and sums over the vocabulary: a few columns of ones beside the D of the head.
    assert by_part["sample"] <= 8 * _ONES * 2 * shape.num_logits * model.vocab_size


def padding(model: ModelConfig, num_tokens: int, by_expert: bool) -> float:
    """Rows that experts multiply on a CPU, over those that visit them: blocks are padded."""
    if not by_expert:
        return 1.0
    num_experts, top_k = next(kind.ffn.experts for kind in model.pattern[::-1])
    visits = num_tokens * top_k
    num_blocks, rows = stacks.blocks(visits, num_experts)
    return num_blocks * rows / visits


def attention_trip(config: Config, shape: StepShape) -> int:
    """FLOPs of one trip of every layer's attention loops: all query rows meet all keys of a block;
    few of them (decoding) sit in a block-diagonal matrix and meet the keys of all K heads, in a
    loop of their own for all rows, the first half and the first quarter. The softmax's mass is a
    product with `_ONES` columns of ones.
    """
    model, found = config.model, 0
    each = itertools.product(enumerate(model.layers), (shape.decode, shape.prefill))
    for (index, layer), (rows, queries) in each:
        num_heads, pages, copies = layer.mixer.query_heads, model.stored_by(index), 1
        if queries * num_heads <= _BLOCK_DIAGONAL_ROWS:
            copies = pages.kv_heads
            rows += (-(-rows // 2) - (-rows // 4)) * (rows >= 8)
        per_pair = 2 * (pages.key_width + pages.value_width) * copies + 2 * _ONES
        pairs = num_heads * queries * BLOCK_TOKENS
        found += rows * per_pair * pairs
    return found


# Each part that has products of its own: windows, a plain feed-forward, experts alone and beside a
# shared one, latents without and with compressed queries and an indexer, experts with biases,
# inputs of layers, experts beside a dense feed-forward, states. Others have these in other sizes.
_OWN_PRODUCTS = (
    "smollm2-135m", "gemma3-270m", "gpt2", "olmoe-1b-7b", "qwen1.5-moe-a2.7b", "deepseek-v2-lite",
    "deepseek-v3.2", "gpt-oss-20b", "gemma4-e2b", "gemma4-26b-a4b", "granite4-h-small",
)  # fmt: skip
_CASES = [
    pytest.param(
        name, shape, id=f"{name}-{phase}",
        marks=() if name in _OWN_PRODUCTS else pytest.mark.long,
    )
    for phase, shape in (("decode", DECODE), ("prefill", PREFILL))
    for name in presets.NAMES
]  # fmt: skip


@pytest.mark.quick_code
@pytest.mark.parametrize("name, shape", _CASES)
def test_a_step_is_what_the_compiler_says(name, shape):
    """Sampling, half of what is compiled, is the same for all: one preset has it."""
    with contextlib.nullcontext() if name == "smollm2-135m" else fakes.no_draws():
        check(name, shape)


@pytest.mark.quick_code
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", presets.NAMES)
def test_every_shape_is_what_the_compiler_says(name):
    for shape in enumerate_shapes(one_period(name).engine):
        if not shape.scored:  # the head of a scored step runs in a loop over chunks
            check(name, shape)


def test_a_period_scales_to_the_whole_model():
    """What one period says of a preset: all but tables and the last norm grows with the layers."""
    for name in presets.NAMES:
        whole, period = presets.get(name).config, one_period(name).model
        if len(whole.pattern) == whole.num_layers:
            continue  # it has no period
        times = whole.num_layers / period.num_layers
        infos = leaves(whole.parameters())
        tables = sum(i.elements for path, i in infos if path[0] != "layers" and i.is_matrix)
        once = 2 * (tables + whole.width * (2 if whole.norm == "layer" else 1))
        weight_bytes = [weights.weight_bytes(m) - once for m in (whole, period)]
        assert weight_bytes[0] == pytest.approx(times * weight_bytes[1])
        assert cost.cache_bytes(whole, 512) == times * cost.cache_bytes(period, 512)
