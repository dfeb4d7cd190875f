"""POST /v1/responses, as OpenAI's client asks and otherwise."""

import json

import openai
import pydantic
import pytest

from inference.server.endpoints.answers import Piece
from inference.server.endpoints.messages import MessageReader
from inference.server.endpoints.responses.output import Output
from inference.server.protocol.tools import OfferedTools
from inference.text.tool_calls import formats
from tests.inference.server import fake_engine
from tests.inference.server.described import validator
from tests.inference.server.fake_engine import END, MAX_CONTEXT, REPLY, START
from tests.inference.server.parrot import TEMPLATES, Parrot
from tests.inference.server.running import running

PATH = "/v1/responses"
MESSAGE = [
    "response.created", "response.in_progress", "response.output_item.added",
    "response.content_part.added", "response.output_text.delta", "response.output_text.done",
    "response.content_part.done", "response.output_item.done", "response.completed",
]  # fmt: skip
WEATHER = {
    "type": "function", "name": "weather", "description": "Of a city.", "strict": True,
    "parameters": {
        "type": "object", "properties": {"rain": {"type": "boolean"}}, "required": ["rain"],
        "additionalProperties": False,
    },
}  # fmt: skip
SAYS = '<tool_call>\n{"name": "weather", "arguments": {"rain": true}}\n</tool_call>'
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"rain":true}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "wet"}


class Answer(pydantic.BaseModel):
    yes: bool


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as one:
        yield one


@pytest.fixture
def talking():
    """An engine that says what it is told to, and its server."""
    engine = Parrot(TEMPLATES["qwen"])
    with running(engine) as engine.server:
        yield engine


def greedy(**body):
    return {"model": "fake", "temperature": 0} | body


def said(engine):
    """The newest prompt as text."""
    return fake_engine.tokenizer().decode(engine.prompts[-1], skip_special=False)


def turns(*each):
    return "".join(f"<|start|>{role}\n{text}<|end|>" for role, text in each)


def events_of(text):
    """(name, data) of each."""
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_a_text_is_answered(client, engine):
    found = client.responses.create(
        **greedy(input="Hi", instructions="Be brief.", max_output_tokens=8, metadata={"k": "v"})
    )
    assert found.output_text == REPLY.encode()[:8].decode()
    (message,) = found.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "incomplete")
    assert message.id.startswith("msg_") and found.id.startswith("resp_")
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert found.metadata == {"k": "v"} and found.instructions == "Be brief."
    assert (found.object, found.model, found.store, found.error) == (
        "response",
        "fake",
        False,
        None,
    )
    assert (found.temperature, found.top_p, found.max_output_tokens) == (0, 1, 8)
    usage = found.usage
    assert (usage.output_tokens, usage.total_tokens) == (8, usage.input_tokens + 8)
    assert usage.input_tokens == len(engine.prompts[-1])
    assert usage.input_tokens_details.cached_tokens == 0
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert found.text.format.type == "text" and found.tools == [] and found.tool_choice == "auto"
    asked = turns(("system", "Be brief."), ("user", "Hi"))
    assert said(engine) == f"{asked}<|start|>assistant\n"


@pytest.mark.parametrize("items, expected", [
    ([{"role": "user", "content": "a"}], [("user", "a")]),
    ([{"type": "message", "role": "developer", "content": "a"}], [("system", "a")]),
    ([{"role": "user", "content": [{"type": "input_text", "text": "a"}]}], [("user", "a")]),
    ([{"role": "user", "content": "a"}, {
        "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
        "content": [{"type": "output_text", "text": "b", "annotations": []}],
    }, {"role": "user", "content": "c"}], [("user", "a"), ("assistant", "b"), ("user", "c")]),
    ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
      {"role": "user", "content": "a"}], [("assistant", "no"), ("user", "a")]),
])  # fmt: skip
def test_items_are_messages(client, engine, items, expected):
    client.responses.create(**greedy(input=items, max_output_tokens=1))
    assert said(engine).startswith(turns(*expected) + "<|start|>assistant")


