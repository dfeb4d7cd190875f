"""Which replica gets a request, by Ray Serve's own router: the one with the least to do, or the one
that has the beginning of the prompt where it is not much busier.
"""

import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from inference.server.replicas.affinity import Affinity
from inference.server.replicas.forwarded import HttpRequest


class PrefixRouter(RequestRouter):
    """Ranks replicas; within a rank Ray takes the one with the fewest requests."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Called once, before the first request."""
        self._affinity = Affinity()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The preferred one first, where there is one, then all."""
        candidates = list(candidate_replicas)
        random.shuffle(candidates)  # of those that have as little to do, the first is taken
        request = _request(pending_request)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        if request is None:
            return [candidates]
        others = [r for r in candidates if r.replica_id.unique_id not in request.avoid]
        candidates = others or candidates
        known = self.replica_queue_len_cache
        loads = {r.replica_id.unique_id: known.get(r.replica_id) or 0 for r in candidates}
        preferred = self._affinity.preferred(request.prefixes, loads)
        first = [r for r in candidates if r.replica_id.unique_id == preferred]
        return [first, candidates] if first else [candidates]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """A replica was given a request."""
        request = _request(pending_request)
        if request is not None:
            self._affinity.note(request.prefixes, replica_id.unique_id)


def _request(pending: PendingRequest | None) -> HttpRequest | None:
    given = pending.args[0] if pending is not None and pending.args else None
    return given if isinstance(given, HttpRequest) else None
