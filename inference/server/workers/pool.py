"""A pool of worker processes: starts them when needed; a job that exceeds a limit ends its own."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from pathlib import Path

from inference.server import frames
from inference.server.frames import ConnectionClosed, TextFacts
from inference.server.workers import entry, jobs
from inference.server.workers.jobs import Encode, FromWorker, Job, JobFailed, Load

_COMMAND = [sys.executable, "-m", entry.__name__]
_ROOT = Path(entry.__file__).parents[3]  # where Python finds the module
_START_S = 120.0
_END_S = 5.0  # for a worker to end after it closed its socket
_WALL = 4  # limit of wall time, in limits of processor time
_KILLED = (-signal.SIGKILL, -signal.SIGTERM)
_TRIES = 3  # of a job whose worker was killed by others


class WorkerLost(Exception):
    """A worker could not be started, was killed repeatedly, or got too little processor time."""


class Pool:
    """Runs each job in a worker of its own; jobs wait while all workers are busy."""

    def __init__(self, facts: TextFacts, size: int):
        """`size`: largest number of workers; the second is started when the first is busy."""
        load = frames.encode(Load(facts))
        self._workers = [_WorkerProcess(load) for _ in range(size)]
        self._free: asyncio.LifoQueue[_WorkerProcess] = asyncio.LifoQueue()
        for worker in reversed(self._workers):
            self._free.put_nowait(worker)
        self._running: set[asyncio.Task[FromWorker]] = set()

    async def start(self) -> None:
        """Starts one worker in advance; if that fails, the first job tries again."""
        with contextlib.suppress(WorkerLost):
            await self.ask(Encode("", add_special=False))

    async def ask(self, job: Job) -> FromWorker:
        """Returns the result of a job; raises `WorkerLost` if a sound job has none."""
        worker = await self._free.get()

        async def run() -> FromWorker:
            try:
                return await worker.ask(job)
            finally:
                self._free.put_nowait(worker)

        task = asyncio.create_task(run())
        self._running.add(task)
        task.add_done_callback(self._ended)
        # The caller may be cancelled; the worker is busy until the job is done.
        return await asyncio.shield(task)

    def _ended(self, task: "asyncio.Task[FromWorker]") -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # the caller may have been cancelled: marks it as retrieved

    def close(self) -> None:
        for task in self._running:
            task.cancel()
        for worker in self._workers:
            worker.kill()


class _WorkerProcess:
    """A worker's process, restarted after it has ended."""

    def __init__(self, load: bytes):
        self._load = load
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, job: Job) -> FromWorker:
        data = frames.encode(job)
        size = len(data) - frames.HEADER_BYTES
        limit_s = jobs.limit_s(job, size)
        for _ in range(_TRIES):
            try:
                await self.start()
                async with asyncio.timeout(_WALL * limit_s):
                    reply = await self._exchange(data)
            except WorkerLost:
                continue
            except TimeoutError:  # it got too little processor time
                await self._end()
                raise WorkerLost from None
            except (asyncio.IncompleteReadError, OSError, ConnectionClosed):
                status = await self._end()
                if status == -signal.SIGPROF:
                    return JobFailed(f"it takes more than {limit_s:g} s to process")
                if status < 0 and status not in _KILLED:  # it crashed for lack of memory
                    return jobs.too_large(jobs.limit_bytes(size))
            else:
                if isinstance(reply, JobFailed) and reply.is_last:
                    await self._end()
                return reply
        raise WorkerLost

    async def start(self) -> None:
        """Starts the process, unless it runs; raises `WorkerLost` if it ends before it is ready."""
        if self._process is not None:
            if self._process.poll() is None:
                return
            self.kill()
        pool_end, worker_end = socket.socketpair()
        with worker_end:
            self._process = subprocess.Popen(
                [*_COMMAND, str(worker_end.fileno())],
                cwd=_ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=[worker_end.fileno()],
                start_new_session=True,  # Ctrl-C at the terminal does not reach it
            )
        self._connection = await asyncio.open_unix_connection(sock=pool_end)
        try:
            async with asyncio.timeout(_START_S):
                await self._exchange(self._load)
        except (TimeoutError, asyncio.IncompleteReadError, OSError, ConnectionClosed):
            await self._end()
            raise WorkerLost from None

    async def _exchange(self, data: bytes) -> FromWorker:
        assert self._connection is not None
        reader, writer = self._connection
        writer.write(data)
        await writer.drain()
        header = await reader.readexactly(frames.HEADER_BYTES)
        return jobs.FROM_WORKER.decode(await reader.readexactly(frames.length(header)))

    async def _end(self) -> int:
        """Ends the process; returns its exit status, or 1 if it had to be killed."""
        process = self._process
        assert process is not None
        try:
            is_ending = self._connection is not None and self._connection[0].at_eof()
            return await asyncio.to_thread(process.wait, _END_S if is_ending else 0)
        except subprocess.TimeoutExpired:
            return 1
        finally:
            self.kill()

    def kill(self) -> None:
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection[1].close()
        if process is not None:
            process.kill()
            process.wait()
