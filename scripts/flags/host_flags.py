"""The flags of several processes that run one mesh."""

import os

from absl import flags

from scripts import placement
from scripts.placement import Place

HOSTS = flags.DEFINE_integer(
    "hosts", None,
    "Processes that run one mesh, each started like this one. Default: as many as the launcher "
    "started (TPU VM, GKE, LeaderWorkerSet, Slurm, Open MPI), else 1.",
)  # fmt: skip
HOST = flags.DEFINE_integer(
    "host_index", None,
    "Which of --hosts this is; 0 serves, the others follow. Default: as the launcher says, else 0.",
)  # fmt: skip
COORDINATOR = flags.DEFINE_string(
    "coordinator", None,
    "Address and port of host 0, which takes the next port, too. Default: as the launcher says, "
    "else localhost:9100.",
)  # fmt: skip


def place() -> Place:
    """Where this process is; raises InputError if what its launcher says makes no sense."""
    return placement.place(HOSTS.value, HOST.value, COORDINATOR.value, os.environ)
