"""A run from a checkout of this repository with its locked environment in `.venv`."""

from scripts.launchers.launch import COORDINATOR_PORT, Launch
from scripts.launchers.rendered import Raw, Words

PYTHON = ".venv/bin/python"
KEYS = "keys"  # the file beside the checkout's own
_UV = "uv==0.13.8"


def install(launch: Launch) -> list[Words]:
    """Makes the environment; uv brings its Python, whatever the machine has."""
    lock = f"requirements-{launch.target.platform}.lock"
    return [
        ["python3", "-m", "pip", "install", "--user", "--quiet", _UV],
        ["python3", "-m", "uv", "venv", "--python=3.12", "--allow-existing", ".venv"],
        [*("python3", "-m", "uv", "pip", "install", "--python=.venv", "--require-hashes"),
         "-r", lock],
    ]  # fmt: skip


def exports(launch: Launch) -> list[Words]:
    return [["export", f"{name}={value}"] for name, value in launch.env.items()]


def hosts(launch: Launch, count: str, index: str, address: str) -> list[str]:
    """Flags of one of several hosts, by what the shell expands to each."""
    if launch.hosts.count == 1:
        return []
    coordinator = f"{address}:{COORDINATOR_PORT}"
    return [
        Raw(f'--hosts="{count}"'), Raw(f'--host_index="{index}"'),
        Raw(f'--coordinator="{coordinator}"'),
    ]  # fmt: skip
