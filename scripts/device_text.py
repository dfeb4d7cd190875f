"""The page of `scripts.device`: what was found, and what became of every part."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.hardware.spec import HardwareSpec
from scripts import bench_steps, kernelbench

_TAIL_LINES = 15


def page(found: Mapping[str, Any]) -> str:
    """Markdown."""
    parts = found["parts"]
    lines = [
        f"# {found['device']}",
        "",
        f"Written by `python -m scripts.device` on {found['date']}, jax {found['jax']}, Python "
        f"{found['python']}. Weights and inputs are random. [Measuring](../kernels.md#measuring) "
        "says how.",
        "",
        "| part | status | s |",
        "|---|---|---|",
    ]
    lines += [f"| {part['name']} | {_status(part)} | {part['seconds']:.0f} |" for part in parts]
    lines += [*_equal_tokens(parts)]
    for part in parts:
        lines += ["", f"## {part['name']}", "", f"    {_command(part['command'])}", ""]
        lines += _block(_lines(part))
    return "\n".join(lines) + "\n"


def _status(part: Mapping[str, Any]) -> str:
    return part["status"] if part["status"] != "not run" else f"not run: {part['tail']}"


def _command(command: Sequence[str]) -> str:
    """Without the path of this machine's interpreter."""
    is_python = ("python" in Path(word).name and "/" in word for word in command)
    words = ["python" if python else word for word, python in zip(command, is_python, strict=True)]
    return shlex.join(words)


def _lines(part: Mapping[str, Any]) -> list[str]:
    """What a part found, for people; the end of what it printed, where that is no JSON."""
    result, tail = part["result"], part["tail"].splitlines()[-_TAIL_LINES:]
    if result is None:
        return tail
    if "decode_steps" in result:
        rows = bench_steps.table(result["decode_steps"], HardwareSpec(**result["hardware"]))
    elif "hardware" in result:
        rows = kernelbench.table(result)
    else:
        rows = [repr(answer["text"]) for answer in result["results"]]
    return [*rows, *tail]


def _equal_tokens(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whether the device's tokens are the CPU's."""
    answers = [
        [answer["token_ids"] for answer in part["result"]["results"]]
        for part in parts
        if part["name"].startswith("tokens on") and part["result"] is not None
    ]
    if len(answers) < 2:
        return []
    pairs = list(zip(*answers, strict=True))
    equal = sum(one == other for one, other in pairs)
    return ["", f"Answers with the CPU's tokens: {equal} of {len(pairs)}."]


def _block(lines: Sequence[str]) -> list[str]:
    return [f"    {line}".rstrip() for line in lines]
