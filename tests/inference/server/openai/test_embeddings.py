"""POST /v1/embeddings, as OpenAI's client asks and otherwise."""

import base64

import numpy as np
import openai
import pytest

from tests.inference.server import fake_engine
from tests.inference.server.described import validator
from tests.inference.server.fake_engine import (
    CRASHES,
    MAX_CONTEXT,
    MAX_SEQS,
    REFUSED,
    VOCAB,
    WIDTH,
    FakeEngine,
)
from tests.inference.server.running import running, wait_until

PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def expected(tokens, dimensions=None):
    vector = fake_engine.vector(list(tokens))[:dimensions].astype(np.float64)
    return (vector / np.linalg.norm(vector)).astype(np.float32)


def test_a_text_becomes_a_vector_of_length_one(client):
    found = client.embeddings.create(model="fake", input="Hé")  # base64 unless it is told
    (one,) = found.data
    assert (found.object, one.object, one.index, found.model) == ("list", "embedding", 0, "fake")
    np.testing.assert_allclose(one.embedding, expected("Hé".encode()), atol=1e-6)
    assert len(one.embedding) == WIDTH
    assert np.linalg.norm(one.embedding) == pytest.approx(1, abs=1e-6)
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (3, 3)


@pytest.mark.parametrize("given, each", [
    (["a", "bc"], [[97], [98, 99]]), ([97, 98], [[97, 98]]), ([[1, 2], [3]], [[1, 2], [3]]),
])  # fmt: skip
def test_inputs_are_texts_or_ids_or_lists_of_these(client, given, each):
    found = client.embeddings.create(model="fake", input=given, encoding_format="float")
    assert [one.index for one in found.data] == list(range(len(each)))
    for one, tokens in zip(found.data, each, strict=True):
        np.testing.assert_allclose(one.embedding, expected(tokens), atol=1e-6)
    assert found.usage.total_tokens == sum(map(len, each))


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_both_encodings_hold_the_same_bits(server, encoding):
    body = {"input": "a", "encoding_format": encoding}
    (one,) = server.post(PATH, **body).json()["data"]
    vector = one["embedding"]
    if encoding == "base64":
        vector = np.frombuffer(base64.b64decode(vector, validate=True), "<f4")
    assert np.array_equal(np.asarray(vector, np.float32), expected(b"a"))


@pytest.mark.parametrize("dimensions", [1, 3, WIDTH])
def test_vectors_are_cut_and_of_length_one_again(client, dimensions):
    found = client.embeddings.create(model="fake", input="abc", dimensions=dimensions)
    np.testing.assert_allclose(found.data[0].embedding, expected(b"abc", dimensions), atol=1e-6)


def test_more_inputs_than_run_side_by_side_keep_their_order(client, engine):
    engine.params.clear()
    texts = [f"text {n}" for n in range(60)]
    found = client.embeddings.create(model="fake", input=texts)
    for one, text in zip(found.data, texts, strict=True):
        np.testing.assert_allclose(one.embedding, expected(text.encode()), atol=1e-6)
    assert {params.pooling for params in engine.params} == {"last"} and not engine.running


def test_one_request_leaves_room_for_others():
    engine = FakeEngine(step_s=0.005)
    with running(engine) as server:
        most = []
        engine.step, step = lambda: (most.append(len(engine.running)), step())[1], engine.step
        assert server.post(PATH, input=["a"] * 50).status_code == 200
    assert max(most) <= MAX_SEQS


@pytest.mark.parametrize("body, param, words", [
    ({}, "input", "not empty"), ({"input": None}, "input", "not empty"),
    ({"input": ""}, "input", "empty"), ({"input": []}, "input", "empty"),
    ({"input": [""]}, "input", "empty"), ({"input": [[]]}, "input", "a list of one of the two"),
    ({"input": ["a", 1]}, "input", "a list of one of the two"),
    ({"input": {"text": "a"}}, "input", "a text, token ids"),
    ({"input": [1.5]}, "input", "a list of one of the two"),
    ({"input": [True]}, "input", "a list of one of the two"),
    ({"input": [-1]}, "input", "a list of one of the two"),
    ({"input": [VOCAB]}, "input", f"below {VOCAB}"),
    ({"input": ["a"] * 2049}, "input", "at most 2048, not 2049"),
    ({"input": [["a"]]}, "input", "a list of one of the two"),
    ({"input": ["b", "a" * (MAX_CONTEXT + 1)]}, "input",
     f"is {MAX_CONTEXT} tokens, and input 1 has {MAX_CONTEXT + 1}"),
    ({"input": "a" * (16 * MAX_CONTEXT + 1)}, "input", "16 for each token"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format", "int8"),
    ({"input": "a", "dimensions": 0}, "dimensions", "from 1"),
    ({"input": "a", "dimensions": WIDTH + 1}, "dimensions", f"at most {WIDTH}"),
    ({"input": "a", "dimensions": "8"}, "dimensions", "got a text"),
    ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "from -1"),
    ({"input": "a", "normalize": False}, "normalize", "not supported"),
    ({"input": "a", "cache_salt": ""}, "cache_salt", "length"),
    ({"input": [REFUSED]}, None, "every token is banned"),
])  # fmt: skip
def test_bad_input_names_the_field(server, body, param, words):
    response = server.post(PATH, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert words in error["message"] and len(error["message"]) < 300
    validator(server, PATH, status="default").validate(response.json())
    assert server.post(PATH, input="a").status_code == 200


def test_limits_are_reached(client):
    client.embeddings.create(model="fake", input="a" * MAX_CONTEXT)
    client.embeddings.create(model="fake", input=[VOCAB - 1], user="someone")
    many = client.embeddings.create(model="fake", input=["a"] * 2048, dimensions=1)
    assert len(many.data) == 2048
    with pytest.raises(openai.NotFoundError) as error:
        client.embeddings.create(model="other", input="a")
    assert error.value.code == "model_not_found"


def test_answers_are_as_described(server):
    check = validator(server, PATH)
    for encoding in ("float", "base64"):
        check.validate(server.post(PATH, input=["a", "b"], encoding_format=encoding).json())
    ignored = server.post(PATH, input="a", normalise=False)
    assert ignored.headers["x-ignored-params"] == "normalise"


def test_salts_keep_prefixes_apart(server, engine):
    for salt, told in ((None, None), ("mine", "/mine")):
        assert server.post(PATH, input="a", cache_salt=salt, priority=3).status_code == 200
        assert (engine.params[-1].cache_salt, engine.params[-1].priority) == (told, 3)


def test_who_leaves_ends_what_was_asked(server):
    engine = FakeEngine(step_s=0.2)
    with running(engine) as slow:
        with pytest.raises(openai.APITimeoutError), openai.OpenAI(
            base_url=f"{slow.url}/v1", api_key="none", max_retries=0, timeout=0.1
        ) as one:  # fmt: skip
            one.embeddings.create(model="fake", input=["a"] * 40)
        wait_until(lambda: not engine.running)
        assert len(engine.params) < 20


def test_an_engine_that_fails_at_a_text_is_told_of(server):
    with running(FakeEngine()) as own:
        response = own.post(PATH, input=[CRASHES])
        assert response.status_code in (500, 503) and "/" not in response.json()["error"]["message"]
