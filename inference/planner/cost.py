"""What a step must cost, from shapes alone: bytes and FLOPs, operation by operation.

A decode step reads every weight and every live cache entry once and computes little with each byte,
so it waits for memory; a prefill step reuses each weight for all its tokens, so it waits for
arithmetic.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping

from configs.cache import CacheSpec
from configs.engine import Config
from configs.kinds import operations
from configs.kinds.operations import Amount, Quantity
from configs.kinds.params import leaves
from configs.model import ModelConfig
from configs.precision import CACHE_FORMATS, FORMATS, Format
from inference.scheduling import step_shapes
from inference.scheduling.step_schedule import StepRecord


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
        """As the model's own dtype and the format of its cache say."""
        dtype = FORMATS[config.dtype]
        return cls(dtype, CACHE_FORMATS[config.cache_dtype], dtype)

    def format(self, name: str) -> Format:
        """The format that a declaration names: 'weights', 'cache' or 'rest', or one by itself."""
        return FORMATS[name] if name in FORMATS else getattr(self, name)


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

    def quantity(self, quantity: Quantity) -> float:
        """A quantity of one of the sequences (`configs/kinds/operations.py`)."""
        match quantity:
            case ("sequences",):
                return 1
            case ("queries",):
                return self.queries
            case ("drafts",):
                return self.drafts
            case ("pairs", int() | None as window):
                return self.pairs(window)
            case ("read", int() | None as window, int() | None as most):
                visible = self.context if window is None else self.queries + window - 1
                live = min(self.context, visible)
                return live if most is None else min(live, self.queries * most)
            case ("chunk_pairs", int() as size):
                return _seen_in_chunks(self.context, size) - _seen_in_chunks(self._first, size)
            case ("chunk_read", int() as size, int() | None as most):
                live = self.context - self._first // size * size
                return live if most is None else min(live, self.queries * most)
        raise ValueError(f"no quantity of a step: {quantity}")

    @property
    def _first(self) -> int:
        """Position of the first query."""
        return self.context - self.queries

    def pairs(self, window: int | None) -> float:
        """Pairs of query and visible key in one sequence."""
        first = self._first + 1
        if window is None or self.context <= window:
            return self.queries * (first + self.context) / 2
        growing = max(0, window - first)  # queries that do not see a whole window yet
        return growing * (first + window - 1) / 2 + (self.queries - growing) * window


