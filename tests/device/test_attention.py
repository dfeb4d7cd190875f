"""Every implementation of attention that runs on the device at hand, compiled and not interpreted,
against float64. Run by `make device`; decoding comes first.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.cache import keys_values
from configs.engine import Config, EngineConfig
from configs.settings.kernels import ATTENTIONS
from inference.engine import Engine
from layers import page_rows
from layers.kernels.attention import api
from layers.kernels.attention.contract import Demand
from layers.kernels.device import target_device
from tests import fakes
from tests.device import batches
from tests.device.answers import check_engine
from tests.device.batches import CASES, DECODE, LATENTS, OTHERS
from tests.layers import paged_case

pytestmark = pytest.mark.device

SEEDS = range(2, 2 + -(-500 // len(CASES)))  # 500 batches of all cases together
_FEW_SEEDS = SEEDS[:2]  # of the reference, tested elsewhere


@functools.cache
def _program(name, page_format, window, cap):
    """(queries, pages, rectangle, sinks) -> what is attended to, and the pages, of which those that
    append get the step's tokens beside.
    """
    chosen = api.implementation(name)

    def attend(q_YWNH, pages, rectangle, sinks_N):
        options = paged_case.options(window, cap, sinks_N)
        told = rectangle, 0, page_format, options
        if chosen.append_and_attend is None:
            return chosen.attend_pages(q_YWNH, pages, *told), pages
        row_YWX, pages = paged_case.take_newest(pages, rectangle)
        return chosen.append_and_attend(q_YWNH, row_YWX, pages, *told)

    return jax.jit(attend)


def _stored(chosen, drawn):
    """The sequences as the implementation lays them out; token-major ones among poisoned pages."""
    if chosen.layout is page_rows.token_major:
        return drawn.pages
    shape = chosen.layout(drawn.pages.shape[0], drawn.page_tokens, drawn.page_format)
    return chosen.write(jnp.zeros(shape.shape, shape.dtype), *drawn.contexts, 0)


def check(name, case, seeds):
    """Within the bound of the dtype, the same bits again, and appended tokens where they belong."""
    rows, chosen = CASES[case], api.implementation(name)
    page_format = batches.page_format(case)
    sight = paged_case.sight(rows.window)
    demand = Demand(
        rows.heads[0], page_format, rows.page_tokens, False, sight.window is not None,
        has_first_tokens=sight.first_tokens > 0,
    )  # fmt: skip
    if (reason := chosen.limit(demand, target_device())) is not None:
        pytest.skip(f"{name} {reason}")
    if name == "jax_tpu" and (rows.has_sinks or rows.masks):
        pytest.skip(f"{name} knows no sinks, trees or canvases")
    program = _program(name, page_format, rows.window, rows.cap)
    for seed in seeds:
        drawn, sinks_N, asked_YW = batches.draw(case, seed)
        (q_YWNH, _, rectangle), pages = drawn.arguments, _stored(chosen, drawn)
        found, left = map(np.asarray, program(q_YWNH, pages, rectangle, sinks_N))
        is_rounded = name.startswith(
            "pallas"
        )  # a row that is not split is written in the queries' dtype
        drawn.check(found, rows.window, rows.cap, sinks_N, asked_YW, is_rounded)
        np.testing.assert_array_equal(left[1:], np.asarray(pages)[1:])
        again, _ = program(q_YWNH, pages, rectangle, sinks_N)
        np.testing.assert_array_equal(np.asarray(again)[drawn.valid_YW], found[drawn.valid_YW])


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("case", DECODE)
def test_decoding(case, name):
    check(name, case, range(2))


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("case", OTHERS | LATENTS)
def test_other_rows(case, name):
    check(name, case, range(2))


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("case", CASES)
def test_500_random_batches(case, name):
    check(name, case, _FEW_SEEDS if name == "reference" else SEEDS)


@pytest.mark.parametrize("name", ATTENTIONS[1:])
def test_an_engine_answers_as_with_the_reference(name):
    """Prefill, scored in chunks, of prompts longer than pages, and the tokens decoded after it, up
    to the first near-tie; products and norms are the back end's, too.
    """
    demand = Demand(4, keys_values(2, 128).page_format("bfloat16"), 128, False)
    if (reason := api.implementation(name).limit(demand, target_device())) is not None:
        pytest.skip(f"{name} {reason}")
    model = fakes.llama("bfloat16", num_heads=4, num_kv_heads=2, head_width=128, max_context=512)
    check_engine(_engine, model, name)


def _engine(attention, model, params):
    settings = EngineConfig.of(
        attention=attention, max_seqs=4, page_tokens=128, cache_bytes=32 << 20, top_logprobs=8
    )
    return Engine(Config(model, settings), params)