def test_an_answer_goes_on_as_input(client, engine):
    """What came is sent back as it is; nothing is known of it here."""
    first = client.responses.create(**greedy(input="a", max_output_tokens=7, store=True))
    items = [{"role": "user", "content": "a"}, *first.output, {"role": "user", "content": "b"}]
    client.responses.create(**greedy(input=items, max_output_tokens=1))
    told = turns(("user", "a"), ("assistant", first.output_text), ("user", "b"))
    assert said(engine).startswith(told)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


@pytest.mark.parametrize("kind, schema", [
    ("json_object", None), ("json_schema", Answer.model_json_schema()),
])  # fmt: skip
def test_text_has_the_format_that_is_asked_for(client, kind, schema):
    form = {"type": kind} | ({"name": "x", "schema": schema, "strict": True} if schema else {})
    found = client.responses.create(**greedy(input="a", text={"format": form}))
    assert found.status == "completed" and found.completed_at >= found.created_at
    answer = json.loads(found.output_text)
    assert answer == {"yes": False} if schema else isinstance(answer, dict)
    assert found.text.format.type == kind


def test_answers_are_parsed(client):
    found = client.responses.parse(**greedy(input="a", text_format=Answer))
    assert found.output_parsed == Answer(yes=False)
    with client.responses.stream(**greedy(input="a", text_format=Answer)) as stream:
        assert [event.type for event in stream][-1] == "response.completed"
        assert stream.get_final_response().output_parsed == Answer(yes=False)


def test_a_stream_tells_the_same(client):
    body = greedy(input="a", text={"format": {"type": "json_object"}})
    whole = client.responses.create(**body)
    events = list(client.responses.create(**body, stream=True))
    kinds = [event.type for event in events]
    assert [kind for n, kind in enumerate(kinds) if kind != kinds[n - 1]] == MESSAGE
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    done = next(e for e in events if e.type == "response.output_text.done")
    last = events[-1].response
    assert deltas == done.text == last.output_text == whole.output_text
    assert events[0].response.status == events[1].response.status == "in_progress"
    assert events[0].response.output == [] and events[0].response.usage is None
    assert len({e.response.id for e in events if hasattr(e, "response")}) == 1
    assert len({e.item_id for e in events if hasattr(e, "item_id")} | {last.output[0].id}) == 1
    assert last.usage.output_tokens == whole.usage.output_tokens
    with client.responses.stream(**body) as stream:
        assert stream.get_final_response().output_text == deltas


def test_a_stream_that_is_cut_says_so(client):
    events = list(client.responses.create(**greedy(input="a", max_output_tokens=9), stream=True))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"
    assert events[-1].response.output[0].status == "incomplete"


def test_logprobs_come_where_they_are_asked_for(client):
    asked = greedy(
        input="a", max_output_tokens=3, top_logprobs=2, include=["message.output_text.logprobs"]
    )
    (part,) = client.responses.create(**asked).output[0].content
    assert [len(token.top_logprobs) for token in part.logprobs] == [2, 2, 2]
    assert part.logprobs[0].token == "G" and part.logprobs[0].logprob == -0.25
    events = client.responses.create(**asked, stream=True)
    told = [e.logprobs for e in events if e.type == "response.output_text.delta"]
    assert sum(map(len, told)) == 3
    (plain,) = client.responses.create(**greedy(input="a", max_output_tokens=3)).output[0].content
    assert plain.logprobs == []


def test_sampling_fields_reach_the_engine(client, engine):
    more = {"seed": 7, "top_k": 9, "min_p": 0.1, "priority": 2, "cache_salt": "s"}
    client.responses.create(
        model="fake", input="a", temperature=0.5, top_p=0.9, max_output_tokens=2, extra_body=more
    )
    params = engine.params[-1]
    assert (params.temperature, params.top_p, params.seed, params.top_k) == (0.5, 0.9, 7, 9)
    assert (params.min_p, params.priority, params.cache_salt) == (0.1, 2, "/s")
    assert params.max_new_tokens == 2


