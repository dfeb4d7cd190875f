"""Checkpoints of a training run: a directory a step, written by Orbax, and what the run was.

A step's directory gets its name when it is complete; so one that is killed while it writes leaves
those before it. `Engine.update_params` reads such a step as well.
"""

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any, TypeVar

import jax
from absl import logging

from configs.errors import InputError, reason, shown
from inference.checkpoints import mapped
from inference.files import user_files

RECORD = "run.json"

_NAME = re.compile(r"\d{8}")
_KEPT = 2
_CLEAR_S = 5.0  # of trying

State = TypeVar("State")


class StepFolder:
    """The checkpoints of one run, the newest `_KEPT` of which are kept.

    Args:
        path: the directory, made at the first save.
        record: what the run is, plain JSON values; another run's checkpoints are refused.

    Raises:
        InputError: it is something else, or another run's.
    """

    def __init__(self, path: Path, record: dict[str, Any]):
        self.path, self._record = path, json.loads(json.dumps(record))
        if path.exists() and not path.is_dir():
            raise InputError(f"{path}: in the way of a directory of checkpoints")
        if self._steps():
            _check_same(path / RECORD, self._record)

    def restore(self, state: State) -> State:
        """The newest checkpoint, laid out as `state` is; `state` itself if there is none.

        Raises:
            InputError: it cannot be read.
        """
        steps = self._steps()
        if not steps:
            return state
        import orbax.checkpoint as ocp  # 0.2 to 1 s

        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
        try:
            with _quiet(), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
                found: State = checkpointer.restore(
                    self._place(steps[-1]), args=ocp.args.StandardRestore(like)
                )
        except Exception as error:  # whatever its libraries raise
            before = f"remove it to go on from step {steps[-2]}" if steps[1:] else "remove it"
            raise InputError(
                f"cannot read {self._place(steps[-1])}: {reason(error)[:300]}; {before}"
            ) from None
        return found

    def save(self, step: int, state: Any) -> None:
        """Writes a checkpoint, then removes those that are too old.

        Raises:
            InputError: it cannot be written; names the last good one, which stays.
        """
        import orbax.checkpoint as ocp

        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not self._steps():
                text = json.dumps(self._record, indent=1) + "\n"
                user_files.write({self.path / RECORD: text.encode()})
            self._clear()
            with _quiet(), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
                checkpointer.save(self._place(step), args=ocp.args.StandardSave(state))
        except Exception as error:
            self._clear()
            raise InputError(
                f"cannot write the checkpoint of step {step}: {reason(error)[:300]}; "
                f"the last good one is {self.newest() or 'none'}"
            ) from None
        for old in self._steps()[:-_KEPT]:
            shutil.rmtree(self._place(old), ignore_errors=True)

    def newest(self) -> Path | None:
        """The last checkpoint that is whole."""
        steps = self._steps()
        return self._place(steps[-1]) if steps else None

    def _place(self, step: int) -> Path:
        return self.path.absolute() / f"{step:08d}"

    def _steps(self) -> list[int]:
        if not self.path.is_dir():
            return []
        return sorted(int(path.name) for path in self.path.iterdir() if _NAME.fullmatch(path.name))

    def _clear(self) -> None:
        """Removes what an interrupted or failed save left; its threads may still be writing."""
        deadline = time.monotonic() + _CLEAR_S
        while left := list(self.path.glob("*.orbax-checkpoint-tmp*")):
            for path in left:
                shutil.rmtree(path, ignore_errors=True)
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)


def _check_same(path: Path, record: dict[str, Any]) -> None:
    """Compares what the run was with what is asked for; raises InputError with what differs."""
    own, other = _flat(record), _flat(mapped.read_json(path))
    for name in [*own, *other]:
        if own.get(name) != other.get(name):
            raise InputError(
                f"{path.parent} holds checkpoints of another run: its {name} is "
                f"{shown(other.get(name))}, not {shown(own.get(name))}; remove it, or name another "
                "--output"
            )


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """{'model.pattern.0.ffn.width': 768} of nested JSON values."""
    if not isinstance(value, dict | list):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found: dict[str, Any] = {}
    for key, item in items:
        found |= _flat(item, f"{name}.{key}" if name else str(key))
    return found


class _quiet:  # noqa: N801
    """Context in which Orbax says nothing beside errors."""

    def __enter__(self) -> None:
        self._before = logging.get_verbosity()
        logging.set_verbosity(logging.ERROR)

    def __exit__(self, *exception: object) -> None:
        logging.set_verbosity(self._before)
