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
        """Its leaves."""
        return cache[self._first :]

    def put(self, cache: Cache, own: Cache) -> Cache:
        """The cache with these."""
        return (*cache[: self._first], *own)

    def seen(self, ragged: Ragged) -> Ragged:
        """A step as it sees it: with the tables of its own page groups."""
        return dataclasses.replace(
            ragged,
            rectangles=tuple(
                dataclasses.replace(each, tables=tuple(each.tables[g] for g in self._groups))
                for each in ragged.rectangles
            ),
        )
