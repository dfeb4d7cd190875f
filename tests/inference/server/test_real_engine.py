"""`scripts.serve` in its two processes, a tiny model, and what transformers computed for it."""

import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import numpy as np
import pytest

from inference.checkpoints import resolve
from layers import decoder
from tests import compiling
from tests.inference.server import events
from tests.inference.server.running import wait_until
from tests.inference.server.test_processes import is_running

ROOT = Path(__file__).resolve().parents[3]
TINY = ROOT / "tests" / "golden" / "llama-tokenizer"
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
COMMAND = [
    *(sys.executable, "-m", "scripts.serve", f"--model={TINY}", "--port=0", "--nowarm_up"),
    *("--max_num_seqs=4", "--set=model.dtype=float32", "--set=engine.shapes.decode_rows=(4,)"),
    "--set=engine.shapes.prefill_chunks=(1,)",
]

CONTROL_KEY = "control-0123456789ab"


class Served:
    def __init__(self, process: subprocess.Popen, url: str):
        self.process = process
        self.http = httpx2.Client(base_url=url, timeout=120)

    def post(self, path: str, **asked) -> dict:
        response = self.http.post(path, json=asked)
        assert response.status_code == 200, response.text
        return response.json()

    def ids(self, path: str, **asked) -> list[int]:
        asked = {"temperature": 0, "return_token_ids": True} | asked
        return self.post(path, **asked)["choices"][0]["token_ids"]


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    environment = compiling.environment(folder / "cache")
    (folder / "keys").write_text(CONTROL_KEY)
    (folder / "keys").chmod(0o600)
    command = [*COMMAND, f"--control_key_file={folder / 'keys'}"]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        url = process.stderr.readline().split()[0]
        one = Served(process, url)
        try:
            assert one.http.get("/health").status_code == 200  # while it loads
            wait_until(lambda: one.http.get("/ready").status_code == 200, 120)
            yield one
        finally:
            one.http.close()
            if process.poll() is None:
                process.kill()


@pytest.fixture(scope="module")
def golden():
    with np.load(TINY / "expected.npz") as file:
        return dict(file)


@pytest.mark.parametrize("nth", range(4))
@pytest.mark.parametrize("as_ids", [False, True])
def test_greedy_texts_are_those_of_transformers(served, golden, nth, as_ids):
    prompt = golden[f"ids_{nth}"].tolist() if as_ids else str(golden["texts"][nth])
    expected = golden[f"greedy_{nth}"].tolist()
    assert served.ids(TEXT, prompt=prompt, max_tokens=24) == expected


def test_a_greedy_conversation_is_that_of_transformers(served, golden):
    messages = json.loads(str(golden["chat_messages"]))
    expected = golden["greedy_chat"].tolist()
    assert served.ids(CHAT, messages=messages, max_tokens=24) == expected
    tokens = served.post("/tokenize", messages=messages)["tokens"]
    assert tokens == golden["ids_chat"].tolist()
    response = served.http.post(
        CHAT, json={"messages": messages, "max_tokens": 24, "temperature": 0, "stream": True}
    )
    pieces = events.choices(events.read(response.text))
    text = "".join(piece["delta"].get("content", "") for piece in pieces)
    whole = served.post(CHAT, messages=messages, max_tokens=24, temperature=0)
    assert text == whole["choices"][0]["message"]["content"]


@pytest.mark.parametrize("num_new", [0, 1])
def test_scores_are_those_of_transformers(served, golden, num_new):
    ids, logits = golden["tokens_0"].tolist(), golden["logits_0"].astype(np.float64)
    asked = {"echo": True, "logprobs": 1, "max_tokens": num_new, "temperature": 0}
    (choice,) = served.post(TEXT, prompt=[ids], **asked)["choices"]
    found, num_prompt = choice["logprobs"], len(ids)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    own = [expected[at, token] for at, token in enumerate(ids[1:])]
    np.testing.assert_allclose(found["token_logprobs"][1:num_prompt], own, atol=1e-4)
    is_best = [
        logprob == max(top.values())
        for logprob, top in zip(found["token_logprobs"][1:], found["top_logprobs"][1:], strict=True)
    ]
    best = [int(token == expected[at].argmax()) for at, token in enumerate(ids[1:])]
    assert is_best == [*map(bool, best), *[True] * num_new]
    assert found["text_offset"] == sorted(found["text_offset"]) and found["text_offset"][0] == 0


