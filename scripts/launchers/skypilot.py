"""SkyPilot: a cluster on whichever cloud has the chips, to which it copies this checkout."""

from typing import Any

from scripts.launchers import checkout
from scripts.launchers.launch import PORT, Launch
from scripts.launchers.rendered import Raw, Rendered, lines, manifest

READS = ("spot",)


def render(launch: Launch) -> Rendered:
    hosts, is_tpu = launch.hosts, launch.target.platform == "tpu"
    resources: dict[str, Any] = {"disk_size": max(256, launch.disk_gib)}
    if is_tpu:
        resources["infra"] = "gcp"
        resources["accelerators"] = f"tpu-{hosts.accelerator_type}:1"
        if launch.offer.runtime:
            resources["accelerator_args"] = {"runtime_version": launch.offer.runtime}
    else:
        resources["accelerators"] = f"{launch.offer.accelerator}:{hosts.chips}"
    resources |= {"ports": PORT} if launch.serves else {}
    resources |= {"use_spot": True} if launch.spot else {}
    command = [checkout.PYTHON, "-m", *launch.command(checkout.KEYS)]
    if not is_tpu:  # hosts of a TPU's slice find each other
        first = '$(head -n 1 <<< "$SKYPILOT_NODE_IPS")'
        command += checkout.hosts(launch, "$SKYPILOT_NUM_NODES", "$SKYPILOT_NODE_RANK", first)
    keys = [Raw('(umask 077 && printf "%s\\n" "$RIDGELINE_KEY" > keys)')]
    task: dict[str, Any] = {
        "name": launch.name,
        "workdir": ".",
        "resources": resources,
        "num_nodes": 1 if is_tpu else hosts.count,
        "envs": dict(launch.env),
        "secrets": {"HF_TOKEN": ""} | ({"RIDGELINE_KEY": None} if launch.serves else {}),
        "setup": lines(checkout.install(launch)),
        "run": lines([*([keys] if launch.serves else []), command]),
    }
    secret = " --secret RIDGELINE_KEY" if launch.serves else ""
    return manifest(
        [{name: part for name, part in task.items() if part != {}}],
        "from the repository's root:",
        f"sky launch -c {launch.name}{secret} FILE",
        *([f"sky status --endpoint {PORT} {launch.name}"] if launch.serves else []),
        f"sky down {launch.name}",
    )
