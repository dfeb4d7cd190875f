"""The suite runs on the CPU unless the caller chose a platform, and asks no hub for anything."""

import collections
import contextlib
import gc
import json
import os
import pathlib
import shutil
import signal
import tempfile
import zlib

import hypothesis
import pytest

# What tests share keeps its asserts under `python -O`, too.
_SHARED = (
    path.stem for path in pathlib.Path(__file__).parent.iterdir() if path.stem[0] not in "_."
)
pytest.register_assert_rewrite(*(f"tests.{name}" for name in _SHARED if name != "conftest"))

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# XLA's own caches lie in the folder of compiled programs, and its path is part of each program's
# key: processes that reach the folder by other paths would compile everything again.
os.environ.setdefault("JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES", "none")

# A shell's background jobs ignore interrupts, and so would what they start: tests send some.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


hypothesis.settings.register_profile("ridgeline", deadline=None)  # machines may be busy
hypothesis.settings.load_profile("ridgeline")

# What a process has mapped, a line each. Linux allows 65,530; XLA aborts where it gets no more.
_MAPS = pathlib.Path("/proc/self/maps")
_MANY_MAPS = 20_000


# Seconds of each test that takes more than half of one, all its cases together.
_COSTS = pathlib.Path(__file__).with_name("costs.json")
_PARTS = 6


def pytest_addoption(parser):
    parser.addoption(
        "--part", type=int, choices=range(_PARTS),
        help="of the tests in costs.json only this part of six runs, the others are long",
    )  # fmt: skip
    parser.addoption("--write-costs", action="store_true", help="write what ran into costs.json")


@pytest.hookimpl(tryfirst=True)  # before `-m` is applied
def pytest_collection_modifyitems(config, items):
    """The cases of costly tests go to the parts by turns, in the order of a hash, which mixes their
    parameters; tests by cost, so that parts take equally long.
    """
    part = config.getoption("part")
    if part is None:
        return
    cases = collections.defaultdict(list)
    for item in items:
        if not item.get_closest_marker("long"):
            cases[_test(item.nodeid)].append(item)
    costs = json.loads(_COSTS.read_text())
    for rank, test in enumerate(sorted(costs, key=costs.get)):
        in_order = sorted(cases[test], key=lambda item: zlib.crc32(item.name.encode()))
        for nth, item in enumerate(in_order, start=rank):
            if nth % _PARTS != part:
                item.add_marker("long")


def _test(nodeid):
    return nodeid.partition("[")[0]


class Costs:
    """Seconds of each test, with its fixtures, in the process that hears of all of them."""

    def __init__(self):
        self._seconds = collections.Counter()

    def pytest_runtest_logreport(self, report):
        self._seconds[_test(report.nodeid)] += report.duration

    def pytest_sessionfinish(self):
        costs = json.loads(_COSTS.read_text()) | self._seconds
        costly = {test: round(s, 1) for test, s in sorted(costs.items()) if s > 0.5}
        _COSTS.write_text(json.dumps(costly, indent=0) + "\n")


def pytest_collection_finish():
    """What is there stays: collecting it again and again took a fifth of all tracing."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_configure(config):
    """Files go to workers as they are listed, which is no file of minutes behind all others. What
    one of them has compiled is compiled by none again in this run; workers inherit the environment.
    """
    config.option.loadscopereorder = False
    if config.getoption("write_costs") and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Costs())
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = tempfile.mkdtemp(prefix="ridgeline-compiled-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    import jax

    jax.config.update("jax_num_cpu_devices", 8)  # chips of the tests of meshes
    if "RIDGELINE_KERNELS" not in os.environ:  # built once, whatever cache directories tests have
        from inference.files import cache_directory  # loads jax, which reads the above
        from inference.runtime import cpu_kernels

        os.environ["RIDGELINE_KERNELS"] = str(cache_directory.path() / "kernels")
        cpu_kernels.load()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Tests marked `quick_code`, and the fixtures set up for them, compile quickly; those of such a
    file that are marked `quick_code(False)` do not.
    """
    from tests import compiling  # JAX reads the environment above

    mark = item.get_closest_marker("quick_code")
    with compiling.quickly() if mark and mark.args != (False,) else contextlib.nullcontext():
        return (yield)


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_are_let_go():
    """A compiled program holds mappings of memory, and those of tests gone by are kept."""
    yield
    if _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > _MANY_MAPS:
        import jax  # reads the environment above

        from tests import fakes

        fakes.forget_programs()
        jax.clear_caches()
        gc.collect()