def test_embeddings_are_hidden_states_of_transformers(served, golden):
    """The head makes logits of them, but for their length."""
    checkpoint = resolve.resolve(str(TINY)).open(None)
    params = checkpoint.load_params(decoder.param_infos(checkpoint.config), None)
    head = params["embed" if checkpoint.config.tied else "head"]["table"]
    texts = [golden[f"tokens_{i}"].tolist() for i in (0, 1)]
    for i, one in enumerate(served.post("/v1/embeddings", input=texts)["data"]):
        logits_V, expected_V = np.float32(head) @ one["embedding"], golden[f"logits_{i}"][-1]
        expected_V = expected_V * (np.linalg.norm(logits_V) / np.linalg.norm(expected_V))
        np.testing.assert_allclose(logits_V, expected_V, atol=1e-4)


def test_answers_are_scored_alike_while_they_are_generated(served):
    asked = {"prompt": "Once upon", "temperature": 0, "logprobs": 3, "return_token_ids": True}
    (choice,) = served.post(TEXT, max_tokens=12, **asked)["choices"]
    whole = choice["prompt_token_ids"] + choice["token_ids"]
    (scored,) = served.post(TEXT, prompt=whole, echo=True, max_tokens=0, logprobs=3)["choices"]
    start = len(choice["prompt_token_ids"])
    for name in ("token_logprobs", "tokens"):
        values, others = choice["logprobs"][name], scored["logprobs"][name][start:]
        assert values == (others if name == "tokens" else pytest.approx(others, abs=1e-4))
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [3] * 12


@pytest.mark.parametrize("asked", [
    {"temperature": 1, "seed": 7},
    {"temperature": 0.8, "seed": 7, "top_p": 0.9, "top_k": 30, "n": 3},
    {"temperature": 1.5, "seed": -7, "min_p": 0.02, "presence_penalty": 1, "frequency_penalty": 1,
     "repetition_penalty": 1.2},
])  # fmt: skip
def test_a_seed_gives_the_same_answer_beside_any_others(served, asked):
    def ask(n):
        own = asked if n % 2 else {"temperature": 1}
        given = served.post(TEXT, prompt="The ridge", max_tokens=10, **own)
        return [choice["text"] for choice in given["choices"]]

    alone = ask(1)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask, range(8)))
    assert found[1::2] == [alone] * 4


def test_biases_and_stops_reach_the_model(served):
    forced = served.ids(TEXT, prompt="a", logit_bias={"77": 100}, max_tokens=4)
    assert forced == [77] * 4
    assert set(served.ids(TEXT, prompt="a", allowed_token_ids=[70, 71], max_tokens=4)) <= {70, 71}
    (choice,) = served.post(TEXT, prompt="a", logit_bias={"77": 100}, stop_token_ids=[77])[
        "choices"
    ]
    assert choice["stop_reason"] == 77 and choice["finish_reason"] == "stop"


def test_answers_have_the_form_that_is_asked_for(served):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}},
              "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asked = {"prompt": "a", "temperature": 1.5, "n": 3, "max_tokens": 60, "response_format": form}
    for choice in served.post(TEXT, **asked)["choices"]:
        found = json.loads(choice["text"])
        assert choice["finish_reason"] == "stop" and found.keys() == {"a", "b"}
    digits = served.post(TEXT, prompt="a", structured_outputs={"regex": "[0-9]{5}"})
    assert digits["choices"][0]["text"].isdigit() and len(digits["choices"][0]["text"]) == 5


def test_words_that_are_banned_do_not_come(served):
    asked = {"prompt": "Once upon", "temperature": 0, "max_tokens": 40, "min_tokens": 30}
    text = served.post(TEXT, **asked)["choices"][0]["text"]
    words = [text[:3], text[8:10]]
    assert all(word.strip() for word in words)
    other = served.post(TEXT, **asked, bad_words=words)["choices"][0]["text"]
    assert not any(word in other for word in words) and len(other) > 10


