"""How full an engine's pages are, counted without a look at each page."""

import dataclasses
from collections.abc import Iterable

from configs.engine import Config
from inference.scheduling.data_shard import DataShard


@dataclasses.dataclass(frozen=True)
class PageUse:
    """The pages of running sequences.

    Attributes:
        used: their share of all pages, in the fullest group.
        waste: share of their token places that are empty.
        sharing: share of pages saved by sharing, of those needed without it.
    """

    used: float
    waste: float
    sharing: float


def page_use(shards: Iterable[DataShard], config: Config) -> PageUse:
    """Counts pages of all data shards. Cached pages that no running sequence uses count as free.

    A sequence's tokens fill all of its pages except the last ones, which are never shared. So the
    empty places of these are all empty places.
    """
    page, num_groups = config.page_tokens, len(config.cached_model.page_groups)
    shares, distinct, listed, empty = [0.0], 0, 0, 0
    for shard in shards:
        usable = shard.pages.pool.num_usable_pages
        free = shard.pages.prefix_cache.num_available_pages
        shares += [
            1 - n / num_usable for n, num_usable in zip(free, usable, strict=True) if num_usable
        ]
        distinct += sum(usable[:num_groups]) - sum(free[:num_groups])
        for sequence in shard.running:
            num_tokens = sequence.num_scheduled_tokens
            for group, page_list in zip(range(num_groups), sequence.pages, strict=False):
                listed += len(page_list) - page_list.count(0)
                gone = sequence.budget.num_dropped_tokens
                if config.cached_model.page_groups[group].spec.window is not None:
                    gone = 0
                empty += max(0, page * len(page_list) + gone - num_tokens)
    if not distinct or not listed:
        return PageUse(max(shares), 0.0, 0.0)
    return PageUse(max(shares), empty / (page * distinct), max(0.0, 1 - distinct / listed))


def described(config: Config) -> dict[str, str]:
    """The configuration of the pages, under the names of vLLM's `cache_config_info`."""
    return {
        "block_size": str(config.page_tokens),
        "num_gpu_blocks": str(min(config.num_cached_pages, default=1) - 1),
        "cache_dtype": str(config.model.cache_dtype),
        "enable_prefix_caching": str(config.engine.cache.prefix_cache),
    }
