"""What chips along `context` hold and see of a sequence."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.mesh import Mesh
from layers.kernels.attention.mask import MaskBounds, on_chip, visible
from tests import fakes, newer_fakes

pytestmark = pytest.mark.quick_code

_POSITIONS = 40


@given(st.data(), st.integers(1, 5))
def test_a_mask_is_that_of_the_tokens_that_a_chip_holds(data, chips):
    def positions(largest):
        return np.array([data.draw(st.lists(st.integers(0, largest), min_size=3, max_size=3))])

    last_YW = positions(_POSITIONS - 1)
    first_YW = np.minimum(positions(_POSITIONS), last_YW) if data.draw(st.booleans()) else None
    head_YW = None if first_YW is None else np.full_like(last_YW, data.draw(st.integers(0, 9)))
    bounds = MaskBounds(last_YW, first_YW, head_YW=head_YW)

    def seen(position_S, bounds):
        return visible(position_S, *jax.tree.map(lambda x_YW: x_YW[:, :, None], bounds))

    whole_YWS = seen(np.arange(_POSITIONS), bounds)
    for chip in range(chips):
        own_S = np.arange(chip, _POSITIONS, chips)
        local_YWS = seen(np.arange(len(own_S)), on_chip(bounds, chip, chips))
        np.testing.assert_array_equal(local_YWS, whole_YWS[:, :, own_S])


def test_a_page_is_divided():
    engine = EngineConfig.of(max_seqs=2, page_tokens=8, max_context=200)
    one, four = (Config(fakes.llama(), engine, Mesh(context=n)) for n in (1, 4))
    assert (four.page_tokens, four.chip_page_tokens) == (32, 8)
    assert four.peak_pages(200)[0] == -(-200 // 32)
    assert four.page_columns * 8 == 128 and one.page_columns * 8 == 256
    bytes_of = [config.full_bytes(1) - config.full_bytes(0) for config in (one, four)]
    assert bytes_of[1] * 25 == bytes_of[0] * 7  # pages of 8 and of 32 tokens


@pytest.mark.parametrize("model, settings, message", [
    (newer_fakes.deepseek_v4(), {}, "context=2: .* chooses tokens by an indexer"),
    (fakes.llama(token_budget=16), {}, "context=2: .* chooses pages by their extremes"),
    (fakes.llama(), {"prompt_budgets": True}, "prompt_budgets: .* mesh.context=2 divides them"),
])  # fmt: skip
def test_what_does_not_go_with_divided_tokens(model, settings, message):
    with pytest.raises(InputError, match=message):
        Config(model, EngineConfig.of(**settings), Mesh(context=2))