@dataclasses.dataclass(frozen=True)
class Work:
    """What one step does: T packed tokens (padding included, unless it is left out), the rows they
    belong to, Q rows of logits. Each request has `samples` sequences, which run on one chip along
    `expert`.
    """

    num_tokens: int
    rows: tuple[Rows, ...]
    num_logits: int
    samples: int = 1

    @property
    def num_requests(self) -> int:
        return sum(rows.count for rows in self.rows) // self.samples

    @classmethod
    def decode(cls, batch: int, context: int, drafts: int = 0, samples: int = 1) -> "Work":
        """Each sequence of `batch` requests feeds its newest token, and drafts to be verified."""
        count, width = batch * samples, 1 + drafts
        rows = Rows(count, width, context + drafts, drafts)
        return cls(count * width, (rows,), count * width, samples)

    @classmethod
    def prefill(cls, batch: int, context: int) -> "Work":
        """Prompts of `context` tokens, from nothing."""
        return cls(batch * context, (Rows(batch, context, context),), batch)

    @classmethod
    def of_step(cls, config: Config, model: ModelConfig, record: StepRecord) -> "Work":
        """That of a step of an engine which feeds its tokens to `model`."""
        shape, sizes = record.shape, record.rows
        rows = tuple(Rows(1, queries, context) for queries, context in sizes)
        if not step_shapes.leaves_padding_out(config, model):
            return cls(shape.num_tokens, rows, shape.num_logits)
        width = shape.decode[1]  # what is longer is a chunk; a shorter one counts as drafts do
        num_logits = sum(queries if queries <= width else 1 for queries, _ in sizes)
        return cls(sum(queries for queries, _ in sizes), rows, num_logits)


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
        by_context: whether chips along `context` divide it, too: of attention the cache and the
            products with it.
        requests: whose tokens these are: chips that work for different ones divide them.
        rows: of a product with weights, tokens that each weight is multiplied with.
        expansion: how many times its bytes what is read of the cache has as activations.
        format: of most of its weights, where these have one of few bits of their own.
    """

    name: str
    layers: int
    flops: float
    weight_bytes: float = 0.0
    cache_bytes: float = 0.0
    activation_bytes: float = 0.0
    split: bool = True
    cache_parts: int = 1
    requests: int = 1
    rows: float = math.inf
    copied: float = 0.0
    kind: str = "other"
    by_expert: bool = False
    by_context: bool = False
    expansion: float = 1.0
    format: str | None = None

    @property
    def bytes(self) -> float:
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
    listed = list(operations)
    return Cost(sum(o.bytes for o in listed), sum(o.flops for o in listed))


def step_operations(
    config: ModelConfig, work: Work, precision: Precision | None = None
) -> tuple[Operation, ...]:
    """Every operation of one step: products with matrices, mixing over the cache, tables, norms.

    Each weight is read once (of a mixture's experts the expected number that is visited, of an
    untied embedding only the rows looked up); each row's live cache once; new entries are written;
    activations are read by each product and written by it; logits are written and read.
    """
    precision = precision or Precision.of(config)
    return tuple(
        evaluate(declared, layers, work, precision)
        for declared, layers in config.operations.items()
    )


def evaluate(
    declared: operations.Operation, layers: int, work: Work, precision: Precision
) -> Operation:
    """What an operation of `layers` layers costs in a step: the declared sums, counted out."""
    moved, expanded = dict.fromkeys(("weights", "cache", "activations"), 0.0), 0.0
    for move in declared.moves:
        elements = layers * _count(move.amount, work)
        moved[move.what] += precision.format(move.format).bytes_for(elements, move.row)
        if move.what == "cache":
            expanded += precision.rest.bytes_for(elements, move.row)
    flops = _count(declared.flops, work)
    visited = _count(declared.visited, work)
    return Operation(
        declared.name, layers, float(layers * flops), moved["weights"], moved["cache"],
        moved["activations"], declared.is_split, declared.cache_parts,
        max(1, work.num_requests), _rows(declared, work, visited),
        declared.kv_rows / declared.all_rows, declared.kind, declared.by_expert,
        declared.by_context, expanded / moved["cache"] if moved["cache"] else 1.0,
        _own_format(declared),
    )  # fmt: skip


def _own_format(declared: operations.Operation) -> str | None:
    """Of the weights that an operation reads most of, if it has few bits."""
    read = [move for move in declared.moves if move.what == "weights"]
    largest = max(read, key=lambda move: sum(n for n, _ in move.amount), default=None)
    name = "" if largest is None else largest.format
    return name if name in FORMATS and FORMATS[name].is_quantized else None


def weight_formats(config: ModelConfig) -> tuple[str, ...]:
    """The formats of few bits that a model has weights in."""
    formats = {info.format for _, info in leaves(config.parameters())} if config.formats else set()
    return tuple(sorted(name for name in formats if FORMATS[name].is_quantized))


def _rows(declared: operations.Operation, work: Work, visited: float) -> float:
    if not declared.rows:
        return math.inf
    return _count(declared.rows, work) / visited if visited else 0.0


def _count(amount: Amount, work: Work) -> float:
    """The sum of an amount's quantities in a step."""
    return sum(coefficient * _quantity(quantity, work) for coefficient, quantity in amount)


def _quantity(quantity: Quantity, work: Work) -> float:
    """A quantity of `configs/kinds/operations.py`."""
    match quantity:
        case ():
            return 1
        case ("tokens",):
            return work.num_tokens
        case ("logits",):
            return work.num_logits
        case ("experts", int() as num_experts, int() as top_k):
            return num_visited(num_experts, top_k, work.num_tokens)
        case _:
            return sum(rows.count * rows.quantity(quantity) for rows in work.rows)


