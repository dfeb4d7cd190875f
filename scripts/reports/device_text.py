"""The page of `scripts.device`: how every part ended, and what it found."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scripts.reports import agreement, bench_text, kernel_text, product_text, steps_text
from scripts.reports.agreement import Agreement

_TAIL_LINES = 15
_NEAR_TIE = 0.1  # nats; on a CPU bfloat16 is off float32 by 0.048, either way


def page(results: Mapping[str, Any]) -> str:
    parts = results["parts"]
    lines = [
        f"# {results['device']}",
        "",
        f"Begun by `python -m scripts.device` on {results['date']}, jax {results['jax']}, Python "
        f"{results['python']}. Weights and inputs are random. [Measuring](../kernels.md#measuring) "
        "says how.",
        "",
        "| part | status | s | date |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {part['name']} | {_status(part)} | {part['seconds']:.0f} | {part['date']} |"
        for part in parts
    ]
    for line in _agreements(parts):
        lines += ["", line]
    for part in parts:
        lines += ["", f"## {part['name']}", "", f"    {_command(part['command'])}", ""]
        lines += _block(_lines(part, parts))
    return "\n".join(lines) + "\n"


def _status(part: Mapping[str, Any]) -> str:
    return part["status"] if part["status"] != "not run" else f"not run: {part['tail']}"


def _command(command: Sequence[str]) -> str:
    """Without the path of this machine's interpreter."""
    is_python = ("python" in Path(word).name and "/" in word for word in command)
    words = ["python" if python else word for word, python in zip(command, is_python, strict=True)]
    return shlex.join(words)


def _lines(part: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a part found, for people; or the end of what it printed, where that is no JSON."""
    result, tail = part["result"], part["tail"].splitlines()[-_TAIL_LINES:]
    if result is None:
        return tail
    if any("matrix" in row for row in result.get("rows", ())):
        rows = product_text.table(result)
    elif "peer" in result:
        rows = _beside(result, parts)
    elif "decode_steps" in result or "prefill_steps" in result:
        rows = steps_text.lines(result)
    elif "warm_up_s" in result:
        rows = bench_text.load_table(result)
    elif "rows" in result:
        rows = kernel_text.table(result)
    elif "hardware" in result:
        rows = product_text.ceilings(result)
    else:
        rows = [repr(answer["text"]) for answer in result["results"]]
    return [*rows, *tail]


def _beside(peer: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """A peer's steps, and ours of the same sizes by the part that measured them first."""
    lines = [f"{'':24}{'peer ms':>10}{'ours ms':>10}{'peer / ours':>14}   {peer['peer']}"]
    for kind, unit in (("decode", "context"), ("prefill", "tokens")):
        engine_s: dict[tuple[int, int], float] = {}
        for part in reversed(parts):
            result = part["result"] or {}
            for row in result.get(f"{kind}_steps", ()) if "peer" not in result else ():
                if "measured_s" in row:
                    engine_s[row["rows"], row[unit]] = row["measured_s"]
        for row in peer[f"{kind}_steps"]:
            peer_s, size = row["measured_s"], (row["rows"], row[unit])
            line = f"{f'{kind} {size[0]} x {size[1]}':24}{1e3 * peer_s:10.3f}"
            if size in engine_s:
                line += f"{1e3 * engine_s[size]:10.3f}{peer_s / engine_s[size]:14.2f}"
            lines.append(f"{line:58}   {row['attention']}")
    return lines


class Tokens(NamedTuple):
    """A part's answers beside those of the CPU."""

    name: str
    num_answers: int
    agreement: Agreement

    @property
    def agrees(self) -> bool:
        return self.agreement.worst <= _NEAR_TIE


def tokens(parts: Sequence[Mapping[str, Any]]) -> list[Tokens]:
    """The real model's answers on the device, beside those of the CPU."""
    answers = {
        part["name"]: [agreement.Answer.of_json(result) for result in part["result"]["results"]]
        for part in parts
        if part["name"].startswith("tokens-") and part["result"] is not None
    }
    expected = answers.pop("tokens-cpu", None)
    return [
        Tokens(name, len(device_answers), agreement.compare(device_answers, expected))
        for name, device_answers in answers.items()
        if expected is not None
    ]


def _agreements(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"{part.name}: {part.agreement.equal} of {part.num_answers} answers have the CPU's tokens; "
        f"scores differ by {part.agreement.worst:.3f} up to the first other token, itself "
        "included: "
        f"{'as rounding may' if part.agrees else f'WRONG, more than {_NEAR_TIE}'}."
        for part in tokens(parts)
    ]


def _block(lines: Sequence[str]) -> list[str]:
    return [f"    {line}".rstrip() for line in lines]
