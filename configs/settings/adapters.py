"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) that requests may choose."""

import dataclasses
from typing import ClassVar

from configs.errors import InputError, shown
from configs.settings.section import Section, setting

MOST_SLOTS, MOST_RANKS = 256, 256
NO_SLOT = -1  # of a sequence or a token without an adapter
EXTRAS = "vocab", "latents", "experts"


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
    extras: tuple[str, ...] = setting(
        (), "What adapters may change in addition to the matrices of layers that all tokens meet: "
        "vocab (embeddings and head), latents (kv_b_proj of latent attention), experts (routed).",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.extras:
            if name not in EXTRAS:
                raise InputError(
                    f"{self.path}.extras={shown(name)}: must be of {', '.join(EXTRAS)}"
                )


NO_SLOTS = AdapterConfig()
