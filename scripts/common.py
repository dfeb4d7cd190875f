"""What the apps share: flags that name a model, exit statuses, progress on stderr."""

import contextlib
import dataclasses
import functools
import gc
import importlib
import io
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from absl import app, flags, logging
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from configs import mesh, overrides
from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.recipes.run import Run
from configs.settings.section import paths
from scripts import failures, interrupts, usage
from scripts.flags import host_flags, speculation_flags
from scripts.flags.deployment_flags import ACTIVATIONS, CACHE, MESH, WEIGHTS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from inference.checkpoints.checkpoint import Checkpoint
    from inference.checkpoints.resolve import Resolved
    from inference.engine import Engine
    from inference.scheduling.step_shapes import StepShape
    from sharding.hosts import Report

_MODEL = flags.DEFINE_string(
    "model",
    "smollm2-135m",
    "Preset name, directory (Hugging Face, or of scripts.convert) or .gguf file, on disk or at "
    "s3:// or gs://, or hub id; with --config: in place of its model.",
)
_RUN = flags.DEFINE_string("config", None, "A whole run: configs/runs/NAME.py.")
_SET = flags.DEFINE_multi_string("set", [], "Overrides a field: engine.max_seqs=64 (repeatable).")
_EXECUTABLES = flags.DEFINE_string(
    "executables",
    None,
    "Directory of scripts.compile --serialize, or a copy at s3:// or gs://: what is there is not "
    "compiled (steps of the chips that decode; those of prefill.chips are compiled).",
)
JSON = flags.DEFINE_bool("json", False, "Print one JSON object on stdout, nothing else.")
flags.adopt_module_key_flags(speculation_flags)

UNREAD_BY_TRAINERS = (
    "config", "executables", "speculate", "weights", "activations", "cache", "hosts", "host_index",
    "coordinator",
)  # fmt: skip
_COMPILE_SILENCE_S, _COMPILE_EVERY_S, _COMPILE_POLL_S = 2.0, 10.0, 0.25

_GC_THRESHOLD = 100_000  # imports and tracing make as many objects, and nearly all of them stay

console = Console(stderr=True)


def run(
    main: Callable[[Sequence[str]], None], unread: Collection[str] = (), takes_names: bool = False
) -> None:
    """Runs an app: exit 0 done, 1 the work failed (one line on stderr), 2 bad flags.

    Under --verbosity=1 a failure that is not the input's shows where it happened. The app refuses
    the flags `unread`, which its help leaves out; with `takes_names` it gets the other arguments.
    """

    def guarded(argv: Sequence[str]) -> None:
        if not flags.FLAGS["verbosity"].present:  # absl's default tells what JAX looked for
            logging.set_verbosity(logging.WARNING)
        try:
            if len(argv) > 1 and not takes_names:
                model = f", as --model={argv[1]}" if not argv[1].startswith("-") else ""
                raise InputError(f"unexpected argument {argv[1]!r}: every input is a flag{model}")
            failures.check_limits()
            with interrupts.caught():
                main(argv)
        except KeyboardInterrupt:
            interrupts.end()
            fail("interrupted")
        except BrokenPipeError:
            raise
        except Exception as error:
            if logging.get_verbosity() > logging.INFO and not isinstance(error, InputError):
                raise
            fail(failures.line(error))

    gc.set_threshold(_GC_THRESHOLD)
    for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show a character ends no run
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        _run(guarded, functools.partial(_parse_flags, main.__module__, unread))
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            _end_hosts("it failed" if ended.code else None)
            interrupts.leave(ended.code or 0)
        raise


def _run(
    guarded: Callable[[Sequence[str]], None], parse: Callable[[Sequence[str]], list[str]]
) -> None:
    try:
        try:
            app.run(guarded, flags_parser=parse)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # while a closed pipe can still be caught
            interrupts.ignore()
    except OSError as error:  # of stdout: what is buffered goes nowhere
        if logging.get_verbosity() > logging.INFO:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # a reader that has left wants no more
            fail(f"cannot write to stdout: {error.strerror}")
        sys.exit(1)


