"""What chips exchange in a compiled program: kinds, numbers and bytes."""

import subprocess
import sys

import pytest

from inference.planner.compiled import program

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


@pytest.mark.parametrize("case", _LINES)
def test_forms_of_other_compilers(case):
    value, expected = _LINES[case]
    text = f"HloModule m\n\nENTRY %e () -> f32[1] {{\n  %x = {value}\n}}\n"
    (instruction,) = program.instructions(text)
    assert instruction.collective_bytes == expected
