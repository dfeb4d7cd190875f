"""As much of the Hugging Face hub as downloading a snapshot needs, on this machine."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class FakeHub:
    """Repositories of {commit: {path: bytes}} and {revision: commit}; `requests` tells what came.

    `after_request` is called after each answer; `refusals` maps a repository to a status and an
    `X-Error-Code`.
    """

    def __init__(self):
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}
        self.revisions: dict[str, dict[str, str]] = {}
        self.refusals: dict[str, tuple[int, str]] = {}
        self.requests: list[tuple[str, str]] = []
        self.after_request = lambda path: None
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.0"  # no connection outlives `close`

            def do_GET(self):
                self._answer(body=True)

            def do_HEAD(self):
                self._answer(body=False)

            def _answer(self, body: bool):
                path = unquote(urlsplit(self.path).path)
                hub.requests.append((self.command, path))
                status, headers, content = hub.answer(path)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if body:
                    self.wfile.write(content)
                hub.after_request(path)

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def publish(self, repo: str, files: dict[str, bytes], revision: str = "main") -> str:
        """Adds a commit and moves a revision to it; returns the commit."""
        text = repr(sorted(files.items())).encode()
        commit = hashlib.sha1(text, usedforsecurity=False).hexdigest()
        self.commits.setdefault(repo, {})[commit] = dict(files)
        self.revisions.setdefault(repo, {})[revision] = commit
        return commit

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        if path.startswith("/api/models/"):
            parts = path.removeprefix("/api/models/").split("/")
            kind = parts[2] if len(parts) > 2 else "revision"
            rest = "/".join(parts[3:])
        else:
            parts = path.lstrip("/").split("/")
            kind, rest = "file", "/".join(parts[3:])
            if len(parts) < 4 or parts[2] != "resolve":
                return 404, {}, b""
        repo = "/".join(parts[:2])
        if repo in self.refusals:
            status, code = self.refusals[repo]
            return status, {"X-Error-Code": code, "X-Error-Message": "no"}, b""
        if repo not in self.commits:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        revision, _, name = rest.partition("/")
        commit = self.revisions[repo].get(revision or "main", revision)
        files = self.commits[repo].get(commit)
        if files is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if kind == "tree":
            listed = [
                {"type": "file", "path": n, "size": len(data), "oid": _etag(data)}
                for n, data in files.items()
            ]
            return 200, {"Content-Type": "application/json"}, json.dumps(listed).encode()
        if kind == "revision":
            found = {"id": repo, "sha": commit, "siblings": [{"rfilename": n} for n in files]}
            return 200, {"Content-Type": "application/json"}, json.dumps(found).encode()
        if name not in files:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b""
        headers = {"ETag": f'"{_etag(files[name])}"', "X-Repo-Commit": commit}
        return 200, headers, files[name]


def _etag(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
