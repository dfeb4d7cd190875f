"""The service behind the endpoints: engine, text processing, limits, metrics."""

import dataclasses
import logging
import time

from inference.server.batches.batch_service import BatchService
from inference.server.client.engine_client import EngineClient, State
from inference.server.client.launch import Launcher
from inference.server.frames import Loaded
from inference.server.metrics import Metrics
from inference.server.protocol import parse
from inference.server.protocol.caller import Caller
from inference.server.protocol.errors import ApiError, invalid, unavailable
from inference.server.text_processor import TextProcessor
from inference.text.tool_calls import formats
from inference.text.tool_calls.formats import Format

_log = logging.getLogger(__name__)
QUEUED_PER_SEQ = 4  # waiting sequences for each slot


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of the HTTP process; times are seconds.

    Attributes:
        body_bytes, body_s: size of a request's body, and time to receive it.
        head_bytes, head_s: the same of its head.
        request_s: from a request to the end of its answer; a request may have a lower limit.
        queue_s: expected wait for a slot; a request that would wait longer is rejected.
        stall_s: a client that reads nothing for so long is disconnected.
        idle_s: silence of a stream after which a comment keeps the connection open.
        heartbeat_s: silence after which a ready engine counts as dead, and is ended.
        connections: requests that are answered at once.
        workers: processes that encode texts.
    """

    body_bytes: int = 4 << 20
    body_s: float = 30.0
    head_bytes: int = 32 << 10
    head_s: float = 10.0
    request_s: float = 600.0
    queue_s: float = 60.0
    stall_s: float = 30.0
    idle_s: float = 15.0
    heartbeat_s: float = 30.0
    connections: int = 1024
    workers: int = 2


class Service:
    """The engine, its text processing and metrics.

    Attributes:
        metrics: shown by `/metrics`.
        started: seconds since 1970.
        has_control: clients with a key for that may control the engine.
        num_keys: number of clients' keys; with several, no client may fill the queue.
        batches: files and batches of clients; None: none are stored here.
        is_draining: running requests continue, new ones are rejected.
    """

    def __init__(
        self,
        launcher: Launcher,
        limits: Limits = Limits(),
        served_model_name: str | None = None,
        tool_call_parser: str = formats.AUTO,
        warms_up: bool = False,
        batches: BatchService | None = None,
        restarts: bool = True,
    ):
        """`served_model_name`: of the model, for clients; None: the engine's name for it.
        `tool_call_parser`: name of the format of tool calls. `warms_up`: starts a text worker with
        the engine, not with the first text. `restarts`: an engine that ends is started again.
        """
        self.limits = limits
        self.client = EngineClient(launcher, self._load_texts, limits.heartbeat_s, restarts)
        self.started = int(time.time())
        self.has_control = False
        self.num_keys = 0
        self.batches = batches
        self.is_draining = False
        self.metrics = Metrics(self.client, lambda: self.model_name)
        self._served_model_name = served_model_name
        self._tool_call_parser = tool_call_parser
        self._warms_up = warms_up
        self._texts: TextProcessor | None = None

    @property
    def model_name(self) -> str:
        """The model's name for clients; "" until it is loaded."""
        if self._served_model_name is not None:
            return self._served_model_name
        return self.client.facts.model if self.client.facts else ""

    def adapter_of(self, requested: str | None) -> str | None:
        """The adapter that a request names as its model, if it does; raises an `ApiError` unless
        that is served: 404, or 503 while the model is loaded.
        """
        parse.check_model(requested, self.model_name, *self.adapters)
        return None if requested == self.model_name else requested

    @property
    def adapters(self) -> list[str]:
        """Names of those that requests may choose; raises an `ApiError` (503) as `facts`."""
        return self.client.control.adapters_beside(self.facts.adapters)

    @property
    def facts(self) -> Loaded:
        """The engine's description of itself; raises an `ApiError` (503) while it loads."""
        if self.client.facts is None:
            raise unavailable("the model is being loaded")
        return self.client.facts

    async def num_slots(self) -> int:
        """Waits until the engine has loaded the model; returns its number of slots."""
        await self.client.is_loaded.wait()
        return self.facts.num_slots

    @property
    def texts(self) -> TextProcessor:
        """Encodes and decodes text; raises an `ApiError` (503) while the model is loaded."""
        if self._texts is None:
            raise unavailable("the model is being loaded")
        return self._texts

    @property
    def tool_format(self) -> Format:
        """The model's format of tool calls; raises an `ApiError` without a tokenizer or model."""
        tokenizer = self.texts.tokenizer
        template = tokenizer.templates.get("tool_use", tokenizer.template)
        return formats.by_name(self._tool_call_parser, template)

    @property
    def is_alive(self) -> bool:
        """Whether the engine sent a message within `heartbeat_s`, or is not ready yet."""
        if self.client.state is State.ENDED:
            return False
        return (
            self.client.state is not State.READY or self.heartbeat_age_s < self.limits.heartbeat_s
        )

    @property
    def heartbeat_age_s(self) -> float:
        return time.monotonic() - self.client.heard_at

    def check_ready(self) -> None:
        """Raises an `ApiError` (503), with the state, unless new requests are served."""
        self.check_engine()
        self.client.control.check_awake()

    def check_engine(self) -> None:
        """As `check_ready`, whether or not the engine sleeps."""
        if self.is_draining:
            raise unavailable("the server is shutting down")
        if self.client.state is not State.READY:
            why = f": {self.client.trouble}" if self.client.trouble else ""
            raise unavailable(f"the engine is {self.client.state.value}{why}")
        if not self.is_alive:
            raise unavailable("the engine does not answer")

    def check_room(
        self, caller: Caller, num_prompts: int = 1, num_each: int = 1, priority: int = 0
    ) -> None:
        """Checks that requests are served, that the queue has room for this one, and that it would
        start in time.

        Args:
            num_prompts, num_each: prompts, and sequences of each.
            priority: among the client's requests; the lower value goes first.

        Raises:
            ApiError: 400, the request is too large for the queue; 429, the client has its share;
                503, the server is not ready, the queue is full or the wait too long.
        """
        self.check_ready()
        client, num_slots = self.client, self.facts.num_slots
        max_sequences = num_slots * (1 + QUEUED_PER_SEQ)
        num_sequences = num_prompts * num_each
        if num_sequences > max_sequences:
            detail = f", each with {num_each} sequences (n, or best_of)" if num_each > 1 else ""
            raise invalid(
                "prompt",
                f"holds {num_prompts} prompts{detail}, and this server takes at most "
                f"{max_sequences} sequences in one request",
            )
        num_left = max_sequences - client.num_sequences - num_sequences
        if caller.is_background:  # its batch bounds how many there are
            return
        if num_left < 0:
            self.metrics.rejected("queue_full")
            raise unavailable("too many requests wait for the engine", client.end_s(-num_left))
        # A client has its share if it has as many sequences as there are places left: half of all
        # places if it is alone (Choudhury and Hahne 1998, dynamic thresholds).
        num_held = client.num_held(caller.name)
        if self.num_keys > 1 and num_held > num_left:
            self.metrics.rejected("key_share")
            why = f"{num_held} sequences of this key run or wait, which is its share: wait for them"
            retry_s = client.end_s(num_held - num_left)
            raise ApiError(429, why, code="rate_limit_exceeded", retry_s=retry_s)
        wait_s = client.expected_wait_s(1, caller.name, priority)
        begins, left_s = f"the request would begin in {wait_s:.0f} s", caller.deadline.left_s
        if wait_s > left_s:
            self.metrics.rejected("deadline")
            raise unavailable(f"{begins}, and its deadline is in {left_s:.0f} s", wait_s - left_s)
        if wait_s > self.limits.queue_s:
            self.metrics.rejected("queue_time")
            why = f"{begins}, and here none waits longer than {self.limits.queue_s:g} s"
            raise unavailable(why, wait_s - self.limits.queue_s)

    async def _load_texts(self, facts: Loaded) -> None:
        """Loads the tokenizer, once: a restarted engine has the same."""
        if self._texts is None:
            texts = await TextProcessor.load(facts.text, facts.max_context, self.limits.workers)
            if self._warms_up:
                texts.warm_up()
            self._texts = texts
            if facts.text is not None and not self.tool_format.is_read:
                _log.warning(
                    "tool calls: the chat template's format, %s, is not read: they stay text "
                    "(--tool_call_parser names another)",
                    self.tool_format.name,
                )

    def close(self) -> None:
        if self._texts is not None:
            self._texts.close()
