"""Softmax attention over keys and values of heads."""

import dataclasses
import functools
from collections.abc import Sequence

from configs.cache import CacheSpec, keys_values, shared
from configs.errors import InputError, check_positive
from configs.kinds import operations, params
from configs.kinds.kind import (
    Mixer,
    check_biases,
    check_choice,
    check_multiple,
    check_rotated,
    check_sizes,
    grouped_shares,
)
from configs.kinds.operations import Amount, Move, Operation
from configs.kinds.params import Declaration, Declared, ParamInfo, Widths
from configs.kinds.rope import Rope
from configs.kinds.temperature import Temperature


@dataclasses.dataclass(frozen=True)
class Attention(Mixer, name="attention"):
    """MHA, GQA and MQA (Vaswani et al. 2017, arXiv 1706.03762; Ainslie et al. 2023, arXiv
    2305.13245; Shazeer 2019, arXiv 1911.02150), within a window or over all tokens.

    Attributes:
        num_heads, num_kv_heads, head_width: N, K and H of the axis key.
        rope: rotary positions of queries and keys; None: they do not rotate.
        window: tokens that a query sees, itself included; None sees all.
        qk_norm: RMS norm before RoPE of each query and key head ('head'), without a weight
            ('plain': each is divided by its root mean square, which no rotation changes; Llama 4),
            or of all queries and all keys of a token at once ('all'), or a layer norm without a
            bias of each head by weights that no other head has ('each'; Command R+, StableLM 2
            12B); None: there is none.
        rotates_first: whether queries and keys rotate before their norm instead (Hunyuan).
        has_value_norm: whether each value head is divided by its root mean square (Gemma 4).
        has_values: whether values have a projection of their own; else they are the keys before
            their norm and RoPE (Gemma 4).
        biases: which products add one: 'qkv', 'out'.
        scale: factor on q.k; None means head_width ** -0.5.
        key_scale: factor on keys, before they rotate (Falcon-H1).
        score_cap: soft limit c tanh(x / c) of the scores.
        temperature: of queries by their position; None: they do not grow.
        input_limit: queries and keys after their norm, and values, are clipped to +-this; None:
            they are not (OLMoE's `clip_qkv`).
        token_budget: tokens that a query reads of each KV head, in whole pages: those whose keys'
            extremes allow the largest scores, the first page and its own among them (Quest, Tang et
            al. 2024, arXiv 2406.10774); None reads all that it sees. Decoding and prefill read
            alike, so that a token does not depend on which of them computed it.
        has_sinks: whether each query head has a learned logit that takes a share of the softmax and
            adds no value (gpt-oss, arXiv 2508.10925).
        has_output_gate: whether what a head returns is multiplied with the sigmoid of a gate, which
            the queries' projection makes behind the head's query (Qiu et al. 2025, arXiv
            2505.06708).
        head_gate: 'sigmoid' or 'softplus' of what a projection of the token makes for each head,
            which what the head returns is multiplied with (Qiu et al. 2025, arXiv 2505.06708);
            None: there is none. A matrix of its own: `has_output_gate` has rows of the queries'.
        gates_elements: whether it is a number for each element in place of one for the head.
        value_width: elements of a value head, where it is narrower than a key head; zeros behind
            them fill the cache (MiMo-V2-Flash, Xiaomi 2026, arXiv 2601.02780). None: `head_width`.
        value_scale: factor on values, before they are cached (MiMo-V2-Flash).
        owner: the earlier layer whose keys and values are read (cross-layer attention, Brandon et
            al. 2024, arXiv 2405.12981), window included; None: the layer has its own.
        chunked, first_tokens: see `CacheSpec`. Keys keep the position that they have in the
            sequence. StreamingLLM counts positions within the cache instead and rotates keys as
            they are read, so that no distance exceeds what a model was trained for however long a
            stream runs. Here no sequence exceeds `max_context`, so no distance does either, and a
            key that is rotated once, for its own position, is the same for every reader: so pages
            are shared between prompts, and tokens do not depend on what was freed meanwhile.
    """

    divided = ("num_heads",)
    cached_heads = "num_kv_heads"

    num_heads: int
    num_kv_heads: int
    head_width: int
    rope: Rope | None = Rope()
    window: int | None = None
    qk_norm: str | None = None
    biases: tuple[str, ...] = ()
    scale: float | None = None
    key_scale: float = 1.0
    score_cap: float | None = None
    owner: int | None = None
    has_sinks: bool = False
    has_value_norm: bool = False
    has_values: bool = True
    chunked: bool = False
    first_tokens: int = 0
    token_budget: int | None = None
    has_output_gate: bool = False
    input_limit: float | None = None
    rotates_first: bool = False
    head_gate: str | None = None
    gates_elements: bool = False
    value_width: int | None = None
    value_scale: float = 1.0
    temperature: Temperature | None = None

    def __post_init__(self) -> None:
        check_sizes(self, "num_heads", "num_kv_heads", "head_width", "token_budget", "value_width")
        if self.token_budget is not None and (self.window is not None or self.owner is not None):
            raise InputError(
                f"attention token_budget={self.token_budget} chooses among all tokens of a layer's "
                "own cache: leave window and owner out"
            )
        check_choice(self, "qk_norm", (None, "head", "all", "plain", "each"))
        if self.rotates_first and (self.qk_norm is None or self.rope is None):
            raise InputError("attention rotates_first goes with a qk_norm and a rope")
        check_choice(self, "head_gate", (None, "sigmoid", "softplus"))
        if self.gates_elements and self.head_gate is None:
            raise InputError("attention gates_elements goes with a head_gate")
        if self.value_width is not None and not (
            self.value_width < self.head_width and self.has_values and self.owner is None
        ):
            raise InputError(
                f"attention value_width={self.value_width}: must be below head_width="
                f"{self.head_width}, of a layer with values and no owner"
            )
        check_multiple(self, "num_heads", "num_kv_heads")
        check_biases(self, self.biases, "qkv", "out")
        check_positive(self, "attention ", "score_cap", "input_limit", "key_scale", "value_scale")
        if self.value_scale != 1 and self.owner is not None:
            raise InputError(
                "attention value_scale: leave it out with owner, whose values are read"
            )
        if self.value_width is not None and self.has_output_gate:
            raise InputError("attention value_width goes without has_output_gate")
        if self.rope is not None:
            self.rope.rotating(self.head_width)

    def parameters(self, model: Widths) -> Declared:
        """Fused projections [(N + 2K) H, D] in the order q, k, v, without v [(N + K) H, D] where
        values are keys, or only q [N H, D] where an earlier layer's keys and values are read; the
        way out [D, N H]. With an output gate q is 2 N H rows, of each head its query and its gate;
        gates of heads are [N, D], or [N H, D] of their elements. Narrower values have V elements in
        place of H.
        """
        N, K, H, D = self.num_heads, self.num_kv_heads, self.head_width, model.width
        V = self.value_width or H
        if self.qk_norm not in (None, "each") and model.norm != "rms":
            raise InputError(f"attention qk_norm={self.qk_norm!r} goes with model.norm='rms'")
        inputs, rows, norms = "q", self.query_rows, {"q_norm": N * H}
        declare = functools.partial(ParamInfo)
        if self.owner is None:
            inputs, kv_rows = ("qkv", (K * H, K * V)) if self.has_values else ("qk", (K * H,))
            rows += sum(kv_rows)
            stacked = (self.query_rows, *kv_rows)
            declare = functools.partial(ParamInfo, stacked=stacked, kv_heads=K)
            norms["k_norm"] = K * H
        declared: dict[str, Declaration] = {
            inputs: declare((rows, D), model.dtype, ("heads", "embed")),
            "out": ParamInfo((D, N * V), model.dtype, ("embed", "heads")),
        }
        if self.head_gate is not None:
            gates = N * V if self.gates_elements else N
            declared["gate"] = ParamInfo((gates, D), model.dtype, ("heads", "embed"))
        if "qkv" in self.biases:
            declared[f"{inputs}_bias"] = declare((rows,), model.dtype, ("heads",), "zeros")
        if "out" in self.biases:
            declared["out_bias"] = ParamInfo((D,), model.dtype, ("embed",), "zeros")
        if self.has_sinks:
            declared["sinks"] = ParamInfo((N,), "float32", ("heads",), "zeros")
        for name, width in norms.items() if self.qk_norm not in (None, "plain") else ():
            axis = "kv_heads" if name == "k_norm" else "heads"
            if self.qk_norm == "each":
                kv_heads = K if name == "k_norm" else 0
                declared[name] = ParamInfo(
                    (width,), model.dtype, (axis,), "ones", kv_heads=kv_heads
                )
            elif self.qk_norm == "all":
                declared[name] = params.norm(model, width, axis)
            else:
                declared[name] = params.norm(model, H, None)
        return declared

    @property
    def query_rows(self) -> int:
        """Of the projection, those that make queries and their gates."""
        return self.num_heads * self.head_width * (1 + self.has_output_gate)

    def cache(self, model: Widths) -> CacheSpec:
        """Keys and values of each token, or an earlier layer's."""
        if self.owner is not None:
            return shared(self.owner)
        first = 0 if self.window is None else self.first_tokens  # without a window all stay
        spec = keys_values(self.num_kv_heads, self.head_width, self.window, self.chunked, first)
        return dataclasses.replace(spec, has_extremes=self.token_budget is not None)

    @property
    def num_divided_norms(self) -> int:
        return (1 if self.owner is not None else 2) if self.qk_norm == "all" else 0

    def can_divide(self, chips: int) -> bool:
        """See `Kind`; a norm of all heads at once needs equal parts."""
        return super().can_divide(chips) if self.qk_norm == "all" else chips <= self.num_heads

    def per_chip(self, chips: int) -> "Attention":
        """See `Kind`: KV heads with all their queries where there are enough of them, else copies
        of one KV head, whose queries are divided.
        """
        N, K = self.num_heads, self.num_kv_heads
        if chips <= K:
            kv_heads = -(-K // chips)
            return dataclasses.replace(self, num_heads=kv_heads * (N // K), num_kv_heads=kv_heads)
        return dataclasses.replace(self, num_heads=-(-(N // K) // (chips // K)), num_kv_heads=1)

    def shares(self, axis: str, chips: int) -> tuple[range, ...]:
        return grouped_shares(self.num_heads, self.num_kv_heads, axis, chips)

    def check_owner(self, stored: CacheSpec, owner: Mixer) -> None:
        sight = stored.window, stored.chunked, stored.first_tokens
        if stored != keys_values(self.num_kv_heads, self.head_width, *sight):
            raise InputError(
                f"attention with num_kv_heads={self.num_kv_heads} and head_width="
                f"{self.head_width} reads layer {self.owner}'s cache, which holds something else"
            )
        for field in ("window", "chunked", *(("first_tokens",) if stored.window else ())):
            value, other = getattr(self, field), getattr(stored, field)
            if value and value != other:
                raise InputError(
                    f"attention {field}={value} is layer {self.owner}'s to say, whose cache is "
                    f"read: {other}"
                )
        check_rotated(self, owner)

    def operations(self, model: Widths, stored: CacheSpec) -> tuple[Operation, ...]:
        """The products, and scores and weighted sums over the cache."""
        per_token, heads = stored.elements_per_token, self.num_heads * self.head_width
        sight, budget = ("chunk_" * stored.chunked, stored.sliding()), self.token_budget
        name = "attend" if stored.window is None else f"attend.{stored.sight}"
        moved: Amount = ((per_token, (f"{sight[0]}read", sight[1], budget)),)
        if budget is not None:  # a page's extremes are as large as one of its tokens
            name, sight = "attend.chosen", ("", budget)  # as many pairs as in a window
            moved += ((per_token / operations.PAGE_TOKENS, ("read", None, None)),)
        if self.owner is None:
            moved += ((per_token, ("queries",)),)
        attend = Operation(
            name, "attention", flops=((4 * heads, (f"{sight[0]}pairs", sight[1])),),
            moves=(Move("cache", moved, stored.scaled_elements, "cache"),
                   Move("activations", ((2 * heads, operations.TOKENS),), self.head_width,
                        "rest")),
            by_context=True, cache_parts=self.cache_parts,
        )  # fmt: skip
        return (*super().operations(model, stored), attend)

    @property
    def chooses(self) -> bool:
        return self.token_budget is not None

    @property
    def query_heads(self) -> int:
        return self.num_heads

    @property
    def rotation(self) -> tuple[Rope, int] | None:
        return None if self.rope is None else (self.rope, self.head_width)


def sharing(mixers: Sequence[Attention], count: int) -> list[Attention]:
    """Layers of which the last `count` read the cache of the last layer before them that has a
    window as they have, or none as they have none.

    Raises:
        InputError: no layer before them has.
    """
    first = len(mixers) - count
    owners = {mixer.window: layer for layer, mixer in enumerate(mixers[:first])}
    layers = list(mixers[:first])
    for mixer in mixers[first:]:
        if mixer.window not in owners:
            kind = "no window" if mixer.window is None else f"a window of {mixer.window}"
            raise InputError(
                f"the last {count} layers share earlier caches, and no layer before has {kind}"
            )
        # What makes keys and values is the owner's to say.
        layers.append(dataclasses.replace(
            mixer, owner=owners[mixer.window], window=None, has_value_norm=False, has_values=True
        ))  # fmt: skip
    return layers
