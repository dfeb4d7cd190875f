"""How replicas are run."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


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
        request_s, drain_s: seconds of a request, and for the requests of a replica that is ended.
        name: of the model, for clients.
    """

    command: Sequence[str]
    min_replicas: int = 1
    max_replicas: int = 1
    num_seqs: int = 32
    resources: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shares_cores: bool = False
    request_s: float = 600.0
    drain_s: float = 30.0
    name: str | None = None
