r"""A server beside vLLM's on the same weights and machine, and beside its own engine without HTTP.

    python -m scripts.reports.peers.servers vllm --model=HF_DIRECTORY --python=VENV/bin/python \
            --json=FILE
    python -m scripts.reports.peers.servers engine --model=HF_DIRECTORY --json=FILE

Both run all the time; loads go to one and the other by turns, of which each begins with the other
one: the same load in each turn and another one in the next, so that nothing is found in a cache.
`vllm`, bound to all cores that this process may use: requests of Poisson's arrivals, from
`scripts.bench --url`. `engine`: so many streams, and one at a time, through HTTP and in a process
that calls `Engine` with the server's settings. A table's last column is the median of each turn's
ratio.
"""

import argparse
import contextlib
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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

Load = Callable[[int], dict[str, Any]]  # of a seed


def main() -> None:
    """Compares, prints a table for each load, and writes what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("beside", choices=["vllm", "engine"])
    parser.add_argument("--model", required=True, help="a directory of Hugging Face's")
    parser.add_argument("--python", default=sys.executable, help="that has vLLM")
    parser.add_argument("--vllm", nargs="*", default=[], help="more of its flags, without --")
    parser.add_argument("--preload", default="", help="libraries that vLLM recommends")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rates", default="4,32", help="requests a second, of Poisson's law")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = {}
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(serving("ours", ours_command(given), "/ready", {}))
        if given.beside == "vllm":
            environment = SETTINGS | {"LD_PRELOAD": given.preload}
            command = vllm_command(given)
            vllm = stack.enter_context(serving("vllm", command, "/health", environment))
            loads: dict[str, tuple[Load, Load]] = {}
            for rate in given.rates.split(","):
                load = ["--workload=poisson", f"--rate={rate}", f"--requests={given.requests}"]
                loads[f"{rate} requests a second"] = over_http(ours, load), over_http(vllm, load)
        else:
            engine = stack.enter_context(Engine(given))
            loads = {}
            for size in (given.streams, 1):
                count = given.requests if size > 1 else max(1, given.requests // 4)
                load = [f"--concurrency={size}", f"--requests={count}"]
                own = engine.load(size, count)
                loads[f"{size} at a time"] = over_http(ours, load), own
        for name, pair in loads.items():
            found[name] = by_turns(name, pair, given.turns, given.beside)
    if given.json is not None:
        whole = {"given": {k: str(v) for k, v in vars(given).items()}, "turns": found}
        given.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def by_turns(name: str, pair: tuple[Load, Load], turns: int, beside: str) -> list[dict]:
    """A turn first that is not counted; then as many as asked for, and a table of them."""
    found = []
    for turn in range(turns + 1):
        seed = 1000 * turn + len(name)
        order = ((0, "ours"), (1, beside))[:: -1 if turn % 2 else 1]
        both = {who: pair[which](seed) for which, who in order}
        for who, figures in both.items():
            if figures["failed"]:
                raise SystemExit(f"{name}: {figures['failed']} requests of {who} failed")
        if turn:
            found.append(both)
    print(f"\n{name}: {PROMPT} + {NEW} tokens, {turns} turns")
    print(f"{'median (each)':24}{'ours':>38}{beside:>38}{'ratio':>8}")
    for key, label in FIGURES.items():
        each = [[turn[who][key] for turn in found] for who in ("ours", beside)]
        cells = [f"{statistics.median(v):.1f} ({', '.join(f'{x:.1f}' for x in v)})" for v in each]
        ratio = statistics.median(a / b for a, b in zip(*each, strict=True))
        print(f"{label:24}{cells[0]:>38}{cells[1]:>38}{ratio:8.3f}", flush=True)
    more = [turn["ours"]["p50_ttft_ms"] - turn[beside]["p50_ttft_ms"] for turn in found]
    print(f"first token p50, ms more: {statistics.median(more):.2f}")
    return found


def over_http(url: str, load: list[str]) -> Load:
    """A load as `scripts.bench --url` has it."""
    command = [
        *(sys.executable, "-m", "scripts.bench", f"--url={url}", "--model=it", "--json", *load),
        *(f"--prompt_tokens={PROMPT}", f"--new_tokens={NEW}", f"--vocab_size={VOCAB}"),
    ]

    def run(seed: int) -> dict[str, Any]:
        asked = [*command, f"--seed={seed}"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=1800)
        if done.returncode:
            raise SystemExit(f"{' '.join(asked)}\n{done.stderr}")
        return json.loads(done.stdout)

    return run


def ours_command(given: argparse.Namespace) -> list[str]:
    """Of our server, but for its port."""
    return [
        *(sys.executable, "-m", "scripts.serve", f"--model={given.model}"),
        *(
            f"--max_model_len={MAX_LEN}",
            f"--max_num_seqs={given.streams}",
            "--served_model_name=it",
        ),
    ]


def vllm_command(given: argparse.Namespace) -> list[str]:
    """Of vLLM's, likewise."""
    return [
        *(given.python, "-m", "vllm.entrypoints.openai.api_server", f"--model={given.model}"),
        *(
            "--served-model-name=it",
            f"--max-model-len={MAX_LEN}",
            f"--max-num-seqs={given.streams}",
        ),
        *("--dtype=bfloat16", "--disable-log-stats", "--host=127.0.0.1"),
        *(f"--{flag}" for flag in given.vllm),
    ]


