"""Distributions of lengths and descriptions of workloads: what they draw, what they refuse."""

import random
import statistics

import pytest

from configs.errors import InputError
from configs.workload import SHAREGPT_PROMPT, Fixed, LogNormal, Uniform, Workload, parse_lengths


@pytest.mark.parametrize(
    "text, lengths",
    [
        ("fixed:150", Fixed(150)),
        ("uniform:10:200", Uniform(10, 200)),
        ("lognormal:150:1.0", LogNormal(150, 1.0)),
        ("lognormal:150.5:0:300", LogNormal(150.5, 0, 300)),
        ("sharegpt-prompt", SHAREGPT_PROMPT),
    ],
)
def test_lengths_as_they_are_written(text, lengths):
    assert parse_lengths(text) == lengths


def test_draws():
    rng = random.Random(0)
    assert {Fixed(7).draw(rng) for _ in range(9)} == {7}
    assert {Uniform(3, 5).draw(rng) for _ in range(99)} == {3, 4, 5}
    drawn = [LogNormal(150, 1.0).draw(rng) for _ in range(20_000)]
    assert statistics.fmean(drawn) == pytest.approx(150, rel=0.05)
    assert statistics.median(drawn) == pytest.approx(150 / 2.718**0.5, rel=0.05)
    assert min(drawn) >= 1
    assert max(LogNormal(150, 2.0, most=400).draw(rng) for _ in range(999)) == 400


@pytest.mark.parametrize(
    "text",
    ["", "fixed", "fixed:", "fixed:1.5", "fixed:1:2", "uniform:1", "uniform:1.0:2", "zipf:2",
     "lognormal:150", "lognormal:a:1", "lognormal:1:1:2.5", "lognormal:1:1:2:3"],
)  # fmt: skip
def test_lengths_that_are_none(text):
    with pytest.raises(InputError, match=r"lengths are fixed:N, uniform:LOW:HIGH, lognormal:MEAN"):
        parse_lengths(text)


@pytest.mark.parametrize(
    "text, message",
    [
        ("fixed:0", "fixed lengths are from 1 to 1048576 tokens"),
        ("fixed:-3", "not -3"),
        ("uniform:9:3", "in order, not 9 to 3"),
        ("uniform:0:3", "not 0 to 3"),
        ("lognormal:0.5:1", "lognormal's mean is from 1 to 1048576 tokens, not 0.5"),
        ("lognormal:nan:1", "not nan"),
        ("lognormal:99:1:50", "mean is from 1 to 50 tokens"),
        ("lognormal:9:-1", "lognormal's sigma is from 0 to 4, not -1"),
        ("lognormal:9:nan", "lognormal's sigma is from 0 to 4, not nan"),
        ("lognormal:9:1:2000000", "not 1 to 2000000"),
    ],
)
def test_lengths_out_of_range(text, message):
    with pytest.raises(InputError, match=message):
        parse_lengths(text)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(kind="bursty"), "is one of closed, poisson, trace, agents, not 'bursty'"),
        (dict(kind="poisson"), "workload.rate is needed where kind is 'poisson'"),
        (dict(kind="poisson", rate=-1.0), "workload.rate is a number of requests a second above 0"),
        (dict(kind="poisson", rate=float("nan")), "above 0, not nan"),
        (dict(kind="poisson", rate=1.0, concurrency=2), "concurrency goes with kind 'closed'"),
        (dict(rate=1.0), "workload.rate goes with kind 'poisson', not with 'closed'"),
        (dict(num_requests=0), "workload.num_requests is at least 1, not 0"),
        (dict(num_requests=None), "workload.num_requests is needed"),
        (dict(concurrency=0), "workload.concurrency is at least 1, not 0"),
        (dict(kind="trace"), "workload.trace is needed where kind is 'trace'"),
        (dict(trace="a.jsonl"), "workload.trace goes with kind 'trace'"),
        (dict(prefix_tokens=-1), "workload.prefix_tokens is from 0 to"),
        (dict(prefix_share=1.1), "workload.prefix_share is from 0 to 1, not 1.1"),
    ],
)
def test_workloads_that_are_none(fields, message):
    with pytest.raises(InputError, match=message):
        Workload(**fields)
