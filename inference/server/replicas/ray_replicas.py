"""Replicas that Ray Serve runs, for a gateway."""

import asyncio
from contextlib import suppress

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from inference.server.replicas.forwarded import HttpRequest, ReplicaLost
from inference.server.web.asgi_client import Parts

_METRICS_S = 5.0


class RayReplicas:
    """The replicas of one deployment."""

    def __init__(self, handle: DeploymentHandle):
        self._handle = handle
        self._stream = handle.options(method_name="answer", stream=True)

    async def answer(self, request: HttpRequest) -> Parts:
        """The answer of the replica that Ray's router chooses; waits until there is one.

        Raises:
            ReplicaLost: the replica has ended, or Ray lost its answer.
        """
        response = self._stream.remote(request)
        is_over = False
        try:
            async for part in response:
                yield part
            is_over = True
        except (RayError, RayServeException):
            is_over = True
            raise ReplicaLost from None
        finally:
            if not is_over:
                response.cancel()

    async def num_ready(self) -> int:
        with suppress(RayError, RayServeException):
            status = await asyncio.to_thread(serve.status)
            app = status.applications.get(self._handle.app_name)
            deployment = app and app.deployments.get(self._handle.deployment_name)
            return int(deployment.replica_states.get("RUNNING", 0)) if deployment else 0
        return 0

    async def metrics(self) -> dict[str, str]:
        with suppress(RayError, RayServeException, TimeoutError):
            # Ray's public `results_async` returns nothing at all if one replica is late.
            replies = self._handle.broadcast("metrics")._fetch_replica_results_async()
            answers = [reply.get_async() for reply in await asyncio.wait_for(replies, _METRICS_S)]
            in_time = (asyncio.wait_for(reply, _METRICS_S) for reply in answers)
            results = await asyncio.gather(*in_time, return_exceptions=True)
            return dict(reply for reply in results if not isinstance(reply, BaseException))
        return {}
