"""LLM.int8() from calibration to answers, and back to numbers."""

import ml_dtypes
import numpy as np
import pytest

from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.recipes import smaller_caches
from inference.checkpoints import convert, manifest, provenance, resolve, weight_formats
from inference.checkpoints.native import blocks
from inference.engine import Engine
from inference.planner import cost
from layers import params
from tests import fakes
from tests.inference.quantize import models, test_walk

pytestmark = pytest.mark.quick_code

LARGE = np.array([3, 17, 40, 63])  # features of what layers read
PROMPT = [int(token) for token in test_walk.WINDOWS[0]]
MATRICES = "mixer/qkv", "mixer/out", "ffn/gate_up", "ffn/down"


def planted(values):
    """Norms make some features large, and what reads them makes them small."""
    norms = {"mixer_norm": ("mixer", "qkv"), "ffn_norm": ("ffn", "gate_up")}
    for layer in values["layers"]:
        for norm, (part, reader) in norms.items():
            layer[norm] = layer[norm].at[LARGE].multiply(50)
            layer[part][reader] = layer[part][reader].at[:, LARGE].divide(50)
    return values


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The full model, and what is made of it in two formats."""
    root = tmp_path_factory.mktemp("outliers")
    full = models.written(models.llama(), root / "full", planted)
    for name, method in (("llm_int8", "llm_int8"), ("w8a8", "rtn")):
        test_walk.quantize(full, root / name, method, name)
    return root


def opened(folder):
    return resolve.resolve(str(folder)).open(None)


def scores(folder):
    """By whichever products there are."""
    with fakes.no_draws():
        [found] = Engine.from_model(str(folder), max_seqs=1, dtype="float32").score([PROMPT])
    return np.asarray(found.logprobs)


def numbers(folder):
    """What the parts stand for, by the matrix's path."""
    tensors, found = test_walk.arrays(folder), {}
    declared = params.flatten(opened(folder).config.parameters())
    for layer in range(2):
        for path in (f"layers/{layer}/{matrix}" for matrix in MATRICES):
            F, D = declared[f"{path}/int8"].shape
            parts = {
                "int8": np.frombuffer(tensors[f"{path}/int8"], np.uint8).reshape(F, -1),
                "outliers": np.frombuffer(tensors[f"{path}/outliers"], ml_dtypes.bfloat16),
                "features": np.frombuffer(tensors[f"{path}/features"], np.int32),
            }
            parts["outliers"] = parts["outliers"].reshape(F, -1)
            found[path] = blocks.joined(parts, D)
    return found


def test_large_features_cost_nothing(folders):
    """Wherever they are; where they share a scale with all others they ruin what is said."""
    features = np.frombuffer(
        test_walk.arrays(folders / "llm_int8")["layers/0/mixer/qkv/features"], np.int32
    )
    assert set(LARGE) <= set(features) and not np.array_equal(features, np.arange(32))
    full, apart, ruined = (scores(folders / name) for name in ("full", "llm_int8", "w8a8"))
    error = np.abs(apart - full).mean()
    assert error < 0.06 * full.std() and error < 0.1 * np.abs(ruined - full).mean()


def test_it_becomes_numbers(folders, tmp_path):
    """In both directories' formats, those that the parts stand for."""
    checkpoint, expected = opened(folders / "llm_int8"), numbers(folders / "llm_int8")
    for to in convert.FORMATS:
        convert.convert(checkpoint, tmp_path / to, to, "bfloat16")
        config, values = models.loaded(tmp_path / to, "bfloat16")
        assert resolve.resolve(str(tmp_path / to)).config.formats == ()
        found = params.flatten(values)
        for path, value in expected.items():
            np.testing.assert_array_equal(found[path], value.astype(ml_dtypes.bfloat16))
    convert.convert(checkpoint, tmp_path / "copy", "orbax")
    assert test_walk.arrays(tmp_path / "copy") == test_walk.arrays(folders / "llm_int8")
    smaller = smaller_caches.with_kv_heads(checkpoint.config, 1)
    convert.convert(checkpoint, tmp_path / "smaller", "orbax", smaller=smaller)
    _, values = models.loaded(tmp_path / "smaller")
    path = "layers/0/mixer/qkv"
    np.testing.assert_array_equal(params.flatten(values)[path][:64], expected[path][:64])


def test_rows_and_columns_of_numbers_are_read(folders):
    source = opened(folders / "llm_int8").contents().source
    for path, expected in numbers(folders / "llm_int8").items():
        assert source.shapes[path] == expected.shape and source.dtypes[path] == "float32"
        np.testing.assert_array_equal(np.concatenate(list(source.blocks(path))), expected)
        np.testing.assert_array_equal(source.read(path, 3, 9, slice(2, 50)), expected[3:9, 2:50])


@pytest.mark.parametrize("weights", ["file", "float32"])
def test_an_engine_reads_what_it_is_told(folders, weights):
    """The parts by XLA's products, too, or the numbers."""
    checkpoint = opened(folders / "llm_int8")
    config = Config(checkpoint.config, EngineConfig.of(weights=weights, linear="reference"))
    config, exact = weight_formats.choose(config, checkpoint, "reference")
    found = params.flatten(exact.load_params(config.model.parameters()))
    for path, expected in numbers(folders / "llm_int8").items():
        if weights == "float32":
            np.testing.assert_array_equal(found[path], expected)
        else:
            assert found[f"{path}/features"].shape == (32,)


def test_heads_know_the_model_that_they_were_trained_for(folders, tmp_path):
    checkpoint = opened(folders / "llm_int8")
    convert.convert(checkpoint, tmp_path / "wide", "orbax", "float32")
    own = provenance.weights_digest(checkpoint)
    assert own == provenance.weights_digest(opened(tmp_path / "wide"))
    assert own != provenance.weights_digest(opened(folders / "full"))


def test_rates_are_of_products_that_there_are(folders):
    assert cost.weight_formats(opened(folders / "llm_int8").config) == ("int8", "w8a8")


def test_features_that_are_no_columns_are_named(folders, tmp_path):
    convert.convert(opened(folders / "llm_int8"), tmp_path / "few", "orbax")
    folder = tmp_path / "few" / "params" / "layers.0.mixer.out.features"
    (folder / "0").write_bytes(np.arange(33, 65, dtype=np.int32).tobytes())
    manifest.write(tmp_path / "few")
    with pytest.raises(InputError, match="layers/0/mixer/out/features are not columns of 64"):
        opened(tmp_path / "few")
