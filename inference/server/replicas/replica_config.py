"""Configuration of replicas."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from configs.errors import InputError
from inference.server.client.launch import Subprocess
from inference.server.service import Limits, Service
from inference.text.tool_calls import formats

SHARED = (  # names of arguments that are flags of `scripts.serve`
    "max_num_seqs", "request_timeout", "max_queue_s", "drain_timeout", "served_model_name",
    "tool_call_parser",
)  # fmt: skip
_ARGS = ("flags", "min_replicas", "max_replicas", *SHARED, "resources")


@dataclasses.dataclass(frozen=True)
class ReplicaConfig:
    """Number and configuration of replicas.

    Attributes:
        command: starts an engine; a socket's descriptor is added as a flag.
        min_replicas, max_replicas: Ray scales between them by load.
        max_num_seqs: sequences that an engine runs at once; Ray adds a replica if the replicas have
            more requests on average.
        resources: Ray's resources of a replica: `num_gpus`, or `resources`.
        shares_cores: each replica has an equal share of the machine's cores.
        request_timeout, max_queue_s: `Limits.request_s` and `queue_s`, in seconds.
        drain_timeout: seconds for the running requests of a replica that ends.
        served_model_name, tool_call_parser, num_keys: as in `Service`.
    """

    command: Sequence[str]
    min_replicas: int = 1
    max_replicas: int = 1
    max_num_seqs: int = 32
    resources: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shares_cores: bool = False
    request_timeout: float = 600.0
    max_queue_s: float = 60.0
    drain_timeout: float = 30.0
    served_model_name: str | None = None
    tool_call_parser: str = formats.AUTO
    num_keys: int = 0

    @classmethod
    def from_args(cls, args: Mapping[str, Any], num_keys: int) -> "ReplicaConfig":
        """Reads `args` of a Serve configuration: fields from `min_replicas` to `tool_call_parser`,
        and `flags`, further flags of `scripts.serve`.

        Raises:
            InputError: an argument is unknown, or is also in `flags`.
        """
        settings = {"max_num_seqs": cls.max_num_seqs, **args}
        for name in settings:
            if name not in _ARGS:
                valid = ", ".join(("api_key_file", *_ARGS))
                raise InputError(f"unknown argument {name!r}; valid: {valid}")
        command = [sys.executable, "-m", "scripts.serve", *settings.pop("flags", [])]
        for flag in command[3:]:
            name = flag.lstrip("-").partition("=")[0].replace("-", "_")
            if name in SHARED:
                raise InputError(f"flags have --{name}: give it as an argument beside them")
        command += [f"--{name}={settings[name]}" for name in SHARED if name in settings]
        return cls(command, num_keys=num_keys, **settings)

    @property
    def limits(self) -> Limits:
        return Limits(request_s=self.request_timeout, queue_s=self.max_queue_s)

    def service(self) -> Service:
        launcher = Subprocess(self.command)
        service = Service(
            launcher, self.limits, self.served_model_name, self.tool_call_parser, warms_up=True
        )
        service.num_keys = self.num_keys
        return service
