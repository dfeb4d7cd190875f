"""Counting a compiled program, on texts of XLA's and on programs compiled here."""

import jax
import jax.numpy as jnp

from inference.planner.compiled.program import CompiledProgram, read
from tests.aot import programs

_ENTRY = """\
HloModule jit_step, is_scheduled=true, input_output_alias={{ {{0}}: (1, {{}}, may-alias) }}, \
entry_computation_layout={{(f32[8]{{0:T(128)}}, f32[8]{{0}})->(f32[8]{{0:T(8,128)(2,1)}}, s32[2])}}

%body (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %f.1 = f32[8]{{0}} fusion(%p), kind=kLoop, metadata={{op_name="jit(step)/sample/add"}}
}}

ENTRY %main.1 (x: f32[8], y: f32[8]) -> (f32[8], s32[2]) {{
  %x = f32[8]{{0:T(128)}} parameter(0)
  %y = f32[8]{{0}} parameter(1)
{layers}  %copy-start.1 = (f32[8]{{0:T(8,128)S(1)}}, f32[8], u32[]) copy-start(%x)
  %copy-done.1 = f32[8]{{0}} copy-done(%copy-start.1)
  %empty = f32[16,0]{{1,0}} copy(%x)
  %sum = f32[8]{{0}} all-reduce-start(%x), to_apply=%add
  %done = f32[8]{{0}} all-reduce-done(%sum)
  %c = f32[8]{{0}} conditional(%p, %x, %y), branch_computations={{%body, %body}}
  %k = (f32[8]{{0:T(8,128)}}, /*index=1*/s32[2]) custom-call(%c), custom_call_target="kernel", \
metadata={{op_name="jit(step)/layer_0/attend/kernel/out_of_it"}}
  ROOT %t = (f32[8], s32[2]) tuple(%x, %y)
}}
"""
_LAYER = """\
  %n.{0} = f32[8]{{0}} fusion(%x), kind=kLoop, metadata={{op_name="step/layer_{0}/ffn/norm/mul"}}
  %q.{0} = f32[8]{{0}} fusion(%x), kind=kLoop, metadata={{op_name="step/layer_{0}/qkv/dot"}}
  %r.{0} = f32[8]{{0}} reshape(%x)
  %b.{0} = f32[4,2]{{1,0}} bitcast(%x)
"""


def _program(layers: int) -> CompiledProgram:
    text = _ENTRY.format(layers="".join(map(_LAYER.format, range(layers))))
    return read(text)


def test_what_runs_is_counted_by_part():
    program = _program(1)
    assert program.launches == {"norm": 1, "qkv": 1, "attend": 1, "sample": 2, "other": 1}
    assert sum(program.launches.values()) == 6
    assert program.collectives == {"all-reduce": 1}
    assert (program.num_conditionals, program.num_loops, program.num_outputs) == (1, 0, 1)


def test_a_layer_is_what_another_adds():
    added = programs.launches_a_layer(_program(1), _program(2))
    assert added == {"norm": 1, "qkv": 1, "other": 1}


def test_a_program_of_this_machine():
    """Control flow inside of control flow, and outputs beside a donated array."""

    def step(pages, x):
        def branch(x):
            return jax.lax.while_loop(lambda x: x[0] < 9, lambda x: x * 2, x)

        with jax.named_scope("sample"):
            x = jax.lax.cond(x[0] > 3, branch, lambda x: x + 1, x)
        return pages.at[3].add(x[0]), x, x.sum()

    arguments = jnp.zeros(64), jnp.ones(8)
    text = jax.jit(step, donate_argnums=0).lower(*arguments).compile().as_text()
    program = read(text)
    assert (program.num_conditionals, program.num_loops, program.num_outputs) == (1, 1, 2)
    assert program.launches["sample"] >= 2
