"""Published EAGLE-3 heads draft as the code of speculators does (`tests/golden/tiny_eagle3.py`)."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from configs import presets
from configs.engine import Config
from configs.errors import InputError
from inference.checkpoints import convert, resolve
from inference.engine import Engine
from inference.runtime.model_runner import cache_arguments
from inference.speculation import eagle, proposers
from layers import decoder, kv_cache
from layers.ragged import Ragged, Rectangle, contiguous
from tests import compiling, fakes
from tests.inference import published_heads
from tests.inference.published_heads import TARGET

pytestmark = pytest.mark.quick_code

GOLDEN = Path(__file__).parents[2] / "golden"
CASES = sorted(path.name for path in (GOLDEN / "eagle3").iterdir())
CHUNK, VOCAB = 17, 131


opened = functools.partial(published_heads.opened, proposer="eagle")


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_reference(name):
    """Behind each token of a prompt in chunks, over pages, and one draft further."""
    config, _, values = opened(GOLDEN / "eagle3" / name)
    with np.load(GOLDEN / "eagle3" / name / "expected.npz") as arrays:
        tokens, expected, expected_next = (
            arrays[key] for key in ("tokens", "logits", "logits_next")
        )
    ids = list(config.draft.proposed_ids)
    head = proposers.of(config, "reference")
    assert head.features == (1, 2)
    rows = contiguous(1, len(tokens))

    @compiling.jit
    def states(values):
        embedded_TD = decoder.embedded(values, config.model, tokens, rows)
        output = decoder.layers(values, config.model, embedded_TD, rows, features=head.features)
        return eagle.fused(values["draft"], config.draft, output.hidden_TD, output.streams)

    before_TD = jnp.pad(states(values)[:-1], ((1, 0), (0, 0)))
    cache = head.pages.of(kv_cache.init(*cache_arguments(config, "reference")))
    pages = jnp.arange(1, 1 + config.page_columns, dtype=jnp.int32)[None]

    @compiling.jit
    def feed(values, cache, token_W, state_WD, start):
        position_YW = (start + jnp.arange(len(token_W), dtype=jnp.int32))[None]
        row = Rectangle(jnp.zeros(1, jnp.int32), position_YW, position_YW >= 0, (pages,))
        state_WD, cache = head.layers(values, cache, token_W, state_WD, Ragged((row,)))
        return head.logits(values, state_WD), state_WD, cache

    for start in range(0, len(tokens), CHUNK):
        step = slice(start, start + CHUNK)
        logits_WV, state_WD, cache = feed(
            values, cache, tokens[step], before_TD[step], jnp.int32(start)
        )
        of_step = expected[max(start - 1, 0) : start + CHUNK - 1]
        worst = np.abs(np.asarray(logits_WV)[: len(of_step), ids] - of_step).max()
        print(f"positions from {start}: worst difference of logits {worst:.1e}")
        assert worst <= 1e-4
        nth = start + CHUNK
        if start > 0 and nth < len(tokens):  # the next token, behind the head's own state
            next_1V, *_ = feed(values, cache, tokens[nth : nth + 1], state_WD[-1:], jnp.int32(nth))
            worst = np.abs(np.asarray(next_1V)[0, ids] - expected_next[nth - 2]).max()
            assert worst <= 1e-4, f"a draft behind position {nth}: {worst:.1e}"
    others = np.setdiff1d(np.arange(VOCAB), ids)
    assert np.isneginf(np.asarray(logits_WV)[:, others]).all()


@pytest.mark.parametrize("name, settings", [
    ("sglang-llama", {}),
    ("speculators-qwen3", {"num_drafts": 6, "tree_levels": 3, "tree_branches": 2}),
])  # fmt: skip
def test_answers_are_the_targets(name, settings):
    """As transformers', greedily; and drafts of chains and of trees are verified."""
    config, (target, heads), _ = opened(GOLDEN / "eagle3" / name, **settings)
    with np.load(TARGET / "expected.npz") as arrays:
        prompts = [row[row >= 0].tolist() for row in arrays["greedy_prompts"]]
        expected = arrays["greedy_tokens"]
    with fakes.no_draws():
        engine = Engine.from_checkpoint(config, target, draft=heads)
        engine.scheduler.shapes = engine.scheduler.shapes[-1:]
        completions = engine.generate(prompts, fakes.greedy(expected.shape[1], ignore_eos=True))
    tokens = [completion.token_ids for completion in completions]
    np.testing.assert_array_equal(tokens, expected)
    assert engine.scheduler.counters.num_drafts > 0
    assert engine.model_runner.cache_bytes == engine.config.pool_bytes


