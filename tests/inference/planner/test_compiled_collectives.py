"""What chips exchange in a compiled program: kinds, numbers and bytes, as planned."""

import subprocess
import sys

import jax
import pytest

from configs.engine import Config, EngineConfig
from configs.hardware import targets
from configs.mesh import Mesh
from inference.planner.compiled import prediction, program
from inference.planner.parallel import collectives
from inference.runtime import model_runner, step
from inference.runtime.executables import Executables
from inference.scheduling.step_shapes import StepShape
from layers import decoder, kv_cache
from layers.backends import backends
from layers.kernels.device import target_device
from layers.kernels.linear import api as linear
from sharding import mesh as meshes
from tests import fakes

pytestmark = pytest.mark.quick_code

_SHARDED = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 4)
mesh = jax.make_mesh((4,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))

def exchange(x_TD):  # [8, 64] a chip
    whole_TD = jax.lax.all_gather(x_TD, "model", axis=0, tiled=True)
    sums_TD = jax.lax.psum(jnp.sin(x_TD), "model") + jax.lax.psum(jnp.cos(x_TD), "model")
    part_TD = jax.lax.psum_scatter(x_TD * 2, "model", scatter_dimension=1, tiled=True)
    next_TD = jax.lax.ppermute(x_TD, "model", [(i, (i + 1) % 4) for i in range(4)])
    turned_TD = jax.lax.all_to_all(x_TD, "model", 1, 0, tiled=True)
    return whole_TD.sum(0), sums_TD, part_TD, next_TD, turned_TD

sharded = jax.shard_map(
    exchange, mesh=mesh, in_specs=P("model"), out_specs=(P(),) + (P("model"),) * 4, check_vma=False
)
x = jax.ShapeDtypeStruct((32, 64), "float32", sharding=NamedSharding(mesh, P("model")))
print(jax.jit(sharded).lower(x).compile().as_text())
"""


def test_a_program_of_four_devices():
    ran = subprocess.run([sys.executable, "-c", _SHARDED], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found = program.read(ran.stdout)
    part = 8 * 64 * 4
    assert found.collective_bytes == {
        "all-gather": 4 * part, "all-reduce": 2 * part, "reduce-scatter": part,
        "collective-permute": part, "all-to-all": part,
    }  # fmt: skip
    assert set(found.collectives) == set(found.collective_bytes)
    assert found.argument_bytes == {"x_": part}


_LINES = {  # of compilers for GPUs and TPUs
    "all-reduce": ("(f32[8,4]{1,0}, bf16[8]{0}) all-reduce(%a, %b), to_apply=%add", 144),
    "all-reduce, begun": ("f32[8,4]{1,0:T(8,128)S(1)} all-reduce-start(%a), to_apply=%add", 128),
    "all-reduce, begun, with its operand": (
        "((f32[8,4]{1,0}), f32[8,4]{1,0}) all-reduce-start(%a), to_apply=%add",
        128,
    ),
    "all-gather, begun": ("(f32[2,4]{1,0}, f32[8,4]{1,0}) all-gather-start(%a)", 128),
    "all-gather of two, begun": (
        "((f32[2]{0}, u8[2]{0}), (f32[8]{0}, u8[8]{0})) all-gather-start(%a, %b)", 40
    ),
    "collective-permute, begun": (
        "(bf16[8]{0:T(256)}, bf16[8]{0:T(256)}, u32[]{:S(2)}, u32[]{:S(2)}) "
        "collective-permute-start(%a), source_target_pairs={{0,1}}", 16
    ),
    "reduce-scatter": ("f32[2]{0} reduce-scatter(%a), replica_groups={{0,1},{2,3}}", 16),
    "reduce-scatter, iota": ("f32[2]{0} reduce-scatter(%a), replica_groups=[2,4]<=[8]", 32),
    "reduce-scatter, by axis": (
        "f32[2]{0} reduce-scatter(%a), replica_groups=mesh['data'=2,'model'=4] {'model'}", 32
    ),
    "reduce-scatter, begun": ("((f32[8]{0}), f32[2]{0}) reduce-scatter-start(%a)", 32),
    "ended": ("f32[8]{0} all-gather-done(%s)", 0),
    "a fusion": ("f32[8]{0} fusion(%s), kind=kLoop", 0),
}  # fmt: skip


def test_an_exchange_on_a_core_beside_is_one():
    """As a 7x has them."""
    text = """HloModule m

%called (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %r = f32[8,4]{1,0} all-reduce(%p), to_apply=%add
}, execution_thread="sparsecore"

