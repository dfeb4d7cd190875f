"""What cached prefixes save of a workload, by its lengths alone."""

from collections.abc import Iterable

from configs.engine import Config
from configs.hardware.spec import HardwareSpec
from inference.planner import cache_policy


def computed_tokens(
    config: Config, prompts: Iterable[tuple[int, int]], hardware: HardwareSpec | None = None
) -> int:
    """Prompt tokens that are computed where prompts come one after another and nothing is evicted,
    of a model whose layers see all of the past, or keep it in states. The latter go on from
    snapshots alone: at the end of an earlier prompt's last page, where earlier prompts were seen to
    part, and every `cache_policy.snapshot_tokens`.

    Args:
        config: model and engine.
        prompts: (tokens, those of them that begin a text which all prompts share), in their order.
        hardware: the machine, which chooses the distance of snapshots; None: as `snapshot_tokens`
            takes it.
    """
    page, has_states = config.page_tokens, config.model.has_states
    each = cache_policy.snapshot_tokens(config, hardware)
    is_kept = config.engine.prefix_cache and (not has_states or config.num_snapshots > 1)
    num_computed = num_known = 0
    ends: set[int] = set()  # of the snapshots in the shared text
    for num_tokens, num_shared in prompts:
        last = (num_tokens - 1) // page * page  # one token is always fed
        seen = min(num_known, num_shared // page * page, last)
        found = max((end for end in ends if end <= seen), default=0) if has_states else seen
        num_computed += num_tokens - found * is_kept
        num_known = max(num_known, num_shared // page * page)
        made = {seen, last, *range(each, last, each or 1)}
        ends |= {end for end in made if found < end <= num_shared}
    return num_computed
