"""`python -m scripts.bench --url`: figures of a server, under the names of others' tools."""

import json
import signal
import subprocess
import sys

import pytest

from scripts import bench
from tests import compiling
from tests.inference.server.fake_engine import FakeEngine
from tests.inference.server.running import running, wait_until
from tests.scripts import apps

_SHORT = ("--requests=6", "--new_tokens=8", "--prompt_tokens=5", "--vocab_size=256")
_VLLM = {
    f"{kind}_{name}_ms"
    for kind in ("mean", "median", "std", "p50", "p90", "p99")
    for name in ("ttft", "tpot", "itl", "e2el")
} | {
    *("date", "backend", "endpoint_type", "label", "model_id", "tokenizer_id", "num_prompts"),
    *("request_rate", "burstiness", "max_concurrency", "duration", "completed", "failed"),
    *("total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput"),
    *("output_throughput", "total_token_throughput", "input_lens", "output_lens", "ttfts", "itls"),
    *("latencies", "start_times", "queue_times", "errors", "max_output_tokens_per_s"),
    *("max_concurrent_requests", "rtfx"),
}
_OURS = {"dataset", "seed", "failures", "cached_tokens", "client_cpu_us_per_event"}


@pytest.fixture(scope="module")
def server():
    with running(FakeEngine()) as one:
        yield one


@pytest.fixture
def run(monkeypatch, capfd, server):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    url = f"--url={server.url}"
    return lambda *args: apps.call(bench, monkeypatch, capfd, url, *_SHORT, *args)


def test_names_and_values(run):
    ran = run("--json", "--concurrency=2", "--goodput=ttft:60000")
    assert ran.status == 0, ran.err
    found = json.loads(ran.out)
    assert set(found) == _VLLM | _OURS
    assert (found["completed"], found["failed"], found["max_concurrency"]) == (6, 0, 2)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 48)
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    assert found["model_id"] == "fake" and found["request_rate"] == "inf"
    assert ran.err == "", "another seed each time, and nothing was cached"


def test_tables_of_arrivals_and_chats(run):
    ran = run("--workload=poisson", "--rate=200", "--burstiness=0.5", "--seed=7")
    lines = ran.out.splitlines()
    assert lines[0].split() == ["mean", "p50", "p90", "p99"]
    assert lines[1].startswith("first token, ms") and len(lines[1].split()) == 7
    assert any(line.split() == ["requests", "6", "of", "6"] for line in lines)
    assert "--seed=7 asks the same again" in ran.err
    ran = run("--endpoint=/v1/chat/completions", "--dataset=prefix_repetition", "--prefix_tokens=9")
    assert ran.status == 0, ran.err
    assert "6 of 6" in ran.out


def test_prompts_of_a_file_and_of_a_trace(run, server, monkeypatch, capfd, tmp_path):
    path = tmp_path / "asked.jsonl"
    path.write_text('{"prompt": "one"}\n{"prompt": "three", "output_tokens": 3}\n')
    ran = run("--dataset=custom", f"--dataset_path={path}", "--json")
    assert json.loads(ran.out)["total_output_tokens"] == 3 * (8 + 3)
    assert "4 of 6 prompts are those of others again" in ran.err
    path.write_text('{"arrival_s": 0.01, "prompt": "one", "output_tokens": 3}\n')
    ran = apps.call(
        bench, monkeypatch, capfd, f"--url={server.url}", f"--workload={path}", "--json"
    )
    assert json.loads(ran.out)["output_lens"] == [3], ran.err


REFUSED = {
    "a list of sizes": (["--concurrency=1,8"], "--concurrency is one number here"),
    "agents": (["--workload=agents"], "agents goes with an engine of its own: leave --url out"),
    "open and closed": (["--workload=poisson", "--rate=1", "--concurrency=2"], "workload=closed"),
    "no file": (["--dataset=sharegpt"], "--dataset_path goes with"),
    "a file for nothing": (["--dataset_path=x"], "--dataset_path goes with"),
    "no goodput": (["--goodput=fast"], "--goodput is milliseconds"),
    "no keys": (["--api_key_file=/nowhere"], "cannot read /nowhere: No such file"),
    "another model": (["--model=other"], "404 the model 'other' is not served here"),
    "an engine's flag": (["--weights=int4"], "--url does not read --weights"),
    "two modes": (["--host_cost"], "give one of"),
    "no request": (["--requests=0"], "num_requests is at least 1"),
    "ids that are none": (
        ["--vocab_size=30000", "--requests=1"],
        "400 prompt holds a token id that is out of vocabulary",
    ),
    "no prefixes": (["--prefixes=0"], "num_prefixes is at least 1"),
    "no such line": (["--dataset=custom", "--dataset_path=README.md"], "README.md line 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(run, case):
    args, message = REFUSED[case]
    assert message in run(*args).error


def test_no_url(monkeypatch, capfd):
    for url in ("nonsense", "http://127.0.0.1:1"):
        assert apps.call(bench, monkeypatch, capfd, f"--url={url}").error


def test_ctrl_c_ends_it(tmp_path):
    engine = FakeEngine(step_s=0.001)
    with running(engine) as one:
        command = [sys.executable, "-m", "scripts.bench", f"--url={one.url}", "--requests=9999",
                   "--concurrency=2", "--vocab_size=256", "--seed=1"]  # fmt: skip
        environment = compiling.environment(tmp_path / "cache")
        how = {"cwd": apps.ROOT, "env": environment, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **how) as process:
            wait_until(lambda: len(engine.prompts) > 5, 60)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=120)
        assert (process.returncode, said) == (1, "error: interrupted\n")


def test_the_client_loads_no_jax():
    code = (
        "import sys\nfrom scripts import bench\nfrom scripts.modes import bench_url\n"
        "from scripts.reports import url_text\nfrom inference.benchmark.remote import load\n"
        "assert not {'jax', 'jaxlib', 'layers', 'starlette'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=apps.ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
