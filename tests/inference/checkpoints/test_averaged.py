"""Checkpoints that become models with less to cache, beside means in numpy."""

import dataclasses

import chex
import numpy as np
import pytest

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.recipes import smaller_caches
from inference.checkpoints import convert, resolve
from layers import decoder
from layers.ragged import contiguous
from tests import compiling, fakes
from tests.inference.checkpoints.test_convert import GOLDEN, assert_equal, load

# Biases, norms of heads and of all of them at once, windows beside full layers, latents, values
# that are keys.
CASES = [
    "llama-gqa-yarn-bias", "olmo2-mha-untied", "gemma3-gqa-linear-rope", "gpt_oss-gqa-limit",
    "deepseek_v3-mha-groups-yarn", "gemma4-mha-mqa-experts-float32",
]  # fmt: skip


def converted(case, output, change, to="orbax", **options):
    checkpoint = resolve.resolve(str(GOLDEN / case)).open(None)
    smaller = change(checkpoint.config)
    convert.convert(checkpoint, output, to, smaller=smaller, **options)
    return smaller


def stored(case):
    """The type in which a mean is rounded; None: the model's own."""
    return "float32" if case.endswith("float32") else None


def mean_of(arrays, like):
    """As it is stored."""
    return (sum(np.float32(array) for array in arrays) / len(arrays)).astype(like.dtype)


def groups_of(config, size):
    """Layers of equal mixers, `size` at a time, by hand."""
    found, open_groups = [], {}
    for layer, spec in enumerate(config.layers):
        group = open_groups.get(spec.mixer, [])
        if not group:
            found.append(group)
        group.append(layer)
        open_groups[spec.mixer] = [] if len(group) == size else group
    return found


@pytest.mark.parametrize("case", CASES)
def test_shared_projections_are_means(case, tmp_path):
    smaller = converted(case, tmp_path / "made", lambda c: smaller_caches.shared_by(c, 2))
    before, after = (load(path, stored(case)) for path in (GOLDEN / case, tmp_path / "made"))
    config = resolve.resolve(str(GOLDEN / case)).config
    assert resolve.resolve(str(tmp_path / "made")).config.layers == smaller.layers
    expected, groups = dict(before), groups_of(config, 2)
    assert max(map(len, groups)) == 2
    for owner, *sharers in groups:
        mixer = config.layers[owner].mixer
        for name in ("qkv", "qkv_bias", "qk"):
            members = [f"layers/{layer}/mixer/{name}" for layer in (owner, *sharers)]
            if members[0] in before:
                queries = mixer.num_heads * mixer.head_width
                kv = mean_of([before[m][queries:] for m in members], before[members[0]])
                expected[members[0]] = np.concatenate([before[members[0]][:queries], kv])
                for member in members[1:]:
                    path = member.replace("/qkv", "/q").replace("/qk", "/q")
                    expected[path] = expected.pop(member)[:queries]
        for name in ("k_norm", "kv_down", "kv_norm"):
            members = [f"layers/{layer}/mixer/{name}" for layer in (owner, *sharers)]
            if members[0] in before:
                expected[members[0]] = mean_of([before[m] for m in members], before[members[0]])
                for member in members[1:]:
                    del expected[member]
    assert_equal(after, expected)


