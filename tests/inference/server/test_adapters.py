"""Clients choose adapters by name in place of the model's."""

from pathlib import Path

import numpy as np
import pytest

from inference.checkpoints import resolve
from inference.engine import Engine
from inference.request import SamplingParams
from inference.server.client.launch import Thread
from inference.server.engine_process.served_engine import ServedEngine
from inference.server.web.access import Keys
from tests.inference.adapters import peft_files
from tests.inference.server.running import running

pytestmark = pytest.mark.quick_code

_TINY = Path("tests/golden/llama-tokenizer")
_NAMES = "tiny", "poet", "clerk"
_PROMPT = "Where does it wait"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    engine = Engine.from_model(
        str(_TINY), max_seqs=4, decode_rows=(4,), max_context=256, page_tokens=16, chunk_tokens=64,
        prefill_chunks=(2,), cache_bytes=4 << 20, dtype="float32", slots=1, rank=8, embeddings=True,
    )  # fmt: skip
    for seed, name in enumerate(_NAMES[1:]):
        directory = tmp_path_factory.mktemp("adapters") / name
        peft_files.write(directory, engine.config.model, 4, seed, size=1.0)
        engine.adapters.load(name, directory)
    return engine


@pytest.fixture(scope="module")
def texts(engine):
    """What the engine itself answers, before it is served."""
    params = [
        SamplingParams(
            8, temperature=0.0, ignore_eos=True, adapter=None if name == "tiny" else name
        )
        for name in _NAMES
    ]
    answers = engine.generate([_PROMPT] * 3, params)
    return {name: answer.text for name, answer in zip(_NAMES, answers, strict=True)}


@pytest.fixture(scope="module")
def server(engine, texts):
    served = ServedEngine(engine, "tiny", lambda: None)
    keys = Keys(["control"])
    with running(Thread(lambda: served), control_keys=keys) as server:
        yield server


def test_completions_are_those_of_the_adapter_that_is_named(server, texts):
    assert len(set(texts.values())) == 3
    for name in _NAMES:
        body = server.post(
            "/v1/completions", model=name, prompt=_PROMPT, max_tokens=8, ignore_eos=True
        ).json()
        assert (body["model"], body["choices"][0]["text"]) == (name, texts[name])


@pytest.mark.parametrize("path, read", [
    ("/v1/chat/completions", lambda body: body["choices"][0]["token_ids"]),
    ("/v1/messages", lambda body: body["token_ids"]),
    ("/v1/responses", lambda body: body["token_ids"]),
])  # fmt: skip
def test_every_dialect_takes_an_adapter_for_a_model(server, path, read):
    fields = {"max_tokens": 8, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    messages = [{"role": "user", "content": _PROMPT}]
    if path.endswith("responses"):
        fields |= {"input": messages, "max_output_tokens": fields.pop("max_tokens")}
    else:
        fields |= {"messages": messages}
    bodies = [server.post(path, model=name, **fields).json() for name in _NAMES]
    assert [body["model"] for body in bodies] == list(_NAMES), bodies
    assert len({tuple(read(body)) for body in bodies}) == 3


def test_vectors_are_those_of_the_adapter(server):
    bodies = [server.post("/v1/embeddings", model=name, input=_PROMPT).json() for name in _NAMES]
    assert [body["model"] for body in bodies] == list(_NAMES)
    vectors = [body["data"][0]["embedding"] for body in bodies]
    assert np.unique(np.round(vectors, 6), axis=0).shape[0] == 3


def test_adapters_are_listed_below_their_model(server):
    listed = server.http.get("/v1/models").json()["data"]
    parents = {model["id"]: model["parent"] for model in listed}
    assert parents == {"tiny": None, "poet": "tiny", "clerk": "tiny"}
    assert server.http.get("/v1/models/clerk").json()["root"] == "clerk"


def test_other_models_are_not_found(server):
    for path, body in (
        ("/v1/completions", {"prompt": "x"}), ("/v1/embeddings", {"input": "x"}),
        ("/tokenize", {"prompt": "x"}),
    ):  # fmt: skip
        answer = server.post(path, model="painter", **body)
        assert answer.status_code == 404
        message = answer.json()["error"]["message"]
        assert message == "the model 'painter' is not served here: tiny, poet, clerk are"
    assert server.http.get("/v1/models/painter").status_code == 404


def test_adapters_are_loaded_and_unloaded_with_the_control_key(server, texts, tmp_path):
    key = {"Authorization": "Bearer control"}
    path = peft_files.write(
        tmp_path / "painter", resolve.resolve(str(_TINY)).config, 4, 9, size=1.0
    )

    def control(action, headers=key, **body):
        return server.http.post(f"/v1/{action}_lora_adapter", json=body, headers=headers)

    def text_of(name):
        body = {"model": name, "prompt": _PROMPT, "max_tokens": 8, "ignore_eos": True}
        return server.post("/v1/completions", **body)

    load = {"lora_name": "painter", "lora_path": str(path)}
    assert control("load", {}, **load).status_code == 401
    assert text_of("painter").status_code == 404
    assert control("load", **load).status_code == 200
    assert text_of("painter").json()["choices"][0]["text"] not in texts.values()
    for body, reason in (
        ({"lora_name": "bad name", "lora_path": str(path)}, "an adapter is named by letters"),
        ({"lora_name": "nothing", "lora_path": str(tmp_path)}, "no adapter of the peft package"),
        ({"lora_name": "tiny", "lora_path": str(path)}, "is the name of the model: give another"),
    ):
        answer = control("load", **body)
        assert answer.status_code == 400 and reason in answer.json()["error"]["message"]
    assert control("load", lora_name="x").status_code == 400
    assert control("unload", lora_name="painter").status_code == 200
    assert text_of("painter").status_code == 404
    answer = control("unload", lora_name="painter")
    assert answer.status_code == 400 and "no adapter 'painter'" in answer.json()["error"]["message"]
    assert text_of("poet").json()["choices"][0]["text"] == texts["poet"]
