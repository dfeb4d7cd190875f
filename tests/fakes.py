"""Models whose tokens are known beforehand, and tiny real ones: what the engine's tests run.

The fake model keeps integers in its channels, so a token follows from its history in plain Python
(`next_token`). Its four layers cover the cache algebra: pages, a recurrent state, pages with a
window, and a reader of an earlier layer's pages.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.cache import CacheSpec, recurrent, shared
from configs.engine import Config, EngineConfig
from configs.kinds.attention import Attention, sharing
from configs.kinds.combined import NoMixer, Parallel
from configs.kinds.compressed import Compressed
from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated, Plain
from configs.kinds.latent import Indexer, Latent
from configs.kinds.layer_inputs import LayerInputs
from configs.kinds.recurrent.delta_net import DeltaNet
from configs.kinds.recurrent.linear_attention import LinearAttention
from configs.kinds.recurrent.mamba import Mamba2
from configs.kinds.recurrent.s4 import S4
from configs.kinds.recurrent.selective import Mamba
from configs.kinds.recurrent.short_conv import ShortConv
from configs.kinds.rope import Dynamic, Proportional, Rope, Yarn
from configs.mesh import ONE_CHIP, Mesh
from configs.model import LayerSpec, ModelConfig
from configs.prefill import TOGETHER
from inference import engine as engines
from inference.request import SamplingParams
from inference.runtime.executables import Executables
from inference.sampling import sampler
from inference.scheduling import sequence
from inference.scheduling.step_shapes import StepShape
from layers import decoder, kv_cache, page_rows, registry
from layers.params import init
from tests import compiling
from tests.kinds import Caching

# --- a fake model: its channels are token, 1, total and 0; each layer adds to the total -----------

VOCAB, WINDOW, ELEMENTS = 61, 5, 3


def _read(x_TD):
    """Token and total as integers: the norm before a mixer scales all channels alike."""
    x_TD = jnp.round(x_TD / x_TD[:, 1:2]).astype(jnp.int32)
    return x_TD[:, 0], x_TD[:, 2]


def _add(total_T, addend_T):
    """What makes the residual's total (total + addend) mod V."""
    new_T = (total_T + addend_T) % VOCAB - total_T
    return jnp.zeros((new_T.shape[0], 4)).at[:, 2].set(new_T.astype(jnp.float32))


def _sum_pages(pages, context, weigh):
    """Sum over the visible positions of weigh(elements, position), i32[T]."""
    sums = []
    for rectangle in context.ragged.rectangles:
        stored = page_rows.decode(pages[rectangle.tables[context.group]])
        stored_YSX = stored.reshape(len(stored), -1, ELEMENTS).astype(jnp.int32)
        at_S, now_YW1 = jnp.arange(stored_YSX.shape[1]), rectangle.position_YW[:, :, None]
        is_seen_YWS = (at_S <= now_YW1) & (at_S > now_YW1 - (context.spec.window or 1 << 30))
        value_YS = weigh(*jnp.moveaxis(stored_YSX, 2, 0), at_S)
        sums.append(jnp.where(is_seen_YWS, value_YS[:, None], 0).sum(-1))
    return context.ragged.pack(sums)


def paged(x_TD, leaf, context):
    """Three elements a token; adds a sum over the visible ones."""
    token_T, total_T = _read(x_TD)
    position_T = context.ragged.position_T
    row_TX = jnp.stack([token_T, position_T % 7, token_T * position_T % 11], axis=1)
    pages = page_rows.write(leaf.pages, row_TX, context.ragged, context.group)
    sum_T = _sum_pages(pages, context, lambda a, b, c, at: a + 2 * b + 3 * c)
    return _add(total_T, sum_T), leaf.with_pages(pages)


def sharer(x_TD, leaf, context):
    """Nothing of its own; adds another sum over an earlier layer's pages."""
    assert not context.is_owner
    sum_T = _sum_pages(leaf.pages, context, lambda a, b, c, at: a * (at % 5))
    return _add(_read(x_TD)[1], sum_T), leaf


