"""Published DFlash heads draft as their authors' code does (`tests/golden/tiny_dflash.py`)."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from configs.engine import Config
from configs.errors import InputError
from inference.checkpoints import convert, resolve
from inference.engine import Engine
from inference.runtime.model_runner import cache_arguments
from inference.speculation import proposers
from layers import decoder, kv_cache
from layers.ragged import Ragged, Rectangle, contiguous
from tests import compiling, fakes
from tests.inference import published_heads
from tests.inference.published_heads import TARGET
from tests.layers import native

pytestmark = pytest.mark.quick_code

GOLDEN = Path(__file__).parents[2] / "golden"
CASES = sorted(path.name for path in (GOLDEN / "dflash").iterdir())


opened = functools.partial(published_heads.opened, proposer="dflash")


@pytest.mark.parametrize("attention", ["reference", "ffi_cpu"])
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_reference(name, attention):
    """Blocks at places of a prompt, over pages that hold the target's states until there."""
    if attention == "ffi_cpu":
        native.need()
    config, _, values = opened(GOLDEN / "dflash" / name)
    with np.load(GOLDEN / "dflash" / name / "expected.npz") as arrays:
        tokens, starts, expected = (arrays[key] for key in ("tokens", "starts", "logits"))
    head, width = proposers.of(config, attention), expected.shape[1] + 1
    assert head.features == (1, 2)
    cache = head.pages.of(kv_cache.init(*cache_arguments(config, attention)))
    pages = jnp.arange(1, 1 + config.page_columns, dtype=jnp.int32)[None]

    def row(start, count, **fields):
        position_YW = (start + jnp.arange(count, dtype=jnp.int32))[None]
        slot_Y = jnp.zeros(1, jnp.int32)
        return Ragged((Rectangle(slot_Y, position_YW, position_YW >= 0, (pages,), **fields),))

    @compiling.jit
    def streams(values):
        rows = contiguous(1, len(tokens))
        embedded_TD = decoder.embedded(values, config.model, tokens, rows)
        output = decoder.layers(values, config.model, embedded_TD, rows, features=head.features)
        return output.streams

    @compiling.jit
    def block(values, cache, token, start):
        block_W = jnp.full(width, config.draft.mask_id).at[0].set(token)
        hidden_WD, _ = head.block(
            values, cache, block_W, row(start, width, causal_Y=jnp.zeros(1, bool))
        )
        return head.logits(values, hidden_WD[1:])

    features, seen = streams(values), 0
    for start, expected_WV in zip(starts, expected, strict=True):
        chunk = tuple(state_TD[seen:start] for state_TD in features)
        cache = compiling.call(head.cached, values, cache, chunk, row(seen, start - seen))
        found = np.asarray(block(values, cache, tokens[start], jnp.int32(start)))
        worst, seen = np.abs(found - expected_WV).max(), start
        print(f"block at {start}: worst difference of logits {worst:.1e}")
        assert worst <= 1e-4


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_answers_are_the_targets(acceptance):
    """As transformers', greedily; drafts are verified, and of fewer than a block as well."""
    config, (target, heads), _ = opened(
        GOLDEN / "dflash" / CASES[0], acceptance=acceptance, adapt_drafts=True, num_drafts=4
    )
    with np.load(TARGET / "expected.npz") as arrays:
        prompts = [row[row >= 0].tolist() for row in arrays["greedy_prompts"]]
        expected = arrays["greedy_tokens"]
    with fakes.no_draws():
        engine = Engine.from_checkpoint(config, target, draft=heads)
        engine.scheduler.shapes = engine.scheduler.shapes[-1:]
        completions = engine.generate(prompts, fakes.greedy(expected.shape[1], ignore_eos=True))
    np.testing.assert_array_equal([each.token_ids for each in completions], expected)
    assert engine.scheduler.counters.num_drafts > 0
    assert engine.model_runner.cache_bytes == engine.config.pool_bytes


def test_a_conversion_keeps_them(tmp_path):
    checkpoint = resolve.resolve(str(GOLDEN / "dflash" / CASES[1]), drafts=True).open(None)
    convert.convert(checkpoint, tmp_path / "ours", "orbax")
    ours = resolve.resolve(str(tmp_path / "ours"), drafts=True)
    assert dataclasses.replace(ours.config, name="") == dataclasses.replace(
        checkpoint.config, name=""
    )


def changed(target, config, **tensors):
    """A copy of heads with other keys of `config.json`, or other tensors; None leaves one out."""
    shutil.copytree(GOLDEN / "dflash" / CASES[0], target)
    path = target / "config.json"
    raw = json.loads(path.read_text())
    raw["dflash_config"] |= config.pop("dflash_config", {})
    path.write_text(json.dumps(raw | config))
    stored = load_file(target / "model.safetensors") | tensors
    kept = {name: values for name, values in stored.items() if values is not None}
    save_file(kept, target / "model.safetensors")
    return target


@pytest.mark.parametrize("config, tensors, expected", [
    ({"dflash_config": {"target_layer_ids": [-1]}}, {}, "target_layer_ids must list layers"),
    ({"dflash_config": {"mask_token_id": 131}}, {}, "mask_token_id must be an integer from 1"),
    ({"block_size": 1}, {}, "block_tokens is at least 2, not 1"),
    ({"is_causal": True}, {}, "is_causal=True"),
    ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0,
      "layer_types": ["sliding_attention"] * 3}, {}, "those with windows are not read"),
    ({}, {"fc.weight": None}, "'fc.weight' is missing; it holds fuse"),
    ({}, {"fc.weight": np.ones((48, 48), np.float32)}, "expected [48, 96] for fuse"),
    ({}, {"extra": np.ones(3, np.float32)}, "no place for: extra"),
])  # fmt: skip
def test_unsound_heads_are_refused_in_one_line(config, tensors, expected, tmp_path):
    folder = changed(tmp_path / "heads", config, **tensors)
    with pytest.raises(InputError) as caught:
        resolve.resolve(str(folder), drafts=True).open(None)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_what_does_not_go_together_is_refused():
    config, *_ = opened(GOLDEN / "dflash" / CASES[0])
    assert config.draft.block_tokens == 8
    with pytest.raises(InputError, match="reads hidden states of 48 elements, those of .* have"):
        Config(fakes.llama(width=40), config.engine, draft=config.draft)
    with pytest.raises(InputError, match="blocks of 8 tokens, the newest among them: 7 drafts at"):
        Config(config.model, config.engine.replace(num_drafts=8), draft=config.draft)
    with pytest.raises(InputError, match=r"from 1 to 3, not \(1, 4\)"):
        draft = dataclasses.replace(config.draft, features=(1, 4))
        Config(config.model, config.engine, draft=draft)
    with pytest.raises(InputError, match="tree_levels: goes with engine.drafts.proposer eagle"):
        config.engine.replace(tree_levels=2, tree_branches=2)
