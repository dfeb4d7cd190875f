"""What `serve` refuses before it loads anything."""

import socket
import types

import pytest

from configs.errors import InputError
from inference.server.engine_process import entry
from inference.server.web.access import Site
from scripts import common, serve
from scripts.flags.requests import http_flags
from tests.scripts import apps


@pytest.fixture
def run(monkeypatch, capfd):
    return lambda *args: apps.call(serve, monkeypatch, capfd, *args)


@pytest.mark.parametrize("flags, expected", [
    (["--port=70000"], "--port is between 0 and 65535, not 70000"),
    (["--port=-1"], "--port is between 0 and 65535"),
    (["--host=0.0.0.0"], "can be reached by others: give --api_key_file"),
    (["--host=::"], "can be reached by others: give --api_key_file"),
    (["--host=300.1.1.1", "--api_key_file={keys}"], "--host=300.1.1.1 --port=8000: "),
    (["--api_key_file=missing"], "--api_key_file=missing: cannot read missing: No such file"),
    (["--api_key_file={empty}"], "holds no key"),
    (["--control_key_file=missing"], "--control_key_file=missing: cannot read missing: No such"),
    (["--control_key_file={empty}"], "--control_key_file=empty holds no key"),
    (["--api_key_file={keys}", "--control_key_file={keys}"],
     "--control_key_file=keys: has a key of --api_key_file; give it keys of its own"),
    (["--max_logprobs=21"], "--max_logprobs is between 0 and 20, not 21"),
    (["--max_num_seqs=0"], "--max_num_seqs=0: 0 is not a positive integer"),
    (["--max_model_len=-1"], "--max_model_len=-1: -1 is not a positive integer"),
    (["--request_timeout=-1"], "--request_timeout is a number of seconds, not -1"),
    (["--json"], "prints no JSON"),
    (["--hosts=2", "--host_index=2"], "of 2 hosts the first is 0 and the last 1, not 2"),
    (["--hosts=2", "--coordinator=here"], "a coordinator is host 0's address:port, not 'here'"),
    (["--port={busy}"], "in use"),
    (["--role=prefill", "--port=0"], "--port=0: must be a port that other servers know"),
    (["--role=prefill", "--port={busy}"], "in use"),
    (["--role=prefill", "--hosts=2"], "goes with one host, not with 2; give --hosts=1"),
    (["--role=prefill", "--max_queue_s=1"], "serve --role=prefill does not read --max_queue_s"),
    (["--allowed_hosts=a.example:8000"], "leave the port out"),
    (["--allowed_origins=chat.example"], "is no origin, such as https://"),
    (["--root_path=llm"], "is no path, such as /llm"),
    (["--chat_template=missing.jinja"], "=missing.jinja: is neither a file nor a template"),
    (["--chat_template=."], "is neither a file"),
    (["--chat_template=" + 300 * "x"], "is neither a file"),
    (["--chat_template={large}"], "large: at most 1 MiB are read"),
    (["--chat_template={{% for m in messages %}}"], "line 1: Unexpected end of template"),
    (["--otlp_endpoint=localhost:4318"], "localhost:4318 is the address of a collector"),
])  # fmt: skip
def test_bad_flags(run, tmp_path, monkeypatch, flags, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").touch()
    (tmp_path / "keys").write_text("0123456789abcdef")
    (tmp_path / "keys").chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as other:
        with (tmp_path / "large").open("wb") as file:
            file.truncate((1 << 20) + 1)
        names = {"empty": "empty", "large": "large", "keys": "keys", "busy": other.getsockname()[1]}
        ran = run(*(flag.format(**names) for flag in flags))
    assert expected in ran.error


def test_one_of_several_processes_of_a_launcher_may_compute_prompts(run, monkeypatch):
    step = {"STEP_NODELIST": "node[1-4]", "STEP_NUM_TASKS": "4", "PROCID": "2", "JOB_ID": "7"}
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = f"--port={other.getsockname()[1]}"
        assert "not with 4; give --hosts=1" in run("--role=prefill", port).error
        assert "in use" in run("--role=prefill", port, "--hosts=1").error


def test_hosts_and_origins_are_compared_in_lower_case(monkeypatch):
    flags = {
        "ALLOWED_HOSTS": [" Chat.Example"], "ALLOWED_ORIGINS": ["HTTPS://Chat.Example:8443"],
        "ROOT_PATH": "/LLM/",
    }  # fmt: skip
    for name, value in flags.items():
        monkeypatch.setattr(http_flags, name, types.SimpleNamespace(value=value))
    site = Site(("chat.example",), ("https://chat.example:8443",), "/LLM")
    assert serve.read_site() == site


def test_a_model_that_is_not_there_ends_both_processes(tmp_path):
    ran = apps.start("serve", "--model=no/such-model", "--port=0", cache=tmp_path / "cache")
    assert ran.status == 1 and ran.out == "" and "Traceback" not in ran.err
    *_, cause, last = ran.err.splitlines()
    assert cause.startswith("error: ") and "no/such-model" in cause
    assert last == "error: the engine ended with status 1"


@pytest.mark.parametrize("is_file", [True, False])
def test_a_chat_template_may_replace_the_checkpoints(run, tmp_path, monkeypatch, is_file):
    """In the engine's process, from which the other one has its text."""
    text = "{% for m in messages %}\n<{{ m.role }}>{{ m.content }}{% endfor %}"
    (tmp_path / "ours.jinja").write_text(text)
    given = str(tmp_path / "ours.jinja") if is_file else text.replace("\n", "\\n")
    checkpoints = []

    def load(checkpoint, config):
        checkpoints.append(checkpoint)
        raise InputError("far enough")

    monkeypatch.setattr(common, "load_engine", load)
    monkeypatch.setattr(entry, "serve", lambda descriptor, load: load())
    ran = run("--engine_socket=9", f"--model={apps.TINY}", f"--chat_template={given}")
    assert "far enough" in ran.error
    tokenizer = checkpoints[0].load_tokenizer()
    assert (tokenizer.template, tokenizer.templates) == (text, {})
