"""The rules of docs/architecture.md that reading one file cannot check. Imports no jax."""

import ast
import collections
import functools
import importlib.util
import math
import re
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Nothing imports to its right.
LAYERS = ("configs", "sharding", "layers", "inference", "scripts", "tests")
PACKAGES = LAYERS[:4]

# Host decisions are integers: replayable, and the same on every host.
SCHEDULER = ("field_kinds", "request", "scheduling", "kv_pages")  # of inference/
SCHEDULER_NEVER = {
    *("jax", "jaxlib", "flax", "layers", "sharding"),
    *("time", "datetime", "random", "secrets", "uuid", "os"),
}

# The rooms of inference/, each of which imports those before it only.
ROOMS = (
    *(
        "files",
        "field_kinds",
        "request",
        "outputs",
        "classifier",
        "text",
        "kv_pages",
        "scheduling",
        "sampling",
    ),
    *(
        "speculation",
        "runtime",
        "families",
        "checkpoints",
        "new_weights",
        "adapters",
        "planner",
        "input_processor",
    ),
    *(
        "request_state",
        "open_requests",
        "request_batch",
        "prompt_reader",
        "prompt_runner",
        "alike",
        "prefill",
        "device_memory",
        "engine",
        "follower",
    ),
    *("layerwise", "training", "quantize", "prune"),
    *("http_client", "benchmark", "batches", "server"),
)

SERVER_ROOMS = ("protocol", "endpoints", "web", "replicas")  # of inference/server/, likewise

# These receive a sampler as an argument, so that each can be used without an engine.
ENGINELESS = ("checkpoints", "planner", "training", "quantize", "prune")

MEDIAN_LINES, P90_LINES, MAX_LINES, MAX_KERNEL_LINES, MAX_TEST_LINES = 150, 350, 500, 800, 600


# --- what is in the repository --------------------------------------------------------------------


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def dotted(path: Path) -> str:
    """'layers.norm' of layers/norm.py, 'layers' of layers/__init__.py."""
    return relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@functools.cache
def python_files() -> tuple[Path, ...]:
    return tuple(sorted(path for top in LAYERS for path in (ROOT / top).rglob("*.py")))


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@functools.cache
def module_file(name: str) -> Path | None:
    """The file of one of our modules ('layers.norm', or the package 'layers'); None for others."""
    if name.split(".")[0] not in LAYERS:
        return None
    base = ROOT.joinpath(*name.split("."))
    return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)


@functools.cache
def imports(path: Path) -> tuple[tuple[int, str], ...]:
    """(line, module) of every import in a file, wherever it stands.

    `from layers import norm` counts as `layers.norm`, `from jax import jit` as `jax`.
    """
    found = []
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = path.relative_to(ROOT).parent.parts
            parts = parts[: len(parts) + 1 - node.level] if node.level else ()
            base = ".".join([*parts, *(node.module or "").split(".")]).strip(".")
            leaves = [f"{base}.{alias.name}" for alias in node.names]
            found += [(node.lineno, leaf if module_file(leaf) else base) for leaf in leaves]
    return tuple(found)


def reach(path: Path) -> Iterator[tuple[str, str]]:
    """(module, how it is reached) for all that a file imports, through our own modules."""
    seen = {path}
    queue = collections.deque([(path, relative(path))])
    while queue:
        current, route = queue.popleft()
        for line, name in imports(current):
            yield name, f"{route}:{line}"
            for end in range(1, name.count(".") + 2):  # importing a.b.c runs a, a.b and a.b.c
                target = module_file(".".join(name.split(".")[:end]))
                if target is not None and target not in seen:
                    seen.add(target)
                    queue.append((target, f"{route}:{line} -> {relative(target)}"))


