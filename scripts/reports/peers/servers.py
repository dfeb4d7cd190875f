"""A server and vLLM's on the same weights and machine, or the server and its own engine without
HTTP, by turns.

    python -m scripts.reports.peers.servers vllm --model=HF_DIRECTORY --python=VENV/bin/python
    python -m scripts.reports.peers.servers engine --model=HF_DIRECTORY

Both run all the time; loads go to one and the other by turns, each of which begins with the other
one: the same load in each turn and another one in the next, so that nothing is found in a cache.
`vllm`, bound to all cores that this process may use: requests with Poisson arrivals, from
`scripts.bench --url`. `engine`: many streams, and one at a time, through HTTP and in a process that
calls `Engine` with the server's settings. Prints a section of a page; its last column is the median
of each turn's ratio. --json=FILE keeps all turns.
"""

import argparse
import contextlib
import datetime
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from absl import flags

from configs.workload import Fixed, Workload
from inference import engine as engines
from inference.benchmark import drive, requests
from inference.benchmark.remote.results import percentile
from scripts import serve
from scripts.reports.pages.markdown import table
from scripts.reports.pages.results import Row
from scripts.reports.peers.turns import Load, alternate, libraries, printed, processor

PROMPT, NEW, VOCAB, MAX_LEN = 64, 48, 49152, 1024
READY_S = 900.0
CORES = ",".join(map(str, sorted(os.sched_getaffinity(0))))
SETTINGS = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": CORES}  # fmt: skip
FIGURES = {
    "output_throughput": "output tokens/s",
    "p50_ttft_ms": "first token p50, ms",
    "p99_ttft_ms": "first token p99, ms",
    "median_tpot_ms": "a token p50, ms",
}
TITLES = {
    "vllm": "Beside vLLM's server for CPUs",
    "engine": "What HTTP adds: the server beside its own engine in a process without it",
}


def main() -> None:
    """Compares, prints the section, and writes all turns."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("beside", choices=list(TITLES))
    parser.add_argument("--model", required=True, help="a directory of Hugging Face's")
    parser.add_argument("--python", default=sys.executable, help="that has vLLM")
    parser.add_argument("--vllm", nargs="*", default=[], help="more of its flags, without --")
    parser.add_argument("--preload", default="", help="libraries that vLLM recommends")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rates", default="4,32", help="requests a second, with Poisson arrivals")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(serving("ours", server_command(options), "/ready", {}))
        enter = _vllm_loads if options.beside == "vllm" else _engine_loads
        loads = {
            name: compare(name, {"ours": server, options.beside: peer}, options.turns)
            for name, (server, peer) in enter(stack, options, url).items()
        }
    print("\n".join(section(options, loads)))
    if options.json is not None:
        settings = {name: str(value) for name, value in vars(options).items()}
        text = json.dumps({"given": settings, "turns": loads}, indent=1) + "\n"
        options.json.write_text(text, encoding="utf-8")


Pairs = Mapping[str, tuple[Load, Load]]  # ours and the peer's, by the load's name


def _vllm_loads(stack: contextlib.ExitStack, options: argparse.Namespace, url: str) -> Pairs:
    environment = SETTINGS | {"LD_PRELOAD": options.preload}
    peer = stack.enter_context(serving("vllm", vllm_command(options), "/health", environment))
    loads = {}
    for rate in options.rates.split(","):
        load = ["--workload=poisson", f"--rate={rate}", f"--requests={options.requests}"]
        loads[f"{rate} requests a second"] = over_http(url, load), over_http(peer, load)
    return loads


def _engine_loads(stack: contextlib.ExitStack, options: argparse.Namespace, url: str) -> Pairs:
    engine = stack.enter_context(EngineProcess(options.model, options.streams))
    loads = {}
    for size, count in ((options.streams, options.requests), (1, max(1, options.requests // 4))):
        load = [f"--concurrency={size}", f"--requests={count}"]
        loads[f"{size} at a time"] = over_http(url, load), engine.load(size, count)
    return loads


def compare(name: str, sides: Mapping[str, Load], turns: int) -> list[dict[str, Row]]:
    """Returns each turn's figures by side.

    Raises:
        SystemExit: a request failed.
    """

    def checked(side: str) -> Load:
        def run(seed: int) -> Row:
            figures = sides[side](seed)
            if figures["failed"]:
                raise SystemExit(f"{name}: {figures['failed']} requests of {side} failed")
            print(f"{name}, {side}: {figures}", file=sys.stderr, flush=True)
            return figures

        return run

    loads = {side: checked(side) for side in sides}
    return alternate(loads, turns, lambda turn: 1000 * turn + len(name))


def section(
    options: argparse.Namespace, loads: Mapping[str, Sequence[dict[str, Row]]]
) -> list[str]:
    """Formats medians by load, and the median of each turn's ratio."""
    rows = []
    for load, turns in loads.items():
        for key, name in FIGURES.items():
            sides = [[turn[side][key] for turn in turns] for side in ("ours", options.beside)]
            medians = (f"{statistics.median(side):.1f}" for side in sides)
            ratio = statistics.median(a / b for a, b in zip(*sides, strict=True))
            rows.append((load, name, *medians, f"{ratio:.2f}"))
    lines = [
        f"## {TITLES[options.beside]}", "",
        f"{datetime.date.today()}, {processor()}; `{Path(options.model).name}` in bfloat16,",
        "clients on the same cores. Written by `scripts.reports.peers.servers`.", "",
    ]  # fmt: skip
    if options.beside == "vllm":
        lines += [f"vLLM is bound to all of these cores{libraries(options.preload)}."]
    return [
        *lines,
        f"Prompts of {PROMPT} random tokens, {NEW} new ones; {options.turns} turns of each, one",
        "after the other; medians, and the median of each turn's ratio.",
        *table(("load", "figure", "Ridgeline", options.beside, "ratio"), rows),
    ]


