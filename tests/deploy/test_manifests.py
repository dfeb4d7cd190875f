"""`docs/deploy`, and a launch: each resource as its kind declares it, and as this program is."""

import copy
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from inference.server.web.access import OPEN_PATHS
from inference.server.web.operations import OPERATIONS
from tests.deploy import published, resources

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "deploy"
CONTAINERFILE = (FOLDER / "Containerfile").read_text()
VERSION = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]


def load(name: str) -> list[dict]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


FILES = sorted(path.name for path in FOLDER.glob("*.yaml"))
RESOURCES = [(name, each) for name in FILES for each in load(name)]
IDS = [f"{name}-{each['kind']}" for name, each in RESOURCES]


LAUNCHED = [
    manifest
    for app in ("serve", "generate", "bench")
    for manifest in yaml.safe_load_all(
        published.rendered("h100x16_deepseek_v32", "kubernetes", app)
    )
]


def of(kind: str) -> dict:
    """That of the folder, or the first that is launched."""
    manifests = [*(manifest for _, manifest in RESOURCES), *LAUNCHED]
    return next(manifest for manifest in manifests if manifest["kind"] == kind)


def pods(value, at: str = "") -> list[dict]:
    """The specs of all pods in a resource."""
    if isinstance(value, list):
        return [pod for each in value for pod in pods(each, at)]
    if not isinstance(value, dict):
        return []
    if "containers" in value:
        return [value]
    return [pod for each in value.values() for pod in pods(each, at)]


def containers() -> list[tuple[str, dict, dict]]:
    return [
        (resource["kind"], pod, container)
        for _, resource in RESOURCES
        for pod in pods(resource)
        for container in pod["containers"]
    ]


def test_there_is_a_resource_of_each_kind():
    of_launches = {"Job", "JobSet", "LeaderWorkerSet"}
    assert {each["kind"] for _, each in RESOURCES} == resources.KINDS.keys() - of_launches


@pytest.mark.parametrize("name, resource", RESOURCES, ids=IDS)
def test_resources_are_as_their_kinds_declare_them(name, resource):
    assert resources.problems(resource) == []


BROKEN = [
    ("Deployment", lambda d: d["spec"]["template"]["spec"].update(contianers=[]), "contianers"),
    ("Deployment", lambda d: d["spec"].pop("selector"), "spec.selector"),
    ("Deployment", lambda d: pods(d)[0]["containers"][0].pop("name"), "name"),
    ("Deployment", lambda d: pods(d)[0]["containers"][0].update(args="serve"), "args"),
    ("Service", lambda d: d["spec"]["ports"][0].update(targetport=1), "targetport"),
    ("HorizontalPodAutoscaler", lambda d: d["spec"].pop("maxReplicas"), "maxReplicas"),
    ("PodMonitor", lambda d: d["spec"]["podMetricsEndpoints"][0].update(interval=15), "interval"),
    (
        "JobSet",
        lambda d: d["spec"]["replicatedJobs"][0]["template"]["spec"].pop("template"),
        "temp",
    ),
    ("LeaderWorkerSet", lambda d: d["spec"]["leaderWorkerTemplate"].update(size="2"), "size"),
    ("RayService", lambda d: d["spec"]["rayClusterConfig"].update(rayversion="2"), "rayversion"),
    ("RayService", lambda d: d.update(apiVersion="ray.io/v1alpha1"), "apiVersion"),
]


@pytest.mark.parametrize("kind, spoil, at", BROKEN)
def test_what_is_wrong_is_found(kind, spoil, at):
    spoiled = copy.deepcopy(of(kind))
    spoil(spoiled)
    assert any(at in problem for problem in resources.problems(spoiled))


