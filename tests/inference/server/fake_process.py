"""A fake engine as a process of its own; with `--serve`, a whole server before such a process, and
with `--serve=DIR` one that stores files and batches.
"""

import asyncio
import sys
from pathlib import Path

from tests.inference.server.fake_engine import FakeEngine

COMMAND = [sys.executable, "-m", "tests.inference.server.fake_process"]


def main() -> None:
    flag = sys.argv[-1].removeprefix("--engine_socket=")
    if flag != sys.argv[-1]:
        from inference.server.engine_process import entry

        entry.serve(int(flag), lambda _: FakeEngine(step_s=0.01))
        return
    from inference.server.batches.batch_service import BatchService
    from inference.server.batches.store import Store
    from inference.server.client.engine_client import State
    from inference.server.client.launch import Subprocess
    from inference.server.service import Service
    from inference.server.web import serving

    launcher, listening = Subprocess(COMMAND), serving.bound("127.0.0.1", 0)
    batch_dir = sys.argv[-1].partition("--serve=")[2]
    batches = BatchService(Store("--serve", Path(batch_dir))) if batch_dir else None
    service = Service(launcher, batches=batches)

    def tell(state: State) -> None:
        if state is State.READY:
            print(listening.getsockname()[1], launcher.pid, flush=True)

    service.client.on_state = tell
    asyncio.run(serving.serve(service, listening, drain_s=10))


if __name__ == "__main__":
    main()
