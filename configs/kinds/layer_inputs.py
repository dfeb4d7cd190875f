"""What each layer is told of a token beside the residual stream."""

import dataclasses

from configs.kinds import operations, params
from configs.kinds.feed_forward import ACTIVATIONS
from configs.kinds.kind import check_choice, check_sizes
from configs.kinds.operations import Operation
from configs.kinds.params import Declared, ParamInfo, Widths


@dataclasses.dataclass(frozen=True)
class LayerInputs:
    """Per-layer embeddings (Gemma 3n and 4; Google DeepMind 2025): a token has P elements for each
    layer, from a row of a table and from its embedding. Behind its feed-forward each layer adds
    norm(out(act(gate x) * its elements)).

    Attributes:
        width: P.
        activation: of the gate, one of `ACTIVATIONS`.
    """

    width: int
    activation: str = "gelu_tanh"

    name = "layer_inputs"

    def __post_init__(self) -> None:
        check_sizes(self, "width")
        check_choice(self, "activation", ACTIVATIONS)

    def of_tokens(self, model: Widths, vocab_size: int, num_layers: int) -> Declared:
        """What makes the elements of all L layers: the table [V, L P], of which rows are looked up,
        the projection of the embedding [L P, D], and the norm of a layer's part of it [P].
        """
        rows = num_layers * self.width
        table = ParamInfo((vocab_size, rows), model.dtype, ("vocab", None), is_table=True)
        return {
            "table": table,
            "projection": ParamInfo((rows, model.width), model.dtype, (None, "embed")),
            "projection_norm": params.norm(model, self.width, None),
        }

    def parameters(self, model: Widths) -> Declared:
        """What a layer has: the gate [P, D], the way out [D, P] and its norm."""
        return {
            "gate": ParamInfo((self.width, model.width), model.dtype, (None, "embed")),
            "out": ParamInfo((model.width, self.width), model.dtype, ("embed", None)),
            "norm": params.norm(model, model.width, "embed"),
        }

    def operations(self, model: Widths) -> tuple[Operation, ...]:
        return operations.products("inputs", model, self.parameters(model))

    def projection(self, model: Widths, num_layers: int) -> tuple[Operation, ...]:
        """The product that all layers share."""
        declared = self.of_tokens(model, 1, num_layers)
        return operations.products("inputs", model, {"projection": declared["projection"]})
