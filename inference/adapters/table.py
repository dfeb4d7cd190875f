"""The adapters that an engine knows, by the names that requests give."""

import re
from collections.abc import Callable
from pathlib import Path

from configs.engine import Config
from configs.errors import InputError, shown
from inference.adapters import adapter_file
from inference.runtime.adapter_weights import AdapterWeights
from sharding import hosts

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")


class AdapterTable:
    """Adapters in host memory, as many as there is room for. It calls `before_change` with a name
    and what it stands for from now on, None: nothing.
    """

    def __init__(self, config: Config):
        self._config = config
        self._adapters: dict[str, AdapterWeights] = {}
        self.before_change: Callable[[str, AdapterWeights | None], None] = lambda *_: None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._adapters)

    def load(self, name: str, path: str | Path) -> None:
        """Adds the adapter at a path; raises InputError as `read` and `add`."""
        self.add(name, self.read(path))

    def read(self, path: str | Path) -> AdapterWeights:
        """Reads an adapter, as any thread may. Raises InputError as `adapter_file.read`, or if the
        engine has no slots.
        """
        room = self._config.engine.adapters
        if not room.slots:
            raise InputError("an adapter needs an engine with engine.adapters.slots above 0")
        return adapter_file.read(Path(path), self._config.model, room)

    def add(self, name: str, adapter: AdapterWeights) -> None:
        """Gives an adapter a name; requests that run with another one of the name keep it. Raises
        InputError if it is no name.
        """
        if not _NAME.fullmatch(name):
            raise InputError(
                f"an adapter is named by letters, digits and . _ - /, not {shown(name)}"
            )
        self.before_change(name, adapter)
        self._adapters[name] = adapter

    def unload(self, name: str) -> None:
        """Forgets an adapter; requests that have it go on. Raises InputError if it is not there."""
        self.find(name)
        self.before_change(name, None)
        del self._adapters[name]

    def get(self, name: str | None) -> AdapterWeights | None:
        """The adapter of a name, if it has one."""
        return None if name is None else self._adapters.get(name)

    def find(self, name: str) -> AdapterWeights:
        """The adapter of a name; raises InputError if there is none."""
        if name not in self._adapters:
            valid = ", ".join(self._adapters) or "none is loaded"
            raise InputError(f"there is no adapter {shown(name)}; valid: {valid}")
        return self._adapters[name]


def tell_hosts(name: str, adapter: AdapterWeights | None) -> None:
    """Tells other hosts what a name stands for, as `AdapterTable.before_change`."""
    if adapter is None:
        hosts.current().tell("unload_adapter", name)
    else:
        hosts.current().tell("load_adapter", name, str(adapter.path), adapter.digest)
