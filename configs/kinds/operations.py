"""What a layer kind costs, as coefficients: a sum of (coefficient x quantity) for each thing that
is computed or moved. `inference/planner/cost.py` evaluates the sums for a step, and so does the
planner's page, which therefore knows no model.

A quantity of a step is a name and its parameters:

    ("tokens",)           T, packed tokens, padding included
    ("logits",)           Q, rows of logits
    ("experts", E, n)     of E experts, those that at least one of T tokens visits, each n of them,
                          evenly and on its own

or a sum over the step's sequences, of which each feeds `queries` tokens and then has `context`:

    ("sequences",)        1
    ("queries",)          the tokens it feeds
    ("drafts",)           of these, the ones that may be refused
    ("pairs", window)     pairs of query and visible key
    ("read", window, n)   keys that are read: the visible ones, at most n a query (None: all)
    ("chunk_pairs", c)    as ("pairs", window), where a query sees its own chunk of c tokens
    ("chunk_read", c, n)  likewise
"""

import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence

from configs.kinds.params import Declaration, Declared, ParamInfo, Widths, leaves

Quantity = tuple[str | int | None, ...]
Amount = tuple[tuple[float, Quantity], ...]  # the sum of coefficient x quantity

PAGE_TOKENS = 16  # of a CPU, where queries choose pages (`Attention.token_budget`)
TOKENS, LOGITS = ("tokens",), ("logits",)


@dataclasses.dataclass(frozen=True)
class Move:
    """Elements read from memory or written to it.

    Attributes:
        what: 'weights', 'cache' or 'activations'.
        amount: elements.
        row: how many lie in a row, which may share a scale; of a cache, on average.
        format: which of a deployment's precisions stores them: 'weights' (of matrices), 'cache' or
            'rest'; or a format by name, which no deployment changes.
    """

    what: str
    amount: Amount
    row: float
    format: str


@dataclasses.dataclass(frozen=True)
class Operation:
    """One kind of operation of a layer.

    Attributes:
        name: 'part.operation'.
        kind: what it runs as: 'matrix' (tokens and a layer's weights), 'attention' or 'other'.
        flops: floating-point operations.
        moves: bytes.
        rows, visited: tokens that meet the weights, and matrices that they meet: a weight is
            multiplied with rows / visited of them; no rows: there is no such product.
        is_split: whether tensor parallelism divides it (otherwise each chip does all of it).
        by_expert: whether chips along `expert` divide its weights.
        by_context: whether chips along `context` divide it, too: what attention reads and computes,
            or all else in equal parts.
        cache_parts: chips that the cache, and what makes it, can be divided over; more of them hold
            copies.
        kv_rows, all_rows: of the rows of a matrix, those that make the cache.
    """

    name: str
    kind: str
    flops: Amount = ()
    moves: tuple[Move, ...] = ()
    rows: Amount = ()
    visited: Amount = ((1, ()),)
    is_split: bool = True
    by_expert: bool = False
    by_context: bool = False
    cache_parts: int = 1
    kv_rows: int = 0
    all_rows: int = 1


def recurrence(
    name: str, per_token: float, state: int, moved: float, row: float, cache_parts: int
) -> Operation:
    """What tokens do to the states of their sequence. These are float32, read once a step and
    written once, and once more for each draft.

    Args:
        name: of the operation.
        per_token: floating-point operations.
        state: elements of a sequence's states.
        moved: elements that a token brings and takes.
        row: how many of these lie in a row.
        cache_parts: as `Operation.cache_parts`.
    """
    states: Amount = ((2 * state, ("sequences",)), (state, ("drafts",)))
    return Operation(
        name, "other", flops=((per_token, ("queries",)),),
        moves=(Move("cache", states, state, "float32"),
               Move("activations", ((moved, TOKENS),), row, "rest")),
        cache_parts=cache_parts,
    )  # fmt: skip


def products(
    part: str, model: Widths, declared: Declared, top_k: int = 1, cached: Collection[str] = ()
) -> tuple[Operation, ...]:
    """The products of tokens with each matrix of a layer kind.

    Args:
        part: names the operations ('attention.qkv'); matrices of a nested mapping go by its name.
        model: the widths.
        declared: the kind's parameters.
        top_k: of a mixture's experts, those that a token visits.
        cached: names of the matrices that make nothing but the cache.
    """
    return tuple(
        _product(
            f"{path[-2] if len(path) > 1 else part}.{path[-1]}",
            info,
            top_k,
            stored_as(info, model, "weights"),
            path[-1] in cached,
        )  # fmt: skip
        for path, info in leaves(declared)
        if info.is_multiplied
    )


