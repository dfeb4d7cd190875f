"""Whoever answers a batch: a server at a URL, or an engine of one's own behind the server's own
application.
"""

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence

from configs.errors import InputError
from inference.batches import records, run
from inference.batches.lines import Line
from inference.batches.records import Record
from inference.files.resumable_results import ResumableResults
from inference.http_client import until
from inference.http_client.address import Address, read_key
from inference.http_client.connections import Connections, NoConnection, Unanswered
from scripts import common, interrupts
from scripts.flags.requests import key_flag, serving_flags

_AT_A_TIME = 16  # at a URL
_SYNC_EVERY, _SAY_EVERY_S = 16, 30.0
_REQUEST_S = 24 * 3600.0  # nobody waits for one answer

OnResult = Callable[[Line, Record], None]


def answer(
    lines: Sequence[Line],
    url: str | None,
    engine: Sequence[str],
    at_a_time: int | None,
    saved: ResumableResults,
) -> None:
    """Adds a result for each line, as it comes, from a server, or from an engine with these flags.

    Raises:
        InputError: the server cannot be reached, at first or for too long, or refuses the key.
        KeyboardInterrupt: at Ctrl-C, after the results so far were added.
    """
    with interrupts.Deferred() as interrupt, common.bars() as bar:
        progress = _Progress(len(lines), bar)

        def add(line: Line, record: Record) -> None:
            saved.add(line.custom_id, record)
            if progress.add(record) % _SYNC_EVERY == 0:
                saved.sync()

        if url is None:
            working = _by_engine(lines, engine, at_a_time, add)
        else:
            address = Address.parse(f"--url={url}", url, read_key(key_flag.API_KEY_FILE.value))
            working = _by_server(lines, address, at_a_time or _AT_A_TIME, add)
        try:
            is_whole = until.run(working, lambda: interrupt.requested)
        except (NoConnection, run.Denied) as error:
            raise InputError(
                f"{error}; {len(saved.results)} results are in {saved.path}, and the same command "
                "goes on from there"
            ) from None
        finally:
            saved.sync()
    if not is_whole:
        raise KeyboardInterrupt


async def _by_server(
    lines: Sequence[Line], address: Address, at_a_time: int, add: OnResult
) -> None:
    connections = Connections(address)
    try:
        run.check_allowed(await connections.get("/v1/models"))
        await run.run(connections, lines, at_a_time, add)
    except NoConnection:
        raise
    except Unanswered as error:
        raise InputError(f"{address.name}: {error}") from None
    finally:
        connections.close()


async def _by_engine(
    lines: Sequence[Line], engine: Sequence[str], at_a_time: int | None, add: OnResult
) -> None:
    from inference.server.client.launch import Subprocess
    from inference.server.service import Limits, Service
    from inference.server.web import in_process

    limits = dataclasses.replace(Limits(), request_s=_REQUEST_S, queue_s=_REQUEST_S)
    launcher = Subprocess([sys.executable, "-m", "scripts.serve", *engine])
    name, tool_calls = serving_flags.SERVED_MODEL_NAME.value, serving_flags.TOOL_CALL_PARSER.value
    service = Service(launcher, limits, name, tool_calls)
    async with in_process.serving(service) as server:
        await run.run(server, lines, at_a_time or 2 * service.facts.max_seqs, add)


class _Progress:
    """A bar on a terminal, else a line now and then."""

    def __init__(self, total: int, bar: Callable[..., None]):
        self._total, self._bar = total, bar
        self._done, self._tokens = 0, 0
        self._start = self._printed_s = time.monotonic()

    def add(self, record: Record) -> int:
        self._done += 1
        self._tokens += records.num_tokens(record)
        now = time.monotonic()
        rate = self._tokens / max(now - self._start, 1e-9)
        text = f"{self._done} of {self._total} answers, {rate:.1f} tokens/s"
        self._bar(self._done, self._total, "answering", text)
        if now - self._printed_s >= _SAY_EVERY_S and not common.console.is_terminal:
            self._printed_s = now
            common.say(text)
        return self._done
