"""Latent attention (DeepSeek-AI 2024, arXiv 2405.04434) beside what it replaces, beside itself
where chips divide each sequence's tokens, and from where on its keys are worth projecting out.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator

from configs.kinds.attention import Attention
from configs.kinds.latent import Latent
from configs.mesh import Mesh
from configs.model import LayerSpec, ModelConfig
from inference.planner import cost, roofline
from inference.planner.cost import Operation, Rows, Work
from inference.planner.deployment import Deployment
from inference.planner.parallel.collectives import Collective
from inference.planner.roofline import StepTime

_WORD = 4  # bytes of a float32, in which sums travel
_KV_HEADS = 8  # of the GQA that most models have
_CHUNKS = (64, 128, 256, 512)  # 64 is a row of the prefill rectangle, unless one sets it


@dataclasses.dataclass(frozen=True)
class Cached:
    """A cache that a model could have, on some mesh.

    Attributes:
        name: of it.
        mesh: chips of a replica.
        token_bytes: of one token on each chip that holds it.
        largest_batch: sequences of a replica at their longest.
        step_s: time of a decode step of the batch that is compared, whether or not it fits.
        most_tok_s: tokens a second of a replica that decodes its largest batch.
        is_run: whether it is there, or a prediction alone.
    """

    name: str
    mesh: Mesh
    token_bytes: float
    largest_batch: int
    step_s: float
    most_tok_s: float
    is_run: bool = True


def with_attention(config: ModelConfig, num_kv_heads: int) -> ModelConfig:
    """The model with attention in place of latent attention: as many query heads, of the width of
    their values, and `num_kv_heads` heads of keys and values. They do not rotate: a rotation costs
    nothing that is counted, and may not fit that width.

    Raises:
        InputError: they do not divide the query heads.
    """

    def replaced(layer: LayerSpec) -> LayerSpec:
        latent = layer.mixer
        if not isinstance(latent, Latent):
            return layer
        mixer = Attention(latent.num_heads, num_kv_heads, latent.value_width, rope=None)
        return dataclasses.replace(layer, mixer=mixer)

    return dataclasses.replace(config, pattern=tuple(map(replaced, config.pattern)))


def latent_of(config: ModelConfig) -> Latent | None:
    """The mixer of a model whose layers all have the same latent attention, over all tokens; None
    of others.
    """
    mixers = {layer.mixer for layer in config.pattern}
    (first, *other_mixers) = mixers
    return (
        first if isinstance(first, Latent) and not other_mixers and first.indexer is None else None
    )


def compare(
    deployment: Deployment, batch: int, context: int, new_tokens: int
) -> tuple[Cached, ...]:
    """A latent cache, and those of GQA and MHA with as many heads in its place. MHA is what
    compares at equal quality: MLA is no weaker, GQA is (arXiv 2405.04434, table 1).

    Args:
        deployment: of latent attention.
        batch: sequences of a replica whose step is compared.
        context, new_tokens: of each request; steps are those at half of the new tokens.
    """
    latent = latent_of(deployment.config)
    assert latent is not None
    heads, point = latent.num_heads, (batch, context, new_tokens)
    caches = [_cached("MLA", deployment, *point)]
    for name, kv_heads in ((f"GQA, {_KV_HEADS} KV heads", _KV_HEADS), ("MHA", heads)):
        if heads % kv_heads == 0 and heads > _KV_HEADS:
            config = with_attention(deployment.config, kv_heads)
            if deployment.mesh.is_even(config):
                other = dataclasses.replace(deployment, config=config)
                caches.append(_cached(name, other, *point))
    return tuple(caches)


def _cached(name: str, deployment: Deployment, batch: int, context: int, new_tokens: int) -> Cached:
    length, middle = context + new_tokens, context + new_tokens // 2
    max_batch = deployment.largest_batch(context, new_tokens)
    return Cached(
        name, deployment.mesh, deployment.chip_cache_bytes(length) / length, max_batch,
        deployment.decode_time(batch, middle).total_s,
        max_batch / deployment.decode_time(max_batch, middle).total_s if max_batch else 0.0,
    )  # fmt: skip


# --- chips that divide tokens ---------------------------------------------------------------------


def compare_divided(
    deployment: Deployment, batch: int, context: int, new_tokens: int
) -> tuple[Cached, Cached]:
    """Latents of all tokens on every chip along `model`, as they are held here, and divided over
    these chips by tokens, which only chips along `context` do here. Arguments as `compare`.
    """
    length, middle = context + new_tokens, context + new_tokens // 2
    whole = _cached("MLA, each chip holds all tokens", deployment, batch, context, new_tokens)
    sequence_bytes = deployment.chip_cache_bytes(length) / deployment.mesh.model
    max_batch = deployment.mesh.num_groups * max(
        0, math.floor(deployment.memory_room / sequence_bytes)
    )
    return whole, Cached(
        "MLA, chips divide the tokens", deployment.mesh, sequence_bytes / length, max_batch,
        divided_time(deployment, batch, middle).total_s,
        max_batch / divided_time(deployment, max_batch, middle).total_s if max_batch else 0.0,
        is_run=False,
    )  # fmt: skip


def divided_time(deployment: Deployment, batch: int, context: int) -> StepTime:
    """A decode step in which chips along `model` divide each sequence's latents by tokens: each
    gathers the queries of all heads, attends over its tokens, and the heads' results are summed by
    their shares of the softmax (log-sum-exps are gathered), each chip's heads on that chip.
    """
    latent, mesh = latent_of(deployment.config), deployment.mesh
    assert latent is not None
    chip, chips = deployment.hardware, mesh.model
    work = deployment.decode_work(batch, context)
    operations = [
        dataclasses.replace(
            operation, cache_parts=chips, activation_bytes=chips * operation.activation_bytes
        )
        if operation.name == "attend.latent"
        else operation
        for operation in deployment.decode_operations(batch, context)
    ]
    layers, N, C = deployment.config.num_layers, latent.num_heads, latent.rank
    query = deployment.formats.rest.bytes_for(N * (C + latent.rope_width), C + latent.rope_width)
    more = (
        Collective("mixer", "model", "all-gather", layers, query),
        Collective("mixer", "model", "all-gather", layers, chips * N * _WORD),
        Collective("mixer", "model", "reduce-scatter", layers, N * C * _WORD),
    )
    added_s = (roofline.exchange(collective, work, chip, mesh).seconds for collective in more)
    exposed_s = sum(added_s, deployment.collective_seconds(work))
    return deployment.step_time(operations, exposed_s)


# --- keys and values projected out ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A step that computes the last tokens of a prompt on each group of chips with sequences of its
    own.

    Attributes:
        tokens: of one chunk.
        absorbed_s: time of the step, as it runs.
        expanded_s: of it where keys and values are projected out of the latent vectors of each
            chunk's context and never leave the chip: a prediction alone.
    """

    tokens: int
    absorbed_s: float
    expanded_s: float


