"""Chat templates in the habits of nine families, and what transformers renders with them.

Each is written for this test: the control tokens and the order of a family's prompt, and the Jinja
that its published template leans on. One row a template, conversation and generation prompt:
`text`, or `error` where the template refuses the conversation.
"""

import json
import pathlib

import jinja2
import tokenizers
import transformers
from tokenizers import models

_CHATML = """\
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m['role'] + '\\n' }}
    {%- if m['role'] == 'assistant' %}
        {%- generation %}{{ (m['content'] or '') + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
    {%- else %}
        {{- m['content'] + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
_LLAMA2 = """\
{% if messages[0]['role'] == 'system' %}
    {% set rest = messages[1:] %}
    {% set system = messages[0]['content'] %}
{% else %}
    {% set rest = messages %}
    {% set system = false %}
{% endif %}
{% for m in rest %}
    {% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles alternate: user, assistant, user, ...') }}
    {% endif %}
    {% if loop.first and system != false %}
        {% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + m['content'] %}
    {% else %}
        {% set content = m['content'] %}
    {% endif %}
    {% if m['role'] == 'user' %}
        {{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {%- else %}
        {{ ' ' + content.strip() + ' ' + eos_token }}
    {%- endif %}
{% endfor %}
"""
_LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + date_string + '\\n\\n' }}
{%- if tools is not none %}
    {{- 'Answer with {"name": ..., "parameters": ...}.\\n\\n' }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) + '\\n\\n' }}
    {%- endfor %}
{%- endif %}
{{- system + '<|eot_id|>' }}
{%- for m in messages %}
    {%- if m.role == 'tool' or m.role == 'ipython' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if m.content is mapping or (m.content is iterable and m.content is not string) %}
            {{- m.content | tojson }}
        {%- else %}
            {{- m.content }}
        {%- endif %}
        {{- '<|eot_id|>' }}
    {%- elif 'tool_calls' in m %}
        {%- if not m.tool_calls | length == 1 %}
            {{- raise_exception('One call at a time') }}
        {%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}
        {{- m['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
_GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set prefix = '' -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for m in loop_messages -%}
    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/...') }}
    {%- endif -%}
    {%- set role = 'model' if m['role'] == 'assistant' else m['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else '') }}
    {%- if m['content'] is string -%}
        {{ m['content'] | trim }}
    {%- elif m['content'] is iterable -%}
        {%- for item in m['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<image>' }}{%- continue -%}{%- endif -%}
            {{ item['text'] | trim }}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception('Invalid content type') }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""
_MISTRAL = """\
{%- set ns = namespace(index=0, system='') -%}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list -%}
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'system' %}
        {%- set ns.system = m.content %}
        {%- continue %}
    {%- endif %}
    {%- if m.role == 'user' %}
        {%- if tools is not none and (m == users[-1]) %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != 'return' %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val | tojson }}
                    {%- endif %}
                    {%- if not loop.last %}{{- ', ' }}{%- endif %}
                {%- endfor %}
                {{- '}}' }}{{- ', ' if not loop.last else ']' }}
            {%- endfor %}
            {{- '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and ns.system %}
            {{- '[INST] ' + ns.system + '\\n\\n' + m.content + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + m.content + '[/INST]' }}
        {%- endif %}
    {%- elif m.tool_calls is defined and m.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {%- set out = call.function | tojson %}
            {{- out[:-1] }}
            {%- if not call.id is defined or call.id | length != 9 %}
                {{- raise_exception('Tool call ids are 9 characters') }}
            {%- endif %}
            {{- ', "id": "' + call.id + '"}' }}{{- ', ' if not loop.last else ']' + eos_token }}
        {%- endfor %}
    {%- elif m.role == 'assistant' %}
        {{- ' ' + m.content | trim + eos_token }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + m.content | string + '}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('Only user, assistant, system and tool roles') }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
"""
_QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages | length - 1) %}
{%- for m in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.searching and m.role == 'user' %}
        {%- set ns.searching = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if (m.role == 'user') or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if m.reasoning_content is string %}
            {%- set reasoning = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and reasoning %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content.lstrip('\\n') }}
        {%- for call in m.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or (loop.previtem.role != 'tool') %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (loop.nextitem.role != 'tool') %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
_PHI3 = (
    "{% for m in messages %}"
    "{% if m['role'] in ['system', 'user', 'tool'] %}"
    "{{'<|' + m['role'] + '|>' + '\n' + m['content'] + '<|end|>' + '\n'}}"
    "{% elif m['content'] %}{{'<|assistant|>' + '\n' + m['content'] + '<|end|>' + '\n'}}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
_TOOLS = """\
{%- macro kind(schema) -%}
    {%- if schema.type == 'array' -%}list[{{ kind(schema['items']) }}]
    {%- elif schema.enum is defined -%}{{ schema.enum | join(' | ') }}
    {%- else -%}{{ {'string': 'str', 'integer': 'int'}.get(schema.type, schema.type) }}
    {%- endif -%}
{%- endmacro -%}
{{ bos_token }}<|turn|>system
{% for tool in tools or [] %}
def {{ tool.function.name }}(
    {%- for name, schema in tool.function.parameters.properties | dictsort -%}
        {{ name }}: {{ kind(schema) }}{% if name not in tool.function.parameters.required %} = None
        {%- endif %}{{ ', ' if not loop.last }}
    {%- endfor -%}
): {{ tool.function.description | tojson }}
{% else %}
No tools.
{% endfor %}
{% for document in documents or [] %}
<doc id={{ loop.index }}>{{ document['title'] | upper }}: {{ document.text | indent(2) }}</doc>
{% endfor %}
{% set comma = joiner('; ') %}
{% for m in messages if m.role != 'system' %}
<|turn|>{{ '%-9s' | format(m.role) }}|{{ m.content | default('', true) | replace('\\n', ' ') }}
    {%- for call in m.tool_calls | default([]) %}
{{ comma() }}{{ call.function.name }}({{ call.function.arguments | tojson(separators=(',', ':'), \
sort_keys=true, ensure_ascii=true) }})
        {%- break %}
    {%- endfor %}<|end|>
{% endfor %}
{% if add_generation_prompt %}<|turn|>assistant|{% endif %}
"""

_HARMONY = """\
{%- macro kind(spec) -%}
    {%- if spec.type == 'array' -%}{{- kind(spec['items'] or {}) + '[]' -}}
    {%- elif spec.enum -%}{{- '"' + spec.enum | join('" | "') + '"' -}}
    {%- elif spec.type in ['number', 'integer'] -%}number
    {%- else -%}{{- spec.type or 'any' -}}{%- endif -%}
{%- endmacro -%}
{{- '<|start|>system<|message|>Reasoning: ' }}
{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}{%- endif %}
{{- reasoning_effort + '\\n\\n# Valid channels: analysis, commentary, final.' }}
{%- if tools %}{{- "\\nCalls must go to the commentary channel: 'functions'." }}{%- endif %}
{{- '<|end|>' }}
{%- set is_told = messages[0].role in ['system', 'developer'] %}
{%- if is_told or tools %}
    {{- '<|start|>developer<|message|>' }}
    {{- '# Instructions\\n\\n' + messages[0].content + '\\n\\n' if is_told else '' }}
    {%- if tools %}
        {{- '# Tools\\n\\nnamespace functions {\\n\\n' }}
        {%- for tool in tools %}
            {%- set f = tool.function %}
            {{- '// ' + f.description + '\\ntype ' + f.name + ' = (_: {\\n' }}
            {%- for name, spec in (f.parameters.properties or {}).items() %}
                {{- name + ('' if name in (f.parameters.required or []) else '?') + ': ' }}
                {{- kind(spec) + ',\\n' }}
            {%- endfor %}
            {{- '}) => any;\\n\\n' }}
        {%- endfor %}
        {{- '} // namespace functions' }}
    {%- endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for m in messages if m.role not in ['system', 'developer'] %}
    {%- if m.role == 'assistant' %}
        {%- if 'content' in m and '<|channel|>final<|message|>' in m.content %}
            {{- raise_exception('Pass thoughts as thinking') }}
        {%- endif %}
        {%- if 'tool_calls' in m %}
            {%- set call = m.tool_calls[0].function %}
            {%- if m.content and m.thinking %}
                {{- raise_exception('Cannot pass both content and thinking with calls') }}
            {%- elif m.content or m.thinking %}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' }}
                {{- (m.content or m.thinking) + '<|end|>' }}
            {%- endif %}
            {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json' }}
            {{- '<|message|>' + call.arguments | tojson + '<|call|>' }}
            {%- set last.name = call.name %}
        {%- else %}
            {%- set closes = loop.last and not add_generation_prompt %}
            {%- if closes and 'thinking' in m %}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
            {%- endif %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
            {{- '<|return|>' if closes else '<|end|>' }}
        {%- endif %}
    {%- elif m.role == 'tool' %}
        {%- if last.name is none %}{{- raise_exception('A result without a call') }}{%- endif %}
        {{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- m.content | tojson + '<|end|>' }}
    {%- elif m.role == 'user' %}
        {{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""
FAMILIES = {
    "smollm2": (_CHATML, "<|im_start|>", "<|im_end|>"),
    "llama2": (_LLAMA2, "<s>", "</s>"),
    "llama3": (_LLAMA3, "<|begin_of_text|>", "<|eot_id|>"),
    "gemma": (_GEMMA, "<bos>", "<end_of_turn>"),
    "mistral": (_MISTRAL, "<s>", "</s>"),
    "qwen": (_QWEN, None, "<|im_end|>"),
    "phi3": (_PHI3, "<s>", "<|endoftext|>"),
    "tools": (_TOOLS, "<|begin|>", "<|end|>"),
    "harmony": (_HARMONY, "<|startoftext|>", "<|return|>"),
}
_USER = {"role": "user", "content": "  Is 1 < 2 & 3 > 2?\n\"yes\" 'no' ünï 日本 {{ x }} \\n "}
_ANSWER = {"role": "assistant", "content": " Yes: </b>\n\n1. <b>one</b>\n", "name": None}
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather <now> in a 'town'.",
        "parameters": {
            "type": "object",
            "properties": {
                "town": {"type": "string", "description": "Zürich & al."},
                "unit": {"type": "string", "enum": ["K", "°C"]},
                "days": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["town"],
        },
    },
}
_CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "abcdef123",
            "type": "function",
            "function": {"name": "weather", "arguments": {"unit": "°C", "town": "Zürich"}},
        }
    ],
}
_RESULT = {"role": "tool", "name": "weather", "content": '{"t": 21.5, "sky": "<blue>"}'}
_PARTS = [{"type": "text", "text": " Look "}, {"type": "image"}, {"type": "text", "text": "here"}]
CONVERSATIONS = {
    "user": {"messages": [_USER]},
    "turns": {"messages": [_USER, _ANSWER, {"role": "user", "content": ""}]},
    "system": {
        "messages": [{"role": "system", "content": " Be <brief>.\n"}, _USER, _ANSWER, _USER]
    },
    "answered": {"messages": [{"role": "system", "content": ""}, _USER, _ANSWER]},
    "tools": {
        "messages": [{"role": "system", "content": "S"}, _USER, _CALL, _RESULT],
        "tools": [_TOOL, _TOOL],
    },
    "tools asked": {"messages": [_USER], "tools": [_TOOL]},
    "documents": {
        "messages": [_USER],
        "documents": [{"title": "a ß", "text": "one\ntwo"}, {"title": "b", "text": "<three>"}],
    },
    "reasoning": {
        "messages": [
            _USER,
            {"role": "assistant", "content": "<think>\nold\n</think>\n\nA"},
            _USER,
            {"role": "assistant", "content": "B", "reasoning": "\nnew\n"},
        ]
    },
    "no thinking": {"messages": [_USER], "variables": {"enable_thinking": False}},
    "a date": {"messages": [_USER], "variables": {"date_string": "1 Jan 2031"}},
    "parts": {"messages": [{"role": "user", "content": _PARTS}]},
    "roles": {"messages": [_ANSWER, _USER]},
    "another role": {"messages": [{"role": "critic", "content": "Hm."}]},
    "calls twice": {"messages": [_USER, {**_CALL, "tool_calls": _CALL["tool_calls"] * 2}]},
}


def write(root: pathlib.Path) -> None:
    """Writes chat-templates/expected.json."""
    rows = []
    for family, (template, bos, eos) in FAMILIES.items():
        named = {"bos_token": bos} if bos else {}
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizers.Tokenizer(models.BPE()), eos_token=eos, **named
        )
        for name, given in CONVERSATIONS.items():
            for prompt in (False, True):
                rows.append({"family": family, "conversation": name, "prompt": prompt})
                rows[-1] |= _render(tokenizer, template, given, prompt)
    whole = {
        "families": {
            name: {"template": template, "bos_token": bos, "eos_token": eos}
            for name, (template, bos, eos) in FAMILIES.items()
        },
        "conversations": CONVERSATIONS,
        "rows": rows,
    }
    folder = root / "chat-templates"
    folder.mkdir(exist_ok=True)
    text = json.dumps(whole, indent=1, ensure_ascii=False) + "\n"
    (folder / "expected.json").write_text(text, encoding="utf-8")


def _render(tokenizer, template: str, given: dict, prompt: bool) -> dict[str, str]:
    try:
        text = tokenizer.apply_chat_template(
            given["messages"],
            tools=given.get("tools"),
            documents=given.get("documents"),
            chat_template=template,
            add_generation_prompt=prompt,
            tokenize=False,
            **given.get("variables", {}),
        )
    except (jinja2.TemplateError, TypeError) as error:
        return {"error": str(error)}
    return {"text": text}
