"""`scripts.launch`: every run on everything that starts it, and what it refuses."""

import functools
import itertools
import json
import re
import subprocess
import sys

import pytest
import yaml

from configs.hardware import machines, targets
from inference.planner import placement
from scripts import launch as script
from scripts.launchers.rendered import Raw
from scripts.launchers.rendered import script as shell_script
from scripts.reports import runs
from tests.deploy import resources
from tests.scripts import apps

RUNS = script._placed_runs()
ON = list(script._LAUNCHERS)
GPU_RUNS = [run for run in RUNS if run.startswith("h")]
VALID = [
    (run, on, app)
    for run, on, app in itertools.product(RUNS, ON, ("serve", "bench"))
    if not (on == "xpk" and (app == "serve" or run in ("h100_llama8b", "h100_gpt_oss_120b")))
    and not (run in GPU_RUNS and on == "tpu-vm")
    and not (run not in GPU_RUNS and on in ("kubernetes", "slurm"))
]


_PLACE = functools.cache(placement.place)  # of a run once, whatever starts it


@pytest.fixture
def run(monkeypatch, capfd):
    monkeypatch.setattr(placement, "place", _PLACE)
    return lambda *args: apps.call(script, monkeypatch, capfd, *args)


def printed(run, name: str, on: str, *more: str) -> str:
    ran = run(f"--config=configs/runs/{name}.py", f"--on={on}", "--print", *more)
    assert ran.status == 0 and ran.err == "", ran
    return ran.out


def loaded(run, name: str, on: str, *more: str) -> list[dict]:
    return list(yaml.safe_load_all(printed(run, name, on, *more)))


def source(run, name: str, on: str, app: str) -> str:
    more = ["--model=gs://weights/model"] if on == "tpu-vm" else []
    return printed(run, name, on, f"--app={app}", *more)


def test_there_are_runs_on_all_kinds_of_chips():
    assert len(RUNS) >= 11 and len(GPU_RUNS) >= 5
    assert {name.split("_")[0] for name in RUNS} >= {"h100", "h100x8", "h100x16", "h200x8", "v5e",
                                                     "v5p", "v6e"}  # fmt: skip


@pytest.mark.parametrize("name, on, app", VALID, ids="-".join)
def test_what_is_rendered_is_valid(run, name, on, app):
    """Kubernetes' resources by their schemas, scripts by Bash, each behind its plan."""
    text = source(run, name, on, app)
    assert "# requests of 2,048 + 256 tokens, predicted (uncalibrated):" in text
    if on in ("gke", "kubernetes"):
        documents = list(yaml.safe_load_all(text))
        assert [problem for each in documents for problem in resources.problems(each)] == []
        assert "&id" not in text
    elif on == "skypilot":
        (task,) = yaml.safe_load_all(text)
        for part in ("setup", "run"):
            subprocess.run(["bash", "-n"], input=task[part], text=True, check=True)
        assert f"scripts.{app}" in task["run"]
    else:
        assert text.startswith("#!/usr/bin/env bash\n") and "\nset -euo pipefail\n" in text
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def pods_of(document: dict) -> list[dict]:
    spec = document["spec"]
    match document["kind"]:
        case "Deployment" | "Job":
            return [spec["template"]["spec"]]
        case "JobSet":
            (job,) = spec["replicatedJobs"]
            return [job["template"]["spec"]["template"]["spec"]]
        case "LeaderWorkerSet":
            templates = spec["leaderWorkerTemplate"]
            return [templates[f"{role}Template"]["spec"] for role in ("leader", "worker")]
    return []


_SLICES = {  # label, topology, hosts, chips of each
    "v5e_8_llama8b": ("tpu-v5-lite-podslice", "2x4", 1, 8),
    "v6e_8_llama70b": ("tpu-v6e-slice", "2x4", 1, 8),
    "v5p_32_qwen3_235b": ("tpu-v5p-slice", "2x2x4", 4, 4),
    "v5p_64_deepseek_v32": ("tpu-v5p-slice", "2x4x4", 8, 4),
}


@pytest.mark.parametrize("name", _SLICES)
@pytest.mark.parametrize("app", ["serve", "bench"])
def test_a_slice_has_its_nodes_and_hosts(run, name, app):
    label, topology, hosts, chips = _SLICES[name]
    document = loaded(run, name, "gke", f"--app={app}")[0]
    kinds = {("serve", False): "Deployment", ("serve", True): "LeaderWorkerSet",
             ("bench", False): "Job", ("bench", True): "JobSet"}  # fmt: skip
    assert document["kind"] == kinds[app, hosts > 1]
    for pod in pods_of(document):
        assert pod["nodeSelector"] == {
            "cloud.google.com/gke-tpu-accelerator": label,
            "cloud.google.com/gke-tpu-topology": topology,
        }
        (container,) = pod["containers"]
        assert container["resources"]["limits"] == {"google.com/tpu": chips}
    if hosts > 1:
        (annotation,) = document["metadata"]["annotations"].values()
        assert annotation == "cloud.google.com/gke-nodepool"
        spec = document["spec"]
        if app == "serve":
            assert spec["leaderWorkerTemplate"]["size"] == hosts
        else:
            job = spec["replicatedJobs"][0]["template"]["spec"]
            assert job["parallelism"] == job["completions"] == hosts


