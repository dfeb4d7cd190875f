"""What a chip does and holds of a long sequence whose tokens chips along `context` divide."""

import dataclasses

import pytest

from configs import presets
from configs.engine import Config, EngineConfig
from configs.mesh import Mesh
from inference.planner.cost import Work, step_operations
from inference.planner.roofline import per_chip

_TOKENS = 1_000_000
_PAGE = 128


@pytest.fixture(scope="module")
def model():
    return dataclasses.replace(presets.get("llama3-8b").config, max_context=_TOKENS)


@pytest.mark.parametrize("chips", [2, 4, 8])
@pytest.mark.parametrize("work", [Work.decode(3, _TOKENS), Work.prefill(1, 4096)], ids=str)
def test_attention_falls_as_one_by_the_chips(model, work, chips):
    """Bytes of the cache and FLOPs, and nothing else that is not divided by columns."""
    operations = step_operations(model, work)
    attention = [operation for operation in operations if operation.kind == "attention"]
    assert attention
    for operation in attention:
        whole, part = (per_chip(operation, Mesh(model=2, context=n)) for n in (1, chips))
        assert part.flops * chips == whole.flops > 0
        assert part.cache_bytes * chips == whole.cache_bytes > 0
        assert part.activation_bytes == whole.activation_bytes  # queries and results are whole


@pytest.mark.parametrize("chips", [2, 4, 8])
def test_the_cache_falls_as_one_by_the_chips_to_a_page(model, chips):
    engine = EngineConfig.of(max_seqs=1, max_context=_TOKENS, page_tokens=_PAGE)
    whole, part = (Config(model, engine, Mesh(model=2, context=n)).with_room(1) for n in (1, chips))
    (page_bytes,) = model.page_bytes(_PAGE)
    page_bytes //= 2  # half of the heads
    pages = [-(-_TOKENS // (_PAGE * n)) for n in (1, chips)]
    assert [config.peak_pages(_TOKENS)[0] for config in (whole, part)] == pages
    extra = whole.pool_bytes - pages[0] * page_bytes  # the padding page
    assert part.pool_bytes == pages[1] * page_bytes + extra
    assert 0 <= pages[1] * chips - pages[0] < chips
