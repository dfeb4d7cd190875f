"""Rewards: what they are, and that nothing in them ends or stops a training."""

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import jsonschema
import pytest

from configs.errors import InputError
from inference.training import reward_worker, rewards
from inference.training.rewards import RewardError

SAMPLES = "tests.inference.training.reward_samples"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"type": "integer", "minimum": 1}},
    "required": ["size"],
    "additionalProperties": False,
}


def sample(name: str, time_limit_s: float = 60.0) -> rewards.FunctionReward:
    return rewards.of_name(f"{SAMPLES}:{name}", time_limit_s)


def is_there(process_id: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process_id, 0)
        with open(f"/proc/{process_id}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    return False


# --- by name --------------------------------------------------------------------------------------


def test_exact_asks_for_the_answer_of_the_line_but_for_white_space():
    with rewards.of_name("exact") as reward:
        assert reward({"answer": "42"}, " 42\n") == 1
        assert reward({"answer": "42"}, "420") == 0
        with pytest.raises(RewardError, match="'answer'|answer"):
            reward({}, "42")


def test_a_regex_matches_anywhere_unless_it_is_anchored():
    with rewards.of_name("regex") as reward:
        assert reward({"regex": r"\b4\d\b"}, "it is 42.") == 1
        assert reward({"regex": r"\A4\d\Z"}, "it is 42.") == 0
        assert reward({"regex": r"(?s)\A<think>.*</think>\n(?=\d)"}, "<think>a\nb</think>\n4") == 1


def test_a_regex_that_explodes_is_dropped_and_the_next_one_counts():
    with rewards.of_name("regex", 0.5) as reward:
        lines = [{"regex": r"(a+)+b"}, {"regex": "a"}]
        scores = rewards.of_batch(reward, lines, ["a" * 64, "a"])
    assert math.isnan(scores.rewards_B[0]) and scores.rewards_B[1] == 1
    assert scores.reasons == ["it takes more than 0.5 s"]


TEXTS = [
    '{"size": 2, "name": "x"}', '{"name":"x","size":2}', '{\n  "size": 2\n}', ' {"size": 2.0} ',
    '{"size": 0}', '{"name": "x"}', '{"size": 2, "more": 1}', '{"size": 2', '{"size": 2} so',
    '"{}"', "", '{"size": 1, "name": "\\u00e9\\u007f"}', '{"size": "1"}',
]  # fmt: skip


def test_json_of_a_schema_is_what_another_judge_says():
    with rewards.of_name("json_schema") as reward:
        values = [reward({"schema": SCHEMA}, text) for text in TEXTS]
    assert values == list(map(is_valid, TEXTS)) and set(values) == {0, 1}


def is_valid(text: str) -> bool:
    try:
        return jsonschema.Draft202012Validator(SCHEMA).is_valid(json.loads(text))
    except json.JSONDecodeError:
        return False


def test_lines_are_checked_before_anything_is_drawn():
    rewards.check_line("exact", {"answer": ""})
    rewards.check_line("regex", {"regex": "a|b"})
    rewards.check_line("json_schema", {"schema": SCHEMA})
    rewards.check_line("some.module:function", {})
    bad = [
        ("exact", {}, "'answer' is a text, not None"),
        ("exact", {"answer": 4}, "'answer' is a text, not 4"),
        ("regex", {"regex": "("}, "'regex' is no regular expression: .*unterminated"),
        ("json_schema", {"schema": "{}"}, "'schema' is a JSON schema, an object"),
        ("json_schema", {"schema": {"type": "wrong"}}, "wrong"),
        ("json_schema", {"schema": {"type": "array", "uniqueItems": True}},
         "uniqueItems of the schema cannot be checked"),
    ]  # fmt: skip
    for name, line, message in bad:
        with pytest.raises(InputError, match=message):
            rewards.check_line(name, line)


# --- of users -------------------------------------------------------------------------------------


def test_a_function_has_the_line_and_the_answer():
    with sample("length") as reward:
        assert reward({}, "abc\udc80é") == 5
        assert reward({"factor": 0.5}, "abc") == 1.5


def test_a_function_may_return_any_finite_number():
    with sample("is_short") as reward:
        assert (reward({}, "a"), reward({}, "abc")) == (1.0, 0.0)


def test_what_a_function_raises_is_the_reason():
    with sample("raises") as reward:
        scores = rewards.of_batch(reward, [{}] * 3, ["good", "bad", "good"])
    assert scores.rewards_B.tolist() == pytest.approx([1, math.nan, 1], nan_ok=True)
    assert scores.reasons == ["it raises ValueError: this answer cannot be judged"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("nan", "it returns nan, which is not finite"),
        ("infinite", "it returns inf, which is not finite"),
        ("text", "it returns '1', which is no number"),
        ("nothing", "it returns None, which is no number"),
        ("list", r"it returns \[1\], which is no number"),
        ("huge", "it returns .*, which is no number"),
    ],
)
def test_what_is_no_finite_number_is_no_reward(answer, reason):
    with sample("returns") as reward:
        with pytest.raises(RewardError, match=f"^{reason}$"):
            reward({}, answer)
        assert reward({}, "another") == 2


