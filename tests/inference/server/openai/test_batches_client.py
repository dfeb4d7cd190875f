"""OpenAI's own client: files of requests, and batches that answer them."""

import json

import openai
import pytest

from inference.server.batches.stored_files import StorageLimits
from inference.server.web.access import Keys
from tests.inference.server.fake_engine import FakeEngine, reply
from tests.inference.server.running import running, wait_until

KEYS = "key-0123456789abcdef", "key-fedcba9876543210"
TEXT = "/v1/completions"
LIMITS = StorageLimits(file_bytes=20_000, file_lines=50, total_bytes=200_000, open_batches=3)


def line(id: str, url: str = TEXT, **body) -> str:
    fields = {"prompt": "a", "max_tokens": 5, "temperature": 0} | body
    return json.dumps({"custom_id": id, "method": "POST", "url": url, "body": fields})


def lines(*ids: str, **body) -> bytes:
    return "\n".join(line(id, **body) for id in ids).encode()


@pytest.fixture(scope="module")
def own_engine():
    return FakeEngine()


@pytest.fixture(scope="module")
def server(own_engine):
    with running(own_engine, keys=Keys(KEYS), storage=LIMITS) as one:
        yield one


def connected(server, key: str):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client(server):
    with connected(server, KEYS[0]) as one:
        yield one


@pytest.fixture(scope="module")
def stranger(server):
    with connected(server, KEYS[1]) as one:
        yield one


@pytest.fixture
def paused(own_engine):
    """No step begins before the test's end, or until the gate is set."""
    own_engine.gate.clear()
    yield own_engine.gate
    own_engine.gate.set()


def upload(client, content: bytes, **how):
    return client.files.create(file=("requests.jsonl", content), purpose="batch", **how)


def start(client, content: bytes, endpoint: str = TEXT, **how):
    file = upload(client, content)
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **how
    )


def ended(client, batch):
    wait_until(lambda: client.batches.retrieve(batch.id).status in (
        "completed", "failed", "expired", "cancelled"))  # fmt: skip
    return client.batches.retrieve(batch.id)


def records(client, id: str) -> dict:
    parsed = list(map(json.loads, client.files.content(id).text.splitlines()))
    by_id = {record["custom_id"]: record for record in parsed}
    assert len(by_id) == len(parsed), "no answer twice"
    return by_id


def refused(work, kind, param=None) -> str:
    with pytest.raises(kind) as caught:
        work()
    assert caught.value.param == param, caught.value.body
    return caught.value.message


# --- files ----------------------------------------------------------------------------------------


def test_a_file_is_uploaded_listed_read_and_deleted(client):
    content = lines("a", "b") + b"\r\n--x\r\n"
    file = upload(client, content)
    assert (file.filename, file.purpose, file.bytes) == ("requests.jsonl", "batch", len(content))
    assert file.expires_at == file.created_at + 30 * 24 * 3600
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).content == content
    assert file in list(client.files.list())
    assert client.files.delete(file.id).deleted
    refused(lambda: client.files.retrieve(file.id), openai.NotFoundError)
    refused(lambda: client.files.content(file.id), openai.NotFoundError)
    assert file.id not in [other.id for other in client.files.list()]


def test_files_are_listed_in_parts(client):
    ids = [upload(client, lines("a")).id for _ in range(5)]
    page = client.files.list(limit=2)
    assert [file.id for file in page.data] == ids[:-3:-1] and page.has_more
    assert [file.id for file in client.files.list(limit=2)][:5] == ids[::-1], "all parts"
    oldest = client.files.list(order="asc", after=ids[1], limit=2)
    assert [file.id for file in oldest.data] == ids[2:4]
    client.files.delete(ids[1])
    assert client.files.list(order="asc", after=ids[1], limit=1).data[0].id == ids[2]
    assert client.files.list(purpose="batch_output", after=ids[0], order="asc").data == []
    for id in (ids[0], *ids[2:]):
        client.files.delete(id)


def test_a_file_expires_when_its_client_says(client):
    policy = {"anchor": "created_at", "seconds": 3600}
    file = upload(client, lines("a"), expires_after=policy)
    assert file.expires_at == file.created_at + 3600
    policy["seconds"] = 5
    param = "expires_after[seconds]"
    why = refused(lambda: upload(client, lines("a"), expires_after=policy),
                  openai.BadRequestError, param)  # fmt: skip
    assert "from 3600 to 2592000" in why


