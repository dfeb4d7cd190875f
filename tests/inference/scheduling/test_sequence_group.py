"""Many answers to one prompt: each as if it had been asked for alone, on pages that are shared."""

import dataclasses
from collections import Counter

import numpy as np
import pytest

from configs.errors import InputError
from inference.request import SamplingParams
from inference.scheduling.sequence import derived_seed
from inference.text.ballots import ballot
from tests import fakes

MODEL = fakes.llama(max_context=256)
VOCAB = MODEL.vocab_size
SETTINGS = {
    "max_seqs": 8,
    "decode_rows": (8,),
    "chunk_tokens": 32,
    "prefill_chunks": (3,),
    "deterministic": True,
    "top_logprobs": 12,
}
PROMPT = fakes.prompts([200], VOCAB)[0]
DRAWN = SamplingParams(max_new_tokens=12, temperature=1.3, seed=7)


class Bytes:
    """A tokenizer whose tokens are single bytes."""

    strips_first_space = False
    byte_ids = frozenset()

    def token_bytes(self, token, skip_special=True):
        return bytes([token])


def make(**settings):
    return fakes.engine(MODEL, tokenizer=Bytes(), **SETTINGS | settings)


def make_fake(**settings):
    """Pages, a window, recurrent states; six slots, room for four sequences at their longest."""
    settings = {
        "max_seqs": 6, "decode_rows": (6,), "page_tokens": 4, "cache_bytes": 3850,
        "max_context": 48, "chunk_tokens": 4, "prefill_chunks": (3,), "top_logprobs": 6,
    } | settings  # fmt: skip
    return fakes.engine(fakes.fake_model(), shapes="one", **settings)


def assert_empty(engine):
    pages = engine.scheduler.shards[0].pages
    assert pages.prefix_cache.num_available_pages == pages.pool.num_usable_pages
    assert not engine._requests
    assert not engine.scheduler.has_work
    engine.scheduler.check_integrity()


def each(completion):
    """Tokens, log-probabilities, text and reason of each answer, in order."""
    answers = (completion, *completion.others)
    return [(c.token_ids, c.logprobs, c.text, c.finish_reason) for c in answers]


def run(engine, prompt, params, before_step=lambda: None):
    """A request step by step, the books checked after each."""
    answers = engine._requests[engine.add_request(prompt, params)].group
    fakes.drain(engine, before_step)
    return answers.completion()


def stirrer(engine, chance, seed=0):
    """Preempts a sequence at random before a step."""
    rng = np.random.default_rng(seed)

    def stir():
        running = engine.scheduler.running
        if running and rng.random() < chance:
            engine.scheduler.preempt(running[rng.integers(len(running))])

    return stir


def beams(width, n=None, num_tokens=12, **more):
    n = width if n is None else n
    return SamplingParams(max_new_tokens=num_tokens, beam_width=width, n=n, **more)


# --- n and best_of --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone():
    """Eight requests of one answer, with the seeds of one request's eight."""
    params = [dataclasses.replace(DRAWN, seed=derived_seed(7, index)) for index in range(8)]
    return [each(c)[0] for c in make().generate([PROMPT] * 8, params)]


@pytest.mark.parametrize("settings", [{}, {"prefix_cache": False}, {"overlap": False}])
def test_each_answer_is_that_of_a_request_with_its_seed(settings, alone):
    engine = make(**settings)
    before = engine.scheduler.counters.num_prefilled_tokens
    found = run(engine, PROMPT, dataclasses.replace(DRAWN, n=8))
    assert each(found) == alone and len({tuple(tokens) for tokens, *_ in alone}) == 8
    prefilled = engine.scheduler.counters.num_prefilled_tokens - before
    assert prefilled == len(PROMPT) - 1  # once for all
    assert_empty(engine)


def test_answers_share_their_prompts_pages():
    engine, shares = make(), []

    def look():
        running = engine.scheduler.running
        if len(running) == 8:
            shares.append(engine.scheduler.shards[0].pages.prompt_usage(running))

    run(engine, PROMPT, dataclasses.replace(DRAWN, n=8), look)
    assert set(shares) == {(8 * 13, 12 + 8)}  # the 13th page holds the tokens generated first
    assert 1 - 20 / 104 >= 0.75


def test_best_of_returns_the_most_likely(alone):
    asked = dataclasses.replace(DRAWN, n=3, best_of=8)
    outputs = []
    found = make().generate([PROMPT], asked, outputs.append)[0]
    ranked = sorted(alone, key=lambda answer: -np.mean(answer[1]))
    assert each(found) == ranked[:3]
    assert [(o.id, o.index, o.token_ids, o.text, o.finish_reason) for o in outputs] == [
        (found.id, index, tokens, text, reason)
        for index, (tokens, _, text, reason) in enumerate(ranked[:3])
    ]


def test_a_vote_returns_what_most_say():
    """Of answers in a few digits; one that is cut off has no vote."""
    digits_and_stop = (*b"123", 10)
    sampled = dataclasses.replace(
        DRAWN, n=8, best_of=8, allowed_token_ids=digits_and_stop, stop_token_ids=(10,),
        max_new_tokens=3,
    )  # fmt: skip
    answers = each(make().generate([PROMPT], sampled)[0])
    ended = [answer for answer in answers if answer[3] == "stop"]
    votes = Counter(ballot(text) for _, _, text, _ in ended)
    assert len(ended) < 8 and votes.most_common(1)[0][1] > 1

    def rank(answer):
        _, logprobs, text, reason = answer
        num_votes = votes[ballot(text)] if reason == "stop" and text else 0
        return -num_votes, -np.mean(logprobs)

    by_vote = sorted(answers, key=rank)
    assert by_vote != answers
    asked = dataclasses.replace(sampled, n=3, vote=True)
    assert each(make().generate([PROMPT], asked)[0]) == by_vote[:3]


