"""Replicas that Ray Serve runs, as a gateway sees them."""

import asyncio
from contextlib import suppress

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from inference.server.replicas.forwarded import HttpRequest, Parts, ReplicaLost

_METRICS_S = 5.0


class RayReplicas:
    """The replicas of one deployment."""

    def __init__(self, handle: DeploymentHandle):
        self._handle = handle
        self._stream = handle.options(method_name="answer", stream=True)

    async def answer(self, request: HttpRequest) -> Parts:
        """The answer of the replica that Ray's router chooses, once there is one.

        Raises:
            ReplicaLost: it has gone, or Ray could not bring what it said.
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
        """How many serve requests, by what Ray's controller knows."""
        with suppress(RayError, RayServeException):
            status = await asyncio.to_thread(serve.status)
            app = status.applications.get(self._handle.app_name)
            own = app and app.deployments.get(self._handle.deployment_name)
            return int(own.replica_states.get("RUNNING", 0)) if own else 0
        return 0

    async def metrics(self) -> dict[str, str]:
        """Each one's metrics as text, by its id; without those that do not answer in time."""
        with suppress(RayError, RayServeException, TimeoutError):
            # Ray's own way to collect them, `results_async`, has none where one is late.
            asked = self._handle.broadcast("metrics")._fetch_replica_results_async()
            answers = [each.get_async() for each in await asyncio.wait_for(asked, _METRICS_S)]
            in_time = (asyncio.wait_for(each, _METRICS_S) for each in answers)
            found = await asyncio.gather(*in_time, return_exceptions=True)
            return dict(each for each in found if not isinstance(each, BaseException))
        return {}
