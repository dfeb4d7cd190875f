"""TPU VMs: a slice made by gcloud, and a container on each of its hosts."""

import shlex

from configs.errors import InputError
from scripts.launchers.launch import CACHE, KEYS, USER, Launch
from scripts.launchers.rendered import Raw, Rendered, Words, script

READS = ("image", "spot")
_DISK_GIB = 100  # of a TPU VM, and no more without another disk


def render(launch: Launch) -> Rendered:
    if launch.target.platform != "tpu":
        raise InputError(f"--on=tpu-vm: {launch.target.name} has no TPUs; valid: --on=gke")
    if not launch.offer.runtime:
        raise InputError(f"--on=tpu-vm: {launch.target.chip} is a node of GKE; valid: --on=gke")
    if launch.reads_hub and launch.disk_gib > _DISK_GIB:
        raise InputError(
            f"--on=tpu-vm: weights need {launch.disk_gib} GiB of each host's disk, which has "
            f"{_DISK_GIB}; valid: --model=gs://BUCKET/FOLDER, of which a host reads its parts"
        )
    at = Raw('--zone="$ZONE"')
    everywhere = (at, "--worker=all")
    tpu = ("gcloud", "compute", "tpus", "tpu-vm")
    create = [*tpu, "create", launch.name, at]
    create += [f"--accelerator-type={launch.hosts.accelerator_type}"]
    create += [f"--version={launch.offer.runtime}", *["--spot"] * launch.spot]
    commands: list[Words] = [
        [":", Raw('"${ZONE:?a zone that has the chip, as us-west4-a}"')],
        create,
    ]
    if "/" in launch.image:
        registry = launch.image.partition("/")[0]
        login = f"sudo docker-credential-gcr configure-docker --registries={registry}"
        commands.append([*tpu, "ssh", launch.name, *everywhere, f"--command={login}"])
    if launch.serves:
        commands.append([*tpu, "ssh", launch.name, *everywhere, "--command=mkdir -p keys"])
        commands.append([*tpu, "scp", "keys", f"{launch.name}:keys/keys", *everywhere])
    owned = f"sudo chown -R {USER} keys && " * launch.serves
    run = f"--command={owned}{shlex.join(_container(launch))}"
    commands.append([*tpu, "ssh", launch.name, *everywhere, run])
    tunnel = f"{' '.join(tpu)} ssh {launch.name} --zone=ZONE --worker=0 -- -NL 8000:localhost:8000"
    return script(
        commands,
        *(["the file 'keys' beside this one has a key a line"] if launch.serves else []),
        "ZONE=us-west4-a bash FILE",
        *([tunnel] if launch.serves else []),
        f"{' '.join(tpu)} delete {launch.name} --zone=ZONE",
    )


def _container(launch: Launch) -> list[str]:
    """Which sees the host's devices and network; it has the memory that a driver locks."""
    words = ["sudo", "docker", "run", "--rm", "--name=ridgeline", "--privileged", "--net=host"]
    words += ["--ulimit=memlock=-1", "--read-only", "--tmpfs=/tmp", f"--volume=cache:{CACHE}"]
    words += [f"--volume=./keys:{KEYS}:ro"] if launch.serves else []
    words += [f"--env={name}={value}" for name, value in launch.env.items()]
    return [*words, launch.image, *launch.command(f"{KEYS}/keys")]
