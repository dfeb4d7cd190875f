"""Drills and comparisons hold on what happened, and on nothing else."""

import importlib
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick_code

DOCS = Path(__file__).resolve().parents[1] / "docs"
WHOLE = {"status": 200, "reasons": ["length"], "error": "", "text": ["a"], "gaps": [0.1, 8.0, 0.1],
         "at_s": 0.0, "first_s": 1.0, "num_tokens": 4}  # fmt: skip
REFUSED = {"status": 503, "reasons": [], "error": "", "text": [], "gaps": []}
UNTOUCHED = {**WHOLE, "gaps": [0.1, 0.1, 0.1]}


@pytest.fixture
def drills(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("make_drills")


class Served:
    """A server that answers as it is told, and whose engine takes 8 s to be replaced."""

    port, engine = 1, 2

    def __init__(self, before, after):
        self.before, self.after = before, after

    def get(self, flags):
        return self

    def wait_replaced(self, engine):
        return 8.0

    def wait_idle(self):
        pass


@pytest.mark.parametrize("before, after, holds", [
    (WHOLE, WHOLE, True), (REFUSED, REFUSED, False), (WHOLE, REFUSED, False),
    (WHOLE, UNTOUCHED, False), (WHOLE, {**WHOLE, "text": ["b"]}, False),
    (WHOLE, {**WHOLE, "error": "lost"}, False),
])  # fmt: skip
def test_a_killed_engine_is_one_under_streams_that_end_whole(
    drills, monkeypatch, before, after, holds
):
    class Clients:
        def __init__(self, port, requests, most_s):
            self.num = len(requests)

        def wait(self):
            return {"answers": [after] * self.num}

    monkeypatch.setattr(drills, "Clients", Clients)
    monkeypatch.setattr(drills.drill_server, "kill", lambda pid: None)
    told = {"seconds": 0.0}
    monkeypatch.setattr(
        drills, "ask", lambda server, asked, most_s: told | {"answers": [before] * len(asked)}
    )
    drill = drills.Drill(Served(before, after), True, 1, 4)
    assert drills.kill_engine(drill)["holds"] is holds


def test_a_rate_is_that_of_whole_answers_within_the_seconds(drills):
    evenly = {**WHOLE, "gaps": [1.0] * 9, "first_s": 1.0, "at_s": 0.0}  # tokens from 1 to 10 s
    assert drills._rate([evenly] * 3 + [REFUSED], 8) == pytest.approx(3 * 0.6 / 6)
    assert drills._rate([{**evenly, "at_s": 7.0}], 8) == 0


@pytest.fixture
def compare():
    return importlib.import_module("docs.compare_servers")


def test_the_one_that_is_measured_first_changes_every_turn(compare, capsys):
    asked = []

    def load(who, failed=0):
        def run(seed):
            asked.append((seed, who))
            return dict.fromkeys(compare.FIGURES, 2.0) | {"failed": failed, "who": who}

        return run

    found = compare.by_turns("a", (load("ours"), load("vllm")), 3, "vllm")
    assert all(turn[who]["who"] == who for turn in found for who in ("ours", "vllm"))
    firsts = [who for _, who in asked[::2]]
    assert firsts in (["ours", "vllm"] * 2, ["vllm", "ours"] * 2)
    assert [seed for seed, _ in asked[::2]] == [seed for seed, _ in asked[1::2]]
    with pytest.raises(SystemExit, match="2 requests of vllm failed"):
        compare.by_turns("a", (load("ours"), load("vllm", failed=2)), 3, "vllm")


def test_the_engine_beside_the_server_has_its_settings(compare, monkeypatch):
    from absl.testing import flagsaver

    from inference import engine
    from scripts import serve

    given = {}

    class Loaded:
        @classmethod
        def from_model(cls, model, **settings):
            given.update(settings)
            return cls()

        def warm_up(self, seals):
            pass

    monkeypatch.setattr(engine, "Engine", Loaded)
    monkeypatch.setattr(compare.sys, "stdin", [])
    with flagsaver.flagsaver():
        compare.serve_loads("smollm2-135m", 5)
        assert given == serve.engine_needs() and given["embeddings"]
    assert given["max_seqs"] == 5 and given["max_context"] == compare.MAX_LEN
