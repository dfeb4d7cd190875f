"""Comparisons of servers hold on what happened, and on nothing else."""

import importlib

import pytest

pytestmark = pytest.mark.quick_code


@pytest.fixture
def compare():
    return importlib.import_module("scripts.reports.peers.servers")


def test_the_one_that_is_measured_first_changes_every_turn(compare):
    runs = []

    def load(side, failed=0):
        def run(seed):
            runs.append((seed, side))
            return dict.fromkeys(compare.FIGURES, 2.0) | {"failed": failed, "side": side}

        return run

    turns = compare.compare("a", {"ours": load("ours"), "vllm": load("vllm")}, 3)
    assert len(turns) == 3
    assert all(turn[side]["side"] == side for turn in turns for side in ("ours", "vllm"))
    assert [side for _, side in runs[::2]] == ["ours", "vllm"] * 2
    assert [seed for seed, _ in runs[::2]] == [seed for seed, _ in runs[1::2]]
    with pytest.raises(SystemExit, match="2 requests of vllm failed"):
        compare.compare("a", {"ours": load("ours"), "vllm": load("vllm", failed=2)}, 3)


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
