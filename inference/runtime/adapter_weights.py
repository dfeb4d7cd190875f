"""A low-rank adapter in host memory (LoRA, Hu et al. 2021, arXiv 2106.09685), and the matrices that
it may change.
"""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from configs import adapters
from configs.kinds.params import ParamInfo


class Place(NamedTuple):
    """Where a module [F, D] is in our parameters: rows of a matrix, or of all matrices of a stack,
    and those of their modules that have these rows; or columns of the module, transposed.
    """

    path: str
    first_row: int
    shape: tuple[int, int]
    modules: range
    is_transposed: bool = False

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.shape[0])


class Factors(NamedTuple):
    """What is added to a module's weight: up @ down, the scale of the adapter in `up`."""

    down_RD: np.ndarray
    up_FR: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class AdapterWeights:
    """An adapter.

    Attributes:
        path: where it was read.
        digest: SHA-256 of its files: names what it makes of a prompt.
        rank: the largest of its modules'.
        factors: of each module that it changes.
    """

    path: Path
    digest: str
    rank: int
    factors: Mapping[Place, Factors]

    def filled(
        self, path: str, info: ParamInfo, rank: int, dtype: np.dtype
    ) -> tuple[np.ndarray, np.ndarray]:
        """Both factors of a whole parameter, as `adapters.factors` declares them; zeros where
        nothing is changed.
        """
        stack, num_modules = info.shape[:-2], adapters.num_modules(info)
        num_ranks = num_modules * rank
        down = np.zeros((adapters.num_matrices(info) * num_ranks, info.shape[-1]), dtype)
        up = np.zeros((info.rows, num_ranks if stack else rank), dtype)
        ends = adapters.module_ends(info)
        for place, factors in self._by_path.get(path, ()):
            size = len(factors.down_RD)
            for nth in place.modules:
                down[nth * rank : nth * rank + size] = factors.down_RD
                rows = slice(ends[nth - 1] if nth else 0, ends[nth])
                first = nth % num_modules * rank if stack else 0
                up[rows, first : first + size] = factors.up_FR[
                    rows.start - place.first_row : rows.stop - place.first_row
                ]
        if info.is_table:
            return down.T, up
        return down.reshape(*stack, num_ranks, -1), up.reshape(*stack, -1, up.shape[1])

    def rank_of(self, path: str) -> int:
        """The largest rank of the modules of a matrix; 0 where nothing is changed."""
        return max((len(both.down_RD) for _, both in self._by_path.get(path, ())), default=0)

    @functools.cached_property
    def _by_path(self) -> dict[str, list[tuple[Place, Factors]]]:
        by_path: dict[str, list[tuple[Place, Factors]]] = {}
        for place, factors in self.factors.items():
            by_path.setdefault(place.path, []).append((place, factors))
        return by_path