# --- functions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", [
    "required", {"type": "function", "name": "weather"},
    {"type": "allowed_tools", "mode": "required", "tools": [
        {"type": "function", "name": "weather"}]},
])  # fmt: skip
def test_functions_are_called(client, choice):
    asked = greedy(input="a", tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False)
    found = client.responses.create(**asked)
    (call,) = found.output
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments) == {"rain": False}
    assert call.call_id.startswith("call_") and call.id.startswith("fc_")
    assert found.status == "completed" and found.tools[0].name == "weather"
    events = list(client.responses.create(**asked, stream=True))
    kinds = [event.type for event in events]
    assert [kind for n, kind in enumerate(kinds) if kind != kinds[n - 1]] == [
        *MESSAGE[:3], "response.function_call_arguments.delta",
        "response.function_call_arguments.done", *MESSAGE[-2:],
    ]  # fmt: skip
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == events[-1].response.output[0].arguments == call.arguments
    with client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output[0].arguments == call.arguments


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_functions_go_with_logprobs(talking, choice):
    """Which are of the text alone."""
    talking.says = f"Let me look.\n{SAYS}\n{SAYS}"
    how = {"top_logprobs": 1, "include": ["message.output_text.logprobs"], "tool_choice": choice}
    for streams in (False, True):
        response = talking.server.post(PATH, input="a", tools=[WEATHER], stream=streams, **how)
        assert response.status_code == 200, response.text
        last = events_of(response.text)[-1][1]["response"] if streams else response.json()
        *texts, call = last["output"]
        assert call["type"] == "function_call" and json.loads(call["arguments"])
        logprobs = [part["logprobs"] for text in texts for part in text.get("content", ())]
        told = "".join(token["token"] for each in logprobs for token in each)
        assert told == ("Let me look." if choice == "auto" else "")


@pytest.mark.parametrize("streams", [False, True])
def test_thoughts_have_no_logprobs(talking, streams):
    talking.says = "<think>Hm.</think>Yes."
    how = {"top_logprobs": 1, "include": ["message.output_text.logprobs"], "stream": streams}
    response = talking.server.post(PATH, input="a", **how)
    assert response.status_code == 200, response.text
    last = events_of(response.text)[-1][1]["response"] if streams else response.json()
    thought, message = last["output"]
    assert thought["content"][0]["text"] == "Hm."
    (part,) = message["content"]
    told = "".join(token["token"] for token in part["logprobs"])
    assert part["text"] == "Yes." and told.removesuffix("<|end|>") == "Yes."


def test_a_piece_may_end_a_call_and_begin_others():
    """As it comes where a step has several tokens."""
    offer = OfferedTools([], {"weather": WEATHER["parameters"]}, {}, False, True)
    reader, output = MessageReader(offer, formats.by_name("hermes", None)), Output()
    at = SAYS.index("true")
    for piece in (SAYS[:at], f"{SAYS[at:]}\nAgain:\n{SAYS}"):
        output.take(reader.read(Piece(0, piece)), [])
    calls = [item.arguments for item in output.items if item.id.startswith("fc_")]
    assert calls == ['{"rain": true}'] * 2 and len(output.items) == 3


@pytest.mark.parametrize("size", [1, 2, 3, 7, None])
def test_items_are_the_same_wherever_the_answer_is_cut(size):
    offer = OfferedTools([], {"weather": WEATHER["parameters"]}, {}, False, True)
    reader, output = MessageReader(offer, formats.by_name("hermes", None)), Output()
    says = f"Hi {SAYS}\nbye {SAYS}{SAYS}\nso"
    size = size or len(says)
    for at in range(0, len(says), size):
        output.take(reader.read(Piece(0, says[at : at + size])), [])
    output.take(reader.read(Piece(0, "", finish_reason="stop")), [])
    output.close("completed")
    told = [i.content[0].text if hasattr(i, "content") else i.arguments for i in output.items]
    assert told == ["Hi", '{"rain": true}', "\nbye", *['{"rain": true}'] * 2, "\nso"]


