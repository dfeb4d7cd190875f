"""Pages and their files, as browsers get them."""

import json
import re
import tomllib
from pathlib import Path

import jsonschema
import pytest

from inference.server.web import page_files

PATHS = [route.path for route in page_files.routes()]
CONSOLE = Path(page_files.__file__).parent / "console"
SCRIPTS = {file.name: file.read_text(encoding="utf-8") for file in CONSOLE.glob("*.js")}
INDEX = (CONSOLE / "index.html").read_text(encoding="utf-8")
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


def test_scripts_of_the_console_fit_together():
    """Each imports what others export, and names elements that the page has."""
    exported = {
        name: set(re.findall(r"^export (?:const|class|(?:async )?function\*?) (\w+)", text, re.M))
        for name, text in SCRIPTS.items()
    }
    ids = set(re.findall(r'id="([^"]+)"', INDEX))
    for script, text in SCRIPTS.items():
        for names, source in re.findall(r'^import \{([^}]+)\} from "\./([^"]+)";', text, re.M):
            assert {name.strip() for name in names.split(",")} <= exported[source], script
        for alias, source in re.findall(r'^import \* as (\w+) from "\./([^"]+)";', text, re.M):
            assert set(re.findall(rf"(?<![./])\b{alias}\.(\w+)", text)) <= exported[source], script
        if script != "plan.js":  # that of another page
            elements = re.findall(r'\b(?:at|getElementById)\("([^"]+)"\)', text)
            assert set(elements) <= ids, script
        assert not re.search(r"(?:inner|outer|Adjacent)HTML|document\.write|\beval\(", text), script


@pytest.mark.parametrize("name", re.findall(r'data-example="([^"]+)"', INDEX))
def test_examples_of_tools_can_be_called(perch, parrot, name):
    """The server accepts what the console offers, and forces calls that obey it."""
    text = re.search(rf'id="{name}">(.*?)</script>', INDEX, re.S)[1]
    tools = json.loads(text)
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    message = {"role": "user", "content": "Hi"}
    for function, schema in schemas.items():
        choice = {"type": "function", "function": {"name": function}}
        answer = perch.post("/v1/chat/completions", messages=[message], tools=tools,
                             tool_choice=choice, max_tokens=400)  # fmt: skip
        assert answer.status_code == 200 and "x-relaxed-schema" not in answer.headers
        (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == function
        jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
