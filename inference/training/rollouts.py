"""Answers that an engine sampled of prompts, with their rewards: an iteration's, in a file."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from configs.errors import InputError, reason
from inference.files import atomic

_MIN_DEVIATION = 1e-4  # of rewards that are divided by it


@dataclasses.dataclass
class Answer:
    """An answer to a prompt.

    Attributes:
        prompt: which of the prompts it answers.
        tokens: with the end token, if it ends.
        reward: None: it has none, and nothing is learned from it.
        logprobs: of the tokens, float32 in nats, by the weights that sampled them.
        policy: by the weights at the start of the iteration that learns from it; None before.
    """

    prompt: int
    tokens: list[int]
    text: str
    reward: float | None
    logprobs: np.ndarray
    policy: np.ndarray | None


@dataclasses.dataclass
class Rollouts:
    """The answers of an iteration, groups of one prompt one behind the other.

    Attributes:
        version: of the weights that sampled all of their tokens: n + 1 are those at the start of
            iteration n.
        seconds: of sampling them.
        max_gap, mean_gap: absolute differences of the engine's log-probabilities and the trainer's
            by the same weights.
    """

    iteration: int
    version: int
    seconds: float
    max_gap: float
    mean_gap: float
    answers: list[Answer]

    def write(self, path: Path) -> None:
        """Writes them as JSON lines, themselves first; raises InputError if that fails."""
        head, *lines = dataclasses.asdict(self), *map(dataclasses.asdict, self.answers)
        del head["answers"]
        try:
            with atomic.open_file(path) as file:
                for line in (head, *lines):
                    text = json.dumps(line, ensure_ascii=False, default=np.ndarray.tolist)
                    file.write(f"{text}\n".encode("utf-8", "surrogatepass"))
        except OSError as error:
            raise InputError(f"cannot write {path}: {reason(error)}") from None

    @classmethod
    def read(cls, path: Path) -> "Rollouts":
        """Reads what `write` wrote; raises InputError if it cannot, or it is something else."""
        try:
            head, *lines = map(
                json.loads, path.read_text("utf-8", "surrogatepass").split("\n")[:-1]
            )
            for line in lines:
                for name in ("logprobs", "policy"):
                    line[name] = None if line[name] is None else np.asarray(line[name], np.float32)
            return cls(**head, answers=[Answer(**line) for line in lines])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InputError(
                f"{path} cannot be read: {reason(error)}; remove the folder of the checkpoints to "
                "start over"
            ) from None


def advantages(rewards: Sequence[float | None]) -> np.ndarray:
    """How much better each answer of a group is than the others, float32: its reward less their
    mean, over their standard deviation. 0 where all are equal, and of answers without a reward,
    which do not count.
    """
    is_valid = np.array([reward is not None for reward in rewards])
    valid = np.array([reward for reward in rewards if reward is not None], np.float64)
    scaled = np.zeros(len(rewards), np.float32)
    if len(valid):
        unit = max(np.abs(valid).max(), 1.0)  # sums and squares of larger ones may overflow
        deviation = (valid / unit).std()
        if deviation * unit >= _MIN_DEVIATION:
            scaled[is_valid] = (valid / unit - (valid / unit).mean()) / deviation
    return scaled
