"""An engine with the attention that it names: the reference, another layout of pages, a kernel in
its interpreter.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax.experimental.pallas import tpu as pltpu

from configs import engine as engine_config
from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.precision import CACHE_FORMATS
from inference.engine import Engine
from inference.request import SamplingParams
from inference.runtime import model_runner
from inference.scheduling.sequence import Sequence
from layers import page_rows
from layers.kernels.attention import api, gpu, reference, tpu
from layers.kernels.attention.contract import Implementation
from layers.kernels.device import Device
from tests import fakes
from tests.interpreted import threads_are_compiled_once  # noqa: F401

pytestmark = pytest.mark.quick_code

_SIZES = {
    "max_seqs": 4, "decode_rows": (4,), "page_tokens": 8, "chunk_tokens": 16,
    "prefill_chunks": (2,),
}  # fmt: skip


def _engine(model, **settings) -> Engine:
    """One shape for all steps: what differs is compiled for every engine."""
    config = Config(model, EngineConfig.of(**(_SIZES | settings)))
    engine = Engine(config, fakes.real_params(model))
    engine.scheduler.shapes = engine.scheduler.shapes[-1:]
    return engine


def _tokens(engine: Engine, lengths=(20, 3, 50, 9, 33), num_tokens: int = 8) -> list[list[int]]:
    prompts = fakes.prompts(lengths, engine.config.model.vocab_size)
    return [answer.token_ids for answer in engine.generate(prompts, fakes.greedy(num_tokens))]


def test_the_reference_by_name_is_what_runs_without_one():
    model = fakes.llama(max_context=128)
    with fakes.no_draws():
        assert _tokens(_engine(model, attention="reference")) == _tokens(_engine(model))


@pytest.mark.parametrize("model", [
    fakes.deepseek(max_context=128),
    pytest.param(fakes.deepseek(max_context=128, cache_format="int8"), marks=pytest.mark.long),
], ids=["latents", "quantized latents"])  # fmt: skip
def test_the_reference_reads_rows_that_a_tpu_pads(monkeypatch, model):
    """On a TPU rows of latents and of bytes are whole lanes; what is read and planned is equal."""
    with fakes.no_draws():
        expected = _tokens(_engine(model, attention="reference"))
        monkeypatch.setattr(engine_config, "padded_caches", lambda *_: tuple(CACHE_FORMATS))
        padded = _engine(model, attention="reference")
        widths = {leaf.pages.shape[2] for leaf in padded.model_runner.cache}
        assert widths == {128} and _tokens(padded) == expected
    held = sum(leaf.pages.nbytes for leaf in padded.model_runner.cache)
    assert held == padded.config.pool_bytes


def test_what_cannot_run_is_refused_before_weights_are_read():
    class Unread:
        def load_params(self, *args):
            raise AssertionError("weights were read")

    config = Config(fakes.llama(), EngineConfig.of(attention="pallas_gpu"))
    with pytest.raises(InputError, match="pallas_gpu runs on Hopper GPUs .* not on cpu"):
        Engine.from_checkpoint(config, Unread())
    with pytest.raises(InputError, match="pallas_gpu runs on Hopper GPUs .* not on cpu"):
        Engine(config, fakes.real_params(config.model))


@pytest.mark.parametrize(("platform", "tokens"), [("cpu", 16), ("gpu", 64), ("tpu", 128)])
def test_pages_are_of_the_size_that_suits_the_device(platform, tokens, monkeypatch):
    """In the engine's arrays, and in what its scheduler counts."""
    monkeypatch.setattr(model_runner, "target_device", lambda: Device(platform, "a chip", 1))
    model = fakes.llama(max_context=512)
    settings = EngineConfig.of(max_seqs=2, linear="reference")
    engine = Engine(Config(model, settings), fakes.real_params(model))
    assert engine.config.engine.cache.page_tokens == tokens
    assert {leaf.pages.shape[1] for leaf in engine.model_runner.cache} == {tokens}
    sequence = Sequence(0, SamplingParams(), [1] * 300, 300)
    engine.scheduler.add(sequence)
    engine.scheduler.schedule()
    assert [len(pages) for pages in sequence.pages] == [-(-sequence.num_scheduled_tokens // tokens)]


# --- another layout -------------------------------------------------------------------------------


def _heads_layout(num_pages, page_tokens, page_format):
    """Keys and values of a head beside each other, [pages, page tokens, 2 K, H]."""
    shape = num_pages, page_tokens, 2 * page_format.kv_heads, page_format.key_width
    return jax.ShapeDtypeStruct(shape, page_rows.stored_dtype(page_format.dtype))


def _heads_write(pages, row_TX, ragged, group):
    halves = jnp.split(row_TX, 2, axis=1)
    heads_TXH = jnp.stack(halves, axis=2).reshape(len(row_TX), *pages.shape[2:])
    return page_rows.write(pages, heads_TXH, ragged, group)


def _heads_attend(q_YWNH, pages, *told):
    halves = pages[:, :, 0::2], pages[:, :, 1::2]
    token_major = jnp.concatenate(halves, axis=2).reshape(*pages.shape[:2], -1)
    return reference.attend_pages(q_YWNH, token_major, *told)


def test_whole_pages_move_in_any_layout(monkeypatch):
    """Shared, copied on write, evicted into the host's memory and back: the same tokens."""
    model = fakes.llama(max_context=128)

    def run() -> list:
        engine = _engine(model, preemption="swap", cache_bytes=60_000)
        lengths = 60, 3, 50, 9, 64, 60
        tokens = [_tokens(engine, lengths, num_tokens=20) for _ in range(2)]
        samples = SamplingParams(max_new_tokens=6, n=3, temperature=1.5, seed=1)
        prompt = fakes.prompts((21,), model.vocab_size)
        answers = engine.generate(prompt, samples)[0]
        assert engine.scheduler.counters.num_restored_pages
        return [tokens, [answer.token_ids for answer in (answers, *answers.others)]]

    expected = run()
    heads = Implementation(reference.limit, _heads_layout, _heads_write, _heads_attend)
    monkeypatch.setattr(api, "implementation", lambda name: heads)
    monkeypatch.setattr(api, "choose", lambda config: api.Choice("heads", {}))
    assert run() == expected


# --- a kernel -------------------------------------------------------------------------------------


_HOPPER = Implementation(
    gpu.limit, page_rows.token_major, page_rows.write,
    functools.partial(gpu.attend_pages, num_splits=2, interpret=InterpretGPUParams()),
)  # fmt: skip
_TPU = Implementation(
    tpu.limit, page_rows.token_major, page_rows.write,
    functools.partial(tpu.attend_pages, interpret=pltpu.InterpretParams()),
    functools.partial(tpu.append_and_attend, interpret=pltpu.InterpretParams()),
)  # fmt: skip


@pytest.mark.parametrize("kernel", [_HOPPER, _TPU], ids=["pallas_gpu", "pallas_tpu"])
def test_the_step_with_a_kernel_gives_the_reference_tokens(kernel, monkeypatch):
    """Interpreted: decode rows with padding, prefill chunks, a window and a soft cap."""
    widths = {"num_heads": 2, "num_kv_heads": 1, "head_width": 64, "max_context": 256}
    model = fakes.quirks("bfloat16", **widths)
    sizes = {"page_tokens": 64, "chunk_tokens": 32, "decode_rows": (3,), "max_seqs": 3}
    sizes |= {"overlap": False}
    with fakes.no_draws():
        expected = _tokens(_engine(model, **sizes), (70, 3), 2)
        monkeypatch.setattr(api, "implementation", lambda name: kernel)
        monkeypatch.setattr(api, "choose", lambda config: api.Choice("kernel", {}))
        assert _tokens(_engine(model, **sizes), (70, 3), 2) == expected
