"""Attention over entries of several tokens, and the newest tokens beside them."""

import dataclasses
import json
import re
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.heads import Eagle
from configs.kinds.compressed import Compressed
from configs.kinds.feed_forward import Gated
from configs.kinds.latent import Indexer
from configs.kinds.rope import Rope, Yarn
from configs.model import LayerSpec, ModelConfig
from configs.settings.section import values
from inference.planner import cost
from layers import decoder, kv_cache, rope
from layers.mixers import compressed
from layers.ragged import Ragged, Rectangle, contiguous
from layers.registry import StepContext
from tests import compiling, fakes
from tests.layers.chosen_case import decoded
from tests.layers.test_latent import paged

pytestmark = pytest.mark.quick_code

_GOLDEN = Path(__file__).parents[1] / "golden" / "compressed"
_CASES = sorted(path.stem for path in _GOLDEN.glob("*.npz"))
_PAGE = 32


def _golden(name):
    """(model of one such layer, its parameters, hidden states [S, D], the module's output)."""
    with np.load(_GOLDEN / f"{name}.npz") as stored:
        arrays = dict(stored)
    fields = json.loads(str(arrays.pop("fields")))
    turns, H = fields["rope"], fields["head_dim"]
    scaling = None
    if turns["rope_type"] == "yarn":
        scaling = Yarn(
            turns["factor"], turns["original_max_position_embeddings"], turns["beta_fast"],
            turns["beta_slow"], turns["attention_factor"],
        )  # fmt: skip
    is_sparse = fields["type"] == "compressed_sparse_attention"
    index = Indexer(fields["index_n_heads"], fields["index_head_dim"], fields.get("index_topk", 1))
    kind = Compressed(
        fields["num_attention_heads"], H, fields["q_lora_rank"],
        int(H * turns["partial_rotary_factor"]), fields["o_groups"], fields["o_lora_rank"],
        fields["sliding_window"], fields["rate"], is_sparse,
        Rope(turns["rope_theta"], scaling, neighbours=True), fields["rms_norm_eps"],
        index if is_sparse else None,
    )  # fmt: skip
    model = ModelConfig(
        name, name, 31, fields["hidden_size"], 1, 256, (LayerSpec(kind, None),), dtype="float32"
    )
    hidden, out = arrays.pop("hidden"), arrays.pop("out")
    return model, _weights(arrays, kind), hidden, out


def _weights(arrays, kind):
    """The module's parameters as the layer names them."""
    own = {name.removesuffix(".weight"): value for name, value in arrays.items()}

    def pooling(prefix):
        return {"bias": own[f"{prefix}.position_bias"], "norm": own[f"{prefix}.kv_norm"]}

    def pooled(prefix):
        return {
            "pooled": np.concatenate([own[f"{prefix}.{part}_proj"] for part in ("kv", "gate")]),
            "pooling": pooling(prefix),
        }

    found = {
        "q_down": own["q_a_proj"], "q_norm": own["q_a_norm"], "q_up": own["q_b_proj"],
        "kv": own["kv_proj"], "kv_norm": own["kv_norm"], **pooled("compressor"),
        "sinks": own["sinks"],
        "group_out": own["o_a_proj"].reshape(kind.groups, kind.group_rank, -1),
        "out": own["o_b_proj"],
    }  # fmt: skip
    if kind.indexer is not None:
        found["indexer"] = {
            "q": own["compressor.indexer.q_b_proj"],
            "weights": own["compressor.indexer.scorer.weights_proj"],
            **pooled("compressor.indexer"),
        }
    return jax.tree.map(jnp.asarray, found)


def _context(model, ragged):
    kind = model.pattern[0].mixer
    angles = rope.angles(kind.rope, kind.rope_width, ragged.position_T, model.max_context)
    spec = model.cache_specs[0]
    return StepContext(
        ragged, angles, spec, 0, True, False, page_format=spec.page_format("float32"),
        group_beside=1,
    )  # fmt: skip


@pytest.mark.parametrize("name", _CASES)
def test_every_position_is_what_the_module_of_transformers_computes(name):
    model, weights, hidden, expected = _golden(name)

    def run(weights, x_TD):
        context = _context(model, contiguous(1, len(hidden)))
        return compressed.apply(weights, model, model.pattern[0].mixer, x_TD, None, context)[0]

    found = compiling.call(run, weights, hidden)
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 48])
@pytest.mark.parametrize("name", _CASES)
def test_and_so_it_is_over_pages(name, chunk):
    model, weights, hidden, expected = _golden(name)
    columns = 256 // _PAGE
    cache = kv_cache.init(model, (1 + columns,) * 2, _PAGE, 1, 0)
    tables = tuple(1 + np.random.default_rng(g).permutation(columns)[None] for g in range(2))
    tables = tuple(jnp.asarray(table, jnp.int32) for table in tables)

    @compiling.jit
    def run(x_TD, first, count, leaf):
        nth_W = jnp.arange(chunk, dtype=jnp.int32)
        position_YW = (first + jnp.minimum(nth_W, count - 1))[None]
        rectangle = Rectangle(jnp.zeros(1, jnp.int32), position_YW, (nth_W < count)[None], tables)
        context = _context(model, Ragged((rectangle,)))
        return compressed.apply(weights, model, model.pattern[0].mixer, x_TD, leaf, context)

    found, leaf = [], cache[0]
    for first in range(0, len(hidden), chunk):
        own = hidden[first : first + chunk]
        x_TD = jnp.asarray(np.pad(own, ((0, chunk - len(own)), (0, 0))))
        out, leaf = run(x_TD, first, len(own), leaf)
        found.append(np.asarray(out)[: len(own)])
    np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-4)


