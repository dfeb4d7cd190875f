"""Feed-forwards: gated, plain, and mixtures of gated experts."""

import dataclasses
from typing import Any, Self

from configs.errors import InputError
from configs.kinds import operations
from configs.kinds.kind import FeedForward, check_choice, check_sizes, equal_shares
from configs.kinds.operations import Operation
from configs.kinds.params import Declared, ParamInfo, Widths

_ACTIVATIONS = ("silu", "gelu_tanh")


@dataclasses.dataclass(frozen=True)
class _OneHidden(FeedForward):
    """One hidden vector a token.

    Attributes:
        width: F.
        activation: 'silu' or 'gelu_tanh'.
        has_bias: whether its products add one.
    """

    divided = ("width",)

    width: int
    activation: str = "silu"
    has_bias: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, "width")
        check_choice(self, "activation", _ACTIVATIONS)

    def can_divide(self, chips: int) -> bool:
        """See `Kind`."""
        return chips <= self.width

    def per_chip(self, chips: int) -> Self:
        """See `Kind`."""
        return dataclasses.replace(self, width=-(-self.width // chips))

    def shares(self, axis: str, chips: int) -> tuple[range, ...]:
        """See `Kind`."""
        return equal_shares(self.width, chips)

    def operations(self, model: Widths) -> tuple[Operation, ...]:
        """See `FeedForward`."""
        return operations.products("ffn", model, self.parameters(model))


@dataclasses.dataclass(frozen=True)
class Gated(_OneHidden, name="gated"):
    """GLU (Shazeer 2020, arXiv 2002.05202): down(act(gate x) * up x)."""

    def parameters(self, model: Widths) -> Declared:
        """Gate and up projections fused in one matrix [2F, D], and the way down [D, F]."""
        return _up_and_down(model, "gate_up", (self.width, self.width), self.has_bias)


@dataclasses.dataclass(frozen=True)
class Plain(_OneHidden, name="plain"):
    """The first transformers' (Vaswani et al. 2017, arXiv 1706.03762): down(act(up x))."""

    def parameters(self, model: Widths) -> Declared:
        """A projection up [F, D], and the way down [D, F]."""
        return _up_and_down(model, "up", (self.width,), self.has_bias)


@dataclasses.dataclass(frozen=True)
class Experts(FeedForward, name="experts"):
    """A mixture of gated feed-forwards (Shazeer et al. 2017, arXiv 1701.06538).

    Attributes:
        num_experts, top_k: E, and how many of them a token visits.
        width: F of one expert.
        num_shared: experts that every token visits beside them.
        activation: 'silu' or 'gelu_tanh'.
    """

    divided = ("width",)

    num_experts: int
    top_k: int
    width: int
    num_shared: int = 0
    activation: str = "silu"

    def __post_init__(self) -> None:
        check_sizes(self, "num_experts", "top_k", "width")
        check_choice(self, "activation", _ACTIVATIONS)
        if self.num_shared < 0:
            raise InputError(f"experts num_shared is at least 0, not {self.num_shared}")
        if self.top_k > self.num_experts:
            raise InputError(
                f"experts top_k is at most num_experts={self.num_experts}, not {self.top_k}"
            )

    def parameters(self, model: Widths) -> Declared:
        """The router [E, D], the experts [E, 2F, D] and [E, D, F], and the shared ones as one
        gated feed-forward.
        """
        E, D, F, dtype = self.num_experts, model.width, self.width, model.dtype
        declared: dict[str, Any] = {
            "router": ParamInfo((E, D), dtype, (None, "embed")),
            "gate_up": ParamInfo((E, 2 * F, D), dtype, ("experts", "ffn", "embed")),
            "down": ParamInfo((E, D, F), dtype, ("experts", "embed", "ffn")),
        }
        if self.num_shared:
            declared["shared"] = _up_and_down(model, "gate_up", (self.num_shared * F,) * 2, False)
        return declared

    def operations(self, model: Widths) -> tuple[Operation, ...]:
        """The products of each token with the experts that it visits."""
        return operations.products("experts", model, self.parameters(model), self.top_k)

    @property
    def experts(self) -> tuple[int, int] | None:
        """See `Kind`."""
        return self.num_experts, self.top_k


def _up_and_down(
    model: Widths, up: str, stacked: tuple[int, ...], has_bias: bool
) -> dict[str, ParamInfo]:
    rows = sum(stacked)
    declared = {
        up: ParamInfo((rows, model.width), model.dtype, ("ffn", "embed"), stacked=stacked),
        "down": ParamInfo((model.width, stacked[0]), model.dtype, ("embed", "ffn")),
    }
    if has_bias:
        declared |= {
            f"{up}_bias": ParamInfo((rows,), model.dtype, ("ffn",), "zeros", stacked),
            "down_bias": ParamInfo((model.width,), model.dtype, ("embed",), "zeros"),
        }
    return declared
