"""What a server asks of its engine as a whole: to pause, to sleep, to take other weights."""

import asyncio
import functools
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence

from inference.server.frames import (
    Control,
    Controlled,
    LoadAdapter,
    NewSource,
    Pause,
    Resume,
    Sleep,
    UpdateWeights,
    Wake,
)
from inference.server.protocol.errors import ApiError, invalid, unavailable

_STARTS = "the engine is being started"

_log = logging.getLogger(__name__)


class EngineControl:
    """Carries out one such request after the other. Each is finished even if its client leaves, and
    a restarted engine gets the weights, the pause and the sleep of the last one.

    Attributes:
        is_paused: no step begins.
        level: 1 and 2: the engine sleeps, with its weights in the host's memory or dropped.
        weight_version: of the weights.
        trouble: why a restarted engine lacks the weights of its requests; else "".
    """

    def __init__(
        self,
        send: Callable[[Control], None],
        abort: Callable[[], None],
        changed: Callable[[], None],
    ):
        """`send`: to the engine, or raises ApiError; `abort`: ends all answers that are generated;
        `changed`: called when requests are held from now on, or no longer.
        """
        self.is_paused = False
        self.level = 0
        self.weight_version = 0
        self.trouble = ""
        self._adapters: dict[str, str | None] = {}  # paths, since the start; None: unloaded
        self._missing: set[str] = set()  # of these, in the engine that was started last
        self._send, self._abort, self._changed = send, abort, changed
        self._source: NewSource | None = None  # of the weights; None: the engine's first
        self._is_turning = False  # to sleep, or to wake
        self._is_restored = False  # the engine has what it should
        self._has_weights = asyncio.Event()
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Controlled]] = {}
        self._lock = asyncio.Lock()

    @property
    def is_held(self) -> bool:
        """Whether new requests wait here."""
        return self.is_paused or self._is_turning or not self._can_serve

    @property
    def _can_serve(self) -> bool:
        return not (self.level or self.trouble)

    def check_awake(self) -> None:
        """Raises ApiError (503) unless the engine has its weights."""
        if self.level:
            raise unavailable(f"the engine sleeps (level {self.level}): POST /wake_up ends that")
        if self.trouble:
            raise unavailable(self.trouble)

    async def pause(self, aborts: bool) -> None:
        """Lets no step begin; with `aborts` answers end where they are, else they go on later."""
        await self._run(functools.partial(self._pause, aborts))

    async def resume(self) -> None:
        """Ends the pause; raises ApiError (409) if there is none."""
        await self._run(self._resume)

    async def sleep(self, level: int) -> None:
        """Frees the device's memory; raises ApiError: 409 if it sleeps already, 400 if not."""
        await self._run(functools.partial(self._sleep, level))

    async def wake(self, path: str | None, version: int | None) -> None:
        """Ends the sleep, with other weights where there is a path; of level 2 without one, the
        last are read again.

        Raises:
            ApiError: 409, the engine does not sleep; 400, the weights are not those of its model.
        """
        await self._run(functools.partial(self._wake, path, version))

    async def update(self, path: str, version: int | None, keeps_pages: bool) -> None:
        """Goes on with other weights; arguments as `Engine.update_params` has them.

        Raises:
            ApiError: 409, the engine sleeps; 400, the weights are not those of its model.
        """
        await self._run(functools.partial(self._update, NewSource(path, version), keeps_pages))

    async def load_adapter(self, name: str, path: str | None) -> None:
        """Takes an adapter, or unloads one (None); raises ApiError (400) if the engine cannot."""
        await self._run(functools.partial(self._load_adapter, name, path))

    def adapters_beside(self, first: Sequence[str]) -> list[str]:
        """The names of adapters of an engine that was started with these."""
        loaded = [name for name, path in self._adapters.items() if path is not None]
        there = (*(name for name in first if name not in self._adapters), *loaded)
        return [name for name in there if name not in self._missing]

    async def restore(self, adapters: Sequence[str]) -> None:
        """Gives a new engine what the last one had; returns once it can take requests.

        Args:
            adapters: that it has been started with.
        """
        async with self._lock:
            if self._source is not None:
                self.trouble = ""
                try:
                    await self._carry_out(UpdateWeights(next(self._ids), self._source))
                except ApiError as error:
                    self.trouble = (
                        f"the weights of version {self.weight_version} cannot be read again: "
                        f"{error}; POST /update_weights with others (where memory holds both, else "
                        "/sleep?level=2 and /wake_up?path=...)"
                    )
                    _log.error("%s", self.trouble)
            self._missing.clear()
            for name, path in [*self._adapters.items()]:
                if path is None and name not in adapters:
                    del self._adapters[name]
                    continue
                try:
                    await self._carry_out(LoadAdapter(next(self._ids), name, path))
                except ApiError as error:
                    self._missing.add(name)
                    _log.error("adapter %s cannot be loaded again: %s", name, error)
            if self.level:
                await self._carry_out(Sleep(next(self._ids), keeps_weights=self.level == 1))
            if self.is_paused:
                await self._carry_out(Pause(next(self._ids)))
            self._is_restored = True
            self._note()
        await self.has_weights()

    async def has_weights(self) -> None:
        """Returns once the engine can take requests: it has its weights, and is awake."""
        await self._has_weights.wait()

    def take(self, answer: Controlled) -> None:
        """Takes what the engine answers."""
        if (future := self._answers.pop(answer.id, None)) is not None and not future.done():
            future.set_result(answer)

    def lost(self) -> None:
        """Notes the end of the engine."""
        self._is_restored = False
        for future in self._answers.values():
            if not future.done():
                future.set_exception(unavailable("the engine ended, and nothing was changed"))
        self._answers.clear()

    async def _run(self, operation: Callable[[], Awaitable[None]]) -> None:
        async def alone() -> None:
            async with self._lock:
                if not self._is_restored:
                    raise unavailable(_STARTS)
                try:
                    await operation()
                finally:
                    self._is_turning = False
                    self._note()

        await asyncio.shield(asyncio.create_task(alone()))

    async def _carry_out(self, message: Control) -> Controlled:
        future = self._answers[message.id] = asyncio.get_running_loop().create_future()
        self._send(message)
        answer = await future
        if answer.error:
            raise ApiError(400, answer.error, code="invalid_value", may_retry=False)
        return answer

    def _note(self) -> None:
        if self._can_serve:
            self._has_weights.set()
        else:
            self._has_weights.clear()
        self._changed()

    async def _pause(self, aborts: bool) -> None:
        await self._carry_out(Pause(next(self._ids)))
        self.is_paused = True
        if aborts:
            self._abort()

    async def _resume(self) -> None:
        if not self.is_paused:
            raise _conflict("the engine is not paused: there is nothing to resume")
        await self._carry_out(Resume(next(self._ids)))
        self.is_paused = False

    async def _sleep(self, level: int) -> None:
        if self.level:
            raise _conflict(
                f"the engine sleeps already, at level {self.level}: POST /wake_up first"
            )
        self._is_turning = True  # what is added now would be refused
        self._has_weights.clear()
        await self._carry_out(Sleep(next(self._ids), keeps_weights=level == 1))
        self.level = level

    async def _wake(self, path: str | None, version: int | None) -> None:
        if not self.level:
            raise _conflict("the engine does not sleep: there is nothing to wake")
        source: NewSource | None = None
        if path is not None or self.level == 2:
            last = None if self._source is None else self._source.path
            source = NewSource(last if path is None else path, version)
        elif version is not None:
            raise invalid("weight_version", "goes with a path: the weights are those before")
        if source is not None:
            source.version = self._checked(version)
        answer = await self._carry_out(Wake(next(self._ids), source))
        self.level = 0
        if source is not None:
            self._loaded(source, answer)

    async def _update(self, source: NewSource, keeps_pages: bool) -> None:
        if self.level:
            raise _conflict("the engine sleeps: POST /wake_up?path=... wakes it with other weights")
        source.version = self._checked(source.version)
        answer = await self._carry_out(UpdateWeights(next(self._ids), source, keeps_pages))
        self._loaded(source, answer)

    async def _load_adapter(self, name: str, path: str | None) -> None:
        await self._carry_out(LoadAdapter(next(self._ids), name, path))
        self._adapters[name] = path
        self._missing.discard(name)

    def _checked(self, version: int | None) -> int | None:
        """The version of new weights; None: the engine's next. One that lacks the weights of its
        requests does not know theirs.
        """
        if version is None:
            return self.weight_version + 1 if self.trouble else None
        if version <= self.weight_version:
            why = f"must be above {self.weight_version}, not {version}"
            raise ApiError(400, f"weight_version {why}", "weight_version", "invalid_value")
        return version

    def _loaded(self, source: NewSource, answer: Controlled) -> None:
        self.weight_version, self.trouble = answer.weight_version, ""
        self._source = NewSource(source.path, answer.weight_version)


def _conflict(why: str) -> ApiError:
    """A 409: the engine's state does not allow it."""
    return ApiError(409, why, code="conflict", may_retry=False)
