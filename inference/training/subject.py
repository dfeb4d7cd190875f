"""What is trained, whatever the task."""

import dataclasses
from collections.abc import Callable

import numpy as np

from configs.recipes.training import Recipe
from inference.checkpoints.checkpoint import Checkpoint
from inference.checkpoints.load import Progress
from inference.training.loop import Loss
from inference.training.start import Vocabulary
from layers.params import Params


@dataclasses.dataclass(frozen=True)
class Subject:
    """A recipe with all that it needs.

    Attributes:
        recipe: model and training.
        vocabulary: of the tokens.
        tokens: ids that it is trained on, one text behind the other.
        text: a digest that names them.
        starts_from: the checkpoint that training goes on from, if any.
        loss: what is made small.
        start: (progress) -> parameters, and what the loss needs beside them.
    """

    recipe: Recipe
    vocabulary: Vocabulary
    tokens: np.ndarray
    text: str
    starts_from: Checkpoint | None
    loss: Loss
    start: Callable[[Progress | None], tuple[Params, Params | None]]
