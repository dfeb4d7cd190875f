"""Attention over one latent vector a token, of all tokens or of those that an indexer chooses."""

import dataclasses

from configs.cache import CacheSpec, latent, shared
from configs.errors import InputError
from configs.kinds import operations, params
from configs.kinds.kind import MOST_MATRICES, Mixer, check_rotated, check_sizes
from configs.kinds.operations import Amount, Move, Operation
from configs.kinds.params import Declaration, Declared, ParamInfo, Widths
from configs.kinds.rope import Rope
from configs.kinds.temperature import Temperature


@dataclasses.dataclass(frozen=True)
class Indexer:
    """Sparse attention (DeepSeek-AI 2025, DeepSeek-V3.2): small heads score every token, attention
    reads the best.

    Attributes:
        num_heads, head_width: of the scoring heads, which share one key a token; its first elements
            rotate as the rotary keys of attention do.
        top_k: tokens that a query reads.
        neighbours: whether rotary pairs lie side by side, as `Rope.neighbours`.
    """

    name = "indexer"

    num_heads: int
    head_width: int
    top_k: int
    neighbours: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, "num_heads", "head_width", "top_k")

    def parameters(self, model: Widths, query_width: int) -> Declared:
        """Queries from the latent ones; keys and the heads' weights from the token; a layer norm
        of the keys.
        """
        H = self.head_width
        return {
            "q": ParamInfo((self.num_heads * H, query_width), model.dtype, (None, None)),
            "k": ParamInfo(
                (H + self.num_heads, model.width), model.dtype, (None, "embed"),
                stacked=(H, self.num_heads),
            ),
            "k_norm": {
                "weight": ParamInfo((H,), model.dtype, (None,), "ones"),
                "bias": ParamInfo((H,), model.dtype, (None,), "zeros"),
            },
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Latent(Mixer, name="latent"):
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434): keys and values of all
    heads are projections of one latent vector a token, cached beside one rotary key.

    Attributes:
        num_heads: N.
        rank: C, elements of the latent vector.
        rope_width: R, elements of the shared rotary key.
        nope_width, value_width: of a head's key without rotation, and of its value.
        query_rank: elements of the queries' own latent vector; None projects them at once.
        rope: rotary positions of the R elements; None: they do not rotate.
        scale: factor on q.k; None means (nope_width + rope_width) ** -0.5.
        norm_eps: of the norms of the latent vectors, and of the indexer's keys.
        indexer: chooses the tokens that attention reads; None: it reads all.
        index_owner: the earlier layer whose choice the layer reads (IndexCache, arXiv 2603.12201;
            GLM-5.2): that one has `indexer`, and this one neither its parameters nor its keys.
            None: the layer chooses for itself.
        temperature: of queries by their position, not of the indexer's; None: they do not grow.
        has_bias: whether the ways down to latent vectors, and the way out, add one.
        owner: the earlier layer whose latent vectors are read (cross-layer attention, Brandon et
            al. 2024, arXiv 2405.12981); None: the layer has its own. Ways between latent vectors
            and heads stay each layer's: they are absorbed into its queries and its output, so a
            second pair takes nothing in the cache, and layers may read different things in one.
    """

    divided = ("num_heads",)
    cached_products = ("kv_down",)

    num_heads: int
    rank: int
    rope_width: int
    nope_width: int
    value_width: int
    query_rank: int | None = None
    rope: Rope | None = Rope(neighbours=True)
    scale: float | None = None
    norm_eps: float = 1e-6
    indexer: Indexer | None = None
    owner: int | None = None
    has_bias: bool = False
    index_owner: int | None = None
    temperature: Temperature | None = None

    def __post_init__(self) -> None:
        check_sizes(self, "num_heads", most=MOST_MATRICES)
        check_sizes(self, "rank", "rope_width", "nope_width", "value_width", "query_rank")
        if self.indexer is not None and self.owner is not None:
            raise InputError(
                f"latent owner={self.owner} goes without an indexer, which has own keys"
            )
        if self.indexer is None and self.index_owner is not None:
            raise InputError(
                f"latent index_owner={self.index_owner} goes with the indexer of that layer"
            )
        if self.rope is not None:
            self.rope.rotating(self.rope_width)
        if self.indexer is not None:
            if self.rope is None:
                raise InputError("latent rope=None goes without an indexer, whose keys rotate")
            key, width = self.rank + self.rope_width, self.indexer.head_width
            if not self.rope_width <= width <= key:
                raise InputError(
                    f"indexer head_width={width} is at least rope_width={self.rope_width}, which "
                    f"rotates, and no wider than the {key} elements of a key that it stands for"
                )

    def parameters(self, model: Widths) -> Declared:
        """Down to the latent vectors (undivided: all heads read them), and each head's way between
        them and its keys without rotation [N, C, nope_width] and values [N, value_width, C]: of
        keys as queries take it, to latent vectors. The first are missing where an earlier layer's
        are read.
        """
        N, C, D, dtype = self.num_heads, self.rank, model.width, model.dtype
        queries = N * (self.nope_width + self.rope_width)
        if model.norm != "rms":
            raise InputError("latent attention goes with model.norm='rms'")
        declared: dict[str, Declaration] = {}
        if self.local_indexer is not None:
            declared["indexer"] = self.local_indexer.parameters(model, self.query_rank or D)
        if self.query_rank is None:
            declared["q"] = ParamInfo((queries, D), dtype, ("heads", "embed"))
        else:
            declared["q_down"] = ParamInfo((self.query_rank, D), dtype, (None, "embed"))
            declared["q_norm"] = params.norm(model, self.query_rank, None)
            declared["q_up"] = ParamInfo((queries, self.query_rank), dtype, ("heads", None))
        if self.owner is None:
            declared["kv_down"] = ParamInfo((C + self.rope_width, D), dtype, (None, "embed"))
            declared["kv_norm"] = params.norm(model, C, None)
        if self.has_bias:
            declared["out_bias"] = ParamInfo((D,), dtype, ("embed",), "zeros")
            for name, rows in (("q_down", self.query_rank or 0), ("kv_down", C + self.rope_width)):
                if name in declared:
                    declared[f"{name}_bias"] = ParamInfo((rows,), dtype, (None,), "zeros")
        return declared | {
            "k_up": ParamInfo(
                (N, C, self.nope_width), dtype, ("heads", None, None), stacked=(C,) * N
            ),
            "v_up": ParamInfo(
                (N, self.value_width, C), dtype, ("heads", None, None),
                stacked=(self.value_width,) * N,
            ),
            "out": ParamInfo((D, N * self.value_width), dtype, ("embed", "heads")),
        }  # fmt: skip

    def cache(self, model: Widths) -> CacheSpec:
        """The latent vector and the rotary key, and the indexer's key; or an earlier layer's."""
        if self.owner is not None:
            return shared(self.owner)
        spec = latent(self.rank, self.rope_width)
        if self.local_indexer is None:
            return spec
        return dataclasses.replace(spec, index_width=self.local_indexer.head_width)

    def check_owner(self, stored: CacheSpec, owner: Mixer) -> None:
        if stored != latent(self.rank, self.rope_width):
            raise InputError(
                f"latent with rank={self.rank} and rope_width={self.rope_width} reads layer "
                f"{self.owner}'s cache, which holds something else"
            )
        check_rotated(self, owner)

    def operations(self, model: Widths, stored: CacheSpec) -> tuple[Operation, ...]:
        """The products, and attention over the latent vectors, absorbed: queries are projected into
        their space (`latent.k_up`), and what they find out of it (`latent.v_up`).
        """
        N, C, R = self.num_heads, self.rank, self.rope_width
        index, budget = 0, None
        scoring: Amount = ()
        moved: Amount = ()
        if self.indexer is not None:
            budget = self.indexer.top_k
        if self.local_indexer is not None:
            index = self.local_indexer.head_width
            scoring = ((2 * self.local_indexer.num_heads * index, ("pairs", None)),)
            moved = ((index, ("read", None, None)),)
        entry, pairs = stored.elements_per_token, ("pairs", budget)
        moved += ((entry - index, ("read", None, budget)),)
        if self.owner is None:
            moved += ((entry, ("queries",)),)
        attend = Operation(
            "attend.latent", "attention", flops=(*scoring, (2 * N * (2 * C + R), pairs)),
            moves=(Move("cache", moved, stored.scaled_elements, "cache"),
                   Move("activations", ((N * (2 * C + R), operations.TOKENS),), C + R, "rest")),
            by_context=True,
        )  # fmt: skip
        return (*super().operations(model, stored), attend)

    def can_divide(self, chips: int) -> bool:
        return chips <= self.num_heads

    @property
    def local_indexer(self) -> Indexer | None:
        """The indexer whose parameters and keys the layer has."""
        return None if self.index_owner is not None else self.indexer

    @property
    def chooses(self) -> bool:
        return self.indexer is not None

    @property
    def choice_owner(self) -> int | None:
        return self.index_owner

    def check_choice_owner(self, owner: Mixer) -> None:
        if not isinstance(owner, Latent) or owner.local_indexer != self.indexer:
            raise InputError(
                f"latent index_owner={self.index_owner} names a layer without an indexer alike"
            )

    @property
    def query_heads(self) -> int:
        return self.num_heads

    @property
    def rotation(self) -> tuple[Rope, int] | None:
        return None if self.rope is None else (self.rope, self.rope_width)
