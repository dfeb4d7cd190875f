"""The loop of the engine's process, a turn at a time."""

import socket

import pytest

from inference.request import SamplingParams
from inference.server import frames
from inference.server.engine_process.channel import Channel
from inference.server.engine_process.loop import EngineLoop
from inference.server.frames import Add
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
