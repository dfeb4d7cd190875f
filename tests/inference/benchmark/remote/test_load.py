"""A server under load, as its client sees it: events, counts, failures, times of arrival."""

import asyncio
import json
import random
import statistics

import numpy as np
import pytest

from configs.errors import InputError
from configs.workload import Fixed, Workload
from inference.benchmark import requests
from inference.benchmark.remote import load, prompts, results
from inference.benchmark.remote.load import CHAT, COMPLETIONS, Sent
from inference.benchmark.remote.prompts import RemoteRequest
from inference.benchmark.remote.stream import Stream
from inference.http_client.address import Address
from inference.http_client.connections import Connections
from tests.inference.server.fake_engine import CRASHES, REFUSED, FakeEngine
from tests.inference.server.running import running


@pytest.fixture(scope="module")
def server():
    with running(FakeEngine(step_s=0.001)) as one:
        yield one


def sent(server, asked, endpoint=COMPLETIONS, concurrency=None, model="fake"):
    async def run():
        connections = Connections(Address.parse("--url", server.url))
        try:
            return await load.send(connections, asked, model, endpoint, concurrency)
        finally:
            connections.close()

    return asyncio.run(run())


def test_what_is_counted(server):
    asked = [RemoteRequest(0.0, [65] * (5 + n), 6 + n) for n in range(6)]
    found = sent(server, asked, concurrency=2)
    assert [each.error for each in found.streams] == [""] * 6
    by_length = {each.num_prompt_tokens: each for each in found.streams}
    assert set(by_length) == {5, 6, 7, 8, 9, 10}
    for stream in found.streams:
        assert stream.num_output_tokens == stream.num_prompt_tokens + 1
        # Two of a character's bytes are one event: the first is not text yet.
        assert 1 < len(stream.event_s) <= stream.num_output_tokens
        assert stream.start_s <= stream.sent_s < stream.event_s[0] <= stream.event_s[-1]
        assert stream.event_s == sorted(stream.event_s)
    figures = results.figures(found)
    assert figures["completed"] == 6 and figures["failed"] == 0
    assert figures["total_input_tokens"] == sum(range(5, 11))
    assert figures["total_output_tokens"] == sum(range(6, 12))
    ends = sorted((each.start_s, each.event_s[-1]) for each in found.streams)
    assert all(
        third[0] >= min(a[1], b[1]) for a, b, third in zip(ends, ends[1:], ends[2:], strict=False)
    )


def test_chats(server):
    found = sent(server, [RemoteRequest(0.0, "time people", 8)] * 2, CHAT)
    assert all(each.is_ok and each.num_tokens == 8 for each in found.streams)


def test_failures_are_counted_with_their_reasons(server):
    good, bad = RemoteRequest(0.0, [65] * 5, 4), RemoteRequest(0.0, [REFUSED], 4)
    found = results.figures(sent(server, [good, bad, bad, good], concurrency=1))
    assert (found["completed"], found["failed"]) == (2, 2)
    assert found["failures"] == {"400 every token is banned: allow one": 2}
    assert [bool(error) for error in found["errors"]] == [False, True, True, False]
    assert found["output_lens"] == [4, 0, 0, 4] and found["total_input_tokens"] == 10
    found = results.figures(sent(server, [good], model="other"))
    (reason,) = found["failures"]
    assert reason.startswith("404 the model 'other' is not served here")


def test_a_stream_that_ends_with_an_error(server):
    stream = Stream(0.0)
    for data in (b': keep-alive\n\ndata: {"choi', b'ces": [{"text": ""}]}\r\n\r\n',
                 b'data: {"error": {"message": "it\\nfailed"}}\n\ndata: [DONE]\n\n'):  # fmt: skip
        stream._on_body(data)
    assert len(stream.event_s) == 1 and stream.error == "it failed"
    stream = Stream(0.0)
    stream._on_body(b"data: {nonsense\n\n")
    assert "nonsense" in stream.error and not stream.is_ok


