"""The description of what is served, and the page at /docs that shows it, in a real browser."""

import json
import re

import pytest

from inference.server.web.access import Keys
from inference.server.web.operations import OPERATIONS, describe
from tests import chromium
from tests.inference.server.described import validator
from tests.inference.server.fake_engine import HEAD, FakeEngine
from tests.inference.server.running import running

KEY = "key-0123456789abcdef"
POSTS = [each for each in OPERATIONS if each.body is not None]
SHOWN = "document.querySelectorAll('section').length > 20"


@pytest.fixture(scope="module")
def engine():
    return FakeEngine(classifier=HEAD)


@pytest.fixture(scope="module")
def browser():
    with chromium.browser() as one:
        yield one


def check_quiet(page, server):
    assert page.problems() == []
    assert all(each.startswith(f"{server.url}/") for each in page.requests())


@pytest.fixture(scope="module")
def page(browser, server):
    """It, shown; afterwards nothing was wrong, and nobody else was asked."""
    one = browser.page()
    one.allow("clipboardReadWrite", "clipboardSanitizedWrite")
    one.open(f"{server.url}/docs")
    one.wait(SHOWN)
    yield one
    check_quiet(one, server)
    one.close()


@pytest.mark.parametrize("operation", POSTS, ids=lambda each: each.path)
def test_examples_are_answered_as_described(server, operation):
    fields = dict(operation.example)
    if "input_file_id" in fields:
        fields["input_file_id"] = server.upload("{}")
    response = server.http.post(operation.path, json=fields)
    assert response.status_code == 200, response.text
    assert "x-ignored-params" not in response.headers
    validator(server, operation.path).validate(response.json())
    body = describe()["paths"][operation.path]["post"]["requestBody"]["content"]
    assert body["application/json"]["example"] == operation.example


@pytest.mark.parametrize("operation", POSTS, ids=lambda each: each.path)
def test_every_field_of_a_request_is_described(operation):
    schema = describe()["components"]["schemas"][operation.body.__name__]
    attributes = schema.get("description", "").partition("Attributes:")[2]
    named = set(re.findall(r"\w+", " ".join(re.findall(r"^\s*([\w, .]+):", attributes, re.M))))
    silent = {name for name, own in schema["properties"].items() if "description" not in own}
    assert silent <= named


@chromium.needs_browser
def test_the_page_shows_every_operation_and_object(page, server):
    described = server.http.get("/openapi.json").json()
    found = page.do("[...document.querySelectorAll('section h2')].map((each) => each.textContent)")
    named = [
        f"{method.upper()}{path}" for path, own in described["paths"].items() for method in own
    ]
    assert sorted(found) == sorted([*named, *described["components"]["schemas"]])
    links = page.do(
        "[...document.querySelectorAll('nav a, main a')].map((each) => each.getAttribute('href'))"
        ".filter((each) => each.startsWith('#') && !document.getElementById(each.slice(1)))"
    )
    assert links == []


@chromium.needs_browser
def test_fields_have_types_ranges_and_words(page, server):

    def row(section, field):
        return page.do(
            f"[...document.querySelectorAll('[id=\"{section}\"] tbody tr')].find((row) => "
            f"row.querySelector('code').textContent === '{field}')?.innerText"
        )

    assert "number, 0 to 2" in row("post-v1-chat-completions", "temperature")
    assert "required" in row("post-v1-chat-completions", "messages")
    assert "vectors are cut after so many numbers" in row("post-v1-embeddings", "dimensions")
    assert "whole number, from 1" in row("post-v1-embeddings", "dimensions")
    assert '"base64", "float"' in row("post-v1-embeddings", "encoding_format")
    assert "text, not empty or list of whole numbers" in row("post-v1-embeddings", "input")
    assert "returned with the answer" in row("post-v1-responses", "metadata")
    events = page.text('[id="post-v1-responses"]')
    assert "Each event of a stream" in events and "TextDelta" in events


@chromium.needs_browser
def test_examples_are_commands(page, server):
    page.click('[id="post-v1-embeddings"] button')
    page.wait(
        "document.querySelector('[id=\"post-v1-embeddings\"] button').textContent == 'Copied'"
    )
    command = page.do("navigator.clipboard.readText()")
    assert command.startswith(f"curl {server.url}/v1/embeddings")
    (body,) = re.findall(r"-d '(.*)'", command, re.DOTALL)
    example = next(each.example for each in POSTS if each.path == "/v1/embeddings")
    assert json.loads(body) == example


@chromium.needs_browser
def test_a_call_can_be_tried(page, server, engine):
    """Its body can be edited, an error is shown as it is, and a stream can be stopped."""
    own = "document.querySelector('#post-v1-completions .trial')"

    def answer(body, said):
        page.do(f"{own}.querySelector('textarea').value = {json.dumps(json.dumps(body))}")
        page.do(f"{own}.querySelector('button').click()")
        page.wait(f"{own}.querySelector('pre').textContent.includes({json.dumps(said)})")
        page.wait(f"{own}.querySelector('button').textContent === 'Send'")

    page.do(f"{own}.open = true")
    answer({"prompt": "a", "max_tokens": 3, "temperature": 0}, '"completion_tokens": 3')
    assert page.do(f"{own}.querySelector('pre').textContent").startswith("200 OK\n{")
    answer({"prompt": "a", "max_tokens": 3, "stream": True}, "[DONE]")
    answer({"prompt": "a", "n": 0}, "400 Bad Request")
    assert len(page.problems()) == 1  # the browser's own, of that answer
    page.forget_problems()
    page.do("document.querySelector('#get-v1-models-id- .trial input').value = '/v1/models/fake'")
    page.do("document.querySelector('#get-v1-models-id- .trial button').click()")
    page.wait("document.querySelector('#get-v1-models-id- pre[role]').textContent.includes('200')")


@chromium.needs_browser
def test_a_key_opens_it(browser):
    with running(keys=Keys([KEY])) as server:
        page = browser.page()
        page.open(f"{server.url}/docs")
        page.wait("!document.getElementById('problem').hidden")
        assert "no key of this server" in page.text("#problem") and page.text("main") == ""
        page.forget_problems()
        page.do("document.querySelector('#key input').focus()")
        page.type(KEY)
        page.click("#key button")
        page.wait(SHOWN)
        assert "Authorization: Bearer $KEY" in page.text('[id="post-v1-responses"] pre')
        assert KEY not in page.text("main")
        check_quiet(page, server)
        page.close()


@chromium.needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_the_width(page, width):
    page.resize(width, 800)
    assert page.do("document.documentElement.scrollWidth") <= width
