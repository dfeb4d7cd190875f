"""The engine's end of the socket: it blocks, for a loop of one thread."""

import select
import socket
import threading
import time

from inference.server import frames
from inference.server.frames import ConnectionClosed, Message, ToEngine

_READ_BYTES = 1 << 20
_MAX_SEND_S = 60.0  # the other side reads all the time, whatever its clients do


class Channel:
    """Messages from and to the HTTP process. The socket's buffers bound the messages that wait to
    be read or sent; where they are full, the engine waits.
    """

    def __init__(self, connection: socket.socket):
        connection.settimeout(_MAX_SEND_S)
        self._connection = connection
        self._received = bytearray()
        self._sending = threading.Lock()

    def send(self, message: Message) -> None:
        """Sends a message; any thread may.

        Raises:
            ConnectionClosed: the other side has gone, or has not read for a minute.
        """
        try:
            with self._sending:
                self._connection.sendall(frames.encode(message))
        except OSError as error:
            raise ConnectionClosed(str(error)) from None

    def receive(self, timeout_s: float) -> list[ToEngine]:
        """Waits up to `timeout_s` for messages and returns them; raises `ConnectionClosed`."""
        deadline = time.monotonic() + timeout_s
        while True:
            remaining = max(0.0, deadline - time.monotonic())
            if not select.select([self._connection], [], [], remaining)[0]:
                return []
            self._read()
            if messages := self._take():
                return messages

    def close(self) -> None:
        self._connection.close()

    def _read(self) -> None:
        try:
            data = self._connection.recv(_READ_BYTES)
        except OSError as error:
            raise ConnectionClosed(str(error)) from None
        if not data:
            raise ConnectionClosed("the other side has closed it")
        self._received += data

    def _take(self) -> list[ToEngine]:
        """Removes the whole messages from the bytes received."""
        messages: list[ToEngine] = []
        start = 0
        while len(self._received) >= start + frames.HEADER_BYTES:
            body = start + frames.HEADER_BYTES
            end = body + frames.length(self._received[start:body])
            if len(self._received) < end:
                break
            messages.append(frames.TO_ENGINE.decode(memoryview(self._received)[body:end]))
            start = end
        del self._received[:start]
        return messages
