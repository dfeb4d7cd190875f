"""Names in the expressions of docs/lecture.md: models, a chip, and counts that are too small to be
part of the planner.

    python -i -m scripts.reports.lecture.names
"""
# ruff: noqa: F401  (some names are for the expressions alone)

import dataclasses
import itertools
import math

from configs import presets
from configs.cache import CacheSpec
from configs.hardware import catalog
from configs.kinds.attention import Attention
from configs.kinds.latent import Indexer, Latent
from configs.kinds.recurrent.mamba import Mamba2
from configs.mesh import Mesh
from configs.model import LayerSpec, ModelConfig
from configs.precision import CACHE_FORMATS, FORMATS
from inference.planner import cost, weights
from inference.planner.cost import Operation, Precision, Rows, Work
from inference.planner.deployment import Deployment, Row
from inference.planner.kinds.latents import with_attention
from inference.planner.speculation import Speculation, expected_tokens
from scripts.reports.lecture.drafts import acceptance_of, best_drafts, output_distribution

H100 = catalog.get("h100")

LLAMA_13B = presets.get("llama2-13b").config
LLAMA_70B = presets.get("llama2-70b").config
LLAMA3_8B = presets.get("llama3-8b").config
LLAMA3_70B = presets.get("llama3-70b").config
DEEPSEEK_V2 = presets.get("deepseek-v2").config
LATENT: Latent = DEEPSEEK_V2.mixers(Latent)[0]
DEEPSEEK_V32 = presets.get("deepseek-v3.2").config
INDEXER: Indexer = DEEPSEEK_V32.mixers(Latent)[0].indexer
GQA_13B = LLAMA_13B.with_kinds(num_kv_heads=8)
LLAMA_7B = dataclasses.replace(
    LLAMA_13B.with_kinds(width=11_008, num_heads=32, num_kv_heads=32),
    name="llama2-7b", width=4096, num_layers=32,
)  # fmt: skip
MINITRON_4B = dataclasses.replace(
    LLAMA3_8B.with_kinds(width=9216), name="llama3.1-minitron-4b-width", width=3072
)

# Distributions of a target and a draft over {A, B}.
Q, P = (0.3, 0.7), (0.5, 0.5)


# --- operations -----------------------------------------------------------------------------------


def product(config: ModelConfig, tokens: int) -> Operation:
    """The feed-forward's last product: `tokens` rows with a matrix of D x F."""
    operations = cost.step_operations(config, Work(tokens, (), tokens))
    return next(operation for operation in operations if operation.name == "ffn.down")


def tokens_to_ridge(config: ModelConfig) -> int:
    """Fewest tokens whose product is no longer bound by memory on an H100."""
    return next(T for T in itertools.count(1) if product(config, T).intensity >= H100.ridge())


def attention(config: ModelConfig, queries: int, context: int) -> Operation:
    """Attention of one sequence in all layers."""
    work = Work(queries, (Rows(1, queries, context),), 1)
    operations = cost.step_operations(config, work)
    return next(operation for operation in operations if operation.name.startswith("attend"))


def unmasked(queries: int, keys: int) -> float:
    """The lecture's intensity of attention, in which every query sees every key: 4 S T D FLOPs on
    4 S D + 4 T D bytes.
    """
    return queries * keys / (queries + keys)


def flops(config: ModelConfig, tokens: int) -> float:
    """FLOPs of all products with matrices, the head's at each token included."""
    operations = cost.step_operations(config, Work(tokens, (), tokens))
    return sum(operation.flops for operation in operations)


# --- memory and time ------------------------------------------------------------------------------


def gigabytes(config: ModelConfig, context: int, batch: int = 1) -> float:
    """Cache of `batch` sequences."""
    return batch * cost.cache_bytes(config, context) / 1e9


def weight_gb(config: ModelConfig, format: str = "bfloat16") -> float:
    """Weights: layers' matrices in `format`, tables and norms in bfloat16."""
    full = FORMATS["bfloat16"]
    return weights.weight_bytes(config, Precision(FORMATS[format], full, full)) / 1e9