def counter(x_TD, state, context):
    """A checksum of the history in order; the one after position p lies at p mod (1 + k)."""
    ragged, (token_T, total_T) = context.ragged, _read(x_TD)
    slots = [jnp.broadcast_to(r.slot_Y[:, None], r.position_YW.shape) for r in ragged.rectangles]

    def feed(state, one):
        token, p, slot, valid = one
        before = state[
            slot, (p - 1) % state.shape[1], 0
        ]  # 0 at first, whichever sequence had the slot
        after = (3 * before + token + p) % 97
        at = (slot, p % state.shape[1], 0)
        return state.at[at].set(jnp.where(valid, after, state[at])), after

    rows = (token_T, ragged.position_T, ragged.pack(slots), ragged.valid_T)
    state, sum_T = jax.lax.scan(feed, state, rows)
    return _add(total_T, sum_T.astype(jnp.int32)), state


def apply(params, config, kind, x_TD, leaf, context):
    """Any of the three."""
    if kind.spec.states:
        out_TD, state = counter(x_TD, leaf.states[0], context)
        return out_TD, kv_cache.with_states(leaf, state)
    return (sharer if kind.spec.owner is not None else paged)(x_TD, leaf, context)


registry.register(Caching, apply)


def next_token(history: Sequence[int]) -> int:
    """What the fake model says after these tokens, by hand."""
    total, checksum = 0, 0
    first_seen = len(history) - WINDOW
    for p, token in enumerate(history):
        value = token + 2 * (p % 7) + 3 * (token * p % 11)
        total += value + value * (p >= first_seen) + token * (p % 5)
        checksum = (3 * checksum + token + p) % 97
    return (total + checksum) % VOCAB


def continuation(history: Sequence[int], n: int) -> list[int]:
    """The next n tokens, by hand."""
    tokens = list(history)
    for _ in range(n):
        tokens.append(next_token(tokens))
    return tokens[len(history) :]


def fake_model(**changes: Any) -> ModelConfig:
    """Pages, a state, pages with a window, and a sharer of the first layer: two page groups."""
    specs = (
        CacheSpec(1, ELEMENTS),
        recurrent((1,)),
        CacheSpec(1, ELEMENTS, window=WINDOW),
        shared(0),
    )
    pattern = tuple(LayerSpec(Caching(spec), None) for spec in specs)
    fields = dict(width=4, num_layers=4, max_context=128, pattern=pattern, dtype="float32")
    return ModelConfig("fake", "fake", VOCAB, **fields | changes)


def fake_params(model: ModelConfig) -> Any:
    """Embeds token t as (t, 1, 0, 0); the logit of v is -(v - total)^2 up to scale and offset."""
    params = init(decoder.param_infos(model))
    v = jnp.arange(VOCAB, dtype=jnp.float32)
    zero, one = jnp.zeros_like(v), jnp.ones_like(v)
    return params | {
        "embed": {"table": jnp.stack([v, one, zero, zero], axis=1)},
        "head": {"table": jnp.stack([zero, -v * v, 2 * v, zero], axis=1)},
    }


# --- tiny real models -----------------------------------------------------------------------------


def llama(dtype: str = "float32", **changes: Any) -> ModelConfig:
    """Two layers of grouped-query attention with odd sizes; `changes` are fields of the model or of
    its layers' kinds.
    """
    layer = LayerSpec(Attention(num_heads=4, num_kv_heads=2, head_width=8), Gated(40))
    model = ModelConfig(
        "tiny-llama", "llama", 131, width=24, num_layers=2, max_context=256, pattern=(layer,),
        dtype=dtype,
    )  # fmt: skip
    return _changed(model, changes)


