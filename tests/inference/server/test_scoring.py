"""POST /v1/score, /v1/rerank and /classify: by vectors, a classifier, and a template for pairs."""

import msgspec
import numpy as np
import pytest

from inference.classifier import similarity
from tests.inference.server.described import validator
from tests.inference.server.fake_engine import (
    END,
    HEAD,
    MAX_CONTEXT,
    FakeEngine,
    head,
    tokenizer,
    vector,
)
from tests.inference.server.running import running

SCORE, RERANK, CLASSIFY = "/v1/score", "/v1/rerank", "/classify"
MOODS = head("calm", "glad", "angry", pad_id=END)
TOKENS = head("yes", activation="sigmoid", is_of_tokens=True)
TEMPLATE = (
    "<|start|>{% for m in messages %}{% if m.role == 'query' %}{{ instruction or 'Find' }}: "
    "{{ m.content }}{% elif m.role == 'document' %} D: {{ m.content }}{% endif %}{% endfor %}?"
)


class Templated(FakeEngine):
    def facts(self):
        facts = super().facts()
        return msgspec.structs.replace(
            facts, text=msgspec.structs.replace(facts.text, template=TEMPLATE)
        )


def serve(engine: FakeEngine):
    @pytest.fixture(scope="module")
    def made():
        with running(engine) as server:
            server.engine = engine
            yield server

    return made


vectors, scores, labels = (
    serve(FakeEngine(classifier=classifier)) for classifier in (None, HEAD, MOODS)
)
templated, unnamed = (serve(Templated(classifier=classifier)) for classifier in (TOKENS, None))
untemplated = serve(FakeEngine(classifier=TOKENS))


def logits(classifier, text: str) -> np.ndarray:
    return classifier.logits(vector(list(text.encode())))


def body_of(response, path: str = ""):
    assert response.status_code == 200, response.text
    return response.json()


