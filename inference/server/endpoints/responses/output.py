"""The items of an answer as they grow, and the events of their growth."""

import copy
import secrets

from inference.server.endpoints.messages import News, Thought
from inference.server.endpoints.responses import bodies
from inference.server.endpoints.responses.bodies import (
    Event,
    Item,
    OutputCall,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
)
from inference.server.protocol.responses import CallDelta, ChatToken


class Output:
    """The output of one answer."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._is_open = False  # the last item may grow
        self._logprobs: list[ChatToken] = []  # since the last text

    def take(self, news: News, logprobs: list[ChatToken]) -> list[Event]:
        """Adds the next piece of the answer; returns its events. Log-probabilities go with the next
        text; thoughts and calls have none.
        """
        self._logprobs += logprobs
        events: list[Event] = []
        for part in news.parts:
            if isinstance(part, Thought):
                events += self._think(part.text)
            else:
                events += self._say(part) if isinstance(part, str) else self._call(part)
        if self._is_thinking:
            self._logprobs = []
        return events

    def close(self, status: bodies.Status) -> list[Event]:
        """Ends the answer, which has a message or a call, perhaps an empty one; returns its events.
        An answer that was cut off may have a thought alone.
        """
        is_thought = self._is_thinking and status != "completed"
        last = self.items[-1] if self.items else None
        has_more = isinstance(last, OutputMessage) and self._logprobs
        ends = isinstance(last, OutputMessage | OutputCall) and not has_more
        events = [] if ends or is_thought else self._say("")
        return events + self._close(status)

    def _think(self, text: str) -> list[Event]:
        events: list[Event] = []
        if not self._is_thinking:
            id = f"rs_{secrets.token_hex(14)}"
            events += self._close("completed") + self._open(OutputReasoning(id))
            events.append(bodies.PartAdded(item_id=id, output_index=self._at, part=ReasoningText()))
        item = self.items[-1]
        assert isinstance(item, OutputReasoning)
        part = item.content[0] if item.content else ReasoningText()
        item.content = [part]
        part.text += text
        delta = bodies.ReasoningDelta(item_id=item.id, output_index=self._at, delta=text)
        return [*events, delta]

    @property
    def _is_thinking(self) -> bool:
        """Whether the last item is a thought that may grow."""
        return self._is_open and isinstance(self.items[-1], OutputReasoning)

    def _say(self, text: str) -> list[Event]:
        events: list[Event] = []
        logprobs, self._logprobs = self._logprobs, []
        if not (self._is_open and isinstance(self.items[-1], OutputMessage)):
            id = f"msg_{secrets.token_hex(14)}"
            events += self._close("completed") + self._open(OutputMessage(id))
            events.append(bodies.PartAdded(item_id=id, output_index=self._at, part=OutputText()))
        message = self.items[-1]
        assert isinstance(message, OutputMessage)
        part = message.content[0] if message.content else OutputText()
        message.content = [part]
        part.text += text
        part.logprobs += logprobs
        if text or logprobs:
            delta = bodies.TextDelta(
                item_id=message.id, output_index=self._at, delta=text, logprobs=logprobs
            )
            events.append(delta)
        return events

    def _call(self, news: CallDelta) -> list[Event]:
        events: list[Event] = []
        self._logprobs = []
        if isinstance(news.id, str):  # a new one
            events += self._close("completed")
            name = news.function.name
            assert isinstance(name, str)
            events += self._open(OutputCall(f"fc_{secrets.token_hex(14)}", news.id, name))
        call, more = self.items[-1], news.function.arguments
        assert isinstance(call, OutputCall)
        call.arguments += more
        if more:
            events.append(bodies.ArgumentsDelta(item_id=call.id, output_index=self._at, delta=more))
        return events

    @property
    def _at(self) -> int:
        return len(self.items) - 1

    def _open(self, item: Item) -> list[Event]:
        self.items.append(item)
        self._is_open = True
        return [bodies.ItemAdded(output_index=self._at, item=copy.copy(item))]

    def _close(self, status: bodies.Status) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        item, at = self.items[-1], self._at
        item.status = status
        events: list[Event] = []
        if isinstance(item, OutputMessage):
            (part,) = item.content
            text, logprobs = part.text, part.logprobs
            events = [
                bodies.TextDone(item_id=item.id, output_index=at, text=text, logprobs=logprobs),
                bodies.PartDone(item_id=item.id, output_index=at, part=part),
            ]
        elif isinstance(item, OutputReasoning):
            (thought,) = item.content
            events = [
                bodies.ReasoningDone(item_id=item.id, output_index=at, text=thought.text),
                bodies.PartDone(item_id=item.id, output_index=at, part=thought),
            ]
        else:
            name, arguments = item.name, item.arguments
            events = [
                bodies.ArgumentsDone(
                    item_id=item.id, output_index=at, name=name, arguments=arguments
                )
            ]
        return [*events, bodies.ItemDone(output_index=at, item=item)]
