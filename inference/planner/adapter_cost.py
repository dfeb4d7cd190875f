"""What low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) add to a step: two narrow
products for each matrix that they change, with factors of the model's type that are read once for
each adapter of the step.
"""

from configs import adapters
from configs.model import ModelConfig
from inference.planner.cost import Operation, Precision


def operations(
    chip_model: ModelConfig, rank: int, num_tokens: int, num_adapters: int, precision: Precision
) -> tuple[Operation, ...]:
    """The products of a step's tokens with A, then with B, on one chip; none without adapters.

    Args:
        chip_model: the model as the chip computes it (`Config.chip_model`).
        rank: of a slot, whatever the ranks of the adapters in it.
        num_tokens: those that have an adapter.
        num_adapters: different ones that these have.
    """
    num_adapters = min(num_adapters, num_tokens)
    if not num_adapters:
        return ()
    infos = adapters.adaptable(chip_model).values()
    ranks = [adapters.num_modules(info) * rank for info in infos]
    inputs, outputs = ([info.shape[side] for info in infos] for side in (1, 0))

    def product(name: str, widths: list[int]) -> Operation:
        elements = sum(n * width for n, width in zip(ranks, widths, strict=True))
        return Operation(
            f"adapters.{name}",
            chip_model.num_layers,
            flops=2.0 * num_tokens * elements,
            weight_bytes=precision.rest.bytes_for(num_adapters * elements, 1),
            activation_bytes=precision.rest.bytes_for(num_tokens * (sum(ranks) + sum(widths)), 1),
            rows=num_tokens / num_adapters,
        )

    return product("down", inputs), product("up", outputs)
