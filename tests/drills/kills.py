"""Apps that are ended while they work, and whose disk is full: nothing is lost or half-written."""

import contextlib
import dataclasses
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.drills import app_forks, full_disk, harness, server_process
from tests.drills.harness import TINY, TINY_FLAGS, Drill, Outcome, Setting, Skipped
from tests.drills.server_faults import is_whole, request
from tests.drills.server_process import ROOT, Clients, Servers, ask

_SIGNALS = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
_FREE = 20_000  # bytes of a disk that is about to be full
_FIRST_BYTES = 600
_UNFINISHED = re.compile(r"\.partial|\.quantizing|tmp|\.lock$")
_TRAINING = {
    "model.vocab_size": 300, "model.width": 16, "model.num_layers": 1,
    "model.pattern.ffn.width": 24, "model.pattern.mixer.head_width": 4,
    "training.batch": 2, "training.window": 16,
    "training.steps": 120, "training.warmup_steps": 1, "training.checkpoint_every": 10,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class App:
    """One app that writes an output.

    Attributes:
        output: name of its file or directory.
        flags: makes its command line; takes the folder of inputs.
        read: what counts of a file's bytes.
    """

    name: str
    output: str
    flags: Callable[[Path], tuple[str, ...]]
    read: Callable[[bytes], Any] = bytes


def _answers(data: bytes) -> list[Any]:
    """Texts of a batch by id: other fields name the time and the request."""
    lines = map(json.loads, data.splitlines())
    return [(line["custom_id"], line["response"]["body"]["choices"]) for line in lines]


_APPS = (
    App("generate", "answers.jsonl", lambda inputs: (
        f"--model={TINY}", f"--input={inputs / 'prompts.jsonl'}", "--max_new_tokens=24",
        "--ignore_eos", "--temperature=0.8", "--seed=7",
    )),
    App("batch", "answers.jsonl", lambda inputs: (
        f"--model={TINY}", f"--input={inputs / 'requests.jsonl'}", "--max_num_seqs=8",
        "--set=engine.shapes.decode_rows=(8,)", "--set=engine.shapes.prefill_chunks=(1,)",
    ), _answers),
    App("train", "model", lambda inputs: (
        "--task=lm", f"--text={inputs / 'text.txt'}",
        *(f"--set={name}={value}" for name, value in _TRAINING.items()),
    )),
    App("quantize", "few", lambda inputs: (
        f"--model={TINY}", "--method=gptq", "--skip=down", "--tokens=1024",
        f"--calibrate={inputs / 'text.txt'}",
    )),
    App("convert", "native", lambda inputs: (f"--model={TINY}",)),
)  # fmt: skip


@dataclasses.dataclass
class Trial:
    """A run of an app, and a second one that goes on from it."""

    app: App
    inputs: Path
    folder: Path
    cache: Path

    @contextlib.contextmanager
    def running(self) -> Iterator[subprocess.Popen[str]]:
        """The app, whose output and what lies beside it are in `folder`; it ends with the block."""
        output = f"--output={self.folder / self.app.output}"
        command = [sys.executable, "-m", f"scripts.{self.app.name}", output]
        with subprocess.Popen(
            [*command, *self.app.flags(self.inputs)], cwd=ROOT, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env=app_forks.environment(self.cache),
        ) as process:  # fmt: skip
            try:
                yield process
            finally:
                process.kill()

    def finish(self) -> tuple[int, str]:
        """Runs it to its end."""
        with self.running() as process:
            _, err = process.communicate()
        return process.returncode, err

    def result(self) -> dict[str, Any]:
        """What the output holds, by file."""
        output = self.folder / self.app.output
        files = [path for path in (output, *output.rglob("*")) if path.is_file()]
        read = self.app.read
        return {str(path.relative_to(self.folder)): read(path.read_bytes()) for path in files}

    def leftovers(self) -> list[str]:
        """What is not whole, of the output and beside it."""
        names = [path.name for path in self.folder.rglob("*")]
        return sorted(name for name in names if _UNFINISHED.search(name))

    def fault(self, expected: dict[str, Any], err: str, is_quiet: bool) -> str | None:
        """What is wrong after the first run, and with the second one; None for nothing.
        `is_quiet`: the first had nothing to say.
        """
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        if not is_quiet and (len(lines) != 1 or "Traceback" in err):
            return f"{len(lines)} lines of error: {err[-160:]!r}"
        if (half := self.result()) and half != expected:
            return f"half an output: {sorted(half)[:3]}"
        if half and not self.leftovers():
            return None  # it had ended, and a second run is refused
        status, err = self.finish()
        if status:
            return f"the second run ended with status {status}: {err[-160:]!r}"
        if self.result() != expected:
            return "the second run gave another output"
        return f"left over: {self.leftovers()}" if self.leftovers() else None


def _inputs(folder: Path, num: int) -> None:
    folder.mkdir()
    texts = [f"{n}: the ridge of a line" for n in range(num)]
    prompts = "".join(f"{json.dumps({'prompt': text})}\n" for text in texts)
    (folder / "prompts.jsonl").write_text(prompts)
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/completions",
         "body": {"prompt": text, "max_tokens": 24, "temperature": 0, "ignore_eos": True}}
        for n, text in enumerate(texts)
    ]  # fmt: skip
    (folder / "requests.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (folder / "text.txt").write_text("def function(argument):\n    return argument + 1\n" * 200)


def _has_begun(folder: Path) -> bool:
    """Whether something was written that is more than the first line of a file of results."""
    sizes = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # gone by now
            sizes.append(path.stat().st_size if path.is_file() else 0)
    return sum(sizes) > _FIRST_BYTES


def _watched(trial: Trial) -> tuple[float, float]:
    """Runs an app undisturbed; seconds until it writes anything, and from then to its end."""
    start, began_s = time.monotonic(), None
    with trial.running() as process:
        while process.poll() is None:
            if began_s is None and _has_begun(trial.folder):
                began_s = time.monotonic() - start
            time.sleep(0.002)
        end_s = time.monotonic() - start
        assert process.stderr is not None
        if process.returncode:
            raise RuntimeError(f"{trial.app.name}: {process.stderr.read()[-300:]}")
    return (end_s if began_s is None else began_s), end_s - (began_s or 0)


def _ended(
    trial: Trial, number: signal.Signals, works_s: float, dice: random.Random
) -> tuple[int, str]:
    """Starts an app and ends it once it has written something, a random time later; its status and
    what it said.
    """
    with trial.running() as process:
        while process.poll() is None and not _has_begun(trial.folder):
            time.sleep(0.002)
        time.sleep(dice.uniform(0, works_s))
        process.send_signal(number)
        _, err = process.communicate()
    return process.returncode, err


def of_apps(setting: Setting) -> Outcome:
    """Each app, ended by each signal at a random moment, and on a disk that is full."""
    folder, num = setting.folder, setting.size(150, 60)
    inputs, cache = folder / "inputs", folder / "caches"
    _inputs(inputs, num)
    (cache / "cache").mkdir(parents=True)
    faults: dict[str, str] = {}
    num_trials = num_ended = num_full = 0
    for app in _APPS:
        good = Trial(app, inputs, folder / f"{app.name}-good", cache)
        good.folder.mkdir()
        _watched(good)  # compiles, and encodes texts
        shutil.rmtree(good.folder)
        good.folder.mkdir()
        _, works_s = _watched(good)
        expected = good.result()
        for number in _SIGNALS:
            trial = Trial(app, inputs, folder / f"{app.name}-{number.name}", cache)
            trial.folder.mkdir()
            status, err = _ended(trial, number, works_s, setting.dice)
            num_trials += 1
            num_ended += status != 0
            is_quiet = number is signal.SIGKILL or not status
            if fault := trial.fault(expected, err, is_quiet):
                faults[f"{app.name} {number.name}"] = fault
        with contextlib.suppress(Skipped):
            full = Trial(app, inputs, folder / f"{app.name}-full", cache)
            if fault := _on_full_disk(full, expected):
                faults[f"{app.name} disk full"] = fault
            num_full += 1
    bad = "; ".join(f"{name}: {fault}" for name, fault in faults.items())
    disk = f"{num_full} runs on a full tmpfs" if num_full else "no tmpfs could be mounted"
    return Outcome(
        not faults and num_full == len(_APPS) and num_ended >= num_trials / 2,
        f"{num_ended} of {num_trials} runs ended before they were done, {disk}: {len(faults)} "
        "kinds lost something" + (f" ({bad})" if bad else ""),
        faults,
    )


def _on_full_disk(trial: Trial, expected: dict[str, Any]) -> str | None:
    size = sum(len(repr(value)) for value in expected.values())
    with full_disk.mounted(trial.folder, 64 << 20) as disk:
        disk.fill(min(_FREE, size // 3))
        status, err = trial.finish()
        if not status:
            return "it ended well on a full disk"
        disk.empty()
        return trial.fault(expected, err, is_quiet=False)


def of_server(setting: Setting) -> Outcome:
    """A server of a tiny model under streams: signals, its engine killed, its cache's disk full."""
    num = 16
    requests = [request(setting, prompt=f"{n} ridge", max_tokens=120) for n in range(num)]
    same: dict[str, int] = {}
    statuses: dict[str, int] = {}
    flags = [*TINY_FLAGS, "--max_num_seqs=8"]
    with harness.tiny_server() as server:
        expected = ask(server, requests, 300)["answers"]
        took_s = ask(server, requests, 300)["seconds"]
    for name in ("SIGTERM", "SIGINT", "kill -9 of the engine", "disk full"):
        environment = {}
        with contextlib.ExitStack() as stack:
            if name == "disk full":
                disk = stack.enter_context(full_disk.mounted(setting.folder / "disk", 1 << 16))
                disk.fill(0)
                kernels = app_forks.environment(setting.folder)["RIDGELINE_KERNELS"]
                environment = {"RIDGELINE_CACHE": str(disk.path), "RIDGELINE_KERNELS": kernels}
            servers = stack.enter_context(contextlib.closing(Servers(flags, environment)))
            server = servers.get(["--drain_timeout=120"])
            ask(server, requests, 300)
            clients = Clients(server.port, requests, 300)
            time.sleep(took_s / 3)
            if name.startswith("SIG"):
                server.process.send_signal(signal.Signals[name])
            elif name.startswith("kill"):
                server_process.kill(server.engine)
            answers = clients.wait()["answers"]
            same[name] = sum(
                is_whole(answer) and answer["text"] == other["text"]
                for answer, other in zip(answers, expected, strict=True)
            )
            if name.startswith("SIG"):
                statuses[name] = server.process.wait(60)
    texts = ", ".join(f"{name} {count} of {num}" for name, count in same.items())
    return Outcome(
        all(count == num for count in same.values()) and not any(statuses.values()),
        f"streams with the text of an undisturbed server: {texts}; status {statuses}",
        {"same": same, "statuses": statuses},
    )


DRILLS = (
    Drill(
        "kills",
        "kill -9, TERM, INT at random moments and a full disk in generate, batch, train, quantize, "
        "convert: one line, nothing half-written, the second run bit-equal",
        of_apps, limit_s=300,
    ),
    Drill(
        "kills_serve",
        "TERM, INT, kill -9 of the engine and a full disk in serve: all streams whole, the same "
        "texts, status 0",
        of_server, limit_s=135,
    ),
)  # fmt: skip
