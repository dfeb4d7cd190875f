"""Bodies of requests: the fields of `inference/request.py`, and those that only HTTP has."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from inference import field_kinds
from inference.request import FIELDS, WIRE_NAMES
from inference.server.protocol.tool_fields import Choice, EarlierCall, Tools, Variables

MAX_PROMPTS, MAX_MESSAGES, MAX_TOP_LOGPROBS = 2048, 2048, 20

Tokens = Annotated[int, Meta(ge=0, le=2**31 - 1)]
NewTokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
BadWords = Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=64)]
Short = Annotated[str, Meta(max_length=512)]
InputIds = Annotated[list[Tokens], Meta(min_length=1)]  # at most the context
TruncatedTokens = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Side = Literal["left", "right"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
# `parse.prompts` checks it: a msgspec type cannot distinguish the two kinds of lists.
Inputs = Annotated[
    Any,
    Meta(
        extra_json_schema={
            "anyOf": [
                _TEXT,
                _IDS,
                {"type": "array", "items": _TEXT, "minItems": 1},
                {"type": "array", "items": _IDS, "minItems": 1},
            ]
        }
    ),
]


def _wire_type(kind: field_kinds.Kind) -> Any:
    """Returns a kind of field as msgspec decodes and describes it."""
    match kind:
        case field_kinds.Number(type, low, high, is_open):
            bounds = Meta(gt=low, le=high) if is_open else Meta(ge=low, le=high)
            return Annotated[type, bounds]
        case field_kinds.Switch():
            return bool
        case field_kinds.Text(max_length):
            return Annotated[str, Meta(min_length=1, max_length=max_length)]
        case field_kinds.Texts(max_items, max_length):
            text = _wire_type(field_kinds.Text(max_length))
            return text | Annotated[list[text], Meta(max_length=max_items)]  # type: ignore[valid-type]
        case field_kinds.TokenIds(min_items, max_items):
            return Annotated[list[Tokens], Meta(min_length=min_items, max_length=max_items)]
        case field_kinds.Biases(bias, max_items):
            values = _wire_type(bias)
            return Annotated[dict[str, values], Meta(max_length=max_items)]  # type: ignore[valid-type]
    raise TypeError(kind)


class StreamOptions(Struct):
    """Options of a stream.

    Attributes:
        include_usage: a further chunk at the end has the usage.
        continuous_usage_stats: every other chunk has the usage, too.
        include_obfuscation: chunks have a field of random letters that hides the length of texts.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(Struct):
    """A schema; the other fields have no effect."""

    schema: dict[str, Any] | bool
    name: Short | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """The form of an answer; `schema` and `value` are names of llama.cpp and TGI for a schema. A
    structural tag has a `format`, or `structures` and their `triggers`.
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    schema: dict[str, Any] | None = None
    value: dict[str, Any] | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """The form of an answer in vLLM's fields: one of the first six. The others accept only values
    without effect.
    """

    json: dict[str, Any] | str | None = None
    regex: Annotated[str, Meta(min_length=1)] | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=5000)] | None = None
    json_object: bool | None = None
    grammar: Annotated[str, Meta(min_length=1)] | None = None
    structural_tag: Annotated[str, Meta(min_length=1)] | None = None

    whitespace_pattern: Annotated[str, Meta(max_length=0)] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None


class Common(Struct, kw_only=True):
    """Fields of completions, chats and responses, named as OpenAI's, or else vLLM's. null is the
    default. The fields from `user` on have no effect on the answer.
    """

    model: Short | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    truncate_prompt_tokens: TruncatedTokens | None = None
    truncation_side: Side | None = None
    structured_outputs: StructuredOutputs | None = None
    bad_words: BadWords | None = None

    user: Short | None = None
    store: bool | None = None
    service_tier: Short | None = None
    safety_identifier: Short | None = None
    prompt_cache_key: Short | None = None


def _declared(body: str, base: type[Struct]) -> type[Struct]:
    """Returns a struct with the request fields that a body has and its base lacks."""
    fields = [
        (WIRE_NAMES[name], _wire_type(field.wire_kind or field.kind) | None, None)
        for name, field in FIELDS.items()
        if body in field.bodies and WIRE_NAMES[name] not in base.__struct_fields__
    ]
    return msgspec.defstruct(f"_{body}", fields, bases=(base,), kw_only=True)


if TYPE_CHECKING:  # a checker sees any name among the declared fields

    class _Declared(Common):
        def __getattr__(self, name: str) -> Any: ...

    ChatFields = _Declared
    ResponsesFields = _Declared
    MessagesFields = _Declared
    EmbeddingFields = _Declared
else:
    ChatFields, ResponsesFields = _declared("chat", Common), _declared("responses", Common)
    MessagesFields = _declared("messages", Common)
    EmbeddingFields = _declared("embeddings", Struct)


class Sampling(ChatFields, kw_only=True):
    """Fields of completions and chats; `metadata` has no effect on the answer."""

    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    metadata: dict[str, Short] | None = None


if TYPE_CHECKING:
    _CompletionFields = Sampling
else:
    _CompletionFields = _declared("completions", Sampling)


class CompletionRequest(_CompletionFields, kw_only=True):
    """POST /v1/completions.

    Attributes:
        prompt: a text, token ids, or a list of one of the two.
        suffix: the text after the answer, which fills the gap between prompt and suffix.
        suffix_first: whether the suffix precedes the prompt where the model reads them.
    """

    prompt: Inputs = None
    suffix: str | None = None
    suffix_first: bool | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None


class ExtraFile(Struct):
    """Another file, which the model reads first."""

    text: str
    filename: Short | None = None


class InfillRequest(_CompletionFields, kw_only=True):
    """POST /infill, as llama.cpp has it. The fields from `samplers` on, which its editors' plugins
    send, have no effect.

    Attributes:
        input_prefix, input_suffix: the texts around the gap that the answer fills.
        prompt: a text that follows `input_prefix`.
        suffix_first: as in a completion.
    """

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraFile], Meta(max_length=MAX_MESSAGES)] | None = None
    prompt: str | None = None
    suffix_first: bool | None = None
    add_special_tokens: bool | None = None

    samplers: Annotated[list[Short], Meta(max_length=64)] | None = None
    n_indent: Tokens | None = None
    t_max_prompt_ms: Tokens | None = None
    t_max_predict_ms: Tokens | None = None
    response_fields: Annotated[list[Short], Meta(max_length=64)] | None = None


class ContentPart(Struct):
    """A part of a message; only text is supported."""

    type: Annotated[str, Meta(max_length=64)]
    text: str | None = None


class ChatMessage(Struct):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_MESSAGES)] | None = None
    name: Short | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[list[EarlierCall], Meta(max_length=64)] | None = None
    tool_call_id: Short | None = None


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]


class ChatRequest(Sampling, kw_only=True):
    """POST /v1/chat/completions.

    Attributes:
        chat_template_kwargs: further variables of the template.
        add_generation_prompt: the prompt ends with the start of the assistant's turn.
        continue_final_message: the model continues the last message.
        separate_reasoning: the answer's thought is no part of its content (the default).
        include_reasoning: the thought is returned (the default).
        reasoning_effort, documents: variables of the template, which has to read them.
        input_ids: the prompt's token ids, in place of what the template makes of the messages.
    """

    messages: Messages
    max_tokens: NewTokens | None = None
    max_completion_tokens: NewTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Tools | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Variables | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    thinking_token_budget: Tokens | None = None
    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: Effort | None = None
    documents: Annotated[list[dict[str, str]], Meta(max_length=MAX_MESSAGES)] | None = None
    input_ids: InputIds | None = None


class TokenizeRequest(Struct, kw_only=True):
    """POST /tokenize: a prompt, or the messages of a conversation with fields of a chat."""

    model: Short | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: Tools | None = None
    tool_choice: Choice | None = None
    chat_template_kwargs: Variables | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[Tokens]
    model: Short | None = None
