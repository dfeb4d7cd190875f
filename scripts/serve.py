"""Serves a model over HTTP, to OpenAI's clients: python -m scripts.serve --model=smollm2-135m."""

from scripts import interrupts  # noqa: F401

# isort: split
import asyncio
import contextlib
import dataclasses
import functools
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from absl import flags

from configs.errors import InputError
from scripts import common, failures
from scripts.flags import adapter_flags, host_flags
from scripts.flags.requests import http_flags, serving_flags

if TYPE_CHECKING:
    from inference.server.batches.store import Store
    from inference.server.engine_process.served_engine import ServedEngine
    from inference.server.traces import Traces
    from inference.server.web.access import Keys, Site
    from sharding.hosts import Report

_HOST, _PORT, _KEYS = http_flags.HOST, http_flags.PORT, http_flags.API_KEY_FILE
_CONTROL_KEYS = http_flags.CONTROL_KEY_FILE
_REQUEST_S, _QUEUE_S = http_flags.REQUEST_S, http_flags.QUEUE_S
_DRAIN_S, _OTLP = http_flags.DRAIN_S, http_flags.OTLP
_TOOL_CALLS, _SERVED_NAME = serving_flags.TOOL_CALL_PARSER, serving_flags.SERVED_MODEL_NAME
_MAX_MODEL_LEN, _MAX_NUM_SEQS = serving_flags.MAX_MODEL_LEN, serving_flags.MAX_NUM_SEQS
_MAX_LOGPROBS, _POOLING = serving_flags.MAX_LOGPROBS, serving_flags.POOLING
_WARM_UP = serving_flags.WARM_UP
_SOCKET = flags.DEFINE_integer(
    "engine_socket", None, "For serve itself: it starts its engine by this."
)
_RESTART = flags.DEFINE_bool(
    "restart", True,
    "Start the engine again when it ends, or a host of it; requests go on. Otherwise all end: for "
    "launchers that start all hosts again.",
)  # fmt: skip
_BATCH_DIR = flags.DEFINE_string(
    "batch_dir", None,
    "Directory of files and batches of clients, which a restart continues; default: a temporary "
    "one, which ends with the server.",
)  # fmt: skip
_ADAPTERS = flags.DEFINE_string(
    "adapters", None,
    "Folder of LoRA adapters, each in one of its own as the peft package writes it, or a .gguf "
    "file: clients choose one by that name in place of the model's.",
)  # fmt: skip
_ROLE = flags.DEFINE_enum(
    "role", None, ["prefill", "decode"],
    "prefill: compute prompts for other servers, which connect to --host and --port; no HTTP. "
    "decode: serve, and have prompts computed there (--set prefill.hosts=HOST:PORT,...). "
    "Default: serve, with prompts computed where the configuration says.",
)  # fmt: skip
for _module in (common, host_flags, http_flags, serving_flags):
    flags.adopt_module_key_flags(_module)

UNREAD = ("json", "engine_socket")
_UNREAD_BY_PREFILL = (
    "api_key_file", "control_key_file", "allowed_hosts", "allowed_origins", "root_path",
    "otlp_endpoint", "batch_dir", "request_timeout", "max_queue_s", "drain_timeout",
    "tool_call_parser", "served_model_name", "max_logprobs", "pooling", "adapters",
)  # fmt: skip


def main(_: Sequence[str]) -> None:
    check_flags()
    if _SOCKET.value is not None:
        from inference.server.engine_process import entry

        load: Callable[[Report], ServedEngine] = _load
        entry.serve(_SOCKET.value, _compute_prompts if _ROLE.value == "prefill" else load)
        return
    from inference.server.client.following import Following
    from inference.server.client.launch import Subprocess
    from inference.server.web import serving

    launcher = Subprocess([sys.executable, "-m", "scripts.serve", *sys.argv[1:]])
    if host_flags.place().index or _ROLE.value == "prefill":
        drain_s = _DRAIN_S.value
        if _ROLE.value == "prefill":
            drain_s = 0.0
            serving.bound(_HOST.value, _PORT.value).close()  # refused before weights are read
        following = Following(launcher, _RESTART.value, drain_s, common.say)
        asyncio.run(following.run())
        return
    from inference.server.batches.batch_service import BatchService
    from inference.server.client.engine_client import State
    from inference.server.service import Limits, Service

    keys, traces, site = read_keys(), read_traces(), read_site()
    control_keys = _read_control_keys(keys)
    listening = serving.bound(_HOST.value, _PORT.value)
    url = url_of(listening)
    limits = Limits(request_s=_REQUEST_S.value, queue_s=_QUEUE_S.value)
    with _store() as store:
        service = Service(
            launcher, limits, _SERVED_NAME.value, _TOOL_CALLS.value, warms_up=True,
            batches=None if store is None else BatchService(store), restarts=_RESTART.value,
        )  # fmt: skip

        def tell(state: State) -> None:
            if state is State.READY:
                common.say(f"{service.model_name} is served at {url}/v1")

        service.client.on_state = tell
        common.say(f"{url} answers, while the model is loaded")
        serve = functools.partial(
            serving.serve, service, listening, keys, _DRAIN_S.value, common.say
        )
        _run(functools.partial(serve, traces=traces, site=site, control_keys=control_keys))


