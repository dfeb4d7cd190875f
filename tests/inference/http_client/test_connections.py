"""Connections to servers that do what some servers do."""

import asyncio
import contextlib
import socket

import pytest

from configs.errors import InputError
from inference.http_client import connections
from inference.http_client.address import Address, read_key
from inference.http_client.connections import Connections, Unanswered

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@contextlib.asynccontextmanager
async def server(*scripts: list[bytes | None], pause_s: float = 0.005):
    """The nth connection answers its requests in turn, with pauses at each "|"; None, or the end of
    its list, closes it.
    """
    heads, opened = [], iter(scripts)

    async def serve(reader, writer):
        for answer in next(opened):
            with contextlib.suppress(asyncio.IncompleteReadError):
                heads.append(await reader.readuntil(b"\r\n\r\n"))
            if answer is None:
                break
            for part in answer.split(b"|"):
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(pause_s)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    connections = Connections(Address.parse("--url", f"http://127.0.0.1:{port}/v1", "a-key"))
    try:
        yield connections, heads
    finally:
        connections.close()
        listening.close()


def test_a_connection_is_used_again_and_replaced():
    async def run():
        async with server([OK, OK], [OK]) as (connections, heads):
            answers = [await connections.get("/v1/models") for _ in range(2)]
            await asyncio.sleep(0.02)  # the server closes it, as after a time of silence
            answers.append(await connections.post("/v1/completions", b"{}"))
            assert [each.status for each in answers] == [200] * 3
            assert {each.body for each in answers} == {b"ok"}
            assert heads[0].startswith(b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1:")
            assert b"authorization: Bearer a-key\r\n" in heads[0]
            assert b"content-length: 2\r\n" in heads[2]

    asyncio.run(run())


def test_a_body_comes_in_pieces():
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    chunked = head + b"3\r\none|\r\n3|\r\ntwo\r\n|0\r\n\r\n"
    until_the_end = b"HTTP/1.1 200 OK\r\n\r\none|two"

    async def run():
        async with server([chunked, until_the_end]) as (connections, _):
            for _ in range(2):
                parts: list[bytes] = []
                answer = await connections.send(connections.posted("/x", b""), parts.append)
                assert b"".join(parts) == b"onetwo" and answer.body == b"" and len(parts) > 1

    asyncio.run(run())


def test_an_error_is_not_taken_for_a_stream():
    refused = b"HTTP/1.1 404 Not Found\r\ncontent-length: 4\r\n\r\nnone"

    async def run():
        async with server([refused]) as (connections, _):
            parts: list[bytes] = []
            answer = await connections.send(connections.posted("/x", b""), parts.append)
            assert (answer.status, answer.body, parts) == (404, b"none", [])

    asyncio.run(run())


@pytest.mark.parametrize(
    "answer, why",
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort", "ended before the answer"),
        (b"hello\r\n\r\n", "no HTTP"),
        (None, "ended before the answer"),
    ],
)
def test_there_is_no_answer(answer, why):
    async def run():
        async with server([answer]) as (connections, _):
            with pytest.raises(Unanswered, match=why):
                await connections.get("/x")

    asyncio.run(run())


def test_a_server_is_silent(monkeypatch):
    """As one is whose machine has vanished: neither an answer nor an end comes."""
    monkeypatch.setattr(connections, "_SILENCE_S", 0.4)
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n"

    async def run():
        slow = head + b"a|" * 9  # silent for less at a time, and for as long in all
        async with server([OK, slow, head, OK], pause_s=0.05) as (one, heads):
            assert (await one.get("/x")).status == 200
            assert (await one.get("/x")).body == b"a" * 9
            with pytest.raises(Unanswered, match="silent for 0.4 s"):
                async with asyncio.timeout(60):
                    await one.get("/x")
            assert len(heads) == 3 and not one._idle

    asyncio.run(run())


def test_the_system_asks_whether_the_other_side_is_there():
    async def run():
        async with server([OK]) as (one, _):
            await one.get("/x")
            own = one._idle[0]._transport.get_extra_info("socket")
            assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)

    asyncio.run(run())


def test_nobody_listens():
    async def run():
        with pytest.raises(Unanswered, match="no connection to 127.0.0.1:1: "):
            await Connections(Address("127.0.0.1", 1)).get("/x")

    asyncio.run(run())


def test_one_that_is_cancelled_is_closed():
    async def run():
        async with server([b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort|" * 2]) as (one, _):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.003):
                    await one.get("/x")
            assert not one._idle

    asyncio.run(run())


@pytest.mark.parametrize(
    "url, found",
    [
        ("http://host", ("host", 80, False, "")),
        ("https://host/v1/", ("host", 443, True, "")),
        ("http://[::1]:80/api/v1", ("::1", 80, False, "/api")),
    ],
)
def test_addresses(url, found):
    address = Address.parse("--url", url, "key")
    assert (address.host, address.port, address.is_tls, address.prefix) == found
    assert "key" not in repr(address).replace("key=", "")


@pytest.mark.parametrize(
    "url", ["", "host:80", "ftp://host", "http://", "http://a:b@host", "http://host:99999",
            "http://host?x=1", "http://ho st", "http://host/\r\n", "http://[::1"],
)  # fmt: skip
def test_no_addresses(url):
    with pytest.raises(InputError, match="^--url is no URL") as refused:
        Address.parse("--url", url)
    assert "\n" not in str(refused.value)


def test_keys(tmp_path, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert read_key(None) is None
    monkeypatch.setenv("OPENAI_API_KEY", "of-the-environment")
    assert read_key(None) == "of-the-environment"
    file = tmp_path / "keys"
    file.write_text("# mine\nfirst-key\nsecond\n")
    assert read_key(str(file)) == "first-key"
    for text, why in (("# none\n", "holds no key"), ("a key\n", "without spaces")):
        file.write_text(text)
        with pytest.raises(InputError, match=why):
            read_key(str(file))
    with pytest.raises(InputError, match="No such file"):
        read_key(str(tmp_path / "missing"))
