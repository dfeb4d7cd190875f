"""How replicas are run."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from configs.errors import InputError
from inference.server.client.launch import Subprocess
from inference.server.service import Limits, Service
from inference.text.tool_calls import formats

SHARED = (  # with the flags of `scripts.serve`, by their names
    "max_num_seqs", "request_timeout", "max_queue_s", "drain_timeout", "served_model_name",
    "tool_call_parser",
)  # fmt: skip
_ARGS = ("flags", "min_replicas", "max_replicas", *SHARED, "resources")


@dataclasses.dataclass(frozen=True)
class ReplicaConfig:
    """How many replicas there are, and what each is.

    Attributes:
        command: starts an engine; a socket's descriptor is added as a flag.
        min_replicas, max_replicas: how many, by what there is to do.
        max_num_seqs: sequences that an engine runs side by side; more requests of each replica than
            so many, on average, ask for another one.
        resources: of Ray's that a replica takes: `num_gpus`, or `resources`.
        shares_cores: each replica has an equal part of the machine's cores for itself.
        request_timeout, max_queue_s: seconds of requests, as `Limits` has them.
        drain_timeout: seconds for the requests of a replica that is ended.
        served_model_name, tool_call_parser, num_keys: as `Service` has them.
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
        """From `args` of a Serve configuration: its fields from `min_replicas` to
        `tool_call_parser`, and `flags`, more of `scripts.serve`'s.

        Raises:
            InputError: there is no such argument, or one is a flag, too.
        """
        given = {"max_num_seqs": cls.max_num_seqs, **args}
        for name in given:
            if name not in _ARGS:
                valid = ", ".join(("api_key_file", *_ARGS))
                raise InputError(f"unknown argument {name!r}; valid: {valid}")
        command = [sys.executable, "-m", "scripts.serve", *given.pop("flags", [])]
        for flag in command[3:]:
            name = flag.lstrip("-").partition("=")[0].replace("-", "_")
            if name in SHARED:
                raise InputError(f"flags have --{name}: give it as an argument beside them")
        command += [f"--{name}={given[name]}" for name in SHARED if name in given]
        return cls(command, num_keys=num_keys, **given)

    @property
    def limits(self) -> Limits:
        """Of requests, for replicas and their gateway."""
        return Limits(request_s=self.request_timeout, queue_s=self.max_queue_s)

    def service(self) -> Service:
        """What one replica draws on; nothing is started yet."""
        launcher = Subprocess(self.command)
        service = Service(
            launcher, self.limits, self.served_model_name, self.tool_call_parser, warms_up=True
        )
        service.num_keys = self.num_keys
        return service
