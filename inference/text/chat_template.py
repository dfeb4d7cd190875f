"""Chat templates: Jinja code from a checkpoint, run in the sandbox that transformers uses.

A worker process renders them, which is started for the first: so a template that never ends or
takes all memory is an error, and does not end this process.
"""

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.errors import InputError
from inference.text import template_worker

_WALL_SECONDS = 20  # for each MB; the worker itself limits its CPU time
THOUGHT_FIELDS = ("reasoning_content", "thinking", "reasoning")

Message = Mapping[str, Any]  # a JSON object; so are tools and documents


def prepare() -> None:
    """Starts what renders templates, which takes a tenth of a second, while the caller goes on."""
    _WORKER.start()


def render(
    template: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Message] | None = None,
    documents: Sequence[Message] | None = None,
    add_generation_prompt: bool = True,
    special_tokens: Mapping[str, str] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Renders a conversation by a chat template.

    Args:
        template: Jinja source.
        messages: normally {"role": ..., "content": ...} each.
        tools: JSON schemas of functions the model may call.
        documents: {"title": ..., "text": ...} each.
        add_generation_prompt: end with the start of the assistant's turn.
        special_tokens, variables: of the template, such as bos_token and enable_thinking.

    Raises:
        InputError: the template is malformed, refuses the messages, reaches outside its sandbox, or
            takes too much time or memory.
    """
    if len(template) > template_worker.MAX_TEMPLATE_CHARS:
        raise InputError(
            f"the chat template is longer than {template_worker.MAX_TEMPLATE_CHARS} characters"
        )
    whole = {
        **(special_tokens or {}),
        **(variables or {}),
        "messages": [_normalized(message) for message in messages],
        "tools": tools,
        "documents": documents,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        request = json.dumps({"template": template, "variables": whole}).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the conversation is not plain data: {error}") from None
    reply = _WORKER.ask(request)
    if "error" in reply:
        raise InputError(f"the chat template {reply['error']}")
    return reply["text"]


def _normalized(message: Message) -> dict[str, object]:
    """A message as transformers passes it on: without None, reasoning under its usual names."""
    fields = {name: value for name, value in message.items() if value is not None}
    reasoning = next((fields[name] for name in THOUGHT_FIELDS if name in fields), None)
    if reasoning is None:
        return fields
    return {"thinking": reasoning, **fields, "reasoning_content": reasoning}


class _TemplateProcess:
    """The process that renders templates, started when needed and again after it has ended."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def ask(self, request: bytes) -> dict[str, Any]:
        scale = template_worker.limit_scale(len(request) + 1)
        reply: dict[str, Any] = {}
        with self._lock:
            process = self.start()
            assert process.stdin is not None and process.stdout is not None
            timer = threading.Timer(scale * _WALL_SECONDS, process.kill)
            timer.start()
            try:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(request + b"\n")
                    process.stdin.flush()
                    line = process.stdout.readline()
                    reply = json.loads(line) if line.endswith(b"\n") else {}
            finally:
                timer.cancel()
                if not reply or reply.get("is_last"):  # it has ended, or this was interrupted
                    self.stop()
        return reply or {"error": _cause(process.returncode, scale)}

    def start(self) -> subprocess.Popen[bytes]:
        with self._lock:
            process = self._process
            # A fork inherits the pipes and must not share them.
            if process is not None and self._owner == os.getpid() and process.poll() is None:
                return process
            self._owner = os.getpid()
            self._process = subprocess.Popen(
                # -P: modules in the folder of this file do not hide those it imports.
                [sys.executable, "-P", str(Path(template_worker.__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C at the terminal does not reach it
            )
            return self._process

    def stop(self) -> None:
        """Ends the worker, unless a parent of this process started it."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        process.wait()


def _cause(status: int, scale: int) -> str:
    if status in (-signal.SIGPROF, -signal.SIGKILL):
        return f"takes more than {scale * template_worker.SECONDS:g} s"
    return f"failed: it ended its process (status {status})"


_WORKER = _TemplateProcess()
atexit.register(_WORKER.stop)