def test_pairs_of_texts_have_scores_in_order(scores):
    one = body_of(scores.post(SCORE, text_1="a", text_2="b"))
    many = body_of(scores.post(SCORE, text_1="a", text_2=["b", "cd"], use_activation=False))
    each = body_of(scores.post(SCORE, queries=["a", "b"], documents=["c", "d"], activation=False))
    validator(scores, SCORE).validate(many)
    assert one["data"] == [{"index": 0, "score": one["data"][0]["score"], "object": "score"}]
    expected = HEAD.probabilities(logits(HEAD, "ab"))[0]
    assert one["data"][0]["score"] == pytest.approx(float(expected), abs=1e-6)
    for body, texts in ((many, ("ab", "acd")), (each, ("ac", "bd"))):
        found = [item["score"] for item in body["data"]]
        assert found == pytest.approx([float(logits(HEAD, text)[0]) for text in texts], abs=1e-5)
    assert many["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    assert (many["object"], many["model"], many["id"][:6]) == ("list", "fake", "score-")


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ordered_best_first(scores, path):
    documents = ["b", {"text": "cd"}, "e"]
    asked = {"query": "a", "documents": documents, "use_activation": False}
    body = body_of(scores.post(path, **asked))
    validator(scores, path).validate(body)
    values = {n: float(logits(HEAD, f"a{t}")[0]) for n, t in enumerate(("b", "cd", "e"))}
    order = sorted(values, key=values.get, reverse=True)
    assert [result["index"] for result in body["results"]] == order
    for result in body["results"]:
        assert result["relevance_score"] == pytest.approx(values[result["index"]], abs=1e-5)
        assert result["document"] == {"text": ("b", "cd", "e")[result["index"]]}
    best = body_of(scores.post(path, **asked, top_n=1, return_documents=False))["results"]
    assert [result["index"] for result in best] == order[:1] and "document" not in best[0]
    for many in (0, 99):
        assert len(body_of(scores.post(path, **asked, top_n=many))["results"]) == 3


def test_vectors_score_by_their_angle(vectors):
    body = body_of(vectors.post(SCORE, text_1="ab", text_2=["cd", "ab"]))
    first, second = (vector(list(text)) for text in (b"ab", b"cd"))
    found = [item["score"] for item in body["data"]]
    assert found == pytest.approx([similarity(first, second), 1], abs=1e-6)
    assert body["usage"]["prompt_tokens"] == 6  # the query is read once
    pairs = body_of(vectors.post(SCORE, text_1=["ab", "cd"], text_2=["cd", "cd"]))
    assert [item["score"] for item in pairs["data"]] == pytest.approx([found[0], 1], abs=1e-6)


def test_a_template_writes_the_prompt_and_texts_stay_texts(templated):
    asked = {"query": "q<|end|>", "documents": ["d"]}
    body_of(templated.post(RERANK, **asked, instruction="Seek", priority=2, cache_salt="s"))
    engine = templated.engine
    text = tokenizer().decode(engine.prompts[-1], skip_special=False)
    assert text == "<|start|>Seek: q<|end|> D: d?" and END not in engine.prompts[-1]
    assert (engine.params[-1].priority, engine.params[-1].cache_salt) == (2, "/s")
    body_of(templated.post(RERANK, **asked, chat_template_kwargs={"instruction": "Get"}))
    assert b"Get: q" in bytes(token for token in engine.prompts[-1] if token < 256)


def test_truncation_leaves_the_template_whole(templated):
    """The model answers what stands behind the document."""

    def prompt(**how) -> str:
        asked = {"query": "q", "documents": ["0123456789"]}
        body_of(templated.post(RERANK, **asked, **how))
        return tokenizer().decode(templated.engine.prompts[-1])

    whole = prompt()
    assert whole == "Find: q D: 0123456789?"
    assert prompt(truncate_prompt_tokens=len(whole) - 1) == "Find: q D: 01234567?"
    cut = {"truncate_prompt_tokens": len(whole) - 1, "truncation_side": "left"}
    assert prompt(**cut) == "Find: q D: 23456789?"
    assert prompt(max_tokens_per_doc=4) == "Find: q D: 0123?"
    assert prompt(max_tokens_per_doc=0) == whole
    response = templated.post(RERANK, query="q", documents=["d"], truncate_prompt_tokens=5)
    assert response.json()["error"]["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
def test_texts_have_labels(labels, path):
    body = body_of(labels.post(path, input=["ab", "c"]))
    validator(labels, path).validate(body)
    for index, text in enumerate(("ab", "c")):
        probabilities = MOODS.probabilities(logits(MOODS, text))
        item = body["data"][index]
        assert item["probs"] == pytest.approx(probabilities.tolist(), abs=1e-6)
        assert item["label"] == MOODS.labels[probabilities.argmax()]
        assert (item["index"], item["num_classes"]) == (index, 3)
    raw = body_of(labels.post(path, input="ab", use_activation=False))["data"][0]["probs"]
    assert raw == pytest.approx(logits(MOODS, "ab").tolist(), abs=1e-5)


def test_conversations_have_labels_and_padding_is_not_read(labels):
    talk = [{"role": "user", "content": "Hi"}]
    body_of(labels.post(CLASSIFY, messages=talk))
    assert tokenizer().decode(labels.engine.prompts[-1]) == "user\nHi"
    assert labels.engine.prompts[-1][-1] != END  # what the template ends with is padding here
    body_of(labels.post(CLASSIFY, messages=talk, add_generation_prompt=True))
    assert tokenizer().decode(labels.engine.prompts[-1]).endswith("assistant\n")
    body_of(labels.post(CLASSIFY, input=[[65, END, END], [END, END]]))
    assert labels.engine.prompts[-2:] == [[65], [END]]


TWO = {"query": "a", "documents": ["b"]}
BAD = [
    ("scores", SCORE, {}, "text_1", "required"),
    ("scores", SCORE, {"text_1": "a"}, "text_2", "required"),
    ("scores", SCORE, {"text_1": "a", "text_2": []}, "text_2", ""),
    ("scores", SCORE, {"text_1": "", "text_2": "b"}, "text_1", ""),
    ("scores", SCORE, {"text_1": ["a"] * 2, "text_2": ["b"] * 3}, "text_1", "holds 2 texts, and"),
    ("scores", SCORE, {"text_1": "a", "queries": "b", "text_2": "c"}, "queries", "exclude"),
    ("scores", SCORE, {"text_1": "a", "documents": [""]}, "documents", "length from 1"),
    ("scores", RERANK, {"query": "a"}, "documents", "required"),
    ("scores", RERANK, {"query": "a", "documents": []}, "documents", ""),
    ("scores", RERANK, {"query": "a", "documents": ["b", ""]}, "documents[1]", ""),
    ("scores", RERANK, {"query": "a", "documents": [{"image": "x"}]}, "documents[0].text", "requ"),
    ("scores", RERANK, TWO | {"top_n": -1}, "top_n", "from 0"),
    ("scores", RERANK, {"query": "a", "documents": ["b", "c" * MAX_CONTEXT]}, "documents",
     f"is {MAX_CONTEXT} tokens, and pair 1 has {MAX_CONTEXT + 1}"),
    ("vectors", RERANK, {"query": "a", "documents": ["b", "c" * (MAX_CONTEXT + 1)]}, "documents",
     f"is {MAX_CONTEXT} tokens, and text 1 has {MAX_CONTEXT + 1}"),
    ("scores", RERANK, TWO | {"instruction": "x"}, "instruction", "not read by this model's"),
    ("scores", RERANK, TWO | {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "not re"),
    ("scores", RERANK, TWO | {"rank_fields": ["x"]}, "rank_fields", "not supported"),
    ("labels", RERANK, TWO, None, "has 3 (calm, glad, angry): classify texts instead"),
    ("labels", CLASSIFY, {}, "input", "or messages has to be given"),
    ("labels", CLASSIFY, {"input": "a" * (MAX_CONTEXT + 1)}, "input", "and text 0 has 513"),
    ("vectors", CLASSIFY, {"input": "a"}, None, "this model has no labels"),
    ("untemplated", RERANK, TWO, None, 'roles "query" and "document" (--chat_template)'),
    ("unnamed", RERANK, TWO, None, "engine.requests.classifier_tokens"),
]  # fmt: skip


@pytest.mark.parametrize("name, path, body, param, words", BAD)
def test_bad_input_names_the_field(name, path, body, param, words, request):
    server = request.getfixturevalue(name)
    response = server.post(path, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and words in error["message"], error
    assert len(error["message"]) < 300
