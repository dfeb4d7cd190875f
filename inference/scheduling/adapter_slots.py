"""Which adapters lie on the device: those of running sequences, and of others those that were used
last.
"""

import collections

from inference.scheduling.sequence import Adapter, Sequence


class AdapterSlots:
    """The slots of an engine's adapters, which are known by their digests: those of the same files
    share one, and one that nothing else has leaves host memory.
    """

    def __init__(self, num_slots: int):
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[str, int] = {}  # the least recently used first
        self._users: collections.Counter[str] = collections.Counter()
        self._loads: list[tuple[int, Adapter]] = []

    def can_take(self, sequence: Sequence) -> bool:
        """Whether the sequence's adapter has a slot, or one may leave its own."""
        adapter = sequence.adapter.weights
        return (
            adapter is None
            or adapter.digest in self._slots
            or bool(self._free)
            or self._unused is not None
        )

    def take(self, sequence: Sequence) -> None:
        """Gives a sequence that starts the slot of its adapter, which stays until `give_back`."""
        adapter = sequence.adapter.weights
        if adapter is None:
            return
        slot = self._slots.pop(adapter.digest, None)
        if slot is None:
            slot = self._free.pop() if self._free else self._evicted()
            self._loads.append((slot, adapter))
        self._slots[adapter.digest] = sequence.adapter.slot = slot
        self._users[adapter.digest] += 1

    def give_back(self, sequence: Sequence) -> None:
        """The sequence no longer runs."""
        if (adapter := sequence.adapter.weights) is not None:
            self._users -= collections.Counter([adapter.digest])  # forgets those without users

    def take_loads(self) -> tuple[tuple[int, Adapter], ...]:
        """(slot, adapter) to load before the next step."""
        loads, self._loads = tuple(self._loads), []
        return loads

    def check_integrity(self, running: list[Sequence]) -> None:
        """Raises RuntimeError where slots do not add up."""
        slots_in_use = [
            (use.weights.digest, use.slot)
            for use in (sequence.adapter for sequence in running)
            if use.weights is not None
        ]
        if collections.Counter(digest for digest, _ in slots_in_use) != +self._users:
            raise RuntimeError("adapters are counted that no sequence runs with, or the reverse")
        if any(self._slots[digest] != slot for digest, slot in slots_in_use):
            raise RuntimeError("a running sequence's adapter lies in another slot")
        slots = sorted([*self._slots.values(), *self._free])
        if slots != list(range(len(slots))):
            raise RuntimeError(f"slots {slots} of adapters do not add up")

    @property
    def _unused(self) -> str | None:
        return next((digest for digest in self._slots if not self._users[digest]), None)

    def _evicted(self) -> int:
        digest = self._unused
        assert digest is not None, "can_take says so first"
        self._loads = [load for load in self._loads if load[1].digest != digest]
        return self._slots.pop(digest)
