import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import presets
from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.kinds.params import ParamInfo
from configs.model import LayerSpec, ModelConfig
from layers import decoder, params

_TINY = ModelConfig(
    "tiny", "llama", 31, width=12, num_layers=2, max_context=64,
    pattern=(LayerSpec(Attention(4, 2, 6), Gated(20)),),
)  # fmt: skip


def test_init_follows_the_declaration():
    infos = {
        "matrix": ParamInfo((64, 256), "bfloat16", ("ffn", "embed")),
        "norms": tuple(ParamInfo((8,), "float32", (None,), init) for init in ("ones", "zeros")),
    }
    values = params.init(infos, seed=3)
    assert jax.tree.structure(values) == jax.tree.structure(infos, is_leaf=params.is_info)
    matrix = np.asarray(values["matrix"], np.float32)
    assert values["matrix"].dtype == jnp.bfloat16
    assert abs(matrix.mean()) < 0.002 and abs(matrix.std() * 16 - 1) < 0.05  # variance 1 / fan-in
    assert (values["norms"][0] == 1).all() and (values["norms"][1] == 0).all()


def test_init_depends_on_seed_and_place_only():
    infos = dict.fromkeys("ab", ParamInfo((4, 4), "float32", (None, None)))
    first, again, other = params.init(infos, 0), params.init(infos, 0), params.init(infos, 1)
    assert (first["a"] == again["a"]).all()
    assert not (first["a"] == other["a"]).any()
    assert not (first["a"] == first["b"]).any()


def test_paths_name_every_leaf_and_lead_back():
    infos = decoder.param_infos(_TINY)
    flat = params.flatten(infos)
    assert {"embed/table", "head/table", "final_norm", "layers/1/mixer/qkv"} <= set(flat)
    assert flat["layers/0/ffn/gate_up"].shape == (40, 12)
    values = params.init(infos)
    leaves = dict(reversed(params.flatten(values).items()))  # by path, not by order
    restored = params.unflatten(infos, leaves)
    chex.assert_trees_all_equal(restored, values)


@pytest.mark.parametrize("name", presets.NAMES)
def test_byte_counts_and_shapes_without_arrays(name):
    """Seventy billion parameters: nothing may be allocated to learn a size."""
    infos = decoder.param_infos(presets.get(name).config)
    shapes = jax.tree.leaves(params.abstract(infos))
    assert params.num_bytes(infos) == sum(leaf.size * leaf.dtype.itemsize for leaf in shapes)
    for info in jax.tree.leaves(infos, is_leaf=params.is_info):
        assert len(info.logical_axes) == len(info.shape)
