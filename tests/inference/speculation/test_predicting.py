"""The layer with which a checkpoint predicts a second token drafts as transformers' modules do."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from configs.engine import Config, EngineConfig
from configs.errors import InputError
from inference.checkpoints import convert, resolve
from inference.checkpoints.hf import config_json
from inference.engine import Engine
from inference.runtime.model_runner import cache_arguments
from inference.speculation import proposers
from layers import decoder, kv_cache
from layers.ragged import Ragged, Rectangle, contiguous
from tests import compiling, fakes

pytestmark = pytest.mark.quick_code

GOLDEN = Path(__file__).parents[2] / "golden"
DEEPSEEK, GLM = "deepseek_v3-mha-groups-yarn", "glm4_moe-gqa-norm-bias"
APART = (
    "qwen3_next-gqa-shared-experts", "qwen3_next-mha-listed-tied-float32",
    "qwen3_5-gqa-sections", "qwen3_5-mha-tied-float32",
    "qwen3_5_moe-gqa-stacked", "qwen3_5_moe-mqa-tied-float32",
)  # fmt: skip
PAGE, CHUNK = 8, 25


def announce(folder: Path, **keys) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.fixture
def checkpoint(tmp_path):
    """A tiny checkpoint with its layer, which repeats embedding and head as published ones do."""

    def make(name: str = DEEPSEEK) -> Path:
        folder = Path(shutil.copytree(GOLDEN / name, tmp_path / "whole"))
        tensors = load_file(folder / "model.safetensors")
        tensors |= load_file(GOLDEN / "predicting" / f"{name}.safetensors")
        if name in APART:
            save_file(tensors, folder / "model.safetensors")
            return folder
        for own, whole in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
            tensors[f"model.layers.3.{own}.weight"] = tensors[f"{whole}.weight"]
        save_file(tensors, folder / "model.safetensors")
        return folder

    return make


def opened(folder: Path):
    """Configuration in float32, both checkpoints and all parameters."""
    found = resolve.resolve(str(folder)), resolve.predicting(str(folder))
    model, draft = (dataclasses.replace(each.config, dtype="float32") for each in found)
    engine = EngineConfig.of(
        max_seqs=2, page_tokens=PAGE, cache_bytes=1 << 20, decode_rows=(2,), chunk_tokens=16,
        prefill_chunks=(1,), proposer="eagle", num_drafts=2,
    )  # fmt: skip
    return Config(model, engine, draft=draft), *(each.open(None) for each in found)


@pytest.mark.parametrize("name", [DEEPSEEK, GLM, *APART])
def test_its_logits_are_those_of_transformers_modules(name, checkpoint):
    """At every position of a prompt that is fed in chunks, over pages."""
    config, whole, layer = opened(checkpoint(name))
    values = whole.load_params(decoder.param_infos(config.model))
    values |= {"draft": layer.load_params(decoder.param_infos(config.draft))}
    with np.load(GOLDEN / name / "expected.npz") as arrays:
        tokens = arrays["tokens_0"]
    with np.load(GOLDEN / "predicting" / f"{name}.npz") as arrays:
        expected = arrays["logits"]
    rows = contiguous(1, len(tokens))
    hidden_TD, _ = compiling.call(
        functools.partial(decoder.forward, config=config.model),
        values,
        tokens_T=tokens,
        ragged=rows,
    )
    state_TD = jnp.pad(hidden_TD[:-1], ((1, 0), (0, 0)))
    eagle = proposers.of(config, "reference")
    cache = eagle.pages.of(kv_cache.init(*cache_arguments(config, "reference")))
    pages = jnp.arange(1, 1 + config.page_columns, dtype=jnp.int32)[None]

    @compiling.jit
    def feed(values, cache, token_W, state_WD, position_YW):
        valid = jnp.ones(position_YW.shape, bool)
        row = Rectangle(jnp.zeros(1, jnp.int32), position_YW, valid, (pages,))
        hidden_WD, cache = eagle.layers(values, cache, token_W, state_WD, Ragged((row,)))
        return eagle.logits(values, hidden_WD), cache

    for first in range(0, len(tokens), CHUNK):
        step = slice(first, first + CHUNK)
        position_YW = jnp.arange(first, first + CHUNK, dtype=jnp.int32)[None]
        logits_WV, cache = feed(values, cache, tokens[step], state_TD[step], position_YW)
        if name in APART and first == 0:  # the first token has no entry
            logits_WV = logits_WV[: CHUNK - 1]
        behind = slice(first - (name in APART and first > 0), first + CHUNK - (name in APART))
        worst = np.abs(logits_WV - expected[behind]).max()
        print(f"positions from {first}: worst difference of logits {worst:.1e}")
        assert worst <= 1e-4


@pytest.mark.parametrize("name", [DEEPSEEK, *APART[::2]])
def test_a_checkpoint_drafts_for_itself(name, checkpoint):
    """And says transformers' greedy tokens."""
    folder = checkpoint(name)
    config, whole, layer = opened(folder)
    with np.load(folder / "expected.npz") as arrays:
        prompts = [row[row >= 0].tolist() for row in arrays["greedy_prompts"]]
        expected = arrays["greedy_tokens"]
    with fakes.no_draws():
        engine = Engine.from_checkpoint(config, whole, draft=layer)
        engine.scheduler.shapes = engine.scheduler.shapes[-1:]
        found = engine.generate(prompts, fakes.greedy(expected.shape[1], ignore_eos=True))
    np.testing.assert_array_equal([each.token_ids for each in found], expected)
    assert engine.scheduler.counters.num_drafts > 0
    assert engine.model_runner.cache_bytes == engine.config.pool_bytes


