"""Pages go to host memory and come back, whatever arrays a leaf is made of."""

import gc

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.engine import Config, EngineConfig
from configs.mesh import Mesh
from inference.kv_pages.prefix_cache import Transfer
from inference.runtime import swap
from inference.runtime.model_runner import cache_arguments
from inference.runtime.swap import PageSwapper
from layers import kv_cache
from sharding import mesh as meshes
from tests import fakes


def test_a_leaf_of_several_arrays_goes_to_the_host_and_comes_back():
    """Pages and an index, in each layer of both groups."""
    model = fakes.gemma()
    engine = EngineConfig.of(page_tokens=8, max_seqs=2, preemption="swap", max_context=64)
    config, generator = Config(model, engine), np.random.default_rng(0)

    def leaf(layer):
        num_pages = config.num_pages[model.groups_of_layer[layer][0]]
        pages = generator.integers(-128, 128, (num_pages, 8, 20)).astype(np.int8)
        return kv_cache.Indexed(pages, generator.random((num_pages, 8, 2), np.float32))

    before = tuple(leaf(layer) for layer in range(model.num_layers))
    swapper = PageSwapper(config, before)
    out = [Transfer(0, 2, 1, True), Transfer(0, 3, 2, True), Transfer(1, 4, 1, True)]
    back = [Transfer(0, 5, 2, False), Transfer(0, 1, 1, False), Transfer(1, 2, 1, False)]
    cache = swapper.transfer(jax.tree.map(jnp.asarray, before), (tuple(out + back),))
    for layer, leaf in enumerate(cache):
        moved = {1: 2, 5: 3} if model.groups_of_layer[layer] == (0,) else {2: 4}
        order = [moved.get(page, page) for page in range(1, len(leaf.pages))]
        chex.assert_trees_all_equal(
            jax.tree.map(lambda pages: pages[1:], leaf),
            jax.tree.map(lambda pages, order=order: pages[order], before[layer]),
        )


@pytest.mark.parametrize("model", [
    fakes.delta(), fakes.compressed(cache_format="int8"), fakes.every_cache(cache_format="int8"),
], ids=lambda model: model.name)  # fmt: skip
def test_every_part_of_a_cache_goes_to_the_host_and_comes_back(model):
    """Of layers that are unlike each other, too: snapshots of states of several shapes."""
    engine = EngineConfig.of(max_seqs=2, page_tokens=8, preemption="swap", max_context=64)
    config, generator = Config(model, engine), np.random.default_rng(0)
    arguments = cache_arguments(config, "reference")
    before = jax.tree.map(
        lambda leaf: generator.integers(0, 100, leaf.shape).astype(leaf.dtype),
        kv_cache.abstract(*arguments),
    )
    swapper = PageSwapper(config, kv_cache.abstract(*arguments))
    groups = range(len(config.num_host_pages))
    transfers = [Transfer(group, 2, 5, True) for group in groups]
    transfers += [Transfer(group, 1, 5, False) for group in groups]
    cache = swapper.transfer(jax.tree.map(jnp.asarray, before), (tuple(transfers),))
    for group in config.cached_groups:
        for layer in group.layers:
            chex.assert_trees_all_equal(
                jax.tree.map(lambda pages: pages[1:], cache[layer].part(group.part)),
                jax.tree.map(
                    lambda pages: pages[[2, *range(2, len(pages))]], before[layer].part(group.part)
                ),
            )


class _Unfinished:
    """An array that the device is still to write."""

    is_over = False

    def __init__(self, array):
        self._array = array

    def is_ready(self):
        return self.is_over

    def copy_to_host_async(self):
        self._array.copy_to_host_async()

    def __array__(self, dtype=None, copy=None):
        assert self.is_over, "the host waits for the device"
        return np.asarray(self._array)


def test_a_launch_does_not_wait_for_pages_that_go_to_the_host(monkeypatch):
    """They are stored before a page is restored, though the device failed once; a host page that is
    read twice has the later pages; what is forgotten is never stored.
    """
    engine = EngineConfig.of(page_tokens=8, max_seqs=2, preemption="swap", max_context=64)
    config, generator = Config(fakes.llama(), engine), np.random.default_rng(0)
    arguments = cache_arguments(config, "reference")
    before = jax.tree.map(
        lambda leaf: generator.integers(0, 100, leaf.shape).astype(leaf.dtype),
        kv_cache.abstract(*arguments),
    )
    cache, swapper = jax.tree.map(jnp.asarray, before), PageSwapper(config, before)
    compiled = swapper._executable

    def unfinished(group, to_host):
        executable = compiled(group, to_host)
        return lambda *arguments: jax.tree.map(_Unfinished, executable(*arguments))

    monkeypatch.setattr(swapper, "_executable", unfinished)
    cache = swapper.transfer(cache, ((Transfer(0, 7, 1, True),),))
    swapper.forget_reads()
    for page, host_page in ((2, 1), (3, 2), (4, 2)):
        cache = swapper.transfer(cache, ((Transfer(0, page, host_page, True),),))
    with pytest.raises(AssertionError, match="the host waits"):
        swapper.store()
    monkeypatch.setattr(swapper, "_executable", compiled)
    monkeypatch.setattr(_Unfinished, "is_over", True)
    cache = swapper.transfer(cache, ((Transfer(0, 5, 2, False), Transfer(0, 6, 1, False)),))
    for pages, old in zip(jax.tree.leaves(cache), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(pages[5:7], [old[4], old[2]])


def test_only_a_few_reads_keep_memory_on_the_device():
    engine = EngineConfig.of(page_tokens=8, max_seqs=2, preemption="swap", max_context=64)
    config = Config(fakes.llama(), engine)
    arguments = cache_arguments(config, "reference")
    swapper, cache = PageSwapper(config, kv_cache.abstract(*arguments)), kv_cache.init(*arguments)
    out = tuple(Transfer(0, 1, host_page, True) for host_page in range(1, 1 + 8 * swap.PAGES))
    swapper.warm_up()
    before = _device_bytes()
    swapper.transfer(cache, (out,))
    page_bytes = sum(leaf.nbytes // leaf.shape[0] for leaf in jax.tree.leaves(cache))
    assert 0 < _device_bytes() - before <= swap._MOST_READS * swap.PAGES * page_bytes
    swapper.store()
    assert _device_bytes() == before


def test_no_device_memory_is_kept_once_it_is_to_be_free():
    """Of what the other data shard's sinks receive with each page."""
    engine = EngineConfig.of(page_tokens=8, max_seqs=2, max_context=64, cache_bytes=1 << 16)
    config = Config(fakes.llama(), engine, Mesh(data=2))
    mesh, arguments = meshes.of(config.mesh), cache_arguments(config, "reference")
    specs = kv_cache.specs(config.model, config.chip_model)
    cache = meshes.put(mesh, specs, lambda *_: kv_cache.init(*arguments))
    before = _device_bytes()
    swapper = PageSwapper(config, kv_cache.abstract(*arguments), mesh)
    sender = PageSwapper(Config(fakes.llama(), engine), kv_cache.abstract(*arguments))
    sent = sender.read(kv_cache.init(*arguments), 0, [1, 2])
    cache = swapper.receive(cache, 0, [3, 4], sent, 1)
    del sent
    assert _device_bytes() > before
    swapper.free()
    assert _device_bytes() == before


def _device_bytes():
    """Arrays that share a buffer count once."""
    gc.collect()
    shards = [shard.data for array in jax.live_arrays() for shard in array.addressable_shards]
    buffers = {shard.unsafe_buffer_pointer(): shard.nbytes for shard in shards}
    return sum(buffers.values())