def test_the_best_say_what_stopped_them():
    stops = tuple(range(8))
    params = dataclasses.replace(DRAWN, n=3, best_of=6, max_new_tokens=60, stop_token_ids=stops)
    outputs = []
    make().generate([PROMPT], params, outputs.append)
    assert any(output.finish_reason == "stop" for output in outputs)
    for output in outputs:
        stopped = output.token_ids[-1] if output.finish_reason == "stop" else None
        assert output.stopped_by == stopped


def test_outputs_name_their_sample(alone):
    engine, texts, ends = make(), [""] * 3, set()
    for output in engine.stream(PROMPT, dataclasses.replace(DRAWN, n=3)):
        assert output.index not in ends
        texts[output.index] += output.text
        if output.finish_reason:
            ends.add(output.index)
    assert texts == [text for _, _, text, _ in alone[:3]] and ends == {0, 1, 2}
    assert_empty(engine)


def test_answers_end_each_by_itself(alone):
    stop = alone[0][0][3]
    completions = each(
        make().generate([PROMPT], dataclasses.replace(DRAWN, n=8, stop_token_ids=(stop,)))[0]
    )
    for (tokens, _, _, reason), (whole, *_) in zip(completions, alone, strict=True):
        cut = whole[: whole.index(stop) + 1] if stop in whole else whole
        assert tokens == cut and reason == ("stop" if stop in whole else "length")


@pytest.mark.parametrize("length", [1, 2, 33])
def test_short_prompts_and_prompts_known_before(length):
    """All of a prompt but its last token may be in the cache already."""
    engine, prompt = make(), PROMPT[:length]
    params = [dataclasses.replace(DRAWN, seed=derived_seed(7, index)) for index in range(3)]
    expected = [each(c)[0] for c in engine.generate([prompt] * 3, params)]
    assert each(run(engine, prompt, dataclasses.replace(DRAWN, n=3))) == expected
    assert_empty(engine)


@pytest.mark.quick_code
def test_many_answers_in_little_room():
    """Three requests of four answers on four slots and too few pages, with recurrent states."""
    prompts, params = fakes.prompts([21, 4, 13]), SamplingParams(max_new_tokens=20, n=4)
    for chance in (0.0, 0.3):
        engine = make_fake()
        requests = [engine._requests[engine.add_request(p, params)].group for p in prompts]
        fakes.drain(engine, stirrer(engine, chance))
        for prompt, answers in zip(prompts, requests, strict=True):
            found = [tokens for tokens, *_ in each(answers.completion())]
            assert found == [fakes.continuation(prompt, 20)] * 4
        assert bool(engine.scheduler.counters.num_preemptions) == bool(chance)
        assert_empty(engine)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked, cause",
    [
        ({"n": 0}, "n is a whole number from 1 on"),
        ({"n": 1.5}, "n is a whole number"),
        ({"n": 3, "best_of": 2}, "n is at most best_of=2, not 3"),
        ({"vote": True}, "vote counts answers that best_of samples: give that as well"),
        ({"best_of": 0}, "best_of is a whole number from 1 on, not 0"),
        ({"beam_width": -1}, "beam_width is a whole number from 0"),
        ({"n": 3, "beam_width": 2}, "n is at most beam_width=2, not 3"),
        ({"beam_width": 2, "temperature": 1.0}, "beam_width takes no temperature"),
        ({"beam_width": 2, "best_of": 2}, "beam_width takes no temperature"),
        ({"beam_width": 2, "stop": ("a",)}, "beam_width takes no temperature"),
        ({"length_penalty": float("nan")}, "length_penalty is a number from -10 to 10"),
        ({"early_stopping": "never"}, "early_stopping is true or false, not 'never'"),
        ({"n": 2, "max_new_tokens": 0}, "leave n=1"),
        ({"n": 9}, "n is at most engine.max_seqs=8, not 9"),
        ({"best_of": 9}, "best_of is at most engine.max_seqs=8, not 9"),
        ({"beam_width": 9}, "beam_width is at most engine.max_seqs=8, not 9"),
        (
            {"beam_width": 8, "stop_token_ids": (1, 2, 3, 4, 5)},
            "engine.requests.top_logprobs of at least 13",
        ),
    ],
)
def test_refused_in_one_line(asked, cause):
    engine = make()
    with pytest.raises(InputError) as error:
        engine.generate([[1, 2], [3]], [fakes.greedy(4), SamplingParams(**asked)])
    assert cause in str(error.value) and "\n" not in str(error.value)
    assert_empty(engine)


def test_what_has_several_answers_is_not_forked():
    engine = make()
    for params, own in [(beams(2), fakes.greedy(9)), (fakes.greedy(9), beams(2))]:
        with pytest.raises(InputError, match="leave n=1"):
            engine.fork(engine.add_request([1, 2], params), own)
    with pytest.raises(InputError, match="4 beams of 41 tokens never fits"):
        make_fake(cache_bytes=2000).add_request([1] * 21, beams(4, num_tokens=20))


def test_a_nan_ends_every_answer_of_its_prompt():
    params = fakes.real_params(MODEL)
    table = params["embed"]["table"].at[130].set(np.nan)
    engine = make()
    engine.update_params(params | {"embed": {"table": table}})
    asked = [dataclasses.replace(DRAWN, n=3), dataclasses.replace(DRAWN, n=2, best_of=3), beams(2)]
    for completion in engine.generate([[130, *range(40)]] * 3, asked):
        assert {reason for *_, reason in each(completion)} == {"error"}
    assert_empty(engine)
