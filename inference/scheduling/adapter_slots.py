"""Which adapters lie on the device: those of running sequences, and of others those that were used
last.
"""

import collections

from inference.scheduling.sequence import Adapter, Sequence


class AdapterSlots:
    """The slots of an engine's adapters."""

    def __init__(self, num_slots: int):
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[Adapter, int] = {}  # the least recently used first
        self._users: collections.Counter[Adapter] = collections.Counter()
        self._loads: list[tuple[int, Adapter]] = []

    def can_take(self, sequence: Sequence) -> bool:
        """Whether the sequence's adapter has a slot, or one may leave its own."""
        adapter = sequence.adapter.weights
        return (
            adapter is None
            or adapter in self._slots
            or bool(self._free)
            or self._unused is not None
        )

    def take(self, sequence: Sequence) -> None:
        """Gives a sequence that starts the slot of its adapter, which stays until `give_back`."""
        adapter = sequence.adapter.weights
        if adapter is None:
            return
        slot = self._slots.pop(adapter, None)
        if slot is None:
            slot = self._free.pop() if self._free else self._evicted()
            self._loads.append((slot, adapter))
        self._slots[adapter] = sequence.adapter.slot = slot
        self._users[adapter] += 1

    def give_back(self, sequence: Sequence) -> None:
        """The sequence no longer runs."""
        if (adapter := sequence.adapter.weights) is not None:
            self._users[adapter] -= 1
            if not self._users[adapter]:  # it may be used by nothing else any more
                del self._users[adapter]

    def take_loads(self) -> tuple[tuple[int, Adapter], ...]:
        """(slot, adapter) to load before the next step."""
        loads, self._loads = tuple(self._loads), []
        return loads

    def check_integrity(self, running: list[Sequence]) -> None:
        """Raises RuntimeError where slots do not add up."""
        uses = [sequence.adapter for sequence in running if sequence.adapter.weights]
        users = collections.Counter(use.weights for use in uses)
        if users != +self._users:
            raise RuntimeError("adapters are counted that no sequence runs with, or the reverse")
        if any(use.weights and self._slots[use.weights] != use.slot for use in uses):
            raise RuntimeError("a running sequence's adapter lies in another slot")
        slots = sorted([*self._slots.values(), *self._free])
        if slots != list(range(len(slots))):
            raise RuntimeError(f"slots {slots} of adapters do not add up")

    @property
    def _unused(self) -> Adapter | None:
        return next((adapter for adapter in self._slots if not self._users[adapter]), None)

    def _evicted(self) -> int:
        adapter = self._unused
        assert adapter is not None, "can_take says so first"
        self._loads = [load for load in self._loads if load[1] != adapter]
        return self._slots.pop(adapter)
