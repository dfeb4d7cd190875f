"""Replicas of a model as deployments of Ray Serve: `model` for the gateway of `scripts.serve_ray`,
and `build` for a cluster whose proxies listen (`import_path` of a Serve configuration).
"""

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig
from starlette.types import ASGIApp

from configs.errors import InputError
from inference.server.replicas.forwarded import HttpRequest
from inference.server.replicas.gateway import Gateway
from inference.server.replicas.ray_replicas import RayReplicas
from inference.server.replicas.ray_router import PrefixRouter
from inference.server.replicas.replica import Replica, take_cores
from inference.server.replicas.replica_config import ReplicaConfig
from inference.server.service import QUEUED_PER_SEQ, Limits
from inference.server.web import access
from inference.server.web.access import Keys
from inference.server.web.app import guarded
from inference.server.web.asgi_client import Parts

_CHECK_S, _CHECK_TIMEOUT_S = 2.0, 10.0
_STARTS = 3  # attempts to start a replica until its deployment has failed
_QUIET = LoggingConfig(log_level="WARNING", enable_access_log=False)


class ModelReplica:
    """A `Replica` in the form that Ray Serve starts, calls and ends."""

    async def __init__(self, config: ReplicaConfig):  # type: ignore[misc]
        context = serve.get_replica_context()
        if config.shares_cores:
            take_cores(context.rank.local_rank, config.max_replicas)
        self._replica = Replica(config.service(), context.replica_id.unique_id)
        await self._replica.start()

    async def answer(self, request: HttpRequest) -> Parts:
        async for part in self._replica.answer(request):
            yield part

    async def check_health(self) -> None:
        """See `Replica`; Ray replaces one that fails three times."""
        self._replica.check()

    async def metrics(self) -> tuple[str, str]:
        return self._replica.metrics()

    async def __del__(self) -> None:
        await self._replica.close()


class Ingress:
    """The gateway, behind Ray's proxies."""

    def __init__(self, model: DeploymentHandle, config: ReplicaConfig, keys: Keys):
        gateway = Gateway(config.limits, RayReplicas(model))
        self._app = guarded(gateway, config.limits, keys, is_local=False)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app


def model(config: ReplicaConfig) -> Application:
    """The deployment `model`, for `RayReplicas`."""
    max_sequences = config.max_num_seqs * (1 + QUEUED_PER_SEQ)
    return serve.deployment(
        name="model",
        autoscaling_config=AutoscalingConfig(
            min_replicas=config.min_replicas,
            max_replicas=config.max_replicas,
            target_ongoing_requests=config.max_num_seqs,
        ),
        max_ongoing_requests=2 * max_sequences,  # room to answer the requests that it rejects
        ray_actor_options={"num_cpus": 0, **config.resources},
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        health_check_period_s=_CHECK_S,
        health_check_timeout_s=_CHECK_TIMEOUT_S,
        graceful_shutdown_timeout_s=config.drain_timeout,
        graceful_shutdown_wait_loop_s=0.5,
        max_constructor_retry_count=_STARTS,
        logging_config=_QUIET,
    )(ModelReplica).bind(config)


def build(args: Mapping[str, Any]) -> Application:
    """Replicas and a gateway, from the `args` of a Serve configuration.

    Args:
        args: `api_key_file`, and arguments of `ReplicaConfig.from_args`.

    Raises:
        InputError: there is no key file (the proxies are open), or an argument is unknown.
    """
    settings = dict(args)
    if "api_key_file" not in settings:
        raise InputError("args name no api_key_file: a file with a key a line")
    keys = access.read_keys("api_key_file", settings.pop("api_key_file"))
    config = ReplicaConfig.from_args(settings, len(keys))
    ingress = serve.deployment(
        name="gateway", max_ongoing_requests=Limits().connections, logging_config=_QUIET,
        graceful_shutdown_timeout_s=config.drain_timeout, ray_actor_options={"num_cpus": 0},
    )(serve.ingress()(Ingress))  # fmt: skip
    return ingress.bind(model(config), config, keys)
