"""Tiny random checkpoints that transformers wrote, and its logits at every position.

Each family with heads of every layout it allows, tied and untied, odd sizes; prompt 0 is longer
than two windows and three pages.
"""

import dataclasses
import functools
from pathlib import Path

import numpy as np
import pytest

from configs.engine import Config, EngineConfig
from configs.kinds.attention import Attention
from configs.kinds.latent import Latent
from configs.kinds.recurrent.delta_net import DeltaNet
from configs.kinds.recurrent.linear_attention import LinearAttention
from configs.kinds.recurrent.selective import Mamba
from configs.kinds.rope import LongRope, Rope
from configs.mesh import Mesh
from configs.model import LayerSpec, ModelConfig
from inference.checkpoints import resolve
from inference.families import families
from inference.runtime import step
from inference.runtime.batch import Batch
from inference.scheduling.step_shapes import StepShape
from layers import decoder, kv_cache
from layers.ragged import contiguous
from tests import compiling, fakes
from tests.inference import (
    dense_relatives,
    hyper_relatives,
    mistral_relatives,
    mixture_relatives,
    parallel_relatives,
)
from tests.inference.model_changes import each_layer as _each_layer
from tests.inference.model_changes import each_mixture as _each_mixture
from tests.inference.model_changes import each_of as _each_of
from tests.inference.model_changes import rescaled as _rescaled
from tests.inference.model_changes import routed as _routed
from tests.inference.model_changes import with_fields as _with

_GOLDEN = Path(__file__).resolve().parents[1] / "golden"
_NAMES = sorted(path.parent.name for path in _GOLDEN.glob("*/expected.npz"))
_GREEDY = [n for n in _NAMES if "greedy_tokens" in np.load(_GOLDEN / n / "expected.npz").files]
_TOLERANCE = 1e-4
_SLOTS = 3  # the two prompts sit in slots 0 and 2; the row after the last is the sink


@functools.cache
def _load(name: str):
    """Configuration in float32, parameters, prompts and expected logits."""
    checkpoint = resolve.resolve(str(_GOLDEN / name)).open(None)
    model = dataclasses.replace(checkpoint.config, dtype="float32")
    with np.load(_GOLDEN / name / "expected.npz") as arrays:
        prompts = [arrays[f"tokens_{i}"] for i in (0, 1)]
        expected = [arrays[f"logits_{i}"] for i in (0, 1)]
    scaling = next((mixer.rope.scaling for mixer in model.mixers(Attention) if mixer.rope), None)
    if isinstance(scaling, LongRope) and len(prompts[0]) <= scaling.original_context:
        # transformers takes the short divisors by length, we by the longest context allowed.
        model = dataclasses.replace(model, max_context=scaling.original_context)
    return model, checkpoint.load_params(decoder.param_infos(model), None), prompts, expected


def _chunks(lengths: list[int], fed: list[int], each: int) -> list[list[tuple[int, int, int]]]:
    """Steps of (prompt, start, length) rows: `fed` tokens of each prompt a step, in rows of
    `each`.
    """
    steps, done = [], [0] * len(lengths)
    while any(n < length for n, length in zip(done, lengths, strict=True)):
        rows = []
        for prompt, length in enumerate(lengths):
            stop = min(length, done[prompt] + fed[prompt])
            rows += [(prompt, at, min(each, stop - at)) for at in range(done[prompt], stop, each)]
            done[prompt] = stop
        steps.append(rows)
    return steps


def _tables(config: Config, num_pages: int) -> list[np.ndarray]:
    """Page tables [slot, P] a group, the prompts' pages scattered over the pool."""
    tables, per_prompt = [], (num_pages - 1) // 2
    for group in range(len(config.model.page_groups)):
        ids = 1 + np.random.default_rng(group).permutation(num_pages - 1)
        table = np.zeros((_SLOTS + 1, config.page_columns), np.int32)
        table[0, :per_prompt], table[2, :per_prompt] = (
            ids[:per_prompt],
            ids[per_prompt:][:per_prompt],
        )
        tables.append(table)
    return tables


