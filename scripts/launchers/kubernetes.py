"""Any Kubernetes with NVIDIA's device plugin and feature discovery."""

from configs.errors import InputError
from scripts.launchers import pods
from scripts.launchers.launch import Launch
from scripts.launchers.rendered import Rendered, manifest

READS = ("image", "claim")


def render(launch: Launch) -> Rendered:
    if launch.target.platform != "gpu":
        raise InputError("--on=kubernetes: TPUs are nodes of GKE alone; valid: --on=gke")
    selector = {"nvidia.com/gpu.product": launch.offer.product}
    return manifest(
        pods.resources(launch, "nvidia.com/gpu", selector),
        "nodes need NVIDIA's device plugin and GPU feature discovery (its GPU operator has both)",
        *pods.steps(launch),
    )