def gemma(dtype: str = "float32", **changes: Any) -> ModelConfig:
    """Two windowed layers and a global one, with every quirk of Gemma 3: two page groups."""
    local = Attention(num_heads=3, num_kv_heads=1, head_width=10, window=20, qk_norm="head")
    world = dataclasses.replace(local, window=None, rope=Rope(theta=1e6))
    ffn = Gated(40, activation="gelu_tanh")
    model = ModelConfig(
        "tiny-gemma", "gemma3", 131, width=24, num_layers=3, max_context=256, dtype=dtype,
        pattern=(LayerSpec(local, ffn),) * 2 + (LayerSpec(world, ffn),),
        norm_offset=1.0, norm_eps=1e-6, post_norms=True, embedding_scale=24**0.5,
    )  # fmt: skip
    return _changed(model, changes)


KINDS = "full", "windows", "shared"


def of_kind(kind: str, num_heads: int = 8, num_kv_heads: int = 8) -> ModelConfig:
    """Full attention, two windowed layers beside a global one, or a third layer that reads the keys
    and values of the first.
    """
    if kind == "windows":
        return gemma(num_heads=num_heads, num_kv_heads=num_kv_heads)
    model = llama(num_heads=num_heads, num_kv_heads=num_kv_heads)
    if kind == "full":
        return model
    own, ffn = model.pattern[0].mixer, model.pattern[0].ffn
    mixers = own, own, dataclasses.replace(own, owner=0)
    pattern = tuple(LayerSpec(mixer, ffn) for mixer in mixers)
    return dataclasses.replace(model, pattern=pattern, num_layers=3)


def quirks(dtype: str = "float32", **changes: Any) -> ModelConfig:
    """Layer norms, biases, caps, a plain feed-forward, growing and missing RoPE, a window."""
    rotating = Attention(
        num_heads=4, num_kv_heads=2, head_width=8, rope=Rope(500.0, Dynamic(4.0, 16), 0.75),
        biases=("qkv", "out"), score_cap=2.0,
    )  # fmt: skip
    still = dataclasses.replace(rotating, rope=None, window=20)
    model = dataclasses.replace(
        llama(dtype), name="tiny-quirks", norm="layer", logit_cap=6.0,
        pattern=(LayerSpec(rotating, Plain(40, has_bias=True)),
                 LayerSpec(still, Gated(40, has_bias=True))),
    )  # fmt: skip
    return _changed(model, changes)


def side_by_side(dtype: str = "float32", **changes: Any) -> ModelConfig:
    """Feed-forwards beside attention, by one norm and by two; norms of each head by weights of its
    own, none with a bias; a bias of the head.
    """
    rotating = Attention(
        num_heads=4, num_kv_heads=2, head_width=8, rope=Rope(500.0, share=0.75, neighbours=True),
        biases=("qkv", "out"), qk_norm="each",
    )  # fmt: skip
    local, ffn = dataclasses.replace(rotating, window=20), Plain(40, "gelu", has_bias=True)
    model = dataclasses.replace(
        llama(dtype), name="tiny-side-by-side", norm="layer_unbiased", has_head_bias=True,
        pattern=(LayerSpec(rotating, ffn, parallel_norms=1),
                 LayerSpec(local, Gated(40), parallel_norms=2)),
    )  # fmt: skip
    return _changed(model, changes)


def deepseek(dtype: str = "float32", **changes: Any) -> ModelConfig:
    """DeepSeek-V3 in small: latent attention with compressed queries and stretched positions, a
    dense layer, then experts in groups with learned offsets, and a shared one.
    """
    rope = Rope(100.0, Yarn(4.0, 32, beta_fast=4.0), neighbours=True)
    latent = Latent(
        num_heads=4, rank=12, rope_width=4, nope_width=6, value_width=8, query_rank=10, rope=rope
    )
    router = Router(
        "sigmoid", scale=2.5, has_offsets=True, num_groups=4, top_groups=2, group_best=2
    )
    experts = Experts(8, 3, 20, router, shared_width=20)
    model = ModelConfig(
        "tiny-deepseek", "deepseek_v3", 131, width=24, num_layers=3, max_context=256, dtype=dtype,
        pattern=(LayerSpec(latent, Gated(40)),) + (LayerSpec(latent, experts),) * 2,
    )  # fmt: skip
    return _changed(model, changes)


