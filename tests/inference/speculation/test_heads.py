"""Heads draft what their training computes: with pages and slots as without."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import heads
from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.model import ModelConfig
from inference.checkpoints.native import config_file
from inference.runtime.model_runner import cache_arguments
from inference.sampling import parameters
from inference.speculation import drafting, eagle, medusa, proposers
from inference.speculation.proposer import DraftInputs, SampledStep
from layers import decoder, kv_cache
from layers.ragged import Ragged, Rectangle, contiguous
from tests import compiling, fakes

pytestmark = pytest.mark.quick_code

TARGET, DEEPSEEK = fakes.llama(), fakes.deepseek()
OWN, DEEP = (
    {field.name: getattr(model, field.name) for field in dataclasses.fields(ModelConfig)}
    for model in (TARGET, DEEPSEEK)
)
LAYER = OWN | {"num_layers": 1, "pattern": TARGET.pattern[:1]}
IDS = tuple(range(3, 131, 2))
HEADS = {
    "last state": heads.Eagle(**LAYER),
    "fused": heads.Eagle(**LAYER, features=(1, 2), proposed_ids=IDS),
    "medusa": heads.Medusa(**OWN | {"num_layers": 0, "pattern": ()}, num_heads=3, proposed_ids=IDS),
    "mtp": heads.Eagle(
        **DEEP | {"num_layers": 1, "pattern": DEEPSEEK.layers[-1:]}, shares_head=True,
        skips_first=True,
    ),
}  # fmt: skip
K, PAGE = 3, 8
TOKENS = np.random.default_rng(0).integers(0, 131, 22)


@functools.cache
def reader(target, features):
    """What `target` makes of all tokens: what it embeds, and the outputs of layers."""

    def read(values, tokens_T):
        rows = contiguous(1, len(tokens_T))
        x_TD = decoder.embedded(values, target, tokens_T, rows)
        hidden_TD, found, _, _ = decoder.layers(values, target, x_TD, rows, features=features)
        return x_TD, hidden_TD, found

    return compiling.jit(read)


def padded(rows):
    """As many as there are tokens, so that programs fit: nothing sees what comes behind it."""
    return np.concatenate([rows, np.zeros_like(rows[:1]).repeat(len(TOKENS) - len(rows), 0)])


def seen(target, values, tokens, features):
    found = reader(target, features)(values, padded(tokens))
    return jax.tree.map(lambda x_TD: x_TD[: len(tokens)], found)


def by_training(target, own, values, known):
    """Drafts from whole sequences without a cache; `known` tokens have the target's states."""
    if isinstance(own, heads.Medusa):
        _, hidden_TD, _ = seen(target, values, TOKENS[:known], ())
        last = hidden_TD[-1:]
        blocks = (medusa.block(weight, last) for weight in values["draft"]["blocks"])
        return [int(drafting.logits(values["draft"], own, x).argmax()) for x in blocks]
    _, hidden_TD, found = seen(target, values, TOKENS[:known], own.features)
    states = np.asarray(eagle.fused(values["draft"], own, hidden_TD, found))
    tokens, drafts = TOKENS[: known + 1], []

    @compiling.jit
    def draft(values, tokens_T, before_TD, at):
        rows = contiguous(1, len(tokens_T))
        x_TD = decoder.embedded(values, target, tokens_T, rows)
        inputs_TD, _ = eagle.inputs(values["draft"], own, x_TD, before_TD, rows.position_T)
        hidden_TD, _, _, _ = decoder.layers(values["draft"], own, inputs_TD, rows)
        last = hidden_TD[at][None]
        if own.shares_head:
            return last, decoder.logits(values, target, last).argmax()
        return last, drafting.logits(values["draft"], own, last).argmax()

    for _ in range(K):
        before = np.concatenate([np.zeros_like(states[:1]), states])
        last, drafted = draft(values, padded(tokens), padded(before), len(tokens) - 1)
        drafts.append(int(drafted))
        states, tokens = np.concatenate([states, last]), np.append(tokens, drafts[-1])
    return drafts


def rectangle(starts, width, tables):
    """Consecutive tokens of one sequence, some rows of them."""
    rows = len(starts)
    position = jnp.asarray(starts, jnp.int32)[:, None] + jnp.arange(width, dtype=jnp.int32)
    tables = tuple(jnp.tile(table, (rows, 1)) for table in tables)
    return Rectangle(jnp.zeros(rows, jnp.int32), position, jnp.ones((rows, width), bool), tables)


