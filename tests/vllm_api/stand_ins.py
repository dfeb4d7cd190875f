"""Modules in place of vLLM's, so that tests of its server can be imported without it.

Names that no test of a server needs are `Absent`: a test that uses one is skipped, and names it.
"""

import importlib.abc
import importlib.machinery
import sys
import types

import pytest

# Packages that tests import at their top and use in process only.
PACKAGES = ("vllm", "torch", "transformers", "openai_harmony", "gpt_oss", "mcp", "lm_eval")


class Absent:
    """A class, function or constant of a package that is not here."""

    is_collecting = True  # calls at the top of a module, whose other tests may need nothing of it

    def __init__(self, name: str):
        vars(self)["__name__"] = name

    def __setattr__(self, name: str, value: object):
        """Keeps nothing."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        if not self.is_collecting:
            pytest.skip(f"in process: {self.__name__}")
        return self

    def __get_pydantic_core_schema__(self, *_):
        return {"type": "any"}

    __instancecheck__ = __call__

    def __mro_entries__(self, bases):
        return (object,)

    def __or__(self, other):
        return self

    __ror__ = __getitem__ = __or__


def absent(name: str):
    """An exception that is never raised for a name of one, so that `pytest.raises` accepts it."""
    short = name.rpartition(".")[2]
    if short.endswith(("Error", "Exception")):
        return type(short, (Exception,), {})
    return Absent(name)


class _Module(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        value = absent(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in PACKAGES:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


def module(name: str, **values: object) -> None:
    """Puts a module with these values, and absent others, where imports look first."""
    stand_in = sys.modules.setdefault(name, _Module(name))
    vars(stand_in).update(values)


def install() -> None:
    sys.meta_path.insert(0, _Finder())
