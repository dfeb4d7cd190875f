"""Chat templates run as transformers runs them, and stay in their sandbox."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import timeit
from pathlib import Path
from typing import NamedTuple

import pytest

from configs.errors import InputError
from inference.text import chat_template

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = json.loads(
    (ROOT / "tests" / "golden" / "chat-templates" / "expected.json").read_text(encoding="utf-8")
)
MESSAGES = [
    {"role": "user", "content": "Hi <b>"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "ünï"},
]


def test_conversation_is_rendered():
    template = """{{ bos_token }}{% for m in messages %}
    {% if m.role == 'assistant' %}
        {% generation %}A: {{ m.content }}{% endgeneration %}

        {% continue %}
    {% endif %}
U: {{ m['content'] | trim }}
{% endfor %}
{% if add_generation_prompt %}A:{% endif %}"""
    rendered = chat_template.render(template, MESSAGES, special_tokens={"bos_token": "<s>"})
    assert rendered == "<s>U: Hi <b>\nA: Hello\nU: ünï\nA:"
    assert not chat_template.render(template, [], add_generation_prompt=False)


@pytest.mark.parametrize("family", GOLDEN["families"])
def test_rendering_equals_transformers(family):
    """Text for text, and a refusal where it refuses."""
    made = GOLDEN["families"][family]
    special = {name: made[name] for name in ("bos_token", "eos_token") if made[name]}
    rows = [row for row in GOLDEN["rows"] if row["family"] == family]
    assert len(rows) == 28 and sum("text" in row for row in rows) >= 18
    for row in rows:
        given = GOLDEN["conversations"][row["conversation"]]

        def render(given=given, prompt=row["prompt"]):
            return chat_template.render(
                made["template"], **given, add_generation_prompt=prompt, special_tokens=special
            )

        if "text" in row:
            assert render() == row["text"], row["conversation"]
        else:
            with pytest.raises(InputError) as caught:
                render()
            assert row["error"] in str(caught.value), row["conversation"]


def test_tojson_escapes_nothing_and_dates_are_there():
    rendered = chat_template.render("{{ messages | tojson }}", MESSAGES[:1])
    assert rendered == '[{"role": "user", "content": "Hi <b>"}]'
    assert re.fullmatch(r"\d{4}", chat_template.render("{{ strftime_now('%Y') }}", []))


BAD = {
    "internals": ("{{ messages.__class__.__mro__ }}", "sandbox"),
    "subclasses": ("{{ ''.__class__.__base__.__subclasses__() }}", "sandbox"),
    "globals": ("{{ raise_exception.__globals__ }}", "sandbox"),
    "format": ("{{ '{0.__class__.__init__}'.format(messages) }}", "sandbox"),
    "os": ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "sandbox"),
    "private name": ("{% set n = namespace(_x=1) %}", "sandbox"),
    "mutation": ("{{ messages.append(1) }}", "sandbox"),
    "import": ("{% include 'x' %}", "failed"),
    "refusal": ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
    "syntax": ("{% if %}", "failed"),
    "undefined": ("{{ messages[7].role.x }}", "failed"),
    "type": ("{{ messages + 1 }}", "failed"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "failed"),
    "long range": ("{% for i in range(10000000) %}x{% endfor %}", "failed"),
    "output": (
        "{% for i in range(1000) %}{% for j in range(1000) %}"
        "{{ 'xxxxxxxxxxxxxxxxxxxx' }}{% endfor %}{% endfor %}",
        "characters",
    ),
    "many loops": ("{% for a in [1] %}" * 25 + "{% endfor %}" * 25, "nested too deeply"),
    "many branches": ("{% if messages %}" * 120 + "{% endif %}" * 120, "nested too deeply"),
    "very many branches": ("{% if messages %}" * 9000 + "{% endif %}" * 9000, "recurses"),
    "length": ("x" * ((1 << 20) + 1), "longer than"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_template_is_one_line(case):
    template, expected = BAD[case]
    with pytest.raises(InputError, match=expected) as caught:
        chat_template.render(template, MESSAGES)
    assert "\n" not in str(caught.value)


def test_what_is_no_data_is_refused():
    for messages in ([{"role": "user", "content": object()}], [{"content": {1, 2}}]):
        with pytest.raises(InputError, match="not plain data"):
            chat_template.render("{{ messages }}", messages)


def test_half_a_character_passes_through():
    messages = [{"role": "user", "content": "\ud83d"}]
    assert chat_template.render("{{ messages[0].content }}", messages) == "\ud83d"


# A template that would take the machine. Ended within a second and 64 MB, one line each.

BOMBS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "doubling": "{% set n = namespace(x='x') %}{% for i in range(40) %}{% set n.x = n.x + n.x %}"
    "{% endfor %}",
    "folded": "{{ 'x' * 10 ** 10 }}",
    "power": "{{ 10 ** (10 ** 8) }}",
    "power in a loop": "{% for i in range(9) %}{{ (7 + i) ** (7 ** 7) }}{% endfor %}",
    "list": "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = n.x + n.x %}"
    "{% endfor %}",
    "padding": "{{ 'x' | center(1000000000) }}",
    "format": "{{ '%999999999d' % 1 }}",
    "filler text": "{{ lipsum(n=100000) }}",
    "replace": "{% set s = 'x' * 5000 %}{{ s | replace('x', s) | replace('x', s) }}",
    "output": "{% for i in range(99999) %}{{ messages | tojson }}{% endfor %}",
    "macros": "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n else 'x' }}{% endmacro %}{{ f(40) }}",
    "filters": "{{ range(99999) | map('string') | join | list | sort | batch(3) | list | tojson }}"
    * 50,
    "nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "blocks": "{% for a in [1] %}" * 3000,
}
MEASURE = """
import resource, sys, time
from configs.errors import InputError
from inference.text import chat_template

