"""Who may ask, by key, host and origin; nothing but probes is open."""

import re

import pytest
from starlette.responses import Response
from starlette.testclient import TestClient

from configs.errors import InputError
from inference.server.web import access, app, page_files
from inference.server.web.access import OPEN_PATHS, Access, Keys, Site
from tests.inference.server.fake_engine import FakeEngine
from tests.inference.server.running import running

KEY, OTHER = "key-0123456789abcdef", "key-fedcba9876543210"
BODY = {"prompt": "a", "max_tokens": 1}


@pytest.fixture(scope="module")
def locked():
    with running(keys=Keys([KEY, OTHER])) as server:
        yield server


def test_everything_but_probes_and_pages_needs_a_key(locked):
    routes = app.application(locked.service)._app.routes
    assert len(routes) >= 11
    opened = {*OPEN_PATHS, *(file.path for file in page_files.routes())}
    for route in routes:
        path = route.path.replace("{id:path}", "fake")
        for method in route.methods:
            response = locked.http.request(method, path)
            if path in opened:
                assert response.status_code == 200
                continue
            assert response.status_code == 401, path
            if method != "HEAD":
                assert response.json()["error"]["type"] == "authentication_error"
                assert response.headers["www-authenticate"] == "Bearer"
    assert locked.http.get("//health").text == locked.http.get("/").text  # a host, and no path
    for path in ("/nothing", "/health/", "/v1/%2e%2e/health", "/%68ealth/x"):
        assert locked.http.get(path).status_code == 401


@pytest.mark.parametrize("header, status", [
    (f"Bearer {KEY}", 200), (f"Bearer {OTHER}", 200), (f"bearer {KEY}", 200), ("", 401),
    ("Bearer", 401), (f"Basic {KEY}", 401), (KEY, 401), (f"Bearer {KEY}x", 401),
    (f"Bearer {KEY[:-1]}", 401), ("Bearer ключ".encode(), 401), (f"Bearer {KEY} {KEY}", 401),
])  # fmt: skip
def test_keys(locked, header, status):
    response = locked.http.post("/v1/completions", json=BODY, headers={"authorization": header})
    assert response.status_code == status and KEY not in response.text


@pytest.mark.parametrize("origin, status", [
    ("https://chat.example", 200), ("http://chat.example", 200), ("https://chat.example:8", 403),
    ("https://other.example", 403), ("ftp://chat.example", 403), ("null", 403),
])  # fmt: skip
def test_with_keys_a_proxy_may_speak_tls(origin, status):
    passed = Access(Response("", 200), Keys([KEY]), False, 9)
    client = TestClient(passed, base_url="http://chat.example")
    headers = {"authorization": f"Bearer {KEY}", "origin": origin}
    assert client.get("/v1/models", headers=headers).status_code == status


@pytest.mark.parametrize("is_local, host, status", [
    (True, "chat.example", 200), (True, "CHAT.example:8443", 200), (True, "a.b.site.example", 200),
    (True, "localhost", 200), (True, "site.example", 403), (True, "evilsite.example", 403),
    (True, "chat.example.evil", 403), (False, "chat.example", 200), (False, "127.0.0.1", 200),
    (False, "other.example", 403),
])  # fmt: skip
def test_hosts_that_are_allowed(is_local, host, status):
    site = Site(hosts=("chat.example", "*.site.example"))
    passed = Access(Response("", 200), None, is_local, 9, (), site)
    assert TestClient(passed).get("/v1/models", headers={"host": host}).status_code == status


