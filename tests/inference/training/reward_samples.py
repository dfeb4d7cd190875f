"""Rewards as users write them, well and badly: functions that a process imports by name."""

import os
import subprocess
import sys
import threading

import numpy as np

CONSTANT = 3


def length(line, answer):
    return len(answer) * line.get("factor", 1)


def is_short(line, answer):
    return np.bool_(len(answer) < 3)


def raises(line, answer):
    if answer == "bad":
        raise ValueError("this answer\ncannot be judged")
    return 1


def hangs(line, answer):
    if answer == "slow":
        threading.Event().wait()
    return 1


def starts_a_process(line, answer):
    endless = "import threading; threading.Event().wait()"
    return subprocess.Popen([sys.executable, "-c", endless]).pid


def exits(line, answer):
    if answer == "exit":
        sys.exit("enough")
    if answer == "end":
        os._exit(3)
    return 1


def prints(line, answer):
    for stream in (sys.stdout, sys.stderr):
        print("x" * (1 << 20), file=stream, flush=True)
    os.write(1, b'{"reward": 7}\n')
    subprocess.run(["echo", '{"reward": 8}'], check=True)
    return len(sys.stdin.read())


def returns(line, answer):
    return {
        "nan": float("nan"), "infinite": float("inf"), "text": "1", "nothing": None,
        "huge": 10**400, "list": [1],
    }.get(answer, 2)  # fmt: skip


def process_id(line, answer):
    return os.getpid()


def device(line, answer):
    return os.environ["JAX_PLATFORMS"] == "cpu"


def of_three(line, answer, extra):
    return 1