@pytest.mark.parametrize("purpose", ["fine-tune", "assistants"])
def test_other_purposes_are_rejected(client, purpose):
    work = lambda: client.files.create(file=("x", lines("a")), purpose=purpose)  # noqa: E731
    assert f"is batch here, not '{purpose}'" in refused(work, openai.BadRequestError, "purpose")


@pytest.mark.parametrize("content", [b"", b"\n \n", b"a,b\n1,2\n", b"[1]\n", b"\x00\xff"])
def test_what_is_no_jsonl_is_rejected(client, content):
    assert "is no JSONL" in refused(lambda: upload(client, content), openai.BadRequestError, "file")


def test_large_files_are_rejected(client):
    num_files = len(list(client.files.list()))
    for size in (LIMITS.file_bytes, 5 * LIMITS.file_bytes, 500 * LIMITS.file_bytes):
        with pytest.raises(openai.APIStatusError) as caught:
            upload(client, lines("a", prompt="x" * size))
        assert caught.value.status_code == 413 and "20000 bytes" in caught.value.message
    many = b"{}\n" * 51
    why = refused(lambda: upload(client, many), openai.BadRequestError, "file")
    assert "more than 50 lines" in why
    assert upload(client, b"\n".join([b"{}"] * 50)).bytes == 149, "the last line has no end"
    assert len(list(client.files.list())) == num_files + 1


def test_a_key_fills_its_share_of_the_storage_alone(client, stranger):
    content = lines("a", prompt="x" * 19_000)
    files = []
    with pytest.raises(openai.APIStatusError) as caught:
        files.extend(upload(client, content) for _ in range(11))
    assert caught.value.status_code == 507 and "delete some" in caught.value.message
    assert upload(stranger, content).id
    for file in client.files.list():
        client.files.delete(file.id)
    assert upload(client, content).id


def test_a_key_sees_only_its_own(client, stranger):
    batch = ended(client, start(client, lines("a")))
    for id in (batch.input_file_id, batch.output_file_id):
        for work in (stranger.files.retrieve, stranger.files.content, stranger.files.delete):
            refused(lambda work=work, id=id: work(id), openai.NotFoundError)
    for work in (stranger.batches.retrieve, stranger.batches.cancel):
        refused(lambda work=work: work(batch.id), openai.NotFoundError)
    refused(
        lambda: stranger.batches.create(
            input_file_id=batch.input_file_id, endpoint=TEXT, completion_window="24h"
        ),
        openai.NotFoundError, "input_file_id",
    )  # fmt: skip
    assert batch.id not in [other.id for other in stranger.batches.list()]
    assert batch.input_file_id not in [file.id for file in stranger.files.list()]


# --- batches --------------------------------------------------------------------------------------


def test_a_batch_is_answered(client):
    ids = [f"r{n}" for n in range(12)]
    batch = start(client, lines(*ids), metadata={"for": "a test"})
    assert batch.status == "validating" and batch.metadata == {"for": "a test"}
    assert batch.expires_at == batch.created_at + 24 * 3600
    batch = ended(client, batch)
    assert batch.status == "completed" and batch.error_file_id is None
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (12, 12, 0)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    output = client.files.retrieve(batch.output_file_id)
    assert output.purpose == "batch_output" and output.filename == f"{batch.id}_output.jsonl"
    results = records(client, batch.output_file_id)
    assert set(results) == set(ids)
    for record in results.values():
        response = record["response"]
        assert record["error"] is None and response["status_code"] == 200
        assert response["request_id"]
        assert response["body"]["choices"][0]["text"].encode()[:3] == bytes(reply(3))


@pytest.mark.parametrize("url, body", [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 3}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}),
    ("/v1/embeddings", {"input": "Hi"}), ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}),
])  # fmt: skip
def test_every_endpoint(client, url, body):
    request = {"custom_id": "a", "method": "POST", "url": url, "body": body}
    batch = ended(client, start(client, json.dumps(request).encode(), url))
    assert batch.status == "completed" and batch.request_counts.completed == 1
    assert records(client, batch.output_file_id)["a"]["response"]["status_code"] == 200


def test_requests_that_are_rejected_are_in_the_error_file(client):
    content = b"\n".join([lines("good"), lines("bad", temperature=9), lines("odd", model="x")])
    batch = ended(client, start(client, content))
    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 2)
    assert set(records(client, batch.output_file_id)) == {"good"}
    errors = records(client, batch.error_file_id)
    assert errors["bad"]["response"]["status_code"] == 400
    assert errors["bad"]["response"]["body"]["error"]["param"] == "temperature"
    assert errors["odd"]["response"]["status_code"] == 404


