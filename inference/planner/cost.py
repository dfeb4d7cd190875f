"""What a step must cost, from shapes alone: bytes and FLOPs, operation by operation.

A decode step reads every weight and every live cache entry once and computes little with each byte,
so it waits for memory; a prefill step reuses each weight for all its tokens, so it waits for
arithmetic.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping

from configs.cache import CacheSpec
from configs.mixers import Latent
from configs.model import LayerSpec, ModelConfig
from configs.precision import FORMATS, Format
from inference.planner import weights
from inference.planner.weights import Matrix


@dataclasses.dataclass(frozen=True)
class Precision:
    """Formats of the layers' matrices, of the cache, and of all else: tables, norms and what
    flows.
    """

    weights: Format
    cache: Format
    rest: Format

    @classmethod
    def of(cls, config: ModelConfig) -> "Precision":
        """Everything as the model's own dtype says."""
        own = FORMATS[config.dtype]
        return cls(own, own, own)


@dataclasses.dataclass(frozen=True)
class Rows:
    """`count` sequences that feed `queries` tokens each; the last of them sees `context` positions,
    itself included.

    Attributes:
        drafts: of the queries, those that may be refused: a recurrent layer keeps the state before
            each of them.
    """

    count: int
    queries: int
    context: int
    drafts: int = 0

    def pairs(self, window: int | None) -> float:
        """Pairs of query and visible key in one sequence."""
        first = self.context - self.queries + 1
        if window is None or self.context <= window:
            return self.queries * (first + self.context) / 2
        growing = max(0, window - first)  # queries that do not see a whole window yet
        return growing * (first + window - 1) / 2 + (self.queries - growing) * window


@dataclasses.dataclass(frozen=True)
class Work:
    """What one step does: T packed tokens (padding included), the rows they belong to, Q rows of
    logits.
    """

    num_tokens: int
    rows: tuple[Rows, ...]
    num_logits: int

    @property
    def num_sequences(self) -> int:
        """Sequences that feed tokens."""
        return sum(rows.count for rows in self.rows)

    @classmethod
    def decode(cls, batch: int, context: int, drafts: int = 0) -> "Work":
        """Each of `batch` sequences feeds its newest token, and drafts to be verified."""
        tokens = batch * (1 + drafts)
        return cls(tokens, (Rows(batch, 1 + drafts, context + drafts, drafts),), tokens)

    @classmethod
    def prefill(cls, batch: int, context: int) -> "Work":
        """Prompts of `context` tokens, from nothing."""
        return cls(batch * context, (Rows(batch, context, context),), batch)


@dataclasses.dataclass(frozen=True)
class Operation:
    """What one kind of operation costs in all the layers of a step that run it.

    Attributes:
        name: 'part.operation'.
        layers: how many layers run it.
        flops: floating-point operations.
        weight_bytes, cache_bytes, activation_bytes: bytes moved to and from memory.
        split: whether tensor parallelism divides it (otherwise each chip does all of it).
        cache_parts: chips that the cache, and what makes it, can be divided over; more of them hold
            copies.
        copied: of a matrix's rows, the share that makes the cache.
        kind: what it runs as: 'matrix' (tokens and a layer's weights), 'attention' or 'other'.
        by_expert: whether chips along `expert` divide its weights.
        sequences: whose tokens these are: chips that work for different ones divide them.
        rows: of a product with weights, tokens that each weight is multiplied with.
    """

    name: str
    layers: int
    flops: float
    weight_bytes: float = 0.0
    cache_bytes: float = 0.0
    activation_bytes: float = 0.0
    split: bool = True
    cache_parts: int = 1
    sequences: int = 1
    rows: float = math.inf
    copied: float = 0.0
    kind: str = "other"
    by_expert: bool = False

    @property
    def bytes(self) -> float:
        """All bytes moved."""
        return self.weight_bytes + self.cache_bytes + self.activation_bytes

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclasses.dataclass(frozen=True)
class Cost:
    """Totals of a step."""

    bytes: float
    flops: float


def total(operations: Iterable[Operation]) -> Cost:
    """The sum of operations."""
    found = list(operations)
    return Cost(sum(o.bytes for o in found), sum(o.flops for o in found))


