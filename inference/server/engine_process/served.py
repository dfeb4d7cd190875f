"""What the engine's loop asks of an engine."""

from collections.abc import Sequence
from typing import Protocol

from inference.outputs import RequestOutput
from inference.request import SamplingParams
from inference.server.frames import Heartbeat, Loaded


class Served(Protocol):
    """Requests in, outputs out, step by step; not thread-safe."""

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished."""

    def slack_s(self) -> float:
        """Seconds for which `step` need not be called: what is added meanwhile is in the same step
        as if it had been there before. To be asked again every few milliseconds.
        """

    @property
    def is_compiling(self) -> bool:
        """Whether a step may take long since it is being compiled; any thread may ask."""

    def facts(self) -> Loaded:
        """What those who ask have to know."""

    def warm_up(self) -> None:
        """Makes ready what the first requests would wait for."""

    def prepare(self, params: SamplingParams) -> None:
        """Does what takes long of a request beforehand, in another thread.

        Raises:
            InputError: it is not served.
        """

    def add(self, tokens: Sequence[int], params: SamplingParams, output: Sequence[int]) -> int:
        """Queues a prompt, of whose one answer `output` is known; returns its id.

        Raises:
            InputError: it is not served.
        """

    def abort(self, id: int) -> None:
        """Ends a request; an unknown id has no effect."""

    def step(self) -> list[RequestOutput]:
        """Advances whatever can run."""

    def heartbeat(self) -> Heartbeat:
        """What is held, and was done so far."""
