"""What one process says is what the other hears, however the socket cuts it."""

import dataclasses
import socket
import threading

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.outputs import RequestOutput
from inference.request import SamplingParams
from inference.server import frames
from inference.server.engine_process.channel import Channel
from inference.server.frames import (
    Abort,
    Add,
    ConnectionClosed,
    Heartbeat,
    Outputs,
    Stop,
    TextFacts,
)
from tests.inference.server.fake_engine import tokenizer

PARAMS = SamplingParams(
    temperature=0.7, top_k=3, logit_bias={5: -1.5}, allowed_token_ids=(1, 2), stop=("ü",),
    stop_token_ids=(7,), seed=2**64 - 1, n=2, priority=-3,
)  # fmt: skip
SENT = [Add(1, list(range(5000)), PARAMS, 3), Abort(1), Stop(), Add(2, [1], SamplingParams())]


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    yield ours, channel
    ours.close()
    channel.close()


@given(sizes=st.lists(st.integers(1, 9000), min_size=1))
def test_messages_arrive_whole_and_in_order(sizes):
    data = b"".join(map(frames.encode, SENT))
    ours, theirs = socket.socketpair()
    with ours:
        channel, found, start = Channel(theirs), [], 0
        for size in sizes:
            if part := data[start : start + size]:
                ours.sendall(part)
                start += size
                found += channel.receive(0)
        if rest := data[start:]:
            ours.sendall(rest)
        while len(found) < len(SENT):
            found += channel.receive(1)
        channel.close()
    assert found == SENT


def test_outputs_survive_the_way():
    output = RequestOutput(
        1, [5, 6], "ü", "stop", 1, (0, 1), [-0.1, -float("inf")], [([5], [-0.1]), ([7], [-2.0])],
        "x", 3,
    )  # fmt: skip
    data = frames.encode(Outputs([output]))[frames.HEADER_BYTES :]
    (found,) = frames.FROM_ENGINE.decode(data).outputs
    assert dataclasses.replace(found, top_logprobs=[tuple(map(list, t)) for t in found.top_logprobs]
                               ) == output  # fmt: skip
    beat = Heartbeat(1, 2, 0.5, {"steps": 3})
    assert frames.FROM_ENGINE.decode(frames.encode(beat)[frames.HEADER_BYTES :]) == beat


def test_what_is_no_message_is_refused(pair):
    ours, channel = pair
    for data in (b"\xff\xff\xff\xff", frames.encode(Heartbeat())):
        ours.sendall(data)
        with pytest.raises((ConnectionClosed, msgspec.ValidationError)):
            channel.receive(1)
        channel._received.clear()
    with pytest.raises(msgspec.ValidationError, match="temperature"):
        wrong = frames.encode(Add(1, [1], SamplingParams(temperature=1.0)))
        frames.TO_ENGINE.decode(wrong[4:].replace(b"\xcb\x3f\xf0", b"\xcb\xbf\xf0", 1))


def test_the_other_side_may_go(pair):
    ours, channel = pair
    assert channel.receive(0.01) == []
    ours.sendall(frames.encode(Stop())[:3])
    ours.close()
    with pytest.raises(ConnectionClosed):
        while True:
            channel.receive(1)
    with pytest.raises(ConnectionClosed):
        for _ in range(1000):
            channel.send(Heartbeat())


def test_a_full_socket_makes_the_engine_wait(pair):
    ours, channel = pair
    big = Outputs([RequestOutput(1, list(range(100_000)), "", None)])
    thread = threading.Thread(target=channel.send, args=(big,), daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    while thread.is_alive():
        ours.recv(1 << 16)
        thread.join(0.001)


def test_a_tokenizer_survives_the_way():
    own = tokenizer()
    other = msgspec.json.decode(msgspec.json.encode(TextFacts.of(own)), type=TextFacts).tokenizer()
    for text in ("Grüße, 世界! 🙂", "<|start|>user\na<|end|>"):
        assert other.encode(text) == own.encode(text) and other.decode(own.encode(text)) == (
            own.decode(own.encode(text))
        )
    messages = [{"role": "user", "content": "<|end|>"}]
    assert other.apply_chat_template(messages) == own.apply_chat_template(messages)
    assert (other.vocab_size, other.eos_id) == (own.vocab_size, own.eos_id)