def test_nothing_is_written_before_the_first_token_behind_cached_pages():
    """The state before it is not known, and others may read the page that its entry would be in."""
    config, _, values = opened(GOLDEN / "eagle3" / "sglang-llama")
    head = proposers.of(config, "reference")
    cache = head.pages.of(kv_cache.init(*cache_arguments(config, "reference")))
    pages = jnp.arange(1, 1 + config.page_columns, dtype=jnp.int32)[None]

    @compiling.jit
    def feed(values, cache, tokens, state_WD, start):
        position_YW = (start + jnp.arange(8, dtype=jnp.int32))[None]
        row = Rectangle(jnp.zeros(1, jnp.int32), position_YW, position_YW >= 0, (pages,))
        return head.layers(values, cache, tokens, state_WD, Ragged((row,)))[1]

    state_WD = np.random.default_rng(0).standard_normal((8, config.draft.width), np.float32)
    state_WD[0] = 0
    first = feed(values, cache, jnp.arange(8), state_WD, jnp.int32(0))
    behind = feed(values, first, jnp.arange(8, 16), state_WD, jnp.int32(8))
    before, after = (np.asarray(leaves[0].pages) for leaves in (first, behind))
    np.testing.assert_array_equal(after[1], before[1])
    assert after[2, :7].any(axis=-1).all() and before[1, :7].any(axis=-1).all()


def test_a_conversion_keeps_them(tmp_path):
    folder = GOLDEN / "eagle3" / "sglang-two-layers"
    checkpoint = resolve.resolve(str(folder), drafts=True).open(None)
    convert.convert(checkpoint, tmp_path / "ours", "orbax")
    ours = resolve.resolve(str(tmp_path / "ours"), drafts=True)
    assert dataclasses.replace(ours.config, name="") == dataclasses.replace(
        checkpoint.config, name=""
    )


def test_without_layers_named_three_of_the_target_are_fused():
    config = opened(GOLDEN / "eagle3" / "sglang-llama")[0]
    heads = dataclasses.replace(config.draft, features=())
    target = dataclasses.replace(presets.get("llama3-8b").config, width=heads.width)
    assert heads.features_of(target) == (2, 16, 29)
    assert heads.parameters()["fuse"].shape == (48, 3 * 48)
    with pytest.raises(InputError, match=r"from 1 to 3, not \(2, 1, 0\)"):
        heads.check_target(config.model)


def test_what_a_draft_costs_is_what_its_parameters_are():
    draft = opened(GOLDEN / "eagle3" / "sglang-llama")[0].draft
    operations = {operation.name: operation for operation in draft.operations}
    weights = {
        name: move.amount[0][0]
        for name, operation in operations.items()
        for move in operation.moves
        if move.what == "weights" and operation.kind == "matrix"
    }
    assert weights["eagle.qkv"] == weights["attention.qkv"] == 48 * 100
    assert weights["eagle.fuse"] == 48 * 2 * 48


def changed(folder, target, config=None, **tensors):
    """A copy of heads with other keys of `config.json`, or other tensors; None leaves one out."""
    shutil.copytree(folder, target)
    if config is not None:
        path = target / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    stored = load_file(target / "model.safetensors")
    for name, values in tensors.items():
        stored.pop(name, None)
        if values is not None:
            stored[name] = values
    save_file(stored, target / "model.safetensors")
    return target


@pytest.mark.parametrize("changes, expected", [
    ({"config": {"model_type": "mamba"}}, "model_type='mamba' is not supported; valid: llama, qw"),
    ({"config": {"target_hidden_size": 96}}, "target_hidden_size=96: heads of another width (48)"),
    ({"config": {"norm_before_fc": True, "fc_norm": True}}, "at most one is true"),
    ({"config": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1]}}}, "must list layers"),
    ({"d2t": None}, "lm_head.weight has 24 rows for 131 tokens, and there is no d2t"),
    ({"d2t": np.zeros(3, np.int64)}, "d2t is [3]; expected [24]"),
    ({"d2t": np.full(24, 131)}, "proposed_ids are different ids from 0 to 130"),
    ({"midlayer.hidden_norm.weight": None}, "hidden_norm.weight' is missing; it holds state_norm"),
    ({"midlayer.extra.weight": np.ones(3, np.float32)}, "no place for: layers.0.extra.weight"),
    ({"fc.weight": np.ones((48, 48), np.float32)}, "expected [48, 96] for fuse"),
])  # fmt: skip
def test_unsound_heads_are_refused_in_one_line(changes, expected, tmp_path):
    folder = changed(GOLDEN / "eagle3" / "sglang-llama", tmp_path / "heads", **changes)
    with pytest.raises(InputError) as caught:
        resolve.resolve(str(folder), drafts=True).open(None)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_heads_of_another_target_are_refused_before_weights_are_read():
    config, *_ = opened(GOLDEN / "eagle3" / "sglang-llama")
    with pytest.raises(InputError, match="reads hidden states of 48 elements, those of .* have"):
        Config(fakes.llama(width=40), config.engine, draft=config.draft)
    with pytest.raises(InputError, match="holds heads, which draft for a model"):
        resolve.resolve(str(GOLDEN / "eagle3" / "sglang-llama"))
    with pytest.raises(InputError, match="layers of attention with a head of their own"):
        dataclasses.replace(config.draft, skips_first=True)
    with pytest.raises(InputError, match="feature_norms='none': must be None, 'all' or 'each'"):
        dataclasses.replace(config.draft, feature_norms="none")
