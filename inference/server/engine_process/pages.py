"""What an engine's pages hold, told without a look at each of them."""

import dataclasses
from collections.abc import Iterable

from configs.engine import Config
from inference.scheduling.data_shard import DataShard


@dataclasses.dataclass(frozen=True)
class Held:
    """The pages of running sequences.

    Attributes:
        used: share of all pages that they are, in the fullest group.
        waste: share of their room for tokens without one.
        sharing: share that would be needed more if none were shared.
    """

    used: float
    waste: float
    sharing: float


def held(shards: Iterable[DataShard], config: Config) -> Held:
    """Of all data shards. Pages that nobody runs on count as free, though they are cached.

    A sequence's tokens fill its pages but for the last ones, which it shares with none: what is
    empty there is all that is empty.
    """
    page, num_groups = config.page_tokens, len(config.cached_model.page_groups)
    shares, distinct, listed, empty = [0.0], 0, 0, 0
    for shard in shards:
        usable = shard.pages.pool.num_usable_pages
        free = shard.pages.prefix_cache.num_available_pages
        shares += [1 - n / most for n, most in zip(free, usable, strict=True) if most]
        distinct += sum(usable[:num_groups]) - sum(free[:num_groups])
        for sequence in shard.running:
            num_tokens = sequence.num_scheduled_tokens
            for group, own in zip(range(num_groups), sequence.pages, strict=False):
                listed += len(own) - own.count(0)
                gone = sequence.budget.num_dropped_tokens
                if config.cached_model.page_groups[group].spec.window is not None:
                    gone = 0
                empty += max(0, page * len(own) + gone - num_tokens)
    if not distinct or not listed:
        return Held(max(shares), 0.0, 0.0)
    return Held(max(shares), empty / (page * distinct), max(0.0, 1 - distinct / listed))


def described(config: Config) -> dict[str, str]:
    """How pages are set up, by the names of vLLM's `cache_config_info`."""
    return {
        "block_size": str(config.page_tokens),
        "num_gpu_blocks": str(min(config.num_cached_pages, default=1) - 1),
        "cache_dtype": str(config.model.cache_dtype),
        "enable_prefix_caching": str(config.engine.cache.prefix_cache),
    }
