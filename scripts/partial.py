"""Results as they end, in a file beside the one they are for: a run that was cut off goes on.

The first line says what run it is; each further one is the key of a request and its result. Lines
are only ever appended, so that whatever ends the process, those that end in a newline are whole.
"""

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from configs.errors import InputError

try:
    import fcntl
except ImportError:  # not a POSIX system: two runs of one output are not told apart
    fcntl = None  # type: ignore[assignment]


def digest(value: Any) -> str:
    """Names plain data."""
    text = json.dumps(value, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def keys(requests: Iterable[Any]) -> list[str]:
    """Names each request by what it asks, wherever it stands; equal ones are numbered."""
    seen: Counter[str] = Counter()
    named = []
    for request in requests:
        asked = digest(request)
        named.append(f"{asked}-{seen[asked]}")
        seen[asked] += 1
    return named


class Partial:
    """The results of a run so far, on disk.

    Attributes:
        path: the file; it goes when the results have found their place, or when there are none.
        results: by key of the request.
    """

    def __init__(
        self, target: Path, identity: dict[str, str], wanted: Collection[str], overwrite: bool
    ):
        """Takes over what an earlier run of the same identity has left.

        Args:
            target: the file that results are for.
            identity: digests of what makes the run, by the name that an error gives them.
            wanted: keys of the requests; results of others are left out.
            overwrite: leave what an earlier run has left.

        Raises:
            InputError: it was another run, is still running, or has left no such file.
        """
        self.path = name(target)
        self.results: dict[str, dict[str, Any]] = {}
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
            self._file = os.fdopen(os.open(self.path, flags, 0o666), "r+b", buffering=0)
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror}") from None
        try:
            self._lock()
            if overwrite:
                self._file.truncate(0)
            self._read(identity, frozenset(wanted))
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"another run is writing {self.path}: wait for it, or end it"
            ) from None
        except OSError:
            return  # a file system without locks

    def _read(self, identity: dict[str, str], wanted: frozenset[str]) -> None:
        data = self._file.read()
        end = data.rfind(b"\n") + 1
        self._file.truncate(end)  # a line that was cut off is no result
        lines = data[:end].split(b"\n")[:-1]
        if not lines:
            self._append(identity)
            return
        start_over = "give --overwrite to start over"
        repeat = f"repeat that run to finish it, or {start_over}"
        for number, line in enumerate(lines, 1):
            try:
                read = json.loads(line)
                if number > 1:
                    self.results[str(read["key"])] = dict(read["result"])
                elif not isinstance(read, dict):
                    raise ValueError
            except (ValueError, TypeError, LookupError, RecursionError):
                raise InputError(f"{self.path} is damaged in line {number}: {start_over}") from None
            if number == 1 and read != identity:
                differs = [key for key in identity if read.get(key) != identity[key]]
                raise InputError(
                    f"{self.path} holds {len(lines) - 1} results of another run, whose "
                    f"{' and '.join(differs)} differ: {repeat}"
                )
        if self.results and wanted.isdisjoint(self.results):
            raise InputError(
                f"{self.path} holds {len(self.results)} results of another run, none of them for "
                f"these requests: {repeat}"
            )
        self.results = {key: self.results[key] for key in self.results if key in wanted}

    def add(self, key: str, result: dict[str, Any]) -> None:
        """Keeps one result.

        Raises:
            InputError: the file cannot be written.
        """
        self._append({"key": key, "result": result})
        self.results[key] = result

    def _append(self, value: dict[str, Any]) -> None:
        line = memoryview(json.dumps(value, ensure_ascii=False).encode() + b"\n")
        try:
            while line:
                line = line[os.write(self._file.fileno(), line) :]
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror}") from None

    def close(self, finished: bool) -> None:
        """Ends the writing; what is of no more use is deleted."""
        if finished or not self.results:
            with contextlib.suppress(OSError):
                self.path.unlink()
        self._file.close()


def name(target: Path) -> Path:
    """Where the results for a file are kept until it is complete."""
    return target.with_name(f"{target.name}.partial")