@functools.cache
def _forward(config: Config, shape: StepShape):
    """The engine's step up to the logits, for every packed token."""

    @compiling.jit
    def forward(params, cache, slots, batch):
        hidden_TD, cache = decoder.forward(
            params, config.model, batch.tokens_T, step.view(shape, slots, batch), cache,
            deterministic=config.engine.deterministic,
        )  # fmt: skip
        fed = slots.num_tokens.at[batch.slot_Y].add(batch.query_length_Y)
        slots = dataclasses.replace(slots, num_tokens=fed)
        return decoder.logits(params, config.model, hidden_TD), cache, slots

    return forward


def _paged_logits(
    name: str, shape: StepShape, steps, page_tokens: int, **engine
) -> list[np.ndarray]:
    """Logits of every position of both prompts, fed through pages as the engine's step does."""
    model, params, prompts, expected = _load(name)
    config = Config(model, EngineConfig.of(max_seqs=_SLOTS, page_tokens=page_tokens, **engine))
    num_pages = 1 + 2 * -(-max(map(len, prompts)) // page_tokens)
    groups, rows = len(model.page_groups), shape.num_rows
    cache = kv_cache.init(model, (num_pages,) * groups, page_tokens, _SLOTS, 0)
    slots, tables = step.init_slots(config), _tables(config, num_pages)
    results = [np.full_like(logits, np.nan) for logits in expected]
    committed = [0, 0]
    for planned in steps:
        tokens_YW = np.zeros((rows, shape.num_tokens // rows), np.int32)
        slot_Y = np.full(rows, _SLOTS, np.int32)
        start_Y, length_Y = np.zeros_like(slot_Y), np.zeros_like(slot_Y)
        for r, (prompt, at, length) in enumerate(planned):
            tokens_YW[r, :length] = prompts[prompt][at : at + length]
            slot_Y[r], start_Y[r], length_Y[r] = 2 * prompt, at - committed[prompt], length
        batch = Batch(
            tokens_YW.ravel(), slot_Y, start_Y, length_Y, np.zeros(rows, bool),
            tuple(table[slot_Y] for table in tables), np.zeros((0, 0), np.int32),
        )  # fmt: skip
        logits_TV, cache, slots = _forward(config, shape)(params, cache, slots, batch)
        logits_YWV = np.asarray(logits_TV).reshape(*tokens_YW.shape, -1)
        for r, (prompt, at, length) in enumerate(planned):
            results[prompt][at : at + length] = logits_YWV[r, :length]
            committed[prompt] += length
    return results


def _assert_close(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for prompt, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        worst = np.abs(mine - theirs).max()
        print(f"prompt {prompt}: worst difference of logits {worst:.1e}")
        assert worst <= _TOLERANCE, f"prompt {prompt}"  # a NaN fails too


# Families whose parts are those of others, in another combination: one checkpoint shows it.
_RELATIVES = {
    *("dots1", "ernie4_5", "flex_olmo", "glm4_moe_lite", "granite", "minimax_m2"),
    "gemma4_unified",
    "mistral_large3",
}
_TWO_LAYOUTS = "olmo3", *dense_relatives.LAYOUTS  # whose heads are those of Llama
_UNTIED = *_RELATIVES, "kimi_linear", "nemotron_h"  # or whose head is always its own


def test_every_layout_is_there():
    models = [_load(name)[0] for name in _NAMES]

    def layout(heads):
        full = heads.num_kv_heads == heads.num_heads
        return "mqa" if heads.num_kv_heads == 1 else "mha" if full else "gqa"

    kinds = {
        (m.family, layout(h))
        for m in models
        for h in m.mixers(Attention)
        if not m.mixtures and not m.has_states  # what these show besides are experts or states
    }
    supported = list(families.ALL)
    mixtures = {m.family for m in models if m.mixtures}
    others = mixtures | {m.family for m in models if m.has_states}
    layouts = {f: ("mqa", "gqa", "mha") for f in supported if f not in others}
    layouts |= {"gpt2": ("mha",), "ministral3": ("mqa", "gqa"), "youtu": ()}
    layouts |= dict.fromkeys(_TWO_LAYOUTS, ("gqa", "mha"))
    layouts |= dict.fromkeys(("ernie4_5", "gemma4", "granite"), ("gqa",))
    layouts |= {"gemma4_unified": ("mha", "mqa")}
    layouts |= parallel_relatives.LAYOUTS
    assert kinds == {(f, kind) for f, legal in layouts.items() for kind in legal}
    assert {(m.family, m.tied) for m in models} == {
        (f, tied) for f in supported for tied in (True, False) if not (tied and f in _UNTIED)
    }
    assert {_family(name) for name in _GREEDY} == {*supported} - _RELATIVES
    for name in _NAMES:
        model, _, prompts, _ = _load(name)
        windows = [mixer.window for mixer in model.mixers(Attention) if mixer.window]
        assert len(prompts[0]) > max(3 * 16, *(2 * window for window in windows), 0)


def _uncached_logits(name: str, model: ModelConfig) -> list[np.ndarray]:
    """Both prompts as rows of one batch, the shorter one padded behind its end."""
    _, params, prompts, _ = _load(name)
    tokens = np.zeros((2, max(map(len, prompts))), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt

    def forward(params, tokens_T):
        hidden_TD, cache = decoder.forward(params, model, tokens_T, contiguous(*tokens.shape))
        assert cache is None
        return decoder.logits(params, model, hidden_TD)

    found = np.asarray(compiling.jit(forward)(params, tokens.ravel())).reshape(*tokens.shape, -1)
    return [row[: len(p)] for row, p in zip(found, prompts, strict=True)]


# Families with states that are those of another one; their second cases are long, too.
_RELATED_STATES = "bamba", "falcon_mamba", "granitemoehybrid", "qwen3_5", "qwen3_5_moe"


def _briefly(names, brief):
    """Those which are not in brief are long."""
    return [name if name in brief else pytest.param(name, marks=pytest.mark.long) for name in names]


def _family(name: str) -> str:
    return name.split("-")[0]


# Whose experts are chosen as those of another family, behind attention of another.
_MIXTURES = "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", *mixture_relatives.FAMILIES
_RELATED = *_MIXTURES, *_RELATED_STATES
_LIKE_OTHERS = [name for name in _GREEDY if _family(name) in _RELATED]
# Whose parts no other has; of all families logits over pages say more than their texts do.
_LLAMAS = (
    *parallel_relatives.LAYOUTS,
    *dense_relatives.LAYOUTS,
    "mistral",
    "qwen2",
    "qwen3",
    "smollm3",
)
_OWN = [n for n in _GREEDY if n not in _LIKE_OTHERS and _family(n) not in _LLAMAS]
# What is told from others by its norms, its factors or where its layers lie, not by what they keep:
# its decode steps and its sums over pages are those of others.
_NO_CACHE_OF_THEIR_OWN = (
    "deepseek_v3-mha-groups-yarn", "gemma3-gqa-linear-rope", "gemma4-mha-mqa-experts-float32",
    "glm4_moe-gqa-norm-bias", "gpt2-mha-tied-bare", "olmo2-mha-untied", "olmo3-gqa-yarn",
    "phi3-mha-window",
)  # fmt: skip
_CACHES = sorted({*_OWN} - {*_NO_CACHE_OF_THEIR_OWN})
# Whose layers another one has among others, which chips divide alike.
_ALONE = "mamba-bias-tied", "mamba2-groups-bias-limit", "olmo_hybrid-mha-rope"
# One of each, and each stretch of positions; all are read from pages.
_STRETCHED = "llama-mqa-dynamic", "llama-gqa-yarn-bias", "phi3-gqa-longrope-partial"


@pytest.mark.quick_code
@pytest.mark.parametrize("name", _briefly(_NAMES, {*_CACHES, *_STRETCHED}))
def test_without_a_cache(name):
    model, _, _, expected = _load(name)
    _assert_close(_uncached_logits(name, model), expected)


def _factors(spec: LayerSpec, part: int, own: tuple[float, float]) -> LayerSpec:
    """A layer with other factors of its mixer (0) or its feed-forward (1)."""
    both = (own, spec.factors[1]) if part == 0 else (spec.factors[0], own)
    return dataclasses.replace(spec, factors=both)


_SCALES = (0.7, 1.3, 0.8, 1.2, 0.9)  # of what a state-space layer projects
_ONE_LESS = [tuple(1.0 if n == each else s for n, s in enumerate(_SCALES)) for each in range(5)]

# Checkpoints whose logits must show a quirk: what the model would be without it. It is said of the
# files, which seldom change.
_MODEL_SCALES = "embedding_scale", "residual_scale", "logit_scale"
_UNSCALED = [lambda model, scale=scale: {scale: 1.0} for scale in _MODEL_SCALES]
_VISIBLE = (
    mistral_relatives.VISIBLE
    | hyper_relatives.VISIBLE
    | mixture_relatives.VISIBLE
    | parallel_relatives.VISIBLE
    | dense_relatives.VISIBLE
    | {
        "bamba-mqa-groups-bias-limit": (
            _with(step_limits=(0.0, None)),
            _with(norm_width=None),
            _with(rope=Rope()),
        ),
        "falcon_h1-gqa-multipliers-gate-norm": (
            lambda m: {"embedding_scale": 1.0},
            lambda m: {"logit_scale": 1.0},
            _with(key_scale=1.0),
            _with(in_scales=(1.0, 1.25)),
            _with(in_scales=(1.2, 1.0)),
            _with(out_scales=(1.0, 0.75)),
            _with(out_scales=(0.9, 1.0)),
            *(_with(part_scales=scales) for scales in _ONE_LESS),
            _with(gate_scale=1.0),
            _with(down_scale=1.0),
            _with(norms_first=True),
            _with(norm_width=None),
        ),
        "falcon_h1-mqa-norm-gate-limit": (
            _with(step_limits=(0.0, None)),
            _with(norms_first=False),
        ),
        "ernie4_5-gqa-neighbors": (_with(rope=Rope(5e5)),),
        "granite-gqa-scales": (*_UNSCALED, _with(scale=None)),
        "granitemoehybrid-mqa-rope-experts": (
            *(*_UNSCALED, _with(scale=None), _with(rope=None), _with(step_limits=(0.0, None))),
        ),
        "nemotron_h-gqa-latent-experts": (
            _with(activation="silu"),
            _with(norm_width=None),
            _with(rope=Rope()),
            _routed(num_groups=1, top_groups=1, group_best=1),
            _routed(scale=1.0),
        ),
        "nemotron_h-mha-bias-float32": (_routed(is_normalized=True), _routed(scores="softmax")),
        "deepseek_v2-mha-groups-yarn": (
            _each_layer(lambda s: {"scale": None}),
            _each_layer(lambda s: {"rope": dataclasses.replace(s.rope, neighbours=False)}),
            _routed(num_groups=1, top_groups=1),
            _routed(scale=1.0),
        ),
        "deepseek_v3-mha-groups-yarn": (
            _each_layer(lambda s: {"scale": None}),
            _each_layer(lambda s: {"rope": dataclasses.replace(s.rope, neighbours=False)}),
            _routed(num_groups=1, top_groups=1, group_best=1),
            _routed(group_best=1),
            _routed(is_normalized=False),
            _routed(scores="softmax"),
        ),
        "deepseek_v3-mha-halves-float32": (_routed(is_normalized=True),),
        "deepseek_v32-mha-yarn": (
            _each_layer(lambda s: {"indexer": None}),
            _each_layer(lambda s: {"indexer": dataclasses.replace(s.indexer, neighbours=True)}),
        ),
        "glm_moe_dsa-mha-listed": (
            _each_layer(lambda s: {"indexer": dataclasses.replace(s.indexer, neighbours=False)}),
        ),
        "dots1-gqa-window": (_each_layer(lambda s: {"window": None}), _routed(scale=1.0)),
        "minimax-gqa-factors": (
            lambda m: {"norm_eps": 1e-5},
            lambda m: {"pattern": tuple(dataclasses.replace(s, factors=()) for s in m.pattern)},
            lambda m: {"pattern": tuple(_factors(s, 0, (1.0, 1.0)) for s in m.pattern)},
            lambda m: {"pattern": tuple(_factors(s, 1, (1.0, 1.0)) for s in m.pattern)},
            _each_of(LinearAttention, decay=None),
            _each_of(LinearAttention, decay=1.0),
            _each_of(LinearAttention, feature_map="elu"),
            _each_of(Attention, rope=None),
        ),
        "minimax-mha-window-tied-float32": (_each_of(Attention, window=None),),
        "minimax_m2-gqa-partial": (
            _each_layer(lambda s: {"rope": Rope(s.rope.theta)}),
            _routed(scores="softmax"),
        ),
        "glm4_moe-gqa-norm-bias": (
            _each_layer(lambda s: {"rope": Rope(s.rope.theta)}),
            _routed(scale=1.0),
        ),
        "glm4_moe-mqa-groups-float32": (_routed(num_groups=1, top_groups=1, group_best=1),),
        "jamba-gqa-experts-bias": (
            _each_of(Mamba, norms=None),
            _each_of(Mamba, norms="plain"),
            _routed(is_normalized=True),
        ),
        "jamba-mqa-dense-tied-float32": (_each_of(Attention, rope=Rope()),),
        "falcon_mamba-bias-tied": (
            _each_layer(lambda s: {"norms": None, "norm_eps": None}),
            _each_layer(lambda s: {"norm_eps": None}),
        ),
        "lfm2-gqa-adjusted-bias-tied": (_each_of(Attention, rope=None),),
        "gpt_oss-gqa-limit": (
            _each_mixture(lambda e: {"limit": None}),
            _each_mixture(lambda e: {"up_offset": 0.0}),
            _each_mixture(lambda e: {"activation": "silu"}),
            _each_layer(lambda s: {"window": None}),
        ),
        "kimi_linear-experts-groups": (
            _each_of(DeltaNet, gate="silu"),
            _each_of(Latent, rope=Rope()),
            _routed(num_groups=1, top_groups=1, group_best=1),
            _routed(scale=1.0),
        ),
        "olmo_hybrid-mha-rope": (
            _each_of(DeltaNet, most_beta=1.0),
            _each_of(DeltaNet, norm_eps=None),
            _each_of(Attention, rope=None),
        ),
        "olmo_hybrid-gqa-nope-bias-tied-float32": (_each_of(Attention, rope=Rope()),),
        "olmo3-gqa-yarn": (
            _each_layer(lambda s: {"window": None}),
            _each_layer(lambda s: {"rope": Rope(s.rope.theta)}),
        ),
        "olmoe-gqa-norm": (_routed(is_normalized=False),),
        "qwen2_moe-gqa-window": (
            _each_layer(lambda s: {"window": None}),
            _each_mixture(lambda e: {"has_shared_gate": False}),
        ),
        "qwen2_moe-mha-dense-layers": (_routed(is_normalized=True),),
        "qwen3_next-gqa-shared-experts": (
            lambda m: {"norm_offset": 0.0},
            _each_of(DeltaNet, gate="sigmoid"),
            _each_of(DeltaNet, most_beta=2.0),
            _each_of(Attention, rope=Rope()),
            _each_mixture(lambda e: {"has_shared_gate": False}),
        ),
        "qwen3_next-mha-listed-tied-float32": (_routed(is_normalized=True),),
        "qwen3_5-gqa-sections": (
            _each_of(DeltaNet, num_key_heads=4, key_width=3),  # whose neighbours share no key
            _each_of(Attention, rope=Rope()),
        ),
        "qwen3_5_moe-gqa-stacked": (_routed(is_normalized=False),),
        "qwen3_moe-mqa-bias-window": (_each_layer(lambda s: {"window": None}),),
        "gemma2-gqa-tied": (
            _each_layer(lambda s: {"score_cap": None}),
            lambda m: {"logit_cap": None},
            _each_layer(lambda s: {"scale": None}),
            _each_layer(lambda s: {"window": None}),
        ),
        "gemma3-gqa-linear-rope": (
            _each_layer(lambda s: {"scale": None}),
            _each_layer(lambda s: {"window": None}),
            _each_layer(lambda s: {"rope": Rope(s.rope.theta)}),
        ),
        "gemma4-gqa-inputs-sharing": (
            lambda m: {"layer_inputs": dataclasses.replace(m.layer_inputs, activation="silu")},
            lambda m: {"has_layer_scales": False},
            _each_layer(lambda s: {"has_value_norm": False}),
            _each_layer(lambda s: {"owner": 0} if s.owner == 1 else {}),
            _each_layer(
                lambda s: {"rope": Rope(s.rope.theta, share=0.25)} if s.rope.scaling else {}
            ),
        ),
        "gemma4-mha-mqa-experts-float32": (
            _routed(has_norm=False),
            _routed(has_factors=False),
            _each_layer(lambda s: {"rope": Rope(s.rope.theta)}),
        ),
        "llama-gqa-tied-rope3": (_each_layer(lambda s: {"rope": Rope(s.rope.theta)}),),
        "llama-gqa-yarn-bias": (
            _each_layer(lambda s: {"rope": Rope(s.rope.theta)}),
            _rescaled(attention_factor=1.0),
        ),
        "llama-mha-tied-yarn-scales-float32": (_rescaled(truncate=True), _rescaled(beta_fast=32.0)),
        "llama-mqa-dynamic": (_each_layer(lambda s: {"rope": Rope(s.rope.theta)}),),
        "mistral-mha-window-float32": (_each_layer(lambda s: {"window": None}),),
        "phi3-mha-window": (_each_layer(lambda s: {"window": None}),),
        "phi3-gqa-longrope-partial": (
            lambda m: {"max_context": 24},  # the original one: the short divisors
            _each_layer(lambda s: {"rope": Rope(s.rope.theta, None, s.rope.share)}),
        ),
        "phi3-mqa-tied-longrope-within-float32": (lambda m: {"max_context": 256},),
        "qwen2-mqa-window": (_each_layer(lambda s: {"window": None}),),
        "qwen3-mqa-bias-window": (_each_layer(lambda s: {"window": None}),),
        "smollm3-mha-window-float32": (
            _each_layer(lambda s: {"window": None}),
            _each_layer(lambda s: {"rope": Rope()}),
        ),
    }
)


# Of attention, of positions, of routers and of experts.
_VISIBLE_SOON = "gemma2-gqa-tied", "llama-gqa-yarn-bias", "olmoe-gqa-norm", "gpt_oss-gqa-limit"


@pytest.mark.quick_code
@pytest.mark.parametrize("name", _briefly(_VISIBLE, _VISIBLE_SOON))
def test_a_quirk_is_visible(name):
    model, _, _, expected = _load(name)
    for without in _VISIBLE[name]:
        found = _uncached_logits(name, dataclasses.replace(model, **without(model)))
        assert np.abs(found[0] - expected[0]).max() > 0.05


@pytest.mark.quick_code
@pytest.mark.parametrize("name", _briefly(_GREEDY, {*_CACHES} - {*_ALONE}))
def test_greedy_text(name):
    """Ten prompts of different lengths continue as transformers continues them, on chips that
    divide the model: two, or three where its heads are; and experts, where three divide them.
    """
    model, params, _, _ = _load(name)
    with np.load(_GOLDEN / name / "expected.npz") as arrays:
        prompts, expected = arrays["greedy_prompts"], arrays["greedy_tokens"]
    kinds = {kind for layer in model.pattern for kind in (layer.mixer, layer.ffn) if kind}
    mesh = Mesh(model=2 if all(kind.can_divide(2) for kind in kinds) else 3)
    if model.mixtures and model.mixtures[1] % 3 == 0 and mesh.model == 2:
        mesh = Mesh(model=2, expert=3)
    engine = fakes.engine(
        model, params, "one", False, mesh, max_seqs=4,
        max_context=64, decode_rows=(4,), prefill_chunks=(2,), chunk_tokens=16,
    )  # fmt: skip
    completions = engine.generate(
        [prompt[prompt >= 0].tolist() for prompt in prompts], fakes.greedy(expected.shape[1])
    )
    assert [completion.token_ids for completion in completions] == expected.tolist()


def _steps(name: str, fed: list[int] | None, each: int):
    lengths = [len(prompt) for prompt in _load(name)[2]]
    return _chunks(lengths, fed or lengths, each)


_OTHERS = sorted({*_NAMES} - {*_GREEDY})
_SECOND = [n for n in _OTHERS if resolve.resolve(str(_GOLDEN / n)).config.has_states]
# The parts of another checkpoint of the family, which llama's read for heads of every layout.
_OTHER_HEADS = (
    "deepseek_v32-mha-tied-float32", "gemma2-mha-untied-float32", "gemma2-mqa-no-cap-of-scores",
    "gemma3-mha-untied-float32-sharded", "gpt_oss-mqa-full", "mistral-mha-window-float32",
    "mistral-mqa-tied", "mixtral-mqa-window-all", "olmo2-gqa-tied-float32", "olmo2-mqa-bias",
    "olmo3-mha-tied-float32", "olmoe-mha-float32", "qwen2-mha-untied-float32",
    "qwen3-mha-untied-float32", "qwen3_moe-mqa-bias-window", "smollm3-mqa-untied-bias",
    *(name for name in _OTHERS if _family(name) in mixture_relatives.FAMILIES),
    *parallel_relatives.OTHERS, *dense_relatives.OTHERS,
)  # fmt: skip


@pytest.mark.quick_code
@pytest.mark.parametrize("name", _briefly(_NAMES, {*_NAMES} - {*_SECOND, *_OTHER_HEADS}))
def test_both_prompts_packed_in_one_step(name):
    """Then in steps that end inside of pages and chunks, each prompt at its own speed."""
    packed, shape = (
        _steps(name, None, 16),
        StepShape((0, 1), (9, 16)),
    )  # one chunk or more is padding
    assert len(packed) == 1
    _assert_close(_paged_logits(name, shape, packed, page_tokens=8), _load(name)[3])
    in_chunks = _steps(name, [21, 5], 11)
    assert len(in_chunks) > 3
    _assert_close(_paged_logits(name, shape, in_chunks, page_tokens=8), _load(name)[3])


_STEPWISE = ("llama-mqa-float32", "llama-mqa-dynamic", "llama-gqa-tied-rope3", "llama-mha-sharded")


@pytest.mark.quick_code
@pytest.mark.parametrize(
    "name", _briefly(sorted({*_STEPWISE, *_GREEDY} - {*_LIKE_OTHERS}), {*_STEPWISE, *_CACHES})
)
def test_token_by_token(name):
    """As decoding does, with a third row that is padding."""
    shape = StepShape((3, 1), (0, 16))
    found = _paged_logits(name, shape, _steps(name, [1, 1], 1), page_tokens=16)
    _assert_close(found, _load(name)[3])


@pytest.mark.parametrize(
    "name",
    [
        "llama-gqa-tied-rope3",
        "gemma3-mqa",
        "gemma2-gqa-tied",
        "gpt2-mha-tied-bare",
        "olmo2-mqa-bias",
    ],
)
def test_deterministic_attention(name):
    shape = StepShape((0, 1), (3, 16))
    found = _paged_logits(
        name, shape, _steps(name, [32, 16], 16), page_tokens=4, deterministic=True
    )
    _assert_close(found, _load(name)[3])
