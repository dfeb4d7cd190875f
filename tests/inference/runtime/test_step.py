"""Invariants of the step on tiny random models: what may not change a token, down to its bits."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.model import ModelConfig
from inference.request import SamplingParams
from inference.runtime import naive, step
from inference.runtime.model_runner import ModelRunner
from inference.scheduling.sequence import Sequence
from inference.scheduling.step_shapes import StepShape
from inference.speculation import draft_tree
from inference.speculation.proposer import Drafts
from layers.ragged import Ragged, Rectangle
from tests import accelerators, compiling, fakes

LENGTHS = (37, 5, 100, 18, 40, 1, 64, 16)  # beyond pages of 8 and the window of 20
NEW = 24
MODELS = {
    "llama float32": fakes.llama(),
    "llama bfloat16": fakes.llama("bfloat16"),
    "gemma float32": fakes.gemma(),
    "quirks float32": fakes.quirks(),
    "every cache float32": fakes.every_cache(),
    "delta float32": fakes.delta(),
    "jamba float32": fakes.jamba(),
    "linear float32": fakes.linear(),
}
CHUNKS = {
    "whole": {"chunk_tokens": 128, "prefill_chunks": (1,)},
    "chunks": {"chunk_tokens": 16, "prefill_chunks": (3,)},
}


def make(model: str, chunks: str = "chunks", deterministic: bool = False, draws: bool = True):
    """Every shape where shapes are what is compared, and samples from one model alone."""
    is_first = model == "llama float32" and chunks == "chunks"
    shapes = "all" if is_first else "one" if chunks == "whole" else "riding"
    settings = {"max_seqs": 8, "decode_rows": (8,), "page_tokens": 8, **CHUNKS[chunks]}
    return fakes.engine(
        MODELS[model], None, shapes, is_first and draws, deterministic=deterministic, **settings
    )


def prompts():
    return fakes.prompts(LENGTHS, 131)


def results(completions):
    return [(c.token_ids, c.logprobs) for c in completions]


@functools.cache
def _together(model: str, chunks: str, deterministic: bool, is_quick: bool):
    return results(make(model, chunks, deterministic).generate(prompts(), fakes.greedy(NEW)))


def together(model: str, chunks: str = "chunks", deterministic: bool = False):
    """Tokens and log-probabilities of eight requests side by side."""
    return _together(model, chunks, deterministic, compiling.is_quick())


def assert_close(found, expected, tolerance=0.02):
    for (tokens, logprobs), (expected_tokens, expected_logprobs) in zip(
        found, expected, strict=True
    ):
        assert tokens == expected_tokens
        np.testing.assert_allclose(logprobs, expected_logprobs, atol=tolerance)


def scores(engine, expected):
    """Scores of the generated texts: those of the generated tokens."""
    texts = [prompt + tokens for prompt, (tokens, _) in zip(prompts(), expected, strict=True)]
    scored = engine.score(texts)
    for score, text in zip(scored, texts, strict=True):
        assert score.token_ids == text and len(score.logprobs) == len(text) - 1
    return [(score.token_ids[-NEW:], score.logprobs[-NEW:]) for score in scored]


@pytest.mark.quick_code
def test_the_models_say_something():
    for tokens, logprobs in together("llama float32"):
        assert len(tokens) == NEW and len(set(tokens)) > 4
        assert np.isfinite(logprobs).all() and max(logprobs) < 0


# --- deterministic: bits --------------------------------------------------------------------------

BITWISE = [
    ("llama float32", "whole"),
    ("llama float32", "chunks"),
    ("gemma float32", "chunks"),
    ("quirks float32", "whole"),
    ("jamba float32", "whole"),
    *(  # whose parts are those of `test_invariance`'s hybrid, or pure functions with tests of bits
        pytest.param(f"{name} float32", "whole", marks=pytest.mark.long)
        for name in ("delta", "linear")
    ),
    *(  # of which `test_invariance` says the same
        pytest.param("llama bfloat16", chunks, marks=pytest.mark.long) for chunks in CHUNKS
    ),
]


@pytest.mark.parametrize("model", [
    "llama float32", "quirks float32", "jamba float32",
    *(pytest.param(model, marks=pytest.mark.long)
      for model in ("delta float32", "linear float32", "llama bfloat16")),
])  # fmt: skip
def test_chunks_change_no_bit(model):
    assert together(model, "whole", True) == together(model, "chunks", True)


@pytest.mark.parametrize("model, chunks", BITWISE)
def test_neighbours_change_no_bit(model, chunks):
    engine, expected = make(model, chunks, True), together(model, chunks, True)
    for i in (0, 1, 5):
        assert results(engine.generate([prompts()[i]], fakes.greedy(NEW))) == [expected[i]]
    backwards = results(engine.generate(prompts()[::-1], fakes.greedy(NEW)))
    assert backwards[::-1] == expected


@pytest.mark.parametrize("model", [
    "llama float32", pytest.param("llama bfloat16", marks=pytest.mark.long),
])  # fmt: skip
def test_scores_are_the_reported_logprobs_bit_by_bit(model):
    expected = together(model, "chunks", True)
    assert scores(make(model, "chunks", True, draws=False), expected) == expected


@pytest.mark.parametrize("model", ["llama float32", "gemma float32"])
def test_page_ids_change_no_bit(model):
    engine = make(model, "chunks", True)
    for seed in range(2):
        for free in engine.scheduler.shards[0].pages.pool._free_pages:
            np.random.default_rng(seed).shuffle(free)
        assert results(engine.generate(prompts(), fakes.greedy(NEW))) == together(
            model, "chunks", True
        )


def test_preemption_and_restart_change_no_bit():
    engine = make("llama float32", "chunks", True)
    ids = [engine.add_request(prompt, fakes.greedy(NEW)) for prompt in prompts()]
    sequences = [fakes.sequence_of(engine, id) for id in ids]
    steps = iter(range(1000))

    def disturb():
        step = next(steps)
        if step % 7 == 3 and engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[-1])
        if step == 11:
            engine.rebuild()

    fakes.drain(engine, disturb)
    results = [(sequence.output_tokens, sequence.results.logprobs) for sequence in sequences]
    assert results == together("llama float32", "chunks", True)


SAMPLED = [
    SamplingParams(max_new_tokens=NEW, temperature=0.9, top_p=0.9, seed=11),
    SamplingParams(max_new_tokens=NEW, temperature=1.3, top_k=20, top_p=0.8, seed=12),
]


@pytest.mark.parametrize("params", SAMPLED, ids=["top-p", "top-k and top-p"])
def test_neighbours_change_no_bit_of_a_sample(params):
    engine = make("llama float32", "chunks", True)
    expected = results(engine.generate(prompts(), params))
    assert expected != together("llama float32", "chunks", True)
    for i in (0, 1, 5):
        assert results(engine.generate([prompts()[i]], params)) == [expected[i]]
    wide = fakes.engine(
        MODELS["llama float32"], shapes="one", max_seqs=24, decode_rows=(24,), page_tokens=8,
        deterministic=True, **CHUNKS["chunks"],
    )  # fmt: skip
    assert results(wide.generate(prompts() * 3, params)) == expected * 3


@pytest.mark.parametrize("params", [None, SAMPLED[0]], ids=["greedy", "sampled"])
def test_drafts_change_no_bit(params):
    """Some right, some wrong: a token's bits are those of plain decoding."""
    params = params or fakes.greedy(NEW)
    expected = results(make("llama float32", "chunks", True).generate(prompts(), params))
    engine = fakes.engine(
        MODELS["llama float32"], shapes="one", max_seqs=8, decode_rows=(8,), page_tokens=8,
        deterministic=True, num_drafts=2, **CHUNKS["chunks"],
    )  # fmt: skip
    ids = [engine.add_request(prompt, params) for prompt in prompts()]
    sequences = [fakes.sequence_of(engine, id) for id in ids]
    rng = np.random.default_rng(0)

    def propose():
        for sequence, (tokens, _) in zip(sequences, expected, strict=True):
            right = tokens[sequence.num_output_tokens :][:2]
            sequence.drafts = tuple(t if rng.random() < 0.7 else (t + 1) % 131 for t in right)

    fakes.drain(engine, propose)
    assert [(s.output_tokens, s.results.logprobs) for s in sequences] == expected
    assert len(engine.records) < sum(LENGTHS) // 48 + NEW  # some were accepted


