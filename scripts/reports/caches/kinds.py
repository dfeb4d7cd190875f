"""The ways to shrink a cache: a row of each table."""

import dataclasses
from typing import Any

from configs.kinds.attention import Attention
from configs.kinds.compressed import Compressed
from configs.kinds.kind import Mixer
from configs.kinds.latent import Indexer, Latent
from configs.model import LayerSpec, ModelConfig
from configs.models.character_ai import CHARACTER_AI
from configs.models.smollm import SMOLLM2_135M
from configs.recipes.smaller_caches import shared_by

REFERENCE = SMOLLM2_135M.config
WINDOW, FIRST = 512, 4
BUDGET, LONG_BUDGET = 512, 1024  # tokens that Quest reads: a quarter of 2,048, of 4,096
TOP_K = 512  # tokens that DSA reads

MHA, GQA, MLA, DSA, QUEST, INT8 = "MHA", "GQA", "MLA", "DSA", "Quest", "int8"
STRIDES = {"V4 stride 4": 4, "V4 stride 128": 128}
SLIDING = f"window {WINDOW}"
SINKS = f"{SLIDING} + {FIRST} first"
SNAP = f"SnapKV {BUDGET}"
PLAIN = "bfloat16"


def declared(model: ModelConfig) -> dict[str, ModelConfig]:
    """Returns a model with each cache, trained with it or not. All but MHA, MQA, those of latents
    and V4's have the model's key/value heads, or 8 where each query head has its own.
    """
    (mixer,) = model.mixers(Attention)
    gqa = model.with_kinds(num_kv_heads=8) if mixer.num_kv_heads == mixer.num_heads else model
    mla = _latent(model)
    return {
        MHA: model.with_kinds(num_kv_heads=mixer.num_heads),
        GQA: gqa,
        "MQA": model.with_kinds(num_kv_heads=1),
        MLA: mla,
        "CLA-2": shared_by(gqa, 2),
        "MLA + CLA-2": shared_by(mla, 2),
        SLIDING: gqa.with_kinds(window=WINDOW),
        SINKS: gqa.with_kinds(window=WINDOW, first_tokens=FIRST),
        f"chunks of {WINDOW}": gqa.with_kinds(window=WINDOW, chunked=True),
        INT8: _stored(gqa, "int8"),
        "fp8": _stored(gqa, "fp8"),
        "int4": _stored(gqa, "int4"),
        QUEST: gqa.with_kinds(token_budget=BUDGET),
        DSA: _latent(model, TOP_K),
        **{name: _compressed(model, stride) for name, stride in STRIDES.items()},
    }


def trained(model: ModelConfig) -> dict[str, ModelConfig]:
    """Returns a model with each cache that suits its weights; the first is the one that others are
    compared with. Layers that have a window keep it.
    """
    return {
        PLAIN: model,
        INT8: _stored(model, "int8"),
        "fp8": _stored(model, "fp8"),
        "int4": _stored(model, "int4"),
        QUEST: _unwindowed(model, token_budget=BUDGET),
        SLIDING: _unwindowed(model, window=WINDOW),
        SINKS: _unwindowed(model, window=WINDOW, first_tokens=FIRST),
    }


def timed(model: ModelConfig) -> dict[str, tuple[str, ModelConfig]]:
    """Returns a model with each cache whose steps are timed, and the cache to compare it with."""
    return {
        PLAIN: (PLAIN, model),
        "CLA-2": (PLAIN, shared_by(model, 2)),
        SLIDING: (PLAIN, model.with_kinds(window=WINDOW)),
        QUEST: (PLAIN, model.with_kinds(token_budget=LONG_BUDGET)),
        INT8: (PLAIN, _stored(model, "int8")),
        MLA: (MLA, _latent(model)),
        DSA: (MLA, _latent(model, TOP_K)),
        **{name: (MLA, _compressed(model, stride)) for name, stride in STRIDES.items()},
    }


def at_once(model: ModelConfig) -> dict[str, ModelConfig]:
    """Returns a model with each cache that lets more requests run at once."""
    return {
        PLAIN: model,
        INT8: _stored(model, "int8"),
        "fp8": _stored(model, "fp8"),
        "int4": _stored(model, "int4"),
        "CLA-2": shared_by(model, 2),
    }


def published() -> dict[str, ModelConfig]:
    """Returns Character.AI's model, and the same with plain attention in all layers."""
    model = CHARACTER_AI.config
    plain = model.with_kinds(owner=None, window=None)
    (mixer, *_) = plain.mixers(Attention)
    wide = plain.with_kinds(num_kv_heads=mixer.num_heads)
    return {model.name: model, f"{model.name}, MHA": wide}


def _stored(model: ModelConfig, name: str) -> ModelConfig:
    return dataclasses.replace(model, cache_format=name)


def _unwindowed(model: ModelConfig, **changes: Any) -> ModelConfig:
    """Changes the layers without a window."""

    def changed(layer: LayerSpec) -> LayerSpec:
        mixer = layer.mixer
        if not isinstance(mixer, Attention) or mixer.window is not None:
            return layer
        return dataclasses.replace(layer, mixer=dataclasses.replace(mixer, **changes))

    return dataclasses.replace(model, pattern=tuple(map(changed, model.pattern)))


def _latent(model: ModelConfig, top_k: int | None = None) -> ModelConfig:
    """Replaces attention by as many heads over one latent vector, of DeepSeek-V2's proportions;
    half as many heads choose tokens, as in DeepSeek-V3.2.
    """
    (attention,) = model.mixers(Attention)
    N, H = attention.num_heads, attention.head_width
    indexer = None if top_k is None else Indexer(N // 2, H, top_k)
    latent = Latent(N, 4 * H, H // 2, nope_width=H, value_width=H, indexer=indexer)
    return _with_mixer(model, latent)


def _compressed(model: ModelConfig, stride: int) -> ModelConfig:
    """Replaces attention by as many heads over entries as wide as `_latent`'s vectors, in
    DeepSeek-V4's proportions; half as many heads choose among entries of few tokens.
    """
    (attention,) = model.mixers(Attention)
    N, H, rank = attention.num_heads, attention.head_width, model.width // 4
    is_sparse = stride < 128
    mixer = Compressed(
        N, 4 * H, rank, H // 2, groups=3 if N % 3 == 0 else 8, group_rank=rank, window=128,
        stride=stride, overlaps=is_sparse, indexer=Indexer(N // 2, H, TOP_K) if is_sparse else None,
    )  # fmt: skip
    return _with_mixer(model, mixer)


def _with_mixer(model: ModelConfig, mixer: Mixer) -> ModelConfig:
    pattern = tuple(dataclasses.replace(layer, mixer=mixer) for layer in model.pattern)
    return dataclasses.replace(model, pattern=pattern)