def deepseek_v32(dtype: str = "float32", **changes: Any) -> ModelConfig:
    """`deepseek` over the 24 tokens that an indexer chooses."""
    model = deepseek(dtype, **changes)
    return dataclasses.replace(model.with_kinds(indexer=Indexer(3, 10, 24)), family="deepseek_v32")


def gpt_oss(dtype: str = "float32", **changes: Any) -> ModelConfig:
    """gpt-oss in small: sinks, every other layer with a window, biases, clamped experts."""
    full = Attention(
        num_heads=4, num_kv_heads=2, head_width=8, biases=("qkv", "out"), has_sinks=True
    )
    sliding = dataclasses.replace(full, window=20)
    experts = Experts(
        4, 2, 20, Router(has_bias=True), activation="quick_gelu", has_bias=True, limit=0.7,
        up_offset=1.0,
    )  # fmt: skip
    model = ModelConfig(
        "tiny-gpt-oss", "gpt_oss", 131, width=24, num_layers=2, max_context=256, dtype=dtype,
        pattern=(LayerSpec(sliding, experts), LayerSpec(full, experts)),
    )  # fmt: skip
    return _changed(model, changes)


def delta(dtype: str = "float32", **changes: Any) -> ModelConfig:
    """States that tokens correct, with a decay a head and one a key channel, beside attention with
    an output gate and latent attention without positions, whose layer norms what it adds.
    """
    mixers = (
        DeltaNet(24, 12, key_width=4, value_width=3, most_beta=2.0),
        DeltaNet(12, 12, 4, 4, decay_rank=5, gate_rank=7, gate="sigmoid"),
        Attention(4, 2, 8, rope=Rope(share=0.5), qk_norm="head", has_output_gate=True),
        Latent(4, 10, 4, 6, 8, rope=None, has_bias=True),
    )
    pattern = [LayerSpec(mixer, Gated(40), isinstance(mixer, Latent)) for mixer in mixers]
    model = ModelConfig(
        "tiny-delta", "kimi_linear", 131, width=24, num_layers=4, max_context=256, dtype=dtype,
        pattern=tuple(pattern), norm_offset=1.0,
    )  # fmt: skip
    return _changed(model, changes)


def jamba(dtype: str = "float32", **changes: Any) -> ModelConfig:
    """Jamba in small: selective scans and experts, then attention without positions."""
    mamba = Mamba(channels=48, state_width=6, step_rank=3, norms="weighted")
    attention = Attention(num_heads=4, num_kv_heads=2, head_width=8, rope=None)
    experts = Experts(4, 2, 20, Router(is_normalized=False))
    model = ModelConfig(
        "tiny-jamba", "jamba", 131, width=24, num_layers=2, max_context=256, dtype=dtype,
        pattern=(LayerSpec(mamba, experts), LayerSpec(attention, Gated(40))),
    )  # fmt: skip
    return _changed(model, changes)


def linear(dtype: str = "float32", **changes: Any) -> ModelConfig:
    """What keeps a state without choosing what enters it, and a window: a short convolution, linear
    attention with each map, S4; the residual stream of one layer goes on from its norms.
    """
    taylor = LinearAttention(12, key_width=3, value_width=2, feature_map="taylor")
    lightning = LinearAttention(12, key_width=4, value_width=3, decay=0.6, has_gated_norm=True)
    mixers = (
        ShortConv(24, conv_width=3, has_bias=True), lightning,
        Attention(num_heads=4, num_kv_heads=2, head_width=8, window=20), taylor,
        dataclasses.replace(taylor, feature_map="elu"), S4(24, state_width=5),
    )  # fmt: skip
    factors = (), ((1.5, 0.8), (1.2, 1.1)), (), (), (), ()
    model = ModelConfig(
        "tiny-linear", "minimax", 131, width=24, num_layers=len(mixers), max_context=256,
        dtype=dtype, pattern=tuple(
            LayerSpec(mixer, Gated(40), factors=own)
            for mixer, own in zip(mixers, factors, strict=True)
        ),
    )  # fmt: skip
    return _changed(model, changes)


