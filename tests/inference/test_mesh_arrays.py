"""Other programs of JAX read the parameters and pages of an engine on a mesh, and make them."""

import dataclasses
import logging

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec
from safetensors.numpy import load_file

from configs import overrides
from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.mesh import ONE_CHIP, Mesh
from inference.checkpoints import resolve
from inference.engine import Engine
from layers import decoder, kv_cache, params
from layers.kernels.linear import low_bit, packed
from sharding import mesh as meshes
from sharding import rules
from tests import fakes
from tests.layers import native

pytestmark = pytest.mark.quick_code

_SIZES = dict(max_seqs=4, decode_rows=(4,), page_tokens=8, chunk_tokens=16, prefill_chunks=(2,),
              cache_bytes=1 << 20, linear="reference", attention="reference")  # fmt: skip
_DENSE = dataclasses.replace(fakes.llama(num_heads=8, num_kv_heads=4), vocab_size=132)
_UNEVEN, _FEW_HEADS = fakes.llama(), fakes.llama(num_heads=8)
_MIXTURE = fakes.gpt_oss()
_CASES = [
    (_DENSE, Mesh(data=2, model=2)), (_DENSE, Mesh(context=2)), (_MIXTURE, Mesh(model=2, expert=2)),
    *(pytest.param(*case, marks=pytest.mark.long) for case in (
        (_DENSE, Mesh(model=2)), (_DENSE, Mesh(model=2, context=2)), (_UNEVEN, Mesh(model=3)),
        (_FEW_HEADS, Mesh(model=4)),
        (_MIXTURE, Mesh(expert=2)))),
]  # fmt: skip
_PAGES = [
    Mesh(model=2, context=2),
    *(pytest.param(mesh, marks=pytest.mark.long) for mesh in (Mesh(model=2), Mesh(context=2))),
]


def _engine(model, mesh=ONE_CHIP):
    return fakes.engine(model, None, "one", False, mesh, **_SIZES)


@pytest.mark.parametrize("model, mesh", _CASES, ids=lambda it: getattr(it, "name", str(it)))
def test_parameters_have_the_shapes_of_the_model_and_come_and_go(monkeypatch, model, mesh):
    """Those that lie as they are declared are equal as they are, others as they are exported; the
    way back is not through the host.
    """
    values = params.flatten(fakes.real_params(model))
    engine, infos = _engine(model, mesh), params.flatten(decoder.param_infos(model))
    leaves = params.flatten(engine.model_runner.params)
    exported = engine.export_params()
    num_alike = 0
    for path, info in infos.items():
        array, (axis, pieces) = leaves[path], rules.pieces(model, path, info, mesh)
        if not pieces:
            num_alike += 1
            np.testing.assert_array_equal(jax.device_get(array), values[path])
        sizes = [stop - start + zeros for start, stop, zeros in pieces] or [info.shape[axis]]
        assert array.shape == (*info.shape[:axis], sum(sizes), *info.shape[axis + 1 :])
        assert array.sharding.spec == rules.spec(path, info)
        exported_array = params.flatten(exported)[path]
        assert exported_array.sharding == rules.layout(path, info, engine.model_runner._mesh)
        np.testing.assert_array_equal(jax.device_get(exported_array), values[path])
    assert num_alike > len(infos) / 4
    if model is _DENSE:
        assert all(leaves[path].shape == info.shape for path, info in infos.items())
    monkeypatch.setattr(rules, "part", lambda *_: pytest.fail("the host cuts a parameter"))
    assert engine.update_params(exported) == 1
    other = Engine(engine.config, exported)  # not taken for one that is laid out already
    for leaf in jax.tree.leaves(exported):
        leaf.delete()
    for again in (engine.model_runner.params, other.model_runner.params):
        for path, leaf in params.flatten(again).items():
            assert leaf.sharding == leaves[path].sharding
            np.testing.assert_array_equal(leaf, leaves[path])


@pytest.mark.parametrize("mesh", [Mesh(model=2), Mesh(data=2, model=2), Mesh(context=2)], ids=str)
def test_a_program_of_xla_reads_a_checkpoint_from_the_chips(mesh):
    folder = "tests/golden/olmo2-gqa-tied-float32"
    tensors = load_file(f"{folder}/model.safetensors")
    checkpoint = resolve.resolve(folder).open(None)
    config = Config(checkpoint.config, EngineConfig.of(linear="reference", max_seqs=4), mesh)
    config = overrides.apply(config, ["model.dtype=float32"])
    engine = Engine.from_checkpoint(config, checkpoint)
    runner = engine.model_runner
    layer, w_VD = runner.params["layers"][1], tensors["model.embed_tokens.weight"]
    for array, name in (
        (layer["mixer"]["out"], "layers.1.self_attn.o_proj"),
        (layer["ffn"]["down"], "layers.1.mlp.down_proj"),
        (runner.params["final_norm"], "norm"),
    ):
        np.testing.assert_array_equal(jax.device_get(array), tensors[f"model.{name}.weight"])
    table = runner.params["embed"]["table"]
    np.testing.assert_array_equal(table[: len(w_VD)], w_VD)
    assert not np.any(table[len(w_VD) :])  # what fills up the last chip's part
    x_TD = np.random.default_rng(0).random((3, w_VD.shape[1]), np.float32)
    y_TD = jax.jit(lambda x_TD, w: x_TD @ w.T)(x_TD, layer["mixer"]["out"])
    expected = x_TD @ tensors["model.layers.1.self_attn.o_proj.weight"].T
    np.testing.assert_allclose(y_TD, expected, rtol=1e-5, atol=1e-6)


