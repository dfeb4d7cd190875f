"""Takes pictures of the pages, with what `pip install '.[serve,test]'` brings and a Chromium.

    python -m tests.screenshot docs/plan.png [SETTINGS] [WIDTH] [HEIGHT] [light|dark]
    python -m tests.screenshot console
    python -m tests.screenshot calls

The first is the planner's; SETTINGS are what follows # in the page's address, such as
model=llama3-70b&hardware=h100&chips=4. The second writes docs/console.png, console-dark.png and
console-phone.png: the console of a server that it starts, before SmolLM2-135M. The third writes
docs/calls*.png: the same before an engine that says what is written here, a byte a token, because
that model neither thinks nor calls.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from inference.planner.page import render
from tests import chromium
from tests.inference.server.parrot import TEMPLATES, Parrot
from tests.inference.server.running import running

ROOT = Path(__file__).resolve().parents[1]

_SETTINGS = "model=llama3-70b&hardware=h100&batch=64&context=2048&new_tokens=256&chips=4&price=2.5"
_SERVE = ("scripts.serve", "--model=smollm2-135m", "--port=0", "--max_num_seqs=8")
# Of other clients, while the page is watched: when they begin, and how many tokens they get.
_OTHERS = ((0, 140), (3, 200), (9, 220), (10, 160), (13, 90), (24, 260), (26, 90), (40, 300))
_WATCHED_S = 45
_IS_READY = "document.getElementById('lamp').className === 'ready'"
_IS_DONE = "document.querySelector('.answer') && !document.querySelector('.waits')"
_THOUGHT = "<think>\nTwo cities, so two calls. Neither needs the other's result.\n</think>\n\n"
_EVENT_THOUGHT = "<think>\nThe review takes an hour. Lunch comes after it.\n</think>\n\n"
_STEP_S = 0.02


def plan(
    target: str, settings: str = _SETTINGS, width: str = "1280", height: str = "1030",
    scheme: str = "light",
) -> None:  # fmt: skip
    """Writes what a browser shows of the planner's page to `target`."""
    with tempfile.TemporaryDirectory() as folder, chromium.browser() as browser:
        file = Path(folder) / "plan.html"
        file.write_text(render.render(), encoding="utf-8")
        page = browser.page(width=int(width), height=int(height))
        page.prefer(color_scheme=scheme)
        page.open(f"{file.as_uri()}#{settings}")
        page.picture(Path(target))


def console() -> None:
    """Writes the console's pictures."""
    with _served() as url, chromium.browser() as browser:
        page = browser.page(width=1280, height=1030)
        page.open(url)
        page.wait(_IS_READY)
        others = _others(url)
        time.sleep(_WATCHED_S)
        _set(page, n=3, max_tokens=110, seed=5)
        _view_probabilities(page)
        _ask(page, "Why is the sky blue?")
        page.wait("document.querySelectorAll('.token').length > 160", 300)
        page.do("document.querySelectorAll('.answer:nth-child(2) .p4')[2].id = 'here'")
        page.point("#here")
        page.picture(ROOT / "docs" / "console.png")
        page.close()
        for thread in others:
            thread.join()

        page = browser.page(width=1280, height=860)
        page.prefer(color_scheme="dark")
        page.open(url)
        page.wait(_IS_READY)
        _set(page, max_tokens=130, temperature=0.2, seed=1)
        _ask(page, "Write a Python function that adds two numbers.")
        page.wait(_IS_DONE, 300)
        page.picture(ROOT / "docs" / "console-dark.png")
        page.close()

        page = browser.page()
        page.resize(375, 812, 2, is_phone=True)
        page.open(url)
        page.wait(_IS_READY)
        _set(page, max_tokens=60, seed=2)
        _view_probabilities(page)
        _ask(page, "Why is the sky blue?")
        page.wait(_IS_DONE, 300)
        page.picture(ROOT / "docs" / "console-phone.png")


class _Scripted(Parrot):
    """It says what it is told to, at a speed that can be watched."""

    def __init__(self) -> None:
        super().__init__(TEMPLATES["qwen"])
        self.step_s = _STEP_S

    def heartbeat(self):
        heartbeat = super().heartbeat()
        steps = self.num_steps
        heartbeat.counters = {
            "generated_tokens": steps, "decode_steps": steps, "decode_step_seconds": steps * _STEP_S
        }  # fmt: skip
        return heartbeat


