"""An iteration of group-relative policy optimization (GRPO, Shao et al. 2024, arXiv 2402.03300), as
far as its cost depends on it.
"""

import dataclasses

from configs.errors import InputError
from configs.settings.adapters import MOST_RANKS

_MOST = 1 << 31


@dataclasses.dataclass(frozen=True)
class Iteration:
    """What is sampled and learned, by the names of the fields of training.

    Attributes:
        batch: prompts.
        group_size: answers to a prompt.
        max_new_tokens: of an answer.
        updates: of the parameters, each by an equal part of the prompts.
        accumulate: parts that an update is computed in, one after the other.
        staleness: iterations by which the weights that sample are older than those that learn.
        kl_coefficient: weight of the divergence from the model at the start; 0: that is not needed.
        lora_rank: of an adapter that is trained in place of the weights; 0: these.
    """

    batch: int = 16
    group_size: int = 8
    max_new_tokens: int = 256
    updates: int = 1
    accumulate: int = 8
    staleness: int = 0
    kl_coefficient: float = 0.001
    lora_rank: int = 0

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise InputError(
                f"training.group_size={self.group_size}: an answer alone has nothing to be "
                "compared with; give at least 2"
            )
        for name, least, most in (
            *((name, 1, _MOST) for name in ("batch", "max_new_tokens", "updates", "accumulate")),
            ("group_size", 2, _MOST), ("staleness", 0, _MOST), ("lora_rank", 0, MOST_RANKS + 1),
        ):  # fmt: skip
            if not least <= (value := getattr(self, name)) < most:
                raise InputError(
                    f"training.{name}={value}: must be at least {least} and below {most}"
                )
        if not 0 <= self.kl_coefficient < float("inf"):
            raise InputError(
                f"training.kl_coefficient={self.kl_coefficient}: must be finite, and at least 0"
            )
        if self.batch % self.updates:
            raise InputError(
                f"training.updates={self.updates}: must divide training.batch ({self.batch}) into "
                "equal parts"
            )

    @property
    def num_answers(self) -> int:
        return self.batch * self.group_size