def refusal(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        resolve.predicting(str(folder)).open(None)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_where_there_is_no_such_layer_it_says_so(checkpoint, tmp_path):
    folder = checkpoint()
    for count in (0, 2):
        announce(folder, num_nextn_predict_layers=count)
        assert f"deepseek_v3 with num_nextn_predict_layers={count}; " in refusal(folder)
    assert "there is no tensor of model.layers.3" in refusal(GOLDEN / DEEPSEEK)
    llama = refusal(GOLDEN / "llama-tokenizer")
    assert "llama with num_nextn_predict_layers=0" in llama and " or deepseek_v3 or" in llama
    assert "has no layer that predicts a second token" in refusal("smollm2-135m")


def test_layers_that_are_listed_are_one_more():
    """The layer is of the kind of the last one that is listed."""
    folder = GOLDEN / "glm4_moe_lite-mha-listed"
    raw = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    head = config_json.parse_predicting(raw, folder)
    assert head.layers == config_json.parse(raw, folder).layers[-1:]


@pytest.mark.parametrize("change, expected", [
    ({"mtp.fc.weight": None}, "'mtp.fc.weight' is missing; it holds input"),
    ({"mtp.layers.0.mlp.up_proj.weight": None}, "'mtp.layers.0.mlp.up_proj.weight' is missing"),
    ({"mtp.fnorm.weight": np.ones(20)}, "no place for: mtp.fnorm.weight"),
    ({"mtp.layers.1.input_layernorm.weight": np.ones(20)}, "no place for: mtp.layers.1."),
    ({"mtp.embed_tokens.weight": np.ones((29, 20))}, "is not model.embed_tokens.weight, which"),
])  # fmt: skip
def test_a_layer_with_names_of_its_own_is_whole_and_alone(change, expected, checkpoint):
    folder = checkpoint("qwen3_5-gqa-sections")
    tensors = load_file(folder / "model.safetensors")
    for name, values in change.items():
        tensors.pop(name, None)
        if values is not None:
            tensors[name] = values.astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    assert expected in refusal(folder)
    announce(folder, mtp_num_hidden_layers=2)
    assert "qwen3_5 with mtp_num_hidden_layers=2; " in refusal(folder)
    assert "there is no tensor of mtp, the layer" in refusal(GOLDEN / "qwen3_5-gqa-sections")


PREFIX = "model.layers.3."


@pytest.mark.parametrize("changes, expected", [
    ({"eh_proj.weight": None}, "'model.layers.3.eh_proj.weight' is missing; it holds input"),
    ({"mlp.experts.2.up_proj.weight": None}, "experts.2.up_proj.weight' is missing"),
    ({"self_attn.kv_b_proj.weight": None}, "self_attn.kv_b_proj.weight' is missing"),
    ({"fnorm.weight": np.ones(40)}, "no place for: model.layers.3.fnorm.weight"),
    ({"hnorm.weight": np.ones(41)}, "hnorm.weight' is [41]; expected [40] for state_norm"),
    ({"embed_tokens.weight": np.ones((131, 40))}, "is not model.embed_tokens.weight, which"),
    ({"shared_head.head.weight": np.ones((131, 40))}, "is not lm_head.weight, which"),
])  # fmt: skip
def test_its_tensors_are_all_there_and_no_others(changes, expected, checkpoint):
    folder = checkpoint()
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, values in changes.items():
        tensors.pop(PREFIX + name, None)
        if values is not None:
            tensors[PREFIX + name] = values.astype(np.float32)
    save_file(tensors, path)
    assert expected in refusal(folder)
    resolve.resolve(str(folder)).open(None)  # whoever does not ask for it is not told


def test_what_it_shares_need_not_be_repeated(checkpoint):
    folder = checkpoint()
    tensors = load_file(folder / "model.safetensors")
    for shared in ("embed_tokens", "shared_head.head"):
        del tensors[f"{PREFIX}{shared}.weight"]
    save_file(tensors, folder / "model.safetensors")
    config, _, layer = opened(folder)
    declared = decoder.param_infos(config.draft)
    assert not {"embed", "head"} & declared.keys()
    assert layer.load_params(declared).keys() == declared.keys()


def test_a_conversion_leaves_it_out_and_announces_none(checkpoint, tmp_path):
    folder = checkpoint()
    convert.convert(resolve.resolve(str(folder)).open(None), tmp_path / "converted", "hf")
    raw = json.loads((tmp_path / "converted" / "config.json").read_text())
    assert raw["num_nextn_predict_layers"] == 0
    names = load_file(tmp_path / "converted" / "model.safetensors").keys()
    assert names and not any(name.startswith(PREFIX) for name in names)
    assert "num_nextn_predict_layers=0" in refusal(tmp_path / "converted")
