"""The image: pinned, hashed, without root, of files that exist, and of locks that resolve."""

import json
import re
import subprocess
import sys
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
    bases = {value.split(" AS ")[0] for value in values("FROM")} - {"scratch"}
    assert "lock-${ACCELERATOR}" in bases and values("ARG") == ["ACCELERATOR=cpu"]
    (base,) = bases - {"lock-${ACCELERATOR}"}
    assert re.fullmatch(r"docker\.io/library/python:3\.\d+\.\d+-slim-[a-z]+(@sha256:\w{64})?", base)
    minor = int(base.split(":3.")[1].split(".")[0])
    assert minor in (11, 12), "the versions that the suite runs on"


def test_packages_are_installed_by_their_hashes_alone():
    (pip,) = [value for value in values("RUN") if "pip install" in value]
    assert "--require-hashes" in pip and "--no-cache-dir" in pip
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
        if value.startswith("--from="):
            continue
        *sources, _ = value.split()
        copied += sources
    assert all((ROOT / source).exists() for source in copied)
    assert {"configs", "sharding", "layers", "inference", "scripts"} <= set(copied)
    assert not {"tests", "docs", "."} & set(copied)


@pytest.mark.parametrize("accelerator", ["cpu", "gpu", "tpu", "ray"])
def test_each_accelerator_has_a_lock_of_its_own(accelerator):
    name = {"cpu": "serve"}.get(accelerator, accelerator)
    at = ALL.index(("FROM", f"scratch AS lock-{accelerator}"))
    assert ALL[at + 1] == ("COPY", f"requirements-{name}.lock /requirements.lock")
    text = (ROOT / f"requirements-{name}.lock").read_text()
    assert ("jax-cuda13-plugin==" in text) == (accelerator == "gpu")
    assert ("libtpu==" in text) == (accelerator == "tpu")


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["gpu", "tpu"])
def test_the_locks_of_accelerators_resolve_and_install(name):
    """Every package that this Python would install is fetched, and has its hash."""
    flags = "--dry-run", "--ignore-installed", "--quiet", "--report=-", "--require-hashes"
    command = [sys.executable, "-m", "pip", "install", *flags, "-r", f"requirements-{name}.lock"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    names = {each["metadata"]["name"] for each in json.loads(ran.stdout)["install"]}
    assert {"jax", {"gpu": "jax-cuda13-plugin", "tpu": "libtpu"}[name]} <= names


def test_rules_that_linters_of_images_have():
    """Those of hadolint that hold for every image: an absolute directory, no latest, no root at the
    end, lists of packages removed in the layer that fetched them, the exec form.
    """
    assert all(value.startswith("/") for value in values("WORKDIR"))
    assert not any(":latest" in value for value in values("FROM"))
    assert all("sudo" not in value and " cd " not in value for value in values("RUN"))
    for run in values("RUN"):
        assert "apt-get update" not in run or run.index("update") < run.index("apt-get install")
        assert ("apt-get install" in run) == ("rm -rf /var/lib/apt/lists/*" in run)
        assert "apt-get install" not in run or " -y " in run
    assert len(values("CMD", LAST)) == len(values("ENTRYPOINT", LAST)) == 1
    assert len(values("HEALTHCHECK")) == 1
    assert values("HEALTHCHECK")[0].partition("CMD ")[2].startswith("[")
    assert not {"MAINTAINER", "ADD", "ONBUILD"} & {name for name, _ in ALL}


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