def test_a_function_that_hangs_is_ended_and_started_again():
    with sample("hangs", 0.5) as reward:
        scores = rewards.of_batch(reward, [{}] * 3, ["slow", "quick", "slow"])
    assert scores.rewards_B.tolist() == pytest.approx([math.nan, 1, math.nan], nan_ok=True)
    assert scores.reasons == ["it takes more than 0.5 s"] * 2


def test_what_a_function_started_ends_with_its_process():
    with sample("starts_a_process") as reward:
        process_id = int(reward({}, ""))
        assert is_there(process_id)
    while is_there(process_id):  # it was sent its signal, and nobody can wait for it
        time.sleep(0.01)


@pytest.mark.parametrize("name, signal_number", [
    ("hangs", signal.SIGALRM), ("starts_a_process", signal.SIGKILL),
])  # fmt: skip
def test_nothing_goes_on_where_the_training_was_killed(name, signal_number):
    """A parent that is killed ends no call, and closes the pipe."""
    start = {"path": sys.path, "function": f"{SAMPLES}:{name}", "limit_s": 0.1}
    lines = [json.dumps(fields) for fields in (start, {"line": {}, "answer": "slow"})]
    command = [sys.executable, "-P", reward_worker.__file__]
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **pipe) as process:
        out, _ = process.communicate("".join(f"{line}\n" for line in lines))
    assert process.returncode == -signal_number
    for reply in map(json.loads, out.splitlines()[1:]):
        while is_there(int(reply["reward"])):
            time.sleep(0.01)


def test_a_function_that_ends_its_process_is_started_again():
    with sample("exits") as reward:
        scores = rewards.of_batch(reward, [{}] * 4, ["exit", "go on", "end", "go on"])
    assert scores.rewards_B.tolist() == pytest.approx([math.nan, 1, math.nan, 1], nan_ok=True)
    assert scores.reasons == ["it raises SystemExit: enough", "it ends its process (status 3)"]


def test_what_a_function_prints_is_no_reply(capfd):
    with sample("prints") as reward:
        assert [reward({}, ""), reward({}, "")] == [0, 0]
    assert capfd.readouterr() == ("", "")


def test_one_process_calls_all_and_closing_ends_it():
    reward = sample("process_id")
    first, second = reward({}, ""), reward({}, "")
    assert first == second != os.getpid() and is_there(int(first))
    reward.close()
    assert not is_there(int(first))
    reward.close()


def test_a_function_has_no_device_of_the_training(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    with sample("device") as reward:
        assert reward({}, "") == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exactly", "training.reward='exactly': no reward has this name; valid: exact, regex, "
         "json_schema or module:function"),
        ("a:b:c", "training.reward='a:b:c': no reward has this name"),
        ("no_such_module:f", "training.reward=no_such_module:f: it raises ModuleNotFoundError: "
         "No module named 'no_such_module'"),
        (f"{SAMPLES}:rewards", f"training.reward={SAMPLES}:rewards: the module has no such "
         "function; valid: length, is_short, raises"),
        (f"{SAMPLES}:CONSTANT", "the module has no such function"),
        (f"{SAMPLES}:of_three", "the function does not take the two arguments (line, answer)"),
    ],
)  # fmt: skip
def test_what_cannot_be_called_is_refused_at_the_start(name, message):
    with pytest.raises(InputError, match=re.escape(message)):
        rewards.of_name(name)