def test_requests_are_sent_when_they_are_due(server):
    asked = [RemoteRequest(0.05 * n, [65] * 4, 2) for n in range(4)]
    found = sent(server, asked)
    starts = [each.start_s - found.streams[0].start_s for each in found.streams]
    assert starts == pytest.approx([0.0, 0.05, 0.1, 0.15])
    assert all(each.sent_s >= each.start_s for each in found.streams)
    assert found.seconds >= 0.15


def test_a_server_is_asked_first(server):
    async def run(url, model):
        connections = Connections(Address.parse("--url", url))
        name = await load.first_model(connections)
        for prompt in ("a text", (65, 66, 67)):
            await load.check(connections, RemoteRequest(0.0, prompt, 9), model or name, COMPLETIONS)
        connections.close()
        return name

    assert asyncio.run(run(server.url, None)) == "fake"
    with pytest.raises(InputError, match="/v1/completions answers: 404 the model 'x'"):
        asyncio.run(run(server.url, "x"))
    with pytest.raises(InputError, match="lists no models: 404"):
        asyncio.run(run(server.url + "/else", None))
    with pytest.raises(InputError, match="no connection to 127.0.0.1:1: "):
        asyncio.run(run("http://127.0.0.1:1", None))


def made(start, *event_s, tokens=None, error=""):
    stream = Stream(start)
    stream.sent_s, stream.event_s, stream.error = start, list(event_s), error
    stream.num_output_tokens = tokens
    return stream


def test_figures_are_those_of_their_definitions():
    streams = [made(0.0, 0.5, 0.7, 1.1, tokens=5), made(1.0, 1.25), made(1.5, error="500")]
    asked = [RemoteRequest(0.0, [1] * 7, 5)] * 3
    goodput = results.Goodput.parse("ttft:300,e2el:1000")
    found = results.figures(Sent(asked, streams, 2.0, 0.001), goodput)
    assert found["request_goodput"] == 0.5, "the first one waited 500 ms"
    assert found["output_throughput"] == 3.0 and found["total_token_throughput"] == 10.0
    assert found["request_throughput"] == 1.0 and found["max_concurrent_requests"] == 2
    assert found["ttfts"] == [0.5, 0.25, 0.0] and found["itls"][0] == pytest.approx([0.2, 0.4])
    assert found["mean_tpot_ms"] == pytest.approx(1e3 * 0.6 / 4), "one token has no other"
    assert found["max_output_tokens_per_s"] == 2.0
    values = [0.2, 0.4]
    for percent in (50, 90, 99):
        assert found[f"p{percent}_itl_ms"] == pytest.approx(1e3 * np.percentile(values, percent))
    assert found["std_itl_ms"] == pytest.approx(1e3 * np.std(values))
    assert found["client_cpu_us_per_event"] == pytest.approx(250.0)
    drawn = sorted(random.Random(0).random() for _ in range(37))
    for percent in (0, 50, 90, 99, 100):
        assert results.percentile(drawn, percent) == pytest.approx(np.percentile(drawn, percent))


@pytest.mark.parametrize("text", ["", "ttft", "ttft:0", "ttft:x", "itl:5", "ttft:1,ttft:2"])
def test_no_goodput(text):
    with pytest.raises(InputError, match="--goodput is milliseconds for some of ttft"):
        results.Goodput.parse(text)


def test_bursts():
    def waits(burstiness):
        workload = Workload("poisson", 4000, rate=2.0, burstiness=burstiness, prompt=Fixed(1))
        times = [each.arrival_s for each in requests.generate(workload, 1000, 1 << 20)]
        return np.diff(times)

    for burstiness in (0.25, 1, 4):
        found = waits(burstiness)
        assert statistics.fmean(found) == pytest.approx(0.5, rel=0.1)
        # A gamma law of this shape: its variance is mean ** 2 / shape.
        assert np.var(found) / 0.25 == pytest.approx(1 / burstiness, rel=0.2)
    with pytest.raises(InputError, match="burstiness goes with kind 'poisson'"):
        Workload(burstiness=2.0)
    with pytest.raises(InputError, match="burstiness is from 0.001"):
        Workload("poisson", rate=1.0, burstiness=float("nan"))