def gemma4(dtype: str = "float32", **changes: Any) -> ModelConfig:
    """Gemma 4 in small: wider heads without a window, whose values are keys; experts beside a dense
    feed-forward; upper layers that read the caches of lower ones; inputs of each layer.

    Drawn weights make some vectors short, and with the family's epsilon of 1e-6 their norms turn a
    weight's last bit into 4e-5 of a score; with this one into 1e-5 at most.
    """
    local = Attention(4, 2, 8, window=20, qk_norm="head", has_value_norm=True, scale=1.0)
    world = dataclasses.replace(
        local, num_kv_heads=1, head_width=12, window=None, rope=Rope(1e4, Proportional(0.5)),
        has_values=False,
    )  # fmt: skip
    experts = Experts(
        4, 2, 20, Router(has_norm=True, has_factors=True), shared_width=28,
        activation="gelu_tanh", has_norms=True,
    )  # fmt: skip
    ffns = experts, experts, Gated(56, "gelu_tanh"), Gated(56, "gelu_tanh")
    model = ModelConfig(
        "tiny-gemma4", "gemma4", 131, width=24, num_layers=4, max_context=256, dtype=dtype,
        pattern=tuple(map(LayerSpec, sharing([local, world] * 2, 2), ffns)), norm_eps=1e-3,
        post_norms=True, embedding_scale=24**0.5, layer_inputs=LayerInputs(6),
        has_layer_scales=True,
    )  # fmt: skip
    return _changed(model, changes)


def compressed(dtype: str = "float32", **changes: Any) -> ModelConfig:
    """DeepSeek-V4's attention in small: one layer whose queries choose among entries of 4 tokens,
    one that reads an entry for every 8; between them one with keys and values of each token.
    """
    rope = Rope(100.0, Yarn(4.0, 32, beta_fast=4.0, attention_factor=1.0), neighbours=True)
    sparse = Compressed(
        4, head_width=12, query_rank=10, rope_width=4, groups=2, group_rank=7, window=12, stride=4,
        overlaps=True, rope=rope, indexer=Indexer(3, 8, 6),
    )  # fmt: skip
    heavy = dataclasses.replace(sparse, stride=8, overlaps=False, indexer=None)
    own = Attention(num_heads=4, num_kv_heads=2, head_width=8)
    model = dataclasses.replace(
        llama(dtype), name="tiny-compressed", num_layers=3,
        pattern=tuple(LayerSpec(mixer, Gated(40)) for mixer in (sparse, own, heavy)),
    )  # fmt: skip
    return _changed(model, changes)


def every_cache(dtype: str = "float32", **changes: Any) -> ModelConfig:
    """Full attention, a window, one beside first tokens, chunks, readers of the first and of the
    third, latents and their reader: five page groups.
    """
    own = Attention(num_heads=4, num_kv_heads=2, head_width=8)
    latent = Latent(4, rank=12, rope_width=4, nope_width=6, value_width=8)
    mixers = (
        own, dataclasses.replace(own, window=20),
        dataclasses.replace(own, window=12, first_tokens=4),
        dataclasses.replace(own, window=24, chunked=True), dataclasses.replace(own, owner=0),
        dataclasses.replace(own, owner=2), latent, dataclasses.replace(latent, owner=6),
    )  # fmt: skip
    model = dataclasses.replace(
        llama(dtype), name="tiny-caches", num_layers=len(mixers),
        pattern=tuple(LayerSpec(mixer, Gated(40)) for mixer in mixers),
    )  # fmt: skip
    return _changed(model, changes)


