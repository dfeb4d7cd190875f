"""What every checkpoint format offers: names, shapes, and blocks of rows."""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np


@dataclasses.dataclass(frozen=True)
class TensorSource:
    """Tensors on disk, read a block of rows at a time.

    Attributes:
        label: where they are, for messages.
        shapes: shape of each tensor, the outermost dimension (rows) first.
        read: `read(name, start, stop)` gives rows [start, stop) in the precision the checkpoint
            stands for; the array may be a view of mapped memory.
    """

    label: str
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str, int, int], np.ndarray]
