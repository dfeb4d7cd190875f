"""What a gateway is told of Ray's replicas; skipped where Ray is not installed."""

import asyncio

import pytest

pytest.importorskip("ray")

from ray.exceptions import RayActorError, RaySystemError
from ray.serve.exceptions import BackPressureError

from inference.server.replicas import ray_replicas
from inference.server.replicas.forwarded import HttpRequest, ReplicaLost
from inference.server.replicas.ray_replicas import RayReplicas


class Handle:
    """Of a deployment whose replicas do what they are told to."""

    def __init__(self, *answers, error=None):
        self.answers, self.error = answers, error

    def options(self, **options):
        return self

    def remote(self, request):
        async def parts():
            yield b"first"
            raise self.error

        return parts()

    def broadcast(self, method):
        return self

    async def _fetch_replica_results_async(self):
        return [Result(each) for each in self.answers]


class Result:
    def __init__(self, answer):
        self.answer = answer

    async def get_async(self):
        if self.answer is None:
            await asyncio.sleep(60)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_metrics_are_those_of_replicas_that_answer(monkeypatch):
    monkeypatch.setattr(ray_replicas, "_METRICS_S", 0.1)
    handle = Handle(("a", "1"), None, ("b", "2"), RayActorError())
    assert asyncio.run(RayReplicas(handle).metrics()) == {"a": "1", "b": "2"}


@pytest.mark.parametrize(
    "error", [RayActorError(), RaySystemError("odd"), BackPressureError(1, 1)], ids=type
)
def test_whatever_ray_says_a_replica_is_lost(error):
    async def answer():
        parts = RayReplicas(Handle(error=error)).answer(HttpRequest("GET", "/", b"", (), b""))
        assert await anext(parts) == b"first"
        with pytest.raises(ReplicaLost):
            await anext(parts)

    asyncio.run(answer())
