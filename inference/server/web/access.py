"""Access control: keys, and the values of `Host` and `Origin` that browsers may send."""

import dataclasses
import hashlib
import hmac
import ipaddress
import re
import secrets
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from configs.errors import InputError
from inference.files import key_file
from inference.server.endpoints.anthropic import errors
from inference.server.failures import request_id
from inference.server.protocol.errors import ApiError, unavailable

CLIENT = "ridgeline.client"  # key of a request's scope: the client's name; "" without keys
BACKGROUND_S = "ridgeline.background_s"  # key of the scope: seconds for a batch's answer
REQUEST_ID = "x-request-id"  # header of requests and answers
_API_KEY, _ANTHROPIC_ID = "x-api-key", "request-id"  # headers of Anthropic's clients
OPEN_PATHS = ("/health", "/ready")  # need no key: probes have none
_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_EXPOSED = (  # headers that pages of other origins can read
    *(
        REQUEST_ID,
        _ANTHROPIC_ID,
        "retry-after",
        "x-should-retry",
        "x-ignored-params",
        "x-relaxed-schema",
    ),
    *("x-unread-tool-format", "www-authenticate"),
)
_MIN_KEY_CHARS = 16


class Keys:
    """Hashes of clients' keys."""

    def __init__(self, keys: Iterable[str]):
        self._hashes = [_hash(key) for key in keys]

    def __len__(self) -> int:
        return len(self._hashes)

    @property
    def names(self) -> frozenset[str]:
        """The names of all clients."""
        return frozenset(map(_name, self._hashes))

    def name(self, key: str) -> str:
        """The name of a key's client, "" if the key is unknown; takes constant time."""
        digest, is_known = _hash(key), False
        for key_digest in self._hashes:
            is_known |= hmac.compare_digest(digest, key_digest)
        return _name(digest) if is_known else ""


def read_keys(label: str, path: str) -> Keys:
    """Reads a file with a key a line; lines that begin with # are comments.

    Raises:
        InputError: the file cannot be read, has no key, or has a short one.
    """
    keys = key_file.read(label, path)
    if min(map(len, keys)) < _MIN_KEY_CHARS:
        raise InputError(f"{label}: a key has at least {_MIN_KEY_CHARS} characters")
    return Keys(keys)


@dataclasses.dataclass(frozen=True)
class Site:
    """The addresses of a server behind a proxy.

    Attributes:
        hosts: accepted values of `Host`, in addition to this machine's names; `*.example.org`
            stands for all names below it. Empty: any, if the server listens to other machines.
        origins: of pages of other servers that may send requests; `*` stands for all.
        root_path: prefix of the server's paths that the proxy does not remove: `/llm`.
    """

    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    root_path: str = ""

    def has(self, host: str) -> bool:
        return any(
            host == name or (name.startswith("*.") and host.endswith(name[1:]))
            for name in self.hosts
        )

    def admits(self, origin: str) -> bool:
        return origin in self.origins or "*" in self.origins

    def around(self, app: ASGIApp) -> ASGIApp:
        """Wraps an application: allows CORS for `origins`, and removes `root_path`."""
        if self.origins:
            app = CORSMiddleware(
                app, allow_origins=self.origins, allow_methods=("GET", "POST", "DELETE"),
                allow_headers=("*",), expose_headers=_EXPOSED,
            )  # fmt: skip
        if not self.root_path:
            return app

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            path = scope.get("path", "")
            if path == self.root_path:  # links of its pages are relative
                await RedirectResponse(f"{path}/")(scope, receive, send)
                return
            if path.startswith(f"{self.root_path}/"):
                scope = {**scope, "path": path.removeprefix(self.root_path)}
            await app(scope, receive, send)

        return answer


NO_PROXY = Site()


class Access:
    """Middleware that rejects requests with a foreign `Host` (on loopback), a foreign `Origin`, or
    without a valid key. Gives every answer an id: the client's, if the request has one.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys | None,
        is_local: bool,
        max_requests: int,
        pages: Iterable[str] = (),
        site: Site = NO_PROXY,
        path_keys: Mapping[str, Keys] = MappingProxyType({}),
    ):
        """`is_local`: the server listens on loopback only; `max_requests`: at a time, probes not
        counted; `pages`: paths that need no key, because a browser fetches them without; `site`:
        the server's public addresses; `path_keys`: keys of paths that have their own.
        """
        self._app = app
        self._keys = keys
        self._is_local = is_local
        self._max_requests = max_requests
        self._pages = frozenset(pages)
        self._site = site
        self._path_keys = path_keys
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        id = headers.get(REQUEST_ID, "")
        if not _ID.fullmatch(id):
            id = secrets.token_hex(16)
        request_id.set(id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer_headers = MutableHeaders(raw=message.setdefault("headers", []))
                answer_headers[REQUEST_ID] = id
                if errors.has_path(scope["path"]):
                    answer_headers[_ANTHROPIC_ID] = id
            await send(message)

        try:
            scope[CLIENT] = self._check(scope, headers)
        except ApiError as error:
            await errors.response(error, scope["path"])(scope, receive, send_with_id)
            return
        self._num_open += 1
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._num_open -= 1

    def _check(self, scope: Scope, headers: Headers) -> str:
        """Returns the name of the client, or raises 401, 403, 404 or 503 (too many requests)."""
        if not scope["path"].isprintable():  # a route's pattern may match before a line's end
            raise ApiError(404, "there is no such path", code="not_found")
        host = headers.get("host", "")
        if len(headers.getlist("host")) != 1 or not self._is_ours(host):
            raise ApiError(403, "the header Host names another server")
        origin = headers.get("origin")
        # Behind a proxy with TLS the page's scheme differs. The key keeps foreign pages out.
        schemes = [scope["scheme"]] if self._keys is None else ["http", "https"]
        own_origins = [f"{scheme}://{host}" for scheme in schemes]
        if origin is not None and origin not in own_origins and not self._site.admits(origin):
            raise ApiError(403, "requests from pages of other servers are not served")
        if scope["path"] in OPEN_PATHS:
            return ""
        if self._num_open >= self._max_requests:
            raise unavailable(
                f"{self._max_requests} requests are being answered, the most at a time"
            )
        path_keys = self._path_keys.get(scope["path"])
        valid = self._keys if path_keys is None else path_keys
        if valid is None or (path_keys is None and scope["path"] in self._pages):
            return ""
        keys = headers.getlist(_API_KEY)
        for value in headers.getlist("authorization"):
            kind, _, key = value.partition(" ")
            keys.append(key.strip() if kind.lower() == "bearer" else "")
        client = valid.name(keys[0]) if len(keys) == 1 else ""
        if not client:
            if path_keys is not None and len(keys) == 1 and self._keys and self._keys.name(keys[0]):
                why = "this key does not control the engine: send one of --control_key_file"
                raise ApiError(403, why, code="invalid_api_key")
            why = "the header Authorization, or x-api-key, holds no key of this server"
            if len(keys) > 1:
                why = "the headers Authorization and x-api-key hold several keys: send one"
            raise ApiError(401, why, code="invalid_api_key")
        return client

    def _is_ours(self, host: str) -> bool:
        """Whether a header `Host`, with or without a port, names this server."""
        match = re.fullmatch(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(:[0-9]{1,5})?", host.lower())
        name = match[1].strip("[]") if match else ""
        if not (self._is_local or self._site.hosts):
            return True
        return is_local(name) or self._site.has(name)


def is_local(host: str) -> bool:
    """Whether a host is a loopback address, which only this machine can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _name(digest: bytes) -> str:
    return hashlib.sha256(digest).hexdigest()[:32]


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