def hybrid(dtype: str = "float32", **changes: Any) -> ModelConfig:
    """A state beside attention in one layer, a state alone, and two layers without a mixer: a plain
    feed-forward's, and one of experts behind a latent; everything is scaled.
    """
    heads = Attention(num_heads=4, num_kv_heads=2, head_width=8, key_scale=0.8)
    state = Mamba2(
        4, 6, 5, num_groups=2, biases=("in", "conv"), norm_width=12, step_limits=(0.1, 0.7),
        part_scales=(0.8, 1.2, 0.9, 1.1, 0.7),
    )  # fmt: skip
    router = Router("sigmoid", has_offsets=True, num_groups=2, group_best=2, top_groups=1)
    experts = Experts(
        8, 2, 12, router, 14, activation="relu2", is_gated=False, latent_width=10, shared_bias=True
    )
    both = Parallel(heads, state, in_scales=(1.2, 0.9), out_scales=(0.7, 1.1))
    alone = dataclasses.replace(state, norm_width=None, norms_first=True, biases=("out",))
    model = dataclasses.replace(
        llama(dtype), name="tiny-hybrid", num_layers=4, residual_scale=0.9, logit_scale=1.5,
        pattern=(
            LayerSpec(both, Gated(40, gate_scale=0.8, down_scale=1.2)), LayerSpec(alone, None),
            LayerSpec(NoMixer(), Plain(36, "relu2")), LayerSpec(NoMixer(), experts),
        ),
    )  # fmt: skip
    return _changed(model, changes)


def _changed(model: ModelConfig, changes: dict[str, Any]) -> ModelConfig:
    own = {field.name for field in dataclasses.fields(ModelConfig)}
    model = model.with_kinds(**{k: v for k, v in changes.items() if k not in own})
    return dataclasses.replace(model, **{k: v for k, v in changes.items() if k in own})


@functools.cache
def real_params(model: ModelConfig) -> Any:
    """Random parameters, with an untied head: greedy text does not repeat its last token."""
    params = init(decoder.param_infos(model), seed=3)
    has_biases = any(mixer.biases for mixer in model.mixers(Attention)) or model.mixtures
    shift = 0.1 if has_biases else 0.0  # biases are 0 at first

    def changed(leaf: jax.Array) -> jax.Array:
        host = np.asarray(leaf)  # JAX would compile a program for each shape
        number = host.dtype.type
        return jnp.asarray(host * number(2) if host.ndim > 1 else host + number(shift))

    return jax.tree.map(changed, params)


# --- engines --------------------------------------------------------------------------------------

_executables: dict[Any, Executables] = {}

# What the scheduler alone knows of: engines that differ in these run the same executables.
_SCHEDULING = (
    "policy", "max_wait_s", "chunked_prefill", "prefill_budget", "max_prefill_seqs", "prefix_cache",
    "max_overtakes", "preemption", "swap_bytes", "overlap", "overcommit", "seed",
)  # fmt: skip


def forget_programs() -> None:
    """What engines compiled is not kept for engines to come."""
    _executables.clear()


