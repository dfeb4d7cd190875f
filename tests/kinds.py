"""A layer kind that caches what it is told, for tests of what follows from a cache."""

import dataclasses

from configs.cache import CacheSpec
from configs.kinds.kind import Mixer
from configs.kinds.params import Declared, Widths


@dataclasses.dataclass(frozen=True)
class Caching(Mixer, name="caching"):
    """No parameters; a test says what applies it."""

    spec: CacheSpec
    variant: str = ""

    def parameters(self, model: Widths) -> Declared:
        """None."""
        return {}

    def cache(self, model: Widths) -> CacheSpec:
        """What it was told."""
        return self.spec