def calls() -> None:
    """Writes pictures of thoughts, calls and their results."""
    engine = _Scripted()
    with running(engine, served_model_name="scripted") as server, chromium.browser() as browser:
        page = browser.page(width=1280, height=1030)
        _call_twice(page, server.url, engine)
        _answer_calls(page)
        engine.says = (
            "<think>\nOslo is the colder one, and wet.\n</think>\n\nParis is the better choice: "
            "clear and 18 to 21 degrees, while Oslo has rain and 9 degrees until Friday."
        )
        page.press("Enter")
        page.wait(f"document.querySelectorAll('.turn').length === 2 && {_IS_DONE}", 60)
        page.picture(ROOT / "docs" / "calls.png")
        page.close()

        page = browser.page(width=1280, height=860)
        page.prefer(color_scheme="dark")
        _offer(page, server.url, "calendar")
        place = {"building": "North", "floor": 2}
        review = {"title": "Review of the draft", "date": "2026-12-01", "minutes": 60}
        lunch = {"title": "Lunch", "date": "2026-12-01", "place": {"building": "Canteen"}}
        engine.says = _EVENT_THOUGHT + _calls(
            ("create_event", review | {"guests": ["Ana", "Bo", "Chidi"], "place": place}),
            ("create_event", lunch),
        )
        _ask(page, "Plan the review on 1 December, and lunch after it.")
        page.wait("document.querySelectorAll('.call')[1]?.textContent.includes('Canteen')", 60)
        page.picture(ROOT / "docs" / "calls-dark.png")
        page.close()

        page = browser.page()
        page.resize(375, 812, 2, is_phone=True)
        _call_twice(page, server.url, engine)
        _answer_calls(page)
        page.do("scrollTo(0, document.querySelector('.thought').offsetTop - 66)")
        page.picture(ROOT / "docs" / "calls-phone.png")


def _offer(page: chromium.Page, url: str, example: str) -> None:
    page.open(url)
    page.wait(_IS_READY)
    page.do("document.getElementById('edit-tools').click()")
    page.do(f"document.querySelector('[data-example=example-{example}]').click()")
    page.do("document.querySelector('#tools-form [type=submit]').click()")
    _set(page, max_tokens=900, thinking_token_budget=128)


def _call_twice(page: chromium.Page, url: str, engine: _Scripted) -> None:
    _offer(page, url, "weather")
    arguments = {"days": 3, "unit": "celsius"}
    engine.says = f"{_THOUGHT}I look at the forecasts of both." + _calls(
        *(("get_weather", {"city": city} | arguments) for city in ("Paris", "Oslo"))
    )
    _ask(page, "Paris or Oslo for the next three days, if I want no rain?")
    page.wait("document.querySelector('.replies:not([hidden])')", 60)


def _answer_calls(page: chromium.Page) -> None:
    """Types results, up to the key that sends them."""
    page.do("document.querySelector('.reply textarea').focus()")
    page.type('{"sky": "clear", "degrees": [18, 21, 19]}')
    page.press("Enter")
    page.type("rain and 9 degrees until Friday")


def _calls(*calls: tuple[str, dict]) -> str:
    """What a model of Qwen's kind writes to call functions."""
    objects = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>\n" for call in objects)


@contextlib.contextmanager
def _served() -> Iterator[str]:
    """The address of a server that ends with this."""
    with subprocess.Popen(
        [sys.executable, "-m", *_SERVE], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        url = process.stderr.readline().split()[0]
        lines = threading.Thread(target=process.stderr.read)  # so that it never waits to write
        lines.start()
        try:
            while not _is_ready(url):
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()


def _is_ready(url: str) -> bool:
    try:
        return urllib.request.urlopen(f"{url}/ready").status == 200
    except OSError:
        return False


def _others(url: str) -> list[threading.Thread]:
    """Other clients, so that there is something to be seen."""

    def ask(start: float, num_tokens: int) -> None:
        time.sleep(start)
        message = {"role": "user", "content": f"Tell me about the number {num_tokens}."}
        body = {"messages": [message], "max_tokens": num_tokens, "ignore_eos": True, "seed": 0}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), headers
        )
        urllib.request.urlopen(request).read()

    threads = [threading.Thread(target=ask, args=each) for each in _OTHERS]
    for thread in threads:
        thread.start()
    return threads


def _set(page: chromium.Page, **values: float) -> None:
    for id, value in values.items():
        page.do(
            f"(() => {{ const found = document.getElementById('{id}'); found.value = {value};"
            "found.dispatchEvent(new Event('input', { bubbles: true })); })()"
        )


def _view_probabilities(page: chromium.Page) -> None:
    page.do("document.querySelector('input[value=tinted]').click()")


def _ask(page: chromium.Page, text: str) -> None:
    page.do("document.getElementById('prompt').focus()")
    page.type(text)
    page.press("Enter")


if __name__ == "__main__":
    if chromium.BROWSER is None:
        sys.exit(f"error: no browser found; tried {', '.join(render.BROWSERS)}")
    if sys.argv[1:] == ["console"]:
        console()
    elif sys.argv[1:] == ["calls"]:
        calls()
    else:
        plan(*sys.argv[1:])
