"""GKE: TPU slices of one host or several, and GPUs."""

from scripts.launchers import pods
from scripts.launchers.launch import Launch
from scripts.launchers.rendered import Rendered, manifest

READS = ("image", "spot", "claim")
_NODE_POOL = "cloud.google.com/gke-nodepool"  # the nodes of a slice are one pool


def render(launch: Launch) -> Rendered:
    hosts, spot = launch.hosts, {"cloud.google.com/gke-spot": "true"} if launch.spot else {}
    pool = (
        f"gcloud container node-pools create {launch.name} --cluster=CLUSTER --location=ZONE "
        f"--machine-type={hosts.machine} --num-nodes={hosts.count}" + " --spot" * launch.spot
    )
    if launch.target.platform == "gpu":
        label, slice_label = {"cloud.google.com/gke-accelerator": launch.offer.label}, ""
        pool += f" --accelerator=type={launch.offer.label},count={hosts.chips}"
        resource = "nvidia.com/gpu"
    else:
        label = {
            "cloud.google.com/gke-tpu-accelerator": launch.offer.label,
            "cloud.google.com/gke-tpu-topology": hosts.topology,
        }
        slice_label = _NODE_POOL if hosts.count > 1 else ""
        pool += f" --tpu-topology={hosts.topology}" if hosts.count > 1 else ""
        resource = "google.com/tpu"
    resources = pods.resources(launch, resource, label | spot, slice_label)
    return manifest(resources, *([pool] if hosts.machine else []), *pods.steps(launch))
