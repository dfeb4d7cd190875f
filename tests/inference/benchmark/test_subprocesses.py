"""Subprocesses with limits of their own."""

import sys

import pytest

from inference.benchmark import subprocesses
from inference.benchmark.subprocesses import Subprocess


def python(name, code, limit_s=60.0, **fields):
    return Subprocess(name, (sys.executable, "-c", code), limit_s, **fields)


@pytest.fixture
def run(tmp_path):
    def run(*given, budget_s=60.0, **environment):
        return list(subprocesses.run(given, budget_s, tmp_path, environment))

    return run


def test_what_became_of_each(run):
    outcomes = run(
        python("json", "import os; print('{\"a\": ' + os.environ['N'] + '}')", is_json=True),
        python("text", "print('x' * 5000 + 'end')"),
        python("broken", "import sys; print('so far'); sys.exit('why')"),
        python("no json", "print('oops')", is_json=True),
        python(
            "half", "import sys; print('{}\\n{\"a\": 1}\\n{\"a'); sys.exit('late')", is_json=True
        ),
        python("absent", "", missing="no such weights"),
        N="3",
    )
    by_name = {outcome.name: outcome for outcome in outcomes}
    assert [outcome.status for outcome in outcomes] == [
        "done", "done", "failed", "failed", "failed", "not run"
    ]  # fmt: skip
    assert by_name["json"].result == {"a": 3} and by_name["json"].tail == ""
    assert by_name["text"].result is None and by_name["text"].tail.endswith("xend")
    assert len(by_name["text"].tail) == 3000
    assert by_name["broken"].tail == "so far\n\nwhy"
    assert by_name["no json"].tail == "oops"
    assert by_name["half"].result == {"a": 1} and by_name["half"].tail.endswith("late")
    assert by_name["absent"].tail == "no such weights"


def test_a_program_is_ended_with_its_children(run, monkeypatch):
    monkeypatch.setattr(subprocesses, "_LEAST_S", 0.1)
    command = "sh", "-c", "sleep 1000 & echo 1; sleep 1000"
    late, never = run(
        Subprocess("late", command, 2.0, is_json=True), python("next", ""), budget_s=2.05
    )
    assert late.status == "out of time" and late.seconds >= 2 and late.result == 1
    assert never.status == "not run" and never.tail == "no time is left"


def test_a_later_program_may_depend_on_what_came_before(run):
    seen = []

    def given():
        yield python("first", "print(1)")
        yield python("second", f"print({len(seen)})")

    for outcome in subprocesses.run(given(), 60.0, ".", {}):
        seen.append(outcome)
    assert [outcome.tail for outcome in seen] == ["1", "1"]
