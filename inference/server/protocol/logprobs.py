"""Log-probabilities of tokens in the two shapes in which clients want them."""

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

_LOWEST = -9999.0  # JSON knows no infinity

Token = tuple[int, float | None, Alternatives]  # id, log-probability, alternatives


def tokens(
    ids: Sequence[int], logprobs: Sequence[float | None], tops: Sequence[Alternatives]
) -> list[Token]:
    """One by one; without alternatives in an engine that has none."""
    return list(zip(ids, logprobs, tops or [((), ())] * len(ids), strict=True))


def spelled(tokenizer: Tokenizer, id: int) -> str:
    """A token as text; one that is no whole characters by its bytes, so that no two are alike."""
    data = tokenizer.token_bytes(id, skip_special=False)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def id_name(id: int) -> str:
    """A token by its id, as vLLM names it."""
    return f"token_id:{id}"


class CompletionShape:
    """Those of one text as it grows."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special: bool, as_ids: bool, num_spelled: int = 0
    ):
        """`skip_special`: the text is without special tokens, but for the first `num_spelled`
        tokens; `as_ids`: names are token ids.
        """
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._as_ids = as_ids
        self._num_spelled = num_spelled
        self._decoder = incremental_decoder(tokenizer)
        self._offset = 0

    def of(self, tokens: Sequence[Token]) -> CompletionLogprobs:
        """Of further tokens."""
        logprobs = CompletionLogprobs([], [], [], [])
        for id, logprob, (ids, values) in tokens:
            name = self._name(id)
            logprobs.tokens.append(name)
            logprobs.text_offset.append(self._offset)
            logprobs.token_logprobs.append(None if logprob is None else max(logprob, _LOWEST))
            logprobs.top_logprobs.append(None if logprob is None else self._top(ids, values))
            if logprob is not None:  # another token of the same spelling does not replace it
                logprobs.top_logprobs[-1][name] = max(logprob, _LOWEST)  # type: ignore[index]
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
    """Those of an answer's tokens; `as_ids`: their names are token ids."""

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
    """Those of a prompt, as vLLM has them."""

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