def _product(name: str, info: ParamInfo, top_k: int, format: str, is_cached: bool) -> Operation:
    """Every token (of a mixture's matrices, `top_k` for each token) times one matrix."""
    experts, width = info.num_experts, info.shape[-1]
    rows = info.rows // (experts or 1)
    visits = 1 if experts is None else top_k
    visited: Amount = ((1, ()),) if experts is None else ((1, ("experts", experts, top_k)),)
    weights = tuple((n * rows * width, quantity) for n, quantity in visited)
    return Operation(
        name, "matrix", flops=((2 * visits * rows * width, TOKENS),),
        moves=(Move("weights", weights, width, format),
               Move("activations", ((visits * (rows + width), TOKENS),), width, "rest")),
        rows=((visits, TOKENS),), visited=visited, is_split=is_divided(info),
        by_expert=experts is not None, by_context=is_by_context(info),
        cache_parts=max(1, info.kv_heads),
        kv_rows=rows if is_cached else info.kv_rows, all_rows=rows,
    )  # fmt: skip


def head(width: int, vocab_size: int, rows: int, format: str) -> Operation:
    """The product that logits come from, with so many rows of a table in this format."""
    return Operation(
        "head", "other", flops=((2 * rows * width, LOGITS),), rows=((1, LOGITS),),
        moves=(Move("weights", ((rows * width, ()),), width, format),
               Move("activations", ((width, LOGITS),), width, "rest"),
               Move("activations", ((2 * vocab_size, LOGITS),), vocab_size, "float32")),
        by_context=True,
    )  # fmt: skip


def look_ups(rows: Sequence[tuple[int, int, str]]) -> Operation:
    """Rows of tables that a token looks up and adds: how many, their elements, their format."""
    moves = []
    for count, row, format in rows:
        moves += [
            Move("weights", ((count * row, TOKENS),), row, format),
            Move("activations", ((row, TOKENS),), row, "rest"),
        ]
    return Operation("embed", "other", moves=tuple(moves), is_split=False)


def vector_reads(
    vectors: Mapping[tuple[str, bool, bool], int], width: int
) -> tuple[Operation, ...]:
    """Reads of what is no matrix, as chips divide it: `ModelConfig.vectors` counts elements."""
    moves = collections.defaultdict(list)
    for (format, *divided), elements in vectors.items():
        moves[tuple(divided)].append(Move("weights", ((elements, ()),), width, format))
    return tuple(
        Operation(
            f"{'experts.' if by_expert else 'states.' if is_split else ''}vectors", "other",
            moves=tuple(moved), is_split=is_split, by_expert=by_expert,
        )
        for (is_split, by_expert), moved in moves.items()
    )  # fmt: skip


def in_formats(operation: Operation, declared: Declaration, model: Widths) -> Operation:
    """A product where its layer kind's parameters may have formats of their own."""
    part, _, name = operation.name.rpartition(".")
    infos = [
        info
        for path, info in leaves(declared)
        # A stack whose parts have different formats is a tuple of them: 'qkv', '0'.
        if info.is_matrix and (path[:2] == (part, name) or path[0] == name)
    ]
    formats = {stored_as(info, model, "weights") for info in infos}
    if operation.kind != "matrix" or formats <= {"weights"}:
        return operation
    if len(formats) == 1:
        (format,) = formats
        renamed = (
            dataclasses.replace(move, format=format) if move.what == "weights" else move
            for move in operation.moves
        )
        return dataclasses.replace(operation, moves=tuple(renamed))
    moves = tuple(
        Move("weights", ((info.elements, ()),), info.shape[-1], stored_as(info, model, "weights"))
        for info in infos
    )
    moves += tuple(move for move in operation.moves if move.what != "weights")
    return dataclasses.replace(operation, moves=moves)


def stored_as(info: ParamInfo, model: Widths, otherwise: str) -> str:
    """The format of a parameter in a `Move`: its own, or `otherwise` where that is the model's."""
    return otherwise if info.format == model.dtype else info.format


def is_divided(info: ParamInfo) -> bool:
    """Whether tensor parallelism divides a matrix: by heads, columns of a feed-forward, or
    vocabulary.
    """
    return "heads" in info.logical_axes or is_by_context(info)


def is_by_context(info: ParamInfo) -> bool:
    """Whether chips along `context` divide a matrix, as those along `model` do."""
    return any(axis in ("ffn", "shared", "vocab") for axis in info.logical_axes)