def test_what_functions_return_is_read(client, engine):
    items = [{"role": "user", "content": "a"}, CALL, OUTPUT]
    found = client.responses.create(**greedy(input=items, tools=[WEATHER], max_output_tokens=4))
    assert found.output[0].type == "message" and "wet" in said(engine)


def test_functions_that_may_not_be_called_are_text(client):
    asked = greedy(input="a", tools=[WEATHER], tool_choice="none", max_output_tokens=4)
    found = client.responses.create(**asked)
    assert found.output[0].type == "message" and found.tool_choice == "none"


def test_a_text_and_calls_are_items_in_their_order(talking):
    """As the model says them, where it may choose."""
    talking.says = f"Let me look.\n{SAYS}\n{SAYS}"
    asked = greedy(input="a", tools=[WEATHER])
    with openai.OpenAI(base_url=f"{talking.server.url}/v1", api_key="none") as client:
        found = client.responses.create(**asked)
        events = list(client.responses.create(**asked, stream=True))
    assert found.status == "completed" and found.output_text == "Let me look."
    assert [item.type for item in found.output] == ["message", "function_call", "function_call"]
    assert [json.loads(item.arguments) for item in found.output[1:]] == [{"rain": True}] * 2
    assert found.output[1].call_id != found.output[2].call_id
    opened = [(e.output_index, e.item.type) for e in events if e.type.endswith("item.added")]
    assert opened == [(0, "message"), (1, "function_call"), (2, "function_call")]
    closed = [e.output_index for e in events if e.type == "response.output_item.done"]
    assert closed == [0, 1, 2]
    for index, item in enumerate(events[-1].response.output):
        told = [e for e in events if getattr(e, "output_index", None) == index]
        assert {getattr(e, "item_id", item.id) for e in told} == {item.id}
        whole = item.content[0].text if item.type == "message" else item.arguments
        assert "".join(e.delta for e in told if e.type.endswith(".delta")) == whole


# --- trouble --------------------------------------------------------------------------------------


@pytest.mark.parametrize("body, param, words", [
    ({}, "input", "required"), ({"input": None}, "input", "got null"),
    ({"input": 5}, "input", "expected"), ({"input": []}, "input", "length"),
    ({"input": ["a"]}, "input[0]", "expected an object"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "item_reference"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "tool"),
    ({"input": [{"role": "user"}]}, "input[0].content", "required"),
    ({"input": [{"content": "a"}]}, "input[0].role", "required"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
     "input[0].content[0].type", "input_text"),
    ({"input": [{"type": "function_call", "call_id": "x", "name": "y"}]},
     "input[0].arguments", "required"),
    ({"input": [{"type": "function_call_output", "output": "y"}]}, "input[0].call_id", "required"),
    ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "from 1"),
    ({"input": "a" * MAX_CONTEXT}, "input", f"context of this model is {MAX_CONTEXT} tokens"),
    ({"input": "a", "temperature": 2.1}, "temperature", "up to 2"),
    ({"input": "a", "top_p": 0}, "top_p", "above 0"),
    ({"input": "a", "top_logprobs": 21}, "top_logprobs", "up to 20"),
    ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
    ({"input": "a", "conversation": {"id": "c"}}, "conversation", "nothing is stored"),
    ({"input": "a", "background": True}, "background", "nothing is stored"),
    ({"input": "a", "prompt": {"id": "p"}}, "prompt", "not supported"),
    ({"input": "a", "truncation": "auto"}, "truncation", "disabled"),
    ({"input": "a", "metadata": {"k": 5}}, "metadata", "expected a text"),
    ({"input": "a", "metadata": {"k" * 65: "v"}}, "metadata", "length"),
    ({"input": "a", "metadata": {str(n): "v" for n in range(17)}}, "metadata", "length"),
    ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format.type", "xml"),
    ({"input": "a", "text": {"format": {"type": "json_schema", "name": "x"}}},
     "text.format.schema", "required"),
    ({"input": "a", "text": {"format": {"type": "json_schema", "schema": {"type": "stsring"}}}},
     "text.format", ""),
    ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
    ({"input": "a", "tools": [{"type": "function"}]}, "tools[0].name", "required"),
    ({"input": "a", "tools": [WEATHER, WEATHER]}, "tools[1].name", "another tool"),
    ({"input": "a", "tools": [{**WEATHER, "parameters": {"type": "array"}}]},
     "tools[0].parameters.type", "object"),
    ({"input": "a", "tool_choice": "required"}, "tool_choice", "goes with tools"),
    ({"input": "a", "tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}},
     "tool_choice.name", "x is none of these"),
    ({"input": "a", "tools": [WEATHER], "tool_choice": {"type": "function"}},
     "tool_choice.name", "required"),
    ({"input": "a", "tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}},
     "tool_choice.tools", "required"),
])  # fmt: skip
def test_bad_input_names_the_field(server, body, param, words):
    for streams in (False, True):
        response = server.post(PATH, **body, stream=streams)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["param"], error["type"]) == (param, "invalid_request_error"), error
        assert words in error["message"] and len(error["message"]) < 400
    validator(server, PATH, status="default").validate(response.json())