@pytest.mark.parametrize("name", [
    pytest.param("last state", marks=pytest.mark.long), "fused", "medusa",
    pytest.param("mtp", marks=pytest.mark.long),
])  # fmt: skip
def test_they_draft_what_training_computes(name):
    own, target = HEADS[name], DEEPSEEK if name == "mtp" else TARGET
    kind = "medusa" if name == "medusa" else "eagle"
    engine = EngineConfig.of(
        max_seqs=1, page_tokens=PAGE, cache_bytes=1 << 20, num_drafts=K, proposer=kind
    )
    config = Config(target, engine, draft=own)
    values = fakes.real_params(target) | {"draft": fakes.real_params(own)}
    if kind == "medusa":  # whose blocks begin as zeros
        rng = np.random.default_rng(1)
        blocks = [jnp.asarray(rng.normal(size=(24, 24)), jnp.float32) for _ in range(K)]
        values["draft"]["blocks"] = tuple(blocks)
    proposer = proposers.of(config, "reference")
    cache = kv_cache.init(*cache_arguments(config, "reference"))
    pages = jnp.arange(1, 1 + config.page_columns, dtype=jnp.int32)[None]
    tables = tuple(pages for _ in config.cached_model.page_groups)
    state, done = jnp.asarray(proposer.init()), 0
    # A step with two chunks of the prompt, one with the rest, one that verifies three drafts, of
    # which one is right.
    for starts, width, kept in (((0, 6), 6, 6), ((12,), 4, 4), ((16,), 1 + K, 2)):
        end = starts[-1] + width
        fed = TOKENS[:end].copy()
        fed[starts[-1] + kept :] = 5  # rejected
        _, hidden_TD, features = seen(target, values, fed, proposer.features)
        step, rows = slice(starts[0], end), len(starts)
        after = SampledStep(
            Ragged((rectangle(starts, width, tables),)), jnp.asarray(fed[step]), hidden_TD[step],
            tuple(x_TD[step] for x_TD in features), jnp.array([kept] * rows),
            jnp.zeros(rows, jnp.int32), jnp.array([done + kept] * rows),
            jnp.zeros((rows, 1 + K), jnp.int32), jnp.array([1] * rows),
        )  # fmt: skip
        observe = functools.partial(proposer.observe, step=after)
        cache, state = compiling.call(observe, values, cache, state)
        done = starts[-1] + kept
    sampling = jax.tree.map(jnp.asarray, parameters.init(1, 131))
    inputs = DraftInputs(
        rectangle((done,), 1 + K, tables), jnp.asarray(TOKENS[done : done + 1]), sampling, None,
        None, jnp.zeros((0, 0), jnp.int32), greedy=True,
    )  # fmt: skip

    @compiling.jit
    def propose(state):
        return proposer.propose(values, cache, state, inputs)[1].tokens_Rk[0]

    found, others = propose(state).tolist(), propose(jnp.zeros_like(state)).tolist()
    assert found == by_training(target, own, values, done)
    assert others != found and len(set(found)) > 1


def test_what_is_not_fed_has_no_children():
    """In a row of four nodes: the newest token and the three surest behind it."""
    own = HEADS["fused"]
    engine = EngineConfig.of(
        max_seqs=1, page_tokens=PAGE, cache_bytes=1 << 20, proposer="eagle", num_drafts=13,
        tree_levels=3, tree_branches=5,
    )  # fmt: skip
    config = Config(TARGET, engine, draft=own)
    values = fakes.real_params(TARGET) | {"draft": fakes.real_params(own)}
    proposer = proposers.of(config, "reference")
    cache = kv_cache.init(*cache_arguments(config, "reference"))
    pages = jnp.arange(1, 1 + config.page_columns, dtype=jnp.int32)[None]
    whole = rectangle((0,), 14, tuple(pages for _ in config.cached_model.page_groups))
    inputs = DraftInputs(
        whole, jnp.asarray(TOKENS[:1]), jax.tree.map(jnp.asarray, parameters.init(1, 131)), None,
        None, jnp.zeros((0, 0), jnp.int32), greedy=True,
    )  # fmt: skip
    state = jnp.asarray(np.random.default_rng(2).normal(size=proposer.init().shape), jnp.float32)
    is_in_short = []

    @compiling.jit
    def propose(length):
        row = dataclasses.replace(whole, valid_YW=jnp.arange(14)[None] < length)
        asked_in_row = dataclasses.replace(inputs, decode=row)
        _, drafts = proposer.propose(values, cache, state, asked_in_row)
        return drafts.tokens_Rk, drafts.parent_Rk[0]

    for length in (14, 4):
        tokens_Rk, parents = propose(length)
        parents = parents.tolist()
        fed = [0, *(n for n, parent in enumerate(parents, 1) if parent == 0)][:4]
        assert (np.asarray(tokens_Rk) >= 0).all()
        is_in_short.append(set(parents) <= set(fed))
    assert is_in_short == [False, True]


@pytest.mark.parametrize("name", HEADS)
def test_they_are_kept_as_json(name):
    own = HEADS[name]
    assert config_file.from_json(config_file.to_json(own), "here") == own


@pytest.mark.parametrize("changes, expected", [
    ({"draft": None}, "proposer=medusa: goes with Medusa heads"),
    ({"draft": HEADS["fused"]}, "goes with Medusa heads, not with EAGLE heads"),
    ({"draft": TARGET}, "goes with Medusa heads, not with a draft model"),
    ({"draft": dataclasses.replace(HEADS["medusa"], num_heads=2)}, "has 2 heads: so many drafts"),
    ({"draft": dataclasses.replace(HEADS["medusa"], width=25)}, "reads hidden states of 25"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(changes, expected):
    with pytest.raises(InputError, match=expected):
        Config(TARGET, EngineConfig.of(num_drafts=3, proposer="medusa"), **changes)


@pytest.mark.parametrize("changes, expected", [
    ({"num_heads": 0}, "num_heads is from 1 to 31"),
    ({"proposed_ids": (1, 1)}, "different ids from 0 to 130"),
    ({"proposed_ids": (131,)}, "different ids from 0 to 130"),
])  # fmt: skip
def test_heads_that_make_no_sense_are_refused(changes, expected):
    with pytest.raises(InputError, match=expected):
        dataclasses.replace(HEADS["medusa"], **changes)
    with pytest.raises(InputError, match="shares_head goes without proposed_ids"):
        dataclasses.replace(HEADS["fused"], shares_head=True)
