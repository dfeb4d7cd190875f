"""Trees of Tunix, the `gemma` package and MaxText, whose paths and shapes were recorded from these
packages, become parameters and are made of parameters.
"""

import dataclasses
import zlib

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from configs.errors import InputError
from configs.mesh import ONE_CHIP, Mesh
from inference.checkpoints import flax_tree, load, names
from inference.checkpoints.native import orbax_step
from layers import decoder, params
from tests import fakes
from tests.flax import models

pytestmark = pytest.mark.quick_code

_SIZES = dict(max_seqs=4, decode_rows=(4,), page_tokens=8, chunk_tokens=16, prefill_chunks=(2,),
              cache_bytes=1 << 20, linear="reference", attention="reference")  # fmt: skip


def _values(path, shape, dtype, seed=0):
    drawn = np.random.default_rng([zlib.crc32(path.encode()), seed])
    return drawn.normal(size=shape).astype(dtype)


def _tree(name, dtype=np.float32, seed=0, wrap=lambda leaf: leaf):
    """Nested dictionaries with keys of numbers where NNX has lists."""
    tree = {}
    for path, shape in models.recorded()[name].items():
        *keys, last = (int(key) if key.isdigit() else key for key in path.split("/"))
        node = tree
        for key in keys:
            node = node.setdefault(key, {})
        node[last] = wrap(_values(path, shape, dtype, seed))
    return tree


def _loaded(model, tree):
    tensors = flax_tree.tensors(model, flax_tree.of_arrays(tree))
    return load.load_params(decoder.param_infos(model), tensors, names.huggingface(model))


def _leaf(tree, path):
    for key in path.split("/"):
        tree = tree[int(key) if key.isdigit() else key]
    return tree


def _check_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", models.MODELS)
def test_trees_come_and_go_bit_for_bit(name, dtype):
    model = dataclasses.replace(models.MODELS[name], dtype=dtype)
    tree = _tree(name, np.dtype(getattr(ml_dtypes, dtype, dtype)))
    values = _loaded(model, tree)
    for path, info in params.flatten(decoder.param_infos(model)).items():
        leaf = params.flatten(values)[path]
        assert (leaf.shape, leaf.dtype) == (info.shape, info.format)
    _check_same(flax_tree.export(model, values, tree), tree)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
    _check_same(flax_tree.export(model, values, shapes), tree)
    drawn = fakes.real_params(model)
    _check_same(_loaded(model, flax_tree.export(model, drawn, shapes)), drawn)


def test_what_reads_images_stays_as_it_is():
    model, tree = models.MODELS["gemma-gemma3"], _tree("gemma-gemma3")
    values = _loaded(model, tree)
    tree["params"]["vision_encoder"] = {"pos_embedding": np.full((1, 4, 6), 2, np.int8)}
    tree["params"]["embedder"]["mm_input_projection"] = {"w": np.full((6, 24), np.nan)}
    _check_same(_loaded(model, tree), values)
    _check_same(flax_tree.export(model, values, tree), tree)


def test_elements_are_where_the_packages_multiply_them():
    """By the products in their modules: "btd,dnh->btnh", "BTD,NDH->BTNH", "...F,NHF->...NH"."""
    x_TD = np.random.default_rng(1).normal(size=(5, 24)).astype(np.float32)
    for name, product, path in (
        ("tunix-llama", "td,dnh->tnh", "layers/1/attn/q_proj/w"),
        ("gemma-gemma3", "td,ndh->tnh", "params/layer_1/attn/q_einsum/w"),
        (
            "maxtext-qwen3-scanned",
            "td,dnh->tnh",
            "params/decoder/layers/self_attention/query/kernel",
        ),
    ):
        model, tree = models.MODELS[name], _tree(name)
        w = _leaf(tree, path)
        w = w[:, 1] if "scanned" in name else w
        expected = np.einsum(product, x_TD, w).reshape(5, -1)
        qkv = np.asarray(_loaded(model, tree)["layers"][1]["mixer"]["qkv"])
        np.testing.assert_allclose(
            x_TD @ qkv[: expected.shape[1]].T, expected, rtol=1e-4, atol=1e-5
        )


