"""How numbers are stored: bits of an element and of the scale that a group of elements shares.

Weights of eight bits meet activations that are rounded to eight bits, a scale a token (W8A8), so
their products run at the chip's int8 or fp8 rate where it has one. Four-bit weights are expanded to
bfloat16 for their products (W4A16). A cache is expanded for attention whatever its format.

The blocks of GGUF files (`q8_0` and the others) are what a CPU multiplies as they are, with
activations of eight bits.

The scales of a quantized cache are bfloat16: each is of one token alone, never revised, and a
quarter of four bits' bytes would be scales in float32.
"""

import dataclasses

from configs.errors import InputError


@dataclasses.dataclass(frozen=True)
class Format:
    """A number format.

    Attributes:
        bits: of an element.
        group: elements along a row that share a scale; None: the whole row does.
        scale_bits: of a scale and what belongs to it; 0: there is none.
        compute: type the products run in, a key of `HardwareSpec.rates`.
        block: elements along a row that a GGUF file stores together; None: it is no such format.
    """

    name: str
    bits: int
    group: int | None = None
    scale_bits: int = 0
    compute: str = "bfloat16"
    block: int | None = None

    def check_rows(self, row: int, what: str) -> None:
        """Refuses rows that are no whole blocks.

        Raises:
            InputError: naming `what` has them.
        """
        if self.block and row % self.block:
            raise InputError(
                f"{what} has rows of {row}, not a multiple of {self.name}'s block of {self.block}"
            )

    def bytes_for(self, elements: float, row: float) -> float:
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
        Format("q8_0", 8, group=32, scale_bits=16, compute="int8", block=32),
        Format("q4_0", 4, group=32, scale_bits=16, compute="int8", block=32),
        Format("q4_1", 4, group=32, scale_bits=32, compute="int8", block=32),
        # Of 256 elements' blocks: six bits a scale and a minimum, in a byte each; 2 x 16 for all.
        Format("q4_k", 4, group=32, scale_bits=20, compute="int8", block=256),
        Format("q6_k", 6, group=16, scale_bits=9, compute="int8", block=256),
    )
}


# Of a cache. Of eight bits a scale belongs to 64 elements, or to a whole key or value whose width
# is no multiple of that (`configs/cache.py`): a row of so many has one.
CACHE_FORMATS = {
    format.name: format
    for format in (
        FORMATS["float32"],
        FORMATS["bfloat16"],
        Format("fp8", 8, scale_bits=16),
        Format("int8", 8, scale_bits=16),
        Format("int4", 4, group=32, scale_bits=16),
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