def test_only_the_host_with_http_is_probed_and_reached(run):
    leader_worker_set, service = loaded(run, "h100x16_deepseek_v32", "kubernetes")
    leader, worker = (pod["containers"][0] for pod in pods_of(leader_worker_set))
    assert {"startupProbe", "livenessProbe", "readinessProbe"} <= leader.keys() - worker.keys()
    labels = leader_worker_set["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["metadata"][
        "labels"
    ]
    selector = service["spec"]["selector"]
    assert selector.pop("leaderworkerset.sigs.k8s.io/worker-index") == "0" and selector == labels


@pytest.mark.parametrize("name, on", [("h100_llama8b", "kubernetes"), ("v5p_64_llama70b", "gke")])
def test_pods_may_do_little_and_have_time_to_drain(run, name, on):
    for document in loaded(run, name, on):
        for pod in pods_of(document):
            (container,) = pod["containers"]
            assert pod["securityContext"]["runAsNonRoot"] is True
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] and context["capabilities"] == {
                "drop": ["ALL"]
            }
            drain = next(a for a in container["args"] if a.startswith("--drain_timeout="))
            assert pod["terminationGracePeriodSeconds"] >= int(drain.partition("=")[2]) + 20
            mounts = {mount["name"] for mount in container["volumeMounts"]}
            assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_options_reach_what_is_rendered(run):
    (deployment, _) = loaded(
        run, "h100_llama8b", "gke", "--spot", "--claim=weights", "--env=NCCL_DEBUG=WARN",
        "--image=registry.example/ridgeline-gpu@sha256:" + "0" * 64, "--model=gs://bucket/llama",
        "--set=engine.max_seqs=8",
    )  # fmt: skip
    (pod,) = pods_of(deployment)
    (container,) = pod["containers"]
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert {"name": "NCCL_DEBUG", "value": "WARN"} in container["env"]
    assert {"claimName": "weights"} in [v.get("persistentVolumeClaim") for v in pod["volumes"]]
    assert container["image"].startswith("registry.example/")
    assert {"--model=gs://bucket/llama", "--set=engine.max_seqs=8"} <= set(container["args"])
    sbatch = printed(run, "h100x16_deepseek_v32", "slurm", "--env=A=b c")
    assert "#SBATCH --nodes=2\n" in sbatch and "export 'A=b c'" in sbatch


def test_hosts_without_a_scheduler_that_is_known_get_their_flags(run):
    (task,) = loaded(run, "h100x16_deepseek_v32", "skypilot")
    assert task["num_nodes"] == 2 and '--host_index="$SKYPILOT_NODE_RANK"' in task["run"]
    (task,) = loaded(run, "v5p_32_qwen3_235b", "skypilot")
    assert task["num_nodes"] == 1 and "--hosts" not in task["run"]
    assert task["resources"]["accelerators"] == "tpu-v5p-32:1"
    assert '--host_index="${1:?' in printed(run, "h100x16_deepseek_v32", "local")


def test_the_plan_alone(run):
    ran = run("--config=configs/runs/h100_llama8b.py", "--price=2.5", "--json")
    plan = json.loads(ran.out)
    assert plan["total_bytes"] <= plan["memory"]["memory_bytes"]
    assert plan["busy"]["tpot_s"] > plan["alone"]["tpot_s"] and plan["dollars_per_million"] > 0
    shown = run("--config=configs/runs/h100_llama8b.py", "--on=gke").out
    assert "TTFT" in shown and "kubectl apply" in shown and "apiVersion" not in shown


def test_the_table_of_runs_is_up_to_date():
    page = (apps.ROOT / "docs" / "runs.md").read_text("utf-8")
    compiled = json.loads((apps.ROOT / "docs" / "runs.json").read_text("utf-8"))
    assert set(compiled) <= set(RUNS) == runs.placed().keys()
    for name, run in runs.placed().items():
        assert f"| {' | '.join(runs.row(name, run, compiled.get(name)))} |\n" in page, (
            "stale: python -m scripts.reports.runs"
        )


def test_it_loads_no_jax():
    code = "import sys, scripts.launch; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=apps.ROOT).returncode == 0


