"""Bodies of answers, as OpenAI's clients read them."""

from typing import Any

from msgspec import UNSET, Struct, UnsetType


class PromptTokensDetails(Struct):
    """Tokens of prompts whose pages were there already."""

    cached_tokens: int = 0


class Usage(Struct):
    """Tokens of all prompts and all answers; the prompt of several answers counts once."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None


class CompletionLogprobs(Struct):
    """Of a text, token by token; the first of an echoed prompt has none."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(Struct):
    """Of a token that stands, or could stand, at one place of a prompt; `rank` 1 is the most
    likely, and null lies behind those that were asked for.
    """

    logprob: float
    rank: int | None
    decoded_token: str


# By token ids, of each token of a prompt but the first.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(Struct):
    """An answer, or what is new of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Alternative(Struct):
    """A token and its log-probability; `bytes` of tokens that are no whole characters."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(Alternative):
    """One of an answer's tokens, and the most likely ones in its place."""

    top_logprobs: list[Alternative] = []


class ChatLogprobs(Struct):
    """Of an answer, token by token."""

    content: list[ChatToken]
    refusal: None = None


class FunctionCall(Struct):
    """What is called; `arguments` are JSON, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(Struct):
    """A call of a tool."""

    id: str
    function: FunctionCall
    type: str = "function"


class FunctionDelta(Struct):
    """What is new of a call; the name comes once."""

    arguments: str
    name: str | UnsetType = UNSET


class CallDelta(Struct):
    """What is new of a call: the id comes once."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET

    def whole(self) -> ToolCall:
        """The call that begins with this."""
        assert self.id is not UNSET and self.function.name is not UNSET
        return ToolCall(self.id, FunctionCall(self.function.name, self.function.arguments))


class AnswerMessage(Struct):
    """What the assistant says, and calls: text is null where there is none beside calls."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Delta(Struct):
    """What is new of what the assistant says."""

    role: str | UnsetType = UNSET
    content: str | None | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChatChoice(Struct):
    """An answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatDelta(Struct):
    """What is new of an answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class AnswerBody(Struct):
    """A whole answer, or a chunk of a stream: `usage` is null on chunks where the client asked for
    a last one that has it, and missing where it did not.
    """

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage | None | UnsetType = UNSET
    system_fingerprint: str | None = None
    # Of chats; completions have both by choice.
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    obfuscation: str | UnsetType = UNSET  # of chunks, where a client asks for it


class Completion(AnswerBody):
    """Texts, or what is new of them."""

    choices: list[CompletionChoice]


class ChatCompletion(AnswerBody):
    """Messages."""

    choices: list[ChatChoice]


class ChatChunk(AnswerBody):
    """What is new of messages."""

    choices: list[ChatDelta]


class Model(Struct):
    """What is served."""

    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "ridgeline"


class Models(Struct):
    """All that is served."""

    data: list[Model]
    object: str = "list"


class Tokenized(Struct):
    """Token ids of a text or a conversation."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Struct):
    """The text of token ids."""

    prompt: str
