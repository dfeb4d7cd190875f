"""Runs clients' batches: one of each key at a time, in the order in which they came."""

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator

from configs.errors import reason
from inference.batches import lines, records, run
from inference.batches.lines import BadLine, Line
from inference.batches.run import Transport
from inference.server.batches import results
from inference.server.batches.bodies import (
    ENDPOINTS,
    LIFETIME_S,
    WINDOW,
    BatchBody,
    BatchRequest,
    LineError,
    LineErrors,
    Status,
)
from inference.server.batches.results import Results
from inference.server.batches.store import Store
from inference.server.batches.stored_batches import StoredBatch
from inference.server.batches.stored_files import StorageFull, new_id, storage_full
from inference.server.protocol.errors import ApiError, invalid

_WINDOW_S = 24 * 3600  # `WINDOW`
_MAX_ERRORS = 100  # that a failed batch lists
_SWEEP_S = 60.0
_AHEAD = 4  # a request more than slots for each 4 of them waits for the next free one
_TURNS = 64  # lines that expire between two turns of other tasks

Connect = Callable[[str, float], Transport]

_log = logging.getLogger(__name__)


class _BadInput(Exception):
    """The file of a batch cannot be answered."""

    def __init__(self, errors: list[LineError]):
        super().__init__()
        self.errors = errors


