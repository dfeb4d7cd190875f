"""Results of a batch of requests, kept as they end, so that a run that was cut off can resume.

They are kept in a file beside the target. Its first line identifies the run; each further one holds
the key of a request and its result. Each ends with a digest of itself. Lines are only ever
appended, so that whatever ends the process, those that end in a newline are whole.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from configs.engine import Config
from configs.errors import InputError
from inference.files import object_store, staging, user_files

try:
    import fcntl
except ImportError:  # not a POSIX system: two runs of one output do not exclude each other
    fcntl = None  # type: ignore[assignment]


SUFFIX = ".partial"

_DIGEST = "digest"
_START_OVER = "give --overwrite to start over"


def digest(value: object) -> str:
    """A name for plain data, from a hash of its content; JSON of it that is read has the same."""
    plain = json.loads(json.dumps(value, default=repr))  # numbers that are keys are sorted as texts
    text = json.dumps(plain, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def keys(requests: Iterable[object]) -> list[str]:
    """A key for each request, from its content and not its place; equal ones are numbered."""
    occurrences: Counter[str] = Counter()
    numbered = []
    for request in requests:
        request_digest = digest(request)
        numbered.append(f"{request_digest}-{occurrences[request_digest]}")
        occurrences[request_digest] += 1
    return numbered


class ResumableResults:
    """The results of a run, as they are added, on disk; a context that closes the file and says
    where an interrupted run goes on.

    Attributes:
        path: the file; deleted once the target is written, or if there are no results.
    """

    def __init__(
        self, target: Path, identity: dict[str, str], requested: Collection[str], overwrite: bool
    ):
        """Resumes the results of an earlier run of the same identity.

        Args:
            identity: digests of what defines the run, by the name that an error gives them.
            requested: keys of the requests; results of other requests are dropped.

        Raises:
            InputError: the file is of another run, in use by one that still runs, or damaged.
        """
        self.path = _partial(target)
        self.results: dict[str, dict[str, object]] = {}
        self._num_requested, self._overwrites = len(requested), overwrite
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
            self._file = os.fdopen(os.open(self.path, flags, 0o666), "r+b", buffering=0)
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror}") from None
        try:
            self._lock()
            if overwrite:
                self._file.truncate(0)
            self._read(identity, frozenset(requested))
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

    def _read(self, identity: dict[str, str], requested: frozenset[str]) -> None:
        data = self._file.read()
        end = data.rfind(b"\n") + 1
        self._file.truncate(end)  # drops a line that was cut off
        lines = data[:end].split(b"\n")[:-1]
        if not lines:
            self._append(identity)
            return
        repeat = f"repeat that run to finish it, or {_START_OVER}"
        for number, line in enumerate(lines, 1):
            read = _parsed(line, f"{self.path} is damaged in line {number}: {_START_OVER}")
            if number > 1:
                self.results[str(read["key"])] = dict(read["result"])
            elif read != identity:
                differs = [key for key in identity if read.get(key) != identity[key]]
                raise InputError(
                    f"{self.path} holds {len(lines) - 1} results of another run, whose "
                    f"{' and '.join(differs)} differ: {repeat}"
                )
        if self.results and requested.isdisjoint(self.results):
            raise InputError(
                f"{self.path} holds {len(self.results)} results of another run, none of them for "
                f"these requests: {repeat}"
            )
        self.results = {key: self.results[key] for key in self.results if key in requested}

    def add(self, key: str, result: dict[str, object]) -> None:
        """Adds one result. Raises InputError if the file cannot be written."""
        self._append({"key": key, "result": result})
        self.results[key] = result

    def _append(self, value: dict[str, Any]) -> None:
        text = json.dumps(value | {_DIGEST: digest(value)}, ensure_ascii=False)
        line = memoryview(text.encode() + b"\n")
        try:
            while line:
                line = line[os.write(self._file.fileno(), line) :]
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror}") from None

    def sync(self) -> None:
        """Has what was added outlive a power cut, too."""
        with contextlib.suppress(OSError):  # a file system that cannot
            os.fsync(self._file.fileno())

    def __enter__(self) -> "ResumableResults":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(finished=kind is None)
        if kind is KeyboardInterrupt:
            raise self._interrupted() from None

    def _interrupted(self) -> InputError:
        if not self.results:
            return InputError("interrupted before the first result")
        command = "the same command without --overwrite" if self._overwrites else "the same command"
        return InputError(
            f"interrupted: {len(self.results)} of {self._num_requested} results are in "
            f"{self.path}; {command} goes on from there"
        )

    def close(self, finished: bool) -> None:
        """Closes the file; deletes it if it is of no more use."""
        if finished or not self.results:
            with contextlib.suppress(OSError):
                self.path.unlink()
        self._file.close()


def check_target(label: str, name: str, source: str | None = None) -> Path:
    """Returns the file of results, links followed; of a URL that in which they are collected.
    `label` is its name in errors, such as "--output=x".

    Raises:
        InputError: it, or what is written beside it, cannot become a file or is the `source`.
    """
    is_url = object_store.is_url(name)
    if is_url and name == source:
        raise InputError(f"{label}: {name} is the --input, which would be replaced")
    path = staging.target(name) if is_url else user_files.check_target(label, name)
    for target in (path, _config(path), _partial(path)):
        written = user_files.check_target(label, str(target))
        if source is not None and written == Path(source).resolve():
            raise InputError(f"{label}: {written} is the --input, which would be replaced")
    return path


def check_unfinished(label: str, target: Path) -> None:
    """Raises InputError if the target holds results of a run that ended."""
    if not target.exists() or not target.stat().st_size or _partial(target).exists():
        return
    raise InputError(f"{label}: holds results already; give --overwrite to replace them")


def check(path: Path) -> None:
    """Compares each line of a run with its digest; raises InputError if one is damaged."""
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        _parsed(line, f"{path} is damaged in line {number}: {_START_OVER}")


def _parsed(line: bytes, message: str) -> dict[str, Any]:
    """What a line holds but its digest; raises InputError with the message where that differs."""
    try:
        read: dict[str, object] = json.loads(line)
        if read.pop(_DIGEST) == digest(read):
            return read
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        pass
    raise InputError(message)


def write(target: Path, results: Sequence[dict[str, object]], config: Config) -> None:
    """Writes one result a line, and the configuration beside them; neither replaces anything before
    both are complete. Raises InputError if one of them cannot be written.
    """
    lines = "".join(f"{json.dumps(result, ensure_ascii=False)}\n" for result in results)
    settings = json.dumps(dataclasses.asdict(config), indent=1) + "\n"
    user_files.write({target: lines.encode(), _config(target): settings.encode()})


def _partial(target: Path) -> Path:
    return target.with_name(target.name + SUFFIX)


def _config(target: Path) -> Path:
    return target.with_name(f"{target.name}.config.json")
