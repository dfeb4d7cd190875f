"""The image: pinned, hashed, without root, and of files that exist."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def instructions() -> list[tuple[str, str]]:
    text = (ROOT / "docs" / "deploy" / "Containerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [tuple(line.split(" ", 1)) for line in joined]


ALL = instructions()
LAST = ALL[max(n for n, (name, _) in enumerate(ALL) if name == "FROM") :]


def values(name: str, among=ALL) -> list[str]:
    return [value for each, value in among if each == name]


def test_the_base_is_one_exact_image():
    bases = {value.split(" AS ")[0] for value in values("FROM")}
    (base,) = bases
    assert re.fullmatch(r"docker\.io/library/python:3\.\d+\.\d+-slim-[a-z]+(@sha256:\w{64})?", base)
    minor = int(base.split(":3.")[1].split(".")[0])
    assert minor in (11, 12), "the versions that the suite runs on"


def test_packages_are_installed_by_their_hashes_alone():
    (pip,) = [value for value in values("RUN") if "pip install" in value]
    assert "--require-hashes" in pip and "--no-cache-dir" in pip
    assert values("ARG") == ["LOCK=requirements-serve.lock"]
    for run in values("RUN"):
        assert "apt-get install" not in run or (
            "--no-install-recommends" in run and "rm -rf /var/lib/apt/lists" in run
        )
        assert not re.search(r"curl|wget http|sudo|chmod 777", run)
    assert not values("ADD")
    assert not any("g++" in run for run in values("RUN", LAST)), "no compiler in the image"


def test_what_is_copied_exists_and_is_all_that_runs():
    copied = []
    for value in values("COPY"):
        if value.startswith("--from=build"):
            continue
        *sources, _ = value.replace("${LOCK}", values("ARG")[0].partition("=")[2]).split()
        copied += sources
    assert all((ROOT / source).exists() for source in copied)
    assert {"configs", "sharding", "layers", "inference", "scripts"} <= set(copied)
    assert not {"tests", "docs", "."} & set(copied)


def test_the_last_user_is_nobody_in_particular():
    (user,) = values("USER", LAST)
    assert re.fullmatch(r"[1-9]\d{3,}:[1-9]\d{3,}", user)
    order = [name for name, _ in LAST]
    assert order.index("USER") < order.index("ENTRYPOINT") < order.index("CMD")
    assert not [run for run in values("RUN", LAST[order.index("USER") :])]


@pytest.mark.parametrize("name", ["ENTRYPOINT", "CMD"])
def test_signals_reach_the_server(name):
    (value,) = values(name, LAST)
    assert isinstance(json.loads(value), list), "without a shell before it"
    assert values("STOPSIGNAL") == ["SIGTERM"]


def test_its_health_is_that_of_the_server():
    (check,) = values("HEALTHCHECK")
    (port,) = values("EXPOSE")
    assert f"http://127.0.0.1:{port}/health" in check
    command = json.loads(values("CMD", LAST)[0])
    assert f"--port={port}" in command and command[0] == "scripts.serve"
    assert any(word.startswith("--api_key_file=") for word in command)