def _seen_in_chunks(num_tokens: int, size: int) -> float:
    """Pairs of the first tokens of a sequence, each of which sees its own chunk up to itself."""
    whole, remainder = divmod(num_tokens, size)
    return (whole * size * (size + 1) + remainder * (remainder + 1)) / 2


def num_visited(num_experts: int, top_k: int, num_tokens: int) -> float:
    """Experts that at least one token visits, expected where each chooses evenly and on its own."""
    return num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)


def cache_bytes_per_token(
    config: ModelConfig, precision: Precision | None = None, lanes: int = 1
) -> float:
    """Bytes that one more token adds to a sequence, windows aside, in rows padded to `lanes`."""
    formats = precision or Precision.of(config)
    parts = itertools.chain.from_iterable(spec.parts for spec in config.cache_specs)
    return sum(_token_bytes(part, formats, lanes) for part in parts)


def cache_bytes(
    config: ModelConfig,
    context: int,
    precision: Precision | None = None,
    drafts: int = 0,
    lanes: int = 1,
    chips: int = 1,
    context_chips: int = 1,
) -> float:
    """Bytes of a sequence of `context` tokens: what its windows keep, and its states.

    Args:
        lanes: that rows are padded to (`HardwareSpec.lanes`).
        chips: along `model`, of which one is counted: beyond what can be divided, they hold copies.
        context_chips: that divide the tokens, of which one is counted.
    """
    chip_bytes = _chip_bytes(config, context, precision, drafts, lanes, chips, context_chips)
    return sum(num_bytes for num_bytes, _ in chip_bytes)


def sent_cache_bytes(
    config: ModelConfig,
    context: int,
    precision: Precision | None = None,
    drafts: int = 0,
    lanes: int = 1,
    chips: int = 1,
) -> float:
    """Bytes of a sequence that a process sends to another one with as many chips along `model`:
    what each of them has of several heads, copies included, and once what all of them have.
    """
    chip_bytes = _chip_bytes(config, context, precision, drafts, lanes, chips, 1)
    return sum(num_bytes * (chips if parts > 1 else 1) for num_bytes, parts in chip_bytes)


def _chip_bytes(
    config: ModelConfig,
    context: int,
    precision: Precision | None,
    drafts: int,
    lanes: int,
    chips: int,
    context_chips: int,
) -> Iterator[tuple[float, int]]:
    """Of each kind of cache, bytes of a sequence on a chip, and chips that can divide it."""
    precision = precision or Precision.of(config)
    for (spec, parts), layers in caches(config).items():
        window, chips_of_part = spec.sliding(), min(chips, parts)
        tokens = context if window is None else min(context, window)
        states = spec.bytes_per_sequence(drafts) / chips_of_part
        token_bytes = _token_bytes(spec, precision, lanes, chips_of_part)
        yield layers * (tokens / context_chips * token_bytes + states), parts


@functools.lru_cache(maxsize=64)  # a sweep asks for the same model thousands of times
def caches(config: ModelConfig) -> Mapping[tuple[CacheSpec, int], int]:
    """What layers keep and the chips it can be divided over, and how many layers keep that."""
    return collections.Counter(
        part
        for spec, layer in zip(config.cache_specs, config.layers, strict=True)
        if spec.owner is None
        for part in layer.mixer.cached(config)
    )


def _token_bytes(spec: CacheSpec, precision: Precision, lanes: int, chips: int = 1) -> float:
    """Bytes of a token on one of the chips that divide its heads."""
    stored = precision.cache.bytes_for(token_elements(spec), spec.scaled_elements)
    return stored / chips + spec.padding_bytes(precision.cache.name, lanes, chips)


def token_elements(spec: CacheSpec) -> float:
    """Elements of a token, and its part of what its page has besides."""
    return spec.elements_per_token + spec.elements_per_page / operations.PAGE_TOKENS
