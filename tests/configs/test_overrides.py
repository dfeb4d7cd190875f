"""`--set`: what it replaces, and what it refuses in one line."""

import dataclasses
from operator import attrgetter

import pytest

from configs import overrides
from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.presets import NAMES, get

BASE = Config(get("smollm2-135m").config)


@dataclasses.dataclass(frozen=True)
class Leaf:
    names: tuple[str, ...] = ()
    rate: float | None = 1.0
    limit: int | None = 3
    flag: bool = False


@dataclasses.dataclass(frozen=True)
class Tree:
    leaf: Leaf = Leaf()


@pytest.mark.parametrize(
    "setting, value",
    [
        ("engine.max_seqs=8", 8),
        ("engine.shapes.decode_rows=(2, 4)", (2, 4)),
        ("engine.shapes.decode_rows=2,4", (2, 4)),
        ("engine.shapes.decode_rows=(2,)", (2,)),
        ("engine.kernels.attention=reference", "reference"),
        ("engine.kernels.attention=none", None),
        ("engine.max_context=none", None),
        ("engine.max_context=None", None),
        ("engine.max_context=100", 100),
        ("engine.requests.penalties=true", True),
        ("engine.requests.penalties=False", False),
        ("engine.seed=3", 3),
        ("model.dtype=float32", "float32"),
        ("model.norm_eps=1e-3", 1e-3),
        ("model.norm_eps=1", 1.0),
        ("model.logit_cap=none", None),
        ("model.name=a=b", "a=b"),
        ("model.name=", ""),
    ],
)
def test_a_field_is_replaced(setting, value):
    path = setting.partition("=")[0]
    before, changed = attrgetter(path)(BASE), overrides.apply(BASE, [setting])
    replaced = attrgetter(path)(changed)
    assert replaced == value and type(replaced) is type(value)
    assert overrides.apply(changed, [f"{path}={before}"]) == BASE


def test_later_settings_win_and_none_changes_nothing():
    changed = overrides.apply(BASE, ["engine.max_seqs=8", "engine.seed=1", "engine.max_seqs=9"])
    assert changed.engine == EngineConfig(max_seqs=9, seed=1)
    assert overrides.apply(BASE, []) is BASE


@pytest.mark.parametrize("order", [1, -1])
def test_settings_may_be_valid_only_together(order):
    kind = "model.pattern.mixer"
    heads = [f"{kind}.num_heads=4", f"{kind}.num_kv_heads=2"][::order]
    (mixer,) = overrides.apply(BASE, heads).model.mixers(Attention)
    assert (mixer.num_heads, mixer.num_kv_heads) == (4, 2)
    context = ["model.max_context=64", "engine.max_context=32", "engine.max_seqs=2"][::order]
    changed = overrides.apply(
        dataclasses.replace(BASE, engine=EngineConfig(max_context=99)), context
    )
    assert (changed.model.max_context, changed.max_context) == (64, 32)
    with pytest.raises(InputError, match="not a multiple"):
        overrides.apply(BASE, heads[:1])


def test_a_setting_of_a_list_changes_every_layer_that_has_the_field():
    gemma = Config(get("gemma3-270m").config)
    changed = overrides.apply(gemma, ["model.pattern.ffn.width=64"]).model
    assert {layer.ffn.width for layer in changed.layers} == {64}
    expected = dataclasses.replace(gemma.model.layers[0].mixer, score_cap=3.0)
    changed = overrides.apply(gemma, ["model.pattern.mixer.score_cap=3"]).model
    assert changed.layers[0].mixer == expected and changed.layers[5].mixer.score_cap == 3.0
    granite = Config(get("granite4-h-small").config)  # some of whose layers have no heads to share
    changed = overrides.apply(granite, ["model.pattern.mixer.num_kv_heads=4"]).model
    assert changed.mixers(Attention)[0].num_kv_heads == 4
    assert changed.layers[0] == granite.model.layers[0]


def test_types_inside_unions_and_tuples():
    changed = overrides.apply(Tree(), ["leaf.rate=2", "leaf.limit=none", "leaf.flag=true"])
    assert changed.leaf == Leaf(rate=2.0, limit=None, flag=True)
    assert overrides.apply(Tree(), ["leaf.names=('a', 'b')"]).leaf.names == ("a", "b")
    with pytest.raises(InputError):
        overrides.apply(Tree(), ["leaf.names=('a', 1)"])


@pytest.mark.parametrize(
    "setting, cause",
    [
        ("engine.max_seqs", "key=value"),
        ("=3", "key=value"),
        ("", "key=value"),
        ("motor.max_seqs=3", "'motor' is not one of model, engine"),
        ("engine.sequences=3", "'sequences' is not one of max_seqs, max_context, weights"),
        ("engine.=3", "'' is not one of max_seqs"),
        ("engine=3", "a field of it is needed: max_seqs, "),
        ("engine.max_seqs.x=3", "'max_seqs' has no fields"),
        ("engine.max_seqs=3.0", "expected int"),
        ("engine.max_seqs=many", "expected int"),
        ("engine.max_seqs=true", "expected int"),
        ("engine.max_seqs=none", "expected int"),
        ("engine.max_seqs={[]: 1}", "expected int"),
        ("engine.max_seqs=" + "(" * 500, "expected int"),
        ("engine.max_seqs=__import__('os')", "expected int"),
        ("engine.requests.penalties=1", "expected bool"),
        ("engine.requests.penalties=yes", "expected bool"),
        ("engine.max_context=1.5", "expected int or None"),
        ("engine.shapes.decode_rows=8", "expected tuple"),
        ("engine.shapes.decode_rows=(1, 'a')", "expected tuple"),
        ("engine.shapes.decode_rows=[1, 2]", "expected tuple"),
        ("model.norm_eps=small", "expected float"),
        ("model.pattern=()()", "a field of it is needed: mixer, ffn"),
        ("model.pattern.mixer=3", "names a whole section, a field of it is needed: num_heads, "),
        ("model.pattern.mixer.heads=3", "'heads' is not one of num_heads, num_kv_heads"),
        ("model.pattern.ffn.width=wide", "expected int"),
        ("model.ffn_width=64", "'ffn_width' is not one of name, family, vocab_size"),
        ("engine.max_seqs=0", "engine.max_seqs=0: must be from 1 to 4096"),
        ("engine.max_context=99999", "must be from 1 to the model's 8192"),
        ("engine.seed=-3", "engine.seed=-3: must be from 0 to 18446744073709551615"),
        ("model.dtype=int8", "'float32' or 'bfloat16'"),
    ],
)
def test_refused_in_one_line(setting, cause):
    with pytest.raises(InputError) as error:
        overrides.apply(BASE, [setting])
    assert cause in str(error.value) and "\n" not in str(error.value)


def test_presets_are_whole():
    larger = EngineConfig.of(cache_bytes=2 << 30)
    for name, preset in NAMES.items():
        assert preset.config.name == name and get(name) is preset
        # One page of each group of its million tokens is more than the default cache.
        Config(preset.config, larger if name == "deepseek-v4-flash" else EngineConfig())
    with pytest.raises(InputError, match="no preset 'gpt-5'; valid: smollm2-135m, gemma3-270m"):
        get("gpt-5")
