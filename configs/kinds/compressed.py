"""Attention over one vector a token near by, and one vector for several tokens of all the past."""

import dataclasses

from configs.cache import BLOCK_TOKENS, CacheSpec, compressed, latent
from configs.errors import InputError
from configs.kinds import operations, params
from configs.kinds.kind import MOST_MATRICES, Mixer, check_multiple, check_sizes, equal_shares
from configs.kinds.latent import Indexer
from configs.kinds.operations import Amount, Move, Operation
from configs.kinds.params import Declaration, Declared, ParamInfo, Widths
from configs.kinds.rope import Rope


@dataclasses.dataclass(frozen=True)
class Compressed(Mixer, name="compressed"):
    """Compressed attention (DeepSeek-AI 2026, DeepSeek-V4): all heads read one vector a token,
    their key and their value, of the last `window` tokens, and an entry for every `stride` tokens
    of all the past, which is pooled from them; of these all, or those that an indexer chooses.

    A key rotates at its token's position, an entry's at that of its first token. As values rotate
    with them, what a query finds is turned back by its own position.

    Attributes:
        num_heads, head_width: N and H; the vector that all heads read has H elements.
        query_rank: elements of the queries' latent vector.
        window: tokens that are seen one by one, the newest included.
        stride: tokens that an entry is pooled from: a query sees those whose tokens are all there.
            0: there are no entries, and a query sees its window alone.
        overlaps: an entry is pooled from the `stride` tokens before its own, too, which have a
            second vector for that.
        rope: rotary positions of the last `rope_width` elements.
        groups, group_rank: heads in so many groups are projected to a vector of `group_rank`
            elements a group, before these are projected to the model's width together.
        norm_eps: of the norms of latent vectors, keys and entries, and of each query head.
        indexer: chooses the entries that attention reads, by entries of its own; None: all.
    """

    divided = ("groups",)
    cached_products = ("kv", "pooled")  # of attention and of the indexer

    num_heads: int
    head_width: int
    query_rank: int
    rope_width: int
    groups: int
    group_rank: int
    window: int
    stride: int
    overlaps: bool = False
    rope: Rope = Rope(neighbours=True)
    norm_eps: float = 1e-6
    indexer: Indexer | None = None

    def __post_init__(self) -> None:
        check_sizes(self, "groups", most=MOST_MATRICES)
        check_sizes(self, "num_heads", "head_width", "query_rank", "group_rank", "window")
        if self.stride and (self.stride < 2 or BLOCK_TOKENS % self.stride):
            raise InputError(
                f"compressed stride={self.stride} is at least 2 and divides {BLOCK_TOKENS}, or 0"
            )
        if not self.stride and (self.overlaps or self.indexer):
            raise InputError("compressed overlaps and indexer go with a stride: there are entries")
        check_multiple(self, "num_heads", "groups")
        self.rope.rotating(self.rope_width)
        widths = {"head_width": self.head_width}
        if self.indexer is not None:
            widths["indexer head_width"] = self.indexer.head_width
            if self.indexer.head_width > self.head_width:
                raise InputError(
                    f"indexer head_width={self.indexer.head_width} is no wider than the "
                    f"{self.head_width} elements of an entry that its key stands for"
                )
        for name, width in widths.items():
            if width < self.rope_width:
                raise InputError(
                    f"compressed {name}={width} is at least rope_width={self.rope_width}, which "
                    "rotates"
                )

    @property
    def series(self) -> int:
        """Vectors that a token gives to entries: to its own, and to the one behind it."""
        return 1 + self.overlaps

    @property
    def pooled_tokens(self) -> int:
        """Tokens that an entry is pooled from."""
        return self.series * self.stride

    @property
    def pooled_widths(self) -> tuple[int, ...]:
        """Elements of a vector that is pooled: of attention's, and of the indexer's."""
        return (self.head_width,) + ((self.indexer.head_width,) if self.indexer else ())

    def parameters(self, model: Widths) -> Declared:
        """Queries by way of a latent vector; the token's own vector; what entries are pooled from,
        attention's and the indexer's: the vectors and then their gates [2 series width, D], and
        biases of the gates by place [stride, series width]; the groups' way out, a matrix each, and
        the model's.
        """
        if model.norm != "rms":
            raise InputError("compressed attention goes with model.norm='rms'")
        N, H, D, dtype = self.num_heads, self.head_width, model.width, model.dtype

        def pooled(width: int) -> dict[str, Declaration]:
            series = self.series * width
            bias = ParamInfo((self.stride, series), "float32", (None, None), "zeros", is_bias=True)
            return {
                "pooled": ParamInfo(
                    (2 * series, D), dtype, (None, "embed"), stacked=(series, series)
                ),
                "pooling": {"bias": bias, "norm": params.norm(model, width, None)},
            }

        declared: dict[str, Declaration] = {
            "q_down": ParamInfo((self.query_rank, D), dtype, (None, "embed")),
            "q_norm": params.norm(model, self.query_rank, None),
            "q_up": ParamInfo((N * H, self.query_rank), dtype, ("heads", None)),
            "kv": ParamInfo((H, D), dtype, (None, "embed")),
            "kv_norm": params.norm(model, H, None),
            **(pooled(H) if self.stride else {}),
            "sinks": ParamInfo((N,), "float32", ("heads",), "zeros"),
            "group_out": ParamInfo(
                (self.groups, self.group_rank, N * H // self.groups), dtype,
                ("heads", None, None), stacked=(self.group_rank,) * self.groups,
            ),
            "out": ParamInfo((D, self.groups * self.group_rank), dtype, ("embed", "heads")),
        }  # fmt: skip
        if self.indexer is not None:
            heads, width = self.indexer.num_heads, self.indexer.head_width
            declared["indexer"] = {
                "q": ParamInfo((heads * width, self.query_rank), dtype, (None, None)),
                "weights": ParamInfo((heads, D), dtype, (None, "embed")),
                **pooled(width),
            }
        return declared

    def cache(self, model: Widths) -> CacheSpec:
        """Entries, and the newest tokens with what their entries will be pooled from; without
        entries tokens alone. These lie as latents with a rotary part do: of zeros here, or NaN
        where a token's numbers are not finite.
        """
        if not self.stride:
            latents = latent(self.head_width, self.rope_width)
            return dataclasses.replace(latents, window=self.window)
        index_width = self.indexer.head_width if self.indexer else 0
        window = max(self.window, self.pooled_tokens)
        pooled_width = 2 * self.series * sum(self.pooled_widths)
        return compressed(self.head_width, self.stride, window, index_width, pooled_width)

    def operations(self, model: Widths, stored: CacheSpec) -> tuple[Operation, ...]:
        """The products, attention over tokens and entries, and what entries are pooled from: for
        each token that is fed as many as an entry has, once in `stride` times; devices
        without branches read them each time.
        """
        N, H, m = self.num_heads, self.head_width, self.stride
        activations = Move("activations", ((2 * N * H, operations.TOKENS),), H, "rest")
        if not m:
            stored_width = H + self.rope_width
            read: Amount = (
                (stored_width, ("read", self.window, None)), (stored_width, ("queries",)),
            )  # fmt: skip
            near_alone = Operation(
                "attend.compressed", "attention",
                flops=((2 * N * (stored_width + H), ("pairs", self.window)),),
                moves=(Move("cache", read, stored.scaled_elements, "cache"), activations),
            )  # fmt: skip
            return (*super().operations(model, stored), near_alone)
        entries, tokens = stored.parts
        near, index, budget = tokens.elements_per_entry - tokens.pooled_width, 0, None
        scoring: Amount = ()
        if self.indexer is not None:
            index, budget = self.indexer.head_width, self.indexer.top_k * m
            scoring = ((2 * self.indexer.num_heads * index / m, ("pairs", None)),)
        pooled = tokens.pooled_width * self.pooled_tokens / m
        moved: Amount = (
            (near, ("read", self.window, None)),
            ((entries.elements_per_entry - index) / m, ("read", None, budget)),
            (pooled + entries.elements_per_token + tokens.elements_per_entry, ("queries",)),
        )
        if index:
            moved += ((index / m, ("read", None, None)),)
        attend = Operation(
            "attend.compressed", "attention",
            flops=(
                *scoring, (4 * N * H, ("pairs", self.window)), (4 * N * H / m, ("pairs", budget)),
            ),
            moves=(Move("cache", moved, entries.scaled_elements, "cache"), activations),
        )  # fmt: skip
        return (*super().operations(model, stored), attend)

    def per_chip(self, chips: int) -> "Compressed":
        """See `Kind`: heads are divided, and each chip holds all that they read."""
        return dataclasses.replace(
            self, num_heads=self.num_heads // chips, groups=self.groups // chips
        )

    def shares(self, axis: str, chips: int) -> tuple[range, ...]:
        return equal_shares(self.num_heads, chips)

    @property
    def query_heads(self) -> int:
        return self.num_heads

    @property
    def chooses(self) -> bool:
        return self.indexer is not None

    @property
    def rotation(self) -> tuple[Rope, int] | None:
        return self.rope, self.rope_width
