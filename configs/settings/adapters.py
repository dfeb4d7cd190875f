"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) that requests may choose."""

import dataclasses
from typing import ClassVar

from configs.settings.section import Section, setting

MOST_SLOTS, MOST_RANKS = 256, 256


@dataclasses.dataclass(frozen=True)
class AdapterConfig(Section):
    """Room for adapters on the device: each slot holds two matrices for each of the model's."""

    path: ClassVar[str] = "engine.adapters"

    slots: int = setting(
        0,
        "Adapters on the device at a time, which the rows of one step may mix; others wait in host "
        "memory. 0: no request has one.",
        lower=0, upper=MOST_SLOTS,
    )  # fmt: skip
    rank: int = setting(
        16, "Largest rank of an adapter. All take room for it, in multiples of 16.",
        lower=1, upper=MOST_RANKS,
    )  # fmt: skip
