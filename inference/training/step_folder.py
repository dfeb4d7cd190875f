"""Checkpoints of a training run: a directory a step, written by Orbax, and what the run was.

A step's directory gets its name when it is complete; so one that is killed while it writes leaves
those before it. Orbax reads changed bytes as numbers, so what its files were is kept beside them.
`Engine.update_params` reads such a step as well.
"""

import hashlib
import json
import re
import shutil
import time
from pathlib import Path
from typing import TypeVar

import jax
from absl import logging

from configs.errors import InputError, reason, shown
from inference.checkpoints import mapped
from inference.files import atomic, staging

RECORD = "run.json"

_DIGESTS = "sha256.json"  # of a step's files
_NAME = re.compile(r"\d{8}")
_NUM_KEPT = 2
_CLEAR_S = 5.0  # of trying
_SETTLED_S = 0.3  # in which threads of a save that failed write again

State = TypeVar("State")


class StepFolder:
    """The checkpoints of one run, the newest `_NUM_KEPT` of which are kept, in a directory that is
    made at the first save. `record` is what the run is, plain JSON values.

    Raises:
        InputError: it is something else, or another run's.
    """

    def __init__(self, path: Path, record: dict[str, object]):
        self.path, self._record = path, json.loads(json.dumps(record))
        self._fetch()
        if path.exists() and not path.is_dir():
            raise InputError(f"{path}: in the way of a directory of checkpoints")
        if self._steps():
            _check_same(path / RECORD, self._record)

    def restore(self, state: State) -> State:
        """The newest checkpoint, laid out as `state` is; `state` itself if there is none.

        Raises:
            InputError: it is damaged, or cannot be read; names the last good one, or what is wrong
                with each.
        """
        places = list(map(self._place, reversed(self._steps())))
        if not places:
            return state
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
        causes: list[str] = []
        for number, place in enumerate(places):
            try:
                restored = _read(place, like)
            except InputError as error:
                causes.append(str(error))
                continue
            if not causes:
                return restored
            damaged = " and ".join(map(str, places[:number]))
            raise InputError(
                f"{causes[0]}; the last good one is {place}: remove {damaged} to go on from there"
            )
        raise InputError(
            f"{'; '.join(causes)}; no step is good as it is: remove {self.path} to start over"
        )

    def save(self, step: int, state: object) -> None:
        """Writes a checkpoint, then removes those that are too old. A store that does not take it
        is a warning: it gets the checkpoint with the next one, or by `finish`.

        Raises:
            InputError: it cannot be written; names the last good one, which stays. Or its digests
                cannot, without which it is whole.
        """
        import orbax.checkpoint as ocp

        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not self._steps():
                _write_json(self.path / RECORD, self._record)
            self._clear()
            atomic.check_room(self.path, sum(leaf.nbytes for leaf in jax.tree.leaves(state)))
            with _quiet(), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
                checkpointer.save(self._place(step), args=ocp.args.StandardSave(state))
        except Exception as error:
            self._clear(_SETTLED_S)
            raise InputError(
                f"cannot write the checkpoint of step {step}: {reason(error)[:300]}; "
                f"the last good one is {self.newest() or 'none'}"
            ) from None
        place = self._place(step)
        try:
            _write_json(place / _DIGESTS, _digests(place))
        except OSError as error:
            raise InputError(
                f"{place} is whole, and the last good one, but what its files are cannot be "
                f"written: {reason(error)[:300]}"
            ) from None
        for old in self._steps()[:-_NUM_KEPT]:
            shutil.rmtree(self._place(old), ignore_errors=True)
        try:
            staging.keep_alike(self.path, _DIGESTS)
        except InputError as error:
            logging.warning("%s; step %d is whole in %s, and training goes on", error, step, place)

    def finish(self) -> None:
        """Gives a store, where the folder is for one, the checkpoints that it did not take yet.

        Raises:
            InputError: it still does not; says where the newest is.
        """
        if (place := self.newest()) is None:
            return
        try:
            staging.keep_alike(self.path, _DIGESTS)
        except InputError as error:
            raise InputError(
                f"{error}; the last step is whole in {place}: the same command on this machine "
                "goes on from there"
            ) from None

    def newest(self) -> Path | None:
        """The last checkpoint that is whole."""
        steps = self._steps()
        return self._place(steps[-1]) if steps else None

    def _fetch(self) -> None:
        """Gets the steps that a store has whole, where the folder is for one."""
        before = self._steps()
        staging.fetch_directory(self.path)
        for step in {*self._steps()} - {*before}:
            if not has_digests(self._place(step)):
                shutil.rmtree(self._place(step))

    def _place(self, step: int) -> Path:
        return self.path.absolute() / f"{step:08d}"

    def _steps(self) -> list[int]:
        if not self.path.is_dir():
            return []
        return sorted(int(path.name) for path in self.path.iterdir() if _NAME.fullmatch(path.name))

    def _clear(self, settled_s: float = 0.0) -> None:
        """Removes what an interrupted or failed save left, until nothing has come for so long: its
        threads may still be writing.
        """
        start = last = time.monotonic()
        while True:
            leftovers = list(self.path.glob("*.orbax-checkpoint-tmp*"))
            for path in leftovers:
                shutil.rmtree(path, ignore_errors=True)
            now = time.monotonic()
            last = now if leftovers else last
            if (not leftovers and now - last >= settled_s) or now - start > _CLEAR_S:
                return
            time.sleep(0.02)


