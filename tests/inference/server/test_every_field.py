"""Every field of every body at its declared limits and past them: a new field is tried as it is,
and one without a limit fails here until it has one, or a reason.
"""

import json

import msgspec
import pytest

from inference.server.endpoints.anthropic import fields as anthropic
from inference.server.protocol import fields
from inference.server.protocol.parse import _whole
from inference.server.web.operations import OPERATIONS
from tests.inference.server import declared
from tests.inference.server.fake_engine import HEAD, FakeEngine
from tests.inference.server.openai.test_batches_client import line
from tests.inference.server.running import running
from tests.inference.server.test_bad_input import error_of

# By the first path of each body.
KINDS = {
    path: kind for kind, path in {o.body: o.path for o in reversed(OPERATIONS)}.items() if kind
}
ASKED = {"messages": [{"role": "user", "content": "a"}]}
TOOL = {"type": "function", "function": {"name": "x"}, "name": "x"}  # of chats and responses
ANTHROPIC_TOOL = {"name": "x", "input_schema": {}}
VALID = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": ASKED | {"max_tokens": 1},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/classify": {"input": "a"},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": ASKED | {"max_tokens": 1},
    "/v1/messages/count_tokens": ASKED,
    "/infill": {"input_prefix": "a", "input_suffix": "b", "max_tokens": 1},
    "/v1/batches": {
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    },
}
EXAMPLES = {
    fields.ChatMessage: ASKED["messages"][0],
    fields.ContentPart: {"type": "text", "text": "a"},
    fields.ResponseFormat: {"type": "json_schema", "json_schema": {"schema": {}}},
    fields.JsonSchema: {"schema": {}},
    anthropic.Turn: ASKED["messages"][0],
    anthropic.Block: {"type": "text", "text": "a"},
    anthropic.ResultBlock: {"type": "text", "text": "a"},
    anthropic.ToolDefinition: ANTHROPIC_TOOL,
}
# What a field needs beside it.
BESIDE = {
    "stream_options": {"stream": True}, "top_logprobs": {"logprobs": True},
    "messages": {"prompt": None, "input": None}, "tool_choice": {"tools": [TOOL]},
    "min_tokens": {"max_tokens": 1},
    "suffix_first": {"suffix": "b"}, "vote": {"best_of": 2},
}  # fmt: skip
# Fields whose values within the declared limits the server, or another field, may refuse.
NARROWER = {
    "model": "it is another", "n": "slots", "best_of": "slots", "max_tokens": "the context",
    "max_completion_tokens": "the context", "min_tokens": "max_tokens", "messages": "the context",
    "prompt": "prompts of one kind", "suffix": "echo", "stop_token_ids": "the vocabulary",
    "allowed_token_ids": "the vocabulary", "logit_bias": "the vocabulary",
    "tokens": "the vocabulary", "input_ids": "the vocabulary, the context",
    "response_format": "what can be compiled",
    "structured_outputs": "one of several", "tool_choice": "tools that are given",
    "tools": "names that differ, what can be compiled",
    "input": "inputs of one kind, the context", "dimensions": "the model's width",
    "max_output_tokens": "the context", "text": "what can be compiled", "truncation": "none",
    "background": "none is stored", "conversation": "none is stored",
    "previous_response_id": "none is stored", "continue_final_message": "an answer that has begun",
    "documents": "the template", "reasoning": "the template", "reasoning_effort": "the template",
    "thinking_token_budget": "the template",
    "instruction": "the template", "chat_template_kwargs": "the template",
    "text_1": "the context", "text_2": "the context", "query": "the context",
    "prompt_logprobs": "none in /infill", "truncation_side": "a prompt without a gap",
    "input_extra": "the context", "bad_words": "what can be compiled",
    "add_generation_prompt": "continue_final_message",
    "system": "text, the context", "output_config": "the template, what can be compiled",
    "input_file_id": "files that are there", "endpoint": "one of few", "completion_window": "24h",
    "thinking": "marks of thoughts, the context", "context_management": "thoughts alone",
}  # fmt: skip
# Fields without a declared limit, and what limits them.
UNLIMITED = {
    "prompt": "16 characters a token of the context, 64 prompts", "messages": "the same",
    "suffix": "the same", "input_prefix": "the same", "input_suffix": "the same",
    "input_extra": "the same",
    "tokens": "the body", "input_ids": "the context", "response_format": "64 KiB of schema",
    "metadata": "the body",
    "structured_outputs": "64 KiB of grammar", "tools": "the body", "tool_choice": "the body",
    "chat_template_kwargs": "16 characters a token of the context", "input": "the same",
    "query": "the same", "text_1": "the same", "text_2": "the same",
    "instructions": "the same", "documents": "the same", "text": "64 KiB of schema",
    "background": "none is stored", "conversation": "none is stored",
    "previous_response_id": "none is stored", "system": "the same",
    "output_config": "64 KiB of schema",
}  # fmt: skip


@pytest.fixture(scope="module")
def server():
    with running(FakeEngine(classifier=HEAD)) as one:
        VALID["/v1/batches"]["input_file_id"] = one.upload(line("a"))
        yield one
        assert one.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200


@pytest.mark.parametrize("path", KINDS)
def test_a_field_without_a_limit_has_a_reason(path):
    assert declared.unlimited(KINDS[path]) <= set(UNLIMITED)


def bodies(path: str):
    kind = KINDS[path]
    names = {field.encode_name for field in msgspec.structs.fields(kind)}
    for case in declared.cases(kind, EXAMPLES):
        start = VALID[path] | {n: v for n, v in BESIDE.get(case.name, {}).items() if n in names}
        if path.startswith("/v1/messages") and "tools" in start:
            start["tools"] = [ANTHROPIC_TOOL]
        body = declared.with_value(start, case, EXAMPLES, kind)
        try:
            msgspec.convert({name: _whole(value) for name, value in body.items()}, kind)
            is_valid = True
        except msgspec.ValidationError:
            is_valid = False
        assert not (is_valid and case.is_past), (case.path, str(case.value)[:80])
        yield case, body, is_valid


@pytest.mark.parametrize("path", KINDS)
def test_every_field_at_its_limits_and_past_them(server, path):
    num_seen = {True: 0, False: 0}
    for case, body, is_valid in bodies(path):
        num_seen[is_valid] += 1
        data, how = json.dumps(body).encode(), {"content-type": "application/json"}
        response = server.http.post(path, content=data, headers=how)
        where = case.path, str(case.value)[:80], response.text[:300]
        if is_valid and response.status_code == 200:
            assert "x-ignored-params" not in response.headers, where
            continue
        is_other = response.status_code == 404 and case.name in ("model", "input_file_id")
        error = error_of(response, 404 if is_other else 400)
        assert not is_valid or case.name in NARROWER, where
        named = (error["param"] or "").replace("[", ".").split(".")[0]
        assert named == case.name and case.name in error["message"], where
    assert num_seen[True] and num_seen[False]
