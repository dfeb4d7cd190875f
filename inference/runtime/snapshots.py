"""Snapshots of recurrent states, which outlive the sequences that they were made of."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.stages import Compiled

from configs.engine import Config
from inference.runtime.executables import abstract
from inference.scheduling.step_schedule import Snapshot
from layers import kv_cache
from layers.kv_cache import Cache
from sharding import mesh as meshes
from sharding.mesh import EACH_GROUP, EVERY_CHIP

Snapshots = tuple[tuple[Snapshot, ...], ...]  # of each data shard

_ROWS = 8  # that one call makes; more take several calls


class StateSnapshots:
    """Copies states from slots to snapshots."""

    def __init__(self, config: Config, cache: Cache, mesh: Mesh | None = None):
        """`cache` are leaves of a chip, or their shapes; `mesh` the chips, if there are several."""
        self._config, self._mesh, self._cache = config, mesh, cache
        self._compiled: Compiled | None = None

    @property
    def is_ready(self) -> bool:
        """Whether nothing is to be compiled."""
        return self._compiled is not None or not self._config.num_snapshots

    def prepare(self) -> None:
        """Compiles what `keep` runs."""
        if self.is_ready:
            return
        rows_A = jax.ShapeDtypeStruct((_ROWS,), np.int32)
        given = EVERY_CHIP, EACH_GROUP, EACH_GROUP, EACH_GROUP
        function = meshes.over(self._mesh, kv_cache.keep_states, given, EVERY_CHIP)
        parts = abstract(self._cache), rows_A, rows_A, rows_A
        arguments = meshes.spread(self._mesh, parts, given)
        self._compiled = jax.jit(function, donate_argnums=0).lower(*arguments).compile()

    def keep(self, cache: Cache, snapshots: Snapshots) -> Cache:
        """The cache with these snapshots of what the last step left in its slots."""
        if not any(snapshots):
            return cache
        self.prepare()
        assert self._compiled is not None
        for first in range(0, max(map(len, snapshots)), _ROWS):
            rows = [self._rows(shard[first : first + _ROWS]) for shard in snapshots]
            arrays = [np.concatenate(parts) for parts in zip(*rows, strict=True)]
            given = (meshes.to_global(self._mesh, EACH_GROUP, array) for array in arrays)
            cache = self._compiled(cache, *given)
        return cache

    def _rows(self, snapshots: tuple[Snapshot, ...]) -> tuple[np.ndarray, ...]:
        """Slots, lengths and numbers, padded with sinks."""
        found: Any = np.zeros((3, _ROWS), np.int32)
        found[0] = self._config.engine.max_seqs
        for row, own in enumerate(snapshots):
            found[:, row] = own.slot, own.num_tokens, own.number
        return tuple(found)
