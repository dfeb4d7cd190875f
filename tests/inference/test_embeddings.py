"""Vectors of prompts: the model's own hidden states, whatever they are computed beside."""

import dataclasses
import functools
from pathlib import Path

import chex
import numpy as np
import pytest

from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.mesh import ONE_CHIP, Mesh
from configs.prefill import Prefill
from inference.checkpoints import resolve
from inference.engine import Engine
from inference.request import POOLINGS, SamplingParams
from inference.runtime.batch import build_batch
from inference.sampling import prompt_results
from inference.scheduling.step_schedule import ShardSchedule
from inference.scheduling.step_shapes import enumerate_shapes
from inference.server.engine_process.served_engine import ServedEngine
from layers import decoder
from layers.ragged import contiguous
from tests import compiling, fakes

pytestmark = pytest.mark.quick_code

LENGTHS = (37, 5, 100, 16, 1, 64)  # beyond pages of 8 and the window of 20
MODELS = {
    "llama": fakes.llama(),
    "windows": fakes.gemma(),
    "states": fakes.jamba(),
    "bfloat16": fakes.llama("bfloat16"),
}
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "llama-tokenizer"


def make(model, shapes="riding", **settings):
    sizes = {"max_seqs": 4, "decode_rows": (4,), "chunk_tokens": 16, "prefill_chunks": (3,)}
    own = {"page_tokens": 8, "embeddings": True} | sizes | settings
    return fakes.engine(model, None, shapes, False, **own)


def prompts(seed=0):
    return fakes.prompts(LENGTHS, 131, seed)


@functools.cache
def hidden(model):
    """Final hidden states of every prompt without pages, chunks or neighbours, f32[T, D] each."""
    params = fakes.real_params(model)

    @compiling.jit
    def forward(tokens_T):
        return decoder.forward(params, model, tokens_T, contiguous(1, 128))[0]

    padded = [np.pad(prompt, (0, 128 - len(prompt))) for prompt in prompts()]
    return [
        np.asarray(forward(tokens_T), np.float32)[:n]
        for tokens_T, n in zip(padded, LENGTHS, strict=True)
    ]


def expected(model, pooling):
    take = {"last": lambda h_TD: h_TD[-1], "mean": lambda h_TD: h_TD.mean(0, dtype=np.float64)}
    return [take[pooling](h_TD) for h_TD in hidden(model)]


def assert_close(found, wanted, bound=1e-5):
    for a, b in zip(found, wanted, strict=True):
        chex.assert_type(a, np.float32)
        chex.assert_shape(a, np.shape(b))
        np.testing.assert_allclose(a, b, atol=bound, rtol=bound)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("name", [
    "llama", "windows", "states", pytest.param("bfloat16", marks=pytest.mark.long),
])  # fmt: skip
def test_vectors_are_the_models_hidden_states(name, pooling):
    """In float32 within 1e-5 of numbers of about 1; in bfloat16 the norm's result has 8 bits."""
    model = MODELS[name]
    found = make(model).embed(prompts(), pooling)
    assert_close(found, expected(model, pooling), 0.05 if name == "bfloat16" else 1e-5)
    assert np.abs(found[0]).max() > 0.2


@pytest.mark.parametrize("pooling", POOLINGS)
def test_their_logits_are_those_of_transformers(pooling):
    """Logits are linear in hidden states: the head makes of a mean of these the mean of those."""
    checkpoint = resolve.resolve(str(GOLDEN)).open(None)
    model = dataclasses.replace(checkpoint.config, dtype="float32")
    params = checkpoint.load_params(decoder.param_infos(model), None)
    engine = Engine(Config(model, EngineConfig.of(max_seqs=2, embeddings=True)), lambda: params)
    table_VD = np.asarray(params["embed" if model.tied else "head"]["table"], np.float32)
    with np.load(GOLDEN / "expected.npz") as file:
        texts = [file[f"tokens_{i}"].tolist() for i in (0, 1)]
        logits = [file[f"logits_{i}"] for i in (0, 1)]
    wanted = [each_TV[-1] if pooling == "last" else each_TV.mean(0) for each_TV in logits]
    assert_close([table_VD @ each for each in engine.embed(texts, pooling)], wanted, 1e-4)


@pytest.mark.quick_code(False)
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("name", ["llama", pytest.param("states", marks=pytest.mark.long)])
def test_neighbours_and_chunks_change_no_bit(name, pooling):
    model = MODELS[name]
    engine = make(model, deterministic=True, prefix_cache=False)
    together = engine.embed(prompts(), pooling)
    alone = [engine.embed([prompt], pooling)[0] for prompt in prompts()]
    ids = [engine.add_request(prompt, fakes.greedy(30)) for prompt in prompts(seed=1)[:3]]
    beside = engine.embed(prompts(), pooling)
    for id in ids:
        engine.abort(id)
    # A sum has the order of its chunks.
    sizes = {"chunk_tokens": 128} if pooling == "last" else {}
    other = make(model, deterministic=True, prefix_cache=False, prefill_chunks=(1,), **sizes)
    for found in (alone, beside, other.embed(prompts(), pooling)):
        assert [a.tobytes() for a in found] == [a.tobytes() for a in together]


