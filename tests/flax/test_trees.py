"""Trees of Tunix, the `gemma` package and MaxText as they are; `make test-flax` runs this."""

import dataclasses

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

pytest.importorskip("tunix", reason="make test-flax has it")
pytest.importorskip("maxtext", reason="make test-flax has it")

from flax import nnx

from tests import fakes
from tests.flax import models, packages

_SIZES = dict(max_seqs=4, decode_rows=(4,), page_tokens=8, chunk_tokens=16, prefill_chunks=(2,),
              cache_bytes=1 << 20, linear="reference", attention="reference")  # fmt: skip


@pytest.fixture(params=models.MODELS, scope="module")
def name(request):
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("maxtext")


@pytest.fixture(scope="module")
def tree(name, folder):
    """Random weights, norms and biases among them, in the package's own tree."""
    if name.startswith("tunix"):
        values = nnx.state(packages.module(name), nnx.Param)
    else:
        values = packages.init(name, folder)
    values = packages.drawn(values)
    if name == "maxtext-qwen2-scanned":  # MaxText's head is the tied table in bfloat16, always
        values["params"]["token_embedder"] = jax.tree.map(
            lambda leaf: leaf.astype("bfloat16").astype("float32"),
            values["params"]["token_embedder"],
        )
    return values


def _engine(name):
    return fakes.engine(models.MODELS[name], None, "one", False, **_SIZES)


def _check_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (one.dtype, one.sharding) == (other.dtype, other.sharding)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_recorded_shapes_are_those_of_the_packages(name, tree):
    assert packages.record(tree) == models.recorded()[name]


def test_an_engine_computes_what_the_package_computes_and_gives_its_tree_back(name, tree, folder):
    engine = _engine(name)
    tokens = np.random.default_rng(2).integers(3, 131, packages.TOKENS)
    assert engine.update_params(tree) == 1
    score = engine.score([tokens.tolist()])[0]
    logits_TV = packages.logits(name, tree, tokens, folder)
    expected = jax.nn.log_softmax(logits_TV[:-1].astype(np.float32))
    np.testing.assert_allclose(
        score.logprobs, expected[np.arange(len(tokens) - 1), tokens[1:]], rtol=0, atol=1e-4
    )
    _check_same(engine.export_params(like=tree), tree)


def test_a_step_that_orbax_wrote(name, tree, tmp_path):
    engine = _engine(name)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", tree)
    engine.update_params(tmp_path / "step")
    _check_same(engine.export_params(like=tree), tree)


def test_half_precision(name, tree):
    model = dataclasses.replace(models.MODELS[name], dtype="bfloat16")
    engine = fakes.engine(model, None, "one", False, **_SIZES)
    tree = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), tree)
    engine.update_params(tree)
    _check_same(engine.export_params(like=tree), tree)