@pytest.mark.parametrize("origins", [("https://chat.example",), ("*",)])
def test_pages_of_allowed_origins_may_ask(origins):
    """A browser asks without a key whether it may; without the flag nobody is told so."""
    site, origin = Site(origins=origins), {"origin": "https://chat.example"}
    keys = Keys([KEY])
    answers = site.around(Access(Response("", 200), keys, False, 9, (), site))
    client = TestClient(answers, base_url="http://api.example")
    asks = origin | {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    told = client.options("/v1/models", headers=asks)
    assert told.status_code == 200
    assert "authorization" in told.headers["access-control-allow-headers"]
    answer = client.get("/v1/models", headers=origin | {"authorization": f"Bearer {KEY}"})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] in ("*", origin["origin"])
    exposed = answer.headers["access-control-expose-headers"]
    own = ("x-request-id", "x-ignored-params", "x-relaxed-schema", "x-unread-tool-format")
    assert all(name in exposed for name in own)
    refused = client.get("/v1/models", headers=origin)
    assert refused.status_code == 401 and "access-control-allow-origin" in refused.headers
    other = {"origin": "https://evil.example", "authorization": f"Bearer {KEY}"}
    assert client.get("/v1/models", headers=other).status_code == (200 if "*" in origins else 403)


def test_a_server_may_lie_under_a_path():
    """Whether a proxy takes it off or leaves it there."""
    paths = []

    async def app(scope, receive, send):
        paths.append(scope["path"])
        await Response("")(scope, receive, send)

    client = TestClient(Site(root_path="/llm/a").around(app), follow_redirects=False)
    for path in ("/llm/a/v1/models", "/v1/models", "/llm/a/", "/llm/ab/v1"):
        assert client.get(path).status_code == 200
    assert paths == ["/v1/models", "/v1/models", "/", "/llm/ab/v1"]
    assert client.get("/llm/a").headers["location"] == "/llm/a/"


@pytest.mark.parametrize("key, status", [(KEY, 200), (KEY[:-1], 401), (f"Bearer {KEY}", 401)])
def test_keys_in_the_header_of_anthropics_clients(locked, key, status):
    response = locked.http.post("/v1/completions", json=BODY, headers={"x-api-key": key})
    assert response.status_code == status and KEY not in response.text
    both = {"x-api-key": key, "authorization": f"Bearer {KEY}"}
    response = locked.http.post("/v1/completions", json=BODY, headers=both)
    assert response.status_code == 401 and "send one" in response.json()["error"]["message"]


def test_one_key_is_enough(locked):
    both = [("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {OTHER}")]
    assert locked.http.get("/v1/models", headers=both).status_code == 401


def test_only_hashes_are_kept():
    keys = Keys([KEY])
    assert KEY.encode() not in b"".join(keys._hashes)
    assert keys.name(KEY) not in {keys._hashes[0].hex()[:32], KEY}


def test_prefixes_are_shared_by_requests_of_one_key_and_salt():
    engine, salts = FakeEngine(), []
    with running(engine, keys=Keys([KEY, OTHER])) as server:
        for key, salt in [(KEY, None), (KEY, None), (OTHER, None), (KEY, "s"), (OTHER, "s")]:
            body = BODY | {"cache_salt": salt}
            headers = {"authorization": f"Bearer {key}"}
            assert server.http.post("/v1/completions", json=body, headers=headers).is_success
            salts.append(engine.params[-1].cache_salt)
        body = BODY | {"prompt": "ab", "echo": True, "logprobs": 0}
        headers = {"authorization": f"Bearer {KEY}"}
        assert server.http.post("/v1/completions", json=body, headers=headers).is_success
        assert [params.cache_salt for params in engine.params[-2:]] == [salts[0]] * 2  # its score
    assert salts[0] == salts[1] and len(set(salts)) == 4 and not any(KEY in s for s in salts)


def test_without_keys_all_prefixes_are_shared(server, engine):
    for asked, salt in (({}, None), ({"cache_salt": "s"}, "/s")):
        assert server.post("/v1/completions", **BODY, **asked).is_success
        assert engine.params[-1].cache_salt == salt


@pytest.mark.parametrize("content, problem", [
    ("", "no key"), ("# a comment\n\n", "no key"), ("short\n", "at least 16"),
    (None, "No such file"),
    (b"\xff\xfe", "not UTF-8"),
])  # fmt: skip
def test_files_of_keys(tmp_path, content, problem):
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=problem):
        access.read_keys("--api_key_file=keys", str(path))
    path.write_text(f"# ours\n{KEY}\n\n  {OTHER}  \n")
    keys = access.read_keys("--api_key_file=keys", str(path))
    assert keys.name(KEY) and keys.name(OTHER) and not keys.name("# ours")


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
