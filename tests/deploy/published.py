"""What is rendered against its publishers' own validators: `make test-manifests`.

    python -m tests.deploy.published           # prints what was checked; fails where one refuses

Runs in the environment of the suite, and asks for each kind of file an environment that has the
validator: Kubernetes' schemas (kubernetes-validate), SkyPilot's schemas and SkyPilot's and xpk's
own parsers, ShellCheck.
"""

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path

import yaml

from configs.errors import InputError
from configs.hardware import machines, targets
from scripts import launch
from scripts.launchers.launch import Launch

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = "1.34"

# Each reads a JSON list of documents or scripts from stdin and prints a JSON list of problems.
CHECKS = {
    "kubernetes": f"""
import json, sys, kubernetes_validate as k
def refused(document):
    try:
        k.validate(document, "{KUBERNETES}", strict=True)
    except k.ValidationError as error:
        return error.message
print(json.dumps([p for document in json.load(sys.stdin) if (p := refused(document))]))
""",
    "skypilot": """
import json, sys, jsonschema
from sky.utils import schemas
def refused(task):
    for part, schema in ((task, schemas.get_task_schema()),
                         (task["resources"], schemas.get_resources_schema())):
        yield from (e.message for e in jsonschema.Draft202012Validator(schema).iter_errors(part))
print(json.dumps([p for document in json.load(sys.stdin) for p in refused(document)]))
""",
    "xpk": """
import argparse, json, shlex, sys
from xpk.core.system_characteristics import UserFacingNameToSystemCharacteristics as systems
from xpk.parser.core import set_parser
problems = []
for script in json.load(sys.stdin):
    (line,) = [x for x in script.replace("\\\\\\n", "").splitlines() if x.startswith("xpk ")]
    parser = argparse.ArgumentParser()
    set_parser(parser)
    try:
        named = line.replace("$CLUSTER", "cluster").replace("$ZONE", "us-west4-a")
        args = parser.parse_args(shlex.split(named)[1:])
    except SystemExit:
        problems.append(line)
        continue
    if (args.tpu_type or args.device_type) not in systems:
        problems.append(args.tpu_type or args.device_type)
print(json.dumps(problems))
""",
    "shell": """
import json, subprocess, sys
from pathlib import Path
tool = Path(sys.executable).with_name("shellcheck")
run = lambda text: subprocess.run([tool, "--shell=bash", "-"], input=text, text=True,
                                  capture_output=True)
print(json.dumps([r.stdout for text in json.load(sys.stdin) if (r := run(text)).returncode]))
""",
}


def rendered(name: str, on: str, app: str) -> str | None:
    """What a launcher renders; None where it refuses."""
    run = importlib.import_module(f"configs.runs.{name}").RUN
    hosts = machines.hosts_of(targets.parse(run.target), run.hosts)
    words = [f"scripts.{app}", f"--config=configs/runs/{name}.py", "--model=gs://bucket/folder"]
    if app == "generate":
        words += ["--input=gs://bucket/prompts.jsonl", "--output=gs://bucket/answers.jsonl"]
    image = f"registry.example/ridgeline-{hosts.target.platform}:{launch.TAG}"
    what = Launch(name, app, hosts, tuple(words), image, 1e11, False, {"NCCL_DEBUG": "WARN"})
    try:
        return launch._LAUNCHERS[on][0](what).text(["a plan"])
    except InputError:
        return None


def parts(on: str, text: str) -> list[tuple[str, object]]:
    """(validator, document or script) of one file; a LeaderWorkerSet's and a JobSet's pods as
    templates, because they themselves are no part of Kubernetes.
    """
    if on not in ("gke", "kubernetes", "skypilot"):
        return [("shell", text), *([("xpk", text)] if on == "xpk" else [])]
    documents = list(yaml.safe_load_all(text))
    if on == "skypilot":
        scripts = (f"#!/usr/bin/env bash\n{task[part]}" for task in documents
                   for part in ("setup", "run"))  # fmt: skip
        return [*(("skypilot", task) for task in documents), *(("shell", s) for s in scripts)]
    found = []
    for document in documents:
        if document["kind"] == "LeaderWorkerSet":
            group = document["spec"]["leaderWorkerTemplate"]
            pods = [group["leaderTemplate"], group["workerTemplate"]]
        elif document["kind"] == "JobSet":
            jobs = document["spec"]["replicatedJobs"]
            found += [("kubernetes", {"apiVersion": "batch/v1", "kind": "Job", **job["template"]})
                      for job in jobs]  # fmt: skip
            continue
        else:
            found.append(("kubernetes", document))
            continue
        found += [("kubernetes", {"apiVersion": "v1", "kind": "PodTemplate", "template": pod})
                  for pod in pods]  # fmt: skip
    return found


def main() -> int:
    """Checks every run on everything that starts it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in CHECKS:
        parser.add_argument(f"--{name}", required=True, help=f"Python that has {name}'s validator")
    pythons = vars(parser.parse_args())
    found: dict[str, list[object]] = {name: [] for name in CHECKS}
    for run in launch._placed_runs():
        for on in launch._LAUNCHERS:
            for app in ("serve", "generate", "bench"):
                for name, part in parts(on, text) if (text := rendered(run, on, app)) else ():
                    found[name].append(part)
    status = 0
    for name, each in found.items():
        ran = subprocess.run(
            [pythons[name], "-c", CHECKS[name]],
            input=json.dumps(each),
            capture_output=True,
            text=True,
        )
        problems = json.loads(ran.stdout.splitlines()[-1]) if ran.returncode == 0 else [ran.stderr]
        print(f"{name}: {len(each)} checked, {len(problems)} refused", *problems[:5], sep="\n  ")
        status |= bool(problems or not each)
    return status


if __name__ == "__main__":
    sys.exit(main())
