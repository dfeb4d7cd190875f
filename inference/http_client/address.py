"""Where a server of OpenAI's interface is, and the key that it wants."""

import dataclasses
import os
import re
import urllib.parse

from configs.errors import InputError
from inference.files import key_file

KEY_VARIABLE = "OPENAI_API_KEY"  # as OpenAI's own client has it

_WANTED = "http://HOST:PORT, or https://"
_KEY = re.compile(r"[!-~]+")  # what a header can hold


@dataclasses.dataclass(frozen=True)
class Address:
    """Where a server listens. Its paths begin with `prefix`, before /v1; it may want no key."""

    host: str
    port: int
    is_tls: bool = False
    prefix: str = ""
    key: str | None = dataclasses.field(default=None, repr=False)

    @classmethod
    def parse(cls, label: str, url: str, key: str | None = None) -> "Address":
        """Parses a URL as OpenAI's clients take it, with or without its /v1.

        Raises:
            InputError: it is no such URL; begins with `label`, such as "--url=x".
        """
        try:
            parts = urllib.parse.urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise InputError(f"{label[:200]} is no URL: {error}; give {_WANTED}") from None
        is_tls = parts.scheme == "https"
        has_more = parts.query or parts.fragment or "@" in parts.netloc
        is_plain = url.isascii() and url.isprintable() and " " not in url
        if parts.scheme not in ("http", "https") or not parts.hostname or has_more or not is_plain:
            raise InputError(f"{label[:200]} is no URL of a server: give {_WANTED}")
        prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        return cls(parts.hostname, port or (443 if is_tls else 80), is_tls, prefix, key)

    @property
    def name(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def read_key(path: str | None) -> str | None:
    """Reads the first key of --api_key_file's file, else OPENAI_API_KEY, if set. Raises InputError
    if the file is unreadable or has no key, or the key is invalid.
    """
    if path is None:
        label, key = KEY_VARIABLE, os.environ.get(KEY_VARIABLE, "").strip()
        if not key:
            return None
    else:
        label = f"--api_key_file={path}"
        key = key_file.read(label, path)[0]
    if not _KEY.fullmatch(key):
        raise InputError(f"{label}: a key is printable ASCII without spaces")
    return key