%other (p: f32[8]) -> f32[8] {
  ROOT %p = f32[8]{0} parameter(0)
}, execution_thread="sparsecore"

ENTRY %e (a: f32[8,4], b: f32[8]) -> f32[8,4] {
  %a = f32[8,4]{1,0} parameter(0)
  %b = f32[8]{0} parameter(1)
  %c = ((f32[8,4]{1,0}, token[]), f32[8,4]{1,0}) call-start(%a), to_apply=%called
  %s = ((f32[8]{0}, token[]), f32[8]{0}) call-start(%b), to_apply=%other
  ROOT %d = f32[8,4]{1,0} call-done(%c)
}
"""
    found = list(program.instructions(text))
    assert [each.collective_bytes for each in found if each.collective] == [128]
    assert sum(each.is_launch for each in found) == 1


_BEGUN = """HloModule m, entry_computation_layout={(bf16[2,4]{1,0})->f32[8]{0}}

%begin (p: bf16[2,4]) -> (bf16[2,4], bf16[8,4], u32[]) {
  %p = bf16[2,4]{1,0:T(8,128)S(1)} parameter(0)
  %g = bf16[8,4]{1,0} all-gather(%p), dimensions={0}, frontend_attributes={chain_id="3"}
  ROOT %c = (bf16[2,4]{1,0}, bf16[8,4]{1,0}, u32[]) custom-call(%g), \
custom_call_target="AsyncCollectiveStart"
}

%go_on (p.1: bf16[2,4], y: f32[8]) -> (f32[8], bf16[8,4]) {
  %p.1 = bf16[2,4]{1,0} parameter(0)
  %y = f32[8]{0} parameter(1)
  %sum = f32[8]{0} add(%y, %y)
  %g.1 = bf16[8,4]{1,0} all-gather(%p.1), dimensions={0}, frontend_attributes={chain_id="3"}
  ROOT %t = (f32[8]{0}, bf16[8,4]{1,0}) tuple(%sum, %g.1)
}

%end (p.2: bf16[2,4]) -> bf16[8,4] {
  %p.2 = bf16[2,4]{1,0} parameter(0)
  %g.2 = bf16[8,4]{1,0} all-gather(%p.2), dimensions={0}, frontend_attributes={chain_id="3"}
  ROOT %d = bf16[8,4]{1,0} custom-call(%p.2, %g.2), custom_call_target="AsyncCollectiveDone"
}

ENTRY %e (x: bf16[2,4], y: f32[8]) -> f32[8] {
  %x = bf16[2,4]{1,0} parameter(0)
  %y = f32[8]{0} parameter(1)
  %s = (bf16[2,4]{1,0}, bf16[8,4]{1,0}, u32[]) fusion(%x), kind=kCustom, calls=%begin
LINES  %f = bf16[8,4]{1,0} fusion(%x), kind=kCustom, calls=%end
  ROOT %r = f32[8]{0} fusion(%f), kind=kLoop
}
"""


@pytest.mark.parametrize("others", [0, 2])
def test_an_exchange_that_other_fusions_carry_on_is_one(others):
    """They are work beside it, and run as such."""
    lines = (
        f"  %m.{n} = (f32[8]{{0}}, bf16[8,4]{{1,0}}) fusion(%x, %y), kind=kOutput, calls=%go_on\n"
        for n in range(others)
    )
    found = program.read(_BEGUN.replace("LINES", "".join(lines)))
    assert found.collectives == {"all-gather": 1} and found.collective_bytes == {"all-gather": 64}
    assert sum(found.launches.values()) == others + 1 and found.num_hidden == bool(others)


def test_a_fusion_that_keeps_a_part_of_sums_scatters_them():
    """Parts are padded there, and what that leaves with a neighbour is no exchange of its own."""
    text = """HloModule m, entry_computation_layout={(f32[8,4]{1,0})->f32[2,4]{1,0}}

%all-reduce-scatter.1 (input: f32[8,4]) -> f32[3,4] {
  %input = f32[8,4]{1,0} parameter(0)
  %zero = f32[] constant(0)
  %pad = f32[12,4]{1,0} pad(%input, %zero), padding=0_4x0_0
  %sum = f32[12,4]{1,0} all-reduce(%pad), replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
  ROOT %part = f32[3,4]{1,0} dynamic-slice(%sum, %zero, %zero), dynamic_slice_sizes={3,4}
}

