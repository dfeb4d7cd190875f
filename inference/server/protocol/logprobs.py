"""Log-probabilities of tokens in the shapes of OpenAI's and vLLM's clients."""

from collections.abc import Sequence

from inference.outputs import Alternatives
from inference.server.protocol.responses import (
    Alternative,
    ChatLogprobs,
    ChatToken,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
)
from inference.text.detokenizer import incremental_decoder
from inference.text.tokenizer import Tokenizer

_LOWEST = -9999.0  # JSON has no infinity

Token = tuple[int, float | None, Alternatives]  # id, log-probability, alternatives


def tokens(
    ids: Sequence[int], logprobs: Sequence[float | None], tops: Sequence[Alternatives]
) -> list[Token]:
    """Zips the fields of tokens; `tops` may be empty."""
    return list(zip(ids, logprobs, tops or [((), ())] * len(ids), strict=True))


def spelled(tokenizer: Tokenizer, id: int) -> str:
    """A token as text, or as its bytes if these are no whole characters: all spellings differ."""
    data = tokenizer.token_bytes(id, skip_special=False)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def id_name(id: int) -> str:
    """The name of a token by its id, as in vLLM."""
    return f"token_id:{id}"


class CompletionShape:
    """Log-probabilities of one growing text, as completions have them."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special: bool, as_ids: bool, num_spelled: int = 0
    ):
        """`skip_special`: the text has no special tokens, except in its first `num_spelled` tokens;
        `as_ids`: names are token ids.
        """
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._as_ids = as_ids
        self._num_spelled = num_spelled
        self._decoder = incremental_decoder(tokenizer)
        self._offset = 0

    def of(self, tokens: Sequence[Token]) -> CompletionLogprobs:
        logprobs = CompletionLogprobs([], [], [], [])
        for id, logprob, (ids, values) in tokens:
            name = self._name(id)
            logprobs.tokens.append(name)
            logprobs.text_offset.append(self._offset)
            logprobs.token_logprobs.append(None if logprob is None else max(logprob, _LOWEST))
            top = None
            if logprob is not None:  # first, as in vLLM, also of tokens with the same spelling
                top = self._top((id, *ids), (logprob, *values))
            logprobs.top_logprobs.append(top)
            skip_special = self._skip_special and len(logprobs.tokens) > self._num_spelled
            self._offset += len(self._decoder.decode(id, skip_special))
        self._num_spelled -= len(logprobs.tokens)
        return logprobs

    def _name(self, id: int) -> str:
        return id_name(id) if self._as_ids else spelled(self._tokenizer, id)

    def _top(self, ids: Sequence[int], values: Sequence[float]) -> dict[str, float]:
        top: dict[str, float] = {}
        for id, value in zip(ids, values, strict=True):
            top.setdefault(self._name(id), max(value, _LOWEST))
        return top


def chat_shape(tokenizer: Tokenizer, tokens: Sequence[Token], as_ids: bool = False) -> ChatLogprobs:
    """Log-probabilities of an answer's tokens, as chats have them; `as_ids`: names are ids."""

    def alternative(id: int, logprob: float) -> tuple[str, float, list[int]]:
        data = tokenizer.token_bytes(id, skip_special=False)
        name = id_name(id) if as_ids else data.decode(errors="replace")
        return name, max(logprob, _LOWEST), list(data)

    return ChatLogprobs(
        [
            ChatToken(
                *alternative(id, _LOWEST if logprob is None else logprob),
                [Alternative(*alternative(*top)) for top in zip(ids, values, strict=True)],
            )
            for id, logprob, (ids, values) in tokens
        ]
    )


def prompt_shape(tokenizer: Tokenizer, tokens: Sequence[Token]) -> PromptLogprobs:
    """Log-probabilities of a prompt's tokens, as in vLLM."""

    def described(id: int, logprob: float, rank: int | None) -> PromptLogprob:
        return PromptLogprob(max(logprob, _LOWEST), rank, spelled(tokenizer, id))

    whole: PromptLogprobs = []
    for id, logprob, (ids, values) in tokens:
        if logprob is None:
            whole.append(None)
            continue
        tops = enumerate(zip(ids, values, strict=True), 1)
        ranked = {str(other): described(other, value, rank) for rank, (other, value) in tops}
        whole.append({str(id): described(id, logprob, None)} | ranked)
    return whole
