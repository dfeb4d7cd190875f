"""Queries that grow with their position, as data; `layers/temperature.py` has the formula."""

import dataclasses

from configs.errors import check_positive
from configs.kinds.kind import check_sizes


@dataclasses.dataclass(frozen=True)
class Temperature:
    """The query at position p is multiplied with 1 + scale ln(1 + floor((p + offset) / length)), so
    that softmax over more keys stays as sharp (Nakanishi 2025, arXiv 2501.19399; Llama 4, Meta
    2025; Ministral 3, Mistral AI 2025).

    Attributes:
        scale: of the logarithm.
        length: positions over which the factor stays.
        offset: of positions: 1 counts the token itself.
    """

    name = "temperature"

    scale: float
    length: int
    offset: int = 0

    def __post_init__(self) -> None:
        check_positive(self, "temperature ", "scale")
        check_sizes(self, "length")
        if self.offset:
            check_sizes(self, "offset")