def engine(
    model: ModelConfig,
    params: Any = None,
    shapes: str = "riding",
    draws: bool = True,
    mesh: Mesh = ONE_CHIP,
    **settings: Any,
) -> engines.Engine:
    """An engine; engines of equal configuration share their executables.

    The fewer step shapes, the fewer compilations: where prompts do not run alone they always ride
    on decode rows, unless `shapes` is "all"; "one" shape does for every step, scoring included.
    Without `draws` it is for greedy requests alone: the branch of a step that only rows with a
    temperature take, half of its code, is left empty.
    """
    arguments = {name: settings.pop(name) for name in ("tokenizer", "eos_ids") if name in settings}
    prefill, draft = settings.pop("prefill", TOGETHER), settings.pop("draft", None)
    config = Config(model, EngineConfig.of(**settings), mesh, prefill, draft)
    is_fake = model.family == "fake"
    if params is None:
        params = fake_params(model) if is_fake else real_params(model)
    made = engines.Engine(config, params, **arguments)
    same = EngineConfig.of(**{k: v for k, v in settings.items() if k not in _SCHEDULING})
    executables = made.model_runner.executables
    if not draws:
        executables._lower_step = _without_draws(executables._lower_step)
    own_shapes = config.num_snapshots, draws, compiling.is_quick()
    chips = prefill if prefill.chips else TOGETHER  # prompts elsewhere change no program here
    key = Config(model, same, mesh, chips, draft), *own_shapes
    made.model_runner.executables = _executables.setdefault(key, executables)
    if shapes != "all" and made.config.engine.scheduling.chunked_prefill:
        riding = tuple(shape for shape in made.scheduler.shapes if shape.decode[0])
        made.scheduler.shapes = riding[-1:] if shapes == "one" else riding
    if prefill.chips:
        runner, scheduler = made._prefill.model_runner, made._prefill.scheduler
        shared = _executables.setdefault(("prefill", *key), runner.executables)
        runner.executables = shared
        scheduler.shapes = scheduler.shapes[-1:] if shapes == "one" else scheduler.shapes
    return made


def _without_draws(lower_step: Any) -> Any:
    def lower_greedy(shape: StepShape) -> Any:
        with no_draws():
            return lower_step(shape)

    return lower_greedy


@contextlib.contextmanager
def no_draws() -> Iterator[None]:
    """Steps traced in this context are for greedy requests alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "_draw", lambda x_QV, *_: jnp.zeros(len(x_QV), jnp.int32))
        yield


@contextlib.contextmanager
def slow_compiler(seconds: float) -> Iterator[None]:
    """Each shape of a step takes so much longer to compile in this context."""
    lower_step = Executables._lower_step

    def lower_slowly(executables: Executables, shape: StepShape) -> Any:
        time.sleep(seconds)
        return lower_step(executables, shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executables, "_lower_step", lower_slowly)
        yield


def drain(engine: engines.Engine, before_step: Any = lambda: None, limit: int = 2000) -> None:
    """Steps until nothing is left to do, with the books checked after every step."""
    for _ in range(limit):
        if not engine.scheduler.has_work:
            return
        before_step()
        engine.step()
        engine.scheduler.check_integrity()
        if engine.config.prefill.chips:
            engine._prefill.scheduler.check_integrity()
    raise AssertionError(f"{limit} steps were not enough")


def drain_disturbed(engine: engines.Engine, preempt_every: int, restart_every: int) -> None:
    """Runs an engine until it is empty; every so many steps a running request is preempted, or the
    engine starts over. 0: never.
    """
    steps, rng = 0, np.random.default_rng(0)

    def disturb() -> None:
        nonlocal steps
        steps += 1
        running = engine.scheduler.running
        if preempt_every and steps % preempt_every == 0 and running:
            engine.scheduler.preempt(running[rng.integers(len(running))])
        if restart_every and steps % restart_every == 0:
            engine.rebuild()

    drain(engine, disturb)


def sequence_of(engine: engines.Engine, id: int) -> sequence.Sequence:
    """The host's side of a request."""
    sequences = engine._requests[id].group.sequences
    return next(one for one in sequences if one.id == id)


def prompts(lengths: Sequence[int], vocab: int = VOCAB, seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, size=n).tolist() for n in lengths]


def greedy(n: int, **more: Any) -> SamplingParams:
    """Greedy decoding of exactly n tokens, unless something else ends it."""
    return dataclasses.replace(SamplingParams(max_new_tokens=n), **more)