def has_digests(place: Path) -> bool:
    """Whether it can be checked: not where a run was killed before it wrote them."""
    return (place / _DIGESTS).exists()


def check(place: Path) -> None:
    """Compares the files of a step with their digests, if it has them; raises InputError if one is
    not what was written.
    """
    if not has_digests(place):
        return
    try:
        written = mapped.read_json(place / _DIGESTS)
    except InputError:
        raise InputError(
            f"{place} cannot be checked, since its {_DIGESTS} is damaged: remove that file to go "
            "on from there all the same"
        ) from None
    digests = _digests(place)
    for name, digest in written.items():
        if digests.get(name) != digest:
            why = "is not what was written" if name in digests else "is missing"
            raise InputError(f"{place} is damaged: its {name} {why}")


def _read(place: Path, like: State) -> State:
    """A step, laid out as `like` is; raises InputError if its files are not those that were
    written, or it cannot be read.
    """
    check(place)
    import orbax.checkpoint as ocp  # 0.2 to 1 s

    try:
        with _quiet(), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            state: State = checkpointer.restore(place, args=ocp.args.StandardRestore(like))
    except Exception as error:  # whatever its libraries raise
        raise InputError(f"cannot read {place}: {reason(error)[:300]}") from None
    return state


def _write_json(path: Path, value: object) -> None:
    with atomic.open_file(path, is_kept=True) as file:
        file.write(f"{json.dumps(value, indent=1)}\n".encode())


def _digests(place: Path) -> dict[str, str]:
    """SHA-256 of each file of a step but their own."""
    digests = {}
    for path in sorted(place.rglob("*")):
        if path.is_file() and path.name != _DIGESTS:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            digests[path.relative_to(place).as_posix()] = digest
    return digests


def _check_same(path: Path, record: dict[str, object]) -> None:
    """Compares what the run was with what is asked for; raises InputError with what differs."""
    expected, other = _flat(record), _flat(mapped.read_json(path))
    for name in [*expected, *other]:
        if expected.get(name) != other.get(name):
            raise InputError(
                f"{path.parent} holds checkpoints of another run: its {name} is "
                f"{shown(other.get(name))}, not {shown(expected.get(name))}; remove it, or "
                "name another --output"
            )


def _flat(value: object, name: str = "") -> dict[str, object]:
    """{'model.pattern.0.ffn.width': 768} of nested JSON values."""
    if not isinstance(value, dict | list):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    flat: dict[str, object] = {}
    for key, item in items:
        flat |= _flat(item, f"{name}.{key}" if name else str(key))
    return flat


class _quiet:  # noqa: N801
    """Context in which Orbax says nothing beside errors."""

    def __enter__(self) -> None:
        self._before = logging.get_verbosity()
        logging.set_verbosity(logging.ERROR)

    def __exit__(self, *exception: object) -> None:
        logging.set_verbosity(self._before)
