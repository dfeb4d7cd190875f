"""Heads as they are published, opened with the tiny checkpoint that they draft for."""

import dataclasses
from pathlib import Path

from configs.engine import Config, EngineConfig
from inference.checkpoints import resolve
from layers import decoder

TARGET = Path(__file__).parents[1] / "golden" / "llama-gqa-tied-rope3"


def opened(folder, proposer, **settings):
    """Configuration in float32, both checkpoints, and all parameters."""
    target, heads = resolve.resolve(str(TARGET)), resolve.resolve(str(folder), drafts=True)
    model, draft = (dataclasses.replace(each.config, dtype="float32") for each in (target, heads))
    engine = EngineConfig.of(**{
        "max_seqs": 2, "page_tokens": 8, "cache_bytes": 1 << 20, "decode_rows": (2,),
        "chunk_tokens": 16, "prefill_chunks": (1,), "proposer": proposer, "num_drafts": 3,
    } | settings)  # fmt: skip
    config = Config(model, engine, draft=draft)
    checkpoints = target.open(None), heads.open(None)
    values = checkpoints[0].load_params(decoder.param_infos(model))
    values |= {"draft": checkpoints[1].load_params(decoder.param_infos(draft))}
    return config, checkpoints, values
