"""Bodies of answers, in OpenAI's shape."""

from typing import Any

from msgspec import UNSET, Struct, UnsetType


class PromptTokensDetails(Struct):
    """Tokens of prompts whose pages were cached."""

    cached_tokens: int = 0


class CompletionTokensDetails(Struct):
    """Tokens of answers' thoughts."""

    reasoning_tokens: int = 0


class Usage(Struct):
    """Tokens of all prompts and all answers; the prompt of several answers counts once."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class CompletionLogprobs(Struct):
    """Log-probabilities of a text's tokens; the first token of an echoed prompt has none."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(Struct):
    """Log-probability of a prompt's token or of an alternative; `rank`: 1 is the most likely, null
    is beyond the requested alternatives.
    """

    logprob: float
    rank: int | None
    decoded_token: str


# For each token of a prompt, by token ids; None for the first.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


# (first token, token behind the last, version of the weights) of the tokens that come with it,
# counted from the answer's start.
WeightVersions = list[tuple[int, int, int]]


class CompletionChoice(Struct):
    """An answer, or the new part of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    # Null in whole answers that do not request them, missing in chunks.
    token_ids: list[int] | None | UnsetType = UNSET
    prompt_token_ids: list[int] | None | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | None | UnsetType = UNSET
    weight_versions: WeightVersions | UnsetType = UNSET  # beside `token_ids`


class InfillAnswer(Struct):
    """What fills a gap, or the new part of it, in llama.cpp's fields.

    Attributes:
        tokens: ids of the new tokens; a whole answer has them with `return_token_ids`.
        stop: it is the last part.
        stop_type: what ended it: none, eos (an end token), limit or word (a stop text).
        tokens_evaluated: of the prompt; `tokens_cached` of them had cached pages.
        tokens_predicted: generated so far.
        weight_versions: of `tokens`.
    """

    content: str
    tokens: list[int]
    stop: bool
    model: str
    tokens_evaluated: int
    tokens_cached: int
    tokens_predicted: int
    stop_type: str = "none"
    stopping_word: str = ""
    index: int = 0
    weight_versions: WeightVersions | UnsetType = UNSET


class Alternative(Struct):
    """A token and its log-probability; `bytes`: of tokens that are no whole characters, too."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(Alternative):
    """A token of an answer, with the most likely alternatives."""

    top_logprobs: list[Alternative] = []


class ChatLogprobs(Struct):
    """Log-probabilities of an answer's tokens."""

    content: list[ChatToken]
    refusal: None = None


class FunctionCall(Struct):
    """A called function; `arguments`: JSON, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(Struct):
    """A call of a tool."""

    id: str
    function: FunctionCall
    type: str = "function"


class FunctionDelta(Struct):
    """The new part of a call; the name comes once."""

    arguments: str
    name: str | UnsetType = UNSET


class CallDelta(Struct):
    """The new part of a call; the id comes once."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET

    def whole(self) -> ToolCall:
        """The call whose first part this is."""
        assert self.id is not UNSET and self.function.name is not UNSET
        return ToolCall(self.id, FunctionCall(self.function.name, self.function.arguments))


class AnswerMessage(Struct):
    """The assistant's text and calls; the text is null if there are only calls. `reasoning`, and
    the same as `reasoning_content`: the thought before them, if there is one.
    """

    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class Delta(Struct):
    """The new part of the assistant's thought, text and calls."""

    role: str | UnsetType = UNSET
    content: str | None | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChoice(Struct):
    """An answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    weight_versions: WeightVersions | UnsetType = UNSET


class ChatDelta(Struct):
    """The new part of an answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: WeightVersions | UnsetType = UNSET


class AnswerBody(Struct):
    """A whole answer, or a chunk of a stream. `usage` is null in chunks before the one that has it,
    and missing without `include_usage`.
    """

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage | None | UnsetType = UNSET
    system_fingerprint: str | None = None
    # Of chats; completions have both in each choice. Null and missing as there.
    prompt_logprobs: PromptLogprobs | None | UnsetType = UNSET
    prompt_token_ids: list[int] | None | UnsetType = UNSET
    obfuscation: str | UnsetType = UNSET  # of chunks, with `include_obfuscation`


class TextCompletion(AnswerBody):
    """A completion, or a chunk of one."""

    choices: list[CompletionChoice]


class ChatCompletion(AnswerBody):
    """A chat completion."""

    choices: list[ChatChoice]


class ChatChunk(AnswerBody):
    """A chunk of a chat completion."""

    choices: list[ChatDelta]


class ServedModel(Struct):
    """The served model, or an adapter of it (its `parent`), in vLLM's fields. `root` is itself."""

    id: str
    created: int
    max_model_len: int
    root: str
    parent: str | None = None
    object: str = "model"
    owned_by: str = "ridgeline"


class Models(Struct):
    """The list of served models."""

    data: list[ServedModel]
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
