"""How numbers are stored: bits of an element and of the scale that a group of elements shares.

Weights of eight bits meet activations that are rounded to eight bits, a scale a token (W8A8), so
their products run at the chip's int8 or fp8 rate where it has one. Four-bit weights are expanded to
bfloat16 for their products (W4A16). A cache is expanded for attention whatever its format.
"""

import dataclasses

from configs.errors import InputError


@dataclasses.dataclass(frozen=True)
class Format:
    """A number format.

    Attributes:
        bits: of an element.
        group: elements along a row that share a scale; None: the whole row does.
        scale_bits: of a scale; 0: there is none.
        compute: type the products run in, a key of `HardwareSpec.rates`.
    """

    name: str
    bits: int
    group: int | None = None
    scale_bits: int = 0
    compute: str = "bfloat16"

    def bytes_for(self, elements: float, row: int) -> float:
        """Bytes of `elements`, scales included, that lie in rows of `row` elements."""
        group = min(row, self.group or row)
        return elements * (self.bits + self.scale_bits / group) / 8


FORMATS = {
    format.name: format
    for format in (
        Format("float32", 32, compute="float32"),
        Format("bfloat16", 16),
        Format("fp8", 8, scale_bits=32, compute="fp8"),
        Format("int8", 8, scale_bits=32, compute="int8"),
        Format("int4", 4, group=128, scale_bits=16),
    )
}


def get(name: str) -> Format:
    """The format of that name.

    Raises:
        InputError: no such format.
    """
    if name not in FORMATS:
        raise InputError(f"no number format {name!r}; valid: {', '.join(FORMATS)}")
    return FORMATS[name]
