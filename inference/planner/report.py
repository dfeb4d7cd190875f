"""Predicted beside measured: what the steps that ran had to cost."""

from collections.abc import Iterable

from configs.engine import Config
from configs.hardware.spec import HardwareSpec
from configs.model import ModelConfig
from inference.planner import cost, roofline
from inference.planner.cost import Operation, Precision, Rows, Work
from inference.scheduling import step_shapes
from inference.scheduling.step_schedule import StepRecord


def predicted_by(hardware: HardwareSpec) -> str:
    """What predicts: 'calibrated', where steps of the machine were timed, else 'roofline'."""
    return "calibrated" if hardware.is_calibrated else "roofline"


def operations(config: Config, record: StepRecord) -> tuple[Operation, ...]:
    """What a step that ran had to do."""
    return cost.step_operations(config.model, Work.of_step(config, config.model, record))


def seconds(model: ModelConfig, step: Iterable[Operation], hardware: HardwareSpec) -> float:
    """Predicted time of a step on one chip, in the model's own precision."""
    return roofline.step_time(step, hardware, Precision.of(model)).total_s


def naive_seconds(
    config: ModelConfig, hardware: HardwareSpec, num_prompt: int, num_new: int, block: int
) -> float:
    """Predicted time without a cache: each token runs all before it, padded to blocks."""
    lengths = (-(-(num_prompt + n) // block) * block for n in range(num_new))
    return sum(work_seconds(config, Work.prefill(1, length), hardware) for length in lengths)


def cached_seconds(config: Config, hardware: HardwareSpec, num_prompt: int, num_new: int) -> float:
    """Predicted time of the same by an engine with a cache: the prompt once, then a row a token."""
    chunk, rows = config.engine.shapes.chunk_tokens, 2
    if step_shapes.leaves_padding_out(config, config.model):
        chunk = rows = 1
    padded = -(-num_prompt // chunk) * chunk
    prefill = Work(padded, (Rows(1, num_prompt, num_prompt),), 1)
    decoding = (Work(rows, (Rows(1, 1, num_prompt + n),), rows) for n in range(1, num_new))
    decode_s = sum(work_seconds(config.model, work, hardware) for work in decoding)
    return work_seconds(config.model, prefill, hardware) + decode_s


def work_seconds(model: ModelConfig, work: Work, hardware: HardwareSpec) -> float:
    """The same of a step that does this work."""
    return seconds(model, cost.step_operations(model, work), hardware)
