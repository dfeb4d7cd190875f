"""Tools in the console: what is offered, calls as cards, and results that go back to the model."""

import json

import jsonschema
import pytest

from tests import chromium
from tests.inference.server.console_page import DONE, READY, put, send, texts
from tests.inference.server.parrot import TEMPLATES, Parrot
from tests.inference.server.running import running

pytestmark = chromium.needs_browser
CARDS = ".turn:last-child .call"
WAITS = "document.querySelector('.turn:last-child .replies:not([hidden])')"
THOUGHT = "<think>\nTwo cities.\n</think>\n\n"


def call(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>\n'


PARIS = call("get_weather", '{"city": "Paris", "days": 3}')
OSLO = call("get_weather", '{"unit": "kelvin", "days": 12, "city": "Oslo"}')


@pytest.fixture(scope="module")
def engine():
    return Parrot(TEMPLATES["qwen"])


@pytest.fixture(scope="module")
def server(engine):
    with running(engine) as server:
        yield server


@pytest.fixture
def page(browser, server):
    """The console of a model that thinks and calls; afterwards nothing was wrong with it."""
    page = browser.page()
    page.open(server.url + "/")
    page.wait(f"{READY} && !document.getElementById('thought-control').hidden")
    put(page, max_tokens=2000, temperature=0)
    yield page
    assert page.problems() == []
    page.close()


@pytest.fixture(scope="module")
def modules(browser, server):
    """A page whose modules are run alone."""
    page = browser.page()
    page.open(server.url + "/")
    yield page
    page.close()


def offer(page, example="weather"):
    page.click("#edit-tools")
    page.click(f"[data-example=example-{example}]")
    page.click("#tools-form [type=submit]")
    assert not page.do("document.getElementById('tools-dialog').open")


def ask(page, engine, says, text="Hi", then=WAITS):
    engine.says = says
    send(page, text, waits=False)
    page.wait(then)


def evaluate(page, module, script):
    """The value of a script that uses a module of the page."""
    return page.do(f"(async () => {{ const m = await import('/console/{module}'); {script} }})()")


# --- cards and results ----------------------------------------------------------------------------


def test_calls_are_cards_and_results_go_back(page, engine):
    offer(page)
    put(page, thinking_token_budget=64)
    page.do("""window.seen = []; new MutationObserver(() => seen.push(
        document.querySelector('.call dd')?.textContent ?? null))
        .observe(document.getElementById('chat'), { childList: true, subtree: true,
          characterData: true })""")
    ask(page, engine, THOUGHT + "I look." + PARIS + OSLO)
    assert {"", "P", "Par", "Paris"} <= set(page.do("seen"))  # it came piece by piece
    assert texts(page) == ["I look."] and texts(page, ".thought summary") == [
        "Thought: 11 tokens of 64"
    ]
    assert texts(page, f"{CARDS} dt") == ["city", "days", "unit", "days", "city"]
    assert texts(page, f"{CARDS} dd") == ["Paris", "3", "kelvin", "12", "Oslo"]
    assert texts(page, f"{CARDS} .verdict") == ["valid", "not valid"]
    assert texts(page, f"{CARDS} .problems li") == [
        "days: must be at most 7", 'unit: must be one of "celsius", "fahrenheit"',
    ]  # fmt: skip
    ids = texts(page, f"{CARDS} .call-id")
    assert len(set(ids)) == 2 and all(id.startswith("call_") for id in ids)
    assert page.text("#said") == "The answer has ended. 2 calls wait for results."

    page.do("document.querySelector('.reply textarea').focus()")  # from here by keys alone
    page.type('{"sky": ["clear", 18]}')
    page.press("Enter")
    assert page.do("document.querySelector('.replies button').disabled")
    assert page.do("document.activeElement.closest('.call').textContent.includes('Oslo')")
    page.type("rain")
    engine.says = THOUGHT + "Paris is clear."
    page.press("Enter")
    page.wait(f"document.querySelectorAll('.turn').length === 2 && {DONE}")
    assert texts(page) == ["Paris is clear."]
    assert page.do("document.activeElement.id") == "prompt"
    assert texts(page, ".reply dd li") == ["clear", "18"]
    prompt = engine.prompt
    assert "Two cities." in prompt and '"name": "get_weather"' in prompt
    assert prompt.index('{"sky": ["clear", 18]}') < prompt.index("rain")

    page.click(".turn:first-child .under button:last-child")  # Edit results
    page.press("End")
    page.type(" ")
    ask_again = "document.querySelector('.turn:first-child .replies button')"
    page.do(f"{ask_again}.click()")
    page.wait(f"document.querySelectorAll('.turn').length === 2 && {DONE}")
    ask(
        page,
        engine,
        "Good.",
        "Thanks",
        f"document.querySelectorAll('.turn').length === 3 && {DONE}",
    )
    assert "Two cities." not in engine.prompt and "Paris is clear." in engine.prompt
    assert '"arguments": {"city": "Paris", "days": 3}' in engine.prompt


def test_calls_without_results_are_left_out(page, engine):
    offer(page)
    ask(page, engine, "I look." + PARIS)
    ask(page, engine, "Fine.", "Never mind", f"{DONE} && document.querySelectorAll('.turn')[1]")
    assert page.text(".turn:first-child .replies .hint").startswith("Left out of what follows")
    assert "I look." in engine.prompt and "Paris" not in engine.prompt
    put(page, max_tokens=60)
    ask(page, engine, OSLO, "Again", f"{DONE} && document.querySelectorAll('.turn')[2]")
    assert texts(page, f"{CARDS} .verdict") == ["cut off"]
    assert page.do(f"!{WAITS}") and page.text(f"{CARDS} .reply") == ""


def test_one_of_several_answers_goes_on_with_its_calls(page, engine):
    offer(page)
    put(page, n=2)
    ask(
        page, engine, PARIS, then="document.querySelectorAll('.replies:not([hidden])').length === 2"
    )
    assert texts(page, f"{CARDS} h3") == ["get_weather"] * 2
    page.do("document.querySelectorAll('.reply textarea')[1].focus()")
    page.type("snow")
    engine.says = "Snow."
    page.press("Enter")
    page.wait(f"document.querySelectorAll('.turn').length === 2 && {DONE}")
    assert texts(page) == ["Snow."] * 2 and "snow" in engine.prompt
    assert page.do("document.querySelector('.answer:nth-child(2)').classList.contains('chosen')")
    page.click(".turn:first-child .answer:first-child [aria-pressed]")  # has no results
    assert page.do("document.querySelectorAll('.turn').length") == 1


@pytest.mark.parametrize("choice, title", [
    ("required", "get_time"), ("function:get_weather", "get_weather"),
])  # fmt: skip
def test_a_forced_call_is_forced_once(page, engine, choice, title):
    offer(page)
    page.do(f"document.getElementById('tool_choice').value = '{choice}'")
    ask(page, engine, None)  # the engine says what the grammar permits
    assert engine.params[-1].grammar is not None
    assert texts(page, f"{CARDS} h3") == [title] and texts(page, f"{CARDS} .verdict") == ["valid"]
    page.do("document.querySelector('.reply textarea').focus()")
    page.type("4")
    engine.says = "Four."
    page.press("Enter")
    page.wait(f"document.querySelectorAll('.turn').length === 2 && {DONE}")
    assert engine.params[-1].grammar is None and texts(page) == ["Four."]


def test_calls_that_the_server_does_not_read_are_announced(browser):
    engine = Parrot("{{ tools }}<|action_start|>{{ tool_calls }}")
    with running(engine) as server:
        page = browser.page()
        page.open(server.url + "/")
        page.wait(READY)
        offer(page)
        ask(page, engine, "Hm.", then=DONE)
        assert "writes calls as internlm does" in page.text(".turn .warning")
        page.close()


# --- what is offered ------------------------------------------------------------------------------

TOOL = '[{"type": "function", "function": {"name": "f"}}]'


WRONG = [
    ("x", "line 1, column 1: expected a value"),
    ("[\n  {\n", "line 3, column 1: the text ends early; close its brackets and quotes"),
    ('[\n {"type" 1}]', 'line 2, column 10: expected ":"'),
    ('[\n {"a": 1,}]', "line 2, column 10: expected a name in double quotes"),
    ("[1] [", "line 1, column 5: expected the end of the text"),
    ('["a\nb"]', "line 1, column 4: expected a closing quote, before a line ends or a bad escape"),
    ('{"type": "function"}', "must be a list, as in"),
    ("[1]", "tools[0]: must be an object, as in"),
    ('[{"name": "f"}]', 'tools[0].type: must be "function"'),
    ('[{"type": "function"}]', "tools[0].function: must be an object with a name"),
    (TOOL.replace('"f"', '"a b"'), "tools[0].function.name: must be 1 to 64 of"),
    (TOOL.replace('"f"', '"f", "parameters": {"type": "string"}'),
     'tools[0].function.parameters: must be a JSON schema of type "object"'),
    (f"{TOOL[:-1]}, {TOOL[1:]}", "tools[1].function.name: f is there twice"),
    (f"[{', '.join(65 * [TOOL[1:-1]])}]", "65 tools: must be at most 64"),
]  # fmt: skip


def test_a_wrong_list_of_tools_is_explained(page):
    problems = evaluate(page, "tools.js", f"""
        const read = (text) => {{ try {{ return m.readTools(text); }}
          catch (error) {{ return error.message; }} }};
        return {json.dumps([text for text, _ in WRONG])}.map(read);""")  # fmt: skip
    for problem, (text, expected) in zip(problems, WRONG, strict=True):
        assert problem.startswith(expected), text
    page.click("#edit-tools")
    page.do("document.getElementById('tools-text').focus()")
    page.type("[1]")
    page.click("#tools-form [type=submit]")  # stays there, with the reason
    assert page.text("#tools-status").startswith("tools[0]: must be an object")
    assert page.do("document.activeElement.id") == "tools-text"
    assert page.do("document.activeElement.getAttribute('aria-invalid')") == "true"
    page.press("Escape")  # leaves what was offered
    assert page.do("!document.getElementById('tools-dialog').open")
    assert page.do("document.getElementById('offered').hidden")


def test_tools_are_changed_and_taken_back(page, engine):
    offer(page)
    page.do("document.getElementById('tool_choice').value = 'function:get_time'")
    assert texts(page, "#offered li") == ["get_weather", "get_time"]
    offer(page, "calendar")
    assert texts(page, "#offered li") == ["create_event"]
    assert page.do("document.getElementById('tool_choice').value") == "auto"
    event = ('{"title": "Review", "date": "tomorrow", "guests": ["Ana", 5], "place": {"floor": 2},'
             ' "id": 12345678901234567890}')  # fmt: skip
    ask(page, engine, call("create_event", event))
    assert texts(page, f"{CARDS} .problems li") == [
        "date: must match ^[0-9]{4}-[0-9]{2}-[0-9]{2}$", "guests[1]: must be of type string",
        "place.building: is missing", "id: is not permitted",
    ]  # fmt: skip
    assert "12345678901234567890" in texts(page, f"{CARDS} dd")
    page.click("#edit-tools")
    page.do("document.getElementById('tools-text').select()")
    page.type(" ")
    page.click("#tools-form [type=submit]")
    ask(page, engine, PARIS, "Again", f"document.querySelectorAll('.turn').length === 2 && {DONE}")
    assert texts(page)[0].startswith("<tool_call>") and "<tools>" not in engine.prompt


# --- JSON and schemas -----------------------------------------------------------------------------


def test_json_is_read_while_it_comes(modules):
    whole = r'{"a": "x\"\\ \u00e9\ud83d\ude42", "2": [1.5e3, [], {"b": null}], "1": {"c": true}} '
    prefixes = evaluate(modules, "partial_json.js", f"""
        const plain = (value) => value instanceof Map ? [...value].map(([k, v]) => [k, plain(v)])
          : Array.isArray(value) ? value.map(plain) : value?.text ?? value ?? null;
        const text = {json.dumps(whole)};
        return [...text].map((_, at) => {{ const {{ value, isCut }} = m.readPrefix(
          text.slice(0, at + 1)); return [plain(value), isCut]; }});""")  # fmt: skip
    assert prefixes[-1] == prefixes[-2] == [
        [["a", 'x"\\ é🙂'], ["2", ["1.5e3", [], [["b", "null"]]]], ["1", [["c", "true"]]]], False,
    ]  # fmt: skip
    assert all(is_cut for _, is_cut in prefixes[:-2])
    lengths = [len(json.dumps(value)) for value, _ in prefixes]
    assert len(set(lengths)) > 20 and prefixes[7][0] == [["a", "x"]]


TEXTS = ["{}", "[]", " [1, 2] ", '"a"', "[01]", "[1.]", "[-]", "{,}", "[,]", "[1 2]",
         '{"a"}', "{'a':1}", "[1,]", "nul", "[nulll]", "[\"\t\"]", '["\\x"]', "[1]]", "",
         "[\u00a0]", '{"a":1}', '{"a":{"b":[{}]}}', "[true,false,null]",
         '["\\u12"]', '{"a":1 "b":2}']  # fmt: skip


def test_whole_json_is_what_the_browser_reads(modules):
    agreed = evaluate(modules, "partial_json.js", f"""
        const valid = (read) => {{ try {{ return read(); }} catch {{ return false; }} }};
        return {json.dumps(TEXTS)}.map((text) => [valid(() => (JSON.parse(text), true)),
          valid(() => !m.readPrefix(text + ' ').isCut)]);""")  # fmt: skip
    assert [text for text, pair in zip(TEXTS, agreed, strict=True) if len(set(pair)) > 1] == []
    assert sorted(map(tuple, agreed))[0] != sorted(map(tuple, agreed))[-1]


CASES = [
    ({"type": ["integer", "null"]}, [1, 1.0, None, 1.5, "1"]),
    ({"type": "number", "minimum": 0, "exclusiveMaximum": 2}, [0, 1.9, 2, -1, True]),
    ({"minLength": 2, "maxLength": 3, "pattern": "^a"}, ["ab", "a", "abcd", "ba", "a🙂", 5]),
    ({"enum": [{"a": [1]}, "x", 1]}, [{"a": [1]}, {"a": [2]}, "x", 1, "1", {"a": [1], "b": 2}]),
    ({"const": [None]}, [[None], [], [0]]),
    ({"prefixItems": [{"type": "string"}], "items": {"type": "integer"}, "minItems": 1,
      "maxItems": 2}, [["a"], ["a", 1], ["a", "b"], [1], [], ["a", 1, 2], {}]),
    ({"properties": {"a": {"type": "string"}}, "patternProperties": {"^b": {"type": "integer"}},
      "required": ["a"], "additionalProperties": False, "maxProperties": 2},
     [{"a": ""}, {}, {"a": 1}, {"a": "", "b1": 2}, {"a": "", "b1": "x"}, {"a": "", "c": 1},
      {"a": "", "b": 1, "b2": 2}, []]),
    ({"anyOf": [{"type": "string"}, {"minimum": 3}]}, ["x", 3, 2, None]),
    ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, [1, 2.5, 3, 3.5]),
    ({"allOf": [{"minimum": 1}, {"maximum": 2}], "not": {"const": 1.5}}, [1, 1.5, 3]),
    ({"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "object", "required": ["v"],
      "properties": {"next": {"$ref": "#/$defs/tree"}}}}},
     [{"v": 1}, {"v": 1, "next": {}}, {"v": 1, "next": {"v": 2}}]),
    ({"items": False}, [[], [1]]),
]  # fmt: skip