@contextlib.contextmanager
def serving(name: str, command: list[str], path: str, more: dict[str, str]) -> Iterator[str]:
    r"""A server until the end of the context; its URL, once it answers at a path."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, start = f"http://127.0.0.1:{port}", time.monotonic()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, f"--port={port}"], env=os.environ | more, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        try:
            while not answers(url + path):
                if process.poll() is not None or time.monotonic() - start > READY_S:
                    log.seek(0)
                    text = log.read().decode(errors="replace")[-4000:]
                    raise SystemExit(f"{name} does not start:\n{text}")
                time.sleep(0.5)
            print(f"{name} is ready after {time.monotonic() - start:.0f} s", flush=True)
            yield url
        finally:
            end(process)


def answers(url: str) -> bool:
    """Whether there is an answer, and status 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def end(process: subprocess.Popen) -> None:
    """Ends it, and all that it has started."""
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(60)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Engine:
    """The engine in a process without HTTP, which serves loads as it is told."""

    def __init__(self, given: argparse.Namespace):
        self._command = [
            sys.executable,
            "-m",
            "scripts.reports.peers.servers",
            given.model,
            str(given.streams),
        ]

    def __enter__(self) -> "Engine":
        """Starts it."""
        env = os.environ | {"COMPARE_SERVERS_ENGINE": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(self._command, env=env, **pipes)
        print(f"the engine is {self._answer()['is']}", flush=True)
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends it."""
        self._process.stdin.close()
        self._process.wait(60)

    def load(self, concurrency: int, count: int) -> Load:
        """So many requests, so many at a time."""

        def run(seed: int) -> dict[str, Any]:
            self._process.stdin.write(json.dumps([concurrency, count, seed]) + "\n")
            self._process.stdin.flush()
            return self._answer()

        return run

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the engine has ended")
        return json.loads(line)


def serve_loads(model: str, streams: int) -> None:
    """What that process does: reads a load a line, and writes its figures."""
    from absl import flags

    from configs.workload import Fixed, Workload
    from inference import engine as engines
    from inference.benchmark import drive, requests
    from inference.benchmark.remote.results import percentile
    from scripts import serve

    serve_flags = [f"--max_model_len={MAX_LEN}", f"--max_num_seqs={streams}"]
    flags.FLAGS(["serve", f"--model={model}", *serve_flags])
    engine = engines.Engine.from_model(model, **serve.engine_needs())
    engine.warm_up(seals=False)
    print(json.dumps({"is": "ready"}), flush=True)
    for line in sys.stdin:
        concurrency, count, seed = json.loads(line)
        workload = Workload("closed", count, prompt=Fixed(PROMPT), output=Fixed(NEW), seed=seed)
        asked = requests.generate(workload, VOCAB, MAX_LEN)
        run = drive.drive(engine, asked, drive.WallClock(), concurrency)
        ttft = sorted(each.ttft_s for each in run.requests)
        tpot = sorted(each.tpot_s for each in run.requests if each.tpot_s is not None)
        found = {
            "output_throughput": run.num_new_tokens / run.seconds,
            "p50_ttft_ms": 1e3 * percentile(ttft, 50),
            "p99_ttft_ms": 1e3 * percentile(ttft, 99),
            "median_tpot_ms": 1e3 * percentile(tpot, 50),
            "failed": sum(each.finish_reason == "error" for each in run.requests),
        }
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    if os.environ.get("COMPARE_SERVERS_ENGINE"):
        serve_loads(sys.argv[1], int(sys.argv[2]))
    else:
        main()