def test_a_prompt_is_cached_for_the_next(served):
    prompt = list(range(20, 100))
    for _ in range(2):
        usage = served.post(TEXT, prompt=prompt, max_tokens=4)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 64

    def value(name):
        text = served.http.get("/metrics").text
        found = re.search(rf"^{name}{{[^}}]*}} (\S+)$", text, re.M)
        return float(found[1]) if found else 0.0

    wait_until(lambda: value("vllm:prefix_cache_hits_total") >= 64)
    assert value("vllm:request_queue_time_seconds_sum") > 0
    assert value("vllm:request_prefill_time_seconds_sum") > 0
    assert value("ridgeline:step_bytes_total") > 0
    assert value("vllm:iteration_tokens_total_sum") > 80
    text = served.http.get("/metrics").text
    assert 'vllm:num_requests_running{model_name="llama-tokenizer"}' in text
    assert re.search(r'^vllm:cache_config_info\{block_size="16",', text, re.M)


def test_what_the_engine_refuses_is_told(served):
    end = served.post("/tokenize", prompt="<|end_of_text|>", add_special_tokens=False)["tokens"]
    never = {"prompt": "a", "min_tokens": 5, "max_tokens": 9, "allowed_token_ids": end}
    for streams in (False, True):
        response = served.http.post(TEXT, json=never | {"stream": streams})
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith("every token is banned")
    response = served.http.post(TEXT, json={"prompt": [5] * 257, "max_tokens": 1})
    assert response.status_code == 400 and "256" in response.json()["error"]["message"]
    model = served.http.get("/v1/models").json()["data"][0]
    assert model["id"] == "llama-tokenizer" and model["max_model_len"] == 256


def test_answers_go_on_when_the_engine_is_killed(served):
    """With the text that they would have had, whatever is asked for, from the same weights."""
    form = {"regex": "[a-z]{3}( [a-z]{3}){30}"}
    free = {"ignore_eos": True, "max_tokens": 200}
    kinds = [
        free | {"temperature": 0}, free | {"temperature": 1, "seed": 3, "n": 2},
        free | {"seed": 4, "presence_penalty": 1, "repetition_penalty": 1.3},
        {"temperature": 1, "seed": 5, "structured_outputs": form, "max_tokens": 200},
    ]  # fmt: skip

    def ask(kind):
        return [c["text"] for c in served.post(TEXT, prompt="Once upon", **kind)["choices"]]

    with ThreadPoolExecutor(len(kinds)) as pool:
        expected = list(pool.map(ask, kinds))
        weights = {"path": str(TINY), "weight_version": 5}
        key = {"authorization": f"Bearer {CONTROL_KEY}"}
        assert served.http.post("/update_weights", json=weights, headers=key).status_code == 200
        again, before = pool.map(ask, kinds), engine_of(served)
        streamed = free | {"prompt": "The", "temperature": 0, "stream": True}
        with served.http.stream("POST", TEXT, json=streamed) as response:
            lines = response.iter_lines()
            for _ in range(10):
                next(lines)
            os.kill(before, signal.SIGKILL)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"' in rest[-2]
        assert list(again) == expected
    wait_until(lambda: before not in children(served.process.pid))
    wait_until(lambda: served.http.get("/ready").status_code == 200)
    assert engine_of(served) != before
    (choice,) = served.post(TEXT, prompt="a", max_tokens=3, return_token_ids=True)["choices"]
    assert choice["weight_versions"] == [[0, len(choice["token_ids"]), 5]]


def engine_of(served) -> int:
    (pid,) = [
        pid for pid in children(served.process.pid)
        if b"engine_socket" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]  # fmt: skip
    return pid


def test_the_last_signal_ends_both_processes(served):
    engine = engine_of(served)
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(30) == 0
    wait_until(lambda: not is_running(engine), 5)
    assert "Traceback" not in served.process.stderr.read()
