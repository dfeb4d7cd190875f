"""Chat templates: Jinja programs from a checkpoint, run in the sandbox transformers uses.

They are rendered by one process beside this one, started when the first is asked for: a template
that never ends, or takes all memory, is an error and not the end of the program.
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

_WALL_SECONDS = 20  # for each MB; the worker's own limit counts its own time only
_REASONING = ("reasoning_content", "thinking", "reasoning")

Message = Mapping[str, Any]


def render(
    template: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    documents: Sequence[Any] | None = None,
    add_generation_prompt: bool = True,
    special_tokens: Mapping[str, str] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The prompt a template makes of a conversation.

    Args:
        template: Jinja source.
        messages: plain data, normally {"role": ..., "content": ...} each.
        tools: JSON schemas of functions the model may call.
        documents: {"title": ..., "text": ...} each.
        add_generation_prompt: end with the opening of the assistant's turn.
        special_tokens: further variables, such as bos_token.
        variables: whatever else this template knows, such as enable_thinking.

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
        "messages": [_as_read(message) for message in messages],
        "tools": tools,
        "documents": documents,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        request = json.dumps({"template": template, "variables": whole}).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the conversation is not plain data: {error}") from None
    answer = _WORKER.ask(request)
    if "error" in answer:
        raise InputError(f"the chat template {answer['error']}")
    return answer["text"]


def _as_read(message: Message) -> dict[str, Any]:
    """A message as transformers hands it on: absent for None, reasoning under its usual names."""
    given = {name: value for name, value in message.items() if value is not None}
    reasoning = next((given[name] for name in _REASONING if name in given), None)
    if reasoning is None:
        return given
    return {"thinking": reasoning, **given, "reasoning_content": reasoning}


class _Worker:
    """The process that renders; started when needed, and again after it was ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def ask(self, request: bytes) -> dict[str, Any]:
        """The worker's answer to a request of one line."""
        share = template_worker.allowance(len(request) + 1)
        answer: dict[str, Any] = {}
        with self._lock:
            process = self._start()
            assert process.stdin is not None and process.stdout is not None
            timer = threading.Timer(share * _WALL_SECONDS, process.kill)
            timer.start()
            try:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(request + b"\n")
                    process.stdin.flush()
                    line = process.stdout.readline()
                    answer = json.loads(line) if line.endswith(b"\n") else {}
            finally:
                timer.cancel()
                if not answer or answer.get("spent"):  # it has ended, or its answer is to come
                    self.stop()
        return answer or {"error": _cause(process.returncode, share)}

    def _start(self) -> subprocess.Popen[bytes]:
        process = self._process
        # A fork inherits the pipes and must not share them.
        if process is not None and self._owner == os.getpid() and process.poll() is None:
            return process
        self._owner = os.getpid()
        self._process = subprocess.Popen(
            # -P: the folder of this file holds modules of other names than it needs.
            [sys.executable, "-P", str(Path(template_worker.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C at the terminal is not for it
        )
        return self._process

    def stop(self) -> None:
        """Ends the process, if it is this one's."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        process.wait()


def _cause(status: int, share: int) -> str:
    if status in (-signal.SIGPROF, -signal.SIGKILL):
        return f"takes more than {share * template_worker.SECONDS:g} s"
    return f"failed: it ended its process (status {status})"


_WORKER = _Worker()
atexit.register(_WORKER.stop)
