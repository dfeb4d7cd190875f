"""Which process of a mesh this is, from what its launcher left in the environment.

The rules for Slurm, Open MPI and TPUs are those of JAX's own detection, which takes importing JAX:
the process that speaks HTTP does not. Each host is one process with all its chips.
"""

import dataclasses
import functools
import glob
import importlib.util
import re
import socket
from collections.abc import Mapping

from configs import addresses
from configs.errors import InputError

Environment = Mapping[str, str]

_PORT = 9100  # and the next one
_MOST_HOSTS = 4096
_FIRST_PORT, _NUM_PAIRS = 61440, 2048  # of jobs that may share a machine
_METADATA = "computeMetadata/v1/instance/attributes"
_METADATA_S = 5.0


@dataclasses.dataclass(frozen=True)
class Place:
    """One process of a mesh.

    Attributes:
        index: of this one; 0 serves, the others follow.
        count: how many there are.
        coordinator: address and port of host 0.
        source: who says so.
    """

    index: int
    count: int
    coordinator: str
    source: str

    def __str__(self) -> str:
        return (
            f"host {self.index} of {self.count}, coordinator {self.coordinator}, by {self.source}"
        )


def place(
    count: int | None, index: int | None, coordinator: str | None, environment: Environment
) -> Place:
    """The place of this process; what is given comes before what a launcher says. Raises InputError
    if these make no sense.
    """
    launched = None
    if count != 1 and None in (count, index, coordinator):
        launched = _launched(count, environment)
    if launched is None:
        launched = Place(0, 1, f"localhost:{_PORT}", "flags")
    index = launched.index if index is None else index
    count = launched.count if count is None else count
    coordinator = launched.coordinator if coordinator is None else coordinator
    if not 1 <= count <= _MOST_HOSTS or not 0 <= index < count:
        raise InputError(f"of {count} hosts the first is 0 and the last {count - 1}, not {index}")
    address, _, port = coordinator.rpartition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65535
    if not (addresses.is_name(address) and is_port):
        raise InputError(f"a coordinator is host 0's address:port, not {coordinator[:80]!r}")
    return Place(index, count, coordinator, launched.source)


def _launched(count: int | None, environment: Environment) -> Place | None:
    """What the launcher says; `count`: of hosts, where it is known."""
    for find in (_variables, _open_mpi, _slurm, _tpu_pods, _leader_worker_set, _tpu_vm):
        if (launched := find(environment)) is not None:
            return launched
    return _indexed_job(count, environment)


def _variables(environment: Environment) -> Place | None:
    """What Kubeflow's trainer, or a manifest, says."""
    if not {"JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_COORDINATOR_ADDRESS"} <= environment.keys():
        return None
    address = environment["JAX_COORDINATOR_ADDRESS"]
    return Place(
        _number(environment, "JAX_PROCESS_ID"), _number(environment, "JAX_NUM_PROCESSES"),
        address if ":" in address else f"{address}:{_PORT}", "JAX_PROCESS_ID",
    )  # fmt: skip


def _open_mpi(environment: Environment) -> Place | None:
    if "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    # Version 4 names addresses of the launcher, which starts host 0 where it runs; 5 its machine.
    uri = environment.get("OMPI_MCA_orte_hnp_uri", "")
    name = environment.get("PMIX_NAMESPACE", "")
    if match := re.match(r"(\d+)\.\d+;tcp6?://\[?(.+?)[],:]", uri):
        job, address = int(match[1]) >> 12, match[2]
    elif match := re.match(r"prte(?:run)?-(.+)-(\d+)@", name):
        job, address = int(match[2]), match[1]
    else:
        raise InputError("Open MPI does not say where host 0 is: give --coordinator=ADDRESS:PORT")
    return Place(
        _number(environment, "OMPI_COMM_WORLD_RANK"), _number(environment, "OMPI_COMM_WORLD_SIZE"),
        f"{address}:{_port_of(job)}", "Open MPI",
    )  # fmt: skip


def _slurm(environment: Environment) -> Place | None:
    # A batch script outside of srun has no step, and is alone.
    if not {"SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"} <= environment.keys():
        return None
    nodes = environment["SLURM_STEP_NODELIST"]  # node[001-004,007],gpu1
    first = re.match(r"([^,[]+)(?:\[([^],-]+))?", nodes)
    if first is None:
        raise InputError(f"SLURM_STEP_NODELIST={nodes[:80]}: names no node; give --coordinator")
    return Place(
        _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_STEP_NUM_TASKS"),
        f"{first[1]}{first[2] or ''}:{_port_of(_number(environment, 'SLURM_JOB_ID'))}", "Slurm",
    )  # fmt: skip