def test_prefixes_are_repeated_in_turn():
    workload = Workload("closed", 6, prompt=Fixed(3), output=Fixed(1), prefix_tokens=20,
                        prefix_share=1.0, num_prefixes=3)  # fmt: skip
    found = [each.prompt for each in prompts.drawn(workload, 32000, False)]
    starts = [tuple(each[:20]) for each in found]
    assert starts[:3] == starts[3:] and len(set(starts)) == 3
    assert {len(each) for each in found} == {23} and len({tuple(each) for each in found}) == 6
    words = prompts.drawn(workload, 32000, True)
    assert [len(each.prompt.split()) for each in words] == [23] * 6
    with pytest.raises(InputError, match="at least 256 tokens"):
        prompts.drawn(workload, 3, False)


def test_prompts_of_files(server, tmp_path):
    custom = tmp_path / "custom.jsonl"
    custom.write_text('{"prompt": "one", "output_tokens": 3}\n\n{"token_ids": [5, 6]}\n')
    pairs = prompts.read_custom(str(custom))
    assert pairs == [("one", 3), ((5, 6), None)]
    workload = Workload("poisson", 3, rate=5.0, prompt=Fixed(1), output=Fixed(9))
    found = prompts.at_times_of(workload, pairs)
    assert [each.prompt for each in found] == ["one", (5, 6), "one"]
    assert [each.num_new_tokens for each in found] == [3, 9, 3]
    assert found[0].arrival_s == 0.0 < found[1].arrival_s < found[2].arrival_s
    for line in ('{"prompt": ""}', '{"prompt": 5}', '{"token_ids": ["a"]}', '{"token_ids": []}',
                 '{"prompt": "a", "output_tokens": 0}'):  # fmt: skip
        custom.write_text(line)
        with pytest.raises(InputError, match="custom.jsonl line 1 is not "):
            prompts.read_custom(str(custom))


def test_conversations_of_sharegpt(server, tmp_path):
    path = tmp_path / "sharegpt.json"
    usual = ("what is it, and why?", "an answer of some words")
    talks = [usual, ("a", "to too short a question"), ("long " * 1000, "is left out"), usual, usual]
    given = [{"conversations": [{"from": "x", "value": text} for text in talk]} for talk in talks]
    path.write_text(json.dumps([*given, {"id": "none"}]))

    async def read(url, limit=9):
        connections = Connections(Address.parse("--url", url))
        try:
            counting = prompts.counting(connections, "fake")
            return await prompts.read_sharegpt(str(path), counting, limit, 0)
        finally:
            connections.close()

    # This server counts a token a byte; where none counts, four characters are one.
    assert asyncio.run(read(server.url)) == [(usual[0], len(usual[1]))] * 3
    assert asyncio.run(read(server.url, 2)) == [(usual[0], len(usual[1]))] * 2
    assert asyncio.run(read("http://127.0.0.1:1")) == [(usual[0], 6)] * 3
    talk = '[{"conversations": [{"value": %s}, {"value": "ab"}]}]'
    for text in ("", "{}", "[1]", talk % 1, talk % '"ab"'):
        path.write_text(text)
        with pytest.raises(InputError, match="sharegpt.json"):
            asyncio.run(read(server.url))


def test_an_engine_that_fails_ends_one_stream(server):
    with running(FakeEngine()) as one:
        found = sent(one, [RemoteRequest(0.0, [CRASHES], 4)])
    (error,) = [each.error for each in found.streams]
    assert error