# --- in general: the same tokens, up to rounding --------------------------------------------------


@pytest.mark.quick_code
def test_neighbours_change_nothing():
    engine, expected = make("llama float32"), together("llama float32")
    for i in (0, 2, 5):
        alone = results(engine.generate([prompts()[i]], fakes.greedy(NEW)))
        assert_close(alone, [expected[i]], 1e-4)


@pytest.mark.quick_code
def test_token_by_token_changes_nothing():
    """The prompt is fed a token a step, as if it had been generated."""
    settings = {"max_seqs": 8, "decode_rows": (8,), "page_tokens": 8}
    settings |= {"chunk_tokens": 1, "prefill_chunks": (1,)}
    engine = fakes.engine(MODELS["llama float32"], draws=False, **settings)
    found = results(engine.generate(prompts(), fakes.greedy(NEW)))
    assert_close(found, together("llama float32"), 1e-4)


@pytest.mark.quick_code
def test_scores_are_the_reported_logprobs():
    expected = together("llama float32")
    assert_close(scores(make("llama float32"), expected), expected)


@pytest.mark.quick_code
def test_page_ids_change_nothing():
    engine = make("llama float32")
    for free in engine.scheduler.shards[0].pages.pool._free_pages:
        np.random.default_rng(0).shuffle(free)
    assert results(engine.generate(prompts(), fakes.greedy(NEW))) == together("llama float32")