def test_the_serve_configuration_is_what_the_application_takes():
    from inference.server.replicas.replica_config import ReplicaConfig

    spec = of("RayService")["spec"]
    config = yaml.safe_load(spec["serveConfigV2"])
    assert resources.problems(config, resources.ServeConfig) == []
    (application,) = config["applications"]
    module, _, function = application["import_path"].partition(":")
    source = Path(importlib.util.find_spec(module).origin).read_text()
    assert f"\ndef {function}(" in source
    args = application["args"]
    given = {name: value for name, value in args.items() if name != "api_key_file"}
    built = ReplicaConfig.from_args(given, num_keys=1)
    assert built.drain_timeout == args["drain_timeout"] and built.num_keys == 1
    assert f"--max_num_seqs={built.max_num_seqs}" in built.command
    (workers,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    assert workers["minReplicas"] == args["min_replicas"]
    assert workers["maxReplicas"] == args["max_replicas"]
    grace = workers["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace >= args["drain_timeout"] + 10
    declared = re.search(r'"ray\[serve\]>=(.*?)"', (ROOT / "pyproject.toml").read_text())[1]
    version = spec["rayClusterConfig"]["rayVersion"]
    assert version.split(".")[:2] >= declared.split(".")[:2]
    assert spec["rayClusterConfig"]["authOptions"] == {"mode": "token"}


def commands() -> list[list[str]]:
    """Modules and flags, what Kubernetes replaces replaced."""
    found = [container["args"] for _, _, container in containers() if "args" in container]
    found += [container["args"] for pod in pods(LAUNCHED) for container in pod["containers"]]
    serve = yaml.safe_load(of("RayService")["spec"]["serveConfigV2"])
    found.append(["scripts.serve", *serve["applications"][0]["args"]["flags"]])
    found.append(re.findall(r'"(.*?)"', re.search(r"^CMD \[(.*)\]$", CONTAINERFILE, re.M)[1]))
    return [[re.sub(r"\$\(.*?\)", "1", word) for word in command] for command in found]


PARSE = """
import importlib, json, sys
from absl import flags
importlib.import_module(sys.argv[1])
for command in json.loads(sys.argv[2]):
    if flags.FLAGS(command, known_only=False) != command[:1]:
        sys.exit(str(command))
    flags.FLAGS.unparse_flags()
"""


@pytest.mark.parametrize("module", sorted({command[0] for command in commands()}))
def test_every_flag_is_one_of_the_script(module):
    import json

    own = [command for command in commands() if command[0] == module]
    ran = subprocess.run(
        [sys.executable, "-c", PARSE, module, json.dumps(own)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    wrong = [[*own[0], "--no_such_flag=1"]]
    ran = subprocess.run(
        [sys.executable, "-c", PARSE, module, json.dumps(wrong)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode != 0 and "no_such_flag" in ran.stderr


def flag(container: dict, name: str) -> str:
    (found,) = [word for word in container["args"] if word.startswith(f"--{name}=")]
    return found.partition("=")[2]


def test_probes_ask_what_the_server_answers():
    (pod,) = pods(of("Deployment"))
    (container,) = pod["containers"]
    paths = {each.path for each in OPERATIONS}
    probes = {name: container[f"{name}Probe"] for name in ("startup", "liveness", "readiness")}
    asked = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
    assert asked == {"startup": "/ready", "liveness": "/health", "readiness": "/ready"}
    assert set(asked.values()) <= paths & set(OPEN_PATHS), "without a key"
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {probe["httpGet"]["port"] for probe in probes.values()} == {"http"}
    assert ports["http"] == int(flag(container, "port"))
    assert of("Service")["spec"]["ports"][0]["targetPort"] == "http"
    (endpoint,) = of("PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == "http" and endpoint["path"] in paths


def test_a_pod_has_the_time_to_drain():
    (pod,) = pods(of("Deployment"))
    (container,) = pod["containers"]
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = float(flag(container, "drain_timeout"))
    assert pod["terminationGracePeriodSeconds"] >= pause + drain + 15  # and an engine to end


def test_names_and_labels_agree():
    deployment, service = of("Deployment"), of("Service")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    for selector in (
        deployment["spec"]["selector"]["matchLabels"],
        service["spec"]["selector"],
        of("PodMonitor")["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    target = of("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert target["kind"] == "Deployment" and target["name"] == deployment["metadata"]["name"]
    keys = {v["secret"]["secretName"] for v in pods(deployment)[0]["volumes"] if "secret" in v}
    (endpoint,) = of("PodMonitor")["spec"]["podMetricsEndpoints"]
    assert keys == {endpoint["authorization"]["credentials"]["name"]}


@pytest.mark.parametrize(
    "kind, pod, container", containers(), ids=lambda v: v if v in IDS else None
)
def test_containers_may_do_little(kind, pod, container):
    context, own = pod["securityContext"], container["securityContext"]
    user = re.search(r"^USER (\d+):(\d+)$", CONTAINERFILE, re.M)
    assert context["runAsNonRoot"] is True and context["runAsUser"] == int(user[1]) > 0
    assert context["runAsGroup"] == int(user[2]) and context["seccompProfile"]
    assert own["allowPrivilegeEscalation"] is False and own["capabilities"] == {"drop": ["ALL"]}
    assert (
        own.get("readOnlyRootFilesystem") is True or kind == "RayService"
    )  # Ray writes where it is
    assert container["resources"]["requests"].keys() == {"cpu", "memory"}
    assert "memory" in container["resources"]["limits"]
    name, _, tag = container["image"].partition(":")
    assert tag == VERSION and f"-t {name}:{tag} " in CONTAINERFILE
    mounts = {each["mountPath"] for each in container["volumeMounts"]}
    assert {each["name"] for each in container["volumeMounts"]} <= {
        v["name"] for v in pod["volumes"]
    }
    assert "/cache" in mounts
    if own.get("readOnlyRootFilesystem"):
        assert "/tmp" in mounts
