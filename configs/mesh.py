"""How one model is spread over chips."""

import dataclasses

from configs.errors import InputError
from configs.model import ModelConfig


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Chips of one replica along each axis.

    Attributes:
        data: groups that hold the same weights and different sequences, and step together.
        model: chips that divide heads and feed-forward columns of each layer.
        expert: chips that divide the experts of each mixture.
    """

    data: int = 1
    model: int = 1
    expert: int = 1

    @property
    def num_chips(self) -> int:
        """Chips of one replica."""
        return self.data * self.model * self.expert

    def check(self, config: ModelConfig) -> None:
        """Whether the model can be divided so.

        Raises:
            InputError: an axis is below 1, or does not divide what it would split.
        """
        for axis in ("data", "model", "expert"):
            if getattr(self, axis) < 1:
                raise InputError(f"mesh axis {axis} is at least 1, not {getattr(self, axis)}")
        hidden = [config.ffn_width]
        experts = [layer.experts for layer in config.pattern if layer.experts]
        hidden += [sizes.width for sizes in experts]
        divisors = [n for n in range(1, config.num_heads + 1) if self._splits(config, n, hidden)]
        if self.model not in divisors:
            raise InputError(
                f"mesh model={self.model} does not divide the {config.num_heads} heads, "
                f"{config.num_kv_heads} key/value heads and feed-forward widths {hidden} of "
                f"{config.name}; valid: {', '.join(map(str, divisors))}"
            )
        if self.expert > 1 and not experts:
            raise InputError(f"mesh expert={self.expert}: {config.name} has no experts to divide")
        for sizes in experts:
            if sizes.num_experts % self.expert:
                raise InputError(
                    f"mesh expert={self.expert} does not divide {sizes.num_experts} experts"
                )

    @staticmethod
    def _splits(config: ModelConfig, chips: int, hidden: list[int]) -> bool:
        """Key/value heads are divided, or, where chips outnumber them, copied evenly."""
        kv_heads = config.num_kv_heads
        return (
            config.num_heads % chips == 0
            and (kv_heads % chips == 0 or chips % kv_heads == 0)
            and all(width % chips == 0 for width in hidden)
        )


ONE_CHIP = Mesh()


def parse(text: str) -> Mesh:
    """The mesh that 'data=2,model=4' names.

    Raises:
        InputError: another form, an unknown axis, or a size that is no whole number.
    """
    sizes: dict[str, int] = {}
    names = [field.name for field in dataclasses.fields(Mesh)]
    for part in filter(None, text.split(",")):
        axis, _, size = part.partition("=")
        if axis not in names or axis in sizes or not size.isascii() or not size.isdigit():
            raise InputError(
                f"a mesh is like data=2,model=4 with the axes {', '.join(names)}, not {text!r}"
            )
        sizes[axis] = int(size)
    return Mesh(**sizes)
