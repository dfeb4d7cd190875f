"""Who may ask, by key, host and origin; nothing but probes is open."""

import re

import pytest

from configs.errors import InputError
from inference.server.web import access, app
from inference.server.web.access import OPEN_PATHS, Keys
from tests.inference.server.running import running

KEY, OTHER = "key-0123456789abcdef", "key-fedcba9876543210"
BODY = {"prompt": "a", "max_tokens": 1}


@pytest.fixture(scope="module")
def locked():
    with running(keys=Keys([KEY, OTHER])) as server:
        yield server


def test_everything_but_probes_needs_a_key(locked):
    routes = app.application(locked.service)._app.routes
    assert len(routes) >= 11
    for route in routes:
        path = route.path.replace("{id:path}", "fake")
        for method in route.methods:
            response = locked.http.request(method, path)
            if path in OPEN_PATHS:
                assert response.status_code == 200
                continue
            assert response.status_code == 401, path
            if method != "HEAD":
                assert response.json()["error"]["code"] == "invalid_api_key"
    for path in ("/nothing", "//health", "/health/", "/v1/%2e%2e/health", "/%68ealth/x"):
        assert locked.http.get(path).status_code == 401


@pytest.mark.parametrize("header, status", [
    (f"Bearer {KEY}", 200), (f"Bearer {OTHER}", 200), (f"bearer {KEY}", 200), ("", 401),
    ("Bearer", 401), (f"Basic {KEY}", 401), (KEY, 401), (f"Bearer {KEY}x", 401),
    (f"Bearer {KEY[:-1]}", 401), ("Bearer ключ".encode(), 401), (f"Bearer {KEY} {KEY}", 401),
])  # fmt: skip
def test_keys(locked, header, status):
    response = locked.http.post("/v1/completions", json=BODY, headers={"authorization": header})
    assert response.status_code == status and KEY not in response.text


def test_one_key_is_enough(locked):
    both = [("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {OTHER}")]
    assert locked.http.get("/v1/models", headers=both).status_code == 401


def test_only_hashes_are_kept():
    assert KEY.encode() not in b"".join(Keys([KEY])._hashes)


@pytest.mark.parametrize("content, problem", [
    ("", "no key"), ("# a comment\n\n", "no key"), ("short\n", "at least 16"),
    (None, "No such file"),
    (b"\xff\xfe", "utf-8"),
])  # fmt: skip
def test_files_of_keys(tmp_path, content, problem):
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=problem):
        access.read_keys("--api_key_file=keys", str(path))
    path.write_text(f"# ours\n{KEY}\n\n  {OTHER}  \n")
    keys = access.read_keys("--api_key_file=keys", str(path))
    assert keys.has(KEY) and keys.has(OTHER) and not keys.has("# ours")


@pytest.mark.parametrize("host, status", [
    ("localhost", 200), ("localhost:8000", 200), ("127.0.0.1", 200), ("127.8.9.1:1", 200),
    ("[::1]:80", 200), ("LOCALHOST", 200), ("evil.example", 403), ("localhost.evil.example", 403),
    ("127.0.0.1.evil.example", 403), ("", 403), ("localhost:8000:9", 403), ("10.0.0.1", 403),
    ("localhost@evil", 403), ("::1", 403),
])  # fmt: skip
def test_names_that_lead_here_from_elsewhere_are_refused(server, host, status):
    """As a page would whose own name was made to point to this machine."""
    assert server.http.get("/v1/models", headers={"host": host}).status_code == status


def test_pages_of_other_servers_are_refused(server):
    own = server.url
    for origin, status in [
        (own, 200),
        ("http://evil.example", 403),
        ("null", 403),
        (own + "0", 403),
    ]:
        response = server.http.post("/v1/completions", json=BODY, headers={"origin": origin})
        assert response.status_code == status
        assert not any(name.startswith("access-control") for name in response.headers)


@pytest.mark.parametrize("host, expected", [
    ("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
    ("10.1.2.3", False), ("example.org", False),
])  # fmt: skip
def test_what_only_this_machine_reaches(host, expected):
    assert access.is_local(host) is expected


def test_requests_have_ids(server):
    for asked, kept in [("abc-1.2_3", True), ("a" * 128, True), ("a" * 129, False), ("a b", False)]:
        found = server.http.get("/health", headers={"x-request-id": asked}).headers["x-request-id"]
        assert (found == asked) is kept and re.fullmatch(r"[A-Za-z0-9._-]{1,128}", found)