def test_limits_are_reached(client, server):
    most = MAX_CONTEXT - len([START, *b"user\na", END, START, *b"assistant\n"])
    assert client.responses.create(**greedy(input="a", max_output_tokens=most)).usage
    labels = {f"{n:064}": "v" * 512 for n in range(16)}
    found = client.responses.create(**greedy(input="a", max_output_tokens=1, metadata=labels))
    assert found.metadata == labels
    assert server.post(PATH, input="a", model="other").status_code == 404
    more = server.post(PATH, input="a", max_output_tokens=1, max_tool_calls=1)
    assert more.headers["x-ignored-params"] == "max_tool_calls"
    cut = client.responses.create(**greedy(input="a", max_output_tokens=MAX_CONTEXT))
    assert cut.status == "incomplete" and cut.usage.total_tokens == MAX_CONTEXT


def test_a_failure_before_the_first_token_is_an_error(talking):
    talking.breaks_at = 1
    for streams in (False, True):
        response = talking.server.post(PATH, input="a", stream=streams)
        assert response.status_code == 500 and response.headers["x-should-retry"] == "false"
        assert response.json()["error"]["type"] == "server_error"


def test_a_stream_that_fails_ends_with_what_went_wrong(talking):
    talking.breaks_at = 10
    assert talking.server.post(PATH, input="a").status_code == 500
    text = talking.server.post(PATH, input="a", stream=True, temperature=0).text
    name, last = events_of(text)[-1]
    assert name == last["type"] == "response.failed" and last["response"]["status"] == "failed"
    error = {"code": "server_error", "message": "the answer could not be generated"}
    assert last["response"]["error"] == error
    (message,) = last["response"]["output"]
    assert (message["status"], message["content"][0]["text"]) == ("incomplete", "Grüße, ")


@pytest.mark.parametrize("asked", [
    {"max_output_tokens": 5, "top_logprobs": 2}, {"text": {"format": {"type": "json_object"}}},
    {"tools": [WEATHER], "tool_choice": "required", "metadata": {"a": "b"}},
])  # fmt: skip
def test_answers_and_events_are_as_described(server, asked):
    validator(server, PATH).validate(server.post(PATH, input="a", **asked).json())
    events = events_of(server.post(PATH, input="a", stream=True, **asked).text)
    check = validator(server, PATH, "text/event-stream")
    for name, data in events:
        check.validate(data)
        assert data["type"] == name
        assert not check.is_valid(data | {"type": "response.unheard_of"})
    assert len(events) > 6
