"""A plugin of pytest: servers of vLLM's tests are `scripts.serve`, and other tests are skipped."""

import atexit
import contextlib
import inspect
import os
import pathlib
import re
import socket
import subprocess
import time
import types

import anthropic
import openai
import pytest
import requests
import stand_ins

ROOT = pathlib.Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("RIDGELINE_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
VLLM_PATH = pathlib.Path(os.environ["VLLM_TESTS"]).resolve()

MODEL = "smollm2-135m"
# The model's context and its slots. Where a test has no length, or a longer one, answers without
# max_tokens end at DEFAULT_LEN: a small model repeats itself to the end of its context.
MAX_MODEL_LEN, MAX_NUM_SEQS, DEFAULT_LEN = 8192, 32, 1024

# The model never begins a thought by itself, so tests of --reasoning-parser get a prompt that does.
THINKING_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>"
    "{% if enable_thinking is defined and enable_thinking is false %}\n</think>\n\n"
    "{% endif %}{% endif %}"
)

# vLLM's flags: ours, and the value in ours. All others mean nothing here.
FLAGS = {
    "max-model-len": ("max_model_len", lambda value: _length(int(value))),
    "max-num-seqs": ("max_num_seqs", lambda value: str(min(int(value), MAX_NUM_SEQS))),
    "chat-template": ("chat_template", str),
    "tool-call-parser": ("tool_call_parser", lambda value: PARSERS.get(value, value)),
    "root-path": ("root_path", lambda value: "/" + value.strip("/")),
    "served-model-name": ("served_model_name", str),
    "reasoning-parser": ("thinks", str),
}
PARSERS = {"internlm": "auto", "llama4_pythonic": "pythonic", "llama4_json": "llama3_json"}

# Models that a test is about: no other has their formats or senses.
SKIPPED_MODELS = {"openai/gpt-oss": "gpt-oss's harmony", "google/translategemma": "images"}


class RemoteOpenAIServer:
    """Our server in place of `vllm serve`; the next one with the same flags is the same process."""

    flags: list[str] = []
    process: subprocess.Popen | None = None
    port = 0
    host = "127.0.0.1"
    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model: str, vllm_serve_args: list[str], **_):
        for prefix, reason in SKIPPED_MODELS.items():
            if model.startswith(prefix):
                pytest.skip(f"needs {reason}", allow_module_level=True)
        flags = _our_flags(model, vllm_serve_args)
        if flags != self.flags:
            stop()
            RemoteOpenAIServer.port = _free_port()
            command = [PYTHON, "-m", "scripts.serve", f"--port={self.port}", *flags]
            RemoteOpenAIServer.process = subprocess.Popen(command, cwd=ROOT)
            RemoteOpenAIServer.flags = flags
        self._wait_ready()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(requests.ConnectionError):
                if requests.get(self.url_for("ready")).status_code == 200:
                    return
            time.sleep(0.1)
        stop()
        pytest.fail("the server did not start")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    @property
    def url_root(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def _client(self, kind, url: str, options):
        return kind(base_url=url, **{"api_key": self.DUMMY_API_KEY, "max_retries": 0} | options)

    def get_client(self, **options):
        return self._client(openai.OpenAI, self.url_for("v1"), options)

    def get_async_client(self, **options):
        return self._client(openai.AsyncOpenAI, self.url_for("v1"), options)

    def get_client_anthropic(self, **options):
        return self._client(anthropic.Anthropic, self.url_root, options)

    def get_async_client_anthropic(self, **options):
        return self._client(anthropic.AsyncAnthropic, self.url_root, options)


class Tokenizer:
    """The server's, by its own paths."""

    def __init__(self, *_, **__):
        self._url = f"http://{RemoteOpenAIServer.host}:{RemoteOpenAIServer.port}"

    def _post(self, path: str, **body):
        return requests.post(self._url + path, json=body).json()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._post("/tokenize", prompt=text, add_special_tokens=add_special_tokens)["tokens"]

    def decode(self, ids, skip_special_tokens: bool = False) -> str:
        text = self._post("/detokenize", tokens=list(ids))["prompt"]
        return re.sub(r"<\|\w+\|>", "", text) if skip_special_tokens else text


def stop() -> None:
    if RemoteOpenAIServer.process is not None:
        RemoteOpenAIServer.process.terminate()
        RemoteOpenAIServer.process.wait(60)
    RemoteOpenAIServer.process, RemoteOpenAIServer.flags = None, []


def _our_flags(model: str, vllm_args: list[str]) -> list[str]:
    flags = {"served_model_name": model, "max_model_len": str(DEFAULT_LEN)}
    words = [word for arg in vllm_args for word in arg.split("=", 1)]
    for name, value in zip(words, [*words[1:], ""], strict=True):
        if (flag := FLAGS.get(name.removeprefix("--").replace("_", "-"))) and name.startswith("--"):
            flags[flag[0]] = flag[1](value)
    if flags.pop("thinks", None) and "tool_call_parser" not in flags:
        flags["chat_template"] = THINKING_TEMPLATE
    ours = [f"--{name}={value}" for name, value in flags.items()]
    return [f"--model={MODEL}", "--nowarm_up", *sorted(ours)]


def _length(requested: int) -> str:
    return str(requested if requested <= MAX_MODEL_LEN else DEFAULT_LEN)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    platform = types.SimpleNamespace(
        **{f"is_{kind}": lambda: False for kind in ("rocm", "cuda", "tpu", "xpu", "cpu")},
        device_count=lambda: 0,
        supports_fp8=lambda: False,
    )
    stand_ins.install()
    stand_ins.module("vllm.platforms", current_platform=platform)
    stand_ins.module("vllm.tokenizers", get_tokenizer=Tokenizer)
    hub = types.SimpleNamespace(snapshot_download=lambda repo_id: repo_id)
    stand_ins.module("vllm.transformers_utils.repo_utils", hf_api=lambda: hub)
    stand_ins.module(
        "tests.utils",
        RemoteOpenAIServer=RemoteOpenAIServer,
        VLLM_PATH=VLLM_PATH,
        ROCM_EXTRA_ARGS=[],
        multi_gpu_only=lambda **_: pytest.mark.skip(reason="needs several GPUs"),
        requires_fp8=lambda function: function,
    )
    atexit.register(stop)


def pytest_collection_modifyitems(items) -> None:
    for item in items:
        fixtures = item._fixtureinfo.name2fixturedefs.values()
        functions = [item.function, *(one.func for defs in fixtures for one in defs)]
        if not any("RemoteOpenAIServer(" in inspect.getsource(call) for call in functions):
            item.add_marker(pytest.mark.skip(reason="in process: classes of vLLM"))
        elif "lora" in item.name or "hf_runner" in item.fixturenames:
            item.add_marker(pytest.mark.skip(reason="adapters"))


def pytest_collection_finish() -> None:
    stand_ins.Absent.is_collecting = False
