"""Sessions of agents: what they send, when, and what is cached of them while tools run."""

import dataclasses

import pytest

from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.hardware.spec import HardwareSpec
from configs.workload import Fixed, Uniform, Workload
from inference.benchmark import agents, drive, metrics
from inference.benchmark.requests import TimedRequest, Turn
from inference.planner import cache_policy
from inference.planner.simulate import Simulator
from inference.scheduling.scheduler import Scheduler
from tests import fakes

CHIP = HardwareSpec("chip", 1e9, 1e9, {"float32": 1e10}, overhead_s=1e-3)
AGENTS = Workload(
    "agents", 40, concurrency=4, prompt=Uniform(20, 60), output=Uniform(8, 24), prefix_tokens=96,
    prefix_share=1.0, turns=Uniform(2, 5), result=Uniform(10, 90), tool_s=0.5, seed=3,
)  # fmt: skip
PAGE = 16


def simulated(num_pages: int) -> Simulator:
    model = dataclasses.replace(fakes.llama("float32"), max_context=1024)
    engine = EngineConfig.of(
        max_seqs=8, page_tokens=PAGE, chunk_tokens=32, prefill_chunks=(4,), decode_rows=(8,),
        preemption="recompute", cache_bytes=num_pages * sum(model.page_bytes(PAGE)),
    )  # fmt: skip
    config = Config(model, engine)
    return Simulator(config, Scheduler(config, *cache_policy.of_caches(config, CHIP)), CHIP)


def served(num_pages, load, concurrency=4):
    server = simulated(num_pages)
    return drive.drive(server, load, server.clock, concurrency)


def test_a_turn_begins_with_all_that_came_before():
    turns = (Turn(5.0, (8, 9), 3), Turn(0.25, (7,), 2))
    run = served(100, [TimedRequest(0.0, (1, 2, 3), 4, turns=turns)])
    first, second, third = run.requests
    assert second.request.prompt == (1, 2, 3, *first.token_ids, 8, 9)
    assert third.request.prompt == (*second.request.prompt, *second.token_ids, 7)
    for before, turn, after in zip(run.requests, turns, run.requests[1:], strict=False):
        assert after.arrival_s == before.token_s[-1] + turn.wait_s
    assert [len(record.token_ids) for record in run.requests] == [4, 3, 2]


def test_a_session_takes_one_place_while_its_tools_run():
    turn = (Turn(100.0, (8,), 1),)
    load = [TimedRequest(0.0, (n, n), 1, turns=turn) for n in range(1, 4)]
    run = served(100, load, concurrency=2)
    *_, last = sorted(record.arrival_s for record in run.requests if not record.request.turn)
    assert last > 100 and run.seconds > 200


def test_sessions_are_drawn_from_their_seed_and_fit():
    sessions = agents.sessions(AGENTS, 500, 1024)
    assert sessions == agents.sessions(AGENTS, 500, 1024)
    assert sessions != agents.sessions(dataclasses.replace(AGENTS, seed=4), 500, 1024)
    assert {len(session.turns) for session in sessions} == {1, 2, 3, 4}
    short = agents.sessions(AGENTS, 500, 250)
    assert all(
        s.num_tokens + sum(len(turn.tokens) + turn.num_new_tokens for turn in s.turns) <= 250
        for s in short
    )
    assert agents.num_requests(short) < agents.num_requests(sessions)
    with pytest.raises(InputError, match="the context holds 100"):
        agents.sessions(AGENTS, 500, 100)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"turns": None}, "workload.turns is needed where kind is 'agents'"),
        ({"tool_s": -1.0}, "workload.tool_s is a number of seconds from 0, not -1.0"),
        ({"kind": "closed"}, "workload.turns goes with kind 'agents', not with 'closed'"),
    ],
)
def test_workloads_that_are_none(changes, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(AGENTS, **changes)


def test_figures_of_turns():
    run = served(3000, agents.sessions(AGENTS, 500, 1024))
    first, *later = agents.by_turn([run], PAGE)
    assert first["requests"] == 40 and "kept_share" not in first
    assert sum(row["requests"] for row in (first, *later)) == len(run.requests)
    assert all(row["kept_share"] == 1 for row in later)  # nothing was evicted
    assert [row["turn"] for row in (first, *later)] == [1, 2, 3, 4, 5]
    num_new = sum(row["requests"] * row["new_tokens"] for row in (first, *later))
    assert num_new == pytest.approx(metrics.figures(run)["prefilled_tokens"])


def test_what_tools_wait_for_is_kept_beside_other_prompts(monkeypatch):
    """The same load and cache, with and without the word that a session goes on."""
    other = Workload("closed", 80, prompt=Fixed(160), output=Fixed(4), seed=9)
    others = agents.requests.generate(other, 500, 1024)
    sessions = agents.sessions(AGENTS, 500, 1024)
    load = [request for n, s in enumerate(sessions) for request in (s, *others[2 * n :][:2])]

    def kept_share() -> float:
        turns = agents.by_turn([served(110, load, concurrency=8)], PAGE)[1:]
        weights = [row["requests"] for row in turns]
        shares = [row["kept_share"] for row in turns]
        return sum(map(float.__mul__, weights, shares)) / sum(weights)

    retained = kept_share()
    monkeypatch.setattr(Simulator, "retain", lambda self, tokens: None)
    forgotten = kept_share()
    assert 1 - retained < 0.6 * (1 - forgotten) and forgotten < 0.95