def _tpu_pods(environment: Environment) -> Place | None:
    """What GKE tells the pods of a slice, whether a Job, a JobSet or another started them."""
    names = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES")
    if not names or "TPU_WORKER_ID" not in environment:
        return None
    hosts, index = names.split(","), _number(environment, "TPU_WORKER_ID")
    num_slices, first = 1, hosts[0]
    if "MEGASCALE_NUM_SLICES" in environment:  # of one mesh
        num_slices = _number(environment, "MEGASCALE_NUM_SLICES")
        index += len(hosts) * _number(environment, "MEGASCALE_SLICE_ID")
        first = environment.get("MEGASCALE_COORDINATOR_ADDRESS") or first
    address = first.split(":")[0]
    return Place(index, len(hosts) * num_slices, f"{address}:{_PORT}", "GKE's TPU_WORKER_HOSTNAMES")


def _leader_worker_set(environment: Environment) -> Place | None:
    if "LWS_LEADER_ADDRESS" not in environment:
        return None
    return Place(
        _number(environment, "LWS_WORKER_INDEX"), _number(environment, "LWS_GROUP_SIZE"),
        f"{environment['LWS_LEADER_ADDRESS']}:{_PORT}", "LeaderWorkerSet",
    )  # fmt: skip


def _indexed_job(count: int | None, environment: Environment) -> Place | None:
    """A pod of an indexed Job, alone or of a JobSet. Kubernetes does not say how many there are,
    nor that they belong together: --hosts does, or JAX_NUM_PROCESSES.
    """
    if count is None and "JAX_NUM_PROCESSES" in environment:
        count = _number(environment, "JAX_NUM_PROCESSES")
    if count is None or "JOB_COMPLETION_INDEX" not in environment:
        return None
    index, name = _number(environment, "JOB_COMPLETION_INDEX"), socket.getfqdn()
    pod, *domain = name.split(".")  # JOB-INDEX.SUBDOMAIN...
    if not pod.endswith(f"-{index}") or not domain:
        raise InputError(
            f"pod {name[:120]} of an indexed Job: its subdomain has to name a headless Service, "
            "through which it reaches host 0; or give --coordinator"
        )
    first = ".".join([f"{pod.removesuffix(str(index))}0", *domain])
    return Place(index, count, f"{first}:{_PORT}", "JOB_COMPLETION_INDEX")


def _tpu_vm(environment: Environment) -> Place | None:
    """What the metadata server tells a TPU VM."""
    if "TPU_SKIP_MDS_QUERY" in environment or not _has_tpu():
        return None
    server = environment.get("GCE_METADATA_IP", "metadata.google.internal")
    index = _metadata(server, "agent-worker-number")
    workers = _metadata(server, "worker-network-endpoints")
    if index is None or workers is None:
        return None
    endpoints = workers.split(",")  # of each an address, or ID:...:ADDRESS
    address = endpoints[0].split(":")[-1]
    return Place(int(index), len(endpoints), f"{address}:{_PORT}", "the TPU VM's metadata")


def _has_tpu() -> bool:
    has_devices = glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*")
    return bool(has_devices) and importlib.util.find_spec("libtpu") is not None


@functools.cache
def _metadata(server: str, name: str) -> str | None:
    import urllib.request  # which takes a while

    request = urllib.request.Request(
        f"http://{server}/{_METADATA}/{name}", headers={"Metadata-Flavor": "Google"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine
    try:
        with opener.open(request, timeout=_METADATA_S) as response:
            return str(response.read(1 << 16).decode())
    except (OSError, ValueError):
        return None


def _port_of(job: int) -> int:
    """The first of two ports for a job by its number."""
    return _FIRST_PORT + 2 * (job % _NUM_PAIRS)


def _number(environment: Environment, name: str) -> int:
    value = environment.get(name, "")
    if not (value.isascii() and value.isdigit()):
        raise InputError(
            f"{name}={value[:40]}: is no number; give --hosts, --host_index and --coordinator"
        )
    return int(value[:9])