@contextlib.contextmanager
def _store() -> Iterator["Store | None"]:
    """The directory of files and batches; None where there is none to write to."""
    from inference.server.batches.store import Store

    if _BATCH_DIR.value is not None:
        yield Store(f"--batch_dir={_BATCH_DIR.value}", Path(_BATCH_DIR.value).expanduser())
        return
    try:
        folder = tempfile.TemporaryDirectory(prefix="ridgeline-")
    except OSError:
        common.say("no files and batches are stored: there is no temporary directory")
        yield None
        return
    with folder as path:
        store = Store("the temporary directory of batches", Path(path))
        yield store
        if num_open := len(store.batches.open()):
            common.say(f"batches that ended with the server: {num_open} (--batch_dir keeps them)")


def read_keys() -> "Keys | None":
    """The keys of requests; None where only this machine has access and none is required. Raises
    InputError if the file is invalid, or others have access and there is none.
    """
    from inference.server.web import access

    keys = None
    if _KEYS.value is not None:
        keys = _read_keys(f"--api_key_file={_KEYS.value}", _KEYS.value)
    if keys is None and not access.is_local(_HOST.value):
        raise InputError(
            f"--host={_HOST.value} can be reached by others: give --api_key_file, a key a line"
        )
    return keys


def _read_control_keys(keys: "Keys | None") -> "Keys | None":
    """The keys of requests that control the engine, if any; raises InputError if the file is
    invalid, or has a key of other requests.
    """
    path = _CONTROL_KEYS.value
    if path is None:
        return None
    label = f"--control_key_file={path}"
    control_keys = _read_keys(label, path)
    if keys is not None and keys.names & control_keys.names:
        raise InputError(f"{label}: has a key of --api_key_file; give it keys of its own")
    return control_keys


def _read_keys(label: str, path: str) -> "Keys":
    from inference.server.web import access

    keys = access.read_keys(label, path)
    if Path(path).expanduser().stat().st_mode & 0o077:
        common.say(f"{label} can be read by other users: chmod 600")
    return keys


def read_site() -> "Site":
    """The server's site behind a proxy; raises InputError for a bad host, origin or path."""
    from inference.server.web.access import Site

    hosts = tuple(host.strip().lower() for host in http_flags.ALLOWED_HOSTS.value)
    origins = tuple(origin.strip(" '\"[]").lower() for origin in http_flags.ALLOWED_ORIGINS.value)
    root_path = http_flags.ROOT_PATH.value.rstrip("/")
    for host in hosts:
        if not re.fullmatch(r"(\*\.)?[a-z0-9._-]+|[0-9a-f:.]+", host):
            raise InputError(f"--allowed_hosts={host}: is no name of a host; leave the port out")
    for origin in origins:
        if not re.fullmatch(r"\*|https?://[^/\s]+", origin):
            raise InputError(f"--allowed_origins={origin}: is no origin, such as https://host:8443")
    if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)*", root_path):
        raise InputError(f"--root_path={root_path}: is no path, such as /llm")
    return Site(hosts, origins, root_path)


def read_traces() -> "Traces | None":
    """The receiver of spans, if requested; raises InputError if it cannot be reached."""
    if _OTLP.value is None:
        return None
    from inference.server.traces import Traces

    return Traces.sent_to(f"--otlp_endpoint={_OTLP.value}", _OTLP.value)


def url_of(listening: socket.socket) -> str:
    host = f"[{_HOST.value}]" if ":" in _HOST.value else _HOST.value
    return f"http://{host}:{listening.getsockname()[1]}"