def test_the_cases_choose_and_do_not():
    chosen = {}
    for name in _CASES:
        model, _, hidden, _ = _golden(name)
        kind = model.pattern[0].mixer
        entries = len(hidden) // kind.stride
        chosen[name] = kind.indexer is not None and entries > kind.indexer.top_k
    assert chosen["sparse-few"] and chosen["sparse-wide"] and not chosen["sparse-all"]


def _small(dtype="float32", **changes):
    """Two layers of the first kind of `fakes.compressed`."""
    model = fakes.compressed(dtype)
    mixer = dataclasses.replace(model.pattern[0].mixer, **changes)
    return dataclasses.replace(
        model, num_layers=2, vocab_size=31, pattern=(LayerSpec(mixer, None),)
    )


@pytest.mark.long
def test_what_chooses_all_reads_all_bit_for_bit():
    """Beside a row that has more to choose from than it may read, too."""
    plain = _small(indexer=None)
    weights = fakes.real_params(_small())

    def without_indexer(layer):
        mixer = dict(layer["mixer"])
        mixer.pop("indexer")
        return layer | {"mixer": mixer}

    bare = weights | {"layers": tuple(map(without_indexer, weights["layers"]))}
    expected = decoded(plain, bare, 2)
    for top_k in (12, 40):
        found = decoded(_small(indexer=Indexer(3, 8, top_k)), weights, 2)
        np.testing.assert_array_equal(found[1], expected[1])
        assert (found[0] == expected[0]).all() == (top_k >= 37)


@pytest.mark.parametrize("index", [0, 2])
def test_bits_depend_on_no_chunk(index):
    own = _small()
    if index:
        mixer = fakes.compressed().pattern[index].mixer
        own = dataclasses.replace(own, pattern=(LayerSpec(mixer, None),))
    weights = fakes.real_params(own)
    expected = decoded(own, weights, 2)
    for chunk in (1, 13, 64):
        np.testing.assert_array_equal(decoded(own, weights, 2, chunk=chunk), expected)


def test_bits_depend_on_no_neighbour_and_on_nothing_that_pages_held_before():
    own = _small()
    weights = fakes.real_params(own)
    both = decoded(own, weights, 2)
    np.testing.assert_array_equal(decoded(own, weights, 1)[-1], both[1])
    np.testing.assert_array_equal(decoded(own, weights, 2, np.nan), both)


def test_a_token_of_a_window_keeps_its_nan():
    """Who sees it gets it: 9 tokens later none does, nor does who owns its page then."""
    own = _small(stride=0, overlaps=False, indexer=None, window=9)
    own = dataclasses.replace(own, num_layers=1, pattern=own.pattern[:1])
    weights = fakes.real_params(own)
    weights["embed"]["table"] = weights["embed"]["table"].at[30].set(jnp.nan)
    tokens = np.random.default_rng(3).integers(0, 30, 41)
    expected = paged(own, weights, tokens, 16)
    tokens[12] = 30
    found = paged(own, weights, tokens, 16)
    assert np.isnan(found[12:21]).all()
    is_blind = np.r_[0:12, 21:41]
    np.testing.assert_array_equal(found[is_blind], expected[is_blind])


@pytest.mark.parametrize("format", [None, "int8"])
def test_allocated_bytes_are_the_predicted_ones(format):
    own = fakes.compressed(cache_format=format)
    assert [group.spec.sight for group in own.page_groups] == [
        "stride4", "window12", "all", "stride8", "window12",
    ]  # fmt: skip
    assert own.groups_of_layer == {0: (0, 1), 1: (2,), 2: (3, 4)}
    # Where memory has whole lanes, rows of few bits are laid out by an accelerator's kernel alone.
    for page_tokens, lanes in ((8, 1), (512, 128 if format is None else 1)):
        engine = EngineConfig.of(page_tokens=page_tokens, max_seqs=4, row_multiple=lanes)
        runner = fakes.engine(own, **values(engine)).model_runner
        leaves = jax.tree.leaves(runner.cache)
        assert runner.config.pool_bytes == sum(leaf.nbytes for leaf in leaves)
    if format is not None:
        return
    # Entry and index key; vectors and gates of both series; the token's vector. One series alone.
    sparse = (12 + 8) / 4 + 2 * 2 * (12 + 8) + 12
    heavy = 12 / 8 + 2 * 12 + 12
    assert cost.cache_bytes_per_token(own) == 4 * (sparse + heavy + 2 * 2 * 8)


