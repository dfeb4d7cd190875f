"""Test-time compute: what a request costs that samples several answers, or thinks before one.

While decode steps wait for the weights, more samples take hardly any more seconds, and each token
of a thought takes a step. From where steps mostly read caches, samples take as long as thoughts.
"""

import dataclasses
from bisect import bisect_right

from inference.planner import cost
from inference.planner.deployment import Deployment

_SAMPLES = (1, 2, 4, 8, 16, 32, 64)
_ROUNDING = 1e-9  # of seconds that are equal


@dataclasses.dataclass(frozen=True)
class RequestCost:
    """One of several equal requests that run at a time.

    Attributes:
        samples: answers to one prompt, whose pages they share.
        thinking_tokens: of each sample, before its answer.
        seconds: from the prompt to the last token.
        answer_s: of these, until the first token of the answers.
        chip_s: seconds of all chips of a replica, divided by its requests.
        dollars: the same in money; None without a price.
        tokens: that are sampled, thoughts included.
        cache_bytes: at the longest: the prompt's pages once, and those of each sample.
        cache_share: of the bytes that a decode step moves, counted exactly, those of caches.
        largest_batch: requests of this kind that a replica holds.
        equal_thinking_tokens: thinking tokens with which one sample takes as many seconds, as far
            as the model's context allows.
    """

    samples: int
    thinking_tokens: int
    seconds: float
    answer_s: float
    chip_s: float
    dollars: float | None
    tokens: int
    cache_bytes: float
    cache_share: float
    largest_batch: int
    equal_thinking_tokens: int


def request_cost(
    deployment: Deployment, batch: int, context: int, new_tokens: int, thinking_tokens: int = 0
) -> RequestCost:
    """The cost of one of `batch` requests with the samples of the deployment.

    Args:
        context: tokens of the prompt.
        new_tokens: tokens of a sample, its thought included.

    Raises:
        InputError: a size is out of range.
    """
    row = deployment.row(batch, context, new_tokens)
    seconds = deployment.request_seconds(batch, context, new_tokens)
    chip_s = seconds * deployment.mesh.num_chips / batch
    price = deployment.hardware.price_per_hour
    step = deployment.decode_operations(batch, deployment.mean_length(context, new_tokens))
    return RequestCost(
        deployment.samples, thinking_tokens, seconds,
        row.ttft_s + thinking_tokens * row.tpot_s, chip_s,
        None if price is None else price * chip_s / 3600, deployment.samples * new_tokens,
        deployment.request_bytes(context, new_tokens),
        sum(operation.cache_bytes for operation in step) / cost.total(step).bytes,
        deployment.largest_batch(context, new_tokens),
        _equal_thinking_tokens(deployment, batch, context, new_tokens - thinking_tokens, seconds),
    )  # fmt: skip


def trade(
    deployment: Deployment, batch: int, context: int, new_tokens: int, thinking_tokens: int = 0
) -> list[RequestCost]:
    """The cost at powers of two of samples, and at those of the deployment; raises likewise."""
    sizes = sorted({*_SAMPLES, deployment.samples})
    return [
        request_cost(
            dataclasses.replace(deployment, samples=samples),
            *(batch, context, new_tokens, thinking_tokens),
        )
        for samples in sizes
    ]


def _equal_thinking_tokens(
    deployment: Deployment, batch: int, context: int, answer_tokens: int, seconds: float
) -> int:
    single = dataclasses.replace(deployment, samples=1)
    lengths = range(single.config.max_context - context - answer_tokens + 1)
    limit = seconds * (1 + _ROUNDING)

    def time(thinking_tokens: int) -> float:
        return single.request_seconds(batch, context, answer_tokens + thinking_tokens)

    return max(0, bisect_right(lengths, limit, key=time) - 1)
