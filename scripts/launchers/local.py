"""This machine, and others that are started by hand: the command itself."""

from scripts.launchers import checkout
from scripts.launchers.launch import Launch
from scripts.launchers.rendered import Rendered, script

READS = ()


def render(launch: Launch) -> Rendered:
    several = checkout.hosts(
        launch, str(launch.hosts.count), "${1:?the index of this host}",
        "${2:?the address of host 0}",
    )  # fmt: skip
    run = [checkout.PYTHON, "-m", *launch.words, *several]
    start = "bash FILE INDEX ADDRESS_OF_HOST_0, on each host" if several else "bash FILE"
    return script([*checkout.exports(launch), run], start)
