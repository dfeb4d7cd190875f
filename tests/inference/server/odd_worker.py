"""A worker for which some texts are trouble."""

import os
import signal
import time
from pathlib import Path

from inference.server.workers import entry, jobs
from inference.server.workers.jobs import Encode

LONG = 2000  # characters, which no process encodes beside its event loop
SECONDS, MEGABYTES = 0.5, 64


def text(what: str) -> str:
    return what.ljust(LONG, ".")


class OddWorker(entry.Worker):
    def _work(self, job):
        what = job.text.rstrip(".") if isinstance(job, Encode) else ""
        if what == "spins":
            while True:
                pass
        elif what == "sleeps":
            time.sleep(60)
        elif what == "waits":
            time.sleep(0.3)
        elif what.startswith("stays "):  # as long as there is this file
            while Path(what[6:]).exists():
                time.sleep(0.01)
        elif what == "grows":
            return [len(bytearray(1 << 30))]
        elif what == "aborts":  # as a Rust library does that finds no memory
            os.kill(os.getpid(), signal.SIGABRT)
        return super()._work(job)


def shorten(patch=setattr) -> None:
    """The limits, on either side."""
    patch(jobs, "_BASE_S", SECONDS)
    patch(jobs, "_BASE_BYTES", MEGABYTES << 20)


if __name__ == "__main__":
    entry.Worker = OddWorker
    shorten()
    entry.main()
