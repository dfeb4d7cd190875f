"""Pods of a run, and what holds them: Deployment, LeaderWorkerSet, Job or JobSet; a Service."""

from collections.abc import Mapping

from scripts.launchers.launch import (
    CACHE,
    COORDINATOR_PORT,
    DRAIN_S,
    KEYS,
    PORT,
    USER,
    Launch,
    Resource,
)

_CPUS, _GIB = 4, 16  # requested of a host for each chip
_START_PERIOD_S, _START_S = 10, 3600  # weights come over the network, steps are compiled
_PAUSE_S = 5  # until no Service sends new connections
_END_S = 25  # of an engine
_RESTARTS = 3


def resources(
    launch: Launch, chip_resource: str, selector: Mapping[str, str], slice_label: str = ""
) -> list[Resource]:
    """What a cluster is to create.

    Args:
        chip_resource: that devices are requested as: 'google.com/tpu'.
        selector: labels of the nodes.
        slice_label: that the nodes of a slice share, where all hosts of a replica need one slice.
    """
    pod = _pod(launch, chip_resource, selector)
    if not launch.serves:
        return [_job(launch, pod, slice_label)]
    if launch.hosts.count == 1:
        return [_deployment(launch, pod), _service(launch, {})]
    leader = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}
    return [_leader_worker_set(launch, pod, slice_label), _service(launch, leader)]


def _labels(launch: Launch) -> dict[str, str]:
    return {"app.kubernetes.io/name": launch.name}


def _metadata(launch: Launch, exclusive: str = "", slice_label: str = "") -> Resource:
    metadata: Resource = {"name": launch.name, "labels": _labels(launch)}
    annotations = {f"{exclusive}/exclusive-topology": slice_label}
    return metadata | ({"annotations": annotations} if slice_label else {})


def _deployment(launch: Launch, pod: Resource) -> Resource:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(launch),
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": _labels(launch)},
            "strategy": {"type": "Recreate"},  # there are no chips for a second one meanwhile
            "template": {"metadata": {"labels": _labels(launch)}, "spec": _serving(pod)},
        },
    }


def _leader_worker_set(launch: Launch, pod: Resource, slice_label: str) -> Resource:
    template = {"metadata": {"labels": _labels(launch)}}
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": _metadata(launch, "leaderworkerset.sigs.k8s.io", slice_label),
        "spec": {
            "replicas": 1,
            "startupPolicy": "LeaderCreated",
            "leaderWorkerTemplate": {
                "size": launch.hosts.count,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": template | {"spec": _serving(pod)},
                "workerTemplate": template | {"spec": pod},
            },
        },
    }


def _job(launch: Launch, pod: Resource, slice_label: str) -> Resource:
    """A Job of one host; of several a JobSet, whose hosts all start again where one fails."""
    template = {"metadata": {"labels": _labels(launch)}, "spec": pod | {"restartPolicy": "Never"}}
    if launch.hosts.count == 1:
        spec = {"backoffLimit": _RESTARTS, "template": template}
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": _metadata(launch),
            "spec": spec,
        }
    hosts = {
        "completionMode": "Indexed",
        "parallelism": launch.hosts.count,
        "completions": launch.hosts.count,
        "backoffLimit": 0,
        "template": template,
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(launch, "alpha.jobset.sigs.k8s.io", slice_label),
        "spec": {
            "network": {"enableDNSHostnames": True},
            "failurePolicy": {"maxRestarts": _RESTARTS},
            "replicatedJobs": [{"name": "mesh", "replicas": 1, "template": {"spec": hosts}}],
        },
    }


def _service(launch: Launch, more_labels: Mapping[str, str]) -> Resource:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(launch),
        "spec": {
            "selector": _labels(launch) | dict(more_labels),
            "ports": [{"name": "http", "port": 80, "targetPort": "http"}],
        },
    }


def _pod(launch: Launch, chip_resource: str, selector: Mapping[str, str]) -> Resource:
    """The pod of a host, without root and with nothing of its image writable."""
    chips = {chip_resource: launch.hosts.chips}
    requests = {
        "cpu": _CPUS * launch.hosts.chips,
        "memory": f"{_GIB * launch.hosts.chips}Gi",
    }
    volumes: list[Resource] = [
        {"name": "cache", **_cache(launch)},
        {"name": "tmp", "emptyDir": {"sizeLimit": "4Gi"}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # NCCL's, of processes of a host
    ]
    mounts: list[Resource] = [
        {"name": "cache", "mountPath": CACHE},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if launch.serves:
        secret = {"secretName": "ridgeline-keys", "defaultMode": 0o440}
        volumes.append({"name": "keys", "secret": secret})
        mounts.append({"name": "keys", "mountPath": KEYS, "readOnly": True})
    token = {"name": "ridgeline-hub", "key": "token", "optional": True}
    env: list[Resource] = [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": token}}]
    env += [{"name": name, "value": value} for name, value in launch.env.items()]
    container = {
        "name": "host",
        "image": launch.image,
        "args": launch.command(f"{KEYS}/keys"),
        "env": env,
        "ports": [{"name": "coordinator", "containerPort": COORDINATOR_PORT}],
        "resources": {"requests": requests | chips, "limits": chips},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }
    return {
        "nodeSelector": dict(selector),
        "tolerations": [{"key": chip_resource, "operator": "Exists", "effect": "NoSchedule"}],
        "terminationGracePeriodSeconds": _PAUSE_S + DRAIN_S + _END_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
    }


def _cache(launch: Launch) -> Resource:
    if launch.claim is None:
        return {"emptyDir": {"sizeLimit": f"{launch.disk_gib}Gi"}}
    return {"persistentVolumeClaim": {"claimName": launch.claim}}


def _serving(pod: Resource) -> Resource:
    """The pod of the host that answers over HTTP."""
    (container,) = pod["containers"]
    ready, health = ({"httpGet": {"path": path, "port": "http"}} for path in ("/ready", "/health"))
    probes = {
        "startupProbe": ready
        | {"periodSeconds": _START_PERIOD_S, "failureThreshold": _START_S // _START_PERIOD_S},
        "livenessProbe": health | {"periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 3},
        "readinessProbe": ready | {"periodSeconds": 2, "timeoutSeconds": 2, "failureThreshold": 2},
    }
    ports = [{"name": "http", "containerPort": PORT}, *container["ports"]]
    pause = {"preStop": {"sleep": {"seconds": _PAUSE_S}}}
    return pod | {"containers": [container | {"ports": ports, "lifecycle": pause} | probes]}


def steps(launch: Launch) -> tuple[str, ...]:
    """What a cluster needs first, and how the file is used."""
    kind = "LeaderWorkerSet" if launch.serves else "JobSet"
    controller = f"the cluster needs the controller of {kind} (docs/cloud.md)"
    keys = "kubectl create secret generic ridgeline-keys --from-file=keys=KEYS"
    forward = f"kubectl port-forward service/{launch.name} 8000:80"
    return (
        *([controller] if launch.hosts.count > 1 else []),
        *([keys] if launch.serves else []),
        "kubectl apply -f FILE",
        forward if launch.serves else f"kubectl logs -f -l app.kubernetes.io/name={launch.name}",
    )
