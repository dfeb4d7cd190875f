"""Streams of /v1/messages: events as they are sent, and as Anthropic's client reads them."""

import anthropic
import pytest

from inference.server.service import Limits
from tests.inference.server.anthropic.asking import ASKED, CALL, HOW, NOW, PATH, TOOL, events_of
from tests.inference.server.described import validator
from tests.inference.server.fake_engine import REPLY, FakeEngine
from tests.inference.server.running import running

BLOCK = ["content_block_start", "content_block_delta", "content_block_stop"]
END = ["message_delta", "message_stop"]


def kinds_of(events):
    """Names of events, neighbors of one name once."""
    names = [name for name, _ in events]
    return [name for n, name in enumerate(names) if n == 0 or name != names[n - 1]]


def streamed(server, **asked):
    body = {"max_tokens": 400, "messages": ASKED, "stream": True, "temperature": 0} | asked
    response = server.post(PATH, **body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_of(response.text)


def test_events_of_a_text(perch, parrot):
    parrot.says = "Yes, it is."
    events = streamed(perch)
    assert kinds_of(events) == ["message_start", *BLOCK, *END]
    assert all(data["type"] == name for name, data in events)
    message = events[0][1]["message"]
    assert message["id"].startswith("msg_") and message["content"] == []
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "fake")
    assert message["stop_reason"] is None and message["usage"]["output_tokens"] == 0
    assert message["usage"]["input_tokens"] == len(parrot.prompts[-1])
    assert events[1][1] == {"type": BLOCK[0], "index": 0, "content_block": {
        "type": "text", "text": ""}}  # fmt: skip
    deltas = [data["delta"] for name, data in events if name == BLOCK[1]]
    assert {delta["type"] for delta in deltas} == {"text_delta"}
    assert "".join(delta["text"] for delta in deltas) == parrot.says
    end = events[-2][1]
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert end["usage"]["output_tokens"] == len(parrot.says) + 1  # and the end


def test_events_of_calls(perch, parrot):
    parrot.says = f"I look.\n{CALL}\n{CALL}"
    events = streamed(perch, tools=[TOOL, NOW])
    assert kinds_of(events) == ["message_start", *BLOCK, *BLOCK, *BLOCK, *END]
    starts = [data for name, data in events if name == BLOCK[0]]
    assert [data["index"] for data in starts] == [0, 1, 2]
    assert [data["content_block"]["type"] for data in starts] == ["text", "tool_use", "tool_use"]
    assert starts[1]["content_block"]["input"] == {}
    assert starts[1]["content_block"]["id"] != starts[2]["content_block"]["id"]
    for index in (1, 2):
        deltas = [d["delta"] for n, d in events if n == BLOCK[1] and d["index"] == index]
        assert {delta["type"] for delta in deltas} == {"input_json_delta"} and len(deltas) > 1
        assert "".join(delta["partial_json"] for delta in deltas) == '{"rain": true}'
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"


def test_events_of_a_thought(perch, parrot):
    parrot.says = "<think>Two.</think>Four."
    events = streamed(perch)
    assert kinds_of(events) == ["message_start", *BLOCK, *BLOCK, *END]
    blocks = [data["content_block"] for name, data in events if name == BLOCK[0]]
    assert blocks == [{"type": "thinking", "thinking": "", "signature": ""},
                      {"type": "text", "text": ""}]  # fmt: skip
    deltas = [data["delta"] for name, data in events if name == BLOCK[1] and data["index"] == 0]
    assert {delta["type"] for delta in deltas} == {"thinking_delta"}
    assert "".join(delta["thinking"] for delta in deltas) == "Two."


def test_an_answer_without_a_text(perch, parrot):
    parrot.says = ""
    assert kinds_of(streamed(perch)) == ["message_start", *END]


def test_the_client_reads_text_as_it_comes(client):
    asked = HOW | {"max_tokens": 60}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        pieces = list(stream.text_stream)
        message = stream.get_final_message()
    assert len(pieces) > 20 and "".join(pieces) == whole.content[0].text
    assert message.content[0].text == whole.content[0].text
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 60)
    assert message.usage == whole.usage and message.id != whole.id
    events = list(client.messages.create(**asked, stream=True))
    assert [events[0].type, events[-1].type] == ["message_start", "message_stop"]


def test_a_stream_that_fails_raises(client, parrot, perch):
    parrot.breaks_at = 10
    with (
        pytest.raises(anthropic.APIStatusError, match="could not be generated") as error,
        client.messages.stream(**HOW) as stream,
    ):
        assert "".join(stream.text_stream) == "Grüße, "
    assert error.value.type == "api_error"
    name, last = streamed(perch)[-1]
    assert name == "error" and last["error"]["type"] == "api_error" and last["request_id"]


def test_a_failure_before_the_first_token_is_a_status(client, parrot):
    parrot.breaks_at = 1
    for streams in (False, True):
        with pytest.raises(anthropic.InternalServerError) as error:
            client.messages.create(**HOW, stream=streams)
        assert error.value.status_code == 500 and error.value.type == "api_error"


def test_constraints_that_leave_no_token_are_the_requests_fault(client, parrot):
    parrot.breaks_at, parrot.failure = 3, "its grammar permits nothing here"
    with pytest.raises(anthropic.APIStatusError, match="permits nothing here") as error:
        list(client.messages.create(**HOW, stream=True))
    assert error.value.type == "invalid_request_error"


def test_silence_is_filled_with_pings():
    with running(FakeEngine(step_s=0.2), Limits(idle_s=0.05)) as server:
        events = streamed(server, max_tokens=4)
        assert ("ping", {"type": "ping"}) in events[1:-2]
        assert kinds_of([event for event in events if event[0] != "ping"])[-1] == "message_stop"
        with anthropic.Anthropic(base_url=server.url, api_key="none") as client:
            message = client.messages.create(**HOW | {"max_tokens": 4})
    assert message.content[0].text == REPLY.encode()[:4].decode()


def test_a_deadline_ends_a_stream():
    with running(FakeEngine(step_s=0.05), Limits(request_s=2)) as server:
        name, last = streamed(server)[-1]
    assert name == "error" and last["error"]["type"] == "timeout_error"


@pytest.mark.parametrize("asked", [
    {"max_tokens": 5}, {"tools": [TOOL], "tool_choice": {"type": "any"}},
    {"stop_sequences": ["answer"]},
])  # fmt: skip
def test_answers_and_events_are_as_described(perch, parrot, asked):
    body = {"max_tokens": 90, "messages": ASKED} | asked
    validator(perch, PATH).validate(perch.post(PATH, **body).json())
    check = validator(perch, PATH, "text/event-stream")
    events = streamed(perch, **body)
    for _, data in events:
        check.validate(data)
        assert not check.is_valid(data | {"type": "message_unheard_of"})
    assert len(events) > 5