def _run(serve: Any) -> None:
    import uvloop

    uvloop.run(serve())


def check_flags() -> None:
    """Raises InputError if the flags cannot be served with."""
    failures.check_packages("serve", "serve", "starlette")
    if common.JSON.value:
        raise InputError("serve answers over HTTP, and prints no JSON")
    if not 0 <= _PORT.value <= 65535:
        raise InputError(f"--port is between 0 and 65535, not {_PORT.value}")
    if not 0 <= _MAX_LOGPROBS.value <= 20:
        raise InputError(f"--max_logprobs is between 0 and 20, not {_MAX_LOGPROBS.value}")
    serving_flags.chat_template()
    host_flags.place()
    if _ROLE.value == "prefill":
        common.check_unread("serve --role=prefill", _UNREAD_BY_PREFILL)
        if (num_hosts := host_flags.place().count) > 1:
            raise InputError(
                f"--role=prefill: goes with one host, not with {num_hosts}; give --hosts=1"
            )
        if not _PORT.value:
            raise InputError(
                "--port=0: must be a port that other servers know, with --role=prefill"
            )
    for flag in (_REQUEST_S, _QUEUE_S, _DRAIN_S):
        if not 0 <= flag.value < 1e6:
            raise InputError(f"--{flag.name} is a number of seconds, not {flag.value}")


def engine_needs() -> dict[str, Any]:
    from inference.text import grammar

    needs = {
        "penalties": True, "top_logprobs": _MAX_LOGPROBS.value,
        "grammars": grammar.is_available(), "embeddings": True,
    }  # fmt: skip
    return needs | _sizes()


def _sizes() -> dict[str, Any]:
    sizes = {"max_context": _MAX_MODEL_LEN.value, "max_seqs": _MAX_NUM_SEQS.value}
    return {name: value for name, value in sizes.items() if value is not None}


def _load(report: "Report | None" = None) -> "ServedEngine":
    resolved, config = common.resolve_config({}, engine_needs(), report)
    if _ROLE.value == "decode" and config.prefill.hosts is None:
        raise InputError(
            "--role=decode: needs processes that compute prompts; give "
            "--set prefill.hosts=HOST:PORT,..."
        )
    from inference.planner.calibration import lookup
    from inference.server.engine_process.served_engine import ServedEngine

    checkpoint = common.open_checkpoint(resolved)
    if (template := serving_flags.chat_template()) is not None:
        tokenizer = checkpoint.load_tokenizer().with_template_text(template)
        checkpoint = dataclasses.replace(checkpoint, tokenizer=tokenizer)
    name = common.model_name()
    if Path(name).exists():  # clients need not know where it lies
        name = Path(name).resolve().name
    adapters = adapter_flags.directories(_ADAPTERS.value) if _ADAPTERS.value else {}
    if (served_name := _SERVED_NAME.value or name) in adapters:
        raise InputError(
            f"--adapters={_ADAPTERS.value}: {served_name} is the name of the model, too; give "
            "another --served_model_name"
        )
    engine = common.load_engine(checkpoint, adapter_flags.with_room(config, adapters))
    adapter_flags.load(engine.adapters, adapters)
    warm_up = functools.partial(common.warm_up, engine, seals=False)
    machine = lookup.cached(config.model, engine.model_runner.implementations)
    prepare = warm_up if _WARM_UP.value else lambda: None
    source = common.model_name()
    return ServedEngine(engine, name, prepare, machine, _POOLING.value, source)


def _compute_prompts(report: "Report") -> NoReturn:
    """Computes prompts for all that connect, until an error ends it."""
    resolved, config = common.resolve_config({}, _sizes())
    from inference.prefill.leaders import Leaders
    from inference.prefill.peer import facts_of
    from inference.prefill.server import PromptServer
    from inference.server.web import serving

    checkpoint = common.open_checkpoint(resolved)
    engine = common.load_engine(checkpoint, config.for_prefill())
    runner = engine.model_runner
    leaders = Leaders(engine.scheduler, runner)
    if _WARM_UP.value:
        common.warm_up(engine, seals=False)
    runner.compile_page_copies()
    facts = facts_of(engine.config, runner.implementations, checkpoint)
    listening = serving.bound(_HOST.value, _PORT.value)
    common.say(f"prompts are computed at {_HOST.value}:{_PORT.value}")
    report("", False)
    PromptServer(leaders, facts, listening).run()


if __name__ == "__main__":
    common.run(main, UNREAD)
