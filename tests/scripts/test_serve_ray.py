"""What `serve_ray` refuses before it loads anything."""

import asyncio
import importlib.util
import threading

import pytest
from absl import flags

from inference.server.replicas import replica_config
from scripts import serve_ray
from tests.scripts import apps


@pytest.fixture
def run(monkeypatch, capfd):
    return lambda *args: apps.call(serve_ray, monkeypatch, capfd, *args)


@pytest.mark.parametrize("flags, expected", [
    (["--replicas=0"], "--replicas is between 1 and --max_replicas, not 0 of 0"),
    (["--replicas=3", "--max_replicas=2"], "between 1 and --max_replicas, not 3 of 2"),
    (["--port=70000"], "--port is between 0 and 65535, not 70000"),
    (["--host=0.0.0.0"], "can be reached by others: give --api_key_file"),
    (["--json"], "prints no JSON"),
    (["--control_key_file=keys"], "--control_key_file: must be left out"),
    (["--hosts=2"], "a replica has one host: give --hosts=1"),
    (["--model=no/such-model"], "no/such-model"),
])  # fmt: skip
def test_bad_flags(run, tmp_path, monkeypatch, flags, expected):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    ran = run(*flags)
    assert ran.status == 1 and expected in ran.error


def test_without_ray_it_says_what_to_install(run, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "ray" else found(name)
    )
    assert "pip install '.[serve,ray]'" in run().error


def test_arguments_of_a_cluster_are_flags():
    assert all(name in flags.FLAGS for name in replica_config.SHARED)


def test_what_is_loaded_does_not_keep_a_process_that_ends():
    may_end, ends = threading.Event(), []

    def load():
        ends.append(may_end.wait(250))

    async def main():
        loading = asyncio.create_task(serve_ray._left_behind(load))
        await asyncio.sleep(0.01)
        assert not loading.done()

    asyncio.run(main())
    assert not ends
    may_end.set()
    assert asyncio.run(serve_ray._left_behind(lambda: "loaded")) == "loaded"
    with pytest.raises(ZeroDivisionError):
        asyncio.run(serve_ray._left_behind(lambda: 1 / 0))


def test_another_cluster_is_not_joined(run, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert "RAY_ADDRESS names a cluster" in run("--port=0").error
