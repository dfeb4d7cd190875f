"""A private Ray cluster on this machine."""

import contextlib
import logging
import os
import secrets
from collections.abc import Iterator
from typing import Any

from configs.errors import InputError

APP = "ridgeline"


@contextlib.contextmanager
def started() -> Iterator[None]:
    """Starts a cluster, and ends it. It listens on loopback (except for one port of each replica),
    needs a random token, and has no dashboard and no usage reports.

    Raises:
        InputError: RAY_ADDRESS names another cluster.
    """
    if "RAY_ADDRESS" in os.environ:
        raise InputError("RAY_ADDRESS names a cluster, and this starts its own: unset it")
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on Linux, too, this means loopback only
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_ENABLE_AUTO_CONNECT": "0",  # else a call after the end would start another cluster
    }
    import ray
    from ray import serve

    for name in ("ray", "ray.serve"):  # a filter, because Ray resets their levels
        logging.getLogger(name).addFilter(lambda record: record.levelno >= logging.WARNING)
    ray.init(
        address="local", include_dashboard=False, configure_logging=False, log_to_driver=True,
        namespace=APP,
    )  # fmt: skip
    try:
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        yield
    finally:
        ray.shutdown()


def chips(num: int) -> dict[str, Any]:
    """Ray's resources of a replica with `num` chips: of this machine's accelerator, or none if
    `JAX_PLATFORMS` is cpu.
    """
    import ray

    resources = {} if os.environ.get("JAX_PLATFORMS") == "cpu" else ray.cluster_resources()
    if resources.get("GPU"):
        return {"num_gpus": num}
    return {"resources": {"TPU": num}} if resources.get("TPU") else {}