def is_below(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def report(rule: str, problems: list[str]) -> None:
    if problems:
        pytest.fail("\n  ".join([rule, *problems]), pytrace=False)


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def is_preset(path: Path) -> bool:
    """A file of `configs/` that fills in a model or a run and defines no type of its own."""
    nodes = list(ast.walk(parse(path)))
    return (
        relative(path).startswith("configs/")
        and not any(isinstance(node, ast.ClassDef) for node in nodes)
        and any(isinstance(node, ast.Call) and call_name(node).endswith("Config") for node in nodes)
    )


def call_name(node: ast.Call) -> str:
    return ast.unparse(node.func)


# --- imports --------------------------------------------------------------------------------------


def test_the_scan_finds_the_repository():
    tops = {relative(path).split("/")[0] for path in python_files()}
    assert tops >= {*PACKAGES, "tests"}, "the rules below would pass on an empty tree"


def test_imports_run_one_way():
    rank = {name: position for position, name in enumerate(LAYERS)}
    problems = []
    for path in python_files():
        own = relative(path).split("/")[0]
        for line, name in imports(path):
            other = name.split(".")[0]
            if rank.get(other, 0) > rank[own]:
                problems.append(f"{relative(path)}:{line} imports {name}")
    report(f"imports run {' -> '.join(LAYERS)}, never to the right:", problems)


def room_of(name: str) -> str:
    """'planner' of inference.planner.cost."""
    return name.split(".")[1]


def test_rooms_import_one_way():
    found = {room_of(dotted(p)) for p in python_files() if is_below(dotted(p), "inference")
             and dotted(p) != "inference"}  # fmt: skip
    assert found == set(ROOMS), "a room of inference/ has its place in ROOMS"
    problems = [
        f"{relative(path)}:{line} imports {name}"
        for path in python_files()
        if dotted(path).startswith("inference.")
        for line, name in imports(path)
        if name.startswith("inference.")
        and ROOMS.index(room_of(name)) > ROOMS.index(room_of(dotted(path)))
    ]
    report(f"rooms import {' -> '.join(ROOMS)}, never to the right:", problems)


def test_rooms_of_the_server_import_one_way():
    rooms = [f"inference.server.{name}" for name in SERVER_ROOMS]
    rank = {
        path: position
        for position, room in enumerate(rooms)
        for path in python_files()
        if is_below(dotted(path), room)
    }
    assert set(rank.values()) == {*range(len(rooms))}
    problems = [
        f"{relative(path)}:{line} imports {name}"
        for path, position in rank.items()
        for line, name in imports(path)
        if any(is_below(name, room) for room in rooms[position + 1 :])
    ]
    report(f"rooms of the server import {' -> '.join(SERVER_ROOMS)}, never to the right:", problems)


def test_checkpoint_formats_know_neither_each_other_nor_a_family():
    formats = [f"inference.checkpoints.{name}" for name in ("gguf", "hf", "native")]
    records = "inference.families.families", "inference.families.family"
    problems = []
    for path in python_files():
        home = next((name for name in formats if is_below(dotted(path), name)), None)
        for line, name in imports(path):
            is_foreign = any(is_below(name, other) for other in formats if other != home)
            is_family = is_below(name, "inference.families") and not (
                name.startswith(records) or is_below(name, "inference.families.shared")
            )
            if home and (is_foreign or (is_family and name != "inference.families")):
                problems.append(f"{relative(path)}:{line} imports {name}")
        problems += [
            f"{relative(path)}:{node.lineno} compares a family"
            for node in ast.walk(parse(path))
            if isinstance(node, ast.Compare)
            and is_below(dotted(path), "inference.checkpoints")
            and isinstance(node.left, ast.Attribute)
            and node.left.attr == "family"
            and any(isinstance(side, ast.Constant) for side in node.comparators)
        ]
    report("what one format or family needs stands with it:", problems)


def test_no_modules_import_each_other():
    problems = [
        f"{relative(path)} -> {route}"
        for path in python_files()
        for name, route in reach(path)
        if module_file(name) == path and path.name != "__init__.py"
    ]
    report("imports make no circles:", problems)


def test_configs_need_only_the_standard_library():
    problems = []
    for path in python_files():
        if not relative(path).startswith("configs/"):
            continue
        for line, name in imports(path):
            if name.split(".")[0] not in {*sys.stdlib_module_names, "configs"}:
                problems.append(f"{relative(path)}:{line} imports {name}")
    report("configs/ is plain data, standard library only:", problems)


@pytest.mark.parametrize("package", ENGINELESS)
def test_tools_never_reach_the_engine(package):
    problems = [
        f"{name} from {route}"
        for path in python_files()
        if is_below(dotted(path), f"inference.{package}")
        for name, route in reach(path)
        if is_below(name, "inference.engine") or is_below(name, "inference.server")
    ]
    report(f"inference/{package} takes a sampler as an argument, it imports no engine:", problems)


def scheduler_modules() -> list[str]:
    rooms = [f"inference.{name}" for name in SCHEDULER]
    found = map(dotted, python_files())
    return [name for name in found if any(is_below(name, room) for room in rooms)]


@pytest.mark.parametrize("module", scheduler_modules())
def test_the_scheduler_reaches_no_device_clock_or_dice(module):
    path = module_file(module)
    problems = [f"{n} from {r}" for n, r in reach(path) if n.split(".")[0] in SCHEDULER_NEVER]
    report("the scheduler's side is integers; clocks and measurements are arguments:", problems)


def test_the_scheduler_loads_without_jax():
    names = scheduler_modules()
    code = (
        f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    loaded = set(run.stdout.split()) & {"jax", "jaxlib", "flax", "layers", "sharding"}
    assert not loaded, f"importing {', '.join(names)} loads {', '.join(sorted(loaded))}"


def is_leaf(name: str) -> bool:
    target = module_file(name)
    return target is not None and target.name != "__init__.py"


def not_by_leaf(node: ast.AST) -> list[str]:
    """The imports in a node that name one of our packages where a module is due."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
        return [f"import {name}" for name in names if name.split(".")[0] in LAYERS]
    if not isinstance(node, ast.ImportFrom):
        return []
    origin = "." * node.level + (node.module or "")
    names = [alias.name for alias in node.names]
    if origin.split(".")[0] in LAYERS:
        names = [n for n in names if not is_leaf(origin) and not is_leaf(f"{origin}.{n}")]
    elif not node.level:
        return []
    return [f"from {origin} import {name}" for name in names]


def test_our_packages_are_imported_by_leaf():
    problems = [
        f"{relative(path)}:{getattr(node, 'lineno', 0)} {statement}"
        for path in python_files()
        for node in ast.walk(parse(path))
        for statement in not_by_leaf(node)
    ]
    report("write `from layers import norm`, one existing module of one package:", problems)


def test_init_files_import_nothing():
    problems = [
        f"{relative(path)}:{line} imports {name}"
        for path in python_files()
        if path.name == "__init__.py"
        for line, name in imports(path)
    ]
    report("no re-exports: an __init__.py holds a docstring or nothing:", problems)


def test_scripts_and_tests_are_no_packages():
    found = [relative(p) for p in python_files() if p.name == "__init__.py"]
    problems = [name for name in found if name.startswith(("scripts/", "tests/"))]
    report("scripts run with `python -m`, tests with --import-mode=importlib:", problems)


def test_packages_are_listed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = set(project["tool"]["setuptools"]["packages"])
    folders = {p.parent for p in python_files() if relative(p).split("/")[0] in PACKAGES}
    present = {relative(folder).replace("/", ".") for folder in folders}
    missing = [f for f in folders if not (f / "__init__.py").is_file()]
    report("a package needs an __init__.py:", [relative(f) for f in missing])
    report("[tool.setuptools] packages and the tree differ:", sorted(listed ^ present))


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_resolve_inside_the_repository(package):
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    assert Path(spec.origin).resolve().is_relative_to(ROOT), (
        f"another distribution's `{package}` hides ours: {spec.origin}; use a clean environment"
    )


# --- size -----------------------------------------------------------------------------------------


def budgeted_lines() -> list[int]:
    files = [p for p in python_files() if not relative(p).startswith("tests/")]
    return sorted(n for p in files if (n := num_lines(p)) >= 20 and not is_preset(p))


def test_the_median_file_is_short():
    median = statistics.median(budgeted_lines())
    assert median <= MEDIAN_LINES, f"the median file has {median} lines, over {MEDIAN_LINES}"


def test_few_files_are_long():
    lines = budgeted_lines()
    p90 = lines[math.ceil(0.9 * len(lines)) - 1]
    assert p90 <= P90_LINES, f"the 90th percentile is {p90} lines, over {P90_LINES}"


def test_no_file_is_too_long():
    problems = []
    for path in python_files():
        name = relative(path)
        limit = MAX_TEST_LINES if name.startswith("tests/") else MAX_LINES
        limit = MAX_KERNEL_LINES if name.startswith("layers/kernels/") else limit
        if num_lines(path) > limit:
            problems.append(f"{name} has {num_lines(path)} lines, over {limit}")
    report("move state with its behaviour into a collaborator:", problems)


# --- safety ---------------------------------------------------------------------------------------

CODE_LOADERS = {
    "pickle",
    "_pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
}
CODE_CALLS = {"eval", "exec", "__import__", "builtins.eval", "builtins.exec", "torch.load"}
CODE_SWITCHES = {"allow_pickle", "trust_remote_code"}


def runs_foreign_code(node: ast.AST) -> str | None:
    """What in this node could run code that came with data; None for nothing."""
    if isinstance(node, ast.Import):
        return next((a.name for a in node.names if a.name.split(".")[0] in CODE_LOADERS), None)
    if isinstance(node, ast.ImportFrom):
        names = {f"{node.module}.{alias.name}" for alias in node.names}
        bad = names & (CODE_CALLS | {"yaml.load", "yaml.unsafe_load", "yaml.full_load"})
        loader = (node.module or "").split(".")[0] in CODE_LOADERS
        return str(node.module) if loader else next(iter(bad), None)
    if isinstance(node, ast.Call):
        name = call_name(node)
        is_yaml = name.startswith("yaml.") and "load" in name and "safe_load" not in name
        return name if name in CODE_CALLS or is_yaml else None
    if isinstance(node, ast.keyword) and node.arg in CODE_SWITCHES:
        is_off = isinstance(node.value, ast.Constant) and node.value.value is False
        return None if is_off else f"{node.arg}={ast.unparse(node.value)}"
    return None


def test_nothing_runs_code_from_data():
    problems = [
        f"{relative(path)}:{getattr(node, 'lineno', 0)} {what}"
        for path in python_files()
        for node in ast.walk(parse(path))
        if (what := runs_foreign_code(node)) is not None
    ]
    report("no pickle, no eval, no remote code, anywhere:", problems)


def text_files() -> Iterator[Path]:
    """Committed text outside tests/, as far as a name tells."""
    yield from (p for p in python_files() if not relative(p).startswith("tests/"))
    for folder in (ROOT, ROOT / "docs", ROOT / ".ci", ROOT / ".github" / "workflows"):
        found = sorted(p for p in folder.glob("*") if p.is_file())
        yield from (p for p in found if p.suffix in {"", ".md", ".toml", ".lock", ".yml"})


def test_no_path_of_one_machine_is_written_down():
    pattern = re.compile(r"(?<![\w.~*/-])/(work|tmp|root|opt)/|file:///")
    problems = []
    for path in text_files():
        for number, line in enumerate(path.read_text("utf-8", errors="ignore").splitlines(), 1):
            if pattern.search(line):
                problems.append(f"{relative(path)}:{number} {line.strip()}")
    report("a path of one machine means nothing on another:", problems)


# --- dependencies ---------------------------------------------------------------------------------


def normalized(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\s<>=!~;\[]", requirement, maxsplit=1)[0]).lower()


@pytest.mark.parametrize(
    "lock, extras",
    [
        ("requirements.lock", ()),
        ("requirements-serve.lock", ("serve",)),
        ("requirements-ray.lock", ("serve", "ray")),
        ("requirements-gpu.lock", ("serve", "gpu")),
        ("requirements-tpu.lock", ("serve", "tpu")),
        ("requirements-test.lock", ("serve", "test")),
    ],
)
def test_the_lock_holds_what_is_declared(lock, extras):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = list(project["dependencies"])
    for extra in extras:
        declared += project["optional-dependencies"][extra]
    text = (ROOT / lock).read_text(encoding="utf-8")
    pins = re.findall(r"^(\S+)==\S+(?: ; [^\n]*?)? \\\n    --hash=sha256:", text, re.MULTILINE)
    loose = [line for line in text.splitlines() if not re.match(r"\S+==|    (--hash|#)|#|$", line)]
    missing = {normalized(name) for name in declared} - {normalized(pin) for pin in pins}
    report(f"{lock} has lines that are neither pins nor hashes; `make lock`:", loose)
    report(f"{lock} lacks declared dependencies; `make lock`:", sorted(missing))
