"""The console in a real browser, before an engine whose answers are known: it shows what was said,
by pointer and by keys, and asks nobody else.
"""

import json
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from configs import presets
from configs.engine import Config
from configs.mesh import Mesh
from inference.server.endpoints import console
from inference.server.engine_process.plan_facts import plan_facts
from inference.server.web.access import Keys
from tests import chromium
from tests.inference.server.console_page import DONE, READY, pick, put, send, texts
from tests.inference.server.fake_engine import MAX_SEQS, REPLY, FakeEngine
from tests.inference.server.parrot import TEMPLATES, Parrot
from tests.inference.server.running import running, wait_until

pytestmark = chromium.needs_browser
KEY = "key-0123456789abcdef"


class Engine(FakeEngine):
    """Which counts what the charts show."""

    def heartbeat(self):
        found = super().heartbeat()
        steps = self.num_steps
        found.counters |= {
            "generated_tokens": steps, "decode_steps": steps, "decode_step_seconds": steps * 0.0213,
            "predicted_decode_step_seconds": steps / 80,
        }  # fmt: skip
        return found


@pytest.fixture(scope="module")
def engine():
    return Engine(step_s=0.005)


@pytest.fixture(scope="module", autouse=True)
def _often():
    """Figures several times a second: nobody waits for them here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(console, "_EVERY_S", 0.1)
        yield


@pytest.fixture
def page(browser, server):
    """The console, ready; afterwards nothing was wrong, and nobody else was asked."""
    one = browser.page()
    one.open(server.url + "/")
    one.wait(READY)
    yield one
    assert one.problems() == []
    asked = one.requests()
    assert len(asked) > 10 and all(each.startswith(server.url + "/") for each in asked)
    one.close()


def prompt_of(engine):
    return bytes(token for token in engine.prompts[-1] if token < 256).decode()


@pytest.fixture
def thinking(browser):
    """A page of a model that thinks, and the engine."""
    engine = Parrot(TEMPLATES["qwen"])
    engine.says = "<think>\nTwo and two.\n\nSo four.\n</think>\n\nIt is **four**."
    with running(engine) as one:
        page = browser.page()
        page.open(one.url + "/")
        page.wait(READY)
        page.wait("!document.getElementById('thought-control').hidden")
        yield page, engine
        assert page.problems() == []
        page.close()


# --- answers --------------------------------------------------------------------------------------


def test_an_answer_comes_token_by_token(page, engine):
    put(page, temperature=0, max_tokens=39, system="Be brief.")
    page.do("""window.seen = []; new MutationObserver(() => seen.push(
        document.querySelector('.body')?.textContent.length ?? 0))
        .observe(document.getElementById('chat'), { childList: true, subtree: true })""")
    send(page, "Hi")
    assert texts(page) == [REPLY.rstrip()]
    seen = page.do("seen")
    assert len(set(seen)) > 10 and seen == sorted(seen)
    assert page.text(".counts").startswith("39 tokens, first after ")
    assert page.text(".counts").endswith(" a second, cut off")
    assert "system\nBe brief." in prompt_of(engine)
    assert page.do("sessionStorage.length") == 1  # the theme
    assert page.do("localStorage.length + document.cookie.length") == 0


def test_what_is_set_is_what_is_asked(page, engine):
    put(page, temperature=1.25, top_p=0.4, seed=77, max_tokens=9, stop="zebra\nyak")
    send(page, "Hi")
    asked = engine.params[-1]
    assert (asked.temperature, asked.top_p, asked.seed, asked.max_new_tokens, set(asked.stop)) == (
        1.25, 0.4, 77, 9, {"zebra", "yak"},
    )  # fmt: skip
    assert texts(page) == ["77: Grüß"[:7] + "�"]
    (first,) = texts(page)
    page.click(".answer .under button:nth-of-type(2)")  # regenerates: the same seed
    page.wait(DONE)
    assert texts(page) == [first] and engine.params[-1].seed == 77


def test_a_thought_is_folded_and_its_budget_fills(thinking):
    page, engine = thinking
    put(page, max_tokens=90, thinking_token_budget=40, n=2)
    send(page, "2 + 2?")
    assert texts(page) == ["It is **four**."] * 2
    assert engine.params[-1].thinking_budget == 40 and engine.params[-1].thinks
    count = len("Two and two.\n\nSo four.")
    said = f"Thought: {count} tokens of 40"
    assert texts(page, ".thought summary") == [said] * 2
    assert page.do("document.querySelector('.thought progress').value") == count
    assert not page.do("document.querySelector('.thought').open")
    page.click(".thought summary")
    assert page.text(".thought .inner") == "Two and two.So four."
    assert page.do("document.querySelector('.thought').open")
    page.click(".answer .under button:nth-of-type(1)")  # what is copied is the answer
    put(page, thinking_token_budget="")
    send(page, "Sure?")
    assert engine.params[-1].thinking_budget is None
    assert "It is **four**." in engine.prompt and "So four." not in engine.prompt
    assert texts(page, ".turn:last-child .thought summary")[0] == f"Thought: {count} tokens"


def test_a_model_without_thoughts_has_no_budget(page):
    assert page.do("document.getElementById('thought-control').hidden")


def test_answers_stand_side_by_side_and_one_of_them_goes_on(page, engine):
    put(page, n=3, max_tokens=12)
    send(page, "Hi")
    answers = texts(page)
    assert len(set(answers)) == 3 and engine.params[-1].n == 3
    boxes = page.do("""[...document.querySelectorAll('.answer')].map((each) => {
        const b = each.getBoundingClientRect(); return [b.left, b.right, b.top]; })""")
    assert boxes[0][1] <= boxes[1][0] and boxes[1][1] <= boxes[2][0]
    assert len({box[2] for box in boxes}) == 1
    page.click(".answer:nth-child(2) [aria-pressed]")
    put(page, n=1)
    send(page, "And?")
    said = prompt_of(engine)
    assert answers[1] in said and answers[0] not in said and answers[2] not in said


def test_an_answer_is_copied(page):
    put(page, temperature=0, max_tokens=39)
    send(page, "Hi")
    page.allow("clipboardReadWrite", "clipboardSanitizedWrite")
    for button, copied in (
        (".answer .under button", REPLY.rstrip()), (".question .under button:last-child", "Hi"),
    ):  # fmt: skip
        page.click(button)
        page.wait(f"document.querySelector('{button}').textContent === 'Copied'")
        assert page.do("navigator.clipboard.readText()") == copied
        page.do("navigator.clipboard.writeText = () => Promise.reject(Error('not here'))")


def test_a_question_is_edited_and_what_followed_it_goes(page, engine):
    put(page, max_tokens=5)
    for text in ("One", "Two"):
        send(page, text)
    page.click(".turn:first-child .question button")
    page.press("End")
    page.type(" more")
    page.press("Enter")
    page.wait(f"document.querySelectorAll('.turn').length === 1 && {DONE}")
    assert page.text(".question p") == "One more" and "One more" in prompt_of(engine)
    assert "Two" not in prompt_of(engine)
    page.click("#clear")
    assert page.do("document.querySelectorAll('.turn').length") == 0
    assert page.do("!document.getElementById('welcome').hidden")


def test_texts_are_continued_as_they_are(page, engine):
    pick(page, "kind", "text")
    put(page, temperature=0, max_tokens=9)
    send(page, "Once upon")
    assert engine.prompts[-1] == list(b"Once upon")
    assert page.do("document.querySelectorAll('.token').length") > 5
    page.do("""[...document.querySelectorAll('.under button')]
        .find((each) => each.textContent === 'Continue').click()""")
    assert page.do("document.getElementById('prompt').value") == "Once uponGrüße, "
    assert page.do("document.activeElement.id") == "prompt"
    pick(page, "kind", "chat")
    assert page.do("document.getElementById('text').hidden")


def test_an_answer_is_stopped(page, engine, monkeypatch):
    monkeypatch.setattr(engine, "step_s", 0.02)
    put(page, max_tokens=400)
    for stop in (lambda: page.press("Escape"), lambda: page.click("#stop-answer")):
        num_aborted = len(engine.aborted)
        send(page, "Hi", waits=False)
        page.wait("document.querySelectorAll('.turn:last-child .token').length > 3")
        stop()
        page.wait(DONE)
        wait_until(lambda num=num_aborted: len(engine.aborted) > num and not engine.running)
        assert page.text(".turn:last-child .counts").endswith("stopped") and texts(page) != [""]
        assert page.do("!document.getElementById('send').hidden")


def test_what_is_wrong_is_said(page):
    put(page, max_tokens=4)
    send(page, "a" * 600)
    assert "the context of this model is 512 tokens" in page.text(".problem[role=alert]")
    send(page, "Hi again")  # the failed turn is left out
    assert page.do("document.querySelectorAll('.turn:last-child .problem').length") == 0
    failed = [entry for entry in page.problems() if "status of 400" in entry]
    assert len(failed) == 1
    page.forget_problems()


# --- probabilities --------------------------------------------------------------------------------


def test_probabilities_by_pointer_and_by_keys(page):
    put(page, temperature=0, max_tokens=20)
    send(page, "Hi")
    page.point(".token:nth-child(2)")
    page.wait("!document.getElementById('tip').hidden")
    rows = page.do("""[...document.querySelectorAll('#tip li')].map((each) =>
        [each.className, each.querySelector('.name').textContent,
         each.querySelector('.value').textContent,
         parseFloat(each.querySelector('i').style.width)])""")
    assert [row[0] for row in rows] == ["chosen", "", "", "", ""]
    assert rows[0][1:3] == ["r", "77.9 %"] and rows[1][1:3] == ["s", "28.7 %"]
    assert rows[0][3] == pytest.approx(77.88, abs=0.01)
    page.point("#sentence, #prompt")
    page.wait("document.getElementById('tip').hidden")
    page.do("document.querySelector('.body').focus()")
    for key, token in [("ArrowRight", "G"), ("ArrowRight", "r"), ("End", " "), ("ArrowLeft", "")]:
        page.press(key)
        if token:
            assert page.do("document.activeElement.textContent") == token
        assert page.do("document.activeElement.getAttribute('aria-describedby')") == "tip"
        assert page.do("!document.getElementById('tip').hidden")
    tint = "getComputedStyle(document.querySelector('.token.p2:not(.active)')).backgroundColor"
    plain = page.do(tint)
    pick(page, "view", "tinted")
    assert page.do(tint) != plain


def test_tokens_and_texts_meet(page):
    """Bytes that are no whole characters, texts that are held back, ends that are not shown."""
    found = page.do("""(async () => {
      const { Alignment, tokensOf } = await import('/console/tokens.js');
      const bytes = (text) => new TextEncoder().encode(text);
      const token = (text) => ({ text, bytes: bytes(text), logprob: -1, top: [] });
      const run = (...steps) => { const one = new Alignment(), found = [];
        for (const [text, ...tokens] of steps) found.push(...one.take(text, tokens));
        return [...found, ...one.end()].map(([text, token]) => [text, token && token.text]); };
      const [a, b] = [0xe4, 0xb8].map((byte) => ({ ...token('?'), bytes: Uint8Array.of(byte) }));
      const c = { ...token('last'), bytes: Uint8Array.of(0x96) };
      const spelled = tokensOf({ logprobs: { tokens: ['bytes:\\\\xe4\\\\xb8', 'é'],
        token_logprobs: [-1, -2], top_logprobs: [{ x: -3, y: -1 }, null] } });
      return [run(['ab', token('ab')], ['', token('c')], ['cd', token('d')]),
        run(['', a], ['', b], ['世!', c, token('!')]),
        run(['Hi', token(' Hi')], ['', token('<end>')]),
        run(['Hi']), run(['He', token('Hello')]), run(['x', token('<s>'), token('x')]),
        spelled.map((each) => [[...each.bytes], each.logprob, each.top.map((t) => t.text)])];
    })()""")
    assert found == [
        [["ab", "ab"], ["c", "c"], ["d", "d"]], [["世", "last"], ["!", "!"]], [["Hi", " Hi"]],
        [["Hi", None]], [["He", "Hello"]], [["x", "x"]],
        [[[0xE4, 0xB8], -1, ["y", "x"]], [[0xC3, 0xA9], -2, []]],
    ]  # fmt: skip


def test_texts_become_paragraphs_and_code_and_no_markup(page):
    text = (
        "A <img src=x onerror=alert(1)>\nline\n\n\nNext `one`.\n\n```python\nif a:\n\n    b()\n"
        "```\nAfter\n  ```\n<b>\n```"
    )
    found = page.do(f"""(async () => {{
      const {{ Text }} = await import('/console/text.js'), text = {json.dumps(text)};
      return [1, 3, 1000].map((size) => {{
        const root = document.createElement('div'), view = new Text(root);
        for (let at = 0; at < text.length; at += size) view.push(text.slice(at, at + size), null);
        view.end();
        return [...root.children].map((each) => [each.tagName, each.textContent,
          each.querySelectorAll('img, b').length]);
      }});
    }})()""")
    assert found == 3 * [[
        ["P", "A <img src=x onerror=alert(1)>\nline", 0], ["P", "Next `one`.", 0],
        ["PRE", "pythonif a:\n\n    b()", 0], ["P", "After", 0], ["PRE", "<b>", 0],
    ]]  # fmt: skip


# --- live figures ---------------------------------------------------------------------------------


def test_charts_move(page, engine, monkeypatch):
    def drawn():
        return page.do("[...document.querySelectorAll('#live svg')].map((each) => each.innerHTML)")

    first = drawn()
    put(page, max_tokens=400)
    with monkeypatch.context() as slower:
        slower.setattr(engine, "step_s", 0.01)
        send(page, "Hi", waits=False)
        page.wait("parseFloat(document.querySelector('[data-chart=rate] data').textContent) > 20")
        assert page.text("[data-chart=step] data") == "21.3 ms"
        assert page.text("[data-chart=step] small") == "predicted 12.5 ms"
        assert page.text("[data-chart=batch] data") == "1 sequence"
        assert page.text("[data-chart=pages] data").startswith("25")
        assert page.text("[data-chart=first] data") != "–"
    page.wait(DONE)
    assert all(a != b for a, b in zip(first, drawn(), strict=True))
    page.point("[data-chart=rate] svg")
    assert page.text("[data-chart=step] small").endswith(" s ago")
    assert page.do("document.querySelectorAll('#live .thin').length") == 5
    page.point("#prompt")
    assert not page.text("[data-chart=step] small").endswith(" s ago")


def test_figures_are_there_while_the_model_is_not():
    engine = Engine()
    engine.gate.clear()
    with (
        running(engine, waits=False) as server,
        server.http.stream("GET", "/console/events") as response,
    ):
        events = (line for line in response.iter_lines() if line)
        first = json.loads(next(events).removeprefix("data: "))
        assert first["state"] in ("loading", "warming up") and first["first_tokens"] == 0
        engine.gate.set()
        later = (json.loads(event.removeprefix("data: ")) for event in events)
        found = next(each for each in later if each["at"] > first["at"])
        assert found["state"] == "ready" and found["max_seqs"] == MAX_SEQS and found["has_chats"]
        server.stop()  # which does not wait for those who only watch
        server.join()


# --- everyone's page ------------------------------------------------------------------------------


def test_keys_alone_do_everything_and_all_has_a_name(page):
    assert page.do("document.activeElement.id") == "prompt"
    page.type("a")
    page.press("Enter", shift=True)
    page.type("b")
    assert page.do("document.getElementById('prompt').value") == "a\nb"
    put(page, max_tokens=4)
    page.press("Enter")
    page.wait(DONE)
    page.do("document.activeElement.blur(); document.querySelector('.skip').focus()")
    order = []
    for _ in range(30):
        focused = page.do("""(() => { const found = document.activeElement;
          const style = getComputedStyle(found), around = getComputedStyle(found.closest(
            '.choices label, #composer') ?? found);
          return [found.id || found.name || found.textContent || found.className,
            [style, around].some((each) => each.boxShadow !== 'none' ||
              each.outlineStyle !== 'none' && each.outlineWidth !== '0px')]; })()""")
        assert focused[1], f"{focused[0]} does not show that it has the focus"
        order.append(focused[0])
        page.press("Tab")
        if page.do("document.activeElement === document.body"):
            break
    assert order[1:14] == [
        *("kind", "system", "edit-tools", "temperature", "top_p", "seed", "n", "max_tokens"),
        *("stop", "view", "theme", "Planner", "API"),
    ]  # fmt: skip
    assert order[-2:] == ["clear", "send"] and "Regenerate" in order and "Edit" in order
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    roles = ("button", "textbox", "slider", "radio", "spinbutton", "link", "radiogroup", "img")
    named = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in tree
        if not node["ignored"] and node["role"]["value"] in roles
    ]
    assert len(named) > 25 and not [role for role, name in named if not name]


def luminance(page, query="body"):
    colour = page.do(f"getComputedStyle(document.querySelector('{query}')).backgroundColor")
    red, green, blue = (int(part) for part in colour[4:-1].split(","))
    return 0.3 * red + 0.6 * green + 0.1 * blue


def test_light_dark_and_still(page):
    for scheme, theme, is_dark in [
        ("light", "", False), ("dark", "", True), ("dark", "light", False), ("light", "dark", True),
    ]:  # fmt: skip
        page.prefer(color_scheme=scheme)
        pick(page, "theme", theme)
        for query in ("body", "header", "#composer", "#system"):
            assert (luminance(page, query) < 60) is is_dark
    page.reload()
    page.wait(READY)
    assert luminance(page) < 60  # it is remembered
    page.do("document.querySelector('#chat').innerHTML = '<div class=\"body waits\"></div>'")
    move = "getComputedStyle(document.querySelector('.waits'), '::after').animationName"
    assert page.do(move) == "breathe"
    page.prefer(reduced_motion="reduce")
    assert page.do(move) == "none"


def test_nothing_is_wider_than_the_window(page):
    wide = "document.documentElement.scrollWidth > innerWidth"
    folded = "getComputedStyle(document.getElementById('settings')).display === 'none'"
    page.resize(375, 800, is_phone=True)
    assert not page.do(wide)
    put(page, n=3, max_tokens=60)
    send(page, "W" * 200)
    for width in (375, 760, 800, 1001):
        page.resize(width, 800, is_phone=width < 500)
        assert page.do("innerWidth") == width and page.do(folded) is (width < 761)
        if width < 761:
            page.click("#unfold")
            assert not page.do(folded)
            page.do("scrollTo(0, 0)")
            at = page.do("JSON.stringify(document.getElementById('send').getBoundingClientRect())")
            assert 0 < json.loads(at)["top"] < json.loads(at)["bottom"] < 800  # settings or not
        outside = page.do(f"""[...document.querySelectorAll('main *, form *')].filter((each) => {{
            const b = each.getBoundingClientRect(); return b.width && (b.right > {width} + 0.5 ||
            b.left < -0.5) && !each.closest('.unseen, .skip, svg, pre');
            }}).map((each) => each.id || each.className)""")
        assert not page.do(wide) and outside == []
        if width < 761:
            page.click("#unfold")


def test_a_key_is_asked_for_and_a_wrong_one_is_refused(browser):
    engine = Engine()
    with running(engine, keys=Keys([KEY]), waits=True) as server:
        page = browser.page()
        page.open(server.url + "/")
        page.wait("document.getElementById('key-dialog').open")
        assert page.text("#key-problem") == ""
        for key, is_right in (("wrong-0123456789ab", False), (KEY, True)):
            page.do("document.getElementById('key').focus()")
            page.type(key)
            page.press("Enter")
            if not is_right:
                page.wait("document.getElementById('key-problem').textContent")
                assert "refused this key" in page.text("#key-problem")
        page.wait(READY)
        put(page, max_tokens=5)
        send(page, "Hi")
        assert engine.params and page.do("Object.keys(localStorage).length") == 0
        page.reload()
        page.wait(READY)
        assert not page.do("document.getElementById('key-dialog').open")
        assert all("401" in each for each in page.problems())
        page.close()


def test_the_planner_opens_with_what_is_served(browser):
    engine, config = Engine(), Config(presets.get("smollm2-135m").config, mesh=Mesh(context=2))
    engine.facts = lambda: msgspec.structs.replace(
        FakeEngine().facts(), plan=plan_facts(config, None)
    )
    with running(engine, keys=Keys([KEY])) as server:
        page = browser.page()
        page.open(server.url + "/plan")
        page.wait("document.querySelector('#sentence [role=alert]')")
        assert "asks for a key" in page.text("#sentence")
        page.forget_problems()
        page.do(f"sessionStorage.setItem('ridgeline.key', '{KEY}')")
        page.reload()
        page.wait("document.getElementById('model')?.value === 'fake'")
        assert page.do("state.batch") == config.engine.max_seqs
        assert page.do("state.context_chips") == 2
        assert page.do("plan(CATALOG, state).parameters") == 134515008
        assert page.do("Object.keys(CATALOG.models).length") > 20
        assert page.problems() == []
        assert all(each.startswith(server.url + "/") for each in page.requests())
        page.close()


def test_the_planner_shows_that_it_loads(browser, server):
    page = browser.page()
    page.call(
        "Page.addScriptToEvaluateOnNewDocument",
        source="""{
        const { fetch } = window, gate = new Promise((open) => { window.answer = open; });
        window.fetch = (...request) => gate.then(() => fetch(...request)); }""",
    )
    page.open(server.url + "/plan")
    page.wait("document.querySelector('#sentence [role=status]')")
    assert page.text("#sentence") == "Loading the plan of what is served."
    page.do("answer()")
    page.wait("document.querySelector('#sentence [role=alert]')")  # this server has none
    assert "Loading" not in page.text("#sentence")
    page.close()


def test_a_model_without_a_plan(server):
    assert server.http.get("/console/plan").status_code == 404


@pytest.mark.long
def test_a_real_model(browser):
    """The console and the planner before the model that the README starts."""
    command = [sys.executable, "-m", "scripts.serve", "--model=smollm2-135m", "--port=0"]
    root = Path(__file__).resolve().parents[3]
    with subprocess.Popen(
        [*command, "--nowarm_up", "--max_num_seqs=4"], cwd=root, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            url = process.stderr.readline().split()[0]
            threading.Thread(target=process.stderr.read, daemon=True).start()
            page = browser.page()
            page.open(url + "/")
            page.wait(READY, 240)
            put(page, temperature=0, max_tokens=24)
            send(page, "What is the capital of France?", waits=False)
            page.wait(DONE, 120)
            assert "Paris" in texts(page)[0]
            chances = page.do("""(async () => {
                const { tokenOf } = await import('/console/text.js');
                return [...document.querySelectorAll('.token')].map((each) => tokenOf.get(each))
                  .map(({ text, logprob, top }) => [text === top[0].text, Math.exp(logprob),
                    top.reduce((sum, each) => sum + Math.exp(each.logprob), 0)]); })()""")
            assert len(chances) > 4  # greedy: each is the most likely, of what is not all
            assert all(is_top and 0.05 < p <= whole <= 1.001 for is_top, p, whole in chances)
            put(page, n=3, temperature=1, seed=1, max_tokens=40)
            send(page, "Why?", waits=False)
            page.wait(f"document.querySelectorAll('.turn').length === 2 && {DONE}", 120)
            assert len(set(texts(page))) == 3
            assert page.text("[data-chart=step] data") != "–"
            page.open(url + "/plan")
            page.wait("document.getElementById('model')?.value === 'smollm2-135m'")
            assert page.do("plan(CATALOG, state).parameters") == 134515008
            assert page.do("state.batch") == 4 and page.problems() == []
            assert all(each.startswith(url + "/") for each in page.requests())
            page.close()
        finally:
            process.terminate()
