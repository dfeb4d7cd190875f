"""`scripts.serve` on two hosts: the texts of one process, and hosts that end."""

import contextlib
import os
import random
import re
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import numpy as np
import openai
import pytest

from tests import compiling
from tests.inference.server import events
from tests.inference.server.running import wait_until
from tests.inference.server.test_processes import is_running
from tests.inference.server.test_real_engine import COMMAND, TEXT, TINY, children
from tests.scripts.test_hosts import free_port

ROOT = Path(__file__).resolve().parents[3]
START_S = 180  # on a busy machine


class Slice:
    """The processes of all hosts, by index, and a client of host 0."""

    def __init__(self, folder: Path, count: int, mesh: str, *flags: str, last: str | None = None):
        """`last`: a flag of the last host alone."""
        self._folder, self._count, self._flags = folder, count, (f"--mesh={mesh}", *flags)
        self._coordinator = f"localhost:{free_port()}"
        self._environment = compiling.environment(folder / "cache")
        self.processes: dict[int, subprocess.Popen] = {}
        for index in range(count):
            self.start(index, *([last] if last and index == count - 1 else []))
        wait_until(lambda: " answers, " in self.log(0), START_S)
        self.url = re.search(r"http://\S+", self.log(0))[0]
        self.http = httpx2.Client(base_url=self.url, timeout=START_S)

    def start(self, index: int, *flags: str) -> None:
        place = f"--hosts={self._count}", f"--host_index={index}"
        with (self._folder / f"{index}.log").open("a") as log:
            self.processes[index] = subprocess.Popen(
                [*COMMAND, *place, f"--coordinator={self._coordinator}", *self._flags,
                 *flags],
                cwd=ROOT, env=self._environment, stderr=log,
            )  # fmt: skip

    def log(self, index: int) -> str:
        return (self._folder / f"{index}.log").read_text()

    def why_not_ready(self) -> str:
        response = self.http.get("/ready")
        return "" if response.status_code == 200 else response.json()["error"]["message"]

    def wait_ready(self) -> None:
        wait_until(lambda: not self.why_not_ready(), START_S)

    def ask(self, **body):
        """The text and tokens of each answer."""
        body = {"temperature": 0, "return_token_ids": True} | body
        response = self.http.post(TEXT, json=body)
        assert response.status_code == 200, response.text
        return [(choice["text"], choice["token_ids"]) for choice in response.json()["choices"]]

    def statuses(self) -> list[int]:
        return [self.processes[index].wait(60) for index in range(self._count)]


@contextlib.contextmanager
def started(folder: Path, count: int = 2, mesh: str = "model=4", *flags: str, **more):
    one = Slice(folder, count, mesh, *flags, **more)
    try:
        yield one
    finally:
        one.http.close()
        for process in one.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()


@contextlib.contextmanager
def served(*args):
    with started(*args) as one:
        one.wait_ready()
        yield one


@pytest.mark.parametrize("mesh", ["model=2", "context=2"])
def test_two_hosts_give_the_texts_of_one_and_end_together(mesh, tmp_path):
    with np.load(TINY / "expected.npz") as golden, served(tmp_path, 2, mesh) as both:
        prompt, expected = str(golden["texts"][0]), golden["greedy_0"].tolist()
        ((_, tokens),) = both.ask(prompt=prompt, max_tokens=24)
        assert tokens == expected
        engines = [children(process.pid)[-1] for process in both.processes.values()]
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(both.ask, prompt=prompt, max_tokens=100, ignore_eos=True)
            wait_until(lambda: both.http.get("/load").json()["server_load"])
            for process in both.processes.values():
                process.send_signal(signal.SIGTERM)
            ((_, tokens),) = running.result()
        assert len(tokens) == 100 and tokens[:24] == expected
        assert both.statuses() == [0, 0], both.log(0) + both.log(1)
    assert "SIGTERM: following host 0 until it ends, 30 s at most" in both.log(1)
    wait_until(lambda: not any(map(is_running, engines)))


# --- long -----------------------------------------------------------------------------------------


CHAT = [{"role": "user", "content": "Why is the sky blue?"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}},
          "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
KINDS = [
    {"temperature": 0}, {"temperature": 1, "seed": 7}, {"temperature": 1.2, "seed": -7, "n": 3},
    {"temperature": 0.8, "seed": 3, "top_p": 0.9, "presence_penalty": 1, "frequency_penalty": 1},
    {"temperature": 0, "logprobs": True, "top_logprobs": 3}, {"temperature": 0, "stop": ["e", "a"]},
    {"temperature": 1, "seed": 5, "logit_bias": {"77": 5}},
    {"temperature": 1.5, "seed": 2, "response_format": {
        "type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
]  # fmt: skip


def _answers(url: str):
    """What OpenAI's client gets: whole, streamed, continued, embedded."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:

        def whole(kind):
            done = client.chat.completions.create(messages=CHAT, max_tokens=24, **kind)
            return [(choice.message.content, choice.finish_reason) for choice in done.choices]

        def streamed(kind):
            texts = {}
            for chunk in client.chat.completions.create(
                messages=CHAT, max_tokens=24, stream=True, **kind
            ):
                for choice in chunk.choices:
                    text = texts.get(choice.index, "") + (choice.delta.content or "")
                    texts[choice.index] = text
            return [texts[index] for index in sorted(texts)]

        kinds = [{"model": client.models.list().data[0].id} | kind for kind in KINDS]
        with ThreadPoolExecutor(4) as pool:
            answers = [
                [*pool.map(whole, kinds)],
                [*pool.map(streamed, kinds)],
            ]
        model = kinds[0]["model"]
        text = client.completions.create(model=model, prompt=["a", "The ridge"], temperature=0)
        vectors = client.embeddings.create(model=model, input=["a", "The ridge"])
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model=model, prompt="a", temperature=-1)
        return [
            *answers, [choice.text for choice in text.choices], str(refused.value),
            np.round([each.embedding for each in vectors.data], 3).tolist(),
        ]  # fmt: skip


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What one process with one chip answers."""
    with served(tmp_path_factory.mktemp("alone"), 1, "model=1") as one:
        return _answers(one.url)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mesh", ["model=2", "context=2", "model=4", "context=2,model=2",
                                  "data=2,context=2"])  # fmt: skip
