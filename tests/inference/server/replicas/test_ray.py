"""Replicas as Ray runs them; skipped where Ray is not installed."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import httpx2
import pytest

from tests import compiling
from tests.drills import replicas as drill
from tests.drills.replicas import FLAGS
from tests.inference.server.running import wait_until
from tests.inference.server.test_processes import is_running
from tests.inference.server.test_real_engine import ROOT

pytest.importorskip("ray")
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

LONG = {"prompt": "a", "max_tokens": 240, "ignore_eos": True, "temperature": 0, "stream": True}


@pytest.fixture(autouse=True)
def compiled(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for name, value in compiling.environment(tmp_path / "cache").items():
        monkeypatch.setenv(name, value)


def test_no_request_is_lost_when_a_replica_is_killed(capsys):
    found = drill.drill(100, 100, FLAGS)
    with capsys.disabled():
        print(found)
    assert found["whole"] + found["told"] == found["requests"] == 100 and found["lost"] == 0
    assert found["retried"] > 0 and found["told"] > 0
    assert found["same_text"] == found["whole"] >= 50


def metrics(server) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in httpx2.get(f"{server.url}/metrics", timeout=30).text.splitlines():
        if not line.startswith("#"):
            name, _, rest = line.partition("{")
            found[name] = found.get(name, 0) + float(rest.rpartition(" ")[2] or 0)
    return found


def test_clients_that_leave_signals_and_what_stays_behind():
    with drill.serving(1, FLAGS) as server:
        with httpx2.stream(
            "POST", f"{server.url}/v1/completions", json=LONG, timeout=120
        ) as response:
            next(response.iter_lines())
        wait_until(lambda: metrics(server)["ridgeline:client_disconnects_total"] == 1, 20)
        wait_until(lambda: metrics(server)["vllm:num_requests_running"] == 0, 20)
        asked = {**LONG, "max_tokens": 100}
        with httpx2.stream(
            "POST", f"{server.url}/v1/completions", json=asked, timeout=120
        ) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        below = list(drill.below(server.process.pid))
        assert server.process.wait(60) == 0 and len(below) > 5
    wait_until(lambda: not any(map(is_running, below)), 20)


def prompts_of(server) -> dict[str, float]:
    """Tokens of prompts, by replica."""
    found = {}
    for line in httpx2.get(f"{server.url}/metrics", timeout=30).text.splitlines():
        if line.startswith("vllm:prompt_tokens_total{"):
            found[line.partition('replica="')[2].partition('"')[0]] = float(line.split()[-1])
    return found


def test_prompts_go_where_their_beginning_is_and_others_where_there_is_least_to_do():
    with drill.serving(2, FLAGS) as server:
        url, asked = f"{server.url}/v1/completions", {"max_tokens": 2, "temperature": 0}
        before = prompts_of(server)
        assert len(before) == 2
        body = {**asked, "prompt": list(range(20, 110))}  # some 360 bytes
        for _ in range(6):
            assert httpx2.post(url, json=body, timeout=120).status_code == 200
        wait_until(lambda: sum(prompts_of(server).values()) == sum(before.values()) + 6 * 90, 20)
        after = prompts_of(server)
        assert sorted(after[name] - before[name] for name in before) == [0, 540]
        streams, _ = asyncio.run(drill.ask(server.url, 16, 50))
        assert all(stream.is_whole for stream in streams)
        time.sleep(1.5)  # until heartbeats have told it
        assert all(prompts_of(server)[name] > after[name] for name in before)


def test_nothing_outlives_the_process_that_is_killed():
    with drill.serving(1, FLAGS) as server:
        below = list(drill.below(server.process.pid))
        (replica,) = server.replicas()
        own = [replica, *drill.below(replica)]  # an engine, and workers for its texts
        server.process.kill()
        wait_until(lambda: not any(map(is_running, own)), 30)
        wait_until(lambda: not any(map(is_running, below)), 120)  # two of Ray's take a minute


def test_only_this_machine_can_connect_but_for_a_port_that_wants_the_token():
    import grpc

    with drill.serving(1, FLAGS) as server:
        own = {server.process.pid, *drill.below(server.process.pid)}
        inodes = set()
        for pid in own:
            for link in os.listdir(f"/proc/{pid}/fd"):
                try:
                    target = os.readlink(f"/proc/{pid}/fd/{link}")
                except OSError:
                    continue
                inodes.add(target.removeprefix("socket:[").removesuffix("]"))
        wide = []
        for table, everybody in (("tcp", "0" * 8), ("tcp6", "0" * 32)):
            with open(f"/proc/net/{table}") as file:
                for fields in map(str.split, list(file)[1:]):
                    address, port = fields[1].split(":")
                    if fields[3] == "0A" and fields[9] in inodes and address == everybody:
                        wide.append(int(port, 16))
        assert len(wide) == 1, "Ray Serve's own, of the one replica"
        with grpc.insecure_channel(f"127.0.0.1:{wide[0]}") as channel:
            call = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
            with pytest.raises(grpc.RpcError) as refused:
                call(b"", timeout=10)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


CLUSTER = """
import sys
import ray
from ray import serve
from inference.server.replicas.ray_application import build
ray.init(address="local", include_dashboard=False)
serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": 8179})
args = {"flags": sys.argv[2:], "max_num_seqs": 24, "served_model_name": "tiny"}
args["api_key_file"] = sys.argv[1]
serve.run(build(args), name="ridgeline", route_prefix="/")
print("ready", flush=True)
sys.stdin.read()
serve.shutdown()
ray.shutdown()
"""


def test_in_a_cluster_the_gateway_is_a_deployment(tmp_path, monkeypatch):
    """As a RayService starts it, behind Ray's own proxy."""
    keys = tmp_path / "keys"
    keys.write_text("0123456789abcdef")
    flags = [flag for flag in FLAGS if not flag.startswith("--max_num_seqs")]
    command = [sys.executable, "-c", CLUSTER, str(keys), *flags]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with subprocess.Popen(command, **pipes) as process:
        try:
            for line in process.stdout:
                if line == "ready\n":
                    break
            with httpx2.Client(base_url="http://127.0.0.1:8179", timeout=60) as http:
                assert http.get("/ready").json() == {"status": "ready", "replicas": 1}
                assert http.post("/v1/completions", json=LONG).status_code == 401
                http.headers["authorization"] = "Bearer 0123456789abcdef"
                with http.stream("POST", "/v1/completions", json=LONG, timeout=120) as response:
                    chunks = list(response.iter_raw())
                assert len(chunks) > 50 and chunks[-1].endswith(b"data: [DONE]\n\n")
                with http.stream("POST", "/v1/completions", json=LONG, timeout=120) as response:
                    next(response.iter_lines())
                name = 'ridgeline:client_disconnects_total{model_name="tiny"'

                def num_left():
                    lines = http.get("/metrics").text.splitlines()
                    return [line for line in lines if line.startswith(name)][0].endswith(" 1.0")

                wait_until(num_left, 20)
                assert http.get("/v1/models").json()["data"][0]["id"] == "tiny"
        finally:
            process.stdin.close()
            process.wait(60)


def test_a_model_that_is_not_there_ends_the_server(tmp_path):
    command = [sys.executable, "-m", "scripts.serve_ray", "--port=0", "--replicas=1"]
    started = time.monotonic()
    ran = subprocess.run(
        [*command, f"--model={tmp_path}/nothing"], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 1 and time.monotonic() - started < 60
    assert ran.stderr.splitlines()[-1].startswith("error: ") and "nothing" in ran.stderr