def test_deterministic_is_the_same_model():
    with compiling.quickly():
        plain = together("llama float32")
    assert_close(together("llama float32", "chunks", True), plain, 1e-4)


@pytest.mark.quick_code
@pytest.mark.parametrize("model", [
    "llama float32", "gemma float32",
    pytest.param("every cache float32", marks=pytest.mark.long),
])  # fmt: skip
def test_the_cache_changes_nothing(model):
    """Decoding without a cache is the oracle."""
    found = together(model)
    config, params = MODELS[model], fakes.real_params(MODELS[model])
    for i in (0, 2, 5):
        prompt = prompts()[i]
        sequence = Sequence(1, fakes.greedy(NEW), list(prompt), len(prompt))
        seen: list[int] = []
        seconds = naive.decode(params, config, sequence, seen.append)
        assert len(seconds) == NEW and seen == sequence.output_tokens
        assert_close([(sequence.output_tokens, sequence.results.logprobs)], [found[i]], 1e-4)


@pytest.mark.quick_code
def test_sampling_without_a_cache_and_an_early_end():
    params = SamplingParams(max_new_tokens=NEW, temperature=0.9, top_p=0.9, seed=11)
    prompt = prompts()[0]
    engine = make("llama float32")
    expected = engine.generate([prompt], params)[0]
    sequence = Sequence(1, params, list(prompt), len(prompt), seed=11)
    naive.decode(fakes.real_params(MODELS["llama float32"]), MODELS["llama float32"], sequence)
    assert sequence.output_tokens == expected.token_ids
    end = expected.token_ids[5]
    first = expected.token_ids.index(end)
    sequence = Sequence(1, params, list(prompt), len(prompt), frozenset({end}), seed=11)
    naive.decode(fakes.real_params(MODELS["llama float32"]), MODELS["llama float32"], sequence)
    assert sequence.output_tokens == expected.token_ids[: first + 1]


# --- executables ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def warm():
    engine = make("llama float32")
    engine.warm_up()
    return engine


@pytest.fixture
def sealed(warm, monkeypatch):
    """The warm engine, whose step may not be traced again."""
    monkeypatch.setattr(step, "step", chex.assert_max_traces(step.step, 0))
    return warm


@pytest.mark.quick_code
def test_a_step_that_is_traced_again_is_an_error(sealed):
    with pytest.raises(AssertionError, match="'step' is traced > 0 times"):
        sealed.model_runner.executables._lower_step(StepShape((3, 1), (0, 16)))


@pytest.mark.quick_code
def test_no_compilation_after_warm_up(sealed):
    warm, events = sealed, []

    def listen(name, seconds, **more):
        if name == "/jax/core/compile/backend_compile_duration":
            events.append((name, more))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        rng = np.random.default_rng(0)
        warm.score(prompts()[:1])
        warm.generate(prompts(), fakes.greedy(NEW))
        pending = 200
        while pending or warm.scheduler.has_work:
            for _ in range(min(pending, rng.integers(0, 5))):
                prompt = fakes.prompts([rng.integers(2, 90)], 131, rng)[0]
                params = SamplingParams(
                    max_new_tokens=int(rng.choice([0, 1, 5, 20])),
                    temperature=float(rng.choice([0, 0.8])),
                    top_k=int(rng.choice([0, 5])),
                    allowed_token_ids=(1, 2, 3) if rng.random() < 0.2 else None,
                )
                id = warm.add_request(prompt, params)
                pending -= 1
                if rng.random() < 0.05:
                    warm.abort(id)
            warm.step()
            if rng.random() < 0.02:
                warm.rebuild()
        assert not events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert {record.shape for record in warm.records} == set(warm.scheduler.shapes)
    pages = warm.scheduler.shards[0].pages
    assert pages.prefix_cache.num_available_pages == pages.pool.num_usable_pages


@pytest.mark.quick_code
def test_another_shape_is_an_error_after_warm_up(warm):
    with pytest.raises(RuntimeError, match="was not compiled at warm-up"):
        warm.model_runner.compiled(StepShape((3, 1), (0, 16)))


