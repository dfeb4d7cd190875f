"""One request to a server and its answer as a stream: when each piece came, and what it was."""

import time

import msgspec

from inference.http_client.connections import Answer, Connections, Unanswered

_DONE = b"[DONE]"
_MAX_REASON = 300  # characters


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    prompt_tokens_details: dict[str, object] | None = None


class _Chunk(msgspec.Struct):
    """What is read of an event."""

    choices: list[msgspec.Raw] | None = None
    usage: _Usage | None = None
    error: object = None


_DECODER = msgspec.json.Decoder(_Chunk)


class Stream:
    """One of them; times are those of `time.perf_counter`.

    Attributes:
        start_s: when the request was due.
        sent_s: when it was sent.
        event_s: when each event with a choice came: a token, or a few. The first may have no text.
        error: why it failed, as the server or the connection says; "" where it did not.
        num_prompt_tokens, num_output_tokens: as the server counted them; None where it did not.
        num_cached_tokens: those of the prompt that the server says it had in a cache.
    """

    def __init__(self, start_s: float):
        self.start_s = start_s
        self.sent_s = 0.0
        self.event_s: list[float] = []
        self.error = ""
        self.num_prompt_tokens: int | None = None
        self.num_output_tokens: int | None = None
        self.num_cached_tokens = 0
        self._unread = b""

    async def run(self, connections: Connections, request: bytes) -> None:
        """Sends the request, and returns at the end of its answer; whatever fails is `error`."""
        self.sent_s = time.perf_counter()
        try:
            answer = await connections.send(request, self._on_body)
        except Unanswered as error:
            self.error = self.error or str(error)
            return
        if answer.status != 200:
            self.error = refusal(answer)
        elif not self.event_s and not self.error:
            self.error = "the answer ended before its first token"

    @property
    def is_ok(self) -> bool:
        return not self.error

    @property
    def num_tokens(self) -> int:
        """Of its answer: what the server says, else the number of events."""
        return len(self.event_s) if self.num_output_tokens is None else self.num_output_tokens

    @property
    def ttft_s(self) -> float:
        """From when it was due to the first event."""
        return self.event_s[0] - self.start_s

    @property
    def gaps_s(self) -> list[float]:
        """Between consecutive events."""
        pairs = zip(self.event_s, self.event_s[1:], strict=False)
        return [after - before for before, after in pairs]

    @property
    def e2e_s(self) -> float:
        """From when it was due to the last event."""
        return self.event_s[-1] - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None where there is no other."""
        num_intervals = self.num_tokens - 1
        return (self.event_s[-1] - self.event_s[0]) / num_intervals if num_intervals > 0 else None

    def _on_body(self, data: bytes) -> None:
        now = time.perf_counter()
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._on_event(line[5:].strip(), now)

    def _on_event(self, data: bytes, now: float) -> None:
        if data == _DONE:
            return
        try:
            chunk = _DECODER.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            self.error = self.error or f"an event is not as it should be: {data[:80]!r}"
            return
        if chunk.error is not None:
            self.error = self.error or _message(chunk.error)
        if chunk.choices:
            self.event_s.append(now)
        if (usage := chunk.usage) is not None:
            self.num_output_tokens = usage.completion_tokens
            self.num_prompt_tokens = usage.prompt_tokens
            cached = (usage.prompt_tokens_details or {}).get("cached_tokens")
            self.num_cached_tokens = cached if isinstance(cached, int) else 0


def refusal(answer: Answer) -> str:
    """What a server says that does not answer, in one line."""
    try:
        body = msgspec.json.decode(answer.body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return f"{answer.status}"
    error = body.get("error", body) if isinstance(body, dict) else body
    return f"{answer.status} {_message(error)}"


def _message(error: object) -> str:
    reason = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(reason).split())[:_MAX_REASON]