@pytest.mark.parametrize("case", [case for case in CASES if "deepseek" not in case])
def test_fewer_heads_are_means(case, tmp_path):
    config = resolve.resolve(str(GOLDEN / case)).config
    converted(case, tmp_path / "made", lambda c: smaller_caches.with_kv_heads(c, 1))
    before, after = (load(path, stored(case)) for path in (GOLDEN / case, tmp_path / "made"))
    expected = dict(before)
    for path, values in before.items():
        if "/mixer/" not in path:
            continue
        mixer = config.layers[int(path.split("/")[1])].mixer
        N, K, H = mixer.num_heads, mixer.num_kv_heads, mixer.head_width
        if path.endswith(("/qkv", "/qkv_bias", "/qk")):
            heads = np.split(values[N * H :], len(values) // H - N)
            parts = [heads[first : first + K] for first in range(0, len(heads), K)]
            means = [mean_of(part, values) for part in parts]
            expected[path] = np.concatenate([values[: N * H], *means])
        if path.endswith("/k_norm") and mixer.qk_norm == "all":
            expected[path] = mean_of(np.split(values, K), values)
    assert max(mixer.num_kv_heads for mixer in config.mixers(Attention)) > 1
    for path, values in expected.items():  # sums of another order round differently
        np.testing.assert_allclose(
            np.float32(after[path]), np.float32(values), rtol=1e-2, atol=1e-6, err_msg=path
        )
        chex.assert_trees_all_equal_shapes_and_dtypes(after[path], values)


def test_groups_of_one_are_the_plain_model(tmp_path):
    case = CASES[0]
    assert converted(case, tmp_path / "made", lambda c: smaller_caches.shared_by(c, 1)).layers == (
        resolve.resolve(str(GOLDEN / case)).config.layers
    )
    assert_equal(load(tmp_path / "made"), load(GOLDEN / case))


def test_both_at_once_and_what_it_answers(tmp_path):
    """Layers whose keys were alike before compute what they did."""
    case = "gemma3-gqa-linear-rope"

    def change(config):
        return smaller_caches.shared_by(smaller_caches.with_kv_heads(config, 1), 3)

    smaller = converted(case, tmp_path / "made", change, dtype="float32")
    resolved = resolve.resolve(str(tmp_path / "made"))
    assert resolved.config.layers == smaller.layers
    weights = resolved.open(None).load_params(decoder.param_infos(resolved.config))
    tokens = np.arange(9) % smaller.vocab_size
    hidden_TD = compiling.call(
        lambda w: decoder.forward(w, resolved.config, tokens, contiguous(1, 9))[0], weights
    )
    assert np.isfinite(hidden_TD).all()


def test_transformers_has_a_place_for_fewer_heads_and_none_for_shared_caches(tmp_path):
    case = CASES[0]
    smaller = converted(case, tmp_path / "hf", lambda c: smaller_caches.with_kv_heads(c, 1), "hf")
    assert resolve.resolve(str(tmp_path / "hf")).config.layers == smaller.layers
    with pytest.raises(InputError, match="model.pattern has no place in a config.json") as caught:
        converted(case, tmp_path / "none", lambda c: smaller_caches.shared_by(c, 2), "hf")
    assert "--to=orbax keeps it" in str(caught.value) and not (tmp_path / "none").exists()


_PAGES = fakes.fake_model().pattern[:1]


@pytest.mark.parametrize(
    "change, cause",
    [
        (lambda: smaller_caches.shared_by(fakes.llama(), 0), "by at least 1 layer, not 0"),
        (lambda: smaller_caches.shared_by(fakes.of_kind("shared"), 2), "share caches already"),
        (
            lambda: smaller_caches.shared_by(fakes.fake_model(num_layers=1, pattern=_PAGES), 2),
            "no layer of it has keys",
        ),
        (lambda: smaller_caches.with_kv_heads(fakes.deepseek(), 1), "has key/value heads"),
        (lambda: smaller_caches.with_kv_heads(fakes.llama(), 3), "2 key/value heads become 1, 2, "),
        (lambda: smaller_caches.with_kv_heads(fakes.llama(), 0), "become 1, 2, not 0"),
    ],
)
def test_what_cannot_be_made_smaller(change, cause):
    with pytest.raises(InputError, match=cause) as caught:
        change()
    assert "\n" not in str(caught.value)


def test_layers_share_with_layers_of_their_kind():
    """Gemma's local ones across a global one too, and what is left over has fewer."""
    local = Attention(4, 2, 8, window=20)
    world = dataclasses.replace(local, window=None)
    layer = fakes.llama().pattern[0]
    pattern = tuple(
        dataclasses.replace(layer, mixer=mixer)
        for mixer in (local, local, local, world, local, local, world)
    )
    config = dataclasses.replace(fakes.llama(), pattern=pattern, num_layers=7)
    for size, owners in {
        2: [None, 0, None, None, 2, None, 3],
        3: [None, 0, 0, None, None, 4, 3],
        9: [None, 0, 0, None, 0, 0, 3],
    }.items():
        shared = smaller_caches.shared_by(config, size)
        assert [spec.owner for spec in shared.cache_specs] == owners
        assert [shared.stored_by(i).window for i in range(7)] == [
            spec.window for spec in config.cache_specs
        ]