def test_orbax_takes_parameters_from_one_mesh_to_another(tmp_path):
    engine, values = _engine(_DENSE, Mesh(data=2, model=2)), fakes.real_params(_DENSE)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", engine.export_params())
    mesh = meshes.of(Mesh(model=4), jax.devices()[4:])
    placements = [
        lambda path, info: rules.layout(path, info, mesh),
        lambda path, info: jax.sharding.SingleDeviceSharding(jax.devices()[3]),
    ]
    infos = decoder.param_infos(_DENSE)
    for placement in placements:
        targets = {
            path: jax.ShapeDtypeStruct(info.shape, info.format, sharding=placement(path, info))
            for path, info in params.flatten(infos).items()
        }
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(tmp_path / "step", params.unflatten(infos, targets))
        for path, leaf in params.flatten(restored).items():
            assert leaf.sharding == targets[path].sharding
        jax.tree.map(np.testing.assert_array_equal, restored, values)
    engine.update_params(jax.tree.map(lambda leaf: leaf * 0, values))
    engine.update_params(tmp_path / "step")
    jax.tree.map(np.testing.assert_array_equal, engine.export_params(), values)


@pytest.mark.parametrize("mesh", _PAGES, ids=str)
def test_pages_are_those_of_one_chip(mesh):
    """In another order: of heads keys before values a chip, and of a page's tokens by chip."""
    prompts, caches = fakes.prompts([29, 17], 131, seed=4), []
    for at in (ONE_CHIP, mesh):
        engine = fakes.engine(
            _DENSE, None, "one", False, at, **_SIZES | {"page_tokens": 8 // at.context}
        )
        engine.generate(prompts, fakes.greedy(3))
        caches.append(engine.model_runner.cache)
    K, H = _DENSE.layers[0].mixer.num_kv_heads, _DENSE.layers[0].mixer.head_width
    specs = kv_cache.specs(_DENSE, engine.config.chip_model)
    for alone, over, spec in zip(*caches, specs, strict=True):
        num_pages, page_tokens, width = over.pages.shape
        assert (page_tokens, width) == alone.pages.shape[1:]
        part = num_pages, page_tokens // mesh.context, width // mesh.model
        assert over.pages.sharding.shard_shape(over.pages.shape) == part
        assert over.pages.sharding.spec == spec.pages
        rows = np.asarray(over.pages).reshape(
            num_pages, mesh.context, -1, mesh.model, 2, K // mesh.model * H
        )
        rows = rows.transpose(0, 2, 1, 4, 3, 5).reshape(num_pages, page_tokens, width)
        same = min(num_pages, len(alone.pages))
        written = np.any(np.asarray(alone.pages[1:same]), axis=2)
        assert written.sum() > sum(map(len, prompts)) / 2
        np.testing.assert_allclose(
            rows[1:same][written], np.asarray(alone.pages[1:same])[written], rtol=1e-5, atol=1e-5
        )


def test_latents_that_chips_copy_are_one_array():
    model = fakes.deepseek()
    whole, over = (_engine(model, mesh).model_runner.cache for mesh in (ONE_CHIP, Mesh(model=2)))
    for alone, leaf in zip(whole, over, strict=True):
        assert leaf.pages.shape[1:] == alone.pages.shape[1:]
        assert leaf.pages.sharding.shard_shape(leaf.pages.shape) == leaf.pages.shape


def test_scales_of_whole_rows_are_alike_on_chips_that_divide_columns():
    for format, by_group in (("w8a8", False), ("int4_g64", True)):
        w = low_bit.abstract((64, 128), format, "float32")
        specs = w.specs(PartitionSpec(None, "model"))
        assert specs.data == PartitionSpec(None, "model")
        assert specs.scale == PartitionSpec("model" if by_group else None, None)
        rows = w.specs(PartitionSpec("model"))
        assert rows.scale == PartitionSpec(None, "model")


def test_what_is_padded_is_said_once(caplog):
    with caplog.at_level(logging.INFO):
        _engine(_DENSE, Mesh(model=2))
        assert "zeros or copies" not in caplog.text
        _engine(_UNEVEN, Mesh(model=2))
    lines = [line for line in caplog.messages if "zeros or copies" in line]
    assert len(lines) == 1 and lines[0].startswith("mesh model=2: ")
    assert "embed/table" in lines[0]


@pytest.mark.parametrize("dtype, mesh", [
    ("float32", ONE_CHIP), ("bfloat16", Mesh(model=2)),
    pytest.param("float32", Mesh(model=2, context=2), marks=pytest.mark.long),
], ids=str)  # fmt: skip
def test_strips_of_the_cpu_are_exported_as_what_was_packed(mesh, dtype):
    native.need()
    model = dataclasses.replace(_DENSE, dtype=dtype)
    settings = _SIZES | {"linear": "ffi_cpu", "attention": "ffi_cpu"}
    engine = fakes.engine(model, None, "one", False, mesh, **settings)
    assert packed.is_packed(engine.model_runner.params["layers"][0]["ffn"]["down"])
    jax.tree.map(np.testing.assert_array_equal, engine.export_params(), fakes.real_params(model))


def test_weights_of_few_bits_are_not_exported():
    model = dataclasses.replace(_DENSE, formats=(("layers/1/ffn/down", ("int8",)),))
    engine = fakes.engine(model, None, "one", False, Mesh(model=2), **_SIZES)
    with pytest.raises(InputError, match="layers/1/ffn/down is stored in int8: an engine exports"):
        engine.export_params()