def test_the_two_halves_of_a_stack_are_not_swapped():
    name = "gemma-gemma3"
    model, tree = models.MODELS[name], _tree(name)
    layer = jax.tree.map(np.asarray, _loaded(model, tree)["layers"][2])
    gate_FD, up_FD = _leaf(tree, "params/layer_2/mlp/gating_einsum")
    np.testing.assert_array_equal(layer["ffn"]["gate_up"], np.concatenate([gate_FD, up_FD]))
    k_KDH, v_KDH = _leaf(tree, "params/layer_2/attn/kv_einsum/w")
    rows = [w_KDH.swapaxes(1, 2).reshape(10, 24) for w_KDH in (k_KDH, v_KDH)]
    np.testing.assert_array_equal(layer["mixer"]["qkv"][30:], np.concatenate(rows))


def test_llama_31_in_maxtext_rotates_neighbors_and_has_scaled_queries():
    name = "maxtext-llama31-scanned"
    model, tree = models.MODELS[name], _tree(name)
    mixer = _loaded(model, tree)["layers"][0]["mixer"]
    q_HD = np.asarray(mixer["qkv"])[:16]
    w_DH = _leaf(tree, "params/decoder/layers/self_attention/query/kernel")[:, 0, 0]
    np.testing.assert_array_equal(q_HD[:8], 4 * w_DH[:, ::2].T)
    np.testing.assert_array_equal(q_HD[8:], 4 * w_DH[:, 1::2].T)


@pytest.mark.parametrize("mesh", [ONE_CHIP, Mesh(model=2)], ids=str)
def test_an_engine_goes_on_with_a_tree_and_gives_it_back(mesh):
    model = models.MODELS["tunix-llama"]
    engine = fakes.engine(model, None, "one", False, mesh, **_SIZES)
    tree = jax.tree.map(jax.numpy.asarray, _tree("tunix-llama"))
    assert engine.update_params(tree) == 1
    _check_same(engine.export_params(like=tree), tree)
    _check_same(engine.export_params(), _loaded(model, tree))
    layers = _tree("maxtext-llama", seed=1)
    engine.update_params(layers)
    _check_same(engine.export_params(like=layers), layers)
    broken = _tree("tunix-llama")
    broken["layers"][1]["mlp"]["up_proj"]["kernel"][3, 2] = np.inf
    with pytest.raises(InputError, match="layers/1/mlp/up_proj/kernel holds NaN or infinity"):
        engine.update_params(broken)
    _check_same(engine.export_params(like=layers), layers)
    assert engine.update_params(tree) == 3


def test_a_tree_in_an_orbax_step(tmp_path):
    """NNX saves arrays as 'value', MaxText the state of its loop in a folder 'items'."""
    engine = fakes.engine(models.MODELS["tunix-qwen3"], None, "one", False, **_SIZES)
    nnx = _tree("tunix-qwen3", wrap=lambda leaf: {"value": leaf})
    scanned = _tree("maxtext-qwen3-scanned", seed=1)
    state = {"step": np.int32(3), "opt_state": {"mu": scanned["params"]}, "params": scanned}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "1" / "model_params", nnx)
        checkpointer.save(tmp_path / "2" / "items", state)
    engine.update_params(tmp_path / "1")
    _check_same(engine.export_params(like=nnx), nnx)
    engine.update_params(tmp_path / "2")
    _check_same(engine.export_params(like=scanned), scanned)
    nnx["final_norm"]["w"]["value"] = np.ones(24, np.int32)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "3", nnx)
    with pytest.raises(InputError, match="final_norm/w is int32; valid: float32, bfloat16"):
        engine.update_params(tmp_path / "3")
    _check_same(engine.export_params(like=scanned), scanned)


def _without(tree):
    del tree["layers"][1]["attn"]["o_proj"]["w"]


def _with_adapter(tree):
    tree["layers"][0]["attn"]["q_proj"]["w_lora_a"] = np.zeros((24, 4), np.float32)


def _of_another_shape(tree):
    tree["final_norm"]["w"] = np.ones(25, np.float32)


