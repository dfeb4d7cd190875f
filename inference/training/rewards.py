"""What answers are worth: numbers by functions that may fail, hang, or end their process.

A function runs in a process of its own, which imports it by name and is ended with whatever it has
started if a call takes too long. Nothing that it prints is shown, and of JAX's devices it has the
CPU alone.
"""

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from configs.errors import InputError, shown
from inference.training import reward_functions, reward_worker

TIME_LIMIT_S = 10.0  # of a call
_START_S = 120.0  # for a process to import what the function's module imports
_NAME = re.compile(r"\w+(\.\w+)*:\w+", re.ASCII)
_VALID = f"{', '.join(reward_functions.FIELDS)} or module:function"


class RewardError(Exception):
    """An answer has no reward: why, in one line."""


class Reward(Protocol):
    """What an answer to a line of prompts is worth."""

    def __call__(self, line: Mapping[str, object], answer: str) -> float:
        """A finite number; raises RewardError where there is none."""


class Scores(NamedTuple):
    """Rewards of several answers.

    Attributes:
        rewards_B: f64[B]; NaN where there is none.
        reasons: of those, why, in order.
    """

    rewards_B: np.ndarray
    reasons: list[str]


def of_name(name: str, time_limit_s: float = TIME_LIMIT_S) -> "FunctionReward":
    """The reward that `training.reward` names: 'exact', 'regex' or 'json_schema', by what lines
    have (`reward_functions`), or a function of Python's path as 'module:function'.

    Raises:
        InputError: there is no such function, or it takes other arguments.
    """
    if name in reward_functions.FIELDS:
        return FunctionReward(f"{reward_functions.__name__}:{name}", time_limit_s)
    if not _NAME.fullmatch(name):
        raise InputError(f"training.reward={shown(name)}: no reward has this name; valid: {_VALID}")
    return FunctionReward(name, time_limit_s)


def check_line(name: str, line: Mapping[str, object]) -> None:
    """Raises InputError if a line lacks what the reward of a name reads; functions of users read
    what they like.
    """
    if name in reward_functions.FIELDS:
        reward_functions.check_line(name, line)


def of_batch(
    reward: Reward, lines: Sequence[Mapping[str, object]], answers: Sequence[str]
) -> Scores:
    """Rewards of answers, an answer a line."""
    scores = Scores(np.full(len(lines), math.nan), [])
    for place, (line, answer) in enumerate(zip(lines, answers, strict=True)):
        try:
            scores.rewards_B[place] = reward(line, answer)
        except RewardError as error:
            scores.reasons.append(str(error))
    return scores


class FunctionReward:
    """A function in a process of its own, which is started again after it has ended. For one thread
    at a time.
    """

    def __init__(self, name: str, time_limit_s: float):
        """Starts the process; raises InputError if it cannot call a function of this name."""
        self._name, self._time_limit_s = name, time_limit_s
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._start()
        except RewardError as error:
            raise InputError(f"training.reward={name}: {error}") from None

    def __call__(self, line: Mapping[str, object], answer: str) -> float:
        """A finite number. Raises RewardError if the function raises, takes too long, returns
        something else, or ends its process.
        """
        self._start()
        reply = self._ask({"line": line, "answer": answer}, self._time_limit_s)
        return float(reply["reward"])

    def close(self) -> None:
        """Ends the process, with those that it has started."""
        process, self._process = self._process, None
        if process is None:
            return
        _kill(process)
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # what it has not read yet
                pipe.close()  # type: ignore[union-attr]
        process.wait()

    def __enter__(self) -> "FunctionReward":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        """Starts the process, unless there is one; raises RewardError if there is no function."""
        if self._process is not None:
            return
        self._process = subprocess.Popen(
            # -P: modules in the folder of this file do not hide those that the function imports.
            [sys.executable, "-P", str(Path(reward_worker.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            start_new_session=True,  # to be ended as a group; Ctrl-C does not reach it
        )
        try:
            start = {"path": sys.path, "function": self._name, "limit_s": self._time_limit_s}
            self._ask(start, _START_S)
        except RewardError:
            self.close()
            raise

    def _ask(self, request: Mapping[str, object], limit_s: float) -> dict[str, Any]:
        """The reply to a request; raises RewardError if it is an error, or there is none."""
        process, is_late = self._process, threading.Event()
        assert process is not None and process.stdin is not None and process.stdout is not None
        message, reply = json.dumps(request).encode() + b"\n", b""

        def end() -> None:
            is_late.set()
            _kill(process)

        timer = threading.Timer(limit_s, end)
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(message)
                process.stdin.flush()
                reply = process.stdout.readline()
        finally:
            timer.cancel()
            timer.join()
            if is_late.is_set() or not reply.endswith(b"\n"):  # or this was interrupted
                self.close()
        if is_late.is_set():
            raise RewardError(f"it takes more than {limit_s:g} s")
        if not reply:
            raise RewardError(f"it ends its process (status {process.returncode})")
        fields: dict[str, Any] = json.loads(reply)
        if "error" in fields:
            raise RewardError(fields["error"])
        return fields


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that is the first of its session, and all others of it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
