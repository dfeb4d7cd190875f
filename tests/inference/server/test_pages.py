"""Pages and their files, as browsers get them."""

import re
import tomllib
from pathlib import Path

import pytest

from inference.server.web import page_files

PATHS = [route.path for route in page_files.routes()]
KINDS = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


@pytest.mark.parametrize("path", PATHS)
def test_files_are_kept_by_their_tags(server, path):
    first = server.http.get(path)
    assert first.status_code == 200
    kind = KINDS.get(path.rpartition(".")[2], "text/html; charset=utf-8")
    assert first.headers["content-type"] == kind
    assert first.headers["x-content-type-options"] == "nosniff"
    assert first.headers["content-security-policy"].startswith("default-src 'self';")
    tag = first.headers["etag"]
    for known, status in [(tag, 304), (f'"other", W/{tag}', 304), ('"other"', 200), ("", 200)]:
        again = server.http.get(path, headers={"if-none-match": known})
        assert again.status_code == status and again.headers["etag"] == tag
        assert (again.content == b"") is (status == 304 or first.content == b"")
    head = server.http.head(path)
    assert head.status_code == 200 and head.content == b""
    assert server.http.post(path, json={}).status_code == 405


def test_nothing_beside_them_is_sent(server):
    for path in ("/docs/", "/docs/__init__.py", "/docs/../app.py", "/docs/%2e%2e/app.py"):
        assert server.http.get(path).status_code == 404, path


@pytest.mark.parametrize("path", PATHS)
def test_pages_ask_nobody_else(server, path):
    text = server.http.get(path).text
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//|@import|\burl\(|<style| style=", text)
    assert not re.search(r"<script(?![^>]*(?:\bsrc=|.application/json))|\son\w+=", text)


@pytest.mark.parametrize("folder, served", [
    ("console", page_files._CONSOLE), ("pages", page_files._DOCS),
])  # fmt: skip
def test_every_file_of_a_page_is_served_and_packed(folder, served):
    there = Path(page_files.__file__).parent / folder
    names = {file.name for file in there.iterdir()} - {"__init__.py", "__pycache__"}
    assert names == set(served.values())
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]
    packed = set(there.parent.glob(patterns["inference.server.web"][0]))
    packed |= {file for pattern in patterns["inference.server.web.pages"]
               for file in (there.parent / "pages").glob(pattern)}  # fmt: skip
    assert {there / name for name in names} <= packed