def test_openais_client_gets_the_answers_of_one_process(mesh, expected, tmp_path):
    with served(tmp_path, 2, mesh) as both:
        assert _answers(both.url) == expected
        both.processes[0].send_signal(signal.SIGTERM)
        assert both.statuses() == [0, 0]


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("nth", range(4))
def test_a_killed_follower_is_named_and_all_go_on(tmp_path, nth):
    """Five times each: its process, which its launcher starts again, or its engine alone."""
    rng, took = random.Random(nth), []
    body = {"prompt": "Once upon", "max_tokens": 100, "ignore_eos": True, "temperature": 1,
             "seed": nth, "stream": True}  # fmt: skip
    with served(tmp_path) as both, ThreadPoolExecutor(1) as pool:

        def text() -> str:
            response = both.http.post(TEXT, json=body)
            assert response.status_code == 200, response.text
            return "".join(c["text"] for e in events.read(response.text) for c in e["choices"])

        expected = text()
        for kill in range(5):
            answer = pool.submit(text)
            wait_until(lambda: both.http.get("/load").json()["server_load"])
            threading.Event().wait(rng.random() / 2)
            follower, kills_all = both.processes[1], (nth + kill) % 2 == 0
            killed_at = time.monotonic()
            os.kill(follower.pid if kills_all else children(follower.pid)[0], signal.SIGKILL)
            wait_until(lambda: "host 1" in both.why_not_ready(), 10)
            took.append(time.monotonic() - killed_at)
            if kills_all:
                follower.wait()
                both.start(1)
            both.wait_ready()
            assert answer.result() == expected
        both.processes[0].send_signal(signal.SIGTERM)
        assert both.statuses() == [0, 0]
    assert len(re.findall("host 1 is lost: .*: the engine is started again", both.log(0))) == 5
    print(f"5 of 5 served again; named after {max(took):.2f} s at most")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_stopped_follower_is_named_and_one_that_is_asked_to_leaves(tmp_path):
    with served(tmp_path, 2, "model=4", "--drain_timeout=1") as both:
        os.kill(children(both.processes[1].pid)[0], signal.SIGSTOP)
        wait_until(lambda: "host 1 is lost: it was silent for 8 s" in both.log(0), START_S)
        wait_until(lambda: "host 1" in both.why_not_ready(), 10)
        os.kill(children(both.processes[1].pid)[0], signal.SIGKILL)
        both.wait_ready()
        both.processes[1].send_signal(signal.SIGTERM)
        assert both.processes[1].wait(60) == 0
        wait_until(lambda: "host 1 is lost: it ended" in both.log(0), START_S)
        both.start(1)
        both.wait_ready()
        both.processes[0].send_signal(signal.SIGTERM)
        assert both.statuses() == [0, 0]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_without_restart_all_end_with_the_host(tmp_path):
    body = {"prompt": "Once upon", "max_tokens": 100, "ignore_eos": True, "stream": True}
    with served(tmp_path, 2, "model=4", "--norestart") as both, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(both.http.post, TEXT, json=body)
        wait_until(lambda: both.http.get("/load").json()["server_load"])
        os.kill(children(both.processes[1].pid)[0], signal.SIGKILL)
        assert (
            "host 1 is lost: its connection ended, and with it the request" in answer.result().text
        )
        assert both.statuses() == [1, 1]
    assert both.log(0).rstrip().endswith("error: host 1 is lost: its connection ended")


@pytest.mark.long
@pytest.mark.parametrize("flag, expected", [
    ("--max_num_seqs=8", "host 1 has another engine.max_seqs than host 0: 8, not 4; start all with "
     "the same flags, files and versions"),
    ("--mesh=context=2", "host 1 has another mesh than host 0: context=2, not model=2; start all"),
    ("--hosts=4", "host 1 expects 4 hosts, not 2: give all the same --hosts"),
    ("--host_index=2", "of 2 hosts the first is 0 and the last 1, not 2"),
])  # fmt: skip
def test_a_host_that_differs_ends_all_with_the_same_line(flag, expected, tmp_path):
    with started(tmp_path, 2, "model=2", last=flag) as both:
        statuses = [both.processes[1].wait(START_S)]
        if "host_index" in flag:  # that one is none of them, and host 0 waits for host 1
            assert f"error: {expected}" in both.log(1) and statuses == [1]
            return
        statuses.append(both.processes[0].wait(START_S))
    assert statuses == [1, 1]
    lines = [re.search(r"^error: (.*)$", both.log(index), re.M)[1] for index in range(2)]
    assert lines[0] == lines[1] and lines[0].startswith(expected)