def step_operations(
    config: ModelConfig, work: Work, precision: Precision | None = None
) -> tuple[Operation, ...]:
    """Every operation of one step: products with matrices, mixing over the cache, tables, norms.

    Each weight is read once (of a mixture's experts the expected number that is visited, of an
    untied embedding only the rows looked up); each row's live cache once; new entries are written;
    activations are read by each product and written by it; logits are written and read.
    """
    precision = precision or Precision.of(config)
    T, V, D = work.num_tokens, config.vocab_size, config.width
    rest, table = precision.rest, weights.table_elements(config)
    operations = [
        _product(matrix, layers, T, precision)
        for matrix, layers in weights.matrices(config).items()
    ]
    operations += _mixing(config, work, precision)
    operations.append(
        Operation(
            "head", 1, 2 * work.num_logits * table, rest.bytes_for(table, D),
            activation_bytes=rest.bytes_for(work.num_logits * D, D) + 2 * 4 * work.num_logits * V,
            rows=work.num_logits,
        )
    )  # fmt: skip
    looked_up = rest.bytes_for(T * D, D)
    own = 0.0 if config.tied else looked_up  # a tied table is the head's, which reads it whole
    own += looked_up if config.learned_positions else 0.0
    operations.append(Operation("embed", 1, 0, own, activation_bytes=looked_up, split=False))
    vectors = rest.bytes_for(weights.vector_elements(config), D)
    operations.append(Operation("vectors", 1, 0, vectors, split=False))
    sequences = max(1, work.num_sequences)
    return tuple(dataclasses.replace(o, sequences=sequences) for o in operations)


def _product(matrix: Matrix, layers: int, T: int, precision: Precision) -> Operation:
    """One kind of matrix in all the layers that hold it."""
    visited, copies = T * matrix.copies_per_token, matrix.copies_touched(T)
    touched = layers * copies * matrix.rows * matrix.width
    moved = layers * visited * (matrix.rows + matrix.width)
    return Operation(
        matrix.name, layers, 2 * layers * visited * matrix.rows * matrix.width,
        weight_bytes=precision.weights.bytes_for(touched, matrix.width),
        activation_bytes=precision.rest.bytes_for(moved, matrix.width),
        split=matrix.split is not None, rows=visited / copies if copies else 0,
        copied=matrix.copied_rows / matrix.rows, cache_parts=matrix.copied_parts, kind="matrix",
        by_expert=matrix.experts is not None,
    )  # fmt: skip


def _mixing(config: ModelConfig, work: Work, precision: Precision) -> list[Operation]:
    """What tokens exchange: one operation a kind of layer."""
    return [
        _recur(kind.layer, layers, work, precision)
        if kind.layer.recurrent is not None
        else _attend(config, kind, layers, work, precision)
        for kind, layers in _kinds(config).items()
    ]


@dataclasses.dataclass(frozen=True)
class _Kind:
    """Layers that mix alike.

    Attributes:
        layer: without what costs nothing here: how positions rotate, what follows, whose cache.
        stored: what it reads, its own or its owner's.
        is_sharer: whether it is the owner's.
    """

    layer: LayerSpec
    stored: CacheSpec
    is_sharer: bool


@functools.lru_cache(maxsize=64)  # a sweep asks for the same model thousands of times
def _kinds(config: ModelConfig) -> Mapping[_Kind, int]:
    """How many layers mix alike."""
    specs = config.cache_specs
    return collections.Counter(
        _Kind(
            dataclasses.replace(layer, rope=None, ffn="none", experts=None, cache=None),
            spec if spec.owner is None else specs[spec.owner],
            layer.is_sharer,
        )
        for layer, spec in zip(config.layers, specs, strict=True)
    )


def _attend(
    config: ModelConfig, kind: _Kind, layers: int, work: Work, precision: Precision
) -> Operation:
    """Scores and weighted sums over the cache; a sharer reads what its owner stored."""
    layer, stored = kind.layer, kind.stored
    heads, indexer = config.num_heads, layer.indexer
    index_width = 0 if indexer is None else indexer.head_width
    if layer.latent is None:
        flops_per_pair, row = 4 * heads * config.head_width, config.head_width
        queries_width = 2 * heads * config.head_width
    else:  # queries are projected into the latent space instead of keys out of it
        flops_per_pair = 2 * heads * (2 * layer.latent.rank + layer.latent.rope_width)
        row = layer.latent.rank + layer.latent.rope_width
        queries_width = heads * (2 * layer.latent.rank + layer.latent.rope_width)
    read = written = scored = flops = 0.0
    for rows in work.rows:
        live = rows.context - stored.live_from(rows.context - rows.queries)
        pairs, chosen = rows.pairs(stored.window), float(live)
        if indexer is not None:
            flops += rows.count * pairs * 2 * indexer.num_heads * index_width
            pairs = rows.pairs(min(stored.window or indexer.top_k, indexer.top_k))
            chosen, scored = min(live, rows.queries * indexer.top_k), scored + rows.count * live
        per_row = pairs * flops_per_pair
        if layer.latent is not None:
            per_row = min(per_row, _expanded_flops(layer.latent, heads, rows, pairs))
        flops += rows.count * per_row
        read += rows.count * chosen
        written += rows.count * rows.queries
    width = stored.elements_per_token - index_width
    elements = read * width + scored * index_width
    elements += 0 if kind.is_sharer else written * stored.elements_per_token
    name = "attend" if layer.latent is None else "attend.latent"
    return Operation(
        name if stored.window is None else f"{name}.window{stored.window}", layers, layers * flops,
        cache_bytes=layers * precision.cache.bytes_for(elements, row),
        activation_bytes=layers * precision.rest.bytes_for(work.num_tokens * queries_width, row),
        cache_parts=cache_parts(config, layer), kind="attention",
    )  # fmt: skip


