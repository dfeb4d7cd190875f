"""The rules of names, types and questions that no linter knows. Imports no jax."""

import ast
import collections
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_architecture import (
    dotted,
    is_below,
    num_lines,
    parse,
    python_files,
    relative,
    report,
)

# --- names ----------------------------------------------------------------------------------------

FILLERS = {
    *("asked", "each", "found", "given", "held", "kept", "known", "left", "made", "most", "named"),
    *("one", "others", "ours", "own", "placed", "rest", "said", "seen", "theirs", "told", "wanted"),
}
MAX_FILLERS = 0.003  # of a room's names


def names_of(path: Path) -> Iterator[str]:
    """What a file assigns to or defines, without leading underscores and letters of dimensions."""
    for node in ast.walk(parse(path)):
        name = None
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name.lower()
        if name is not None:
            yield re.sub(r"_[A-Z0-9]+$", "", name.lstrip("_"))


def test_names_say_what_they_hold():
    names, fillers = collections.Counter(), collections.defaultdict(list)
    for path in python_files():
        top, *below = relative(path).split("/")
        room = below[0].removesuffix(".py") if top == "inference" else top
        if room == "tests":
            continue
        for name in names_of(path):
            names[room] += 1
            fillers[room] += [f"{relative(path)} {name}"] * (name in FILLERS)
    problems = [
        f"{room}: {', '.join(places)}"
        for room, places in fillers.items()
        if len(places) > max(1, MAX_FILLERS * names[room])
    ]
    report("name a value for what it is, not by a filler:", problems)


# --- back ends ------------------------------------------------------------------------------------

PLATFORMS = {"cpu", "gpu", "tpu", "cuda"}
# Code that programs are traced from, and what chooses it.
TRACED = ("layers", *(f"inference.{room}" for room in ("runtime", "sampling", "speculation")))
MAY_ASK_THE_PLATFORM = {
    "layers/backends/": "says what each offers",
    "layers/kernels/device.py": "describes a device",
    "layers/kernels/attention/ffi_cpu.py": "`limit` says why it cannot run on a device",
    "layers/kernels/attention/gpu.py": "`limit` says why it cannot run on a device",
    "inference/runtime/serialization/key.py": "lists what files of a platform depend on",
}


def asks_the_platform(node: ast.AST) -> bool:
    """Whether a node compares with a platform's name, alone or among others, or looks it up."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        sides += [item for side in sides for item in getattr(side, "elts", ())]
    elif isinstance(node, ast.Dict):
        sides = [key for key in node.keys if key is not None]
    elif isinstance(node, ast.MatchValue):
        sides = [node.value]
    else:
        return isinstance(node, ast.Attribute) and node.attr in ("is_hopper", "default_backend")
    return any(isinstance(side, ast.Constant) and side.value in PLATFORMS for side in sides)


@pytest.mark.parametrize("question, asks", [
    ("device.platform == 'cpu'", True), ("'tpu' != platform", True),
    ("platform in ('gpu', 'tpu')", True), ("platform not in {'cpu'}", True),
    ("{'gpu': 1, 'tpu': 2}[platform]", True), ("{'gpu': 1}.get(platform)", True),
    ("device.is_hopper", True), ("jax.default_backend()", True),
    ("linear in ('ffi_cpu', 'reference')", False), ("backend.has_free_views", False),
])  # fmt: skip
def test_questions_about_the_platform_are_found(question, asks):
    assert any(map(asks_the_platform, ast.walk(ast.parse(question)))) == asks


def test_only_back_ends_ask_the_platform():
    problems, asking = [], set()
    for path in python_files():
        if not any(is_below(dotted(path), package) for package in TRACED):
            continue
        lines = [node.lineno for node in ast.walk(parse(path)) if asks_the_platform(node)]
        place = next((p for p in MAY_ASK_THE_PLATFORM if relative(path).startswith(p)), None)
        if place is None:
            problems += [f"{relative(path)}:{line}" for line in lines]
        elif lines:
            asking.add(place)
    report("ask `layers.backends.backends.current()` for what the target offers:", problems)
    report("no question is left in:", sorted(MAY_ASK_THE_PLATFORM.keys() - asking))


# --- types ----------------------------------------------------------------------------------------

MAX_ANY = 4.0  # lines per 1,000 of the product


def lines_with_any(path: Path) -> set[int]:
    """Lines whose annotations or expressions name `Any`; imports are none."""
    names = (node for node in ast.walk(parse(path)) if isinstance(node, ast.Name))
    return {node.lineno for node in names if node.id == "Any"}


def test_at_most_4_lines_in_1000_name_any():
    product = [
        p for p in python_files() if not relative(p).startswith(("tests/", "scripts/reports/"))
    ]
    rate = 1000 * sum(len(lines_with_any(p)) for p in product) / sum(map(num_lines, product))
    assert rate <= MAX_ANY, f"{rate:.2f} lines per 1,000 name Any, over {MAX_ANY}: name the type"


# --- leaves ---------------------------------------------------------------------------------------


def leaves() -> set[str]:
    """Names of the classes of weights and of all that derive from `CacheLeaf`."""
    names = {"Packed", "Quantized", "Observed", "CacheLeaf"}
    classes = [
        (node.name, {ast.unparse(base).split(".")[-1] for base in node.bases})
        for path in python_files()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ClassDef)
    ]
    while new := {name for name, bases in classes if bases & names} - names:
        names |= new
    return names


def test_nobody_tells_leaves_apart_in_turn():
    """A chain of questions about types is a method that a leaf lacks; assertions are none."""
    problems, types = [], leaves()
    for path in python_files():
        for function in ast.walk(parse(path)):
            if not isinstance(function, ast.FunctionDef):
                continue
            asserted = {
                id(node)
                for statement in ast.walk(function)
                if isinstance(statement, ast.Assert)
                for node in ast.walk(statement)
            }
            questions = [
                node
                for node in ast.walk(function)
                if isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "isinstance"
                and id(node) not in asserted
                and {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
                & types
            ]
            if len(questions) > 1:
                problems.append(f"{relative(path)}:{function.lineno} {function.name}")
    report("give the leaf a method:", problems)
