"""What low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) add to a step: two narrow
products for each matrix that they change, with factors of the model's type that are read once for
each adapter of the step.
"""

from configs import adapters
from configs.model import ModelConfig
from configs.precision import FORMATS
from configs.settings.adapters import AdapterConfig
from inference.planner.cost import Operation, Precision


def operations(
    chip_model: ModelConfig,
    room: AdapterConfig,
    num_tokens: int,
    num_adapters: int,
    precision: Precision,
) -> tuple[Operation, ...]:
    """The products of a step's tokens with their adapters, on one chip; none without adapters.

    Args:
        chip_model: the model as the chip computes it (`Config.chip_model`).
        room: of a slot, all of which is read and multiplied, whatever the rank of its adapter.
        num_tokens: those that have an adapter.
        num_adapters: different ones that these have.
    """
    num_adapters = min(num_adapters, num_tokens)
    if not num_adapters:
        return ()
    elements = adapters.num_elements(chip_model, room)
    slot_bytes = FORMATS[chip_model.dtype].bytes_for(elements, 1)
    widths = sum(sum(info.shape) for info in adapters.adaptable(chip_model, room.extras).values())
    product = Operation(
        "adapters",
        chip_model.num_layers,
        flops=2 * num_tokens * elements,
        weight_bytes=num_adapters * slot_bytes,
        activation_bytes=precision.rest.bytes_for(num_tokens * widths, 1),
        rows=num_tokens / num_adapters,
    )
    return (product,)