def _expanded_flops(sizes: Latent, heads: int, rows: Rows, pairs: float) -> float:
    """Attention of one row over keys and values projected out of the latent vectors, which pays in
    prefill: those of new tokens are `latent.kv_up`, those of earlier ones come on top.
    """
    per_pair = 2 * heads * (sizes.nope_width + sizes.rope_width + sizes.value_width)
    per_token = 2 * heads * (sizes.nope_width + sizes.value_width) * sizes.rank
    return pairs * per_pair + (rows.context - rows.queries) * per_token


def _recur(layer: LayerSpec, layers: int, work: Work, precision: Precision) -> Operation:
    """A state is decayed, added to and read for each token; in float32 it is read once a step and
    written once, and once more for each draft.
    """
    sizes = layer.recurrent
    assert sizes is not None
    tokens = sum(rows.count * rows.queries for rows in work.rows)
    moved = sum(rows.count * (2 + rows.drafts) for rows in work.rows)
    per_token = (
        6 * sizes.inner_width * sizes.state_width + 2 * sizes.conv_width * sizes.conv_channels
    )
    channels = sizes.conv_channels + sizes.inner_width
    return Operation(
        "recur", layers, layers * tokens * per_token,
        cache_bytes=layers * moved * 4 * sizes.state_elements,
        activation_bytes=layers * precision.rest.bytes_for(work.num_tokens * channels, channels),
        cache_parts=sizes.num_heads,
    )  # fmt: skip


def cache_parts(config: ModelConfig, layer: LayerSpec) -> int:
    """Chips that a layer's cache can be divided over: key/value heads and the heads of a state
    can, a latent vector belongs to all heads.
    """
    if layer.recurrent is not None:
        return layer.recurrent.num_heads
    return 1 if layer.latent is not None else config.num_kv_heads


def cache_bytes_per_token(config: ModelConfig, precision: Precision | None = None) -> float:
    """Bytes that one more token adds to a sequence, windows aside."""
    return sum(
        _token_bytes(config, layer, spec, precision or Precision.of(config))
        for layer, spec in zip(config.layers, config.cache_specs, strict=True)
    )


def cache_bytes(
    config: ModelConfig, context: int, precision: Precision | None = None, drafts: int = 0
) -> float:
    """Bytes of a sequence of `context` tokens: what its windows keep, and its states."""
    return sum(cache_by_parts(config, context, precision, drafts).values())


def cache_by_parts(
    config: ModelConfig, context: int, precision: Precision | None = None, drafts: int = 0
) -> dict[int, float]:
    """Bytes of a sequence of `context` tokens, by the chips they can be divided over."""
    precision = precision or Precision.of(config)
    found: dict[int, float] = {}
    for kind, layers in _kinds(config).items():
        if kind.is_sharer:
            continue
        layer, spec = kind.layer, kind.stored
        tokens = context if spec.window is None else min(context, spec.window)
        held = tokens * _token_bytes(config, layer, spec, precision)
        parts, kept = cache_parts(config, layer), held + spec.bytes_per_sequence(drafts)
        found[parts] = found.get(parts, 0.0) + layers * kept
    return found


def _token_bytes(
    config: ModelConfig, layer: LayerSpec, spec: CacheSpec, precision: Precision
) -> float:
    row = config.head_width
    if layer.latent is not None:
        row = layer.latent.rank + layer.latent.rope_width
    return precision.cache.bytes_for(spec.elements_per_token, row)