class BatchService:
    """Batches and their files. After a restart, those that have not ended continue.

    Attributes:
        store: what is on disk.
    """

    def __init__(self, store: Store):
        self.store = store
        self._owners: Collection[str] = ()
        self._connect: Connect | None = None
        self._num_slots: Callable[[], Awaitable[int]] | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancelled: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # of each key

    async def run(
        self, owners: Collection[str], connect: Connect, num_slots: Callable[[], Awaitable[int]]
    ) -> None:
        """Runs batches until it is cancelled.

        Args:
            owners: names of the keys; batches of others wait for their key, and expire.
            connect: takes a key's name and the seconds that an answer may take.
            num_slots: waits for the engine; returns how many requests it runs at a time.
        """
        self._owners, self._connect, self._num_slots = owners, connect, num_slots
        self.store.files.num_keys = len(owners)
        for batch in self.store.batches.open():
            self._start(batch)
        try:
            while True:
                try:
                    self.store.sweep()
                except OSError as error:
                    _log.warning("expired files could not be deleted: %s", error)
                await asyncio.sleep(_SWEEP_S)
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def create(self, owner: str, request: BatchRequest) -> BatchBody:
        """Adds a batch.

        Raises:
            ApiError: its file is missing or not for batches, too many batches are open, or there
                is no room.
        """
        files, batches = self.store.files, self.store.batches
        if request.endpoint not in ENDPOINTS:
            raise invalid("endpoint", f"is one of {', '.join(ENDPOINTS)}")
        if request.completion_window != WINDOW:
            raise invalid("completion_window", f"is {WINDOW}")
        file = files.get(owner, request.input_file_id, "input_file_id").body
        if file.purpose != "batch":
            raise invalid("input_file_id", f"has the purpose {file.purpose}: upload it as batch")
        self._check_number(owner)
        now, policy = int(time.time()), request.output_expires_after
        batch = StoredBatch(
            owner,
            BatchBody(
                new_id("batch_"), request.endpoint, file.id, now, now + _WINDOW_S,
                metadata=request.metadata,
            ),
            new_id("file-"),
            new_id("file-"),
            LIFETIME_S if policy is None else policy.seconds,
        )  # fmt: skip
        try:
            await batches.add(batch)
        except OSError as error:
            raise storage_full(error) from None
        self._start(batch)
        batches.forget_ended(owner, files.limits.ended_batches)
        return batch.body

    async def cancel(self, owner: str, id: str) -> BatchBody:
        """Cancels a batch; its results so far become files. Raises an `ApiError` (409) if it has
        ended, or is about to.
        """
        batch = self.store.batches.get(owner, id)
        if batch.body.status == "cancelling":
            return batch.body
        if batch.outcome is not None:
            why = f"a batch that is {batch.body.status} cannot be cancelled"
            raise ApiError(409, why, code="batch_not_cancellable", may_retry=False)
        batch.body.status, batch.body.cancelling_at = "cancelling", int(time.time())
        self._cancelled[id].set()
        try:
            await self.store.batches.save(batch)
        except OSError as error:  # a restart would go on with it
            raise storage_full(error) from None
        return batch.body

    def _check_number(self, owner: str) -> None:
        """Raises an `ApiError` (429) unless the owner may have a further batch at a time."""
        owners = [batch.owner for batch in self.store.batches.open()]
        limit, num_owned = self.store.files.limits.open_batches, owners.count(owner)
        num_left = limit - len(owners) - 1
        if num_left < 0:
            why = f"{limit} batches have not ended, the most at a time"
        elif len(self._owners) > 1 and num_owned > num_left:
            why = f"{num_owned} batches of this key have not ended, which is its share"
        else:
            return
        raise ApiError(429, why, code="too_many_batches", retry_s=_SWEEP_S)

    def _start(self, batch: StoredBatch) -> None:
        id = batch.body.id
        self._tasks[id] = asyncio.create_task(self._complete(batch))
        self._tasks[id].add_done_callback(lambda _: self._forget(id))

    def _forget(self, id: str) -> None:
        del self._tasks[id]
        self._cancelled.pop(id, None)

    async def _complete(self, batch: StoredBatch) -> None:
        """Brings a batch to its end; where the disk fails, it tries again later."""
        id = batch.body.id
        try:
            if batch.outcome is None:
                batch.outcome = await self._outcome(batch)
            while True:
                try:
                    return await self._end(batch, batch.outcome)
                except OSError as error:
                    _log.warning("batch %s: %s; its end is written later", id, reason(error))
                await asyncio.sleep(_SWEEP_S)
        except Exception:
            _log.exception("batch %s could not be completed", id)

    async def _outcome(self, batch: StoredBatch) -> Status:
        """Answers a batch until it is done, cancelled or expired."""
        body = batch.body
        if body.status == "cancelling":
            return "cancelled"
        if (left_s := body.expires_at - time.time()) <= 0:
            return "expired"
        working = asyncio.create_task(self._work(batch))
        cancelled = asyncio.create_task(self._cancelled[body.id].wait())
        tasks = {working, cancelled}
        try:
            await asyncio.wait(tasks, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._cancelled[body.id].is_set():
            return "cancelled"
        if working.cancelled():
            return "expired"
        try:
            working.result()
        except _BadInput as error:
            body.errors = LineErrors(error.errors)
            return "failed"
        except (StorageFull, OSError) as error:
            body.errors = LineErrors([LineError("storage_full", storage_full(error).message)])
            return "failed"
        except Exception:
            _log.exception("batch %s failed", body.id)
            body.errors = LineErrors([LineError("internal_error", "the server failed")])
            return "failed"
        return "completed"

    async def _work(self, batch: StoredBatch) -> None:
        body = batch.body
        if batch.owner not in self._owners:
            await asyncio.Event().wait()  # until it expires
        if body.status == "validating":
            path = str(self.store.files.path(body.input_file_id))
            body.request_counts.total = await asyncio.to_thread(_validate, path, body.endpoint)
            await self._enter(batch, "in_progress")
        if body.status == "in_progress":
            async with self._turns[batch.owner]:
                await self._answer(batch)
            await self._enter(batch, "finalizing")

    async def _answer(self, batch: StoredBatch) -> None:
        """Answers the requests that have no result."""
        assert self._connect is not None and self._num_slots is not None
        num_slots = await self._num_slots()
        num_at_a_time = num_slots + max(1, num_slots // _AHEAD)
        server = self._connect(batch.owner, _WINDOW_S)
        with await self._results(batch) as saved:
            requests = self._unanswered(batch, saved)
            await run.run(server, requests, num_at_a_time, saved.add, patience_s=_WINDOW_S)

    async def _end(self, batch: StoredBatch, outcome: Status) -> None:
        """Publishes what there is of results; may be repeated after a crash."""
        body = batch.body
        with await self._results(batch) as saved:
            if outcome == "expired" and body.request_counts.total:
                with contextlib.suppress(StorageFull):  # the other results are still published
                    await self._add_expired(batch, saved)
            await self.store.batches.save(batch)  # the outcome, before anything that follows it
            await saved.publish()
        await self._enter(batch, outcome)

    async def _add_expired(self, batch: StoredBatch, saved: Results) -> None:
        for number, line in enumerate(self._unanswered(batch, saved)):
            why = "the batch expired before this request had an answer"
            saved.add(line, records.failed(line, "batch_expired", why))
            if number % _TURNS == 0:
                await asyncio.sleep(0)

    async def _results(self, batch: StoredBatch) -> Results:
        files = self.store.files
        return Results(files, batch, await asyncio.to_thread(results.read, files, batch))

    def _unanswered(self, batch: StoredBatch, saved: Results) -> Iterator[Line]:
        path = str(self.store.files.path(batch.body.input_file_id))
        for line in lines.parsed(path):
            if isinstance(line, Line) and line.custom_id not in saved.ids:
                yield line

    async def _enter(self, batch: StoredBatch, status: Status) -> None:
        if batch.body.status == "cancelling" and status != "cancelled":
            return  # its client was told so
        batch.body.status = status
        setattr(batch.body, f"{status}_at", int(time.time()))
        await self.store.batches.save(batch)


def _validate(path: str, endpoint: str) -> int:
    """Returns the number of a file's requests; raises `_BadInput`."""
    num_lines, errors = 0, []
    for line in lines.parsed(path):
        num_lines += 1
        if isinstance(line, BadLine):
            errors.append(LineError("invalid_line", line.why, line.number))
        elif line.url != endpoint:
            why = f"url is {endpoint} in this batch, as its endpoint says"
            errors.append(LineError("mismatched_url", why, line.number, "url"))
        if len(errors) == _MAX_ERRORS:
            break
    if not num_lines:
        errors.append(LineError("empty_file", f"no line holds a request; each is {lines.WANTED}"))
    if errors:
        raise _BadInput(errors)
    return num_lines