ENTRY %e (x: f32[8,4]) -> f32[2,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %f = f32[3,4]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
  %s = f32[1,4]{1,0} slice(%f), slice={[2:3], [0:4]}
  %p = (f32[1,4]{1,0}, f32[1,4]{1,0}, u32[]) collective-permute-start(%s), \
source_target_pairs={{0,2},{2,4},{4,6},{1,3},{3,5},{5,7}}
  %d = f32[1,4]{1,0} collective-permute-done(%p)
  %q = (f32[8,4]{1,0}, f32[8,4]{1,0}, u32[]) collective-permute-start(%x), \
source_target_pairs={{0,1}}
  ROOT %r = f32[2,4]{1,0} fusion(%d, %f), kind=kLoop
}
"""
    found = program.read(text)
    assert found.collectives == {"reduce-scatter": 1, "collective-permute": 1}
    assert found.collective_bytes == {"reduce-scatter": 128, "collective-permute": 128}


@pytest.mark.parametrize("case", _LINES)
def test_forms_of_other_compilers(case):
    value, expected = _LINES[case]
    text = f"HloModule m\n\nENTRY %e () -> f32[1] {{\n  %x = {value}\n}}\n"
    (instruction,) = program.instructions(text)
    assert instruction.collective_bytes == expected


def test_what_has_other_work_beside_it():
    """Between its start and its end."""
    lines = [
        "%a = f32[8]{0} all-reduce-start(%x), to_apply=%add",
        "%b = f32[8]{0} fusion(%y), kind=kLoop",
        "%c = f32[8]{0} all-reduce-done(%a)",
        "%d = f32[8]{0} all-reduce-start(%c), to_apply=%add",
        "%e = f32[8]{0} bitcast(%b)",
        "%f = f32[8]{0} all-reduce-done(%d)",
        "ROOT %g = f32[8]{0} fusion(%f), kind=kLoop",
    ]
    body = "\n".join(f"  {line}" for line in lines)
    head = "HloModule m, entry_computation_layout={(f32[8]{0})->f32[8]{0}}"
    found = program.read(f"{head}\n\nENTRY %e () -> f32[8] {{\n{body}\n}}\n")
    assert found.collectives == {"all-reduce": 2} and found.num_hidden == 1


@pytest.mark.parametrize("target, rows, kind", [
    ("v5e:2x4", 4, "all-reduce"), ("v5e:2x4", 8, "reduce-scatter"), ("8xh200", 4, "reduce-scatter"),
])  # fmt: skip
def test_a_tpu_scatters_no_sums_of_a_few_rows(target, rows, kind):
    model, mesh, engine = fakes.gpt_oss(), Mesh(expert=4), EngineConfig(max_seqs=8)
    shape = StepShape((rows, 1), (0, 16), greedy=True)
    found = prediction.exchanged(Config(model, engine, mesh), targets.parse(target), shape)
    assert found[kind] == (model.num_layers, model.num_layers * 4 * rows * 4 * model.width)
    assert found.keys() == {"all-gather", kind}


_MESHES = Mesh(model=2), Mesh(model=8), Mesh(data=2, model=4), Mesh(data=8)
_MODELS = {
    "deepseek": fakes.deepseek(),
    "gpt-oss": fakes.gpt_oss(),
    "gemma4": fakes.gemma4(),
    "delta": fakes.delta(),
    "hybrid": fakes.hybrid(),
    "jamba": fakes.jamba(),
    "linear": fakes.linear(),
    "norm of all heads": fakes.llama(num_heads=8, num_kv_heads=4, qk_norm="all"),
    **{f"{kind}, {K} KV heads": fakes.of_kind(kind, heads, K)
       for kind in fakes.KINDS for heads, K in ((8, 8), (24, 3))},
}  # fmt: skip
_ATTENDING = [
    *((f"{kind}, 8 KV heads", mesh) for kind in fakes.KINDS for mesh in _MESHES),
    *((f"{kind}, 3 KV heads", Mesh(model=8)) for kind in fakes.KINDS),
]
# Each kind and each mesh once; what is exchanged does not depend on both together.
_SOON = {
    ("full, 8 KV heads", Mesh(model=2)), ("shared, 8 KV heads", Mesh(data=2, model=4)),
    ("windows, 8 KV heads", Mesh(data=8)), ("full, 3 KV heads", Mesh(model=8)),
}  # fmt: skip
_CASES = [
    *(
        case if case in _SOON else pytest.param(*case, marks=pytest.mark.long)
        for case in _ATTENDING
    ),
    ("norm of all heads", Mesh(model=2)),
    ("deepseek", Mesh(expert=2)), ("deepseek", Mesh(model=2, expert=2)),
    ("gpt-oss", Mesh(data=2, expert=4)), ("gemma4", Mesh(model=2)),
    ("delta", Mesh(model=2)),
    ("hybrid", Mesh(model=2)), ("hybrid", Mesh(model=2, expert=2)),
    ("jamba", Mesh(model=2)),
    pytest.param("jamba", Mesh(model=2, expert=2), marks=pytest.mark.long),
    ("linear", Mesh(model=2)),
    ("windows, 8 KV heads", Mesh(context=4)), ("gpt-oss", Mesh(context=2, expert=2)),
    ("deepseek", Mesh(model=2, context=2)),
    *(pytest.param(name, mesh, marks=pytest.mark.long) for name, mesh in (
        ("shared, 8 KV heads", Mesh(context=2, data=2)), ("gemma4", Mesh(context=2)),
        ("full, 3 KV heads", Mesh(model=2, context=4)), ("hybrid", Mesh(model=2, context=2)),
    )),
]  # fmt: skip


def _program(config, shape):
    """A step of an engine whose weights nobody made."""
    config, attention = model_runner.for_this_device(config.for_platform("cpu"))
    mesh = meshes.of(config.mesh)
    values = linear.abstract(config, decoder.param_infos(config.model), mesh)
    cache = kv_cache.abstract(*model_runner.cache_arguments(config, attention))
    slots = jax.eval_shape(lambda: step.init_slots(config))
    backend = backends.of(target_device(), config.engine.kernels.linear)
    return Executables(config, attention, backend, values, cache, slots, mesh).step(shape).as_text()


def test_attention_is_summed_in_the_models_precision_but_on_a_cpu():
    """Whose compiler sums no bfloat16."""
    model, mesh, shape = (
        fakes.llama("bfloat16"),
        Mesh(context=2, model=2),
        StepShape((4, 1), (0, 16), greedy=True),
    )
    config = Config(model, EngineConfig.of(max_seqs=4, page_tokens=8, cache_bytes=1 << 20), mesh)
    cpu, tpu = (prediction.exchanged(config, targets.parse(it), shape) for it in ("cpu", "v5e:2x2"))
    compiled = program.read(_program(config, shape))
    assert cpu == {
        kind: (count, compiled.collective_bytes[kind])
        for kind, count in compiled.collectives.items()
    }
    mixer = model.layers[0].mixer
    attended = model.num_layers * shape.num_tokens * mixer.num_heads // 2 * mixer.head_width
    assert cpu["all-reduce"][1] - tpu["all-reduce"][1] == 2 * attended


@pytest.mark.parametrize("name, mesh", _CASES, ids=lambda it: str(it).replace(",", " "))
def test_a_decode_step_exchanges_what_the_planner_says(name, mesh):
    """In kinds, numbers and bytes: nothing along `data`; along `model` a sum of the embedding, one
    of each mixer and feed-forward, and what a greedy row needs; along `expert` what each mixture
    gathers and scatters.
    """
    model = _MODELS[name]
    shape = StepShape((4, 1), (0, 16), greedy=True)
    engine = EngineConfig.of(max_seqs=4, page_tokens=8, cache_bytes=1 << 20, top_logprobs=3)
    found = program.read(_program(Config(model, engine, mesh), shape))
    planned = collectives.of_step(model, mesh, top_logprobs=3)
    counted = {
        kind: (count, found.collective_bytes[kind]) for kind, count in found.collectives.items()
    }
    assert counted == collectives.totals(planned, shape.num_tokens, shape.num_logits)
    sums = [each for each in planned if each.kind == "all-reduce" and each.place != "sample"
            and each.axis != "context"]  # fmt: skip
    wide = sum(each.count for each in sums if each.token_bytes == 4 * model.width)
    kinds = [layer.ffn for layer in model.layers if layer.ffn and mesh.group_chips > 1]
    kinds += [layer.mixer for layer in model.layers if mesh.model > 1]
    single = sum(kind.num_sums == 1 for kind in kinds)
    single += mesh.group_chips > 1 and not model.layer_inputs
    assert wide == single
    axes = {axis for axis in ("model", "expert", "context") if getattr(mesh, axis) > 1}
    along = {axis for exchange in planned for axis in exchange.axis.split(",")}
    assert {axis for axis in along if getattr(mesh, axis) > 1} == axes
    assert all(mesh.along(exchange.axis) > 1 and exchange.exposed for exchange in planned)