def test_a_file_with_bad_lines_fails_before_any_answer(client, own_engine):
    num_requests = len(own_engine.prompts)
    parts = [line("a"), "", line("b", "/v1/embeddings"), line("a"), '{"custom_id": "c"',
             line("d", stream=True)]  # fmt: skip
    batch = ended(client, start(client, "\n".join(parts).encode()))
    assert batch.status == "failed" and batch.failed_at and batch.output_file_id is None
    errors = {error.line: error for error in batch.errors.data}
    assert set(errors) == {3, 4, 5, 6}
    assert errors[3].code == "mismatched_url" and errors[3].param == "url"
    assert errors[4].code == "invalid_line" and "that of line 1, too" in errors[4].message
    assert "is not {" in errors[5].message and "leave stream out" in errors[6].message
    assert len(own_engine.prompts) == num_requests


def test_batches_are_listed_in_parts(client):
    ids = [ended(client, start(client, lines("a"))).id for _ in range(3)]
    page = client.batches.list(limit=2)
    assert [batch.id for batch in page.data] == ids[:0:-1] and page.has_more
    assert [batch.id for batch in client.batches.list(limit=2)][:3] == ids[::-1]
    assert client.batches.list(after=ids[1], limit=1).data[0].id == ids[0]
    assert "limit" in refused(
        lambda: client.batches.list(limit=101), openai.BadRequestError, "limit"
    )


def test_a_batch_is_cancelled_with_what_it_has(client, own_engine, paused):
    batch = start(client, lines(*map(str, range(40)), max_tokens=400))
    wait_until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
    cancelled = client.batches.cancel(batch.id)
    assert cancelled.status in ("cancelling", "cancelled") and cancelled.cancelling_at
    batch = ended(client, batch)
    assert batch.status == "cancelled" and batch.cancelled_at and batch.request_counts.total == 40
    assert batch.output_file_id is None, "there was no answer"
    paused.set()
    wait_until(lambda: not own_engine.running)
    why = refused(lambda: client.batches.cancel(batch.id), openai.ConflictError)
    assert "is cancelled cannot be cancelled" in why


def test_a_file_in_use_is_not_deleted(client, paused):
    batch = start(client, lines("a"))
    why = refused(lambda: client.files.delete(batch.input_file_id), openai.ConflictError)
    assert f"{batch.id} reads this file" in why
    paused.set()
    batch = ended(client, batch)
    assert client.files.delete(batch.input_file_id).deleted
    assert client.files.delete(batch.output_file_id).deleted


def test_batches_at_a_time_are_limited_and_each_key_has_its_share(client, stranger, paused):
    batches = [start(client, lines("a")) for _ in range(2)]
    why = refused(lambda: start(client, lines("a")), openai.RateLimitError)
    assert "2 batches of this key have not ended, which is its share" in why
    other = start(stranger, lines("a"))
    why = refused(lambda: start(stranger, lines("a")), openai.RateLimitError)
    assert "3 batches have not ended" in why
    paused.set()
    assert [ended(client, batch).status for batch in batches] == ["completed"] * 2
    assert ended(stranger, other).status == "completed"


@pytest.mark.parametrize("name, value, valid", [
    ("endpoint", "/v1/files", "/v1/chat/completions"), ("completion_window", "1h", "24h"),
    ("input_file_id", "", "length from 1"), ("metadata", {"a" * 65: "b"}, "64"),
    ("output_expires_after", {"anchor": "created_at", "seconds": 1}, "3600"),
])  # fmt: skip
def test_wrong_fields_are_named(client, name, value, valid):
    fields = {"input_file_id": "file-x", "endpoint": TEXT, "completion_window": "24h"}
    with pytest.raises(openai.BadRequestError) as caught:
        client.batches.create(**fields | {name: value})
    assert caught.value.param.split(".")[0] == name and valid in caught.value.message


def test_results_are_no_input(client):
    batch = ended(client, start(client, lines("a"), output_expires_after={
        "anchor": "created_at", "seconds": 7200}))  # fmt: skip
    output = client.files.retrieve(batch.output_file_id)
    assert output.expires_at == output.created_at + 7200
    again = {"input_file_id": output.id, "endpoint": TEXT, "completion_window": "24h"}
    work = lambda: client.batches.create(**again)  # noqa: E731
    assert "batch_output" in refused(work, openai.BadRequestError, "input_file_id")