def num_bytes(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def test_cache_and_slots_are_updated_in_place(warm):
    """By every program, and by one that is optimized."""
    optimized = make("llama float32", "chunks", True)
    for engine, shapes in (
        (warm, warm.scheduler.shapes),
        (optimized, optimized.scheduler.shapes[:1]),
    ):
        runner = engine.model_runner
        state = num_bytes(runner.cache) + num_bytes(runner.slots)
        assert runner.cache_bytes == num_bytes(runner.cache)
        for shape in shapes:
            aliased = runner.compiled(shape).memory_analysis().alias_size_in_bytes
            assert aliased == state, shape


@pytest.mark.quick_code
def test_admission_is_in_place_too():
    """With penalties the slots hold 2 V counts a sequence."""
    engine = fakes.engine(fakes.fake_model(), max_seqs=4, num_drafts=2, penalties=True)
    runner = engine.model_runner
    state = num_bytes(runner.cache) + num_bytes(runner.slots)
    for program in (runner.executables.admit(), runner.compiled(engine.scheduler.shapes[0])):
        assert program.memory_analysis().alias_size_in_bytes == state


def test_deterministic_is_refused_where_it_is_not_measured():
    config = Config(MODELS["llama float32"], EngineConfig(deterministic=True))
    on_gpu = jax.sharding.use_abstract_mesh(accelerators.mesh("cuda"))
    with on_gpu, pytest.raises(InputError, match="cpu backend, it is not measured on gpu"):
        ModelRunner(config, {})


@pytest.mark.quick_code
@pytest.mark.parametrize("is_tree", [False, True])
def test_a_draft_counts_where_it_is_seen(is_tree):
    """In one scatter, however many there are."""
    rng, (rows, width) = np.random.default_rng(0), (2, 32)
    shape = StepShape((rows, width), (1, 4))
    position = jnp.broadcast_to(jnp.arange(width), (rows, width))
    chains = Rectangle(jnp.arange(rows), position, jnp.ones((rows, width), bool), ())
    parents = np.array([[rng.integers(0, n) for n in range(1, width)] for _ in range(rows)])
    trees = draft_tree.branching(chains, jnp.asarray(parents), width)
    tokens, fed = rng.integers(0, 9, shape.num_tokens), rng.integers(0, 3, (rows + 1, 2, 9))
    slots = jnp.array([0] * width + [1] * width + [2])

    def seen(fed, tokens):
        ragged = Ragged((trees if is_tree else chains,))
        return step._counts_seen(fed, slots, tokens, shape, ragged)

    arguments = jnp.asarray(fed, jnp.uint16), jnp.asarray(tokens)
    assert str(jax.make_jaxpr(seen)(*arguments)).count("scatter-add") == 1
    found, expected = np.asarray(compiling.call(seen, *arguments)), fed[np.asarray(slots)]
    for row in range(rows):
        for node in range(width):
            above = node
            while above:
                expected[row * width + node, 1, tokens[row * width + above]] += 1
                above = parents[row][above - 1] if is_tree else above - 1
    np.testing.assert_array_equal(found, expected)


@pytest.mark.quick_code
def test_a_tree_is_as_deep_as_its_used_nodes():
    parents = jnp.array([[0, 0, 1, 3, 2]] * 4)
    tokens = jnp.array([[7] * 5, [7] * 5, [7, 7, -1, -1, 7], [7] * 5])
    valid = jnp.arange(6) < jnp.array([6, 3, 6, 1])[:, None]
    position = jnp.arange(6) + 10 * jnp.arange(4)[:, None]
    chains = Rectangle(jnp.arange(4), position, valid, ())
    trees = Ragged((draft_tree.branching(chains, parents, 3),))
    shape = StepShape((4, 6), (1, 4))
    found = step._drafted(shape, Drafts(tokens, None, parents, 3), trees)
    assert {name: x.tolist() for name, x in found.items()} == {
        "num_drafts": [5, 2, 3, 0, 0], "num_levels": [3, 1, 2, 0, 0],
    }  # fmt: skip
    found = step._drafted(shape, None, Ragged((chains,)))
    assert found["num_drafts"].tolist() == found["num_levels"].tolist() == [5, 2, 5, 0, 0]


@pytest.mark.quick_code
def test_temporary_memory_does_not_grow_with_the_pool():
    sizes = []
    for context in (256, 2048):  # the pool is as large as eight full contexts
        model: ModelConfig = fakes.llama("bfloat16", max_context=2048)
        engine = fakes.engine(
            model, draws=False, max_seqs=8, decode_rows=(8,),
            cache_bytes=context * 8 * 2 * 32 * 4,
        )  # fmt: skip
        shape = next(s for s in engine.scheduler.shapes if not s.prefill[0])
        memory = engine.model_runner.compiled(shape).memory_analysis()
        sizes.append((memory.temp_size_in_bytes, engine.model_runner.cache_bytes))
    (small, few), (large, many) = sizes
    assert many > 3 * few and large <= small + 4096