def check_flags(reader: str, readers: Mapping[str, Collection[str]]) -> None:
    """Raises InputError, naming readers, if `reader`, an app or a mode, ignores a given flag."""
    for module, module_flags in flags.FLAGS.flags_by_module_dict().items():
        for flag in module_flags:
            if module.startswith("absl.") or not flag.present or flag.name in readers[reader]:
                continue
            other_readers = [name for name, read in readers.items() if flag.name in read]
            hint = f": it goes with {' or '.join(other_readers)}" if other_readers else ""
            raise InputError(f"{reader} does not read --{flag.name}{hint}")


def check_unread(reader: str, names: Collection[str]) -> None:
    for name in names:
        if flags.FLAGS[name].present:
            raise InputError(f"{reader} does not read --{name}")


def fail(message: str) -> None:
    interrupts.ignore()
    words = " ".join(message.split())  # of which a file may give some: nothing for a terminal
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in words)
    print("error:", line, file=sys.stderr)
    _end_hosts(line)
    sys.exit(1)


def _end_hosts(why: str | None = None) -> None:
    if hosts := sys.modules.get("sharding.hosts"):
        hosts.current().end(why)


def resolve_config(
    sizes: Mapping[str, object],
    needs: Mapping[str, object] | None = None,
    report: "Report | None" = None,
) -> tuple["Resolved", Config]:
    """Resolves `named_config` for JAX's device. Its engine's modules are imported, and built where
    missing, while the caller goes on to fetch and read files. Several hosts join here; `report`:
    gets what they wait for, and has them wait for a server's time.
    """
    place = host_flags.place()
    if place.count > 1:  # what JAX's service logs of a lost host, `hosts` says in one line
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    from inference import follower
    from layers.kernels.device import target_device
    from sharding import hosts
    from sharding import mesh as meshes

    executables()
    flag_values = {"weights": WEIGHTS.value, "activations": ACTIVATIONS.value}
    settings = {name: value for name, value in flag_values.items() if value is not None}
    resolved, config = named_config(sizes, {**(needs or {}), **settings})
    config = speculation_flags.apply(config, model_name())
    if place.count > 1:
        say(str(place))
    patience_s = hosts.JOIN_TIMEOUT_S if report is None else hosts.SERVER_JOIN_TIMEOUT_S
    hosts.start(place.coordinator, place.count, place.index, report, patience_s)
    config = follower.prepared(config)
    meshes.provide(config.mesh, config.num_chips)
    config = config.for_platform(target_device().platform)
    threading.Thread(target=_prepare, args=(config,)).start()
    return resolved, config


def check_one_chip(config: Config, reader: str) -> None:
    """Raises InputError if a configuration has a mesh."""
    if config.num_chips > 1:
        chips = config.mesh if config.mesh.num_chips > 1 else f"{config.num_chips} of them"
        raise InputError(f"{reader} runs on one chip, not on {chips}: leave the others out")


def check_together(config: Config, reader: str) -> None:
    """Raises InputError if other chips compute prompts than decode."""
    if config.prefill.is_apart:
        name = "prefill.hosts" if config.prefill.hosts else "prefill.chips"
        raise InputError(f"{reader} predicts chips that do both: leave {name} out")


def _prepare(config: Config) -> None:
    from inference import engine

    with contextlib.suppress(Exception):  # `load_engine` raises it again
        engine.for_this_device(config)


def named_config(
    sizes: Mapping[str, object], needs: Mapping[str, object] | None = None
) -> tuple["Resolved", Config]:
    """Returns the model that --model or --config names, and its configuration with --set applied,
    for whatever device. No weights are read. `sizes` of the engine hold where no run names its own,
    `needs` of other flags always.
    """
    from inference.checkpoints import resolve

    run_file = named_run()
    resolved = resolve.resolve(model_name())
    fields = {**({} if run_file else sizes), **(needs or {})}
    settings = [f"{paths(EngineConfig)[name]}={value}" for name, value in fields.items()]
    run = run_file or Run("")
    config = Config(resolved.config, run.engine, run.mesh, run.prefill)
    config = overrides.apply(config, [*settings, *settings_asked()])
    return resolved, config


