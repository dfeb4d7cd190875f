"""Where a process is, by the environments of those that start many, and as JAX reads them."""

import http.server
import threading

import pytest
from jax._src.clusters import cloud_tpu_cluster
from jax._src.clusters.cloud_tpu_cluster import GkeTpuCluster
from jax._src.clusters.ompi_cluster import OmpiCluster
from jax._src.clusters.slurm_cluster import SlurmCluster

from configs.errors import InputError
from scripts import placement
from scripts.placement import Place

SLURM = {
    "SLURM_JOB_ID": "4097", "SLURM_STEP_NODELIST": "node[007-009,12],gpu1", "SLURM_NTASKS": "5",
    "SLURM_STEP_NUM_TASKS": "5", "SLURM_PROCID": "2", "SLURM_LOCALID": "0",
}  # fmt: skip
OPEN_MPI_4 = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}  # fmt: skip
OPEN_MPI_5 = {  # as 5.0.11 sets them
    "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_VERSION": "5.0.11", "PMIX_NAMESPACE": "prterun-login-1-15003@1", "PMIX_RANK": "1",
    "PMIX_SERVER_URI41": "prterun-login-1-15003@0.0;tcp4://127.0.0.1:34763",
}  # fmt: skip
GKE = {"TPU_WORKER_ID": "3", "TPU_WORKER_HOSTNAMES": "s-0.svc,s-1.svc,s-2.svc,s-3.svc"}
GKE_SLICES = GKE | {
    "MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "set-slice-0-0.set:8081",
}  # fmt: skip
LWS = {"LWS_LEADER_ADDRESS": "vllm-0.vllm.default", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
KUBEFLOW = {
    "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2", "JAX_COORDINATOR_ADDRESS": "job-node-0-0:1234",
}  # fmt: skip


def of(environment, count=None, index=None, coordinator=None):
    return placement.place(count, index, coordinator, environment)


@pytest.mark.parametrize("environment, expected", [
    (SLURM, "host 2 of 5, coordinator node007:61442, by Slurm"),
    (SLURM | {"SLURM_STEP_NODELIST": "a,b"}, "host 2 of 5, coordinator a:61442, by Slurm"),
    (SLURM | {"SLURM_STEP_NODELIST": "tpu-1"}, "host 2 of 5, coordinator tpu-1:61442, by Slurm"),
    (OPEN_MPI_4, "host 1 of 2, coordinator 10.96.0.1:63808, by Open MPI"),
    (OPEN_MPI_5, "host 1 of 2, coordinator login-1:62774, by Open MPI"),
    (GKE, "host 3 of 4, coordinator s-0.svc:9100, by GKE's TPU_WORKER_HOSTNAMES"),
    (GKE_SLICES, "host 7 of 8, coordinator set-slice-0-0.set:9100, by GKE's TPU_WORKER_HOSTNAMES"),
    (LWS, "host 1 of 2, coordinator vllm-0.vllm.default:9100, by LeaderWorkerSet"),
    (KUBEFLOW, "host 2 of 4, coordinator job-node-0-0:1234, by JAX_PROCESS_ID"),
])  # fmt: skip
def test_launchers_say_where_a_process_is(environment, expected):
    assert str(of(environment)) == expected


@pytest.mark.parametrize("environment, cluster", [
    (SLURM, SlurmCluster), (OPEN_MPI_4, OmpiCluster), (GKE, GkeTpuCluster),
    (GKE_SLICES, GkeTpuCluster),
])  # fmt: skip
def test_jax_reads_the_same(monkeypatch, environment, cluster):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(GkeTpuCluster, "wait_for_coordinator", lambda *_: None)
    monkeypatch.setattr(cloud_tpu_cluster, "get_tpu_env_value_from_metadata", lambda _: None)
    launched = of(environment)
    coordinator = cluster.get_coordinator_address(1, None)
    assert launched.coordinator.rpartition(":")[0] == coordinator.rpartition(":")[0]
    found = cluster.get_process_id(), cluster.get_process_count()
    assert (launched.index, launched.count) == found


@pytest.mark.parametrize("environment", [
    {}, {"JOB_COMPLETION_INDEX": "1"},  # whose pods may have nothing to do with each other
    {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # a batch script
])  # fmt: skip
def test_without_a_launcher_a_process_is_alone(environment):
    assert of(environment) == Place(0, 1, "localhost:9100", "flags")


@pytest.mark.parametrize("name, expected", [
    ("batch-1.batch.default.svc.cluster.local", "batch-0.batch.default.svc.cluster.local:9100"),
    ("set-mesh-0-1.set", "set-mesh-0-0.set:9100"),
])  # fmt: skip
def test_pods_of_an_indexed_job(monkeypatch, name, expected):
    monkeypatch.setattr(placement.socket, "getfqdn", lambda: name)
    environment = {"JOB_COMPLETION_INDEX": "1"}
    wanted = Place(1, 2, expected, "JOB_COMPLETION_INDEX")
    assert of(environment, count=2) == wanted
    assert of(environment | {"JAX_NUM_PROCESSES": "2"}) == wanted


def test_a_pod_without_a_subdomain_says_what_to_do(monkeypatch):
    monkeypatch.setattr(placement.socket, "getfqdn", lambda: "batch-1")
    with pytest.raises(InputError, match="pod batch-1 of .* headless Service.* --coordinator"):
        of({"JOB_COMPLETION_INDEX": "1"}, count=2)
    assert of({"JOB_COMPLETION_INDEX": "1"}, 2, 1, "a:1").coordinator == "a:1"


@pytest.mark.parametrize("workers", ["10.0.0.2,10.0.0.3", "a:0:10.0.0.2,b:1:10.0.0.3"])
def test_tpu_vms(monkeypatch, workers):
    values = {"agent-worker-number": "1", "worker-network-endpoints": workers}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            assert self.headers["Metadata-Flavor"] == "Google"
            *folder, name = self.path.split("/")
            assert folder == ["", "computeMetadata", "v1", "instance", "attributes"]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(values[name].encode())

        def log_message(self, *_):
            pass

    placement._metadata.cache_clear()
    monkeypatch.setattr(placement, "_has_tpu", lambda: True)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        environment = {"GCE_METADATA_IP": f"127.0.0.1:{server.server_port}"}
        launched = of(environment)
        server.shutdown()
    assert launched == Place(1, 2, "10.0.0.2:9100", "the TPU VM's metadata")
    assert of(environment | {"TPU_SKIP_MDS_QUERY": "1"}).count == 1
    placement._metadata.cache_clear()
    assert of(environment).count == 1  # nobody answers any more


def test_flags_come_first():
    assert of(SLURM, count=1).count == 1
    assert of(SLURM, coordinator="b:7") == Place(2, 5, "b:7", "Slurm")
    assert of(SLURM, count=3, index=0) == Place(0, 3, "node007:61442", "Slurm")
    assert of({}, count=2, index=1) == Place(1, 2, "localhost:9100", "flags")
    assert of(SLURM, 2, 1, "b:7") == Place(1, 2, "b:7", "flags")


@pytest.mark.parametrize("environment, expected", [
    (LWS | {"LWS_GROUP_SIZE": "two"}, "LWS_GROUP_SIZE=two: is no number; give --hosts, --host_i"),
    ({"OMPI_COMM_WORLD_RANK": "0"}, "Open MPI does not say where host 0 is: give --coordinator"),
    (SLURM | {"SLURM_STEP_NODELIST": "[1-2]"}, "SLURM_STEP_NODELIST=.*: names no node"),
])  # fmt: skip
def test_what_makes_no_sense_is_named(environment, expected):
    with pytest.raises(InputError, match=expected):
        of(environment)


@pytest.mark.parametrize("coordinator, count, index, expected", [
    ("localhost", 2, 0, "a coordinator is host 0's address:port, not 'localhost'"),
    ("localhost:x", 2, 0, "a coordinator is host 0's address:port, not 'localhost:x'"),
    ("a\0b:9100", 2, 1, r"a coordinator is host 0's address:port, not 'a\x00b:9100'"),
    (f"{'a' * 64}:9100", 2, 0, f"a coordinator is host 0's address:port, not '{'a' * 64}:9100'"),
    ("a..b:9100", 2, 0, "a coordinator is host 0's address:port, not 'a..b:9100'"),
    ("\udce4:9100", 2, 1, r"a coordinator is host 0's address:port, not '\udce4:9100'"),
    ("localhost:9100", 2, 2, "of 2 hosts the first is 0 and the last 1, not 2"),
])  # fmt: skip
def test_bad_numbers_are_named(coordinator, count, index, expected):
    with pytest.raises(InputError) as error:
        of({}, count, index, coordinator)
    assert str(error.value) == expected
