"""Chat templates run as transformers runs them, and stay in their sandbox."""

import re

import pytest

from configs.errors import InputError
from inference import chat_template

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


def test_tojson_escapes_nothing_and_dates_are_there():
    rendered = chat_template.render("{{ messages | tojson }}", MESSAGES[:1])
    assert rendered == '[{"role": "user", "content": "Hi <b>"}]'
    assert re.fullmatch(r"\d{4}", chat_template.render("{{ strftime_now('%Y') }}", []))


BAD = {
    "internals": ("{{ messages.__class__.__mro__ }}", "sandbox"),
    "subclasses": ("{{ ''.__class__.__base__.__subclasses__() }}", "sandbox"),
    "globals": ("{{ raise_exception.__globals__ }}", "sandbox"),
    "format": ("{{ '{0.__class__.__init__}'.format(messages) }}", "sandbox"),
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
