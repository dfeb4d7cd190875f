"""Mutants of the host's code, and the share of them that the suite's tests find.

    make mutants [MUTANTS_ARGS="--sample=40 --groups=scheduling,kv_pages --seed=7"]

Each mutant is one change of one operator, comparison, number or loop (cosmic-ray's), made in a copy
of the repository, where the tests of its package then run until one fails. Mutants are drawn at
random: every seed tries others. Exit status 1 says that fewer than 92 % of a group were found.
"""

import argparse
import functools
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cosmic_ray.plugins
from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.ast.ast_query import ASTQuery
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_item import MutationSpec
from parso.tree import NodeOrLeaf

ROOT = Path(__file__).resolve().parents[1]
_TESTS = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider")
_REQUIRED = 0.92
# `|` stands in annotations, which nothing evaluates or which fail while they are imported. Between
# None, enums, short strings and small integers, which are one object each, `==` and `is` are equal.
_EXCLUDED = re.compile("BitOr|_(Eq_Is|Is_Eq|NotEq_IsNot|IsNot_NotEq)$")
_DEFINED = re.compile(r"^(?:async def|def|class) (\w+)", re.MULTILINE)
_NUM_NEAREST = 3  # files of tests before all others
_AUDIT = "check_integrity"  # is a proof itself: tests call it, and nothing else does
_NO_EFFECT = "@abstractmethod"  # refuses a class that forgot a method, which no module has


@dataclass(frozen=True)
class Group:
    """Packages that are changed together.

    Attributes:
        sources: folders of the code.
        tests: files and folders of the tests that are to find its mutants, the quickest first.
    """

    sources: tuple[str, ...]
    tests: tuple[str, ...]


_T = "tests/inference"
_S = f"{_T}/scheduling"
_QUICK = ("policies", "scheduler", "step_shapes", "sequence", "admission_control")
_ENGINE = (f"{_T}/test_request_state.py", f"{_T}/test_engine.py")
GROUPS = {
    "scheduling": Group(
        ("inference/scheduling",),
        (
            *(f"{_S}/test_{name}.py" for name in _QUICK), _S, f"{_T}/kv_pages", *_ENGINE,
        ),
    ),
    "kv_pages": Group(("inference/kv_pages",), (f"{_T}/kv_pages", f"{_T}/scheduling")),
    "server": Group(("inference/server",), (f"{_T}/server", "tests/scripts/test_serve.py")),
    "sampling": Group(
        ("inference/sampling",), (f"{_T}/sampling", f"{_T}/runtime/test_step.py")
    ),
    "speculation": Group(
        ("inference/speculation",), (f"{_T}/speculation", f"{_T}/test_speculation.py")
    ),
}  # fmt: skip


def mutants(sources: tuple[str, ...]) -> Iterator[MutationSpec]:
    """All mutants of the packages of a group."""
    for path in sorted(path for source in sources for path in (ROOT / source).rglob("*.py")):
        nodes = list(ast_nodes(get_ast_from_path(path)))
        for name in cosmic_ray.plugins.operator_names():
            operator = cosmic_ray.plugins.get_operator(name)
            if operator.arguments() or _EXCLUDED.search(name):
                continue
            places = (
                (node, *span) for node in nodes for span in operator().mutation_positions(node)
            )
            for occurrence, (node, start, end) in enumerate(places):
                if not _is_excluded(node):
                    yield MutationSpec(path.relative_to(ROOT), name, occurrence, start, end)


def _is_excluded(node: NodeOrLeaf) -> bool:
    """Whether no test is to see a node's mutants: an error's text, whose figures are for people, is
    excluded like audits and what has no effect.
    """
    is_message = node.search_ancestor("fstring") and node.search_ancestor("raise_stmt")
    is_audit = ASTQuery(node).get_definition_name() == _AUDIT
    return bool(is_message or is_audit or node.get_code().strip() == _NO_EFFECT)


def command(group: Group, module: Path | None = None) -> list[str]:
    """What finds the mutants of a group; those of one module, the files that name it most first."""
    nearest = _nearest(group, module) if module else []
    return [str(ROOT / ".venv" / "bin" / "python"), *_TESTS, *nearest, *group.tests]


@functools.cache
def _nearest(group: Group, module: Path) -> list[str]:
    names = {module.stem, *_DEFINED.findall((ROOT / module).read_text())}
    pattern = re.compile(rf"\b({'|'.join(names)})\b")
    paths = {path for test in group.tests for path in _test_files(ROOT / test)}
    num_mentions = {path: len(pattern.findall(path.read_text())) for path in sorted(paths)}
    first = sorted(paths, key=lambda path: (-num_mentions[path], path))[:_NUM_NEAREST]
    return [str(path.relative_to(ROOT)) for path in first if num_mentions[path]]


def _test_files(path: Path) -> Iterator[Path]:
    return path.rglob("test_*.py") if path.is_dir() else iter([path])


def unmutated_s(command: list[str]) -> float:
    """Seconds that the tests take in this process's copy of the repository, where they pass."""
    began_at = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began_at


def trial(arguments: tuple[MutationSpec, str, float]) -> tuple[bool, str] | None:
    """Whether the tests find a mutant in this process's copy of the repository, and its diff; None
    where cosmic-ray cannot write it, as for an exception of a dotted name.

    Args:
        arguments: the mutant, the command that runs the tests, and the seconds that it may take.
    """
    mutant, test_command, limit_s = arguments
    result = mutate_and_test([mutant], test_command, limit_s)
    return (bool(result.is_killed), result.diff) if result.diff else None


def _enter_copy(folder: str) -> None:
    copy = Path(folder) / str(os.getpid())
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist")
    shutil.copytree(ROOT, copy, ignore=ignored, symlinks=True)
    os.chdir(copy)
    # What the tests of one mutant have compiled, those of the others do not compile again.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(folder) / "compiled")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"


def main() -> None:
    """Tries a sample of each group's mutants and prints those that survive."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sample", type=int, default=50, help="Mutants of each group.")
    parser.add_argument("--seed", type=int, default=int(time.time() // 86_400), help="Of the draw.")
    parser.add_argument("--groups", default=",".join(GROUPS), help="Their names.")
    parser.add_argument("--workers", type=int, default=2, help="Processes that try mutants.")
    flags = parser.parse_args()

    is_short = False
    for name in flags.groups.split(","):
        group, pool = GROUPS[name], list(mutants(GROUPS[name].sources))
        sample = random.Random(flags.seed).sample(pool, min(flags.sample, len(pool)))
        with (
            tempfile.TemporaryDirectory() as folder,
            multiprocessing.Pool(flags.workers, _enter_copy, (folder,)) as workers,
        ):
            limit_s = 60 + 4 * workers.apply(unmutated_s, (command(group),))
            arguments = [
                (mutant, " ".join(command(group, mutant.module_path)), limit_s) for mutant in sample
            ]
            results = []
            for is_found, diff in filter(None, workers.imap_unordered(trial, arguments)):
                results.append(is_found)
                if not is_found:
                    print(diff, flush=True)
        share = sum(results) / len(results)
        is_short |= share < _REQUIRED
        print(
            f"{name}: {share:.0%} of {len(results)} mutants found (bar {_REQUIRED:.0%}; "
            f"{len(pool)} in all, seed {flags.seed})",
            flush=True,
        )
    sys.exit(is_short)


if __name__ == "__main__":
    main()
