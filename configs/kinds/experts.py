"""Mixtures of experts: a router, gated feed-forwards of which each token visits a few, and one that
all tokens visit.
"""

import dataclasses
import math

from configs.errors import InputError, check_positive
from configs.kinds import operations, params
from configs.kinds.feed_forward import ACTIVATIONS, PLAIN_ACTIVATIONS, up_and_down
from configs.kinds.kind import MOST_MATRICES, FeedForward, check_choice, check_sizes, equal_shares
from configs.kinds.operations import Move, Operation
from configs.kinds.params import Declaration, Declared, ParamInfo, Widths


@dataclasses.dataclass(frozen=True)
class Router:
    """How a token's experts are chosen, and what each of them counts. In float32.

    Attributes:
        scores: of the router's logits (`scoring_func`): 'softmax' over all experts (Shazeer et al.
            2017, arXiv 1701.06538), 'sigmoid' of each (DeepSeek-AI 2024, arXiv 2412.19437), or
            'sqrt_softplus' of each (DeepSeek-V4).
        is_normalized: whether the chosen experts' scores are divided by their sum
            (`norm_topk_prob`).
        scale: factor on them (`routed_scaling_factor`).
        has_bias: whether the logits have a bias.
        has_offsets: whether a learned offset of each expert takes part in the choice, not in the
            scores (Wang et al. 2024, arXiv 2408.15664; `e_score_correction_bias`).
        num_groups, top_groups: experts lie in so many groups, and those of the best few are
            eligible (DeepSeek-AI 2024, arXiv 2405.04434; `n_group`, `topk_group`). Where that
            leaves fewer than a token visits, the others count 0.
        group_best: a group is as good as the sum of so many of its best experts.
        has_norm: whether it reads tokens after an RMS norm of its own, times D ** -0.5 (Gemma 4).
        has_factors: whether a learned factor of each expert multiplies what it counts (Gemma 4).
        table_rows: ids of tokens, for each of which a table has the experts (hash layers: Roller et
            al. 2021, arXiv 2106.04426; DeepSeek-V4): scores only weigh them. 0: scores choose.
        jitter: experts are chosen one by one; each counts its softmax among those that are left and
            are no more than this share of a logit below it (SparseMixer-v2: Liu et al. 2024, arXiv
            2409.12136, where it is twice the noise of training). None: one softmax of all.
    """

    scores: str = "softmax"
    is_normalized: bool = True
    scale: float = 1.0
    has_bias: bool = False
    has_offsets: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    has_norm: bool = False
    has_factors: bool = False
    table_rows: int = 0
    jitter: float | None = None

    name = "router"

    def __post_init__(self) -> None:
        check_choice(self, "scores", ("softmax", "sigmoid", "sqrt_softplus"))
        if self.table_rows:
            check_sizes(self, "table_rows")
            if self.has_offsets or self.num_groups > 1:
                raise InputError("router table_rows goes without offsets and groups: ids choose")
        check_sizes(self, "num_groups", "top_groups", "group_best")
        check_positive(self, "router ", "scale", "jitter")
        if self.jitter is not None and (
            dataclasses.replace(self, jitter=None) != Router(is_normalized=False)
        ):
            raise InputError("router jitter goes with softmax scores alone, not normalized")
        if self.top_groups > self.num_groups:
            raise InputError(
                f"router top_groups is at most num_groups={self.num_groups}, not {self.top_groups}"
            )

    def check(self, num_experts: int, top_k: int) -> None:
        """Whether it chooses so many of so many experts.

        Raises:
            InputError: groups do not divide the experts, or have too few of them.
        """
        if top_k > num_experts:
            raise InputError(f"experts top_k is at most num_experts={num_experts}, not {top_k}")
        if num_experts % self.num_groups:
            raise InputError(
                f"router num_groups={self.num_groups} does not divide num_experts={num_experts}"
            )
        group_size = num_experts // self.num_groups
        if self.group_best > group_size:
            raise InputError(
                f"router group_best={self.group_best} exceeds the {group_size} experts of a group"
            )
        if top_k > self.top_groups * group_size and self.has_offsets:
            raise InputError(
                f"experts top_k={top_k} exceeds the {self.top_groups * group_size} experts of "
                f"top_groups={self.top_groups}: which others are chosen is undefined, because "
                "offsets rank none of them, and their scores count"
            )


