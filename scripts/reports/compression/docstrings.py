"""A text that every installation has: the docstrings of its packages."""

import ast
import contextlib
import sysconfig
import warnings
from pathlib import Path

_LEAST_CHARS = 200  # of a docstring
_NO_TEXT = "pip", "setuptools"  # of no lock, so of any version


def of_packages() -> str:
    """All docstrings of the environment's packages, each once, in the order of files' names."""
    root = Path(sysconfig.get_paths()["purelib"])
    texts: dict[str, None] = {}
    for path in sorted(root.rglob("*.py")):
        if path.relative_to(root).parts[0] in _NO_TEXT:
            continue
        with warnings.catch_warnings(), contextlib.suppress(SyntaxError, ValueError, OSError):
            warnings.simplefilter("ignore")
            texts |= dict.fromkeys(_of_module(ast.parse(path.read_bytes())))
    return "\n\n".join(texts)


def _of_module(module: ast.Module) -> list[str]:
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    nodes = (node for node in ast.walk(module) if isinstance(node, kinds))
    texts = (ast.get_docstring(node) or "" for node in nodes)
    return [text for text in texts if len(text) >= _LEAST_CHARS]
