"""Pages go to host memory and come back, whatever arrays a leaf is made of."""

import jax
import jax.numpy as jnp
import numpy as np

from configs.engine import Config, EngineConfig
from inference.kv_pages.prefix_cache import Transfer
from inference.runtime.swap import PageSwapper
from tests import fakes


def test_a_leaf_of_several_arrays_goes_to_the_host_and_comes_back():
    """Made-up int8 pages and their scales, in each layer of both groups."""
    model = fakes.gemma()
    engine = EngineConfig(page_tokens=8, max_seqs=2, preemption="swap", max_context=64)
    config, generator = Config(model, engine), np.random.default_rng(0)

    def leaf(layer):
        num_pages = config.num_pages[model.group_of_layer[layer]]
        pages = generator.integers(-128, 128, (num_pages, 8, 20)).astype(np.int8)
        return {"pages": pages, "scales": generator.random((num_pages, 8, 2), np.float32)}

    before = tuple(leaf(layer) for layer in range(model.num_layers))
    swapper = PageSwapper(config, before)
    out = [Transfer(0, 2, 1, True), Transfer(0, 3, 2, True), Transfer(1, 4, 1, True)]
    back = [Transfer(0, 5, 2, False), Transfer(0, 1, 1, False), Transfer(1, 2, 1, False)]
    cache = swapper.transfer(jax.tree.map(jnp.asarray, before), (tuple(out + back),))
    for layer, found in enumerate(cache):
        moved = {1: 2, 5: 3} if model.group_of_layer[layer] == 0 else {2: 4}
        for name, pages in before[layer].items():
            expected = pages.copy()
            expected[list(moved)] = pages[list(moved.values())]
            np.testing.assert_array_equal(found[name][1:], expected[1:])
