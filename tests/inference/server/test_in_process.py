"""The application without a port answers as it does over HTTP."""

import asyncio
import dataclasses
import json

import pytest

from inference.http_client.address import Address
from inference.http_client.connections import Connections
from inference.server.client.engine_client import EngineFailed
from inference.server.client.launch import Thread
from inference.server.service import Limits, Service
from inference.server.web import in_process
from tests.inference.server.fake_engine import CRASHES, REFUSED, FakeEngine

LIMITS = Limits()
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def in_this_process(bodies, engine=None, limits=LIMITS):
    async def ask():
        service = Service(Thread(lambda: engine or FakeEngine()), limits)
        async with in_process.serving(service) as server:
            return await asyncio.gather(*(server.post(path, body) for path, body in bodies))

    return asyncio.run(ask())


def test_the_application_answers_without_a_port(server):
    """As over HTTP, but for what no two answers share."""
    bodies = [
        (TEXT, b'{"prompt": "one", "max_tokens": 5, "logprobs": 2, "temperature": 0}'),
        (CHAT, b'{"messages": [{"role": "user", "content": "two"}], "max_tokens": 3}'),
        (TEXT, b'{"prompt": []}'), (TEXT, b"[]"), ("/v1/nothing", b"{}"),
        (TEXT, b'{"prompt": [%d], "max_tokens": 1}' % REFUSED), (TEXT, b'{"model": "other"}'),
    ]  # fmt: skip

    async def over_http():
        connections = Connections(Address.parse("--url", server.url))
        found = [await connections.post(*each) for each in bodies]
        connections.close()
        return found

    def plain(answer):
        body = json.loads(answer.body)
        return answer.status, {k: v for k, v in body.items() if k not in ("id", "created")}

    ours = in_this_process(bodies)
    assert [each.status for each in ours] == [200, 200, 400, 400, 404, 400, 404]
    assert all(each.headers["x-request-id"] for each in ours)
    seeded = bodies[1]  # an answer that is drawn has another seed each time
    for body, own, other in zip(bodies, ours, asyncio.run(over_http()), strict=True):
        assert body == seeded or plain(own) == plain(other)


def test_an_engine_that_does_not_start():
    def fails():
        raise RuntimeError("no weights")

    async def ask():
        async with in_process.serving(Service(Thread(fails))):
            pass

    with pytest.raises(EngineFailed, match="status 1"):
        asyncio.run(ask())


def test_a_request_at_which_the_engine_fails_ends_no_batch():
    limits = dataclasses.replace(Limits(), request_s=20)
    bodies = [(TEXT, b'{"prompt": [65], "max_tokens": 2}')] * 2
    bodies.insert(1, (TEXT, b'{"prompt": [%d], "max_tokens": 2}' % CRASHES))
    found = in_this_process(bodies, limits=limits)
    assert [each.status for each in found] == [200, 500, 200]
