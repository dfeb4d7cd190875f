"""Cache of an engine in whole pages: the bytes it allocates, the batch it holds."""

from configs.engine import Config, EngineConfig
from configs.model import ModelConfig


def pool_bytes(config: Config) -> int:
    """Bytes of the cache that an engine allocates: the pages of every group, page 0 of each (the
    sink of padding) among them, and the states of all slots, their sink included.
    """
    engine, dtype = config.engine, config.model.dtype
    groups = zip(config.model.page_groups, config.num_pages, strict=True)
    paged = sum(group.bytes_per_page(dtype, config.page_tokens) * n for group, n in groups)
    state = sum(spec.bytes_per_sequence(engine.num_drafts) for spec in config.model.cache_specs)
    return paged + (engine.max_seqs + 1) * state


def largest_batch(
    model: ModelConfig, cache_bytes: int, context: int, page_tokens: int | None = None
) -> int:
    """Sequences of `context` tokens whose pages and states fit into `cache_bytes` together, sinks
    included: an engine of that many never preempts. 0 where not even one fits.
    """
    engine = EngineConfig(
        max_seqs=1, max_context=context, page_tokens=page_tokens, cache_bytes=cache_bytes
    )
    return Config(model, engine).most_seqs