@pytest.mark.parametrize("pooling", POOLINGS)
def test_cached_prefixes_serve_the_last_token_alone(pooling):
    engine = make(MODELS["llama"])
    first = engine.embed(prompts(), pooling)
    params = SamplingParams(max_new_tokens=0, pooling=pooling)
    id, found = engine.add_request(prompts()[2], params), []
    while not found:
        found = engine.step()
    (output,) = found
    assert (output.id, output.finish_reason, output.token_ids) == (id, "length", [])
    assert output.num_cached_tokens == (96 if pooling == "last" else 0)
    assert_close([np.frombuffer(output.embedding, "<f4")], [first[2]])
    # What it has cached serves others.
    answer = engine.generate([prompts()[2]], fakes.greedy(4))[0]
    fresh = make(MODELS["llama"]).generate([prompts()[2]], fakes.greedy(4))[0]
    assert answer.token_ids == fresh.token_ids


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("preempt, restart", [(5, 0), (0, 7)])
def test_disturbed_prompts_are_read_once(pooling, preempt, restart):
    engine = make(MODELS["windows"], shapes="one", chunk_tokens=32)
    params = SamplingParams(max_new_tokens=0, pooling=pooling)
    ids = [engine.add_request(prompt, params) for prompt in prompts()]
    ids.append(engine.add_request(prompts()[0], fakes.greedy(9)))
    groups = [engine._requests[id].group for id in ids]
    fakes.drain_disturbed(engine, preempt, restart)
    assert engine.scheduler.counters.num_preemptions or restart
    found = [group.sequences[0].embedding for group in groups[:-1]]
    assert_close(found, expected(MODELS["windows"], pooling))


@pytest.mark.parametrize("mesh, prefill", [
    (Mesh(data=2, model=2), Prefill()), (ONE_CHIP, Prefill(chips=1)),
], ids=["mesh", "chips of prefill"])  # fmt: skip
def test_several_chips_give_the_same(mesh, prefill):
    engine = make(MODELS["llama"], mesh=mesh, prefill=prefill)
    for pooling in POOLINGS:
        assert_close(engine.embed(prompts(), pooling), expected(MODELS["llama"], pooling))
    assert not engine.scheduler.has_work


def test_a_nan_ends_its_own_request():
    model, poison = MODELS["llama"], 130
    params = fakes.real_params(model)
    table = params["embed"]["table"].at[poison].set(np.nan)
    sizes = {"max_seqs": 4, "decode_rows": (4,), "chunk_tokens": 16, "prefill_chunks": (3,)}
    engine = fakes.engine(
        model, params | {"embed": {"table": table}}, draws=False, page_tokens=8, embeddings=True,
        **sizes,
    )  # fmt: skip
    good = [[token % poison for token in prompt] for prompt in prompts()[:2]]
    for pooling in POOLINGS:
        with pytest.raises(InputError, match="non-finite logits for text 1"):
            engine.embed([good[0], [1] * 20 + [poison] + [2] * 3, good[1]], pooling)
        assert_close(engine.embed(good, pooling), make(model).embed(good, pooling))


def test_other_steps_stay_as_they_are():
    """As many shapes as without; and where nothing can be pooled, nothing of it is in a step."""
    plain, embedding = (
        EngineConfig.of(embeddings=has_embeddings) for has_embeddings in (False, True)
    )
    shapes = enumerate_shapes(plain)
    assert shapes == enumerate_shapes(embedding)
    config = Config(MODELS["llama"], plain)
    batches = [build_batch(shape, ShardSchedule(), config) for shape in shapes]
    assert all(batch.is_pooled_YW is None for batch in batches)
    assert not prompt_results.pool(shapes[0], np.zeros((9, 24)), None).size


def test_a_server_says_how_vectors_are_made():
    for embeddings, pooling in ((True, "mean"), (False, None)):
        engine = make(MODELS["llama"], embeddings=embeddings)
        facts = ServedEngine(engine, "tiny", lambda: None, pooling="mean").facts()
        assert (facts.pooling, facts.embedding_width) == (pooling, 24)


def test_bad_requests():
    engine = make(MODELS["llama"])
    with pytest.raises(InputError, match="the prompt is empty"):
        engine.embed([[]])
    with pytest.raises(InputError, match="one text is given where a list"):
        engine.embed("text")
    with pytest.raises(InputError, match="pooling is one of last, mean, not 'max'"):
        engine.embed([[1]], "max")
    with pytest.raises(InputError, match="the prompt has 257 tokens, the context holds 256"):
        engine.embed([[1] * 257])
    with pytest.raises(InputError, match="give max_new_tokens=0, not 128"):
        SamplingParams(pooling="last")
    with pytest.raises(InputError, match="leave n=1"):
        SamplingParams(max_new_tokens=0, pooling="last", n=2)
    with pytest.raises(InputError, match="engine.requests.embeddings=true"):
        make(MODELS["llama"], embeddings=False).embed([[1, 2]])
    id = engine.add_request([1, 2, 3], SamplingParams(max_new_tokens=0, pooling="mean"))
    with pytest.raises(InputError, match="nothing to fork"):
        engine.fork(id, fakes.greedy(3))
    engine.abort(id)
    assert len(engine.embed([[1]])[0]) == 24 and not engine.scheduler.has_work
