"""Completions and models by OpenAI's client."""

import openai
import pytest

from tests.inference.server.fake_engine import reply

TEXT = bytes(reply(200)).decode(errors="ignore")


@pytest.fixture
def create(client):
    def ask(**asked):
        return client.completions.create(**{"model": "fake", "temperature": 0} | asked)

    return ask


def test_a_text_goes_on(create):
    found = create(prompt="Once")
    assert found.object == "text_completion" and found.id.startswith("cmpl-")
    (choice,) = found.choices
    assert choice.finish_reason == "length" and found.usage.completion_tokens == 16  # the default
    assert found.usage.prompt_tokens == 4 and TEXT.startswith(choice.text.rstrip("\ufffd"))


@pytest.mark.parametrize("prompt, num", [
    (["a", "b", "c"], 3), ([1, 2, 3], 1), ([[1, 2], [3]], 2), ("Hi", 1),
])  # fmt: skip
def test_kinds_of_prompts(create, prompt, num):
    found = create(prompt=prompt, max_tokens=4)
    assert [choice.index for choice in found.choices] == list(range(num))
    assert found.usage.completion_tokens == 4 * num


def test_several_answers_to_several_prompts(create):
    found = create(prompt=["a", "b"], n=2, max_tokens=4, temperature=1, seed=3)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert found.choices[0].text == found.choices[2].text  # a seed does not know the prompt here
    assert found.usage.prompt_tokens == 2


def test_a_stream(create):
    chunks = list(
        create(prompt="a", max_tokens=40, stream=True, stream_options={"include_usage": True})
    )
    assert (
        "".join(c.choices[0].text for c in chunks[:-1])
        == create(prompt="a", max_tokens=40).choices[0].text
    )
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 40
    assert chunks[-2].choices[0].finish_reason == "length"


def test_an_echo_and_its_log_probabilities(create):
    (choice,) = create(prompt="Hi", echo=True, logprobs=2, max_tokens=2).choices
    assert choice.text == "Hi" + TEXT[:2]
    found = choice.logprobs
    assert found.tokens == ["H", "i", "G", "r"] and found.text_offset == [0, 1, 2, 3]
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    assert all(value <= 0 for value in found.token_logprobs[1:])
    assert all(found.tokens[n] in top for n, top in enumerate(found.top_logprobs) if top)


def test_a_prompt_is_scored(create):
    (choice,) = create(prompt="Hello", echo=True, logprobs=1, max_tokens=0).choices
    assert choice.text == "Hello" and len(choice.logprobs.token_logprobs) == 5


def test_stop_and_the_best_of_some(create):
    (choice,) = create(prompt="a", stop=["answer"], max_tokens=99).choices
    assert choice.text == TEXT[: TEXT.index("answer")] and choice.finish_reason == "stop"
    found = create(prompt="a", best_of=2, n=1, max_tokens=2, temperature=1)
    assert len(found.choices) == 1


@pytest.mark.parametrize("streams", [False, True])
def test_a_suffix_follows_the_answer(create, parrot, streams):
    found = create(prompt="def f(", suffix="): pass", max_tokens=8, stream=streams)
    choices = [chunk.choices[0] for chunk in (found if streams else [found])]
    assert "".join(choice.text for choice in choices) == TEXT[:6]
    assert parrot.prompt == "<fim_prefix>def f(<fim_suffix>): pass<fim_middle>"


def test_what_a_suffix_does_not_go_with_is_named(create):
    with pytest.raises(openai.BadRequestError) as error:
        create(prompt=["a", "b"], suffix="c")
    assert error.value.param == "suffix"


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == "fake" and model.object == "model" and model.owned_by
    assert client.models.retrieve("fake").id == "fake" and model.max_model_len > 500
    assert [each.id for each in client.models.list()] == ["fake"]
    with pytest.raises(openai.NotFoundError) as found:
        client.models.retrieve("other")
    assert found.value.code == "model_not_found" and found.value.param == "model"
