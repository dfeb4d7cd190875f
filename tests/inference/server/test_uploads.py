"""Forms of uploads as other clients write them, or as nobody should; and what is not a client's."""

import re

import pytest

from inference.server.batches.stored_files import StorageLimits
from inference.server.service import Service
from tests.inference.server.fake_engine import FakeEngine
from tests.inference.server.running import running, wait_until
from tests.inference.server.test_bad_input import error_of
from tests.inference.server.test_connections import connect

PATH = "/v1/files"
LIMITS = StorageLimits(file_bytes=2_000, total_bytes=6_000, files=4)
FILE = b'content-disposition: form-data; name="file"; filename="x.jsonl"'
PURPOSE = b'content-disposition: form-data; name="purpose"'
LINE = b'{"custom_id": "a"}\n'


@pytest.fixture(scope="module")
def server():
    with running(FakeEngine(), storage=LIMITS) as one:
        yield one


def form(*parts: tuple[bytes, bytes], end: bytes = b"--b--\r\n") -> bytes:
    return b"".join(b"--b\r\n%s\r\n\r\n%s\r\n" % part for part in parts) + end


def post(server, body, kind: str = "multipart/form-data; boundary=b"):
    return server.http.post(PATH, content=body, headers={"content-type": kind})


def stored(server) -> list[dict]:
    return server.http.get(PATH).json()["data"]


@pytest.fixture(autouse=True)
def nothing_stays(server):
    yield
    for file in stored(server):
        assert server.http.delete(f"{PATH}/{file['id']}").status_code == 200
    files = server.service.batches.store.files
    assert not list(files.partial_path("x").parent.iterdir()), "what was not published is deleted"
    assert not files._num_bytes.total()


@pytest.mark.parametrize("parts", [
    [(PURPOSE, b"batch"), (FILE, LINE)], [(FILE, LINE), (PURPOSE, b"batch")],
    [(FILE.replace(b"x.jsonl", b"C:\\\\a\\\\x.jsonl"), LINE), (PURPOSE, b"batch")],
    [(FILE + b"\r\ncontent-type: text/plain", LINE), (PURPOSE, b"batch"),
     (b'content-disposition: form-data; name="other"', b"x" * 5000)],
], ids=["file last", "file first", "path", "more"])  # fmt: skip
def test_forms(server, parts):
    body = form(*parts)
    for pieces in (body, (body[n : n + 1] for n in range(len(body)))):
        file = post(server, pieces).json()
        assert file["filename"] == "x.jsonl" and file["bytes"] == len(LINE)
        assert server.http.get(f"{PATH}/{file['id']}/content").content == LINE


@pytest.mark.parametrize("body, param, why", [
    (form((FILE, LINE)), "purpose", "purpose is required"),
    (form((PURPOSE, b"batch")), "file", "file is required"),
    (form((FILE, LINE), (FILE, LINE), (PURPOSE, b"batch")), "file", "in the form twice"),
    (form((PURPOSE, b"batch"), (PURPOSE, b"batch"), (FILE, LINE)), "purpose", "in the form twice"),
    (form((PURPOSE, b"b" * 2000), (FILE, LINE)), "purpose", "more than 1024 bytes"),
    (form(*[(b'content-disposition: form-data; name="x"', b"")] * 17), None, "more than 16"),
    (form((PURPOSE, b"batch"), (FILE, LINE), end=b""), None, "it is cut off"),
    (form((PURPOSE, b"batch"), (FILE + b"x" * 9000, LINE)), None, "not a valid form"),
    (b"no form at all", None, "not a valid form"),
    (b"", None, "it is cut off"),
])  # fmt: skip
def test_bad_forms(server, body, param, why):
    error = error_of(post(server, body))
    assert error["param"] == param and why in error["message"] and "\n" not in error["message"]


def test_other_kinds_of_bodies(server):
    assert error_of(post(server, b"{}", "application/json"), 415)
    assert "boundary" in error_of(post(server, b"", "multipart/form-data"))["message"].lower()
    error_of(post(server, b"", f"multipart/form-data; boundary={'b' * 300}"))


def test_files_are_limited_in_number_and_all_of_their_bytes(server):
    body = form((PURPOSE, b"batch"), (FILE, LINE))
    assert [post(server, body).status_code for _ in range(4)] == [200] * 4
    assert "4 files: delete some" in error_of(post(server, body), 507)["message"]
    for file in stored(server):
        server.http.delete(f"{PATH}/{file['id']}")
    large = form((PURPOSE, b"batch"), (FILE, LINE.ljust(1_990)))
    assert [post(server, large).status_code for _ in range(3)] == [200] * 3
    response = post(server, large)
    assert "6000 bytes: delete files" in error_of(response, 507)["message"]
    assert response.headers["x-should-retry"] == "false"


def test_a_client_that_leaves_leaves_nothing(server):
    body = form((PURPOSE, b"batch"), (FILE, LINE))
    partial = server.service.batches.store.files.partial_path("x").parent
    head = b"POST %s HTTP/1.1\r\nhost: localhost\r\n" % PATH.encode()
    head += b"content-type: multipart/form-data; boundary=b\r\ncontent-length: 1000\r\n\r\n"
    with connect(server) as client:
        client.sendall(head + body[:-20])
        wait_until(lambda: len(list(partial.iterdir())) == 1)
    wait_until(lambda: not list(partial.iterdir()))


def test_content_is_no_page_of_the_server(server):
    body = form((PURPOSE, b"batch"), (FILE.replace(b"x.jsonl", b"x.html"), LINE))
    id = post(server, body).json()["id"]
    headers = server.http.get(f"{PATH}/{id}/content").headers
    assert headers["content-type"] == "application/octet-stream"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["content-disposition"] == 'attachment; filename="x.html"'


def test_answers_are_counted_by_their_paths(server):
    server.http.get(f"{PATH}/file-x/content")
    server.http.delete(f"{PATH}/file-x")
    text = server.http.get("/metrics").text
    counted = set(
        re.findall(r'http_requests_total{handler="(/v1/files[^"]*)",method="(\w+)"', text)
    )
    assert {("/v1/files/{id}/content", "GET"), ("/v1/files/{id}", "DELETE")} <= counted


def test_a_server_that_stores_nothing_says_so():
    with running(FakeEngine()) as server:
        service: Service = server.service
        service.batches = None
        for path in (PATH, "/v1/batches", f"{PATH}/x", "/v1/batches/x"):
            error = error_of(server.http.get(path), 501)
            assert "--batch_dir" in error["message"] and error["code"] == "unsupported"
