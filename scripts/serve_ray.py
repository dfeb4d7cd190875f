"""Serves replicas of a model on one machine: python -m scripts.serve_ray --replicas=2."""

from scripts import interrupts  # noqa: F401

# isort: split
import asyncio
import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from absl import flags

from configs.errors import InputError
from scripts import common, failures, serve
from scripts.flags import host_flags
from scripts.flags.requests import replicas_flag

if TYPE_CHECKING:
    from inference.server.replicas.ray_replicas import RayReplicas
    from inference.server.replicas.replica_config import ReplicaConfig
    from inference.server.traces import Traces
    from inference.server.web.access import Keys

_MAX_REPLICAS = flags.DEFINE_integer(
    "max_replicas", None, "So many while there is work for them; default: --replicas."
)
flags.adopt_module_key_flags(serve)
flags.adopt_module_key_flags(replicas_flag)
T = TypeVar("T")


def main(argv: Sequence[str]) -> None:
    if flags.FLAGS.engine_socket is not None:
        serve.main(argv)
        return
    serve.check_flags()
    if host_flags.place().count > 1:
        raise InputError("a replica has one host: give --hosts=1")
    failures.check_packages("serve_ray", "serve,ray", "ray")
    if flags.FLAGS.batch_dir is not None:
        raise InputError("replicas store no files and batches: leave --batch_dir out")
    if flags.FLAGS.control_key_file is not None:
        raise InputError("--control_key_file: must be left out, because replicas differ then")
    least = 2 if replicas_flag.REPLICAS.value is None else replicas_flag.REPLICAS.value
    max_replicas = least if _MAX_REPLICAS.value is None else _MAX_REPLICAS.value
    if not 1 <= least <= max_replicas:
        raise InputError(
            f"--replicas is between 1 and --max_replicas, not {least} of {max_replicas}"
        )
    import uvloop

    from inference.server.replicas import ray_cluster
    from inference.server.web import serving

    keys, traces = serve.read_keys(), serve.read_traces()
    _, config = common.named_config({}, serve.engine_needs())
    listening = serving.bound(flags.FLAGS.host, flags.FLAGS.port)
    with ray_cluster.started():
        from inference.server.replicas.replica_config import ReplicaConfig

        flag_values = flags.FLAGS
        replica_config = ReplicaConfig(
            [sys.executable, "-m", "scripts.serve_ray", *sys.argv[1:]], least, max_replicas,
            config.engine.max_seqs, ray_cluster.chips(config.num_chips), shares_cores=True,
            request_timeout=flag_values.request_timeout, max_queue_s=flag_values.max_queue_s,
            drain_timeout=flag_values.drain_timeout, num_keys=len(keys or ()),
            served_model_name=flag_values.served_model_name,
            tool_call_parser=flag_values.tool_call_parser,
        )  # fmt: skip
        uvloop.run(_serve(replica_config, listening, keys, traces))


async def _serve(
    replica_config: "ReplicaConfig",
    listening: socket.socket,
    keys: "Keys | None",
    traces: "Traces | None",
) -> None:
    """Until a signal, or the replicas do not start."""
    from inference.server.replicas.gateway import Gateway
    from inference.server.web.access import is_local
    from inference.server.web.app import guarded
    from inference.server.web.observed import RequestObserver
    from inference.server.web.serving import DrainingServer

    url, gateway = serve.url_of(listening), Gateway(replica_config.limits)
    site, here = serve.read_site(), is_local(listening.getsockname()[0])
    app = guarded(gateway, replica_config.limits, keys, here, site)
    # Replicas count the requests.
    observed = site.around(RequestObserver(app, lambda *_: None, traces))
    server = DrainingServer(
        observed, gateway, replica_config.limits, replica_config.drain_timeout, say=common.say
    )

    async def deploy() -> None:
        gateway.replicas = await _left_behind(lambda: _deployed(replica_config))
        common.say(f"the model is served at {url}/v1; replicas: {replica_config.min_replicas}")

    def ended(deploying: asyncio.Task[None]) -> None:
        if deploying.cancelled() or deploying.exception():
            server.handle_exit(0, None)

    common.say(f"{url} answers, while the replicas are loaded")
    deploying = asyncio.create_task(deploy())
    deploying.add_done_callback(ended)
    await server.serve(sockets=[listening])
    if traces is not None:
        await asyncio.to_thread(traces.close)
    if deploying.done():
        deploying.result()


async def _left_behind(work: Callable[[], T]) -> T:
    """Runs work in a thread that the process does not await, unlike `asyncio.to_thread`'s."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(how: Callable[[object], None], what: object) -> None:
        if not future.done():
            how(what)

    def run() -> None:
        outcome: tuple[Callable[[Any], None], object]
        try:
            outcome = future.set_result, work()
        except Exception as error:
            outcome = future.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, daemon=True).start()
    return await future


def _deployed(replica_config: "ReplicaConfig") -> "RayReplicas":
    """The replicas, once they are ready. Raises RuntimeError if they do not start."""
    from ray import serve as ray_serve

    from inference.server.replicas import ray_application, ray_cluster
    from inference.server.replicas.ray_replicas import RayReplicas

    model = ray_application.model(replica_config)
    return RayReplicas(ray_serve.run(model, name=ray_cluster.APP, route_prefix=None))


if __name__ == "__main__":
    common.run(main, serve.UNREAD)
