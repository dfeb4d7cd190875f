"""xpk: a job on a cluster of GKE that xpk made."""

import shlex

from configs.errors import InputError
from scripts.launchers.launch import Launch
from scripts.launchers.rendered import Raw, Rendered, script

READS = ("image",)
_SLICE_HOST, _GPU_HOST = 4, 8  # chips of a host, of any slice with more than one chip


def render(launch: Launch) -> Rendered:
    if launch.serves:
        raise InputError("--on=xpk: runs jobs, not servers; valid: --app=generate or bench")
    target, hosts = launch.target, launch.hosts
    if target.platform == "gpu":
        if hosts.chips != _GPU_HOST:
            raise InputError(f"--on=xpk: {target.name}: valid: whole hosts of {_GPU_HOST} GPUs")
        chips = [f"--device-type={launch.offer.xpk}", f"--num-nodes={hosts.count}"]
    else:
        if target.num_chips % _SLICE_HOST:
            raise InputError(f"--on=xpk: {target.name}: valid are hosts of {_SLICE_HOST} chips")
        chips = [f"--tpu-type={hosts.accelerator_type}"]
    command = [
        *("xpk", "workload", "create", f"--workload={launch.name}"),
        *(Raw('--cluster="$CLUSTER"'), Raw('--zone="$ZONE"')),
        *chips,
        f"--docker-image={launch.image}",
        *[f"--env={name}={value}" for name, value in launch.env.items()],
        f"--command={shlex.join(['python', '-m', *launch.words])}",
    ]
    unset = [[":", Raw(f'"${{{name}:?of the cluster}}"')] for name in ("CLUSTER", "ZONE")]
    return script([*unset, command], "CLUSTER=... ZONE=... bash FILE",
                  f"xpk workload list --cluster=CLUSTER --filter-by-job={launch.name}")  # fmt: skip
