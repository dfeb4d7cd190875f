"""A Ray cluster of this process's own, on this machine, and what runs in it."""

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
    """Starts it, and ends it. Nobody else is served: it listens on loopback (but for one port of
    each replica), asks for a token that is drawn here, has no dashboard, and reports to nobody.

    Raises:
        InputError: this process is to join another cluster.
    """
    if "RAY_ADDRESS" in os.environ:
        raise InputError("RAY_ADDRESS names a cluster, and this starts its own: unset it")
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # elsewhere, too, this means loopback alone
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_ENABLE_AUTO_CONNECT": "0",  # or a call after the end would start another one
    }
    import ray
    from ray import serve

    for name in ("ray", "ray.serve"):  # they set their own levels, again and again
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
    """Ray's resources of a replica with so many chips: of whatever accelerator this machine has,
    unless JAX is told to compute on its processor.
    """
    import ray

    found = {} if os.environ.get("JAX_PLATFORMS") == "cpu" else ray.cluster_resources()
    if found.get("GPU"):
        return {"num_gpus": num}
    return {"resources": {"TPU": num}} if found.get("TPU") else {}