def compare_chunks(deployment: Deployment, context: int) -> tuple[Chunk, ...]:
    """Chunks at the end of prompts of `context` tokens, both ways."""
    chunks = []
    for tokens in (tokens for tokens in _CHUNKS if tokens <= context):
        sequences = deployment.mesh.expert
        rows = Rows(sequences, tokens, context)
        work = Work(sequences * tokens, (rows,), sequences)
        operations = cost.step_operations(deployment.config, work, deployment.formats)
        exchanged_s = deployment.collective_seconds(work)
        times = (
            deployment.step_time(variant, exchanged_s).total_s
            for variant in (operations, _expanded(deployment.config, operations, rows))
        )
        chunks.append(Chunk(tokens, *times))
    return tuple(chunks)


def _expanded(
    config: ModelConfig, operations: Iterable[Operation], rows: Rows
) -> Iterator[Operation]:
    """The operations with attention over keys and values of all heads; those of new tokens are
    `latent.k_up` and `latent.v_up` either way.
    """
    latent = latent_of(config)
    assert latent is not None
    projected = latent.nope_width + latent.value_width
    pairs = rows.pairs(None) * (projected + latent.rope_width)
    earlier = (rows.context - rows.queries) * latent.rank * projected
    flops = 2 * latent.num_heads * rows.count * (pairs + earlier)
    for operation in operations:
        if operation.name == "attend.latent":
            yield dataclasses.replace(operation, flops=operation.layers * flops)
        else:
            yield operation


def expanded_from(latent: Latent, num_earlier: int) -> int | None:
    """Fewest tokens of a chunk behind `num_earlier` tokens that attention takes no more FLOPs for
    over keys and values of all heads, projected out of the latent vectors, than absorbed; None: no
    chunk is long enough. However many are earlier, it is at most
    C (nope + value) / (2 C - nope - value), 171 of DeepSeek's sizes.

    Absorbed, a pair of query and key takes 2 N (2 C + R) FLOPs, otherwise
    2 N (nope + R + value), and each earlier token 2 N C (nope + value) more.
    """
    projected = latent.nope_width + latent.value_width
    saved = 2 * latent.rank - projected  # of a pair, in 2 N
    if saved <= 0:
        return None
    # Q tokens make Q (earlier + (Q + 1) / 2) pairs.
    half = num_earlier + 0.5
    least = math.sqrt(half * half + 2 * num_earlier * latent.rank * projected / saved) - half
    return max(1, math.ceil(least - 1e-9))