def over_http(url: str, load: Sequence[str]) -> Load:
    """Returns a load as `scripts.bench --url` sends it."""
    command = [
        *(sys.executable, "-m", "scripts.bench", f"--url={url}", "--model=it", "--json", *load),
        *(f"--prompt_tokens={PROMPT}", f"--new_tokens={NEW}", f"--vocab_size={VOCAB}"),
    ]
    return lambda seed: printed([*command, f"--seed={seed}"])


def server_command(options: argparse.Namespace) -> list[str]:
    """Returns the command of our server, without its port."""
    return [
        *(sys.executable, "-m", "scripts.serve", f"--model={options.model}"),
        *(f"--max_model_len={MAX_LEN}", f"--max_num_seqs={options.streams}"),
        "--served_model_name=it",
    ]


def vllm_command(options: argparse.Namespace) -> list[str]:
    return [
        *(options.python, "-m", "vllm.entrypoints.openai.api_server", f"--model={options.model}"),
        *(f"--max-model-len={MAX_LEN}", f"--max-num-seqs={options.streams}"),
        *("--served-model-name=it", "--dtype=bfloat16", "--disable-log-stats", "--host=127.0.0.1"),
        *(f"--{flag}" for flag in options.vllm),
    ]


@contextlib.contextmanager
def serving(
    name: str, command: Sequence[str], path: str, environment: Mapping[str, str]
) -> Iterator[str]:
    """Runs a server until the end of the context; yields its URL, once it answers at a path."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, start = f"http://127.0.0.1:{port}", time.monotonic()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, f"--port={port}"], env=os.environ | environment, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        try:
            while not _answers(url + path):
                if process.poll() is not None or time.monotonic() - start > READY_S:
                    log.seek(0)
                    text = log.read().decode(errors="replace")[-4000:]
                    raise SystemExit(f"{name} does not start:\n{text}")
                time.sleep(0.5)
            print(f"{name} is ready after {time.monotonic() - start:.0f} s", file=sys.stderr)
            yield url
        finally:
            _end(process)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and its children."""
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(60)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class EngineProcess:
    """The engine in a process without HTTP, which serves loads as its standard input names them."""

    def __init__(self, model: str, streams: int):
        command = [sys.executable, "-m", "scripts.reports.peers.servers", model, str(streams)]
        self._process = subprocess.Popen(
            command, env=os.environ | {"COMPARE_SERVERS_ENGINE": "1"}, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __enter__(self) -> "EngineProcess":
        print(f"the engine is {self._answer()['is']}", file=sys.stderr, flush=True)
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def load(self, concurrency: int, count: int) -> Load:
        """Returns a load of `count` requests, `concurrency` at a time."""

        def run(seed: int) -> Row:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps([concurrency, count, seed]) + "\n")
            self._process.stdin.flush()
            return self._answer()

        return run

    def _answer(self) -> Row:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the engine has ended")
        answer: Row = json.loads(line)
        return answer


def serve_loads(model: str, streams: int) -> None:
    """Runs in that process: reads a load a line, and writes its figures."""
    serve_flags = [f"--max_model_len={MAX_LEN}", f"--max_num_seqs={streams}"]
    flags.FLAGS(["serve", f"--model={model}", *serve_flags])
    engine = engines.Engine.from_model(model, **serve.engine_needs())
    engine.warm_up(seals=False)
    print(json.dumps({"is": "ready"}), flush=True)
    for line in sys.stdin:
        concurrency, count, seed = json.loads(line)
        workload = Workload("closed", count, prompt=Fixed(PROMPT), output=Fixed(NEW), seed=seed)
        load = requests.generate(workload, VOCAB, MAX_LEN)
        run = drive.drive(engine, load, drive.WallClock(), concurrency)
        ttft = sorted(request.ttft_s for request in run.requests)
        tpot = sorted(request.tpot_s for request in run.requests if request.tpot_s is not None)
        figures = {
            "output_throughput": run.num_new_tokens / run.seconds,
            "p50_ttft_ms": 1e3 * percentile(ttft, 50),
            "p99_ttft_ms": 1e3 * percentile(ttft, 99),
            "median_tpot_ms": 1e3 * percentile(tpot, 50),
            "failed": sum(request.finish_reason == "error" for request in run.requests),
        }
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    if os.environ.get("COMPARE_SERVERS_ENGINE"):
        serve_loads(sys.argv[1], int(sys.argv[2]))
    else:
        main()
