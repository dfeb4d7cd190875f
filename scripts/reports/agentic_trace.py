"""Requests of coding agents, generated: sessions on one repository that share no conversation.

Each session is given a task, reads a file, edits a function, runs the tests and reports, a request
a turn whose prompt is all that came before. Sessions share the system prompt, the repository and
habits of phrasing; two of them, which sample the same task, differ in phrasing alone. Tokens are
words and signs.
"""

import random
import re
from collections.abc import Sequence
from typing import NamedTuple

_TOOLS = (
    ("read_file", "path", "returns the text of a file"),
    ("edit_file", "path, old, new", "replaces a passage that occurs once"),
    ("run", "command", "runs a command and returns what it prints"),
)
_VERBS = "load parse merge split find check write close filter order count join".split()  # noqa: SIM905
_NOUNS = "rows names pages items keys spans tokens paths blocks parts edges users".split()  # noqa: SIM905
_LINES = (
    "if not {0} : return None",
    "for {0} in {1} : {2} . append ( {0} )",
    "{0} = {1} ( {2} , {3} )",
    "{0} = [ {1} for {1} in {2} if {1} != {3} ]",
    "assert len ( {0} ) == len ( {1} ) , {2}",
    "with open ( {0} ) as {1} : {2} = {1} . read ( )",
)
_PLANS = (
    "I will read the file first .",
    "Let me look at the code before I change it .",
    "First I read the function in question .",
)
_EDITS = (
    "The name is wrong in one place ; I replace it .",
    "I see the mistake . Here is the change :",
    "This line uses the wrong name , so I edit it :",
)
_RUNS = (
    "Now I run the tests .",
    "Let me check that the tests pass .",
    "To be sure I run the tests .",
)
_REPORTS = (
    "Done : {0} in {1} now uses {2} , and all tests pass .",
    "I changed {0} ( {1} ) to use {2} . The tests pass .",
    "The tests pass . {0} of {1} reads {2} now .",
)


class Request(NamedTuple):
    """One turn of a session."""

    prompt: list[int]
    answer: list[int]


def requests(num_tasks: int = 8, samples: int = 2, seed: int = 0) -> list[Request]:
    """The turns of `num_tasks` tasks, each sampled so often, session after session."""
    draw = random.Random(seed)
    files = {f"src/{noun}.py": _functions(draw) for noun in _NOUNS[:6]}
    system = (
        " ".join(f"tool {name} takes {takes} and {does} ." for name, takes, does in _TOOLS)
        + " Answer with one call a turn , as JSON , until the task is done ."
    )
    vocabulary: dict[str, int] = {}
    turns = []
    tasks = [_task(draw, files) for _ in range(num_tasks)]
    for session in range(num_tasks * samples):
        conversation = [system]
        for observation, answer in _session(draw, files, *tasks[session % num_tasks]):
            conversation.append(observation)
            turns.append(Request(_ids(vocabulary, conversation), _ids(vocabulary, [answer])))
            conversation.append(answer)
    return turns


def _functions(draw: random.Random) -> dict[str, str]:
    functions = {}
    for verb in draw.sample(_VERBS, 4):
        name = f"{verb}_{draw.choice(_NOUNS)}"
        body = [
            draw.choice(_LINES).format(*draw.sample(_NOUNS, 4)) for _ in range(draw.randint(3, 6))
        ]
        functions[name] = " \n ".join([f"def {name} ( {', '.join(_NOUNS[:2])} ) :", *body])
    return functions


def _task(draw: random.Random, files: dict[str, dict[str, str]]) -> tuple[str, str, str, str]:
    path = draw.choice(sorted(files))
    function = draw.choice(sorted(files[path]))
    wrong = draw.choice([word for word in files[path][function].split() if word in _NOUNS])
    return path, function, wrong, draw.choice([noun for noun in _NOUNS if noun != wrong])


def _session(
    draw: random.Random, files: dict[str, dict[str, str]], path: str, function: str, wrong: str,
    right: str,
) -> list[tuple[str, str]]:  # fmt: skip
    """Of each turn what the agent is given, and its answer."""
    old = files[path][function]
    call = 'call {{ " name " : " {0} " , {1} }}'.format
    return [
        (
            f"task : {function} in {path} uses {wrong} where it should use {right} .",
            f"{draw.choice(_PLANS)} {call('read_file', f' path : {path}')}",
        ),
        (
            " \n ".join(files[path].values()),
            f"{draw.choice(_EDITS)} "
            + call("edit_file", f"path : {path} , old : {old} , new : {old.replace(wrong, right)}"),
        ),
        ("edited .", f"{draw.choice(_RUNS)} {call('run', f'command : pytest tests / {path} - q')}"),
        (
            f"{draw.randint(3, 90)} passed in {draw.randint(1, 60)} s",
            draw.choice(_REPORTS).format(function, path, right),
        ),
    ]  # fmt: skip


def _ids(vocabulary: dict[str, int], texts: Sequence[str]) -> list[int]:
    words = re.findall(r"\w+|\n|[^\w\s]", "\n".join(texts))
    return [vocabulary.setdefault(word, len(vocabulary)) for word in words]
