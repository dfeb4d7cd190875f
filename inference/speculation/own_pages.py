"""The pages of a model that drafts: leaves of the cache behind the model's own."""

import dataclasses

from configs.model import ModelConfig
from layers.kv_cache import Cache
from layers.ragged import Ragged


class OwnPages:
    """Which leaves and which page tables they are."""

    def __init__(self, draft: ModelConfig, cached_model: ModelConfig):
        """`cached_model`: as `Config` has it, with the layers of `draft` behind the model's own."""
        specs = [group.spec for group in cached_model.page_groups]
        self._groups = [specs.index(group.spec) for group in draft.page_groups]
        self._first = cached_model.num_layers - draft.num_layers

    def of(self, cache: Cache) -> Cache:
        return cache[self._first :]

    def put(self, cache: Cache, leaves: Cache) -> Cache:
        return (*cache[: self._first], *leaves)

    def view(self, ragged: Ragged) -> Ragged:
        """A step with the page tables of these groups alone."""
        return dataclasses.replace(
            ragged,
            rectangles=tuple(
                dataclasses.replace(r, tables=tuple(r.tables[g] for g in self._groups))
                for r in ragged.rectangles
            ),
        )