def settings_asked() -> list[str]:
    return [*_SET.value, *flag_settings()]


def flag_settings() -> list[str]:
    cache = [] if CACHE.value is None else [f"model.cache_format={CACHE.value}"]
    if not MESH.value:
        return cache
    sizes = dataclasses.asdict(mesh.parse(MESH.value))
    return cache + [f"mesh.{axis}={size}" for axis, size in sizes.items()]


def model_name() -> str:
    """What --model says, else the run of --config."""
    run_file = named_run()
    return _MODEL.value if run_file is None or _MODEL.present else run_file.model


def named_run() -> Run | None:
    return _load_run(_RUN.value) if _RUN.value else None


def open_checkpoint(resolved: "Resolved") -> "Checkpoint":
    with bars() as progress:
        return resolved.open(progress)


def load_engine(
    checkpoint: "Checkpoint | None",
    config: Config,
    prompts: Iterable[int] | None = None,
    num_seqs: int = 1,
    greedy: bool = False,
) -> "Engine":
    """Loads the engine of a configuration, with progress bars; without a checkpoint with random
    weights and no tokenizer. The first steps of prompts of so many tokens, from which `num_seqs`
    sequences go on, are compiled while weights are read; `greedy` says that all requests are.
    """
    from inference import follower
    from inference.checkpoints import weight_formats
    from inference.engine import Engine, for_this_device
    from inference.planner.calibration import lookup
    from inference.runtime import compilation_cache
    from inference.scheduling import step_shapes
    from layers import decoder
    from layers.kernels.device import target_device
    from layers.kernels.linear import api as linear
    from sharding import hosts

    follower.check_alike(config, checkpoint)
    compilation_cache.enable()
    if target_device().platform != "cpu":  # while its memory is free; predictions ask again
        lookup.this_machine_or_none(config.model.dtype)
    if checkpoint is None:
        config = weight_formats.drawn(config)
        if config.draft is not None:
            raise InputError("a model that drafts goes with a checkpoint, not with random weights")
        if config.prefill.hosts is not None:
            raise InputError("prefill.hosts goes with a checkpoint, not with random weights")
        values = linear.random_params(config, decoder.param_infos(config.model))
        engine = Engine(config, values, executables=executables())
    else:
        with bars() as progress:
            expected: tuple[StepShape, ...] = ()
            if prompts is not None:
                resolved = for_this_device(config)[0].engine
                groups = config.mesh.num_groups
                expected = step_shapes.expected(resolved, prompts, num_seqs, greedy, groups)
            draft = None
            if config.draft is not None:
                draft = speculation_flags.open_draft(config, model_name(), progress)
            engine = Engine.from_checkpoint(
                config, checkpoint, progress, expected, executables(), draft
            )
    defaults = Config(config.model).for_platform(target_device().platform).engine
    changed = overrides.changed(config.engine, defaults)
    chips = [str(config.mesh)] if config.mesh.num_chips > 1 else []
    draft_name = None if config.draft is None else config.draft.name
    fields: dict[str, object] = {"cache": config.model.cache_format, "draft": draft_name}
    fields |= {"prefill.chips": config.prefill.chips or None, "prefill.hosts": config.prefill.hosts}
    if hosts.current().index:
        follower.follow(engine)
    named = [f"{name}={value}" for name, value in fields.items() if value is not None]
    sizes = [f"{name}={value}" for name, value in changed.items()]
    say(", ".join([config.model.name, config.model.dtype, *chips, *named, *sizes]))
    return engine


def executables() -> Path | None:
    """The directory that --executables names. Raises InputError if it is not there."""
    if not _EXECUTABLES.value:
        return None
    if host_flags.place().count > 1:
        raise InputError("--executables goes with one host: leave it out, several compile")
    from inference.files import mirror

    folder = mirror.path_of(_EXECUTABLES.value)
    mirror.complete(folder)
    if not folder.is_dir():
        raise InputError(f"--executables={str(folder)[:200]} is no directory")
    return folder


