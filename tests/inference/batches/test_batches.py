"""Batches: lines that are none, and servers busy or away."""

import asyncio
import json

import pytest

from configs.errors import InputError
from inference.batches import lines, records, run
from inference.batches.lines import BadLine, Line
from inference.http_client.connections import Answer, NoConnection, Unanswered

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def line(id: str, url: str = TEXT, **body) -> str:
    asked = {"prompt": [65], "max_tokens": 4, "temperature": 0} | body
    return json.dumps({"custom_id": id, "method": "POST", "url": url, "body": asked})


def asked(*ids: str) -> list[Line]:
    return [Line(n, id, TEXT, b"{}") for n, id in enumerate(ids, 1)]


BAD = {
    "{": "is not {",
    "[1]": "is not {",
    '{"custom_id": "a"}': "is not {",
    '{"custom_id": 5, "url": "/v1/x", "body": {}}': "is not {",
    '{"custom_id": "", "url": "/v1/x", "body": {}}': "custom_id is empty",
    '{"custom_id": "a", "url": "/v1/x", "body": []}': "is not {",
    '{"custom_id": "a", "url": "/v1/x", "body": {"a": }}': "is not {",
    '{"custom_id": "a", "url": "/v1/x", "body": {}, "method": "GET"}': "is not {",
    '{"custom_id": "a", "url": "http://else/v1/x", "body": {}}': "its url is a path",
    '{"custom_id": "a", "url": "/v1/x y", "body": {}}': "its url is a path",
    '{"custom_id": "a", "url": "/v1/x", "body": {"stream": true}}': "leave stream out",
    "[" * 100_000: "is not {",
    line("first"): "custom_id 'first' is that of line 1, too",
    '{"custom_id": "long", "body": "' + "x" * (5 << 20) + '"}': "longer than 4 MiB",
}


def test_lines(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join([line("first"), "", *BAD, line("last", CHAT)]) + "\n")
    found = lines.read(str(path))
    assert [each.number for each in found] == [1, *range(3, 4 + len(BAD))]
    assert isinstance(found[0], Line) and isinstance(found[-1], Line)
    assert json.loads(found[0].body)["max_tokens"] == 4 and found[-1].url == CHAT
    for bad, why in zip(found[1:-1], BAD.values(), strict=True):
        assert isinstance(bad, BadLine) and why in bad.why and len(bad.why) <= 200, bad
        record = records.bad(bad)
        assert record["response"] is None and record["error"]["code"] == "invalid_line"
        assert record["error"]["message"].startswith(f"line {bad.number}: ")
    assert found[3].custom_id == "a", "known, though the rest is missing"
    path.write_text("\n \n")
    with pytest.raises(InputError, match="no line holds a request"):
        lines.read(str(path))
    with pytest.raises(InputError, match="cannot read .*missing"):
        lines.read(str(tmp_path / "missing"))


def test_what_is_kept(tmp_path):
    path = tmp_path / "results.jsonl"
    assert records.read(path) == []
    (one,) = asked("one")
    for status, final in ((200, True), (400, True), (404, True), (401, False), (403, False),
                          (408, False), (429, False), (500, False), (503, False)):  # fmt: skip
        record = records.answered(one, Answer(status, {"x-request-id": "r"}, b'{"a": 1}'))
        assert records.is_final(record) is final and record["error"] is None
        assert records.is_good(record) is (status == 200)
        assert record["response"] == {"status_code": status, "request_id": "r", "body": {"a": 1}}
    assert not records.is_final(records.failed(one, "no_answer", "why"))
    assert records.answered(one, Answer(502, {}, b"<html>"))["error"]["code"] == "invalid_answer"
    whole = json.dumps({"custom_id": "a"}) + "\n"
    path.write_text(whole + '{"custom_id": "b", "resp')  # cut off
    assert records.read(path) == [{"custom_id": "a"}]
    path.write_text(whole + "nonsense\n" + whole)
    with pytest.raises(InputError, match="results.jsonl line 2 is no result"):
        records.read(path)


class Scripted:
    """Answers each request by what is next in its list; the last goes on for ever."""

    def __init__(self, *answers: int | Exception):
        self.answers, self.num_asked, self.at_once, self.most = list(answers), 0, 0, 0

    async def post(self, path: str, body: bytes) -> Answer:
        self.num_asked += 1
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await asyncio.sleep(0.001)
        self.at_once -= 1
        found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(found, Exception):
            raise found
        return Answer(found, {"retry-after": "0.001"}, b"{}")


def results(server, *ids: str, concurrency: int = 1, patience_s: float = 5.0):
    found: dict = {}
    run_ = run.run(
        server,
        asked(*ids),
        concurrency,
        lambda one, r: found.update({one.custom_id: r}),
        patience_s,
    )
    asyncio.run(run_)
    return found


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(run, "_FIRST_PAUSE_S", 0.001)


def test_so_many_at_a_time():
    server = Scripted(200)
    found = results(server, *map(str, range(20)), concurrency=4)
    assert list(map(int, found)) == sorted(map(int, found)) and len(found) == 20
    assert server.most == 4


def test_a_server_that_is_busy_or_away_for_a_while():
    server = Scripted(503, NoConnection("away"), 429, Unanswered("ended"), 200)
    assert results(server, "a")["a"]["response"]["status_code"] == 200
    assert server.num_asked == 5


def test_a_request_that_ends_its_connection_ends_no_batch():
    ended = Unanswered("the connection ended")
    found = results(Scripted(ended, ended, ended, 200), "a", "b")
    assert found["a"]["error"] == {"code": "no_answer", "message": "the connection ended"}
    assert found["b"]["response"]["status_code"] == 200


@pytest.mark.parametrize("status", [401, 403])
def test_a_key_that_is_refused_ends_the_run_and_is_no_result(status):
    server, found = Scripted(200, status), {}
    ran = run.run(server, asked(*"abc"), 1, lambda one, r: found.update({one.custom_id: r}))
    with pytest.raises(run.Denied, match=f"refuses the key.* status {status}, '{{}}'"):
        asyncio.run(ran)
    assert list(found) == ["a"] and server.num_asked == 2


def test_patience_ends():
    assert results(Scripted(503), "a", patience_s=0.01)["a"]["response"]["status_code"] == 503
    with pytest.raises(NoConnection):
        results(Scripted(NoConnection("away")), "a", "b", patience_s=0.01)
