"""A process that encodes texts, renders conversations and compiles grammars, one job at a time. It
loads no JAX. A signal ends it when a job takes too long, an exception when it needs much memory.
"""

import contextlib
import functools
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from configs.errors import InputError
from inference.server import frames
from inference.server.engine_process.entry import end_with_parent, is_closed
from inference.server.frames import ConnectionClosed
from inference.server.workers import jobs
from inference.server.workers.jobs import (
    Compile,
    Convert,
    Decode,
    Done,
    Encode,
    EncodeChat,
    EncodeInfill,
    EncodePair,
    FromWorker,
    Job,
    JobFailed,
    Load,
    ToWorker,
    WriteTag,
)
from inference.text import grammar, pairs
from inference.text.grammar import Grammars
from inference.text.structural_tags import formats
from inference.text.tool_calls import prompting

try:
    import resource
except ImportError:  # not a POSIX system: the pool limits wall time, nothing limits memory
    resource = None  # type: ignore[assignment]

_DATA = re.compile(r"^VmData:\s+(\d+) kB", re.MULTILINE)


def main() -> None:
    """Serves the socket behind an inherited descriptor until it is closed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as `engine_process.entry.serve` does
    end_with_parent()
    connection = socket.socket(fileno=int(sys.argv[1]))
    if is_closed(connection):
        return
    with connection, connection.makefile("rb") as incoming:
        worker: Worker | None = None
        for message, num_bytes in _received(incoming):
            reply: FromWorker = Done()
            if isinstance(message, Load):
                worker = Worker(message)
            else:
                assert worker is not None
                reply = worker.reply(message, num_bytes)
            connection.sendall(frames.encode(reply))
            if isinstance(reply, JobFailed) and reply.is_last:
                return


class Worker:
    """Runs jobs with a tokenizer."""

    def __init__(self, facts: Load):
        self._tokenizer = facts.text.tokenizer()
        if self._tokenizer.template is not None:  # starts the process that renders templates
            with contextlib.suppress(InputError):
                self._tokenizer.apply_chat_template([{"role": "user", "content": "a"}])

    def reply(self, job: Job, num_bytes: int) -> FromWorker:
        """Runs a job of `num_bytes` within its limits; exceeding its time ends this process."""
        signal.setitimer(signal.ITIMER_PROF, jobs.limit_s(job, num_bytes))
        _limit_memory(jobs.limit_bytes(num_bytes))
        try:
            return Done(self._work(job))
        except InputError as error:
            return JobFailed(str(error))
        except RecursionError:
            return JobFailed("it is nested too deeply")
        except MemoryError:
            return jobs.too_large(jobs.limit_bytes(num_bytes))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _work(self, job: Job) -> list[int] | str | None:
        tokenizer = self._tokenizer
        if isinstance(job, Encode):
            return tokenizer.encode(job.text, job.add_special)
        if isinstance(job, EncodeChat):
            return self._encode_chat(job)
        if isinstance(job, EncodeInfill):
            assert tokenizer.infill is not None  # the server asks only where there is one
            return tokenizer.infill.encode(job.gap, job.add_special, job.limit)
        if isinstance(job, EncodePair):
            return pairs.encode(tokenizer, job.query, job.document, job.variables)
        if isinstance(job, Decode):
            return tokenizer.decode(job.ids, skip_special=False)
        if isinstance(job, Convert):
            return grammar.of_gbnf(job.grammar)
        if isinstance(job, WriteTag):
            return formats.of_json(job.tag, tokenizer.specials_in)
        assert isinstance(job, Compile)
        self._grammars.start(job.grammar)
        return None

    def _encode_chat(self, job: EncodeChat) -> list[int]:
        template = self._tokenizer.template_for(job.tools)
        messages, tools = prompting.prepare(job.messages, job.tools, template)
        return prompting.encode(
            self._tokenizer.apply_chat_template, messages, tools=tools,
            add_generation_prompt=job.add_generation_prompt, documents=job.documents,
            variables=job.variables, continues=job.continues,
        )  # fmt: skip

    @functools.cached_property
    def _grammars(self) -> Grammars:
        """Compiles grammars and keeps none: the server remembers which are valid."""
        end = self._tokenizer.eos_id
        return Grammars(self._tokenizer, [] if end is None else [end], max_kept_bytes=0)


def _limit_memory(num_bytes: int) -> None:
    with contextlib.suppress(OSError, ValueError):  # a system without this limit
        match = _DATA.search(Path("/proc/self/status").read_text(encoding="ascii"))
        if match is not None:
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, ((int(match[1]) << 10) + num_bytes, hard))


def _received(incoming: BinaryIO) -> Iterator[tuple[ToWorker, int]]:
    """Yields messages and their sizes, until the server closes the socket."""
    with contextlib.suppress(OSError, ConnectionClosed):
        while len(header := incoming.read(frames.HEADER_BYTES)) == frames.HEADER_BYTES:
            data = incoming.read(frames.length(header))
            yield jobs.TO_WORKER.decode(data), len(data)


if __name__ == "__main__":
    main()