def test_images_have_this_version():
    version = re.search(r'^version = "(.*)"', (apps.ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert version == script.TAG


_RUN = "--config=configs/runs/h100_llama8b.py"
_REFUSED = {
    "no run": ([], "--config names the run"),
    "no chips": (["--config=laptop_mesh"], "names no chips; valid: h100_gpt_oss_120b"),
    "print": ([_RUN, "--print"], "--print needs --on: gke, kubernetes"),
    "app": ([_RUN, "--on=xpk"], "valid: --app=generate or bench"),
    "part of a host": ([_RUN, "--on=xpk", "--app=bench"], "whole hosts of 8 GPUs"),
    "TPUs elsewhere": (["--config=v5e_8_llama8b", "--on=kubernetes"], "valid: --on=gke"),
    "TPUs on Slurm": (["--config=v5e_8_llama8b", "--on=slurm"], "valid: --on=gke"),
    "GPUs": ([_RUN, "--on=tpu-vm"], "has no TPUs"),
    "disk": (["--config=v6e_8_llama70b", "--on=tpu-vm"], "valid: --model=gs://BUCKET/FOLDER"),
    "spot": ([_RUN, "--on=slurm", "--spot"], "it goes with gke, tpu-vm, skypilot"),
    "image": ([_RUN, "--on=gke", "--image=ridgeline"], "has no tag; valid: ridgeline:0.2.0"),
    "env": ([_RUN, "--on=gke", "--env=A"], "--env is like NCCL_SOCKET_IFNAME=eth0"),
    "files": ([_RUN, "--on=gke", "--app=generate"], "needs --input and --output"),
    "no files": ([_RUN, "--on=gke", "--input=a"], "go with --app=generate"),
    "cache": ([_RUN, "--set=engine.cache.cache_bytes=90000000000"],
              "llama3-8b does not fit h100 (one chip): weights 15.0"),
    "weights": (["--config=h100_gpt_oss_120b", "--set=engine.weights=bfloat16"],
                "valid: more than 3 devices, or engine.weights of fewer bits"),
    "mesh": ([_RUN, "--set=mesh.model=2"], "mesh model=2 is 2 devices, --target=h100 has 1"),
    "long": ([_RUN, "--context=8000", "--new_tokens=500"], "engine.max_context is 8192"),
    "price": ([_RUN, "--price=-1"], "--price is a number of dollars"),
    "another flag": ([_RUN, "--weights=int8"], "launch does not read --weights"),
}  # fmt: skip


@pytest.mark.parametrize("case", _REFUSED)
def test_refused(run, case):
    args, message = _REFUSED[case]
    assert message in run(*args).error


_HOSTS = {  # hosts, chips of each, machine, Google's name
    "v5e:1x1": (1, 1, "ct5lp-hightpu-1t", "v5litepod-1"),
    "v5e:2x4": (1, 8, "ct5lp-hightpu-8t", "v5litepod-8"),
    "v5e:4x4": (4, 4, "ct5lp-hightpu-4t", "v5litepod-16"),
    "v6e:2x2": (1, 4, "ct6e-standard-4t", "v6e-4"),
    "v5p:2x2x1": (1, 4, "ct5p-hightpu-4t", "v5p-8"),
    "v5p:2x4x4": (8, 4, "ct5p-hightpu-4t", "v5p-64"),
    "tpu7x:2x2x2": (2, 4, "tpu7x-standard-4t", "tpu7x-16"),
    "8xh200": (1, 8, "a3-ultragpu-8g", "H200-8"),
    "24xh100": (3, 8, "a3-highgpu-8g", "H100-24"),
}


@pytest.mark.parametrize("name", _HOSTS)
def test_hosts_of_a_target(name):
    hosts = machines.hosts_of(targets.parse(name))
    assert (hosts.count, hosts.chips, hosts.machine, hosts.accelerator_type) == _HOSTS[name]


def test_other_hosts():
    two = machines.hosts_of(targets.parse("v5e:2x4"), 2)
    assert (two.count, two.chips, two.machine) == (2, 4, "ct5lp-hightpu-4t")
    with pytest.raises(ValueError, match="hosts=4: v5e:2x4 is on 1 or 2"):
        machines.hosts_of(targets.parse("v5e:2x4"), 4)
    with pytest.raises(ValueError, match="no cloud offers it"):
        machines.hosts_of(targets.parse("cpu"))


def test_words_are_quoted_where_they_stand():
    long = ["echo", *["a b"] * 40, Raw('"$HOME"')]
    text = shell_script([long]).text(["a plan"])
    ran = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith(" ".join(["a b"] * 40)) and "$HOME" not in ran.stdout
    assert max(map(len, text.splitlines())) <= 104