def lecture(config: ModelConfig, batch: int, context: int = 1024, replicas: int = 1) -> Row:
    """The lecture's accounting: read all weights and the whole cache once a step."""
    deployment = Deployment(config, H100, replicas=replicas, accounting="lecture")
    return deployment.row(batch, context)


def speedup(config: ModelConfig, format: str) -> float:
    """Speedup over bfloat16 that fewer bits in the matrices allow at batch 1."""
    full = FORMATS["bfloat16"]
    narrow = Deployment(config, H100, Precision(FORMATS[format], full, full), accounting="lecture")
    return lecture(config, 1).step_s / narrow.row(1, 1024).step_s


# --- smaller caches -------------------------------------------------------------------------------


def with_window(config: ModelConfig, window: int, period: int | None = None) -> ModelConfig:
    """Every layer sees a window; with a period, the last layer of each sees everything."""
    (local,), (world,) = config.with_kinds(window=window).pattern, config.pattern
    pattern = (local,) if period is None else (*[local] * (period - 1), world)
    return dataclasses.replace(config, pattern=pattern)


def with_sharing(config: ModelConfig, layers: int = 2) -> ModelConfig:
    """Neighboring layers use one cache."""
    (layer,) = config.pattern
    pattern = (
        layer if i % layers == 0 else _sharer(layer, i - i % layers)
        for i in range(config.num_layers)
    )  # fmt: skip
    return dataclasses.replace(config, pattern=tuple(pattern))


def _sharer(layer: LayerSpec, owner: int) -> LayerSpec:
    assert isinstance(layer.mixer, Attention)
    return LayerSpec(dataclasses.replace(layer.mixer, owner=owner), layer.ffn)


def with_all(config: ModelConfig) -> ModelConfig:
    """One key/value head; neighbors share; of six caches five hold 1,024 tokens (Character.AI)."""
    config = config.with_kinds(num_kv_heads=1)
    (world,), (local,) = config.pattern, config.with_kinds(window=1024).pattern
    pattern = (
        _sharer(world, i - 1) if i % 2 else (world if i // 2 % 6 == 5 else local)
        for i in range(config.num_layers)
    )
    return dataclasses.replace(config, pattern=tuple(pattern))


def with_state(config: ModelConfig) -> ModelConfig:
    """Every layer a Mamba-2 state of twice the model's width."""
    sizes = Mamba2(2 * config.width // 64, head_width=64, state_width=128)
    return dataclasses.replace(config, pattern=(LayerSpec(sizes, config.layers[0].ffn),))


def with_heads(config: ModelConfig, num_kv_heads: int) -> ModelConfig:
    """Fewer, or more, key/value heads."""
    return config.with_kinds(num_kv_heads=num_kv_heads)


# --- drafts ---------------------------------------------------------------------------------------


def drafts_gain(batch: int, drafts: Speculation) -> float:
    """Speedup of Llama 2 70B on two H100s with every byte and FLOP counted."""
    plain = Deployment(LLAMA_70B, H100, mesh=Mesh(model=2))
    drafting = dataclasses.replace(plain, speculation=drafts)
    return drafting.row(batch, 1024).output_tok_s / plain.row(batch, 1024).output_tok_s


# --- batches and pages ----------------------------------------------------------------------------


def share_static(lengths: tuple[int, ...]) -> float:
    """Share of a static batch's row steps that make a token: rows wait for the longest."""
    return sum(lengths) / (len(lengths) * max(lengths))


def share_paged(lengths: tuple[int, ...], page_tokens: int) -> float:
    """Share of the allocated cache that holds a token."""
    pages = sum(-(-length // page_tokens) for length in lengths)
    return sum(lengths) / (pages * page_tokens)


def chips_for(users: int, chips: int, context: int = 4096) -> int:
    """H100s that hold a cache of `context` tokens for each user of Llama 2 70B, in meshes of
    `chips`.
    """
    replica = Deployment(LLAMA_70B, H100, mesh=Mesh(model=chips))
    return chips * math.ceil(users / replica.largest_batch(context))
