"""What a load reached of the rates of its device."""

import dataclasses
import statistics
from collections.abc import Iterable, Iterator

from configs.engine import Config
from configs.kinds import params
from configs.model import ModelConfig
from inference.planner import cost, report
from inference.planner.cost import Work
from inference.scheduling.step_schedule import StepRecord


@dataclasses.dataclass(frozen=True)
class Shares:
    """What a load reached of the rates that the device showed in the same run.

    Attributes:
        read_bandwidth: bytes a second.
        decode_bandwidth_share: of it, by the median decode step; None where none ran.
        best_product_rate: FLOPs a second of the fastest product with weights.
        prefill_rate_share: of it, by whole prompts: the FLOPs of all they compute, without padding,
            over all their time.
        batch_rate_share: of it, by the median decode step of the most requests; None where none
            ran.
    """

    read_bandwidth: float
    decode_bandwidth_share: float | None
    best_product_rate: float
    prefill_rate_share: float
    batch_rate_share: float | None


def shares(
    config: Config,
    decoded: Iterable[StepRecord],
    batched: Iterable[StepRecord],
    prompt_tokens: int,
    prefill_tok_s: float,
    rates: tuple[float, float],
) -> Shares:
    """Shares of a device's rates (`lookup.rates_now`) that steps and prompts of so many tokens,
    prefilled at so many tokens a second, reached.

    Args:
        config: of the engine.
        decoded, batched: steps of the fewest requests at a time and of the most.
        prompt_tokens, prefill_tok_s: of prompts alone.
        rates: bytes and FLOPs a second.
    """
    bandwidth, rate = rates
    steps = [total.bytes / seconds for total, seconds in _decoding(config, decoded)]
    batches = [total.flops / seconds for total, seconds in _decoding(config, batched)]
    prompt = cost.step_operations(config.model, Work.prefill(1, prompt_tokens))
    flops_s = cost.total(prompt).flops * prefill_tok_s / prompt_tokens
    share = statistics.median(steps) / bandwidth if steps else None
    batch_share = statistics.median(batches) / rate if batches else None
    return Shares(bandwidth, share, rate, flops_s / rate, batch_share)


def _decoding(config: Config, records: Iterable[StepRecord]) -> Iterator[tuple[cost.Cost, float]]:
    """What steps that only decode had to do, and their seconds; those with the most requests."""
    steps = [record for record in records if not record.shape.prefill[0]]
    max_rows = max((len(record.rows) for record in steps), default=0)
    for record in steps:
        if len(record.rows) == max_rows:
            yield cost.total(report.operations(config, record)), record.seconds


def product_formats(model: ModelConfig) -> tuple[str, ...]:
    """Formats of the matrices that tokens are multiplied with."""
    infos = (info for _, info in params.leaves(model.parameters()))
    return tuple(dict.fromkeys(info.format for info in infos if info.is_matrix))
