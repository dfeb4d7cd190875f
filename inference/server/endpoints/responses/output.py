"""The items of an answer as they grow, and the events that tell of it."""

import copy
import secrets

from inference.server.endpoints.messages import News
from inference.server.endpoints.responses import bodies
from inference.server.endpoints.responses.bodies import (
    Event,
    Item,
    OutputCall,
    OutputMessage,
    OutputText,
)
from inference.server.protocol.responses import CallDelta, ChatToken


class Output:
    """One answer's.

    Attributes:
        items: so far.
    """

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._is_open = False  # the last of them

    def take(self, news: News, logprobs: list[ChatToken]) -> list[Event]:
        """What is told of the next piece of the answer."""
        found: list[Event] = []
        if news.content or logprobs:
            found += self._say(news.content, logprobs)
        for call in news.calls:
            found += self._call(call)
        return found

    def close(self, status: bodies.Status) -> list[Event]:
        """What is told at the end: an answer has at least a message, which may be empty."""
        found = [] if self.items else self._say("", [])
        return found + self._close(status)

    def _say(self, text: str, logprobs: list[ChatToken]) -> list[Event]:
        found: list[Event] = []
        if not (self._is_open and isinstance(self.items[-1], OutputMessage)):
            id = f"msg_{secrets.token_hex(14)}"
            found += self._close("completed") + self._open(OutputMessage(id))
            found.append(bodies.PartAdded(item_id=id, output_index=self._at, part=OutputText()))
        message = self.items[-1]
        assert isinstance(message, OutputMessage)
        part = message.content[0] if message.content else OutputText()
        message.content = [part]
        part.text += text
        part.logprobs += logprobs
        if text or logprobs:
            told = bodies.TextDelta(
                item_id=message.id, output_index=self._at, delta=text, logprobs=logprobs
            )
            found.append(told)
        return found

    def _call(self, news: CallDelta) -> list[Event]:
        found: list[Event] = []
        if isinstance(news.id, str):  # a new one
            found += self._close("completed")
            name = news.function.name
            assert isinstance(name, str)
            found += self._open(OutputCall(f"fc_{secrets.token_hex(14)}", news.id, name))
        call, more = self.items[-1], news.function.arguments
        assert isinstance(call, OutputCall)
        call.arguments += more
        if more:
            found.append(bodies.ArgumentsDelta(item_id=call.id, output_index=self._at, delta=more))
        return found

    @property
    def _at(self) -> int:
        return len(self.items) - 1

    def _open(self, item: Item) -> list[Event]:
        self.items.append(item)
        self._is_open = True
        return [bodies.ItemAdded(output_index=self._at, item=copy.copy(item))]

    def _close(self, status: bodies.Status) -> list[Event]:
        """Ends the last item, where it has not ended."""
        if not self._is_open:
            return []
        self._is_open = False
        item, at = self.items[-1], self._at
        item.status = status
        found: list[Event] = []
        if isinstance(item, OutputMessage):
            (part,) = item.content
            text, logprobs = part.text, part.logprobs
            found = [
                bodies.TextDone(item_id=item.id, output_index=at, text=text, logprobs=logprobs),
                bodies.PartDone(item_id=item.id, output_index=at, part=part),
            ]
        else:
            name, arguments = item.name, item.arguments
            found = [
                bodies.ArgumentsDone(
                    item_id=item.id, output_index=at, name=name, arguments=arguments
                )
            ]
        return [*found, bodies.ItemDone(output_index=at, item=item)]
