"""How numbers are stored: bits of an element and of the scale that a group of elements shares.

Weights of few bits lie in blocks: a row is one block after another, each a group's scale and then
its integers, so that a matrix is bytes, [F, bytes of a row]. Ours begin with the scale in float32
and, where they are asymmetric, a zero point of a byte (`layers/quantized.py` packs and reads them);
MXFP4's and MXFP8's begin with a power of two (OCP Microscaling 1.0), NVFP4's with a scale in e4m3
behind one of the whole row in float32, and GGUF's are as in its files. A row that shares one scale
is one block. Of `fp8_block` (128 x 128 numbers share a scale, DeepSeek-V3, arXiv 2412.19437) each
row of bytes has the scale of its block; in memory 16 rows have it once.

`w8a8` and `w8a8_fp8` store what `int8` and `fp8` do, and round activations too, a scale a token, so
their products run at the chip's int8 or fp8 rate where it has one. Other weights of few bits are
expanded to bfloat16 for their products, within the kernels. A CPU's kernels multiply integers of up
to eight bits as they are, with activations of eight bits, a scale for 32 of a token, and floats of
few bits in float32 (`IN_FLOAT32`). A cache is expanded for attention whatever its format.

The scales of a quantized cache are bfloat16: each is of one token alone, never revised, and a
quarter of four bits' bytes would be scales in float32.
"""

import dataclasses
import math

from configs.errors import InputError


@dataclasses.dataclass(frozen=True)
class Format:
    """A number format.

    Attributes:
        bits: of an element.
        group: elements along a row that share a scale; None: the whole row does.
        scale_bits: of a scale and what belongs to it; 0: there is none.
        compute: type the products run in, a key of `HardwareSpec.rates`.
        block: elements along a row that are stored together; None: those of a group.
        asymmetric: a group has a zero point.
        activations: format that a token's activations are rounded to; None: they stay.
        rows: rows from the first on that share their scales in memory; the last group of a row may
            then be shorter.
        row_bits: of a scale that all groups of a row share.
    """

    name: str
    bits: int
    group: int | None = None
    scale_bits: int = 0
    compute: str = "bfloat16"
    block: int | None = None
    asymmetric: bool = False
    activations: str | None = None
    rows: int = 1
    row_bits: int = 0

    @property
    def is_quantized(self) -> bool:
        """Whether it is stored in blocks of bytes, with scales."""
        return self.scale_bits > 0

    @property
    def measured(self) -> str:
        """The key of a machine's measured rate of products with weights in this format, where
        that is not the rate of a type.
        """
        return f"weights in {self.name}" if self.is_quantized else self.compute

    def check_rows(self, row: int, what: str) -> None:
        """Refuses rows that are no whole blocks.

        Raises:
            InputError: naming `what` has them.
        """
        if self.is_quantized and self.rows == 1 and row % (block := self.block_in(row)):
            raise InputError(
                f"{what} has rows of {row}, not a multiple of {self.name}'s block of {block}"
            )

    def block_in(self, row: int) -> int:
        """Elements of a row of so many that are stored together."""
        return self.block or self.group or row

    def scales_of(self, elements: float, row: float) -> float:
        """Scales in the rows of bytes of `elements` that lie in rows of `row` elements."""
        group = min(row, self.group or row)
        return elements / row * math.ceil(row / group) if self.rows > 1 else elements / group

    def row_bytes(self, row: int) -> int:
        """Bytes of a row of so many elements in blocks, as `layers/quantized.py` has them."""
        scale_bits = self.scales_of(row, row) * self.scale_bits + self.row_bits
        return round((row * self.bits + scale_bits) / 8)

    def bytes_for(self, elements: float, row: float) -> float:
        """Bytes in memory of `elements`, scales included, that lie in rows of `row` elements."""
        scale_bits = self.scales_of(elements, row) * self.scale_bits / self.rows
        return (elements * self.bits + scale_bits + elements / row * self.row_bits) / 8


GROUPS = 128, 64, 32  # of integers; the first of them is what a format without a size has


def _integers(bits: int) -> tuple[Format, ...]:
    """Symmetric and asymmetric formats of so many bits, of each size of groups."""
    return tuple(
        Format(
            f"int{bits}{'_asym' if zero_bits else ''}{'' if size == GROUPS[0] else f'_g{size}'}",
            bits, size, 32 + zero_bits, asymmetric=zero_bits > 0,
        )
        for zero_bits in (0, 8) for size in GROUPS
    )  # fmt: skip


