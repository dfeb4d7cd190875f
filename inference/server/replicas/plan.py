"""How replicas are run."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from inference.server.client.launch import Subprocess
from inference.server.service import Limits, Service
from inference.text.tool_calls import formats


@dataclasses.dataclass(frozen=True)
class Plan:
    """How many replicas there are, and what each is.

    Attributes:
        command: starts an engine; a socket's descriptor is added as a flag.
        min_replicas, max_replicas: how many, by what there is to do.
        num_seqs: sequences that an engine runs side by side; more requests of each replica than so
            many, on average, ask for another one.
        resources: of Ray's that a replica takes: `num_gpus`, or `resources`.
        shares_cores: each replica has an equal part of the machine's cores for itself.
        request_s, queue_s: of requests, as `Limits` has them.
        drain_s: seconds for the requests of a replica that is ended.
        name, tool_call_parser, num_keys: as `Service` has them.
    """

    command: Sequence[str]
    min_replicas: int = 1
    max_replicas: int = 1
    num_seqs: int = 32
    resources: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shares_cores: bool = False
    request_s: float = 600.0
    queue_s: float = 60.0
    drain_s: float = 30.0
    name: str | None = None
    tool_call_parser: str = formats.AUTO
    num_keys: int = 0

    @property
    def limits(self) -> Limits:
        """Of requests, for replicas and their gateway."""
        return Limits(request_s=self.request_s, queue_s=self.queue_s)

    def service(self) -> Service:
        """What one replica draws on; nothing is started yet."""
        launcher = Subprocess(self.command)
        service = Service(launcher, self.limits, self.name, self.tool_call_parser, warms_up=True)
        service.num_keys = self.num_keys
        return service
