"""Drills hold on what happened, and on nothing else; what breaks down is a line, and no silence."""

import json
import random
import sys
import threading

import pytest

from tests.drills import (
    __main__ as program,
)
from tests.drills import (
    catalog,
    flipped_bits,
    harness,
    hostile,
    hostile_requests,
    schemas,
    server_faults,
)
from tests.drills.harness import Drill, Outcome, Skipped
from tests.drills.hostile_requests import Case

WHOLE = {"status": 200, "reasons": ["length"], "error": "", "text": ["a"], "gaps": [0.1, 8.0, 0.1],
         "at_s": 0.0, "first_s": 1.0, "num_tokens": 4}  # fmt: skip
REFUSED = {"status": 503, "reasons": [], "error": "", "text": [], "gaps": []}
UNTOUCHED = {**WHOLE, "gaps": [0.1, 0.1, 0.1]}


class Served:
    """A server that answers as it is told, and whose engine takes 8 s to be replaced."""

    port, engine = 1, 2

    def get(self, flags):
        return self

    def wait_replaced(self, engine):
        return 8.0

    def wait_idle(self):
        pass

    def close(self):
        pass


@pytest.mark.parametrize("before, after, holds", [
    (WHOLE, WHOLE, True), (REFUSED, REFUSED, False), (WHOLE, REFUSED, False),
    (WHOLE, UNTOUCHED, False), (WHOLE, {**WHOLE, "text": ["b"]}, False),
    (WHOLE, {**WHOLE, "error": "lost"}, False),
])  # fmt: skip
def test_a_killed_engine_is_one_under_streams_that_end_whole(monkeypatch, before, after, holds):
    class Clients:
        def __init__(self, port, requests, most_s):
            self.num = len(requests)

        def wait(self):
            return {"answers": [after] * self.num}

    def ask(server, requests, most_s):
        return {"seconds": 0.0, "answers": [before] * len(requests)}

    monkeypatch.setattr(server_faults, "Clients", Clients)
    monkeypatch.setattr(server_faults.server_process, "kill", lambda pid: None)
    monkeypatch.setattr(server_faults, "ask", ask)
    setting = harness.Setting(Served(), True, 1, 4)
    assert server_faults.kill_engine(setting).holds is holds


def test_a_rate_is_that_of_whole_answers_within_the_seconds():
    evenly = {**WHOLE, "gaps": [1.0] * 9, "first_s": 1.0, "at_s": 0.0}  # tokens from 1 to 10 s
    rate = server_faults._rate([evenly] * 3 + [REFUSED], 8)
    assert rate == pytest.approx(3 * 0.6 / 6)
    assert server_faults._rate([{**evenly, "at_s": 7.0}], 8) == 0


def breaks_down(setting):
    raise OSError("no room | at all")


def is_skipped(setting):
    raise Skipped("there is no moon")


def test_a_run_prints_and_writes_drill_bar_and_figure(monkeypatch, capsys, tmp_path):
    def counts(setting):
        assert setting.folder.is_dir() and setting.quick
        return Outcome(True, f"{setting.size(100, 3)} of 3", {"count": 3})

    drills = (
        Drill("long", "minutes", lambda setting: Outcome(False, "2 lost"), 60, is_long=True),
        Drill("counts", "3 of 3", counts, 60),
        Drill("breaks", "it holds", breaks_down, 60, is_timed=True),
        Drill("skips", "a moon", is_skipped, 60),
    )
    monkeypatch.setattr(catalog, "DRILLS", drills)
    page, figures = tmp_path / "drills.md", tmp_path / "drills.json"
    flags = ["--quick", f"--page={page}", f"--json={figures}"]
    monkeypatch.setattr(sys, "argv", ["drills", *flags])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 1, "two do not hold"
    lines = page.read_text().splitlines()
    assert "1 of 3 drills hold" in lines[2] and "commit " in lines[2]
    assert [line.rpartition(" | ")[0] for line in lines[-4:]] == [
        "| long | **FAILS** | minutes | 2 lost",
        "| counts | holds | 3 of 3 | 3 of 3",
        "| breaks | **FAILS** | it holds | broke down: OSError: no room / at all",
        "| skips | skipped | a moon | there is no moon",
    ]
    lines_printed = capsys.readouterr().out.splitlines()
    assert any(line.endswith("breaks begins: it holds") for line in lines_printed)
    assert json.loads(figures.read_text())["counts"] == {"count": 3}
    monkeypatch.setattr(sys, "argv", ["drills", "--quick", "--only=counts,skips"])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 0


