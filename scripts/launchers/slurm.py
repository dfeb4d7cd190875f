"""Slurm: a task on each node, from a checkout on a file system that all nodes have."""

from configs.errors import InputError
from scripts.launchers import checkout
from scripts.launchers.launch import DRAIN_S, Launch
from scripts.launchers.rendered import Rendered, script

READS = ()


def render(launch: Launch) -> Rendered:
    if launch.target.platform != "gpu":
        raise InputError("--on=slurm: is for GPUs; valid: --on=gke, tpu-vm, skypilot or xpk")
    hosts = launch.hosts
    options = {
        "job-name": launch.name,
        "nodes": str(hosts.count),
        "ntasks-per-node": "1",
        "gpus-per-node": str(hosts.chips),
        "output": "%x-%j.log",
        "signal": f"TERM@{2 * DRAIN_S}",
    }
    options |= {"exclusive": "user"} if hosts.count > 1 else {}
    run = ["srun", "--kill-on-bad-exit=1", checkout.PYTHON, "-m", *launch.command(checkout.KEYS)]
    return script(
        [*checkout.exports(launch), run],
        "once, in the checkout: python3 -m venv .venv",
        "once, in the checkout: .venv/bin/pip install --require-hashes -r requirements-gpu.lock",
        *(["the file 'keys' in the checkout has a key a line: chmod 600"] if launch.serves else []),
        "sbatch FILE",
        options=[f"#SBATCH --{name}={value}" for name, value in options.items()],
    )
