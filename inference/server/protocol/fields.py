"""Bodies of requests: every field, its type and its range, declared once."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from inference.request import MAX_BIASES, MAX_OWN_STOP_IDS
from inference.server.protocol.tool_fields import Choice, EarlierCall, Tools, Variables

MAX_CHOICES, MAX_PROMPTS, MAX_STOPS, MAX_MESSAGES, MAX_TOP_LOGPROBS = 16, 2048, 64, 2048, 20
_INT64 = 2**63

Tokens = Annotated[int, Meta(ge=0, le=2**31 - 1)]
NewTokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
TokenIds = Annotated[list[Tokens], Meta(max_length=MAX_OWN_STOP_IDS)]
Word = Annotated[str, Meta(min_length=1, max_length=256)]
Stop = Word | Annotated[list[Word], Meta(max_length=MAX_STOPS)]
BadWords = Annotated[list[Word], Meta(max_length=64)]
AllowedTokenIds = Annotated[list[Tokens], Meta(min_length=1, max_length=65536)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
LogitBias = Annotated[dict[str, Bias], Meta(max_length=MAX_BIASES)]
Short = Annotated[str, Meta(max_length=512)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TruncatedTokens = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Side = Literal["left", "right"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Repetition = Annotated[float, Meta(gt=0, le=2)]
Seed = Annotated[int, Meta(ge=-_INT64, le=_INT64 - 1)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Salt = Annotated[str, Meta(min_length=1, max_length=256)]
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
# Which `parse.prompts` reads: a type would not tell lists of the one from lists of the other.
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


class StreamOptions(Struct):
    """Of a stream.

    Attributes:
        include_usage: one more chunk, the last, counts tokens.
        continuous_usage_stats: and every other chunk too.
        include_obfuscation: chunks have a field of random letters, by which those with short texts
            are equally long.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(Struct):
    """A schema and its name, which have no effect but by the schema."""

    schema: dict[str, Any] | bool
    name: Short | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """What an answer looks like; `schema` and `value` are what llama.cpp and TGI call a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None
    value: dict[str, Any] | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """The same in vLLM's words: one of those of the first paragraph. Of the others only values that
    ask for nothing are accepted; there is nothing to fall back to.
    """

    json: dict[str, Any] | str | None = None
    regex: Annotated[str, Meta(min_length=1)] | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=5000)] | None = None
    json_object: bool | None = None
    grammar: Annotated[str, Meta(min_length=1)] | None = None

    structural_tag: Annotated[str, Meta(max_length=0)] | None = None
    whitespace_pattern: Annotated[str, Meta(max_length=0)] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None


class Sampling(Struct, kw_only=True):
    """Fields of both endpoints, named as OpenAI's are, further ones as vLLM's; `speculate` is
    ours. null stands for the default everywhere.

    Those of the last paragraph have no effect on the answer.
    """

    model: Short | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: AllowedTokenIds | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Tokens | None = None
    min_tokens: Tokens | None = None
    stop: Stop | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    seed: Seed | None = None
    priority: Priority | None = None
    speculate: bool | None = None
    cache_salt: Salt | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: TruncatedTokens | None = None
    truncation_side: Side | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    bad_words: BadWords | None = None

    user: Short | None = None
    metadata: dict[str, Short] | None = None
    store: bool | None = None
    service_tier: Short | None = None
    safety_identifier: Short | None = None
    prompt_cache_key: Short | None = None


class CompletionRequest(Sampling, kw_only=True):
    """POST /v1/completions.

    Attributes:
        prompt: a text, token ids, or a list of one of the two.
    """

    prompt: Inputs = None
    suffix: Short | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    add_special_tokens: bool | None = None


class ContentPart(Struct):
    """A part of a message; text alone is understood."""

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
        add_generation_prompt: the assistant's turn begins; unless the last message goes on.
        continue_final_message: the last message goes on where it ends.
        reasoning_effort, documents: variables of the template, which has to read them.
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
    reasoning_effort: Effort | None = None
    documents: Annotated[list[dict[str, str]], Meta(max_length=MAX_MESSAGES)] | None = None


class TokenizeRequest(Struct, kw_only=True):
    """POST /tokenize: a prompt, or the messages of a conversation, with what a chat has."""

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
