"""A router for Ray Serve: chooses the replica with the fewest requests, or the one that has the
beginning of the prompt if it is not much busier.
"""

import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from inference.server.replicas.affinity import Affinity
from inference.server.replicas.forwarded import HttpRequest


class PrefixRouter(RequestRouter):
    """Ranks replicas; within a rank Ray takes the one with the fewest requests."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._affinity = Affinity()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Ranks candidates: the preferred one first, if there is one, then all."""
        candidates = list(candidate_replicas)
        random.shuffle(candidates)  # Ray takes the first of the equally busy ones
        request = _request(pending_request)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        if request is None:
            return [candidates]
        not_refused = [r for r in candidates if r.replica_id.unique_id not in request.avoid]
        candidates = not_refused or candidates
        queue_lengths = self.replica_queue_len_cache
        loads = {r.replica_id.unique_id: queue_lengths.get(r.replica_id) or 0 for r in candidates}
        preferred = self._affinity.preferred(request.prefixes, loads)
        first = [r for r in candidates if r.replica_id.unique_id == preferred]
        return [first, candidates] if first else [candidates]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        request = _request(pending_request)
        if request is not None:
            self._affinity.note(request.prefixes, replica_id.unique_id)


def _request(pending: PendingRequest | None) -> HttpRequest | None:
    request = pending.args[0] if pending is not None and pending.args else None
    return request if isinstance(request, HttpRequest) else None
