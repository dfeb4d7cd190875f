"""Models, tokens, health and metrics."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from inference.server.protocol import responses
from inference.server.protocol.errors import ErrorBody
from inference.server.web import operations
from tests.inference.server import events
from tests.inference.server.fake_engine import END, MAX_CONTEXT, START, TEMPLATE, VOCAB, FakeEngine
from tests.inference.server.running import running, wait_until

ASKED = [{"role": "user", "content": "Hi"}]
IDS = [START, *b"user\nHi", END, START, *b"assistant\n"]


def test_the_model_is_listed(server):
    (model,) = server.http.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"], model["object"]) == ("fake", MAX_CONTEXT, "model")
    assert model["root"] == "fake" and model["parent"] is None  # no adapter of another
    assert server.http.get("/v1/models/fake").json() == model
    missing = server.http.get("/v1/models/other")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"


def test_a_model_has_the_name_that_it_is_given():
    with running(served_model_name="owner/name") as server:
        assert server.http.get("/v1/models").json()["data"][0]["id"] == "owner/name"
        assert server.http.get("/v1/models/owner/name").status_code == 200
        for model, status in (("owner/name", 200), ("fake", 404)):
            response = server.post("/v1/completions", model=model, prompt="a", max_tokens=1)
            assert response.status_code == status


@pytest.mark.parametrize("asked, tokens", [
    ({"prompt": "Hé"}, [72, 0xC3, 0xA9]), ({"prompt": ""}, []), ({"messages": ASKED}, IDS),
    ({"messages": ASKED, "add_generation_prompt": False}, IDS[:-11]),
    ({"prompt": "a<|end|>", "add_special_tokens": False}, [97, END]),
])  # fmt: skip
def test_texts_become_tokens(server, asked, tokens):
    found = server.post("/tokenize", **asked, return_token_strs=True).json()
    assert found["tokens"] == tokens and found["count"] == len(tokens)
    assert found["max_model_len"] == MAX_CONTEXT and len(found["token_strs"]) == len(tokens)
    assert server.post("/tokenize", **asked).json()["token_strs"] is None


def test_tokens_become_text(server):
    assert server.post("/detokenize", tokens=[72, 0xC3, 0xA9]).json() == {"prompt": "Hé"}
    spelled = server.post("/detokenize", tokens=[72, END, 73]).json()
    assert spelled == {"prompt": "H<|end|>I"}
    for asked in ({}, {"tokens": [VOCAB]}, {"tokens": [-1]}, {"tokens": "a"}):
        error = server.post("/detokenize", **asked).json()["error"]
        assert error["param"].startswith("tokens")
    for asked in ({}, {"prompt": "a", "messages": ASKED}):
        assert server.post("/tokenize", **asked).status_code == 400
    info = server.http.get("/tokenizer_info").json()
    assert info == {"eos_token": "<|end|>", "chat_template": TEMPLATE}


def test_without_a_tokenizer_token_ids_are_served():
    with running(FakeEngine(has_text=False)) as server:
        ids = server.post("/v1/completions", prompt=[1], max_tokens=2, return_token_ids=True)
        assert ids.json()["choices"][0]["token_ids"] == [71, 114]
        for path, asked in [
            ("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": ASKED}),
            ("/tokenize", {"prompt": "a"}), ("/v1/completions", {"prompt": [1], "logprobs": 1}),
            ("/v1/completions", {"prompt": [1, 2], "echo": True}),
        ]:  # fmt: skip
            response = server.post(path, **asked)
            assert response.status_code == 400 and "tokenizer" in response.text, (path, asked)


def test_health_tells_the_age_of_the_heartbeat(server):
    found = server.http.get("/health").json()
    assert found["status"] == "ready" and 0 <= found["heartbeat_age_s"] < 5
    assert server.http.get("/ready").json() == {"status": "ready"}
    assert server.http.get("/version").json()["version"]


@pytest.mark.parametrize("fields, num_sequences", [
    ({"prompt": "a"}, 1), ({"prompt": ["a", "b"]}, 2), ({"prompt": "a", "n": 2}, 2),
])  # fmt: skip
def test_load_counts_sequences_until_they_end(server, engine, fields, num_sequences):
    def load():
        return server.http.get("/load").json()

    wait_until(lambda: load() == {"server_load": 0})
    engine.gate.clear()
    try:
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(server.post, "/v1/completions", **fields)
            wait_until(lambda: load() == {"server_load": num_sequences})
            engine.gate.set()
            assert answer.result().status_code == 200
    finally:
        engine.gate.set()
    wait_until(lambda: load() == {"server_load": 0})


def test_metrics_have_the_names_that_dashboards_read(server):
    def value(line):
        found = re.search(
            rf"^{re.escape(line)} ([0-9.e+-]+)$", server.http.get("/metrics").text, re.M
        )
        return float(found[1]) if found else 0.0

    label = '{model_name="fake"}'
    tokens = f"vllm:request_generation_tokens_sum{label}"
    ended = 'vllm:request_success_total{finished_reason="length",model_name="fake"}'
    first = f"vllm:time_to_first_token_seconds_count{label}"
    gaps = f"vllm:inter_token_latency_seconds_count{label}"
    prompts = f"vllm:request_prompt_tokens_count{label}"
    names = (tokens, ended, first, gaps, prompts)
    before = [value(name) for name in names]
    server.post("/v1/completions", prompt="a", n=2, max_tokens=5)
    after = [value(name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [10, 2, 2, 8, 1]
    text = server.http.get("/metrics").text
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
        "prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total",
        "prefix_cache_hits_total", "num_preemptions_total", "e2e_request_latency_seconds_bucket",
    ):  # fmt: skip
        assert re.search(rf'^vllm:{name}{{[^}}]*model_name="fake"', text, re.M), name
    assert f"vllm:kv_cache_usage_perc{label} 0.25" in text


def test_the_description_is_of_what_is_there(server):
    described = server.http.get("/openapi.json").json()
    assert described["paths"].keys() == {
        operation.path.replace(":path", "") for operation in operations.OPERATIONS
    }
    text = json.dumps(described)
    names = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert names and names <= described["components"]["schemas"].keys()
    chat = described["components"]["schemas"]["ChatRequest"]["properties"]
    assert chat["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0.0, "maximum": 2.0}
    summary = described["paths"]["/v1/models"]["get"]["summary"]
    assert summary.startswith("List models")
    for path in described["paths"].values():
        for operation in path.values():
            assert operation["summary"].endswith(".") and "default" in operation["responses"]


@pytest.mark.parametrize("path, asked, whole, event", [
    ("/v1/completions", {"prompt": "a", "logprobs": 2, "echo": True}, responses.TextCompletion,
     responses.TextCompletion),
    ("/v1/chat/completions", {"messages": ASKED, "logprobs": True, "top_logprobs": 1, "n": 2},
     responses.ChatCompletion, responses.ChatChunk),
    ("/v1/completions", {"prompt": "", "echo": True}, ErrorBody, ErrorBody),
])  # fmt: skip
def test_answers_are_as_described(server, path, asked, whole, event):
    msgspec.convert(server.post(path, **asked).json(), whole)
    streamed = server.post(path, **asked, stream=True)
    if whole is not ErrorBody:
        for one in events.read(streamed.text):
            msgspec.convert(one, event)
