"""The loop of the engine's process, a turn at a time."""

import socket

import pytest

from inference.request import SamplingParams
from inference.server import frames
from inference.server.engine_process.channel import Channel
from inference.server.engine_process.loop import EngineLoop
from inference.server.frames import Add, Outputs
from tests.inference.server.fake_engine import FakeEngine

pytestmark = pytest.mark.quick_code


def test_requests_that_come_while_a_step_can_wait_are_in_it():
    ours, theirs = socket.socketpair()
    engine = FakeEngine()
    loop = EngineLoop(engine, Channel(theirs))
    with ours, theirs:
        for id in (1, 2):
            engine.slack = 1.0
            ours.sendall(frames.encode(Add(id, [65], SamplingParams(max_new_tokens=4), None)))
            for _ in range(3):
                loop._turn()
            assert len(engine.running) == id and engine.num_steps == 0
        engine.slack = 0.0
        loop._turn()
        assert engine.num_steps == 1 and [each.num_told for each in engine.running] == [1, 1]


class PanicException(BaseException):
    """As pyo3 raises it where Rust panics."""


@pytest.mark.parametrize("error", [ValueError("poison"), PanicException("poison")])
def test_a_request_that_cannot_be_queued_ends_alone(error, monkeypatch, caplog):
    """With an error, as one that fails later does: it is not for its sender to mend."""
    client_socket, engine_socket = socket.socketpair()
    engine = FakeEngine()
    loop, add = EngineLoop(engine, Channel(engine_socket)), engine.add

    def faulty(tokens, params, output):
        if output:
            raise error
        return add(tokens, params, output)

    monkeypatch.setattr(engine, "add", faulty)
    with client_socket, engine_socket, client_socket.makefile("rb") as incoming:
        for id, output in ((1, []), (2, [71]), (3, [])):
            params = SamplingParams(max_new_tokens=2, n=2 - len(output))
            client_socket.sendall(frames.encode(Add(id, [65], params, None, output)))
        loop._turn()
        length = frames.length(incoming.read(frames.HEADER_BYTES))
        message = frames.FROM_ENGINE.decode(incoming.read(length))
    assert isinstance(message, Outputs)
    assert [(one.id, one.token_ids, one.finish_reason) for one in message.outputs] == [
        (2, [], "error")
    ]
    assert {one.id for one in loop._open.values()} == {1, 3} and "poison" in caplog.text
