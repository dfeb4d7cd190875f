"""A conversion that is killed leaves what is whole, or what says that it is not."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import chex
import pytest

from configs.errors import InputError
from inference.checkpoints import convert, resolve
from layers import decoder

ROOT = Path(__file__).parents[3]
TINY = ROOT / "tests" / "golden" / "llama-tokenizer"


def load(directory):
    resolved = resolve.resolve(str(directory))
    return resolved.open(None).load_params(decoder.param_infos(resolved.config), None)


_CONVERTING = """
import os, sys
from pathlib import Path
import orbax.checkpoint
from inference.checkpoints import convert, resolve

print("ready", flush=True)
for output in sys.stdin:
    child = os.fork()  # nothing has started a thread yet
    if not child:
        checkpoint = resolve.resolve(sys.argv[1]).open(None)
        convert.convert(checkpoint, Path(output.strip()), sys.argv[2], max_shard_bytes=20_000)
        os._exit(0)
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.mark.parametrize("to", convert.FORMATS)
def test_a_killed_conversion_never_loads_wrongly(to, tmp_path, request):
    """Twenty moments a format, from the first file to past the last."""
    expected, generator = load(TINY), random.Random(7)
    duration, interrupted = 0.0, 0
    command = [sys.executable, "-c", _CONVERTING, str(TINY), to]
    server = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    request.addfinalizer(server.kill)
    assert server.stdin is not None and server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    for attempt in range(21):
        output = tmp_path / f"out{attempt}"
        print(output, file=server.stdin, flush=True)
        child, left = int(server.stdout.readline()), Path(f"{output}.incomplete")
        while not (left.exists() or output.exists()):
            time.sleep(0.0005)
        start = time.monotonic()
        if attempt:  # the first is left alone: how long it takes
            time.sleep(generator.uniform(0, 1.1 * duration))
            with contextlib.suppress(ProcessLookupError):  # it was done
                os.kill(child, signal.SIGKILL)
        status = int(server.stdout.readline())
        if status == 0:  # the machine may have been busier before
            duration = time.monotonic() - start
        assert status in ((0, signal.SIGKILL) if attempt else (0,))
        if left.exists():
            interrupted += 1
            with pytest.raises(InputError, match="what an interrupted conversion left"):
                load(left)
        if output.exists():
            assert not left.exists()
            chex.assert_trees_all_equal(load(output), expected)
    assert interrupted >= 5  # the moments were inside