def warm_up(engine: "Engine", label: str = "compiling steps", seals: bool = True) -> float:
    """Compiles every shape as `Engine.warm_up`, with a progress bar; returns its seconds."""
    shapes, done = engine.scheduler.shapes, itertools.count(1)
    start = time.perf_counter()
    with bars() as progress, compile_progress(engine, len(shapes), shown=not console.is_terminal):
        engine.warm_up(lambda: progress(next(done), len(shapes), label), seals)
    return time.perf_counter() - start


@contextlib.contextmanager
def compile_progress(
    engine: "Engine", num_steps: int = 0, shown: bool = True
) -> Iterator[threading.Event]:
    """Reports on stderr steps that compile for more than 2 s, and again every 10 s; `num_steps` are
    compiled in the end (0: as many as are requested). Yields an event that ends it: once text is
    streamed, no line may cut it.
    """
    ended = threading.Event()

    def watch() -> None:
        due_s = None
        while not ended.wait(_COMPILE_POLL_S):
            now = time.monotonic()
            if not engine.is_compiling:
                due_s = None
            elif due_s is None:
                due_s = now + _COMPILE_SILENCE_S
            elif now >= due_s:
                due_s = now + _COMPILE_EVERY_S
                executables = engine.model_runner.executables
                count = num_steps or executables.num_requested
                say(f"compiling {min(len(executables.shapes) + 1, count)} of {count} steps")

    thread = threading.Thread(target=watch, daemon=True)
    if shown:
        thread.start()
    try:
        yield ended
    finally:
        ended.set()
        if shown:
            thread.join()


def say(line: str) -> None:
    """One dim line on stderr, however wide the terminal is."""
    console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)


class bars:  # noqa: N801
    """Context of progress bars on stderr; calls take (done, total, label), and a label's text."""

    def __enter__(self) -> Callable[..., None]:
        """Starts with no bar; each new label adds one, on a terminal only."""
        columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
        hidden = not console.is_terminal
        self._progress = Progress(*columns, console=console, transient=True, disable=hidden)
        self._tasks: dict[str, TaskID] = {}
        return self._update

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def _update(self, done: int, total: int, label: str, text: str = "") -> None:
        self._progress.start()  # once
        if label not in self._tasks:
            self._tasks[label] = self._progress.add_task(label)
        self._progress.update(
            self._tasks[label], completed=done, total=total or None, description=text or label
        )


def print_json(result: Mapping[str, object], config: "DataclassInstance") -> None:
    """One JSON object on stdout: the result, and the configuration it was obtained with."""
    print_plain({**result, "config": dataclasses.asdict(config)})


def print_plain(result: Mapping[str, object]) -> None:
    print(json.dumps(result, ensure_ascii=False), flush=True)


def _parse_flags(module: str, unread: Collection[str], argv: Sequence[str]) -> list[str]:
    try:
        if usage.is_asked_for(argv):
            about = sys.modules[module].__doc__ or ""
            print(usage.page(about, argv[0], unread), end="")
            sys.exit(0)
        return flags.FLAGS(usage.with_underscores(argv))
    except flags.UnrecognizedFlagError as error:
        line = " ".join(str(error).split()) + usage.hint(error.flagname)
        print("error:", line, file=sys.stderr)
        sys.exit(2)
    except flags.Error as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
    except SystemExit:
        sys.exit(0)  # after --help, which absl takes for a failure


def _load_run(path: str) -> Run:
    folder = Path(__file__).resolve().parent.parent / "configs" / "runs"
    names = sorted(file.stem for file in folder.glob("*.py") if file.stem != "__init__")
    name = path if path in names else _stem(path, folder)
    if name not in names:
        raise InputError(
            f"no run {path!r}; valid: {', '.join(f'configs/runs/{n}.py' for n in names)}"
        )
    run = importlib.import_module(f"configs.runs.{name}").RUN
    assert isinstance(run, Run)
    return run


def _stem(path: str, folder: Path) -> str | None:
    """The name of a file of this very folder; None for any other path."""
    try:
        resolved = Path(path).resolve()
    except (OSError, RuntimeError, ValueError):  # too long, a loop of links, a NUL
        return None
    return resolved.stem if resolved.parent == folder and resolved.suffix == ".py" else None