def test_a_drill_whose_time_is_over_is_stopped_and_has_failed(monkeypatch, capsys):
    def hangs(setting):
        threading.Event().wait()

    monkeypatch.setattr(harness, "START_S", 0)
    drills = (
        Drill("hangs", "it ends", hangs, 0.01),
        Drill("hangs_long", "it ends", hangs, 0.01, is_long=True),
        Drill("counts", "1", lambda setting: Outcome(True, "1"), 60),
    )
    rows = harness.Harness([], True, 0, 4).run(drills)
    assert [row.mark for row in rows] == ["FAILS", "FAILS", "holds"]
    assert [row.text for row in rows[:2]] == ["stopped: its time is over (limit 0 s)"] * 2
    assert "hangs FAILS after 0 s: stopped: " in capsys.readouterr().out


def test_all_drills_fit_into_half_an_hour():
    """But for what is asked for in addition: suites, and replicas, which need Ray."""
    drills = [drill for drill in catalog.DRILLS if drill.name != "replicas"]
    timed = [drill.limit_s for drill in drills if drill.is_timed]
    long = [drill.limit_s + 20 * 60 for drill in drills if drill.is_long]
    beside_soak = [drill.limit_s for drill in drills if not drill.is_timed and not drill.is_long]
    assert 2 * harness.START_S + sum(timed) + max(sum(long), sum(beside_soak)) <= 30 * 60


def test_names_differ_and_one_that_is_none_is_refused(monkeypatch, capsys):
    names = [drill.name for drill in (*catalog.DRILLS, *catalog.SUITES)]
    assert len({*names}) == len(names) >= 18
    monkeypatch.setattr(sys, "argv", ["drills", "--only=soak,nope"])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert (
        ended.value.code == 2 and "--only=nope: no such drill; valid: " in capsys.readouterr().err
    )


def test_one_bit_is_flipped_in_any_file(tmp_path):
    files = [tmp_path / "a", tmp_path / "b" / "c"]
    files[1].parent.mkdir()
    dice, flipped_files = random.Random(0), set()
    for _ in range(20):
        for file in files:
            file.write_bytes(bytes(50))
        path, bit = flipped_bits.flipped(tmp_path, dice)
        flipped_files.add(path)
        data = b"".join(file.read_bytes() for file in files)
        assert sum(byte.bit_count() for byte in data) == 1 and path.read_bytes()[bit // 8]
    assert flipped_files == {*files}


ANSWER = b"HTTP/1.1 400 Bad Request\r\n\r\n"


@pytest.mark.parametrize("status, answer, fault", [
    (400, b'{"error": {"message": "temperature is at most 2"}}', None),
    (200, b"{}", "status 200"), (500, b"{}", "status 500"), (-1, b"", "no answer in time"),
    (0, b"", "status 0"), (400, b"at 0x7f00aa11bb", "holds '0x7f00aa11bb'"),
    (400, b"in /usr/lib/x", "holds '/usr/'"), (400, b"ValueError: x", "holds 'ValueError:'"),
])  # fmt: skip
def test_what_is_wrong_with_an_answer(status, answer, fault):
    case = Case("any", (b"",), (400,))
    reason = hostile.fault(case, status, ANSWER + answer)
    assert reason is None if fault is None else fault in reason


def test_hostile_requests_are_many_and_each_says_what_may_come():
    cases = hostile_requests.cases()
    assert len(cases) >= 400 and len({case.name for case in cases}) == len(cases)
    assert all(case.parts and case.expected and max(case.expected) < 500 for case in cases)


@pytest.mark.parametrize("changes, holds", [
    ({}, True), ({"generated": 2999}, False), ({"with_failures": 1}, False),
    ({"errored": 1}, False),
])  # fmt: skip
def test_a_report_of_schemathesis(tmp_path, changes, holds):
    report = tmp_path / "report.json"
    assert not schemas.judged(report, 0, 3000, True).holds
    cases = {"generated": 3000, "with_failures": 0, "errored": 0} | changes
    results = {
        "test_cases": cases,
        "operations": {"tested": 15},
        "failures": [{"operations": ["POST /x"], "title": "Server error"}] * (not holds),
    }
    report.write_text(json.dumps(results))
    assert schemas.judged(report, 0, 3000, True).holds is holds
    assert not schemas.judged(report, 0, 3000, False).holds
