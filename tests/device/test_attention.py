"""Every implementation of attention that runs on the device at hand, compiled and not interpreted,
against float64. Run by `make device`; decoding comes first.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.engine import ATTENTIONS, Config, EngineConfig
from inference.benchmark import agreement
from inference.engine import Engine
from layers.kernels.attention import api, reference
from layers.kernels.attention.contract import Demand, Options
from layers.kernels.device import target_device
from tests import fakes
from tests.device import batches
from tests.device.batches import CASES, DECODE, OTHERS
from tests.layers import paged_case

pytestmark = pytest.mark.device

SEEDS = range(2, 2 + -(-500 // len(CASES)))  # 500 batches of all cases together
_FEW_SEEDS = SEEDS[:2]  # of the reference, tested elsewhere


@functools.cache
def _program(name, window, cap):
    """(queries, pages, rectangle, sinks) -> what is attended to, and the pages, of which those that
    append get the step's tokens beside.
    """
    chosen = api.implementation(name)

    def attend(q_CWNH, pages, rectangle, sinks_N):
        options = Options(window, cap, sinks_N)
        if chosen.append_and_attend is None:
            return chosen.attend_pages(q_CWNH, pages, rectangle, 0, options), pages
        *kv, pages = paged_case.take_newest(pages, rectangle, q_CWNH.shape[-1])
        return chosen.append_and_attend(q_CWNH, *kv, pages, rectangle, 0, options)

    return jax.jit(attend)


def _stored(chosen, drawn):
    """The sequences as the implementation lays them out; token-major ones among poisoned pages."""
    if chosen.layout is reference.layout:
        return drawn.pages
    K, H = drawn.kv[0][0].shape[1:]
    shape = chosen.layout(drawn.pages.shape[0], drawn.page_tokens, K, H, drawn.dtype.name)
    k_TKH, v_TKH, ragged = drawn.contexts
    return chosen.write(jnp.zeros(shape.shape, shape.dtype), k_TKH, v_TKH, ragged, 0)


def check(name, case, seeds):
    """Within the bound of the dtype, the same bits again, and appended tokens in their places."""
    rows, chosen = CASES[case], api.implementation(name)
    demand = Demand(
        *rows.heads, rows.head_width, rows.page_tokens, rows.dtype, False, rows.window is not None
    )
    if (reason := chosen.limit(demand, target_device())) is not None:
        pytest.skip(f"{name} {reason}")
    if name == "jax_tpu" and (rows.has_sinks or rows.masks):
        pytest.skip(f"{name} knows no sinks, trees or canvases")
    program = _program(name, rows.window, rows.cap)
    for seed in seeds:
        drawn, sinks_N, asked_CW = batches.draw(case, seed)
        (q_CWNH, _, rectangle), pages = drawn.arguments, _stored(chosen, drawn)
        found, left = map(np.asarray, program(q_CWNH, pages, rectangle, sinks_N))
        drawn.check(found, rows.window, rows.cap, sinks_N, asked_CW)
        np.testing.assert_array_equal(left[1:], np.asarray(pages)[1:])
        again, _ = program(q_CWNH, pages, rectangle, sinks_N)
        np.testing.assert_array_equal(np.asarray(again)[drawn.valid_CW], found[drawn.valid_CW])


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("case", DECODE)
def test_decoding(case, name):
    check(name, case, range(2))


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("case", OTHERS)
def test_other_rows(case, name):
    check(name, case, range(2))


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("case", CASES)
def test_500_random_batches(case, name):
    check(name, case, _FEW_SEEDS if name == "reference" else SEEDS)


@pytest.mark.parametrize("name", ATTENTIONS[1:])
def test_an_engine_answers_as_with_the_reference(name):
    """Prefill, scored in tiles, of prompts longer than pages, and the tokens decoded after it, up
    to the first near-tie.
    """
    demand = Demand(4, 2, 128, 128, "bfloat16", False)
    if (reason := api.implementation(name).limit(demand, target_device())) is not None:
        pytest.skip(f"{name} {reason}")
    expected, texts = answers("reference")
    found, _ = answers(name, texts)
    assert agreement.compare(found, expected).worst < 0.05


def answers(attention, texts=None):
    """Of a small model: greedy answers, and then the scores of texts, the answers unless told."""
    model = fakes.llama("bfloat16", num_heads=4, num_kv_heads=2, head_width=128, max_context=512)
    engine = Engine(
        Config(
            model,
            EngineConfig(
                attention=attention, max_seqs=4, page_tokens=128, cache_bytes=32 << 20,
                top_logprobs=8,
            ),
        ),
        fakes.real_params(model),
    )  # fmt: skip
    prompts = fakes.prompts((300, 70, 1, 128), model.vocab_size)
    decoded = engine.generate(prompts, fakes.greedy(40))
    texts = texts or [
        [*prompt, *answer.token_ids] for prompt, answer in zip(prompts, decoded, strict=True)
    ]
    found = [
        agreement.Answer(answer.token_ids, answer.logprobs, answer.top_logprobs)
        for answer in decoded
    ]
    for text, score in zip(texts, engine.score(texts), strict=True):
        found.append(agreement.Answer(text[1:], score.logprobs, []))
    return found, texts