def used_by_workers():
    chat_template._WORKER.stop()
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime, found.ru_maxrss / 1024

template = sys.stdin.read()
chat_template.render("x", [])
started_s, _ = used_by_workers()
start = time.process_time(), time.perf_counter()
try:
    chat_template.render(template, [{"role": "user", "content": "x" * 1000}])
except InputError as error:
    print(error, file=sys.stderr)
wall_s = time.perf_counter() - start[1]
ended_s, megabytes = used_by_workers()
print(wall_s, started_s, ended_s - started_s, megabytes, time.process_time() - start[0])
"""


class Explosion(NamedTuple):
    """Seconds, but for the memory of the worker that renders the template."""

    wall: float
    start: float
    worker: float
    megabytes: float
    parent: float


def explode(bomb: str) -> Explosion:
    ran = subprocess.run([sys.executable, "-c", MEASURE], input=BOMBS[bomb], cwd=ROOT,
                         capture_output=True, text=True, timeout=60)  # fmt: skip
    assert ran.returncode == 0 and ran.stderr.startswith("the chat template "), ran.stderr
    assert ran.stderr.count("\n") == 1
    return Explosion(*map(float, ran.stdout.split()))


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_are_ended(bomb):
    assert explode(bomb).megabytes <= 64


@pytest.mark.timing
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_are_ended_in_time(bomb):
    """In processor seconds, beyond those of a worker's start."""
    seconds = explode(bomb)
    assert seconds.worker - seconds.start <= 0.9 and seconds.parent <= 0.1 and seconds.wall <= 10


def test_after_a_bomb_the_next_rendering_works_again():
    with pytest.raises(InputError, match=r"takes more than 0\.8 s"):
        chat_template.render(BOMBS["nested loops"], MESSAGES)
    with pytest.raises(InputError, match="needs more than 48 MB of memory"):
        chat_template.render(BOMBS["doubling"], MESSAGES)
    assert chat_template.render("{{ messages | length }}", MESSAGES) == "3"


def test_a_long_conversation_has_longer_limits():
    """Also while it is read, after a short one."""
    assert chat_template.render("{{ messages[0].content }}", [{"content": "a"}]) == "a"
    messages = [{"role": "user", "content": "ü日" * 1000}] * 4000
    rendered = chat_template.render("{% for m in messages %}{{ m.content }}{% endfor %}", messages)
    assert len(rendered) == 8_000_000


def test_a_worker_that_is_gone_is_started_again():
    chat_template.render("x", [])
    process = chat_template._WORKER._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert chat_template.render("y", []) == "y"


START = """
import os, sys, time
from inference.text import chat_template
assert chat_template._WORKER._process is None
start = time.perf_counter()
chat_template.render("x", [])
print(time.perf_counter() - start, chat_template._WORKER._process.pid)
os.kill(os.getpid(), 9)
"""


def start_worker() -> tuple[float, int]:
    """(seconds until a worker has rendered, its process) in a process that is killed then."""
    ran = subprocess.run([sys.executable, "-c", START], cwd=ROOT, capture_output=True, text=True)
    seconds, pid = ran.stdout.split()
    return float(seconds), int(pid)


def test_a_worker_leaves_with_its_parent():
    _, pid = start_worker()
    deadline = time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.timing
def test_a_worker_starts_fast():
    """Within five times of what Python and Jinja take anyway."""
    imports = [sys.executable, "-P", "-c", "import jinja2.ext, jinja2.sandbox"]
    import_s = min(timeit.repeat(lambda: subprocess.run(imports, check=True), number=1, repeat=3))
    assert min(start_worker()[0] for _ in range(3)) < 5 * import_s


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except OSError:
        return False
