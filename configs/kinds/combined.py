"""Layers with two mixers side by side, and with none."""

import dataclasses
import math
from collections.abc import Mapping

from configs.cache import CacheSpec
from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.kind import Mixer
from configs.kinds.operations import Operation
from configs.kinds.params import Declared, Widths
from configs.kinds.rope import Rope


@dataclasses.dataclass(frozen=True)
class Parallel(Mixer, name="parallel"):
    """Attention and a recurrent mixer over the same input, whose outputs are added (Hymba, Dong et
    al. 2024, arXiv 2411.13676; Falcon-H1, Zuo et al. 2025, arXiv 2507.22448).

    Attributes:
        attention, recurrent: the two of them.
        in_scales, out_scales: factors on what each of them reads and on what each adds, those of
            attention first.
    """

    attention: Attention
    recurrent: Mixer
    in_scales: tuple[float, float] = (1.0, 1.0)
    out_scales: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self) -> None:
        if self.attention.owner is not None:
            raise InputError("parallel attention reads its own cache: leave owner out")
        for field in ("in_scales", "out_scales"):
            if not all(0 < scale < math.inf for scale in getattr(self, field)):
                raise InputError(
                    f"parallel {field} are finite numbers above 0, not {getattr(self, field)}"
                )

    @property
    def parts(self) -> tuple[Mixer, ...]:
        return self.attention, self.recurrent

    def changed(self, changes: Mapping[str, object]) -> "Parallel":
        return dataclasses.replace(
            super().changed(changes),
            attention=self.attention.changed(changes),
            recurrent=self.recurrent.changed(changes),
        )

    def parameters(self, model: Widths) -> Declared:
        """Those of each, under its name."""
        return {part.name: part.parameters(model) for part in self.parts}

    def cache(self, model: Widths) -> CacheSpec:
        """Keys and values of each token, and the states.

        Raises:
            InputError: there are no states, or not they alone.
        """
        spec = self.recurrent.cache(model)
        if not spec.states or spec.elements_per_token:
            raise InputError(
                f"parallel recurrent is a mixer with states alone, not {self.recurrent.name}"
            )
        return dataclasses.replace(self.attention.cache(model), states=spec.states)

    def cached(self, model: Widths) -> tuple[tuple[CacheSpec, int], ...]:
        return tuple(cached for part in self.parts for cached in part.cached(model))

    def can_divide(self, chips: int) -> bool:
        return all(part.can_divide(chips) for part in self.parts)

    @property
    def reads_float32(self) -> bool:
        """See `Kind`: each part reads it times a factor of its own."""
        return True

    def per_chip(self, chips: int) -> "Parallel":
        return dataclasses.replace(
            self,
            attention=self.attention.per_chip(chips),
            recurrent=self.recurrent.per_chip(chips),
        )

    def operations(self, model: Widths, stored: CacheSpec) -> tuple[Operation, ...]:
        """Those of each, over its part of the cache."""
        return tuple(
            operation
            for part in self.parts
            for operation in part.operations(model, part.cache(model))
        )

    @property
    def num_sums(self) -> int:
        return sum(part.num_sums for part in self.parts)

    @property
    def num_chosen(self) -> int:
        return sum(part.num_chosen for part in self.parts)

    @property
    def num_divided_norms(self) -> int:
        return sum(part.num_divided_norms for part in self.parts)

    @property
    def query_heads(self) -> int:
        return self.attention.query_heads

    @property
    def rotation(self) -> tuple[Rope, int] | None:
        return self.attention.rotation


@dataclasses.dataclass(frozen=True)
class NoMixer(Mixer, name="none"):
    """Nothing moves between tokens: the layer is its feed-forward alone (Nemotron-H, NVIDIA 2025,
    arXiv 2504.03624).
    """

    def parameters(self, model: Widths) -> Declared:
        return {}

    def cache(self, model: Widths) -> CacheSpec:
        return CacheSpec()

    def per_chip(self, chips: int) -> "NoMixer":
        return self

    @property
    def norms_input(self) -> bool:
        """See `Kind`: nothing is read."""
        return True

    @property
    def num_sums(self) -> int:
        return 0