def test_verdicts_are_those_of_another_validator(modules):
    pairs = [[schema, value] for schema, values in CASES for value in values]
    script = f"return {json.dumps(pairs)}.map((pair) => m.check(...pair));"
    verdicts = evaluate(modules, "schema.js", script)
    for (schema, value), verdict in zip(pairs, verdicts, strict=True):
        is_valid = jsonschema.Draft202012Validator(schema).is_valid(value)
        assert (verdict["problems"] == []) is is_valid, (schema, value, verdict)
        assert verdict["unread"] == []


def test_what_is_not_checked_is_named(modules):
    schemas = [
        {"format": "email", "title": "T", "uniqueItems": True}, {"pattern": "("}, {"$ref": "#/x"},
        {"allOf": [{"$ref": "#"}]}, {"constructor": 1}, {"required": 5},
    ]  # fmt: skip
    script = f"return {json.dumps(schemas)}.map((schema) => m.check(schema, {{}}));"
    unread = evaluate(modules, "schema.js", script)
    names = [["format", "uniqueItems"], [], ["$ref"], ["$ref"], ["constructor"], ["required"]]
    assert unread == [{"problems": [], "unread": keywords} for keywords in names]


# --- everyone's page ------------------------------------------------------------------------------

CONTRASTS = """(() => {
  const channel = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = (color) => { const [r, g, b] = color.match(/[\\d.]+/g).map(Number);
    return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b); };
  const behind = (box) => { const color = getComputedStyle(box).backgroundColor;
    return /, 0\\)$/.test(color) ? behind(box.parentElement) : color; };
  return ['h3', '.call-id', '.verdict', 'dt', 'dd', 'li', '.reply > *', '.replies .hint'].flatMap(
    (query) => [...document.querySelectorAll(`.calls ${query}`)].map((box) => {
      const pair = [light(getComputedStyle(box).color), light(behind(box))].sort((a, b) => b - a);
      return [query, (pair[0] + 0.05) / (pair[1] + 0.05)]; }));
})()"""


