"""A step's time, divided among its parts."""

import pytest

from configs import presets
from configs.hardware.spec import HardwareSpec
from inference.benchmark import steps
from inference.planner import cost, roofline
from inference.planner.calibration.verify import Point
from inference.planner.cost import Precision, Work
from scripts.reports import step_trace
from scripts.reports.step_trace import Event
from tests import fakes

pytestmark = pytest.mark.quick_code

HLO = """
%fused (p: f32[2]) -> f32[2] {
  ROOT %add.9 = f32[2] add(%p, %p)
}
  %product.1 = f32[2] custom-call(%x), custom_call_target="ridgeline_linear_2", metadata={op_name="jit(step)/layer_0/jit(_block)/ffn/ffi_call"}
  %norm.1 = f32[2] custom-call(%x), custom_call_target="ridgeline_norm_2", metadata={op_name="jit(step)/layer_0/jit(_block)/ffn/ffi_call"}
  %dot.1 = f32[2] dot(%x, %y), metadata={op_name="jit(step)/layer_0/jit(_block)/qkv/dot_general"}
  %write.1 = f32[2] scatter(%x), metadata={op_name="jit(step)/layer_0/jit(_block)/attend/scatter"}
  %head.1 = f32[2] custom-call(%x), custom_call_target="ridgeline_linear_2", metadata={op_name="jit(step)/head/ffi_call"}
  %cond.1 = f32[2] conditional(%x), metadata={op_name="jit(step)/sample/cond"}
  ROOT %copy.1 = f32[2] copy(%x)
"""  # noqa: E501


def test_instructions_belong_to_parts():
    parts = step_trace.parts_of(HLO)
    assert parts["product.1"] == parts["dot.1"] == step_trace.PRODUCTS
    assert parts["write.1"] == step_trace.ATTENTION and parts["head.1"] == step_trace.HEAD
    assert parts["cond.1"] == step_trace.SAMPLING
    assert parts["norm.1"] == parts["copy.1"] == step_trace.REST


def test_a_moment_belongs_to_the_operation_that_began_last():
    events = [
        Event("head.1", 0, 4e9, 1),
        Event("cond.1", 5e9, 10e9, 1),  # runs what follows
        Event("product.1", 7e9, 3e9, 1),
        Event("unknown", 12e9, 1e9, 1),
        Event("copy.1", 20e9, 0, 1),
    ]
    found = step_trace.divide(events, step_trace.parts_of(HLO))
    expected = {step_trace.HEAD: 4, step_trace.SAMPLING: 6, step_trace.PRODUCTS: 3}
    assert found == pytest.approx(
        dict.fromkeys(step_trace.PARTS, 0) | expected | {step_trace.REST: 1}
    )


def test_parts_of_a_real_step_add_up():
    engine = fakes.engine(fakes.llama(), max_seqs=2, decode_rows=(2,))
    runner, point = engine.model_runner, Point(engine.config.model, 2, 0, 64)
    prepared = steps.arrays(point, engine.config)
    run = lambda: steps.run(runner, point.shape, prepared)  # noqa: E731
    run()
    found = step_trace.trace(run, runner.compiled(point.shape).as_text(), 3)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert min(found.parts.values()) > 0


def test_a_step_may_be_padded():
    engine = fakes.engine(fakes.llama(), max_seqs=2, decode_rows=(2,))
    point, shape = Point(engine.config.model, 1, 0, 64), Point(engine.config.model, 2, 0, 64).shape
    _, batch = steps.arrays(point, engine.config, shape=shape)
    assert batch.slot_Y.tolist() == [0, 2] and batch.query_length_Y.tolist() == [1, 0]


@pytest.mark.parametrize("work", [Work.decode(8, 500), Work.prefill(1, 500)])
def test_times_of_operations_add_up(work):
    model = presets.get("gemma3-270m").config
    hardware = HardwareSpec(
        "cpu", 16e9, 30e9, {"bfloat16": 1e12}, overhead_s=1e-3, gamma=0.3, bandwidth_share=0.7,
        rate_share=0.5, half_rows=9.0, attention_share=0.4,
    )  # fmt: skip
    operations, precision = cost.step_operations(model, work), Precision.of(model)
    whole = roofline.step_time(operations, hardware, precision).total_s
    each = step_trace.operation_times(operations, hardware, precision)
    assert hardware.overhead_s + sum(each) == pytest.approx(whole)
    parts = {step_trace.part_of_planned(operation) for operation in operations}
    assert parts == {*step_trace.PARTS} - {step_trace.SAMPLING, step_trace.BETWEEN}