def test_a_short_neighbour_has_nobody_read_more():
    """Tables of the newest tokens are as long as the blocks that a window lies in."""
    position_YW = jnp.array([[16_000], [20]], jnp.int32)
    table_YP = 1 + jnp.arange(2 * 1024, dtype=jnp.int32).reshape(2, 1024)
    rectangle = Rectangle(jnp.arange(2), position_YW, jnp.ones((2, 1), bool), (table_YP,))
    found_YP, near = compressed._near(rectangle, 0, 12, 16)
    first = 16_000 // 128 * 8 - 8  # the window begins before its last block
    np.testing.assert_array_equal(found_YP[0], 1 + first + np.arange(16))
    np.testing.assert_array_equal(found_YP[1], 1025 + np.arange(16))
    np.testing.assert_array_equal(near.last_YW, [[128], [20]])
    np.testing.assert_array_equal(near.first_YW, [[117], [9]])


@pytest.mark.parametrize("length", [3, 4, 11, 40])
def test_gradients_are_finite(length):
    own = fakes.compressed()
    weights, tokens = fakes.real_params(own), jnp.arange(length) % 31

    @compiling.jit
    def gradients(weights):
        def loss(weights):
            hidden_TD, _ = decoder.forward(weights, own, tokens, contiguous(1, length))
            return (hidden_TD**2).mean()

        return jax.grad(loss)(weights)

    found = gradients(weights)
    chex.assert_tree_all_finite(found)
    pooled = found["layers"][2]["mixer"]["pooled"]  # of entries of eight tokens
    assert bool((pooled != 0).any()) == (length >= 8)


def _drafting(**changes):
    return EngineConfig.of(num_drafts=3, **changes)


def _eagle(target, mixer):
    fields = {field.name: getattr(target, field.name) for field in dataclasses.fields(ModelConfig)}
    return Eagle(**fields | {"num_layers": 1, "pattern": (LayerSpec(mixer, Gated(40)),)})


@pytest.mark.parametrize(
    "build, line",
    [
        (
            lambda: _small(stride=0),
            "compressed overlaps and indexer go with a stride: there are entries",
        ),
        (lambda: _small(stride=3), "compressed stride=3 is at least 2 and divides 128"),
        (lambda: _small(stride=256), "compressed stride=256 is at least 2 and divides 128"),
        (lambda: _small(window=0), "compressed window is at least 1, not 0"),
        (lambda: _small(groups=3), "compressed num_heads=4 is not a multiple of groups=3"),
        (
            lambda: _small(indexer=Indexer(3, 14, 6)),
            "indexer head_width=14 is no wider than the 12 elements of an entry that its key "
            "stands for",
        ),
        (
            lambda: _small(indexer=Indexer(3, 2, 6)),
            "compressed indexer head_width=2 is at least rope_width=4, which rotates",
        ),
        (
            lambda: fakes.compressed(cache_format="int4"),
            "int4 shares a scale among 32 elements, so keys and values have a multiple of 32, not ",
        ),
        (
            lambda: Config(fakes.compressed(), EngineConfig.of(page_tokens=4)),
            "engine.cache.page_tokens=4: must be a multiple of 8, because tiny-compressed or its "
            "draft model stores one entry for 8 tokens",
        ),
        (
            lambda: Config(
                fakes.llama(), _drafting(proposer="draft", page_tokens=4), draft=fakes.compressed()
            ),
            "tiny-llama or its draft model stores one entry for 8 tokens",
        ),
        (
            lambda: Config(
                fakes.llama(),
                _drafting(proposer="eagle", draft_tree=(0, 0, 1)),
                draft=_eagle(fakes.llama(), fakes.compressed().pattern[0].mixer),
            ),
            "drafts that branch do not go with attention that chooses pages (token_budget) or "
            "pools tokens (stride), since what it keeps is of one path",
        ),
        (
            lambda: Config(fakes.compressed(), EngineConfig.of(prompt_budgets=True)),
            "engine.requests.prompt_budgets: the queries of tiny-compressed choose what they read",
        ),
        (lambda: fakes.compressed().per_chip(3), "groups"),
    ],
)
def test_bad_input_is_named(build, line):
    with pytest.raises(InputError, match=re.escape(line)):
        build()


def test_pages_hold_whole_entries_unless_told():
    own = _small(stride=128, overlaps=False, indexer=None)
    assert Config(own).page_tokens == 128
    assert Config(own).for_platform("gpu").page_tokens == 128
    assert Config(fakes.compressed()).page_tokens == 16