def test_cards_are_legible_named_and_no_wider_than_a_phone(page, engine):
    page.resize(375, 812, is_phone=True)
    page.click("#unfold")
    offer(page)
    page.click("#unfold")
    long = call("get_weather", json.dumps({"city": "W" * 90, "k" * 80: ["i" * 70], "o": {"p": {}}}))
    ask(page, engine, long + PARIS)
    for scheme in ("light", "dark"):
        page.prefer(color_scheme=scheme)
        contrasts = page.do(CONTRASTS)
        assert len(contrasts) > 15 and not [pair for pair in contrasts if pair[1] < 4.5]
    assert not page.do("document.documentElement.scrollWidth > innerWidth")
    outside = page.do("""[...document.querySelectorAll('.calls *')].filter((each) => {
        const b = each.getBoundingClientRect(); return b.width && (b.right > 375 || b.left < 0);
        }).map((each) => each.className || each.tagName)""")
    assert outside == []
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    named = {(node["role"]["value"], node.get("name", {}).get("value"))
             for node in nodes if not node["ignored"]}  # fmt: skip
    assert {
        ("group", "Call of get_weather"),
        ("textbox", "Result of get_weather"),
        ("combobox", "Calls"),
        ("button", "Send results"),
    } - named == {("combobox", "Calls")}
    page.click("#unfold")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    assert "Calls" in [node.get("name", {}).get("value") for node in nodes
                       if node["role"]["value"] == "combobox"]  # fmt: skip
