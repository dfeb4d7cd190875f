"""Several residual streams, which mix in front of and behind each part of a layer."""

import dataclasses

from configs.kinds import operations
from configs.kinds.kind import check_sizes
from configs.kinds.operations import TOKENS, Move, Operation
from configs.kinds.params import Declared, ParamInfo, Widths

MOST_STREAMS = 64


@dataclasses.dataclass(frozen=True)
class HyperConnections:
    """Hyper-connections (Zhu et al. 2024, arXiv 2409.19606), constrained to a manifold (mHC; Xie et
    al. 2025, arXiv 2512.24880; DeepSeek-V4): M residual streams a token. A mixer or feed-forward
    reads a weighted sum of them, and its output is added to each by a weight, behind a product of
    the streams with a matrix whose rows and columns sum to 1. All weights are the token's, from the
    streams themselves. A weighted sum of the last streams goes on to the model's last norm.

    Attributes:
        num_streams: M.
        iterations: of Sinkhorn and Knopp's (1967), which make rows and columns sum to 1.
        eps: added to what is divided by, and to the weights of the sum that is read.
    """

    num_streams: int
    iterations: int = 20
    eps: float = 1e-6

    name = "hyper_connections"

    def __post_init__(self) -> None:
        check_sizes(self, "num_streams", most=MOST_STREAMS)
        check_sizes(self, "iterations", most=1000)

    def parameters(self, model: Widths) -> Declared:
        """What a mixer or a feed-forward has: the matrix of all weights [(2 + M) M, M D], those of
        reading, adding and mixing in this order; a bias of each; three factors. All are float32.
        """
        M = self.num_streams
        return _weights((2 + M) * M, M * model.width, 3)

    def last(self, model: Widths) -> Declared:
        """What the sum of the last streams has: as `parameters`, of the weights that are read."""
        return _weights(self.num_streams, self.num_streams * model.width, 1)

    def operations(self, model: Widths) -> tuple[Operation, ...]:
        """Around a mixer or a feed-forward: the product, then the sum that is read, and the streams
        that are mixed and added to.
        """
        M, D = self.num_streams, model.width
        return _operations(
            "hyper", model, self.parameters(model), 2 * (2 * M + M * M) * D, (3 * M + 2) * D
        )

    def last_operations(self, model: Widths) -> tuple[Operation, ...]:
        """Behind the last layer."""
        M, D = self.num_streams, model.width
        return _operations("last_hyper", model, self.last(model), 2 * M * D, (M + 1) * D)


def _weights(rows: int, width: int, num_factors: int) -> Declared:
    return {
        "weights": ParamInfo((rows, width), "float32", (None, None)),
        "biases": ParamInfo((rows,), "float32", (None,), "zeros"),
        "factors": ParamInfo((num_factors,), "float32", (None,), "ones"),
    }


def _operations(
    part: str, model: Widths, declared: Declared, flops: int, moved: int
) -> tuple[Operation, ...]:
    mix = Operation(
        f"{part}.mix", "other", flops=((flops, TOKENS),),
        moves=(Move("activations", ((moved, TOKENS),), model.width, "float32"),), is_split=False,
    )  # fmt: skip
    return (*operations.products(part, model, declared), mix)