def _of_integers(tree):
    tree["final_norm"]["w"] = np.ones(24, np.int8)


def _of_no_array(tree):
    tree["final_norm"]["w"] = 1.0


@pytest.mark.parametrize("change, message", [
    (_without, r"layers/1/attn/o_proj/w of tunix is missing, \[4, 16, 24\]"),
    (_with_adapter, "tiny-llama has no place for 'layers/0/attn/q_proj/w_lora_a'"),
    (_of_another_shape, r"final_norm/w is \[25\]; tiny-llama has \[24\]"),
    (_of_integers, "final_norm/w is int8; valid: float32, bfloat16, float16"),
    (_of_no_array, r"final_norm/w is \[\]; tiny-llama has \[24\]"),
], ids=lambda it: getattr(it, "__name__", "").strip("_"))  # fmt: skip
def test_a_tree_of_another_model_is_rejected_by_a_leaf(change, message):
    model, tree = models.MODELS["tunix-llama"], _tree("tunix-llama")
    values = _loaded(model, tree)
    change(tree)
    with pytest.raises(InputError, match=f"^the tree: {message}"):
        flax_tree.tensors(model, flax_tree.of_arrays(tree))
    with pytest.raises(InputError, match=message):
        flax_tree.export(model, values, tree)


def test_two_leaves_of_one_path_are_rejected(tmp_path):
    model, tree = models.MODELS["tunix-llama"], _tree("tunix-llama")
    values = _loaded(model, tree)
    tree["transformer"] = {"final_norm": {"w": {"value": np.ones(24, np.float32)}}}
    message = ": 'final_norm/w' and 'transformer/final_norm/w/value' are one leaf"
    with pytest.raises(InputError, match=f"^the tree{message}"):
        flax_tree.of_arrays(tree)
    with pytest.raises(InputError, match=f"^the tree{message}"):
        flax_tree.export(model, values, tree)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "1", tree)
    with pytest.raises(InputError, match=f"/1{message}"):
        flax_tree.of_step(orbax_step.open_tensors(tmp_path / "1"))


def test_axes_that_cannot_be_told_apart_are_rejected():
    """The `gemma` package has its gate as [2, F, D] or [2, D, F], Tunix in one way."""

    def square(name):
        model, tree = models.MODELS[name], _tree(name)
        (layer,) = set(model.pattern)
        layers = tree["layers"].values() if "layers" in tree else tree["params"].values()
        for leaves in layers:
            if "mlp" in leaves:
                leaves["mlp"] = jax.tree.map(lambda leaf: leaf[..., :24, :24], leaves["mlp"])
        layer = dataclasses.replace(layer, ffn=dataclasses.replace(layer.ffn, width=24))
        return dataclasses.replace(model, pattern=(layer,)), tree

    model, tree = square("tunix-gemma")
    values = _loaded(model, tree)
    _check_same(flax_tree.export(model, values, tree), tree)
    model, tree = square("gemma-gemma")
    message = (
        r"^the tree: layer_0/mlp/gating_einsum is \[2, 24, 24\], which in gemma is 2 F D or 2 D F"
    )
    with pytest.raises(InputError, match=message):
        flax_tree.tensors(model, flax_tree.of_arrays(tree))
    with pytest.raises(InputError, match=message):
        flax_tree.export(model, values, tree)


def test_a_tree_of_another_family_is_rejected():
    model = models.MODELS["tunix-llama"]
    with pytest.raises(InputError, match="of tunix is missing"):
        flax_tree.tensors(model, flax_tree.of_arrays(_tree("gemma-gemma3")))
    assert flax_tree.tensors(model, flax_tree.of_arrays(fakes.real_params(model))) is None
    with pytest.raises(InputError, match="its family llama goes to tunix, maxtext$"):
        flax_tree.export(model, {}, {"wte": np.zeros(3)})
    mixture = fakes.gpt_oss()
    with pytest.raises(InputError, match="its family gpt_oss goes to no package of Flax"):
        flax_tree.export(mixture, {}, _tree("tunix-llama"))