@dataclasses.dataclass(frozen=True)
class Experts(FeedForward, name="experts"):
    """A mixture of gated feed-forwards (Shazeer et al. 2017, arXiv 1701.06538).

    Attributes:
        num_experts, top_k: E, and how many of them a token visits.
        width: F of one expert.
        router: how they are chosen.
        shared_width: F of the feed-forward that every token visits beside them; 0: there is none.
        shared_bias: whether that one's products, and those with the latent, add a bias.
        has_shared_gate: whether its result is weighed by a sigmoid of the token.
        is_gated: whether each of them is gated; else it is as `Plain`.
        latent_width: elements that a token is projected to before it visits experts, whose sum is
            projected back; 0: it is not (Nemotron 3, NVIDIA 2025).
        activation: of the gate: 'silu', 'gelu_tanh' or 'quick_gelu' (x sigmoid(1.702 x)); of what
            is not gated one of `PLAIN_ACTIVATIONS`.
        has_bias: whether the experts' products add one.
        limit: the gate is at most this, and what it meets within it, before the activation, of the
            shared one too; None: no limit (gpt-oss, arXiv 2508.10925, which adds `up_offset` to
            what the gate meets).
        up_offset: see `limit`.
        late_limits: as `limit`, of the experts and of the shared one, but the gate is at most this
            behind the activation (Step 3.5).
        has_norms: whether the experts and the feed-forward beside them each stand between norms of
            their own, and all of them and the router read the residual stream (Gemma 4).
        weighs_inputs: whether an expert reads a token times what the expert counts, and results are
            added as they are (Llama 4, Meta 2025).
        has_post_norm: whether the sum of experts and the one beside them is normed (A.X-K1).
        held: experts whose weights a chip along `expert` holds; None: all.
    """

    divided = ("width", "shared_width")

    num_experts: int
    top_k: int
    width: int
    router: Router = Router()
    shared_width: int = 0
    has_shared_gate: bool = False
    activation: str = "silu"
    has_bias: bool = False
    limit: float | None = None
    up_offset: float = 0.0
    has_norms: bool = False
    held: int | None = None
    is_gated: bool = True
    latent_width: int = 0
    shared_bias: bool = False
    weighs_inputs: bool = False
    late_limits: tuple[float | None, float | None] = (None, None)
    has_post_norm: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, "num_experts", most=MOST_MATRICES)
        check_sizes(self, "top_k", "width")
        if self.shared_width:
            check_sizes(self, "shared_width")
        if self.latent_width:
            check_sizes(self, "latent_width")
        of_gates = (*ACTIVATIONS, "quick_gelu")
        check_choice(self, "activation", of_gates if self.is_gated else PLAIN_ACTIVATIONS)
        of_gates_alone = self.has_bias or self.has_norms or self.limit or self.up_offset
        if not self.is_gated and (of_gates_alone or any(self.late_limits)):
            raise InputError(
                "experts has_bias, has_norms, limits and up_offset go with is_gated=True"
            )
        if any(self.late_limits) and (self.limit or self.up_offset):
            raise InputError("experts late_limits go with no limit and no up_offset")
        if not all(limit is None or 0 < limit < math.inf for limit in self.late_limits):
            raise InputError(
                f"experts late_limits are finite numbers above 0 or None, not {self.late_limits}"
            )
        if self.latent_width and self.has_norms:
            raise InputError("experts has_norms goes with no latent_width")
        if self.shared_bias and not (self.shared_width or self.latent_width):
            raise InputError("experts shared_bias goes with a shared_width or a latent_width")
        check_positive(self, "experts ", "limit")
        if self.has_shared_gate and not self.shared_width:
            raise InputError("experts has_shared_gate goes with a shared_width")
        if self.has_norms and not self.shared_width:
            raise InputError("experts has_norms goes with a shared_width")
        self.router.check(self.num_experts, self.top_k)

    def parameters(self, model: Widths) -> Declared:
        """The router [E, D] and, where ids of tokens choose, its table of experts' numbers
        [V, top_k]; the experts [E, 2F, D] and [E, D, F], gates before what they meet; the shared
        feed-forward with its gate [1, D]. Plain ones have [E, F, D]. D is there and back the
        latent's, if there is one. What routes is float32.
        """
        E, D, F, dtype = self.num_held, model.width, self.width, model.dtype
        X, rows = self.met_width(model), (F, F) if self.is_gated else (F,)
        up = "gate_up" if self.is_gated else "up"
        experts = {
            up: ParamInfo((E, sum(rows), X), dtype, ("experts", "ffn", "embed"), stacked=rows * E),
            "down": ParamInfo((E, X, F), dtype, ("experts", "embed", "ffn"), stacked=(X,) * E),
        }
        if self.has_bias:
            experts["gate_up_bias"] = ParamInfo(
                (E, 2, F), dtype, ("experts", None, "ffn"), "zeros", is_bias=True
            )
            experts["down_bias"] = ParamInfo(
                (E, D), dtype, ("experts", "embed"), "zeros", is_bias=True
            )
        declared: dict[str, Declaration] = {
            "router": ParamInfo((self.num_experts, D), "float32", (None, "embed")),
            "experts": experts,
        }
        if self.router.has_bias:
            declared["router_bias"] = ParamInfo((self.num_experts,), "float32", (None,), "zeros")
        if self.router.has_offsets:
            declared["router_offsets"] = ParamInfo((self.num_experts,), "float32", (None,), "zeros")
        if self.router.table_rows:
            declared["router_table"] = ParamInfo(
                (self.router.table_rows, self.top_k), "float32", (None, None), "columns",
                is_table=True,
            )  # fmt: skip
        if self.router.has_norm:
            declared["router_norm"] = ParamInfo((D,), "float32", ("embed",), "ones")
        if self.router.has_factors:
            declared["router_factors"] = ParamInfo((self.num_experts,), "float32", (None,), "ones")
        if self.has_norms:
            for name in ("experts_norm", "experts_post_norm", "shared_norm", "shared_post_norm"):
                declared[name] = params.norm(model, D, "embed")
        if self.has_post_norm:
            declared["post_norm"] = params.norm(model, D, "embed")
        if self.shared_width:
            widths = (self.shared_width,) * len(rows)
            declared["shared"] = up_and_down(model, up, widths, self.shared_bias, "shared")
        if self.latent_width:
            declared["latent_down"] = ParamInfo((X, D), dtype, (None, "embed"))
            declared["latent_up"] = ParamInfo((D, X), dtype, ("embed", None))
            if self.shared_bias:
                declared["latent_down_bias"] = ParamInfo((X,), dtype, (None,), "zeros")
                declared["latent_up_bias"] = ParamInfo((D,), dtype, ("embed",), "zeros")
        if self.has_shared_gate:
            declared["shared_gate"] = ParamInfo((1, D), "float32", (None, "embed"))
        return declared

    def met_width(self, model: Widths) -> int:
        return self.latent_width or model.width

    @property
    def num_held(self) -> int:
        """Experts whose weights are here."""
        return self.num_experts if self.held is None else self.held

    def can_divide(self, chips: int) -> bool:
        return chips <= self.width and chips <= (self.shared_width or chips)

    def per_expert_chip(self, chips: int) -> "Experts":
        return dataclasses.replace(self, held=self.num_experts // chips)

    def shares(self, axis: str, chips: int) -> tuple[range, ...]:
        """See `Kind`; 'shared' are the columns of the shared feed-forward."""
        return equal_shares(self.shared_width if axis == "shared" else self.width, chips)

    def operations(self, model: Widths) -> tuple[Operation, ...]:
        """The products of each token with the experts that it visits."""
        products = operations.products("experts", model, self.parameters(model), self.top_k)
        if not self.router.table_rows:
            return products
        rows = Move("weights", ((self.top_k, operations.TOKENS),), self.top_k, "float32")
        return (*products, Operation("experts.table", "other", moves=(rows,), is_split=False))

    @property
    def reads_tokens(self) -> bool:
        return self.router.table_rows > 0

    @property
    def norms_input(self) -> bool:
        return self.has_norms

    @property
    def reads_float32(self) -> bool:
        """See `Kind`: what routes is float32."""
        return True

    @property
    def num_sums(self) -> int:
        """See `FeedForward`: norms of their own keep two sums apart."""
        return 2 if self.has_norms else 1

    @property
    def experts(self) -> tuple[int, int] | None:
        return self.num_experts, self.top_k


# Rows of a block: with fewer, XLA's products on a CPU are slow or sum in another order; with more,
# experts that few rows are routed to are mostly padding.
_LEAST_ROWS, _STEADY_ROWS, _MOST_ROWS = 2, 16, 64


def blocks(num_rows: int, num_groups: int, deterministic: bool = False) -> tuple[int, int]:
    """The most blocks that so many rows in so many groups make, and the rows of one: as many as a
    group has on average, a power of two.
    """
    mean = -(-num_rows // num_groups)
    rows = min(max(_LEAST_ROWS, 1 << (mean - 1).bit_length()), _MOST_ROWS)
    rows = _STEADY_ROWS if deterministic else rows
    return num_rows // rows + min(num_groups, num_rows), rows
