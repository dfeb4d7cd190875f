"""Feed-forwards that every token visits: gated and plain ones."""

import dataclasses
from typing import ClassVar

from configs.errors import check_positive
from configs.kinds import operations
from configs.kinds.kind import FeedForward, check_choice, check_sizes
from configs.kinds.operations import Operation
from configs.kinds.params import Declared, ParamInfo, Widths

ACTIVATIONS = ("silu", "gelu_tanh")  # of gates
PLAIN_ACTIVATIONS = (*ACTIVATIONS, "gelu", "relu2")


@dataclasses.dataclass(frozen=True)
class _OneHidden(FeedForward):
    """One hidden vector a token.

    Attributes:
        width: F.
        activation: one of `activations`.
        has_bias: whether its products add one.
    """

    divided = ("width",)
    activations: ClassVar[tuple[str, ...]] = ACTIVATIONS

    width: int
    activation: str = "silu"
    has_bias: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, "width")
        check_choice(self, "activation", self.activations)

    def can_divide(self, chips: int) -> bool:
        return chips <= self.width

    def operations(self, model: Widths) -> tuple[Operation, ...]:
        return operations.products("ffn", model, self.parameters(model))


@dataclasses.dataclass(frozen=True)
class Gated(_OneHidden, name="gated"):
    """GLU (Shazeer 2020, arXiv 2002.05202): down(act(gate x) * up x).

    Attributes:
        gate_scale, down_scale: factors on gate x and on what leaves (Falcon-H1).
    """

    gate_scale: float = 1.0
    down_scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "gated ", "gate_scale", "down_scale")

    def parameters(self, model: Widths) -> Declared:
        """Gate and up projections fused in one matrix [2F, D], and the way down [D, F]."""
        return up_and_down(model, "gate_up", (self.width, self.width), self.has_bias)


@dataclasses.dataclass(frozen=True)
class Plain(_OneHidden, name="plain"):
    """The first transformers' (Vaswani et al. 2017, arXiv 1706.03762): down(act(up x)); with
    'gelu', by the error function (Hendrycks & Gimpel 2016, arXiv 1606.08415), with 'relu2', relu(x)
    squared (So et al. 2021, arXiv 2109.08668), with 'xielu', a curve that each layer learns (Huang
    & Schlag 2024, arXiv 2411.13010).
    """

    activations = (*PLAIN_ACTIVATIONS, "xielu")

    def parameters(self, model: Widths) -> Declared:
        """A projection up [F, D], the way down [D, F], and the constants of 'xielu' [4]:
        alpha_p and alpha_n before their softplus, beta, epsilon.
        """
        declared = up_and_down(model, "up", (self.width,), self.has_bias)
        if self.activation == "xielu":
            declared["curve"] = ParamInfo((4,), "float32", (None,), "zeros", (1,) * 4)
        return declared


def up_and_down(
    model: Widths, up: str, stacked: tuple[int, ...], has_bias: bool, axis: str = "ffn"
) -> dict[str, ParamInfo]:
    """Projections up, stacked, and the way down, with their biases where there are any."""
    rows = sum(stacked)
    declared = {
        up: ParamInfo((rows, model.width), model.dtype, (axis, "embed"), stacked=stacked),
        "down": ParamInfo((model.width, stacked[0]), model.dtype, ("embed", axis)),
    }
    if has_bias:
        declared |= {
            f"{up}_bias": ParamInfo((rows,), model.dtype, (axis,), "zeros", stacked),
            "down_bias": ParamInfo((model.width,), model.dtype, ("embed",), "zeros"),
        }
    return declared