FORMATS = {
    format.name: format
    for format in (
        Format("float32", 32, compute="float32"),
        Format("bfloat16", 16),
        Format("int32", 32),
        Format("fp8", 8, scale_bits=32),
        Format("int8", 8, scale_bits=32),
        Format("w8a8", 8, scale_bits=32, compute="int8", activations="int8"),
        Format("w8a8_fp8", 8, scale_bits=32, compute="fp8", activations="fp8"),
        # `w8a8`, and so many features of the activations beside it in bfloat16, of which the bytes
        # of a row that has them are counted: they are parameters of their own.
        Format("llm_int8", 8, scale_bits=32, compute="int8", activations="int8"),
        *_integers(4),
        *_integers(3),
        Format("mxfp4", 4, group=32, scale_bits=8),
        Format("fp8_block", 8, group=128, scale_bits=32, rows=16),
        Format("mxfp8", 8, group=32, scale_bits=8),
        Format("nvfp4", 4, group=16, scale_bits=8, row_bits=32),
        Format("q8_0", 8, group=32, scale_bits=16, compute="int8"),
        Format("q5_0", 5, group=32, scale_bits=16, compute="int8"),
        Format("q4_0", 4, group=32, scale_bits=16, compute="int8"),
        Format("q4_1", 4, group=32, scale_bits=32, compute="int8"),
        # Of 256 elements' blocks: six bits a scale and a minimum, in a byte each; 2 x 16 for all.
        Format("q4_k", 4, group=32, scale_bits=20, compute="int8", block=256),
        Format("q5_k", 5, group=32, scale_bits=20, compute="int8", block=256),
        Format("q6_k", 6, group=16, scale_bits=9, compute="int8", block=256),
        Format("q3_k", 3, group=16, scale_bits=9, compute="int8", block=256),
        Format("q2_k", 2, group=16, scale_bits=10, compute="int8", block=256),
        Format("iq4_nl", 4, group=32, scale_bits=16, compute="int8"),
        Format("iq4_xs", 4, group=32, scale_bits=10, compute="int8", block=256),
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


LARGEST_FP8 = 448.0  # number of e4m3

# Whose blocks `layers/quantized.py` makes: weights that are stored otherwise are rounded to these.
OURS = (
    *("int8", "fp8", "w8a8", "w8a8_fp8"),
    *(format.name for bits in (4, 3) for format in _integers(bits)),
    "mxfp4",
)
# Weights of few bits that are kept as checkpoints have them: none are rounded to these.
PUBLISHED = "fp8_block", "mxfp8", "nvfp4"
ROW_FORMATS = *OURS, *PUBLISHED  # whose rows `layers/quantized.py` reads
IN_FLOAT32 = "fp8", "w8a8_fp8", *PUBLISHED  # what a CPU's kernels multiply in float32
# Of all weights of a model that is planned: `llm_int8` is three parameters for each.
PLANNED = tuple(name for name in FORMATS if name not in ("int32", "llm_int8"))
OUTLIERS = 32  # features that `llm_int8` keeps in bfloat16
# How many times the root mean square of a token's other numbers one is that `llm_int8` rounds by
# another scale.
OUTLIER_SIZE = 2.0


def fitting(name: str, row: int, what: str) -> str:
    """The format of that name, with the largest groups that divide rows of so many elements.

    Raises:
        InputError: none do; the message says that `what` has these rows.
    """
    sizes = (f"{name}_g{size}" for size in GROUPS)
    choices = [choice for choice in (name, *sizes) if choice in FORMATS]
    for choice in choices:
        if not row % FORMATS[choice].block_in(row):
            return choice
    raise InputError(
        f"{what} has rows of {row}, of which {name} has no whole groups: these are of "
        f"{', '.join(str(FORMATS[choice].block_in(row)) for choice in choices)}"
    )


def get(name: str) -> Format:
    """The format of that name.

    Raises:
        InputError: no such format.
    """
    if name not in FORMATS:
        raise InputError(f"no number format {name!r}; valid: {', '.join(FORMATS)}")
    return FORMATS[name]
