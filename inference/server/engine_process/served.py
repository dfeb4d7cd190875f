"""The interface of an engine that `EngineLoop` serves."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from inference.outputs import RequestOutput
from inference.request import SamplingParams
from inference.server.frames import Heartbeat, Loaded

if TYPE_CHECKING:  # a process that speaks HTTP loads no engine
    from inference.new_weights import NewWeights
    from inference.runtime.adapter_weights import AdapterWeights


class Served(Protocol):
    """Takes requests and returns outputs, step by step; not thread-safe."""

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished."""

    def slack_s(self) -> float:
        """Seconds for which `step` need not be called, because the running step takes as long:
        requests added meanwhile join the same next step. Valid for a few milliseconds.
        """

    @property
    def is_compiling(self) -> bool:
        """Whether a step is being compiled; any thread may call it."""

    def facts(self) -> Loaded:
        """Facts of the model that the HTTP process needs."""

    def warm_up(self) -> None:
        """Compiles and prepares everything that the first requests would wait for."""

    def prepare(self, params: SamplingParams) -> None:
        """Compiles the grammar of a request, in another thread; raises an `InputError`."""

    def add(self, tokens: Sequence[int], params: SamplingParams, output: Sequence[int]) -> int:
        """Queues a prompt and returns its id; `output`: tokens with which its answer begins.

        Raises:
            InputError: the request is not supported.
        """

    def abort(self, id: int) -> None:
        """Ends a request; an unknown id has no effect."""

    def retain(self, tokens: Sequence[int], cache_salt: str | None, adapter: str | None) -> None:
        """Lets what is cached of a conversation outlive other prefixes until it goes on."""

    @property
    def weight_version(self) -> int:
        """Version of the weights; 0 at first."""

    def read_weights(self, path: str | None) -> "NewWeights":
        """Reads other weights, in another thread; None: those of the model once more. Raises
        InputError if they are not this model's.
        """

    def update_weights(self, new: "NewWeights", version: int | None, keeps_pages: bool) -> None:
        """Goes on with other weights, as `Engine.update_params`."""

    def read_adapter(self, path: str) -> "AdapterWeights":
        """Reads an adapter, in any thread; raises InputError as `AdapterTable.read`."""

    def add_adapter(self, name: str, adapter: "AdapterWeights") -> None:
        """Gives it a name; raises InputError if that is none."""

    def unload_adapter(self, name: str) -> None:
        """Forgets it; raises InputError if there is none."""

    def sleep(self, keeps_weights: bool) -> None:
        """Frees the device's memory; raises InputError if it cannot."""

    def wake(self, new: "NewWeights | None", version: int | None) -> None:
        """Ends `sleep`, as `Engine.wake`."""

    def step(self) -> list[RequestOutput]:
        """Runs a step of the sequences that can run; returns their outputs."""

    def heartbeat(self) -> Heartbeat:
        """The engine's state, and counters since its start."""
