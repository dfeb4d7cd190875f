"""What starts a run on cloud accelerators: python -m scripts.launch --config=configs/runs/NAME.py.

Shows the run's plan; with --on and --print a manifest or a script that starts it. It starts nothing
by itself, and loads no JAX.
"""

from scripts import interrupts  # noqa: F401

# isort: split
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from absl import flags

from configs import overrides, presets
from configs.engine import Config
from configs.errors import InputError
from configs.hardware import machines, targets
from configs.hardware.machines import Hosts
from configs.recipes import run as runs
from configs.recipes.run import Run
from inference.planner import placement, weights
from inference.planner.placement import Placement
from scripts import common
from scripts.flags import output_flag, placement_flags, price_flag, shared_flags
from scripts.flags.requests import input_flags
from scripts.launchers import gke, kubernetes, local, skypilot, slurm, tpu_vm, xpk
from scripts.launchers.launch import Launch
from scripts.launchers.rendered import Rendered
from scripts.reports import launch_text

_LAUNCHERS: Mapping[str, tuple[Callable[[Launch], Rendered], tuple[str, ...]]] = {
    "gke": (gke.render, gke.READS),
    "kubernetes": (kubernetes.render, kubernetes.READS),
    "tpu-vm": (tpu_vm.render, tpu_vm.READS),
    "skypilot": (skypilot.render, skypilot.READS),
    "xpk": (xpk.render, xpk.READS),
    "slurm": (slurm.render, slurm.READS),
    "local": (local.render, local.READS),
}
TAG = "0.2.0"  # of images: this program's version
_APPS = "serve", "generate", "bench"

_ON = flags.DEFINE_enum("on", None, list(_LAUNCHERS), "What starts it.")
_PRINT = flags.DEFINE_bool("print", False, "Print the file that --on takes, nothing else.")
_APP = flags.DEFINE_enum("app", "serve", _APPS, "The app that runs.")
_IMAGE = flags.DEFINE_string(
    "image", None, "Image with its tag, where the hosts get it: REGISTRY/ridgeline-tpu:0.2.0."
)
_SPOT = flags.DEFINE_bool("spot", False, "Machines that may be taken away, for less.")
_CLAIM = flags.DEFINE_string(
    "claim", None, "PersistentVolumeClaim for weights and compiled programs; default: a local disk."
)
_ENV = flags.DEFINE_multi_string("env", [], "NAME=VALUE, a variable of the process (repeatable).")
_PRICE, _INPUT, _OUTPUT = price_flag.PRICE, input_flags.INPUT, output_flag.OUTPUT
_CONTEXT, _NEW_TOKENS = placement_flags.CONTEXT, shared_flags.NEW_TOKENS
for _module in (common, input_flags, output_flag, placement_flags, price_flag, shared_flags):
    flags.adopt_module_key_flags(_module)

_FLAGS = ("config", "model", "set", "on", "print", "app", "image", "spot", "claim", "env", "price",
          "input", "output", "context", "new_tokens", "json")  # fmt: skip
_USUAL_CONTEXT, _USUAL_TOKENS = 2048, 256


def main(_: Sequence[str]) -> None:
    common.check_flags("launch", {"launch": _FLAGS})
    run = common.named_run()
    if run is None:
        raise InputError("--config names the run: configs/runs/NAME.py")
    name = Path(str(flags.FLAGS["config"].value)).stem
    if run.target is None:
        raise InputError(f"--config={name}: names no chips; valid: {', '.join(_placed_runs())}")
    target = targets.parse(run.target)
    hosts = machines.hosts_of(target, run.hosts)
    config = planned(run)
    context = shared_flags.whole_number(_CONTEXT) if _CONTEXT.present else _USUAL_CONTEXT
    new_tokens = _NEW_TOKENS.value if _NEW_TOKENS.present else _USUAL_TOKENS
    plan = placement.place(config, target, context, new_tokens, price_flag.price())
    if _ON.value is None:
        if _PRINT.value:
            raise InputError(f"--print needs --on: {', '.join(_LAUNCHERS)}")
        return _show(launch_text.lines(config, hosts, plan), plan, config)
    render, reads = _LAUNCHERS[_ON.value]
    for flag in (_IMAGE, _SPOT, _CLAIM):
        if flag.present and flag.name not in reads:
            readers = ", ".join(on for on, (_, read) in _LAUNCHERS.items() if flag.name in read)
            raise InputError(
                f"--on={_ON.value} does not read --{flag.name}: it goes with {readers}"
            )
    rendered = render(_launch(name, config, hosts))
    lines = launch_text.lines(config, hosts, plan)
    if _PRINT.value:
        print(rendered.text(lines), end="")
    else:
        _show([*lines, *rendered.steps, "with --print: the file"], plan, config)


def _placed_runs() -> list[str]:
    """The files of `configs/runs` that name chips."""
    folder = Path(__file__).resolve().parents[1] / "configs" / "runs"
    return sorted(path.stem for path in folder.glob("*.py") if "target=" in path.read_text("utf-8"))


def planned(run: Run) -> Config:
    """The configuration of a run with --set applied, and the formats of its weights. Raises
    InputError if its model is no preset.
    """
    config = Config(presets.get(run.model).config, run.engine, run.mesh, run.prefill)
    return runs.stored(overrides.apply(config, common.settings_asked()), run.published)


def _launch(name: str, config: Config, hosts: Hosts) -> Launch:
    words = [f"scripts.{_APP.value}", f"--config=configs/runs/{name}.py"]
    if flags.FLAGS["model"].present:
        words.append(f"--model={flags.FLAGS['model'].value}")
    words += [f"--set={setting}" for setting in common.settings_asked()]
    if _APP.value == "generate":
        if not _INPUT.value or not _OUTPUT.value:
            raise InputError("--app=generate needs --input and --output, which the hosts can reach")
        words += [f"--input={_INPUT.value}", f"--output={_OUTPUT.value}"]
    elif _INPUT.present or _OUTPUT.present:
        raise InputError("--input and --output go with --app=generate")
    image = _IMAGE.value or f"ridgeline-{hosts.target.platform}:{TAG}"
    if not re.fullmatch(r"[\w.:/-]+(:[\w.-]+|@sha256:[0-9a-f]{64})", image, re.ASCII):
        raise InputError(f"--image={image[:200]}: has no tag; valid: {image[:200]}:{TAG}")
    return Launch(
        name, _APP.value, hosts, tuple(words), image, weights.weight_bytes(config.model),
        not str(flags.FLAGS["model"].value).startswith(("gs://", "s3://")), _variables(),
        _SPOT.value, _CLAIM.value,
    )  # fmt: skip


def _variables() -> dict[str, str]:
    variables = {}
    for setting in _ENV.value:
        name, equals, value = setting.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise InputError(f"--env is like NCCL_SOCKET_IFNAME=eth0, not {setting[:80]!r}")
        variables[name] = value
    return variables


def _show(lines: Sequence[str], plan: Placement, config: Config) -> None:
    if common.JSON.value:
        common.print_json(launch_text.as_json(plan), config)
    else:
        print("\n".join(lines))


if __name__ == "__main__":
    common.run(main)
